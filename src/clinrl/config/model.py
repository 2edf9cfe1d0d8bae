"""What a model is: a version, a merge, or the base of a task. `Params.model` finds it by its name."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from clinrl.tasks.base import GIVEN, Task, as_variant
from clinrl.types import Case

MERGED = "-merged"
"""Suffix of the registered model with a task's full models, which are registered apart from its adapters."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model to train, evaluate or register: its weights, its exam and its parent.

    A base has no parent and no training data. A merge has no training data; its parent is the first of its parts.
    """

    name: str
    kind: Literal["version", "merge", "base"]
    task: Task
    parts: tuple[str, ...]
    """The versions that a merge is made of; of a version, itself; of a base, none."""
    parent: str | None
    compared: str | None
    """The parent, if it takes the same exam: their answers are compared."""
    data: str | None
    exam: str
    reward: BaseModel
    folder: Path
    """An adapter above the task's base, or a full model."""
    registered: str
    """The registered model of MLflow that it is a version of: its task's adapters, or its task's full models."""
    variant: str = GIVEN
    """The input variant that it was trained on, and is shown here."""
    variants: tuple[str, ...] = ()
    """The input variants that it answers once more."""
    placebo: str = ""
    """What its training was paid in place of the task's score; empty: that score."""

    @property
    def stage(self) -> str:
        """The stage of dvc.yaml in which it takes its exam."""
        if self.kind == "base":
            return f"baseline@{self.task.name}"
        merge = "examine-blend" if len(self.parts) > 1 else "examine-fold"
        return f"{merge if self.kind == 'merge' else 'evaluate'}@{self.name}"

    def sees(self, case: Case) -> Case:
        """The case in the model's input variant."""
        return as_variant(self.task, case, self.variant)
