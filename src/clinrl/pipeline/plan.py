"""`clinrl plan`: the versions of params.yaml, and what DVC says of the stages that build them."""

import json
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from clinrl.reports.tables import show
from clinrl.runtime import dvc_state

if TYPE_CHECKING:
    from clinrl.config.params import Params

State = Literal["up to date", "stale", "missing", "unknown"]
"""stale: an input or output changed since the stage ran. missing: its output is not there. unknown: DVC cannot say."""

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
    """What `dvc status` says of each address. All are unknown where there is no DVC project, or where DVC fails (one of
    them is being built, say); then its own first sentence goes to stderr. Raises Refused as `dvc_state.fence` does.
    """
    if not addresses:
        return {}
    if not Path(".dvc").is_dir():
        print("clinrl: no .dvc folder here, so nothing is known about the stages", file=sys.stderr)
        return dict.fromkeys(addresses, "unknown")
    dvc_state.fence()
    command = [sys.executable, "-m", "dvc", "status", "--json", *sorted(addresses)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = next((line for line in done.stderr.splitlines() if line.strip()), f"exit code {done.returncode}")
        print(f"clinrl: dvc status: {reason.removeprefix('ERROR: ')}", file=sys.stderr)
        return dict.fromkeys(addresses, "unknown")
    changed = json.loads(done.stdout)
    return {address: _state(changed.get(address, ())) for address in addresses}


def _state(changes: Sequence[str | Mapping[str, Mapping[str, str]]]) -> State:
    """The state of a stage from DVC's list of its changes; an unchanged stage has none.

    An entry is a mapping ("changed deps" or "changed outs" to paths), or a sentence such as "always changed".
    """
    if not changes:
        return "up to date"
    for change in changes:
        outs = change.get("changed outs", {}) if isinstance(change, Mapping) else {}
        # "not in cache" is also said of an output that is there but was never cached: only an absent one is missing.
        if any(how in ("deleted", "not in cache") and not Path(path).exists() for path, how in outs.items()):
            return "missing"
    return "stale"
