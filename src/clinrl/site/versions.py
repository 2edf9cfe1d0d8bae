"""The contents of the page of a version, merge or base, from its reports, its parameters and comparisons."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clinrl import paths
from clinrl.analysis import alerts
from clinrl.analysis.compared import ALL, Compared, Figure
from clinrl.analysis.exam import Agreement, Confusion, EvalReport
from clinrl.config.model import Model
from clinrl.config.params import Params
from clinrl.config.resolved import uses
from clinrl.evaluation.answers import ALARMS, BETWEEN_MODES, HISTORY_TABLE, load_report
from clinrl.reports import figures, numbers, render
from clinrl.site import charts
from clinrl.site.charts import Intervals
from clinrl.tasks.base import GIVEN, Task
from clinrl.tracking.mlflow_store import flat
from clinrl.types import Estimate

SHADES = 9
"""Depths of colour in a confusion matrix, besides no colour at all."""


@dataclass(frozen=True)
class Exam:
    """The reports of one model; all empty for a model that was not evaluated."""

    reports: Mapping[str, EvalReport]
    between: Agreement
    """How the modes agree, and the paired tests between them."""
    history: figures.History
    alarms: Sequence[alerts.Alarm] | None
    """None if the model was not trained."""

    @property
    def agreement(self) -> Estimate | None:
        """How often the modes give the same readable answer; None with one mode."""
        found = self.between.get("mode_agreement")
        return found if isinstance(found, Estimate) else None


@dataclass(frozen=True)
class Arm:
    """A row of a comparison in which a version is one of the seeds."""

    comparison: str
    name: str
    seeds: int
    report: Compared

    def figure(self, mode: str, metric: str) -> Figure | None:
        """The mean of a metric or a quality over seeds, on all cases; None if the row does not have it."""
        found = [row for section in self.report.sections if (section.mode, section.part) == (mode, ALL)
                 for row in section.rows if row.name == self.name]  # fmt: skip
        return {**found[0].qualities, **found[0].metrics}.get(metric) if found else None


def examined(params: Params, name: str) -> Exam:
    """The reports of a model; empty unless the reports of all modes are here."""
    folder = paths.report(name)
    if not all((folder / f"{mode}.json").exists() for mode in params.modes):
        return Exam({}, {}, [], None)
    reports = {mode: load_report(name, mode) for mode in params.modes}
    between = render.load(folder / BETWEEN_MODES, params.model(name).task, params.modes, Agreement)
    table = folder / HISTORY_TABLE
    history = figures.read_table(table) if table.exists() else []
    return Exam(reports, between, history, alerts.stored(folder / ALARMS))


def arms(params: Params, compared: Mapping[str, Compared], name: str) -> list[Arm]:
    """The rows of comparisons in which a version is a seed; the row with most seeds, its main result, comes first."""
    found = [
        Arm(comparison, arm, len(versions), compared[comparison])
        for comparison, spec in params.comparisons.items()
        if comparison in compared
        for arm, versions in spec.arms.items()
        if name in versions
    ]
    return sorted(found, key=lambda arm: -arm.seeds)


def headline(task: Task, exam: Exam, found: Sequence[Arm]) -> list[tuple[str, list[tuple[str, str]]]]:
    """For each metric, the safety metric first, and each mode: the version's own number and the mean over all seeds."""
    seeds = found[0] if found and found[0].seeds > 1 else None
    names = dict.fromkeys([task.safety.metric, *task.compared, *task.reporting.headline])
    return [
        (
            name,
            [
                (
                    numbers.metric(report.metrics.get(name), task, name, report.n),
                    numbers.figure(seeds.figure(mode, name), task, name, report.n) if seeds else "",
                )
                for mode, report in exam.reports.items()
            ],
        )
        for name in names
        if any(name in report.metrics for report in exam.reports.values())
    ]


def beside(task: Task, arm: Arm, modes: Mapping[str, int]) -> list[Intervals]:
    """A picture for each compared share, of the rows of a comparison except the simple policies."""
    drawn = (rows_of(task, arm.report, metric, modes, f"{metric}: {arm.comparison}") for metric in task.compared)
    return [picture for picture in drawn if picture is not None]


