"""Resolves the name of a model: a version, a merge, or the base of a task."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel

from clinrl import paths
from clinrl.config.recipes import GrpoProfile, SftProfile
from clinrl.config.schema import Blend, Fold
from clinrl.errors import ParamsError, did_you_mean
from clinrl.tasks.base import GIVEN, Task, as_variant, get_task
from clinrl.types import Case

if TYPE_CHECKING:
    from clinrl.config.params import Params

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


def resolve(params: "Params", name: str) -> Model:
    """The model with a name. Raises ParamsError for a name that params.yaml does not have."""
    if name in params.roots:
        task = get_task(params.roots[name])
        return Model(
            name=name, kind="base", task=task, parts=(), parent=None, compared=None, data=None,
            exam=params.bases[task.name].exam, reward=task.Reward(), folder=paths.adapter(name), registered=task.name,
            variants=tuple(task.reporting.variants),
        )  # fmt: skip
    merge = params.merges.all.get(name)
    if merge is None and name not in params.versions:
        allowed = did_you_mean(name, [*params.versions, *params.merges.all, *params.roots])
        raise ParamsError(f"{name!r} is neither a version, a merge nor the base of a task; {allowed}")
    parts = params.parts(name)
    spec = params.versions[parts[0]]
    task, profile = get_task(spec.task), params.profiles[spec.profile]
    parent = parts[0] if merge else spec.parent
    theirs = params.bases[spec.task].exam if parent in params.roots else params.versions[parent].exam
    is_full = isinstance(merge, Fold) or (isinstance(merge, Blend) and not merge.is_adapter)
    return Model(
        name=name,
        kind="merge" if merge else "version",
        task=task,
        parts=parts,
        parent=parent,
        compared=parent if theirs == spec.exam else None,
        data=None if merge else spec.data,
        exam=spec.exam,
        reward=task.Reward() if isinstance(profile, SftProfile) else params.reward(parts[0]),
        folder=paths.merged(name) if merge else paths.adapter(name),
        registered=task.name + MERGED if is_full else task.name,
        variant=profile.view,
        variants=tuple(task.reporting.variants) if profile.view == GIVEN else (),
        placebo=profile.placebo if isinstance(profile, GrpoProfile) else "",
    )
