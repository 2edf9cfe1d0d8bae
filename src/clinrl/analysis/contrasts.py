"""Comparisons of recipes over seeds: figures of graded answers, and the tests between rows.

A row is a recipe with one version for each seed, or the base, or a simple policy. All rows are measured on the same
cases and on the same bootstrap draws of them. Pure functions of records: no files, no models, no clock.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, starmap
from statistics import fmean
from typing import Any, TypeVar

from clinrl import intervals
from clinrl.analysis.compared import ALL, COMMONEST, Contrast, Figure, Kind, Row, Section, ViewRow
from clinrl.analysis.exam import Confusion, Estimates, confusion, share
from clinrl.analysis.paired import paired_on, patients
from clinrl.analysis.power import EXACT_CASES, EXACT_LEAST, detectable_from, spread_of
from clinrl.analysis.preregistration import PrimaryTest, Registration
from clinrl.analysis.run import clusters_of, unless_one
from clinrl.config.comparisons import Comparison, Pair
from clinrl.tasks.base import Task, parts_of
from clinrl.tasks.parts import Share, Statistic
from clinrl.types import Case, Estimate

T = TypeVar("T")
Test = TypeVar("Test", Contrast, PrimaryTest)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The inputs of a row: the answers of each run, in exam order, and the measures on them from elsewhere."""

    name: str
    kind: Kind
    versions: tuple[str, ...]
    """Empty for a baseline."""
    answers: Sequence[Sequence[Any]]
    qualities: Mapping[str, Sequence[Sequence[float | None]]] = field(default_factory=dict)
    """Qualities that ask no judge: a number for each run and case, None where undefined."""
    reported: Mapping[str, Sequence[Estimate]] = field(default_factory=dict)
    """Qualities that ask a judge, on all cases, from each version's own report."""
    variants: Mapping[str, Sequence[Estimates]] = field(default_factory=dict)
    """Input variant to the metrics under it, from each version's own report."""


def section(
    task: Task, cases: Sequence[Case], entries: Sequence[Entry], spec: Comparison, *, mode: str, part: str,
    of: Sequence[int],
) -> Section:  # fmt: skip
    """Rows and tests on the cases at the indices `of`. A pair or a partition with a missing row is left out."""
    chosen = spec.columns
    part_cases = [cases[i] for i in of]
    golds = [task.label(case) for case in part_cases]
    clusters = unless_one(clusters_of(task, part_cases))
    right = confusion(task, golds, golds).right
    commonest = max(task.labels, key=lambda label: right[str(label)])
    here = [_at(entry, of) for entry in entries]
    measured = {entry.name: _measured(task, golds, entry, clusters, chosen, commonest) for entry in here}

    def figures(entry: Entry, names: Iterable[str]) -> dict[str, Figure]:
        runs = measured[entry.name]
        return {name: _figure(task, name, golds, entry, runs[name], clusters) for name in names if name in runs}

    rows = []
    for entry in here:
        counts = _summed([confusion(task, golds, run) for run in entry.answers])
        reported = {name: _reported(some) for name, some in entry.reported.items()} if part == ALL else {}
        rows.append(
            Row(
                name=entry.name, kind=entry.kind, versions=entry.versions, confusion=counts,
                metrics=figures(entry, (*chosen, "no_parse")), qualities=figures(entry, entry.qualities) | reported,
                answered={name: intervals.rounded(count / counts.total) for name, count in counts.given.items()},
            )
        )  # fmt: skip
    return Section(
        mode=mode,
        part=part,
        n=len(part_cases),
        clusters=None if clusters is None else len(set(clusters)),
        right={label: intervals.rounded(count / sum(right.values())) for label, count in right.items()},
        commonest=str(commonest),
        rows=tuple(rows),
        contrasts=_contrasts(
            task,
            golds,
            patients(task, clusters),
            {entry.name: entry for entry in here},
            measured,
            spec.tests,
            chosen[0],
        ),
        views=tuple(_variant_rows(here)) if part == ALL else (),
        partition=_partition([measured.get(row, {}).get(chosen[0]) for row in spec.partition.rows])
        if spec.partition
        else (),
    )


def parts(task: Task, cases: Sequence[Case], slice_: str) -> dict[str, list[int]]:
    """The indices of the cases by value of a slice, after those of all cases.

    A part whose cases are visits of one patient is left out: they say nothing of others.
    """
    found: dict[str, list[int]] = {ALL: list(range(len(cases)))}
    if slice_:
        values = [task.reporting.slices[slice_](case) for case in cases]
        for value in sorted(set(values)):
            of = [i for i, some in enumerate(values) if some == value]
            patients = None if task.reporting.cluster else clusters_of(task, [cases[i] for i in of])
            if patients is None or len(set(patients)) > 1:
                found[value] = of
    return found


