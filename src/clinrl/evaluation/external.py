"""The external exam: a version answers cases from elsewhere, and its figures stand beside what others published.

No answer is kept, only what can be counted. Published rows are as good as what was printed of them: they are compared
by eye, never by a test, since nobody's single answers are known.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from clinrl import paths
from clinrl.analysis import baselines
from clinrl.analysis.exam import EvalReport, build, clusters_of, estimates
from clinrl.artifacts import exclusive, verified, write_json, write_text
from clinrl.artifacts import identity as identity_of
from clinrl.config.model import Model
from clinrl.data.dataset import manifest_of, read_cases
from clinrl.data.reward_audit import proven
from clinrl.errors import ArtefactError, ParamsError, did_you_mean
from clinrl.evaluation.answers import decoding
from clinrl.evaluation.evaluate import check_apart, hear, sit
from clinrl.intervals import wilson
from clinrl.models.judges import Judges
from clinrl.reports.render import load, render
from clinrl.tasks.base import Task
from clinrl.tasks.parts import NO_RESPONSES, Published, PublishedRow, Responses
from clinrl.types import Case, Estimate, Graded, Strict

if TYPE_CHECKING:
    from clinrl.config.params import Params

POOL = "exam"


class Line(Strict):
    """One row of the page: somebody's figures on an external exam."""

    name: str
    n: int = Field(gt=0)
    metrics: dict[str, Estimate]
    """Shares with Wilson intervals, statistics with those of a bootstrap."""
    printed: dict[str, float] = Field(default_factory=dict)
    """Statistics as they were published, without an interval."""
    source: str = ""


class ExternalReport(Strict):
    """A version on one external exam, in every mode. Holds no times: equal answers give equal bytes."""

    name: str
    data: str
    gold: dict[str, int]
    """Cases by gold label."""
    reports: dict[str, EvalReport]
    """By mode."""
    lines: tuple[Line, ...]
    """The version in each mode, then who answers without reading, then what was published."""
    same_make: bool
    """Whether the exam has the size and the gold labels of the published one."""
    says: str
    note: str


def stage(params: "Params", name: str) -> None:
    """Let a version answer its external data; write the report as JSON and page.

    Raises ParamsError if params.yaml names no external exam of `name`, ArtefactError if an input is missing, altered or
    drawn from another pool, DataError if the version was trained on patients or texts of the exam, and Busy if
    another command examines the same version.
    """
    if name not in params.external:
        raise ParamsError(f"params.yaml names no external exam of {name!r}; {did_you_mean(name, params.external)}")
    data = params.external[name].data
    who = replace(params.model(name), exam=data, variants=())
    with exclusive(paths.external_report(name)):
        pool = manifest_of(paths.cases(data), who.task).spec["use"]
        if pool != POOL:
            raise ArtefactError(f"{paths.cases(data)} is drawn from the {pool} pool; an external exam is {POOL} data")
        digest = proven(data, who.task)
        cases = list(read_cases(paths.cases(data), who.task))
        check_apart(params, name, who, cases)
        adapter = identity_of(verified(who.folder))
        judges = Judges(paths.base(who.task.name))
        graded = sit(params, who, cases, judges)
        report = compared(
            who,
            cases,
            graded,
            modes={mode: decoding(params, mode, who.task.name) for mode in params.modes},
            adapter_digest=adapter,
            data_digest=digest,
            responses=hear(who, cases, graded, judges),
        )
        target = paths.external_report(name)
        write_json(target, report.model_dump(mode="json"))
        write_pages(target, who.task, params.modes)


def write_pages(target: Path, task: Task, modes: Iterable[str]) -> None:
    """Write the page of a report beside it."""
    report = ExternalReport.model_validate(load(target, task, modes))
    write_text(target.with_suffix(".md"), render("external", report=report, columns=task.reporting.external))


def compared(
    who: Model,
    cases: Sequence[Case],
    graded: Mapping[str, Sequence[Graded]],
    *,
    modes: Mapping[str, dict[str, Any]],
    adapter_digest: str,
    data_digest: str,
    responses: Responses = NO_RESPONSES,
) -> ExternalReport:
    """The report on graded answers, by mode in the order of the cases. Pure."""
    task = who.task
    golds = [task.label(case) for case in cases]
    idle = baselines.answers(task, cases, [])
    reports = {
        mode: build(
            task=task, name=who.name, mode=mode, mode_spec=modes[mode], exam=who.exam, exam_digest=data_digest,
            adapter_digest=adapter_digest, cases=cases, graded=lines, others=idle, tests=(),
            responses=responses, view=who.variant,
        )
        for mode, lines in graded.items()
    }  # fmt: skip
    counts = Counter(golds)
    same = task.published is not None and all(counts[label] == task.published.labels[label] for label in task.labels)
    mine = [
        Line(name=f"{who.name}, mode {mode}", n=report.n, metrics=_chosen(task, report.metrics))
        for mode, report in reports.items()
    ]
    lazy = [
        Line(
            name=row,
            n=len(cases),
            metrics=_chosen(task, estimates(task.metrics, golds, answers, clusters_of(task, cases))),
        )
        for row, answers in idle.items()
    ]
    return ExternalReport(
        name=who.name,
        data=who.exam,
        gold={str(label): counts[label] for label in task.labels},
        reports=reports,
        lines=(*mine, *lazy, *(published(row, task.published) for row in task.published.rows))
        if task.published
        else (*mine, *lazy),
        same_make=same,
        says=_verdict(task, counts, same=same),
        note=next(iter(reports.values())).note,
    )


def published(row: PublishedRow, of: Published) -> Line:
    """A published row with the intervals that its counts have."""
    n = sum(of.labels.values())
    return Line(
        name=row.name,
        n=n,
        metrics={metric: wilson(hits, n) for metric, hits in row.hits.items()},
        printed=dict(row.statistics),
        source=row.source,
    )


def _chosen(task: Task, metrics: Mapping[str, Estimate]) -> dict[str, Estimate]:
    return {name: metrics[name] for name in task.reporting.external if name in metrics}


def _verdict(task: Task, counts: Mapping[Any, int], *, same: bool) -> str:
    """Whether the published rows are about an exam like this one, in one sentence."""
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
