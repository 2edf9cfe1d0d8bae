"""The findings from counts: how served requests differ from the exam, and whether labels show too many errors."""

import math
from collections import Counter
from collections.abc import Sequence
from decimal import ROUND_CEILING, Context
from typing import Any, NamedTuple

from clinrl.analysis.exam import UNREADABLE, column
from clinrl.config.model import MERGED
from clinrl.config.params import Params
from clinrl.config.schema import Watch
from clinrl.errors import Refused
from clinrl.registry.versions import Entry
from clinrl.tasks.base import Task, get_task
from clinrl.types import Strict, Unreadable
from clinrl.watching import counts, store
from clinrl.watching.counts import Counts
from clinrl.watching.sequential import evidence, least

DRIFT, SAFETY = "drift", "safety"
"""Kinds of alarms."""
ALARM = "alarm"
"""The feature that counts notes about alarms, such as that one had its consequence."""
ROUNDED_UP = Context(prec=4, rounding=ROUND_CEILING)


class Finding(Strict):
    """A share of requests compared with its limit."""

    feature: str
    bucket: str
    """With `not` before it: all other buckets."""
    exam: float | None
    """The share of the exam's cases; None for a metric."""
    served: float
    low: float
    """Lower end of the confidence sequence of `served`, for this share alone."""
    n: int
    limit: float
    p: float
    """The p value of the share being within the limit: valid at every look, and for all findings of its kind
    together."""


class Standing(Strict):
    """The findings about a served version."""

    version: str
    digest: str
    requests: int
    """Those that were counted by the buckets of the present exam."""
    drift: tuple[Finding, ...]
    """The finding with the smallest p of each feature, in the order of p."""
    p: float
    """The p value of no drift."""
    safety: tuple[Finding, ...]
    """Empty without a label that the safety metric is about, or without a limit on it."""
    exposed: float | None
    """Share of these labels for which the safety metric's error is possible at all, such as critical patients. The
    limit is a share of all labels, so with fewer of these than in the exam, an alarm takes worse answers. None without
    a safety finding."""
    alarms: tuple[str, ...]
    raised: tuple[str, ...]
    """Alarms that had their consequence, a retraining or a rollback, or whose events were sent on the last day."""
    unseen: str
    """The reason why drift was not tested; empty if it was."""


Found = tuple[tuple[Finding, ...], float]
"""Findings of a kind, and p for all of them."""
NOTHING: Found = (), 1.0


class _Row(NamedTuple):
    """A share, as its counts on each day."""

    feature: str
    bucket: str
    exam: float | None
    limit: float
    hits: list[int]
    n: list[int]


def standing(params: Params, entry: Entry) -> Standing:
    """The standing of a registered version by its counts. Without its exam, labels are tested, but not drift."""
    settings, days = settings_of(params, entry.model), store.days(entry.model, entry.digest)
    total, asked, here = sum(days, Counts()), Counts(), {*params.versions, *params.merges.all}
    unlike, p, unseen = *NOTHING, ""
    try:
        by_exam = store.days(entry.model, counts.key(entry.digest, counts.exam_digest(params, entry.name)))
        asked = sum(by_exam, Counts())
        beside = {feature.partition(counts.SHADOW)[:2] for feature, _ in asked if counts.SHADOW in feature}
        shadows = sorted(name + infix for name, infix in beside if name.partition("@")[0] in here)
        unlike, p = drift(by_exam, counts.reference(params, entry.name, entry.digest, shadows)[1], settings)
    except Refused as refused:
        unseen = str(refused)
    harm, chance = safety(params, task_of(entry), days, settings)
    alarms = [kind for kind, of in ((DRIFT, p), (SAFETY, chance)) if of <= settings.alpha]
    return Standing(
        version=entry.name, digest=entry.digest, requests=_sums(asked)[counts.TEXT], drift=unlike, p=p, safety=harm,
        exposed=exposed(task_of(entry), total) if harm else None, alarms=tuple(alarms),
        raised=tuple(kind for kind in (DRIFT, SAFETY) if total[ALARM, kind]), unseen=unseen,
    )  # fmt: skip


def is_harmful(params: Params, entry: Entry) -> bool:
    """Whether the safety metric of a version is above its limit, by the labels so far."""
    settings, days = settings_of(params, entry.model), store.days(entry.model, entry.digest)
    return safety(params, task_of(entry), days, settings)[1] <= settings.alpha


def was_acted_on(entry: Entry, kind: str) -> bool:
    """Whether an alarm of this kind about a version had its consequence."""
    return any(day[ALARM, kind] for day in store.days(entry.model, entry.digest))


def note(params: Params, entry: Entry, kind: str) -> None:
    """Record that an alarm had its consequence."""
    store.add(entry.model, entry.digest, Counts([(ALARM, kind)]), {}, settings_of(params, entry.model).keep_days)


def task_of(entry: Entry) -> Task:
    """The task of a registered version, whether or not params.yaml has the version here."""
    return get_task(entry.model.removesuffix(MERGED))


