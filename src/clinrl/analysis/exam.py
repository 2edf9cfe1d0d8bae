"""The report of an exam on one version in one mode, and how it is computed from graded answers.

Every share carries its interval and its count of cases; unreadable answers stay in every denominator. Pure functions
of records: no files, no models, no clock.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, product
from statistics import fmean
from typing import Any, TypeVar

from pydantic import Field

from clinrl.analysis.costs import Costs
from clinrl.analysis.run import Run, clusters_of
from clinrl.intervals import Paired, bootstrap, mean, rate, rounded
from clinrl.tasks.base import GIVEN, Task, as_variant, get_task, parts_of
from clinrl.tasks.importing import is_imported
from clinrl.tasks.parts import NO_RESPONSES, Quality, Responses, Share, Statistic
from clinrl.types import Case, Estimate, Graded, Strict, Transcript, Unreadable

UNREADABLE = "unreadable"
VARIANTS = "view"
"""The name of the slice of input variants in reports."""
NOTE = "Research only, synthetic data."
IMPORTED_NOTE = "Research only, imported cases."
"""The note of an exam on imported cases."""

Estimates = dict[str, Estimate]
Agreement = dict[str, Estimate | dict[str, dict[str, Paired]]]
"""From `paired.between_modes`: `mode_agreement`, and tests by pair of modes, such as `think_direct`, and by share."""
T = TypeVar("T")


class Row(Strict):
    """One line of the comparison table: a model or a baseline on the same exam."""

    name: str
    metrics: Estimates


class Confusion(Strict):
    """Counts of cases, or of their decisions: a row for each gold label, a column for each answer, unreadable last."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]

    @property
    def total(self) -> int:
        return sum(map(sum, self.counts))

    @property
    def right(self) -> dict[str, int]:
        """The count of each gold label."""
        return {name: sum(row) for name, row in zip(self.rows, self.counts, strict=True)}

    @property
    def given(self) -> dict[str, int]:
        """The count of each answer."""
        return dict(zip(self.columns, map(sum, zip(*self.counts, strict=True)), strict=True))


class EvalReport(Strict):
    """One version, one exam, one mode. It holds no times, so that equal answers give equal bytes."""

    name: str
    task: str
    task_version: int
    mode: str
    mode_spec: dict[str, Any]
    """Decoding of this mode at the active scale."""
    exam: str
    exam_digest: str
    adapter_digest: str
    n: int = Field(gt=0)
    metrics: Estimates
    """The task's metrics and qualities; `no_parse` (unreadable) and `clipped` (out of tokens) are shares of all cases.

    The n of a share is its denominator; the n of a statistic is the number of answers that it is computed on: the
    readable ones, or all."""
    stops: dict[str, int]
    unreadable: dict[str, int]
    """Cases by the reason why their answer could not be read."""
    predicted: dict[str, int]
    """Cases, or their decisions, by answer."""
    confusion: Confusion
    slices: dict[str, dict[str, Estimates]]
    """Slice, then value, then metric. Values of the slice `view` are input variants, on the cases that have them."""
    terms: dict[str, float]
    """Mean contribution of each reward term over all cases. They sum to `reward`."""
    reward: float
    rows: tuple[Row, ...]
    paired: tuple[Paired, ...]
    sampler: dict[str, str] = Field(default_factory=dict, exclude_if=lambda sampler: not sampler)
    """The sampler that wrote the answers; empty at the embedded scale."""
    seen_clauses: Estimates = Field(default_factory=dict, exclude_if=lambda seen: not seen)
    """Corpus that the model learned from to the share of the exam's clauses that it contains, numbers masked."""
    costs: Costs | None = Field(default=None, exclude_if=lambda costs: costs is None)
    """Counts of answers chosen by thresholds on the model's probabilities; None where these were not read."""
    note: str = NOTE

    @property
    def counted(self) -> str:
        """The unit of `confusion` and `predicted`: a case of several decisions is counted once for each."""
        return "cases" if self.confusion.total == self.n else "decisions"


