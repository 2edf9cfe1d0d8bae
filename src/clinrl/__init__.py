"""clinrl: trains, evaluates, merges and registers GRPO LoRA adapters for clinical reasoning. Research only.

The names that a notebook needs are here; each is imported on its first use. docs/api.md describes them.
"""

from typing import TYPE_CHECKING, Any

import clinrl_loader as clinrl_loader  # before MLflow can import the copy in a registered folder

if TYPE_CHECKING:
    from clinrl.config.params import load_params as load_params
    from clinrl.evaluation.notebook import compare as compare
    from clinrl.evaluation.notebook import evaluate as evaluate
    from clinrl.registry.versions import load_champion as load_champion
    from clinrl.tasks.base import get_task as get_task

__version__ = "0.1.0"
__all__ = ["compare", "evaluate", "get_task", "load_champion", "load_params"]

_HOMES = {
    "compare": "evaluation.notebook",
    "evaluate": "evaluation.notebook",
    "get_task": "tasks.base",
    "load_champion": "registry.versions",
    "load_params": "config.params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'clinrl' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"clinrl.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