def _at(entry: Entry, of: Sequence[int]) -> Entry:
    answers = [[run[i] for i in of] for run in entry.answers]
    qualities = {name: [[run[i] for i in of] for run in runs] for name, runs in entry.qualities.items()}
    return replace(entry, answers=answers, qualities=qualities)


def _measured(
    task: Task, golds: Sequence[Any], entry: Entry, clusters: Sequence[str] | None, chosen: Sequence[str], common: Any
) -> dict[str, intervals.Runs]:
    """Each measure on single cases, where defined: `chosen`, unreadable answers, qualities, the commonest label."""

    def given(gold: Any, answer: Any) -> float:
        return fmean(label == common for _, label in parts_of(task, gold, answer).values())

    found = {name: _metric(task, name, golds, entry.answers, clusters) for name in (*chosen, "no_parse")}
    shares = [list(starmap(given, zip(golds, run, strict=True))) for run in entry.answers]
    found[COMMONEST] = intervals.runs_of_means(shares, clusters)
    for name, values in entry.qualities.items():
        found[name] = intervals.runs_of_means(values, clusters)
    return {name: runs for name, runs in found.items() if runs is not None}


def _metric(
    task: Task, name: str, golds: Sequence[Any], answers: Sequence[Sequence[Any]], clusters: Sequence[str] | None
) -> intervals.Runs | None:
    metric = task.all_metrics[name]
    if isinstance(metric, Statistic):
        return intervals.runs_of(metric.value, golds, answers, clusters)
    verdicts = [[metric.of(gold, answer) for gold, answer in zip(golds, run, strict=True)] for run in answers]
    return intervals.runs_of_means(verdicts, clusters)


def _figure(
    task: Task, name: str, golds: Sequence[Any], entry: Entry, runs: intervals.Runs, clusters: Sequence[str] | None
) -> Figure:
    """The figure of a metric or a quality; a share of one run, or one that is 0 or 1 in all runs, has the interval of
    reports."""
    metric = task.all_metrics.get(name)  # None for a quality
    is_same = len(runs.values) == 1 or set(runs.values) in ({0.0}, {1.0})
    same = share(metric, golds, entry.answers[0], clusters) if isinstance(metric, Share) and is_same else None
    found = same or intervals.average(runs, is_share=task.is_share(name))
    return Figure(**found.model_dump(), seeds=tuple(map(intervals.rounded, runs.values)))


def _reported(estimates: Sequence[Estimate]) -> Figure:
    """The mean of estimates from reports. It has an interval for one version only: that of a mean is not known."""
    values = [estimate.value for estimate in estimates]
    only = estimates[0] if len(estimates) == 1 else None
    return Figure(
        value=intervals.rounded(fmean(values)),
        low=only.low if only else None,
        high=only.high if only else None,
        n=max(estimate.n for estimate in estimates),
        seeds=tuple(values),
    )


def _summed(tables: Sequence[Confusion]) -> Confusion:
    cells = [[sum(cell) for cell in zip(*row, strict=True)] for row in zip(*(t.counts for t in tables), strict=True)]
    return tables[0].model_copy(update={"counts": tuple(map(tuple, cells))})


def in_all(records: Sequence[Mapping[str, T]]) -> dict[str, list[T]]:
    """What all of the records have, by key: the value of each record."""
    names = [name for name in records[0] if all(name in record for record in records)]
    return {name: [record[name] for record in records] for name in names}


def _variant_rows(entries: Sequence[Entry]) -> Iterator[ViewRow]:
    for entry in entries:
        for view, reports in entry.variants.items():
            metrics = {name: _reported(some) for name, some in in_all(reports).items()}
            yield ViewRow(name=entry.name, view=view, metrics=metrics)