def build(
    run: Run,
    mode: str,
    *,
    others: Mapping[str, Estimates],
    tests: Sequence[Paired],
    responses: Responses = NO_RESPONSES,
    qualities: Mapping[str, Quality] | None = None,
    seen: Estimates | None = None,
) -> EvalReport:
    """The report on the graded answers of a mode.

    `others` are the other rows by name, from `row_metrics`, `tests` the paired tests, `responses` the judges' responses
    that the task's qualities need. `qualities` are the measures of whole transcripts, by default all of the task's.
    `seen` is the result of `seen_clauses`.

    Raises ValueError if the graded answers are not those of the cases, in their order.
    """
    task, cases, graded, clusters = run.task, run.cases, run.graded[mode], run.clusters
    if [case.id for case in cases] != [line.case_id for line in graded]:
        raise ValueError(f"the graded answers of {run.model.name} in mode {mode} are not in the order of its exam")
    golds, answers = run.golds, [line.answer for line in graded]
    silent = Counter(answer.reason for answer in answers if isinstance(answer, Unreadable))
    stops = Counter[str](line.transcript.stop for line in graded)
    table = confusion(task, golds, answers)
    metrics = estimates(task.metrics, golds, answers, clusters)
    measures = task.reporting.qualities if qualities is None else qualities
    metrics |= measured(measures, run.shown, [line.transcript for line in graded], responses, clusters)
    metrics["no_parse"] = rate([isinstance(answer, Unreadable) for answer in answers], clusters)
    metrics["clipped"] = rate([line.transcript.stop == "max_tokens" for line in graded], clusters)
    mine = {name: metrics[name] for name in task.reporting.row_metrics if name in metrics}
    rows, variants = {run.model.name: mine, **others}, run.variants(mode)
    terms = {
        term: rounded(fmean(line.score.terms.get(term, 0.0) for line in graded))
        for term in dict.fromkeys(chain.from_iterable(line.score.terms for line in graded))
    }
    return EvalReport(
        name=run.model.name,
        task=task.name,
        task_version=task.version,
        mode=mode,
        mode_spec=run.modes[mode],
        exam=run.model.exam,
        exam_digest=run.exam_digest,
        sampler=dict(run.sampler),
        adapter_digest=run.adapter_digest,
        n=len(cases),
        metrics=metrics,
        stops=dict(stops),
        unreadable=dict(silent),
        predicted=table.given,
        confusion=table,
        slices={
            **{what: _slice(run, graded, of) for what, of in task.reporting.slices.items()},
            **({VARIANTS: _variants(run, {GIVEN: graded, **variants})} if variants else {}),
        },
        terms=terms,
        reward=rounded(fmean(line.score.total for line in graded)),
        rows=tuple(Row(name=row, metrics=found) for row, found in rows.items()),
        paired=tuple(tests),
        seen_clauses=seen or {},
        costs=run.costs(mode),
        note=note_of(cases),
    )


def seen_clauses(task: Task, cases: Sequence[Case], corpora: Mapping[str, Iterable[Case]]) -> Estimates:
    """The share of the clauses of an exam that each corpus contains, numbers masked, with an interval over cases.

    Empty for a task that defines no clauses.
    """
    if (of := task.reporting.clauses) is None:
        return {}
    asked = [(case.id, clause) for case in cases for clause in of(case)]
    found = {}
    for name, corpus in corpora.items():
        held = set(chain.from_iterable(map(of, corpus)))
        found[name] = rate([clause in held for _, clause in asked], [case for case, _ in asked])
    return found


def note_of(cases: Sequence[Case]) -> str:
    """The note at the top of every page about these cases."""
    return IMPORTED_NOTE if any(map(is_imported, cases)) else NOTE


def estimates(
    metrics: Mapping[str, Share | Statistic],
    golds: Sequence[Any],
    answers: Sequence[Any],
    clusters: Sequence[str] | None = None,
) -> Estimates:
    """Every metric that is defined on these cases, with its interval.

    A statistic is computed on the readable answers, or on all if it says so.
    """
    found: Estimates = {}
    readable = [i for i, answer in enumerate(answers) if not isinstance(answer, Unreadable)]
    for name, metric in metrics.items():
        if isinstance(metric, Share):
            estimate = share(metric, golds, answers, clusters)
        else:
            kept = readable if metric.readable_only else range(len(answers))
            estimate = bootstrap(metric.value, _at(golds, kept), _at(answers, kept), clusters and _at(clusters, kept))
        if estimate is not None:
            found[name] = estimate
    return found


def share(
    metric: Share, golds: Sequence[Any], answers: Sequence[Any], clusters: Sequence[str] | None = None
) -> Estimate | None:
    """A share with its interval, Wilson's or one over clusters; None if no case is in its denominator."""
    verdicts = [metric.of(gold, answer) for gold, answer in zip(golds, answers, strict=True)]
    inside = [i for i, verdict in enumerate(verdicts) if verdict is not None]
    return rate([bool(verdicts[i]) for i in inside], clusters and _at(clusters, inside)) if inside else None


