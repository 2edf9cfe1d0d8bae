"""`clinrl plan`: the versions of params.yaml and the states of their stages, as a table or a tree."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from clinrl.config.base import check_known
from clinrl.config.params import Params
from clinrl.errors import ArtefactError, ParamsError, echo
from clinrl.provenance import dvc_yaml
from clinrl.provenance.dvc_yaml import State
from clinrl.provenance.stages import STAGES, addresses_of
from clinrl.reports.tables import show
from clinrl.runtime import dvc_state

COLUMNS = ("version", "parent", "data", "profile", "method", "steps", "seed", *STAGES, "why")
WHAT = "a task, a comparison or a version"
"""The kinds of names that stand for versions, for error messages."""
NARROW = ("version", "method", "steps", "stands")
"""The columns that fit a terminal of 80 columns."""


def stage(params: Params, version: str | None = None, *, graph: str | None = None, as_json: bool = False) -> None:
    """Print the plan of one version's lineage, or of all versions: parents come before children.

    With `graph`, draw the tree of the task that `graph` names, or of every task if it is empty.

    The output is a table on a terminal, tab-separated lines under a header otherwise, a JSON list with `as_json`. DVC
    checks a stage against its present inputs, so a stage after a stale one may still be called up to date. Steps are
    those of the active scale. Raises ParamsError for an unknown version or task, and for `graph` together with a
    version or JSON, and Refused as `dvc_state.fence` does.
    """
    if graph is not None:
        if version or as_json:
            raise ParamsError("--graph draws the tree of a task; leave the version and --json out")
        draw(params, graph)
        return
    wanted = [version] if version else params.versions
    names = dict.fromkeys(before for name in wanted for before in params.lineage(name))
    rows = [_row(params, name, states) for name, states in _states_of(params, names).items()]
    if not as_json:
        rows = [row | {"stands": first_open({stage: row[stage] for stage in STAGES})} for row in rows]
    show(COLUMNS, rows, as_json=as_json, narrow=NARROW)


def first_open(states: Mapping[str, State]) -> str:
    """How far a version is built: its first stage that is not up to date, with its state; or `up to date`."""
    return next((f"{stage} {state}" for stage, state in states.items() if state != "up to date"), "up to date")


def generations(params: Params, what: str) -> list[list[str]]:
    """The versions of a task or of a comparison, or one version, with their ancestors, grouped by number of ancestors.

    Versions in one group do not depend on each other; each group is in the order of params.yaml. Raises ParamsError for
    an unknown name, and for one that more than one block has, where the section must be named too.
    """
    known: dict[str, Collection[str]] = {f"bases.{task}": params.versions_of(task) for task in params.bases}
    known |= {f"comparisons.{name}": comparison.versions for name, comparison in params.comparisons.items()}
    known |= {f"versions.{name}": [name] for name in params.versions}
    meant = [key for key in known if what in (key, key.partition(".")[2])]
    if len(meant) > 1:
        raise ParamsError(f"params.yaml has {' and '.join(meant)}; give one of these in place of {what}")
    if not meant:
        check_known("params.yaml", what, [*params.bases, *params.comparisons, *params.versions], WHAT)
    names = known[meant[0]]
    wanted = {*params.family(*names)}
    depths = {name: len(params.lineage(name)) for name in params.versions if name in wanted}
    return [[name for name, own in depths.items() if own == depth] for depth in sorted({*depths.values()})]


def _row(params: Params, name: str, states: Mapping[str, State]) -> dict[str, Any]:
    version = params.versions[name]
    return {
        "version": name,
        "parent": version.parent,
        "data": version.data,
        "profile": version.profile,
        "method": params.profiles[version.profile].method,
        "steps": params.trainer(version.profile).steps,
        "seed": version.seed,
        **states,
        "why": version.why,
    }


def _states_of(params: Params, names: Iterable[str]) -> dict[str, dict[str, State]]:
    """The states of each name's stages, by stage."""
    stages = {name: addresses_of(params, name) for name in names}
    states = dvc_states({address for row in stages.values() for address in row.values()})
    return {name: {stage: states[address] for stage, address in row.items()} for name, row in stages.items()}


def draw(params: Params, task: str = "") -> None:
    """Print the tree of a task, or of all tasks, with a line for each version. `dvc dag` would draw 10,963 columns.

    Raises ParamsError for an unknown task.
    """
    if task:
        check_known("params.yaml", task, params.bases, "a task with a base")
    trees = [list(_tree(params, f"{one}-base")) for one in ([task] if task else params.bases)]
    states = _states_of(params, [name for nodes in trees for name, _, _ in nodes])
    for nodes in trees:
        width, kinds = (max(len(node[place]) for node in nodes) for place in (1, 2))
        for name, drawn, kind in nodes:
            print(f"{drawn:<{width}}  {kind:<{kinds}}  {first_open(states[name])}")


def _tree(params: Params, root: str) -> Iterator[tuple[str, str, str]]:
    """The lines of a tree, its root first: the name, the name with the branches before it, and its kind."""
    nodes, blends = [(root, list[bool]())], params.merges.blends
    for place, (name, last) in enumerate(nodes, start=1):  # which grows by the children of each
        bars = "".join("   " if ends else "│  " for ends in last[:-1]) + ("└─ " if last[-1] else "├─ ") if last else ""
        yield name, bars + name + (f" (with {blends[name].second})" if name in blends else ""), kind_of(params, name)
        found = children(params, name)
        nodes[place:place] = [(child, [*last, child == found[-1]]) for child in found]


def kind_of(params: Params, name: str) -> str:
    """The kind of a node: base, fold, blend or rival, or for a version the method of its recipe."""
    if name in params.versions:
        return params.profiles[params.versions[name].profile].method
    if name in params.rivals:
        return "rival"
    return "base" if name in params.roots else "fold" if name in params.merges.folds else "blend"


def children(params: Params, name: str) -> list[str]:
    """The direct descendants of a node: merges first, then versions, then the rivals of a base."""
    return [
        *(fold for fold, spec in params.merges.folds.items() if spec.version == name),
        *(blend for blend, spec in params.merges.blends.items() if spec.first == name),
        *(version for version, spec in params.versions.items() if spec.parent == name),
        *(rival for rival, spec in params.rivals.items() if f"{spec.task}-base" == name),
    ]


def dvc_states(addresses: Collection[str]) -> dict[str, State]:
    """The states of stages, as from `dvc status`.

    Without a DVC project, or if a file of it cannot be read, all states are unknown, and a sentence on stderr says why.
    Raises Refused as `dvc_state.fence` does.
    """
    if not addresses:
        return {}
    if not Path(".dvc").is_dir():
        echo("no .dvc folder here, so nothing is known about the stages")
        return dict.fromkeys(addresses, "unknown")
    dvc_state.fence()
    try:
        states = dvc_yaml.states(addresses)
    except ArtefactError as error:
        echo(error)
        return dict.fromkeys(addresses, "unknown")
    if absent := [address for address, state in states.items() if state == "unknown"]:
        echo(f"{dvc_yaml.PIPELINE} has no stage {', '.join(sorted(absent))}")
    return states
