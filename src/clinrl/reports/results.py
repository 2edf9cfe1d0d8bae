"""The results of tests in a word or two, and the contents of a comparison's tables and figure.

A result is `better` or `worse` only if p is below 0.05. Otherwise it is `not significant`, which is not "equal".
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from clinrl.analysis.baselines import BAG_OF_WORDS, PRIOR, RANDOM
from clinrl.analysis.compared import ALL, COMMONEST, Compared, Contrast, Figure, Section
from clinrl.analysis.costs import Costs
from clinrl.analysis.exam import Agreement, Confusion, Estimates, EvalReport
from clinrl.analysis.preregistration import Forecast, Primary, Registration, forecasts
from clinrl.intervals import Paired
from clinrl.reports.numbers import change, figure, p_is, p_value, percent, points
from clinrl.tasks.base import Task, get_task

ALPHA = 0.05
FEW = 20
"""With fewer clusters, a bootstrap over clusters gives intervals that are too narrow."""
SILENT = "not significant"

Dots = list[tuple[str, list[tuple[str, str, Figure]]]]
"""Panels of the figure: a measure, and the name, kind and number of each row that has it."""
Curves = list[tuple[str, tuple[str, str], Sequence[tuple[str, list[list[float]]]]]]
"""Panels: a mode, the measures of both axes, and for each row its name, kind and two series, its own answers first."""


def paired(task: Task, test: Paired) -> str:
    """The result of one paired test."""
    return _result(task, test.metric, test.b - test.c, test.p)


def _result(task: Task, measure: str, difference: float, p: float, alpha: float = ALPHA) -> str:
    if p >= alpha:
        return SILENT
    metric = task.metrics.get(measure) or task.reporting.qualities[measure]
    return "worse" if (metric.worse == "higher") == (difference > 0) else "better"


def shares(counts: Mapping[str, int], confusion: Confusion) -> list[str]:
    """Each answer's share of all counts of a confusion matrix, in its columns' order."""
    return [f"{100 * counts.get(name, 0) / confusion.total:.1f}%" for name in confusion.columns]


def rows(reports: Sequence[EvalReport]) -> list[tuple[str, str, Estimates]]:
    """Name, mode and metrics of every row; one entry with mode `all` if the metrics are the same in every mode."""
    found = []
    for name in dict.fromkeys(row.name for report in reports for row in report.rows):
        modes = {report.mode: row.metrics for report in reports for row in report.rows if row.name == name}
        if len(modes) == len(reports) > 1 and all(metrics == modes[reports[0].mode] for metrics in modes.values()):
            modes = {"all": modes[reports[0].mode]}
        found += [(name, mode, metrics) for mode, metrics in modes.items()]
    return found


def test_groups(reports: Sequence[EvalReport], agreement: Agreement) -> list[tuple[str, Sequence[Paired]]]:
    """The paired tests of an exam by mode, then those between modes."""
    groups: list[tuple[str, Sequence[Paired]]] = [(report.mode, report.paired) for report in reports]
    pairs = agreement.get("between_modes", {})
    for pair, found in pairs.items() if isinstance(pairs, dict) else ():
        first, _, second = pair.partition("_")
        groups.append((first, [test.model_copy(update={"other": f"mode {second}"}) for test in found.values()]))
    return groups


def caveats(report: Compared) -> Iterator[str]:
    """Sentences on the limits of a comparison's numbers."""
    whole = report.sections[0]
    if report.primary is None:
        yield "No primary measure was registered before the runs: all tests explore."
    if any(report.published.values()):
        yield "Published figures are as printed. They are about other data and models, so they are not comparable."
    if whole.clusters is not None and get_task(report.task).reporting.cluster is not None:
        yield (
            "McNemar's tests treat cases of one cluster as independent. Where they disagree with a test over clusters, "
            "trust the latter."
        )
    few = {place(report, s): s.clusters for s in report.sections if s.clusters is not None and s.clusters < FEW}
    for where, clusters in few.items():
        yield f"{where[0].upper()}{where[1:]} has {clusters} clusters: its intervals are too narrow, its p too small."
    if (most := max(len(row.versions) for row in whole.rows)) > 1:
        yield f"With {most} seeds at most, the spread between seeds is itself uncertain."
    counts = sorted({len(row.versions) for row in whole.rows if row.kind == "arm"})
    if len(counts) > 1 and counts[0] > 1:
        yield f"Rows have {counts[0]} to {counts[-1]} seeds. Tests of single seeds are of those that both rows have."
    single = [row.name for row in whole.rows if row.kind == "arm" and len(row.versions) == 1]
    if single:
        yield (
            f"Trained with one seed only, so without a spread of seeds: {', '.join(single)}. A test that uses such a "
            "row takes its seed for the recipe."
        )
    if any(row.qualities for row in whole.rows):
        yield (
            "What checks a reasoning, rules and judges alike, comes from the same generator as the statements that it "
            "checks."
        )