def settings_of(params: Params, model: str) -> Watch:
    """The settings for watching a registered model: those of its task in params.yaml, or the defaults."""
    return params.watches.get(model.removesuffix(MERGED), Watch())


def _findings(rows: Sequence[_Row], alpha: float, divided: int = 1) -> Found:
    """The findings of one kind, and p for all of them; this test errs with a chance of alpha / `divided` at most.

    The mean of e-processes is an e-process, however they depend on each other (Vovk and Wang 2021).
    """
    from scipy.special import logsumexp

    if not any(sum(row.n) for row in rows):
        return NOTHING
    logs = evidence([row.hits for row in rows], [row.n for row in rows], [row.limit for row in rows])
    first: dict[str, tuple[float, _Row]] = {}
    for log, row in sorted(zip(logs.tolist(), rows, strict=True), reverse=True):
        if any(row.n):
            first.setdefault(row.feature, (log, row))
    lows = least([row.hits for _, row in first.values()], [row.n for _, row in first.values()], alpha)
    found = tuple(
        Finding(
            feature=row.feature, bucket=row.bucket, exam=row.exam, served=_short(sum(row.hits) / sum(row.n)),
            low=_short(low), n=sum(row.n), limit=_short(row.limit), p=_p(log - math.log(divided * len(rows))),
        )
        for low, (log, row) in zip(lows, first.values(), strict=True)
    )  # fmt: skip
    return found, _p(float(logsumexp(logs)) - math.log(divided * len(rows)))


def drift(days: Sequence[Counts], exam: Counts, settings: Watch) -> Found:
    """Test each bucket of the exam, and all other buckets of its feature together, against the exam's share and margin.

    All are tested from the start, with requests or without, since a bucket that joined later would bring evidence of
    its own into the mean; those of a shadow join with its candidate. The exam's upper bounds (Clopper and Pearson) hold
    all together with a chance of 1 - alpha / 2.
    """
    from scipy.special import betainccinv

    known, sums = _sums(exam), [_sums(day) for day in days]
    keys, rows = sorted(exam), []
    for feature, bucket in keys:
        cases, n, hits = known[feature], [of[feature] for of in sums], [day[feature, bucket] for day in days]
        rest = [a - b for a, b in zip(n, hits, strict=True)]
        for name, k, of in (
            (bucket, exam[feature, bucket], hits),
            (f"not {bucket}", cases - exam[feature, bucket], rest),
        ):
            bound = float(betainccinv(k + 1, cases - k, settings.alpha / 4 / len(keys))) if k < cases else 1.0
            rows.append(_Row(feature, name, _short(k / cases), min(1.0, bound + settings.margin), of, n))
    return _findings(rows, settings.alpha, divided=2)


def safety(params: Params, task: Task, days: Sequence[Counts], settings: Watch) -> Found:
    """Test the safety metric on all labels so far, in any mode; without a limit on it, there are no findings."""
    name, limit = task.safety.metric, settings.limit or params.allowed_harm(task.name)
    if limit is None or task.episodes:  # tasks with tools are not served
        return NOTHING
    is_bad, of = task.metrics[name].worse == "higher", _verdicts(task)
    hits, n = [], []
    for day in days:
        verdicts = [(of.get(pair), k) for (feature, pair), k in day.items() if feature.startswith(counts.LABELLED)]
        hits.append(sum(k for verdict, k in verdicts if verdict is is_bad))
        n.append(sum(k for verdict, k in verdicts if verdict is not None))
    rows = [_Row(name, "yes" if is_bad else "no", None, limit, hits, n)] if sum(n) else []
    return _findings(rows, settings.alpha)


def exposed(task: Task, total: Counts) -> float:
    """The share of the labels for which some answer is an error that the safety metric counts."""
    is_bad, verdicts = task.metrics[task.safety.metric].worse == "higher", _verdicts(task)
    golds = {pair.partition(" as ")[0] for pair, verdict in verdicts.items() if verdict is is_bad}
    counted = Counter[bool]()
    for (feature, pair), k in total.items():
        if feature.startswith(counts.LABELLED) and verdicts.get(pair) is not None:
            counted[pair.partition(" as ")[0] in golds] += k
    return _short(counted[True] / counted.total())


def _verdicts(task: Task) -> dict[str, bool | None]:
    """The verdict of the safety metric on each pair of label and answer, by the name of its bucket."""
    share = task.shares[task.safety.metric]
    answers: list[Any] = [*task.labels, Unreadable(reason=UNREADABLE)]
    return {f"{gold} as {column(given)}": share.of(gold, given) for gold in task.labels for given in answers}


def _sums(some: Counts) -> Counter[str]:
    found = Counter[str]()
    for (feature, _), k in some.items():
        found[feature] += k
    return found


def _p(log_evidence: float) -> float:
    """p to four digits, rounded up: what is above a limit stays above it."""
    return float(ROUNDED_UP.create_decimal(math.exp(-max(0.0, log_evidence))))


def _short(number: float) -> float:
    return float(f"{number:.4g}")
