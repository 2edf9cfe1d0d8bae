"""The form that an approver sees: who answered the exam how well, and the candidate's lead over each."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from clinrl.analysis.exam import estimates
from clinrl.analysis.paired import Answers
from clinrl.intervals import LEVEL, no_better, paired, paired_means, rate
from clinrl.tasks.base import Task
from clinrl.tasks.parts import Share, Statistic
from clinrl.types import Estimate, Strict, Unreadable


class Finding(Strict):
    """One limit, held against one mode."""

    metric: str
    mode: str
    limit: str
    """The limit in words, as "max 0.02"."""
    observed: float | None
    """The metric, or its change against the champion; None if it could not be measured."""
    passed: bool
    sentence: str

    @classmethod
    def of(
        cls, metric: str, mode: str, limit: str, found: Estimate | None, *, passed: bool, sentence: str
    ) -> "Finding":
        """The finding on a metric or a change; None if it could not be measured."""
        observed = None if found is None else found.value
        return cls(metric=metric, mode=mode, limit=limit, observed=observed, passed=passed, sentence=sentence)


class FormRow(Strict):
    """One who answered the exam in one mode, as the person who is asked to approve sees it."""

    mode: str
    name: str
    role: Literal["candidate", "rival", "simple policy"]
    """rival: the champion, or the version that a full model was made of."""
    metrics: dict[str, Estimate]
    """What the task shows (`Reporting.approval`) and is defined on this exam."""
    ahead: dict[str, Estimate]
    """The same for the candidate minus this one, on the same cases; empty for the candidate itself."""


def form(
    task: Task,
    candidate: Mapping[str, Answers],
    rivals: Mapping[str, Mapping[str, Answers]],
    policies: Mapping[str, Mapping[str, Answers]],
) -> Iterator[FormRow]:
    """The rows of the form: the candidate, its rivals and every simple policy, mode by mode."""
    for mode, mine in candidate.items():
        rows: list[tuple[Literal["candidate", "rival", "simple policy"], Answers]] = [("candidate", mine)]
        rows += [("rival", rival[mode]) for rival in rivals.values()]
        rows += [("simple policy", policy[mode]) for policy in policies.values()]
        for role, theirs in rows:
            values = {metric: value_of(task, metric, theirs) for metric in task.reporting.approval}
            changes = (
                {}
                if role == "candidate"
                else {metric: paired_change(task.metrics[metric], metric, mine, theirs) for metric in values}
            )
            yield FormRow(
                mode=mode,
                name=theirs.name,
                role=role,
                metrics={metric: value for metric, value in values.items() if value is not None},
                ahead={metric: change for metric, change in changes.items() if change is not None},
            )


def value_of(task: Task, metric: str, answers: Answers) -> Estimate | None:
    """A metric on the answers of one mode; None where it is not defined on them."""
    if metric == "no_parse":
        return rate([isinstance(answer, Unreadable) for answer in answers.answers], answers.clusters)
    found = estimates({metric: task.metrics[metric]}, answers.golds, answers.answers, answers.clusters)
    return found.get(metric)


def paired_change(
    kind: Share | Statistic | None, metric: str, mine: Answers, theirs: Answers, level: float = LEVEL
) -> Estimate | None:
    """Mine minus theirs in a share, on the same cases, with a paired interval; None where it is not defined on them."""
    a, b, clusters = _on_same_cases(kind, mine, theirs)
    if not a:
        return None
    if clusters is None:
        return paired(metric, theirs.name, a, b, level).difference
    return paired_means([*map(float, a)], [*map(float, b)], clusters, level)[0]


def no_better_p(kind: Share, mine: Answers, theirs: Answers) -> float | None:
    """One-sided p of mine being no better than theirs in a share, on the same cases; None where it is not defined.

    McNemar's exact test. Where cases are alike within clusters: twice the bootstrap's tail, halved again.
    """
    a, b, clusters = _on_same_cases(kind, mine, theirs)
    if not a:
        return None
    if kind.worse == "higher":
        a, b = b, a
    if clusters is not None:
        difference, p = paired_means([*map(float, a)], [*map(float, b)], clusters)
        return p / 2 if difference.value > 0 else 1 - p / 2
    pairs = list(zip(a, b, strict=True))
    return float(no_better(pairs.count((True, False)), pairs.count((False, True))))


def _on_same_cases(
    kind: Share | Statistic | None, mine: Answers, theirs: Answers
) -> tuple[list[bool], list[bool], list[str] | None]:
    """For which cases a share holds, of mine and of theirs, and their clusters, where it is defined for both."""

    def verdicts(answers: Sequence[Any]) -> list[bool | None]:
        if isinstance(kind, Share):
            return [kind.of(gold, answer) for gold, answer in zip(mine.golds, answers, strict=True)]
        return [isinstance(answer, Unreadable) for answer in answers]

    pairs = list(zip(verdicts(mine.answers), verdicts(theirs.answers), strict=True))
    inside = [i for i, (a, b) in enumerate(pairs) if a is not None and b is not None]
    a, b = ([bool(pairs[i][side]) for i in inside] for side in (0, 1))
    return a, b, None if mine.clusters is None else [mine.clusters[i] for i in inside]
