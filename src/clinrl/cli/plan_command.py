"""`clinrl plan`: the table of the versions, or the tree of a task with how its gates decided."""

from contextlib import suppress

from clinrl import paths
from clinrl.config.params import Params
from clinrl.errors import ParamsError, Refused
from clinrl.pipeline import plan as plans
from clinrl.release import audit_log


def plan(params: Params, version: str | None = None, *, graph: str | None = None, as_json: bool = False) -> None:
    """Print the plan of a version's lineage or of all, or with `graph` the tree of a task; of each if that is empty.

    Raises ParamsError for an unknown version or task.
    """
    if graph is None:
        plans.stage(params, version, as_json=as_json)
    elif version or as_json:
        raise ParamsError("--graph draws the tree of a task; leave the version and --json out")
    else:
        plans.draw(params, graph, gates=_gates())


def _gates() -> dict[str, str]:
    """How the last decision on each version ended, as far as there is an audit file that can be read."""
    with suppress(Refused):
        entries = audit_log.read(paths.audit_log()) if paths.audit_log().exists() else []
        decisions = [entry.body for entry in entries if entry.kind == "decision"]
        return {body["candidate"]: "passed" if body["promote"] else "refused" for body in decisions}
    return {}