def primary(task: Task, report: Primary) -> Iterator[tuple[str, ...]]:
    """The primary measure, a row for each mode: both recipes, difference, p, result, and three cells on its power.

    These are the smallest effect of interest, and whether the interval excludes it in both directions; the smallest
    detectable effect by the plan's assumptions; and the same by the spread that was found.
    """
    plan = report.registration
    planned = forecasts(plan)
    for test in report.tests:
        result = _result(task, plan.measure, test.difference.value, test.adjusted, plan.alpha)
        beyond = -plan.effect < test.difference.low and test.difference.high < plan.effect
        yield (
            test.mode, percent(test.first), percent(test.second), points(test.difference),
            p_value(test.adjusted),
            result, f"{100 * plan.effect:g} points, {'excluded' if beyond else 'not excluded'}",
            _amount(planned[test.mode].detectable or math.inf), _amount(test.detectable),
        )  # fmt: skip


def power(plan: Registration) -> Iterator[tuple[str, Forecast, Forecast]]:
    """For each mode, the forecast of this code from the plan's assumptions, and the forecast that the plan holds."""
    for mode, now in forecasts(plan).items():
        yield mode, now, plan.forecasts[mode]


def _amount(effect: float | None, *, is_share: bool = True) -> str:
    if effect is None:
        return "unknown"
    if is_share and effect > 1:
        return "none that is possible"
    return f"{100 * effect:.1f} points" if is_share else f"{effect:.3f}"


def tested(task: Task, section: Section) -> Iterator[tuple[str, ...]]:
    """A row for each pair: both recipes, measures in which the first is better, worse or neither, the commonest label.

    A test over all seeds is shown with the difference and the adjusted p, exact tests with the number of pairs of
    seeds. A result that is not significant is shown with the smallest effect that its test detects, the largest of
    these for several pairs of seeds.
    """
    for first, second in dict.fromkeys((test.first, test.second) for test in section.contrasts):
        tests = [test for test in section.contrasts if (test.first, test.second) == (first, second)]
        found: dict[str, list[str]] = {"better": [], "worse": [], SILENT: []}
        prior = ""
        for test in tests:
            if test.measure == COMMONEST:
                prior = _prior(section, test) + (f" ({least(task, test)})" if test.adjusted >= ALPHA else "")
            elif test.versions is None:
                result = _contrast(task, test)
                beside = least(task, test) if result == SILENT else difference(task, test)
                found[result].append(f"{test.measure} ({beside})")
        for measure in dict.fromkeys(test.measure for test in tests if test.versions):
            pairs = [(_contrast(task, test), test) for test in tests if test.versions and test.measure == measure]
            for result in dict.fromkeys(result for result, _ in pairs):
                some = [test for one, test in pairs if one == result]
                beside = f", {least(task, *some)}" if result == SILENT else ""
                found[result].append(f"{measure} ({len(some)} of {len(pairs)} seeds{beside})")
        better, worse, silent = ("; ".join(found[word]) or "none" for word in ("better", "worse", SILENT))
        yield _row(section, first), _row(section, second), better, worse, silent, prior


