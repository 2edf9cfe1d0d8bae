"""The external exam: a version answers cases from elsewhere, and a report shows its metrics beside published ones.

No answer is kept, only counts. Published rows hold no more than what was printed. They are compared by eye, never by a
test, since their single answers are not known.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import Field

from clinrl import paths
from clinrl.analysis import baselines
from clinrl.analysis.exam import EvalReport, build, estimates
from clinrl.analysis.run import Run
from clinrl.artifacts import exclusive, write_json, write_text
from clinrl.config.params import Params
from clinrl.errors import ParamsError, did_you_mean
from clinrl.evaluation.evaluate import answer_exam, open_apart, responses_of
from clinrl.intervals import wilson
from clinrl.models.judges import Judges
from clinrl.reports.render import load, render
from clinrl.tasks.base import Task
from clinrl.tasks.parts import NO_RESPONSES, Published, Responses
from clinrl.types import Estimate, Strict

POOL: Final = "exam"


class Line(Strict):
    """One row of the page: the metrics of a model, a policy or a publication on an external exam."""

    name: str
    n: int = Field(gt=0)
    metrics: dict[str, Estimate]
    """Metrics with intervals as in an exam; for a published row only shares, with Wilson intervals."""
    printed: dict[str, float] = Field(default_factory=dict)
    """Published statistics, which have no interval."""
    source: str = ""


class ExternalReport(Strict):
    """A version on one external exam, in every mode. Holds no times: equal answers give equal bytes."""

    name: str
    data: str
    gold: dict[str, int]
    """Cases by gold label."""
    reports: dict[str, EvalReport]
    """The report of each mode."""
    lines: tuple[Line, ...]
    """The version in each mode, then the simple policies, then the published rows."""
    same_make: bool
    """Whether the exam has the size and the gold labels of the published one."""
    says: str
    note: str
    clusters: int | None = Field(default=None, exclude_if=lambda clusters: clusters is None)
    """Number of clusters of cases, such as patients; None if cases are independent."""


def stage(params: Params, name: str) -> None:
    """Evaluate a version on its external data; write the report as JSON and page.

    Raises ParamsError if params.yaml names no external exam of `name`, ArtefactError if an input is missing, altered or
    drawn from another pool, DataError if the version was trained on patients or texts of the exam, and Busy if
    another command evaluates the same version.
    """
    if name not in params.external:
        known = f"{did_you_mean(name, params.external)}, or " if params.external else ""
        do = "describe the cases under `imports` and the exam under `external` (docs/data.md)"
        raise ParamsError(f"params.yaml names no external exam of {name!r}; {known}{do}")
    target = paths.external_report(name)
    with exclusive(target):
        run, _ = open_apart(params, name, params.external[name].data, POOL, f"an external exam is {POOL} data")
        judges = Judges(paths.base(run.task.name))
        run = answer_exam(params, run, judges)
        write_json(target, report_of(run, responses_of(run, judges)).model_dump(mode="json"))
        write_pages(target, run.task, params.modes)


def write_pages(target: Path, task: Task, modes: Iterable[str]) -> None:
    """Write the page of a report beside it."""
    report = load(target, task, modes, ExternalReport)
    write_text(target.with_suffix(".md"), render("external", report=report, columns=task.reporting.external))


def report_of(run: Run, responses: Responses = NO_RESPONSES) -> ExternalReport:
    """The report on a run, with the simple policies and the published rows. Pure."""
    task, published = run.task, run.task.published
    lazy = {
        row: estimates(task.metrics, run.golds, answers, run.clusters)
        for row, answers in baselines.answers(task, run.cases, []).items()
    }
    others = {row: {name: found[name] for name in task.reporting.row_metrics if name in found}
              for row, found in lazy.items()}  # fmt: skip
    reports = {mode: build(run, mode, others=others, tests=(), responses=responses) for mode in run.modes}
    counts = Counter(run.golds)
    same = published is not None and all(counts[label] == published.labels[label] for label in task.labels)
    figures = {f"{run.model.name}, mode {mode}": report.metrics for mode, report in reports.items()}
    figures = {
        row: {name: found[name] for name in task.reporting.external if name in found}
        for row, found in (figures | lazy).items()
    }
    return ExternalReport(
        name=run.model.name,
        data=run.model.exam,
        gold={str(label): counts[label] for label in task.labels},
        reports=reports,
        lines=(
            *(Line(name=row, n=len(run.cases), metrics=metrics) for row, metrics in figures.items()),
            *(published_lines(published) if published else ()),
        ),
        same_make=same,
        says=_verdict(task, counts, same=same),
        note=next(iter(reports.values())).note,
        clusters=None if run.clusters is None else len(set(run.clusters)),
    )


def published_lines(published: Published) -> list[Line]:
    """The published rows, with intervals from their counts."""
    n = sum(published.labels.values())
    return [
        Line(
            name=row.name,
            n=n,
            metrics={metric: wilson(hits, n) for metric, hits in row.hits.items()},
            printed=dict(row.statistics),
            source=row.source,
        )
        for row in published.rows
    ]


def _verdict(task: Task, counts: Mapping[Any, int], *, same: bool) -> str:
    """A text for the page on whether the published rows are about an exam like this one."""
    if task.published is None:
        return f"Nothing is published for {task.name}."
    theirs, mine = ("/".join(str(of.get(label, 0)) for label in task.labels) for of in (task.published.labels, counts))
    total = sum(task.published.labels.values())
    if same:
        return (
            f"These {total} cases have as many of each gold label as the published exam ({theirs}). Only if they are "
            "the very same cases, which is not known here, can the rows be compared; beside synthetic ones they mean "
            "nothing. With so few, most differences lie within the intervals."
        )
    return (
        f"The published rows are not comparable with the others: they are about {total} cases with gold labels "
        f"{theirs}, and here are {sum(counts.values())} with {mine}."
    )
