"""How a decision describes answers: each policy's metrics, the candidate's lead over it, and a change plan's test."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from clinrl.analysis.exam import estimates
from clinrl.analysis.paired import Answers, ByMode, verdicts
from clinrl.config.change_plan import Protocol
from clinrl.intervals import mean, no_better, paired
from clinrl.release.budget import Look
from clinrl.tasks.base import Task
from clinrl.tasks.parts import Share, Statistic
from clinrl.types import Estimate, Strict

BOTH_MODES = "all modes"
"""The `mode` of a finding about all modes together."""
TEST, TEST_OF_CLUSTERS = (f"randomisation of {what}, averaged over modes" for what in ("cases", "clusters"))
"""Names of the test. A look's digest includes them, so that the result of another test answers another question."""
CHAMPION = "the champion"
"""The champion's name in sentences and as the key of a rival."""


class Finding(Strict):
    """The result of one limit in one mode."""

    metric: str
    mode: str
    limit: str
    """The limit in words, such as "max 0.02"."""
    observed: float | None
    """The metric, or its change against the champion; None if it could not be measured."""
    passed: bool
    sentence: str

    @classmethod
    def of(
        cls, metric: str, mode: str, limit: str, found: Estimate | None, *, passed: bool, sentence: str
    ) -> "Finding":
        """The finding on a metric or a change; `found` is None if it could not be measured."""
        observed = None if found is None else found.value
        return cls(metric=metric, mode=mode, limit=limit, observed=observed, passed=passed, sentence=sentence)


class FormRow(Strict):
    """One policy's result in one mode of the exam, as shown to the person who is asked to approve."""

    mode: str
    name: str
    role: Literal["candidate", "rival", "simple policy"]
    """rival: the champion, or the version that a full model was made of."""
    metrics: dict[str, Estimate]
    """The metrics that the task shows (`Reporting.approval`), as far as they are defined on this exam."""
    ahead: dict[str, Estimate]
    """The candidate's metrics minus this row's, on the same cases; empty for the candidate itself."""


def form(
    task: Task, candidate: ByMode, rivals: Mapping[str, ByMode], policies: Mapping[str, ByMode]
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
    found = estimates({metric: task.all_metrics[metric]}, answers.golds, answers.answers, answers.clusters)
    return found.get(metric)


def paired_change(
    kind: Share | Statistic, metric: str, mine: Answers, theirs: Answers, margin_level: float | None = None
) -> Estimate | None:
    """Mine minus theirs in a share, on the same cases, with a paired interval; None for a statistic or without cases.

    Where cases come in clusters, the interval is Student's t over clusters and not a bootstrap, whose draws are too few
    for the levels that are left to late looks. `margin_level` widens it as `paired` says.
    """
    pairs = verdicts(kind, mine.golds, mine.answers, theirs.answers) if isinstance(kind, Share) else {}
    if not pairs:
        return None
    a, b = ([pair[side] for pair in pairs.values()] for side in (0, 1))
    clusters = None if mine.clusters is None else [mine.clusters[i] for i in pairs]
    return paired(metric, theirs.name, a, b, margin_level, clusters).difference


def gain(kind: Share, mine: ByMode, theirs: ByMode) -> tuple[Estimate, float] | None:
    """Mine minus theirs in a share, averaged over modes, and the one-sided p of the hypothesis "no better".

    Only cases for which the share is defined in every mode count; None without such a case. p is from the exact paired
    randomisation test: its unit is a case with all its modes, or a whole cluster where cases come in clusters.
    """
    by_mode = {mode: verdicts(kind, own.golds, own.answers, theirs[mode].answers) for mode, own in mine.items()}
    inside = set.intersection(*map(set, by_mode.values()))
    if not inside:
        return None
    gains = [sum(a - b for a, b in (pairs[i] for pairs in by_mode.values())) for i in inside]
    clusters = next(iter(mine.values())).clusters
    names = None if clusters is None else [clusters[i] for i in inside]
    change = mean([gained / len(by_mode) for gained in gains], names)
    apart = Counter[Any]()
    for name, gained in zip(names or inside, gains, strict=True):
        apart[name] += gained
    counts = Counter(map(abs, apart.values()))
    sizes = [counts[size] for size in range(1, max(counts) + 1)]
    return change, no_better((-1 if kind.worse == "higher" else 1) * sum(gains), sizes)


def compare(task: Task, protocol: Protocol, look: Look, candidate: ByMode, champion: ByMode) -> Iterator[Finding]:
    """Findings on whether a candidate beats the champion on average over modes, and in none is worse by a margin."""
    level, metric = look.level, protocol.superior
    change, p = gain(task.shares[metric], candidate, champion) or (None, 1.0)
    if change is None:
        sentence = f"{metric} could not be measured against {CHAMPION}; it must be better"
    else:
        sentence = (
            f"{metric} changes by {change.value:+.4g} against {CHAMPION} on the same cases, averaged over "
            f"{' and '.join(candidate)}, one-sided p = {p:.4g}; look {look.number} of {look.most} at this exam may "
            f"spend {level:.4g}, so p must be at most that"
        )
    limit = f"better than {CHAMPION}, p at most {level:.4g}"
    yield Finding.of(metric, BOTH_MODES, limit, change, passed=p <= level, sentence=sentence)
    for metric, margin in protocol.not_worse.items():
        for mode, mine in candidate.items():
            sign = -1 if task.metrics[metric].worse == "higher" else 1
            change = paired_change(task.metrics[metric], metric, mine, champion[mode], 1 - 2 * level)
            worst = None if change is None else sign * (change.low if sign > 0 else change.high)
            sentence = (
                f"{metric} ({mode}) may be worse than {CHAMPION} by "
                f"{'an unknown amount' if worst is None else format(max(0.0, -worst), '.4g')} on the same cases, with "
                f"an error of {level:.4g}; the plan asks for less than {margin:g}"
            )
            limit = f"worse than {CHAMPION} by less than {margin:g}, at {level:.4g}"
            passed = worst is not None and worst > -margin
            yield Finding.of(metric, mode, limit, change, passed=passed, sentence=sentence)