def answered(task: Task, report: Compared) -> Iterator[tuple[str, ...]]:
    """A row for each planned test: what differs, both recipes, a cell for each mode, and a summary of other measures.

    A mode's cell has the difference in the first column on all cases, its result, and the smallest effect that the test
    detects if that is not significant. The summary names the measures and modes in which the first recipe is shown to
    be better or worse.
    """
    whole = [section for section in report.sections if section.part == ALL]
    for pair in report.tests:
        cells: list[str] = []
        modes: dict[tuple[str, str], list[str]] = {}
        for section in whole:
            tests = {t.measure: t for t in _pooled(section) if (t.first, t.second) == (pair.first, pair.second)}
            for measure, test in tests.items():
                result = _contrast(task, test)
                if measure == report.columns[0]:
                    cells.append(f"{difference(task, test)}: {result}")
                    cells[-1] += f", detectable {least(task, test)}" if result == SILENT else ""
                elif result != SILENT:
                    modes.setdefault((measure, result), []).append(section.mode)
            cells += [] if tests else [""]
        others: dict[str, list[str]] = {}
        for (measure, result), where in modes.items():
            some = "every mode" if len(where) == len(whole) > 1 else f"mode {' and '.join(where)}"
            others.setdefault(f"{result} in {some}", []).append(measure)
        rows = (_row(whole[0], name) for name in (pair.first, pair.second))
        yield pair.says, *rows, *cells, "; ".join(f"{what}: {', '.join(others[what])}" for what in others) or "none"


def partition(task: Task, report: Compared) -> Iterator[tuple[str, ...]]:
    """A row for each mode and part of the cases: the effects of null, elicitation and reward, then their sum.

    Each effect is also given as a share of the sum if the sum's interval excludes zero and no effect has the opposite
    sign.
    """
    for section in report.sections:
        if section.partition:
            *parts, total = section.partition
            is_shown = (total.low > 0 or total.high < 0) and all(part.value * total.value >= 0 for part in parts)
            shares = [f", {100 * part.value / total.value:.0f}%" if is_shown else "" for part in parts]
            changes = [change(part, task, report.columns[0]) for part in (*parts, total)]
            yield section.mode, place(report, section), *(map(str.__add__, changes, [*shares, ""]))


def harm(task: Task, report: Compared) -> tuple[str, str, Contrast, Figure, Figure] | None:
    """The test over all seeds and cases that shows harm: its mode, what differs, the test itself and both numbers.

    Of several tests with the result `worse`, the one whose difference is largest in standard errors. None if there is
    no such test.
    """
    found = [(section, test) for section in report.sections if section.part == ALL for test in _pooled(section)
             if _contrast(task, test) == "worse"]  # fmt: skip
    if not found:
        return None
    section, test = max(found, key=lambda one: abs(one[1].difference.value) / _width(one[1]))
    rows = {row.name: {**row.qualities, **row.metrics} for row in section.rows}
    says = next(pair.says for pair in report.tests if (pair.first, pair.second) == (test.first, test.second))
    return section.mode, says, test, rows[test.first][test.measure], rows[test.second][test.measure]


def least(task: Task, *tests: Contrast) -> str:
    """The smallest effect that a test detects with a probability of 80%, before adjustment; of several, the largest."""
    known = [test.detectable for test in tests if test.detectable is not None]
    return _amount(max(known, default=None), is_share=task.is_share(tests[0].measure))


def _pooled(section: Section) -> list[Contrast]:
    """The tests over all seeds, except those on the commonest label, which is neither better nor worse."""
    return [test for test in section.contrasts if test.versions is None and test.measure != COMMONEST]


def _row(section: Section, name: str) -> str:
    """The name of a row, marked `(one seed)` if a test cannot estimate the spread between its seeds."""
    single = any(row.name == name and row.kind == "arm" and len(row.versions) == 1 for row in section.rows)
    return f"{name} (one seed)" if single else name


def across(task: Task, report: Compared, name: str) -> list[str]:
    """Cells of a row: its first column on all cases of each mode, then its reasoning in the first mode with the row."""
    rows = [{row.name: row for row in section.rows}.get(name) for section in report.sections if section.part == ALL]
    quality = next((row.qualities.get(report.quality) for row in rows if row), None)
    main = [figure(row.metrics.get(report.columns[0]) if row else None, task, report.columns[0]) for row in rows]
    return [*main, *([figure(quality, task, report.quality)] if report.quality else [])]


def _width(test: Contrast) -> float:
    return max(test.difference.high - test.difference.low, 1e-6)


def difference(task: Task, test: Contrast) -> str:
    return f"{change(test.difference, task, test.measure)}, {p_is(test.adjusted)}"


def _contrast(task: Task, test: Contrast) -> str:
    return _result(task, test.measure, test.difference.value, test.adjusted)


