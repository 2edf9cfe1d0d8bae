"""Sentences on a comparison of recipes that the tests choose, and what its figure shows.

A difference is named only where its p, adjusted within its family, is below 0.05; otherwise it is said that none is
shown. What the rows are about comes from params.yaml: a pair says what its first row has and its second has not.
"""

from collections.abc import Iterator, Sequence

from clinrl.analysis.baselines import BAG_OF_WORDS, PRIOR, RANDOM
from clinrl.analysis.contrasts import ALL, COMMONEST, Compared, Contrast, Figure, Section
from clinrl.config.schema import Pair
from clinrl.reports.numbers import change, p_relation
from clinrl.reports.words import ALPHA
from clinrl.tasks.base import Task, get_task

FEW = 20
"""Clusters below which a bootstrap over them gives intervals that are too narrow."""

Dots = list[tuple[str, list[tuple[str, str, Figure]]]]
"""Panels of the figure: a measure, and name, kind and number of the rows that have it."""


def paragraphs(report: Compared, sections: Sequence[Section]) -> Iterator[str]:
    """What the tests of one mode show, pair by pair, and what they rest on."""
    task, whole = get_task(report.task), sections[0]
    for pair in report.tests:
        if any(_is_of(contrast, pair) for contrast in whole.contrasts):
            yield " ".join(_about(report, task, pair, sections))
    limits = [
        f"All p values are adjusted (Holm) within their family: one measure, one kind of test, in one mode and part. "
        f"What is not shown may still exist. All figures hold for {report.exam} only."
    ]
    if whole.clusters is not None:
        limits.append(
            "McNemar's test takes cases for independent, which those of one cluster are not: where it disagrees with a "
            "test over clusters, believe the latter."
        )
    limits += [
        f"{place(report, section)} has {section.clusters} clusters: its intervals are too narrow and its p values too "
        "small, so that even what is shown there needs a second look."
        for section in sections
        if section.clusters is not None and section.clusters < FEW
    ]
    if (most := max(len(row.versions) for row in whole.rows)) > 1:
        limits.append(f"Of {most} seeds at most, the spread between seeds is itself uncertain.")
    single = [row.name for row in whole.rows if row.kind in ("arm", "control") and len(row.versions) == 1]
    if single:
        limits.append(f"Of one seed only, and so without the spread of seeds: {', '.join(single)}.")
    yield " ".join(limits)


def _about(report: Compared, task: Task, pair: Pair, sections: Sequence[Section]) -> Iterator[str]:
    """The sentences on one pair."""
    whole = sections[0]
    tests = [contrast for contrast in whole.contrasts if _is_of(contrast, pair)]
    pooled = {test.measure: test for test in tests if test.versions is None}
    main = report.columns[0]
    yield f"**{pair.says[0].upper()}{pair.says[1:]}** ({pair.first} against {pair.second})."
    labels = [_verdict(task, pooled[main])] if main in pooled else []
    labels += [
        _over_seeds(task, [test for test in tests if test.versions and test.measure == share])
        for share in task.compared
    ]
    yield f"In labels: {'; '.join(labels)}."
    reasoning = [_verdict(task, test) for name, test in pooled.items() if name not in (main, COMMONEST)]
    if reasoning:
        yield f"In reasoning: {'; '.join(reasoning)}."
    yield _prior(whole, pair, pooled[COMMONEST])
    for section in sections[1:]:
        here = {test.measure: test for test in section.contrasts if test.versions is None and _is_of(test, pair)}
        said = [_verdict(task, here[name]) for name in (main, report.quality) if name in here]
        if said:
            yield f"In part {section.part} of {report.parts}: {'; '.join(said)}."


def _verdict(task: Task, test: Contrast) -> str:
    """What one test over all seeds says, and no more."""
    figures = f"{change(test.difference, task, test.measure)}, adjusted p {p_relation(test.adjusted)}"
    if test.adjusted >= ALPHA:
        return f"no difference in {test.measure} is shown ({figures})"
    higher = test.difference.value > 0
    metric = task.metrics.get(test.measure) or task.reporting.qualities[test.measure]
    judged = "worse" if (metric.worse == "higher") == higher else "better"
    return f"{test.measure} is {'higher' if higher else 'lower'}, which is {judged} ({figures})"


def _over_seeds(task: Task, tests: Sequence[Contrast]) -> str:
    """What the exact tests of one share say, seed by seed."""
    measure = task.called(tests[0].measure)
    more, fewer = (
        sum(test.adjusted < ALPHA and sign * test.difference.value > 0 for test in tests) for sign in (1, -1)
    )
    runs = "the one pair of versions" if len(tests) == 1 else f"the {len(tests)} pairs of versions"
    if not more and not fewer:
        return f"no difference in {measure} is shown in {runs}"
    found = [f"{what} {measure} in {count}" for what, count in (("more", more), ("fewer", fewer)) if count]
    return f"{' and '.join(found)} of {runs}"


def _prior(section: Section, pair: Pair, test: Contrast) -> str:
    """How often the two answer the commonest label, and whether that moved towards how often it is right."""
    rows = {row.name: row for row in section.rows}
    mine, theirs = (rows[name].answered[section.commonest] for name in (pair.first, pair.second))
    right = section.right[section.commonest]
    figures = f"{100 * mine:.1f}% against {100 * theirs:.1f}% of answers, and right in {100 * right:.1f}% of cases"
    name = f"the commonest label, {section.commonest},"
    if test.adjusted >= ALPHA:
        return f"No difference in how often {name} is answered is shown ({figures})."
    said = f"{name[0].upper()}{name[1:]} is answered {'more' if mine > theirs else 'less'} often"
    # Where the two lie on either side of what is right, the test says nothing of which is nearer to it.
    if (mine - right) * (theirs - right) >= 0:
        said += f", {'nearer to' if abs(mine - right) < abs(theirs - right) else 'farther from'} how often it is right"
    return f"{said} ({figures}; adjusted p {p_relation(test.adjusted)})."


def dots(report: Compared) -> Dots:
    """The panels of the figure, of the first mode that has the reasoning, or of the first: its rows on all cases."""
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
    """What who does not read reaches on the first column, by name: the best constant answer, guesses, bag of words."""
    main, task = report.columns[0], get_task(report.task)
    rows = [row for row in report.sections[0].rows if row.kind == "baseline" and main in row.metrics]
    reached = {row.name: row.metrics[main].value for row in rows}
    named = {name: reached.pop(name) for name in (RANDOM, PRIOR, BAG_OF_WORDS) if name in reached}
    best = max if task.metrics[main].worse == "lower" else min
    return {name: reached[name] for name in (best(reached, key=lambda row: reached[row]),)} | named


def _is_of(test: Contrast, pair: Pair) -> bool:
    return (test.first, test.second) == (pair.first, pair.second)


def place(report: Compared, section: Section) -> str:
    """Which cases a section is about."""
    return "All cases" if section.part == ALL else f"Part {section.part} of {report.parts}"