def rows_of(task: Task, report: Compared, metric: str, modes: Mapping[str, int], title: str) -> Intervals | None:
    """A picture of one metric or quality in each mode, of the rows of a comparison except the simple policies."""
    quality = metric not in task.metrics
    rows: dict[str, list[charts.Dot]] = {}
    for section in report.sections:
        for row in section.rows if section.part == ALL else ():
            found = (row.qualities if quality else row.metrics).get(metric)
            if found is not None and row.kind != "baseline":
                says = f"{row.name}, {section.mode}: {numbers.figure(found, task, metric, section.n)}"
                dot = charts.Dot(found.value, found.low, found.high, found.seeds, modes.get(section.mode, 0), says)
                rows.setdefault(row.name, []).append(dot)
    share = task.is_share(metric)
    return charts.intervals(title, "%" if share else metric, rows, share=share)


def names_in(task: Task, modes: Sequence[str], histories: Sequence[figures.History], rows: Sequence[str]) -> list[str]:
    """Every name that a figure of a task may show, in an order that gives neighbours different colours."""
    labels = [str(label) for label in task.labels]
    lines = {
        line
        for history in histories
        for keys in figures.panels(history, labels).values()
        for line in keys
        if line != figures.TOTAL
    }
    return [*modes, *labels, *sorted(lines - {*modes, *labels}), *rows]


def shaded(counts: Confusion) -> list[tuple[str, int, list[tuple[int, int]]]]:
    """A confusion matrix row by row: gold label, its cases, and each count with the depth of its colour."""
    return [
        (name, sum(row), [(count, round(SHADES * count / (sum(row) or 1))) for count in row])
        for name, row in zip(counts.rows, counts.counts, strict=True)
    ]


def slices(task: Task, exam: Exam) -> Iterator[tuple[str, list[str], list[tuple[str, int, list[str]]]]]:
    """Each slice: its columns, and its values with their count of cases and their measures, mode by mode."""
    first = next(iter(exam.reports.values()), None)
    for what, values in first.slices.items() if first else ():
        chosen = numbers.present(task.reporting.slice_measures, values.values()) or numbers.present(
            task.compared, values.values()
        )
        rows = []
        for value in arranged(task, values):
            found = values[value]
            n = max((estimate.n for estimate in found.values()), default=0)
            cells = [
                numbers.metric(report.slices.get(what, {}).get(value, {}).get(name), task, name, n)
                for report in exam.reports.values()
                for name in chosen
            ]
            rows.append((value, n, cells))
        yield what, [f"{name}, {mode}" for mode in exam.reports for name in chosen], rows


def arranged(task: Task, values: Iterable[str]) -> list[str]:
    """The values of a slice: input variants, levels and labels in the order of the task, others by text and number."""
    levels = task.benchmark.levels if task.benchmark else ()
    names = [GIVEN, *task.reporting.variants, *levels, *map(str, task.labels)]
    places = {name: place for place, name in enumerate(names)}

    def place(value: str) -> tuple[int, str, list[int], str]:
        text = re.split(r"\d", value, maxsplit=1)[0].removeprefix("under ")  # `under 1` comes before `1-4`
        return places.get(value, len(names)), text, [int(number) for number in re.findall(r"\d+", value)], value

    return sorted(values, key=place)


def difference(params: Params, model: Model) -> list[tuple[str, str, str, bool]]:
    """For each key of the recipe: the parent's value, the model's value, and whether they differ."""
    own = _recipe(params, model.name)
    parent = _recipe(params, model.parent) if model.parent in params.versions else {}
    pairs = {key: (parent.get(key, ""), own.get(key, "")) for key in (*own, *parent)}
    return [(key, before, now, bool(parent) and before != now) for key, (before, now) in pairs.items()]


def _recipe(params: Params, name: str | None) -> dict[str, str]:
    if name not in params.versions:
        return {}
    used, spec = uses(params, str(name), resolved=True), params.versions[str(name)]
    parts = {"recipe": spec.profile, "data": spec.data, "exam": spec.exam, "seed": spec.seed}
    return {**flat(parts), **flat(used["recipe"][spec.profile]), **flat(used["data"][spec.data], "data.")}


def lineage(params: Params, model: Model, exams: Mapping[str, Exam]) -> list[dict[str, Any]]:
    """A row for each model from the base to this one: its training data, and the digests that its reports name."""
    rows = []
    for name in dict.fromkeys([f"{model.task.name}-base", *params.family(*model.parts), model.name]):
        first = next(iter(exams[name].reports.values()), None) if name in exams else None
        rows.append({
            "name": name, "data": params.versions[name].data if name in params.versions else "",
            "adapter": first.adapter_digest if first else "",
            "exam": first.exam if first else "", "exam_digest": first.exam_digest if first else "",
        })  # fmt: skip
    return rows
