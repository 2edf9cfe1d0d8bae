"""A model on an exam, as one record: the cases, the decoding of each mode, and the graded answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from clinrl.analysis.costs import Costs, Probabilities, count
from clinrl.analysis.paired import Answers
from clinrl.config.model import Model
from clinrl.tasks.base import Task
from clinrl.tasks.importing import is_imported
from clinrl.types import Case, Graded


@dataclass(frozen=True, kw_only=True)
class Run:
    """A model on an exam; `graded` is empty until it answered."""

    model: Model
    cases: Sequence[Case]
    exam_digest: str
    modes: dict[str, dict[str, Any]]
    """How each mode decodes at the active scale, in the order of params.yaml."""
    adapter_digest: str = ""
    """Identity of the adapter, or of the full model, that answered."""
    graded: Mapping[str, Sequence[Graded]] = field(default_factory=dict)
    """Answers by mode, in the order of the cases. `<mode>.<variant>` holds those of cases with this input variant."""
    sampler: Mapping[str, str] = field(default_factory=dict)
    """The sampler that wrote the answers; empty at the embedded scale, and before there are answers."""
    probabilities: Mapping[str, Sequence[Probabilities | None]] = field(default_factory=dict)
    """Probabilities of the ordered answers, by mode, in the order of the cases; without modes where none were read."""

    @property
    def task(self) -> Task:
        return self.model.task

    @cached_property
    def golds(self) -> list[Any]:
        return [self.task.label(case) for case in self.cases]

    @cached_property
    def shown(self) -> list[Case]:
        """The cases as the model sees them."""
        return [self.model.sees(case) for case in self.cases]

    @cached_property
    def clusters(self) -> list[str] | None:
        """The cluster of each case, for intervals; None where cases are independent."""
        return clusters_of(self.task, self.cases)

    def variants(self, mode: str) -> dict[str, Sequence[Graded]]:
        """The graded answers of a mode by input variant; variants without answers are left out."""
        names = {variant: f"{mode}.{variant}" for variant in self.model.variants}
        return {variant: self.graded[name] for variant, name in names.items() if name in self.graded}

    def costs(self, mode: str) -> Costs | None:
        """The counts that thresholds on the probabilities of a mode reach; None where these were not read."""
        if mode not in self.probabilities:
            return None
        return count(self.task, self.golds, [line.answer for line in self.graded[mode]], self.probabilities[mode])

    def answers(self, mode: str) -> Answers:
        """The answers of a mode, for comparisons; `answers` is empty where none were given."""
        return Answers(
            name=self.model.name,
            task=self.task.name,
            task_version=self.task.version,
            mode=mode,
            mode_spec=self.modes[mode],
            exam_digest=self.exam_digest,
            golds=self.golds,
            answers=[line.answer for line in self.graded.get(mode, ())],
            clusters=self.clusters,
            sampler=self.sampler,
        )


def filled(given: Sequence[Graded], under: Sequence[Graded]) -> list[Graded]:
    """The answers under an input variant to all cases: a case without the variant keeps its answer as given."""
    answered = {line.case_id: line for line in under}
    return [answered.get(line.case_id, line) for line in given]


def unless_one(clusters: list[str] | None) -> list[str] | None:
    """The clusters; None, so that cases are drawn, if there is only one: draws of one cluster would not differ."""
    return None if clusters and len(set(clusters)) == 1 else clusters


def clusters_of(task: Task, cases: Sequence[Case]) -> list[str] | None:
    """The cluster of each case, for intervals; None where cases are independent.

    In a task that names no clusters, imported cases are clustered by patient if a patient came more than once.
    """
    if task.reporting.cluster is not None:
        return [task.reporting.cluster(case) for case in cases]
    patients = [case.group if is_imported(case) else case.id for case in cases]
    return patients if len(set(patients)) < len(patients) else None