def _prior(section: Section, test: Contrast) -> str:
    """Whether the first row answers the commonest gold label more or less often, and nearer to its share of gold."""
    if test.adjusted >= ALPHA:
        return SILENT
    answered = {row.name: row.answered[section.commonest] for row in section.rows}
    mine, theirs, gold = answered[test.first], answered[test.second], section.right[section.commonest]
    text = f"{section.commonest} answered {'more' if mine > theirs else 'less'} often"
    # If the gold share lies between the two, the test does not show which is nearer.
    if (mine - gold) * (theirs - gold) >= 0:
        text += f", {'nearer to' if abs(mine - gold) < abs(theirs - gold) else 'farther from'} its gold share"
    return text


def dots(report: Compared) -> Dots:
    """The panels of the figure, with the rows on all cases in the first mode that has the reasoning, else the first."""
    whole = [section for section in report.sections if section.part == ALL]
    chosen = next((s for s in whole if any(report.quality in row.qualities for row in s.rows)), whole[0])
    rows = [row for row in chosen.rows if row.kind != "baseline"]
    main, quality = report.columns[0], report.quality
    measures: dict[str, list[tuple[str, str, Figure]]] = {
        main: [(row.name, row.kind, figure) for row in rows if (figure := row.metrics.get(main))],
        quality: [(row.name, row.kind, figure) for row in rows if (figure := row.qualities.get(quality))],
    }
    return [(f"{name}, mode {chosen.mode}", found) for name, found in measures.items() if found]


def lines(report: Compared) -> dict[str, float]:
    """Baseline to its number in the first column: the best constant answer, guesses, bag of words, readers."""
    main, task = report.columns[0], get_task(report.task)
    rows = [row for row in report.sections[0].rows if row.kind == "baseline" and main in row.metrics]
    reached = {row.name: row.metrics[main].value for row in rows}
    shown = (RANDOM, PRIOR, BAG_OF_WORDS, *task.checks.readers)
    named = {name: reached.pop(name) for name in shown if name in reached}
    best = max if task.metrics[main].worse == "lower" else min
    return {name: reached[name] for name in (best(reached, key=lambda row: reached[row]),)} | named


def curves(task: Task, report: Compared) -> Curves:
    """The curves of errors in one direction over those in the other, by mode and row: means over seeds.

    The first point of a curve is the row's own answers.
    """
    found: Curves = []
    for mode, rows in report.costs.items():
        assert task.ordered is not None
        axes = (task.ordered.over, task.ordered.under)
        names = dict.fromkeys(row.name for row in report.sections[0].rows if row.name in rows)
        lines = [(name, [_means(rows[name], measure) for measure in axes]) for name in names]
        found.append((f"mode {mode}", axes, lines))
    return found


def thresholds(task: Task, report: Compared) -> Iterator[tuple[str, ...]]:
    """A row for each mode and recipe: the lowest safety metric of a threshold without too many errors of caution.

    The limit on errors of caution is the own answers of the first recipe of the primary test. Numbers are means over
    seeds, with their range.
    """
    first = report.primary.registration.first if report.primary else ""
    for mode, rows in report.costs.items():
        assert task.ordered is not None
        over, safety = task.ordered.over, task.safety.metric
        limit = _means(rows[first], over)[0] if first in rows else -1.0
        for name in (row.name for row in report.sections[0].rows if first in rows and row.name in rows):
            costs = rows[name]
            overs, errors = _means(costs, over), _means(costs, safety)
            within = [place for place in range(1, len(overs)) if overs[place] <= limit + 1e-9]
            best = min(within, key=lambda place: (errors[place], overs[place]), default=None)
            least = ["none"] * 3
            if best is not None:
                least = [_range(costs, safety, best), f"{100 * overs[best]:.1f}%", f"{costs[0].weights[best - 1]:g}"]
            own = [_range(costs, measure, 0) for measure in (over, safety)]
            yield mode, name, f"{len(costs)}", f"{costs[0].n} ({min(seed.scored for seed in costs)})", *own, *least


def _means(costs: Sequence[Costs], measure: str) -> list[float]:
    return [fmean(values) for values in zip(*(seed.shares(measure) for seed in costs), strict=True)]


def _range(costs: Sequence[Costs], measure: str, place: int) -> str:
    values = [seed.shares(measure)[place] for seed in costs]
    return f"{100 * fmean(values):.1f}%, {100 * min(values):.1f} to {100 * max(values):.1f}"


def place(report: Compared, section: Section) -> str:
    """The cases of a section, in words."""
    return "all cases" if section.part == ALL else f"{report.parts}: {section.part} (n = {section.n})"
