"""`clinrl export`: check the name that an action takes, and call the module that writes the export."""

from importlib import import_module
from pathlib import Path
from typing import Any

from clinrl.cli.names import check_name
from clinrl.config.params import Params

ACTIONS = {
    "inspect": ("inspect_log", "NAME"),
    "lm-eval": ("lm_eval", "TASK"),
    "openenv": ("openenv_manifest", "TASK"),
    "verifiers": ("verifiers", "TASK"),
}
"""Action to the module that writes its export, and the kind of name that it takes."""


def export(
    params: Params, action: str, name: str, *, out: Path | None = None, mode: str | None = None, open_exam: bool = False
) -> None:
    """Write an export for another tool. Raises ParamsError for a name that the action does not take."""
    module, kind = ACTIONS[action]
    check_name(params, name, f"export {action}", kind=kind)
    options: dict[str, Any] = {"mode": mode} if mode is not None else {"open_exam": True} if open_exam else {}
    import_module(f"clinrl.exports.{module}").stage(params, name, out=out, **options)