def _contrasts(
    task: Task, golds: Sequence[Any], alike: Sequence[str] | None, entries: Mapping[str, Entry],
    measured: Mapping[str, Mapping[str, intervals.Runs]], pairs: Sequence[Pair], main: str,
) -> tuple[Contrast, ...]:  # fmt: skip
    """All tests of a section, family by family: McNemar's of each compared share, then the tests over all seeds."""
    made = [pair for pair in pairs if pair.first in entries and pair.second in entries]
    found = [
        Contrast(
            first=pair.first, second=pair.second, measure=test.metric, versions=versions, b=test.b, c=test.c,
            difference=test.difference, p=test.p, adjusted=test.p,
            detectable=_detectable_of_one(test.difference, alike),
        )
        for pair in made
        for versions, test in _mcnemar(task, golds, alike, entries[pair.first], entries[pair.second])
    ]  # fmt: skip
    measures = dict.fromkeys([main, *(name for entry in entries.values() for name in entry.qualities), COMMONEST])
    for pair in made:
        mine, theirs = measured[pair.first], measured[pair.second]
        for measure in measures:
            if measure in mine and measure in theirs:
                test = intervals.average_difference(mine[measure], theirs[measure], is_share=task.is_share(measure))
                found.append(
                    Contrast(
                        first=pair.first, second=pair.second, measure=measure, versions=None, difference=test.estimate,
                        p=test.p, adjusted=test.p, detectable=_detectable(test.spread),
                    )
                )  # fmt: skip

    def family(contrast: Contrast) -> tuple[bool, int]:
        return contrast.versions is None, (*task.compared, *measures).index(contrast.measure)

    families = groupby(sorted(found, key=family), key=family)
    return tuple(test for _, tests in families for test in _adjusted(list(tests)))


def _adjusted(tests: Sequence[Test]) -> Iterator[Test]:
    """The tests of a family, each with its p after Holm."""
    for test, p in zip(tests, intervals.holm([test.p for test in tests]), strict=True):
        yield test.model_copy(update={"adjusted": p})


def _partition(rows: Sequence[intervals.Runs | None]) -> tuple[Estimate, ...]:
    """Each of the four rows minus the one before, then the last minus the first; empty where a row has no number."""
    known = [runs for runs in rows if runs is not None]
    if len(known) < 4:
        return ()
    pairs = [*zip(known[1:], known, strict=False), (known[-1], known[0])]
    return tuple(intervals.average_difference(mine, theirs).estimate for mine, theirs in pairs)


def _detectable(spread: intervals.Spread, alpha: float = 1 - intervals.LEVEL, tests: int = 1) -> float | None:
    least = detectable_from(spread, alpha, tests)
    return None if least is None else intervals.rounded(least)


def _detectable_of_one(difference: Estimate, alike: Sequence[str] | None = None) -> float | None:
    """The smallest detectable difference of two single models; the exact test finds none without some cases, or without
    some patients (`alike`)."""
    n = difference.n if alike is None else min(difference.n, len({*alike}))
    least = _detectable(spread_of(difference))
    return None if least is None or n < EXACT_LEAST else intervals.rounded(max(least, min(1.0, EXACT_CASES / n)))


def primary_tests(
    task: Task, cases: Sequence[Case], entries: Mapping[str, Sequence[Entry]], plan: Registration
) -> tuple[PrimaryTest, ...]:
    """The registered tests, one for each mode, on all cases; `entries` are the rows of each mode."""
    golds, clusters = [task.label(case) for case in cases], unless_one(clusters_of(task, cases))
    found = []
    for mode in plan.modes:
        rows = {entry.name: entry for entry in entries[mode]}
        sides = [_metric(task, plan.measure, golds, rows[name].answers, clusters) for name in (plan.first, plan.second)]
        mine, theirs = (runs for runs in sides if runs is not None)  # a plan's measure counts cases of its exam
        test = intervals.average_difference(mine, theirs, is_share=True, level=1 - plan.alpha)
        first, second = (
            Estimate(**_figure(task, plan.measure, golds, rows[name], runs, clusters).model_dump(exclude={"seeds"}))
            for name, runs in ((plan.first, mine), (plan.second, theirs))
        )
        found.append(
            PrimaryTest(
                mode=mode, first=first, second=second, difference=test.estimate, p=test.p, adjusted=test.p,
                detectable=_detectable(test.spread, plan.alpha, len(plan.modes)),
            )
        )  # fmt: skip
    return tuple(_adjusted(found))


def _mcnemar(
    task: Task, golds: Sequence[Any], alike: Sequence[str] | None, mine: Entry, theirs: Entry
) -> list[tuple[tuple[str, str], intervals.Paired]]:
    """McNemar tests by seed, as far as both rows have it; a row's only version meets each version of the other."""
    fewer, more = sorted((len(mine.answers), len(theirs.answers)))
    found = []
    # A part may have no case in a share's denominator, which depends on the gold label alone.
    shares = task.compared.items()
    counted = [metric for metric, share in shares if any(share.of(gold, gold) is not None for gold in golds)]
    for k in range(more if fewer == 1 else fewer):
        first, second = (_of(entry.versions or (entry.name,), k) for entry in (mine, theirs))
        one, other = (_of(entry.answers, k) for entry in (mine, theirs))
        tests = [paired_on(task, metric, second, golds, one, other, alike) for metric in counted]
        found += [((first, second), test) for test in tests]
    return found


def _of(values: Sequence[Any], k: int) -> Any:
    return values[k % len(values)]
