"""`clinrl export` and `clinrl push`: the names that are given, checked, and what writes the export."""

from importlib import import_module
from pathlib import Path
from typing import Any

from clinrl.cli.names import check_name
from clinrl.config.params import Params

ACTIONS = {"inspect": ("inspect_log", "NAME"), "lm-eval": ("lm_eval", "TASK")}
"""What is exported to the module that writes it, and the kind of name that it takes."""


def export(params: Params, action: str, name: str, *, out: Path | None, **options: Any) -> None:
    """Write what another tool opens. Raises ParamsError for a name that the action does not take."""
    module, kind = ACTIONS[action]
    check_name(params, name, f"export {action}", kind=kind)
    import_module(f"clinrl.exports.{module}").stage(params, name, out=out, **options)


def push(params: Params, name: str, **options: Any) -> None:
    """Push a version or a merge to a hub."""
    import_module("clinrl.exports.hub").stage(params, name, **options)
