"""`clinrl plan`: the versions of params.yaml, and how the stages stand that build them."""

import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clinrl.errors import ArtefactError
from clinrl.provenance import dvc_yaml
from clinrl.provenance.dvc_yaml import State
from clinrl.reports.tables import show
from clinrl.runtime import dvc_state

if TYPE_CHECKING:
    from clinrl.config.params import Params

STAGES = ("dataset", "validate", "probe", "train", "evaluate")
COLUMNS = ("version", "parent", "data", "profile", "method", "steps", "seed", *STAGES, "why")


def stage(params: "Params", version: str | None = None, *, as_json: bool = False) -> None:
    """Print the plan of one version's lineage, or of all versions: parents come before children.

    A table on a terminal, tab-separated lines under a header otherwise, a JSON list with `as_json`. DVC judges a stage
    by its inputs as they are now, so what follows a stale stage may still be called up to date. Steps are those of the
    active scale. Raises ParamsError for an unknown version, and Refused as `dvc_state.fence` does.
    """
    names = params.lineage(version) if version else _parents_first(params)
    addresses = {name: _addresses(params, name) for name in names}
    states = dvc_states({address for row in addresses.values() for address in row.values()})
    rows = [
        _row(params, name, {stage: states[address] for stage, address in addresses[name].items()}) for name in names
    ]
    show(COLUMNS, rows, as_json=as_json)


def _parents_first(params: "Params") -> Sequence[str]:
    return list(dict.fromkeys(name for version in params.versions for name in params.lineage(version)))


def _addresses(params: "Params", version: str) -> dict[str, str]:
    """The DVC address of each stage that a version needs."""
    made, validated = params.data_stages(params.versions[version].data)
    return {stage: f"{stage}@{version}" for stage in STAGES} | {"dataset": made, "validate": validated}


def _row(params: "Params", name: str, states: Mapping[str, State]) -> dict[str, Any]:
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


def dvc_states(addresses: Collection[str]) -> dict[str, State]:
    """How stages stand, as `dvc status` would say it. Where there is no DVC project, or a file of it cannot be read,
    all are unknown, and a sentence on stderr says why. Raises Refused as `dvc_state.fence` does.
    """
    if not addresses:
        return {}
    if not Path(".dvc").is_dir():
        print("clinrl: no .dvc folder here, so nothing is known about the stages", file=sys.stderr)
        return dict.fromkeys(addresses, "unknown")
    dvc_state.fence()
    try:
        states = dvc_yaml.states(addresses)
    except ArtefactError as error:
        print(f"clinrl: {error}", file=sys.stderr)
        return dict.fromkeys(addresses, "unknown")
    if absent := [address for address, state in states.items() if state == "unknown"]:
        print(f"clinrl: {dvc_yaml.PIPELINE} has no stage {', '.join(sorted(absent))}", file=sys.stderr)
    return states
