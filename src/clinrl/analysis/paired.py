"""Comparisons of two models, or two modes, on one exam: whether they are comparable, and the paired tests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any

from clinrl.errors import ArtefactError
from clinrl.intervals import Paired, paired, rate
from clinrl.tasks.base import Task, get_task
from clinrl.tasks.parts import Share
from clinrl.types import Unreadable

if TYPE_CHECKING:
    from clinrl.analysis.exam import EvalReport


@dataclass(frozen=True, kw_only=True)
class Answers:
    """The answers of one model to one exam in one mode, in exam order."""

    name: str
    task: str
    task_version: int
    mode: str
    mode_spec: Mapping[str, Any]
    exam_digest: str
    golds: Sequence[Any]
    answers: Sequence[Any]
    under: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Answers by input variant; a case without the variant keeps its answer as given."""
    clusters: Sequence[str] | None = None
    """The cluster of each case, for intervals; None where cases are independent."""
    sampler: Mapping[str, str] = field(default_factory=dict)
    """The sampler that wrote the answers; empty at the embedded scale, and where there are no answers yet."""


ByMode = Mapping[str, Answers]
"""The answers of one model to one exam, by mode."""


def compare(a: Answers, b: Answers) -> tuple[Paired, ...]:
    """Paired tests of `a` against `b` on the compared shares. Raises ArtefactError if the two took different exams."""
    comparable(a, b)
    task = get_task(a.task)
    alike = patients(task, a.clusters)
    return tuple(paired_on(task, metric, b.name, a.golds, a.answers, b.answers, alike) for metric in task.compared)


def patients(task: Task, clusters: Sequence[str] | None) -> Sequence[str] | None:
    """The clusters of paired tests: the patients of imported cases, if a patient came more than once.

    None for a task that names clusters of its own: its tests count single cases until its next version, because its
    reports in git do.
    """
    return clusters if task.reporting.cluster is None else None


def comparable(a: "Answers | EvalReport", b: "Answers | EvalReport") -> None:
    """Raise ArtefactError naming the difference if two reports, or two sets of answers, are not comparable."""
    for what, mine, theirs in (
        ("task", a.task, b.task),
        ("task version", a.task_version, b.task_version),
        ("exam digest", a.exam_digest, b.exam_digest),
        ("mode", a.mode, b.mode),
        ("decoding of the mode", dict(a.mode_spec), dict(b.mode_spec)),
    ):
        if mine != theirs:
            raise ArtefactError(
                f"{a.name} and {b.name} cannot be compared: their {what} differs ({mine} and {theirs}); "
                f"evaluate both on the same exam, in the same mode and at the same task version"
            )
    same_sampler(a.name, a.sampler, b.name, b.sampler)


def same_sampler(first: str, of_first: Mapping[str, str], second: str, of_second: Mapping[str, str]) -> None:
    """Raise ArtefactError if two samplers wrote the answers of two models; an empty sampler is unknown and passes."""
    mine, theirs = (" ".join(one[key] for key in ("name", "version") if one) for one in (of_first, of_second))
    if mine and theirs and mine != theirs:
        raise ArtefactError(
            f"{first} and {second} cannot be compared: {mine} wrote the answers of one, {theirs} those of the other, "
            "which changes answers by itself; evaluate both with one sampler (`sampler` in machine.yaml)"
        )


def between_modes(
    task: Task, golds: Sequence[Any], answers: Mapping[str, Sequence[Any]], clusters: Sequence[str] | None = None
) -> dict[str, Any]:
    """Agreement of the modes of one version, and paired tests for each pair of modes. Empty for a single mode.

    `mode_agreement` is the share of all cases with the same readable answer in every mode: two unreadable answers do
    not agree.
    """
    if len(answers) < 2:
        return {}
    alike = patients(task, clusters)
    rows = zip(*answers.values(), strict=True)
    same = [not isinstance(row[0], Unreadable) and len(set(row)) == 1 for row in rows]
    tests = {
        f"{a}_{b}": {one: paired_on(task, one, b, golds, answers[a], answers[b], alike) for one in task.compared}
        for a, b in combinations(answers, 2)
    }
    return {"mode_agreement": rate(same, alike), "between_modes": tests}


def paired_on(
    task: Task,
    metric: str,
    other: str,
    golds: Sequence[Any],
    mine: Sequence[Any],
    theirs: Sequence[Any],
    alike: Sequence[str] | None,
) -> Paired:
    """The paired test of one compared share on equal cases; `alike` are their `patients`."""
    pairs = verdicts(task.compared[metric], golds, mine, theirs)
    first, second = ([pair[side] for pair in pairs.values()] for side in (0, 1))
    return paired(metric, other, first, second, clusters=alike and [alike[i] for i in pairs])


def verdicts(
    kind: Share, golds: Sequence[Any], mine: Sequence[Any], theirs: Sequence[Any]
) -> dict[int, tuple[bool, bool]]:
    """Whether each of the two answers to a case counts for a share, by the case's index, where both are defined.

    A case outside a share's denominator is outside for both, since the denominator depends on gold alone.
    """
    pairs = enumerate((kind.of(gold, a), kind.of(gold, b)) for gold, a, b in zip(golds, mine, theirs, strict=True))
    return {i: (bool(a), bool(b)) for i, (a, b) in pairs if a is not None and b is not None}
