"""`clinrl export`: the name that an action takes, checked, and what writes the export."""

from importlib import import_module
from pathlib import Path
from typing import Any

from clinrl.cli.names import check_name
from clinrl.config.params import Params

ACTIONS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "inspect": ("inspect_log", "NAME", ("mode",)),
    "lm-eval": ("lm_eval", "TASK", ("open_exam",)),
    "openenv": ("openenv_manifest", "TASK", ()),
    "verifiers": ("verifiers", "TASK", ("open_exam",)),
}
"""What is exported to the module that writes it, the kind of name that it takes, and its options beside `out`."""


def export(
    params: Params,
    action: str,
    name: str,
    *,
    out: Path | None = None,
    mode: str | None = None,
    open_exam: bool = False,
) -> None:
    """Write what another tool opens. Raises ParamsError for a name that the action does not take."""
    module, kind, takes = ACTIONS[action]
    check_name(params, name, f"export {action}", kind=kind)
    given = {"mode": mode, "open_exam": open_exam}
    options: dict[str, Any] = {option: given[option] for option in takes}
    import_module(f"clinrl.exports.{module}").stage(params, name, out=out, **options)