def measured(
    qualities: Mapping[str, Quality],
    cases: Sequence[Case],
    transcripts: Sequence[Transcript],
    responses: Responses,
    clusters: Sequence[str] | None = None,
) -> Estimates:
    """The mean of each quality over the cases that it is defined on, with its bootstrap interval."""
    found: Estimates = {}
    for name, quality in qualities.items():
        values = [quality.of(case, transcript, responses) for case, transcript in zip(cases, transcripts, strict=True)]
        inside = [i for i, value in enumerate(values) if value is not None]
        if inside:
            found[name] = mean([values[i] or 0.0 for i in inside], clusters and _at(clusters, inside))
    return found


def confusion(task: Task, golds: Sequence[Any], answers: Sequence[Any]) -> Confusion:
    """Counts of gold label by answer, with a last column for unreadable answers."""
    pairs = zip(golds, answers, strict=True)
    cells = Counter(
        (str(row), column(given)) for gold, answer in pairs for row, given in parts_of(task, gold, answer).values()
    )
    rows, wide = tuple(str(label) for label in task.labels), columns(task)
    if stray := {*cells} - {*product(rows, wide)}:
        raise TypeError(f"{task.name} gave labels that are none of its `labels`: {sorted(stray)[0]}")
    return Confusion(rows=rows, columns=wide, counts=tuple(tuple(cells[r, c] for c in wide) for r in rows))


def summary(reports: Sequence[EvalReport], agreement: Mapping[str, Any]) -> dict[str, Any]:
    """Headline numbers by mode and the agreement of the modes: plain numbers, to be tabulated and diffed."""
    by_mode = {
        report.mode: {
            name: report.metrics[name].value
            for name in get_task(report.task).reporting.headline
            if name in report.metrics
        }
        for report in reports
    }
    agreed = {"mode_agreement": agreement["mode_agreement"].value} if agreement else {}
    return {**by_mode, **agreed}


def row_metrics(run: Run, answers: Sequence[Any]) -> Estimates:
    """The metrics of a row of the comparison table, for any policy's answers to the exam of a run."""
    metrics = {name: run.task.metrics[name] for name in run.task.reporting.row_metrics}
    return estimates(metrics, run.golds, answers, run.clusters)


def _slice(run: Run, graded: Sequence[Graded], of: Callable[[Case], str]) -> dict[str, Estimates]:
    """The measures of a slice, by the value that `of` gives each case."""
    members: dict[str, list[int]] = {}
    for i, case in enumerate(run.cases):
        members.setdefault(of(case), []).append(i)
    reporting = run.task.reporting
    metrics = {name: run.task.metrics[name] for name in reporting.slice_measures if name in run.task.metrics}
    qualities = {name: reporting.qualities[name] for name in reporting.slice_measures if name in reporting.qualities}
    found = {}
    for value, rows in sorted(members.items()):
        clusters, lines = clusters_of(run.task, _at(run.cases, rows)), _at(graded, rows)
        transcripts = [line.transcript for line in lines]
        found[value] = estimates(metrics, _at(run.golds, rows), [line.answer for line in lines], clusters)
        found[value] |= measured(qualities, _at(run.shown, rows), transcripts, NO_RESPONSES, clusters)
    return found


def _variants(run: Run, graded: Mapping[str, Sequence[Graded]]) -> dict[str, Estimates]:
    """Measures under each input variant, on the cases that have it, and as given, on the cases that have any variant.

    Qualities that ask a judge are left out: they would ask about every case once for each variant.
    """
    task, by_id = run.task, {case.id: case for case in run.cases}
    others = {line.case_id for variant, lines in graded.items() if variant != GIVEN for line in lines}
    chosen = [name for name in task.reporting.headline if isinstance(task.metrics.get(name), Statistic)]
    metrics = {name: task.metrics[name] for name in (*task.compared, *chosen)}
    plain = {name: quality for name, quality in task.reporting.qualities.items() if not quality.asks}
    found = {}
    for variant, lines in graded.items():
        kept = [line for line in lines if line.case_id in others]
        shown = [as_variant(task, by_id[line.case_id], variant) for line in kept]
        clusters = clusters_of(task, [by_id[line.case_id] for line in kept])
        golds = [task.label(case) for case in shown]
        found[variant] = {
            **estimates(metrics, golds, [line.answer for line in kept], clusters),
            **measured(plain, shown, [line.transcript for line in kept], NO_RESPONSES, clusters),
        }
    return found


def _at(values: Sequence[T], places: Sequence[int]) -> list[T]:
    return [values[i] for i in places]


def columns(task: Task) -> tuple[str, ...]:
    """Every outcome of a case: the labels, then `UNREADABLE`."""
    return (*(str(label) for label in task.labels), UNREADABLE)


def column(answer: Any) -> str:
    """The one of `columns` that an answer belongs to."""
    return UNREADABLE if isinstance(answer, Unreadable) else str(answer)
