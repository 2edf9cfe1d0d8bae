"""Evaluation by a published protocol, for tasks that are played in an environment.

First the published protocol: one sampled episode for each of a few seeds and levels, with the published and with the
corrected score. Then the exam, whose many episodes can show effects that so few cannot: sampled at the same
temperature, beside the answers that `clinrl evaluate` kept. The task's policies and the oracle play all of it too.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, Final

from pydantic import Field

from clinrl import paths
from clinrl.analysis import baselines
from clinrl.analysis.exam import NOTE, estimates, measured
from clinrl.analysis.paired import same_sampler
from clinrl.analysis.run import Run
from clinrl.artifacts import exclusive, read_manifest, read_record, write_json, write_text
from clinrl.config.model import Model
from clinrl.config.params import Params
from clinrl.errors import ArtefactError, DataError, ParamsError, did_you_mean
from clinrl.evaluation.answers import SEED, answer, load_graded, open_run
from clinrl.evaluation.evaluate import check_apart
from clinrl.evaluation.sampler import open_sampler
from clinrl.intervals import mean, rate, rounded
from clinrl.models.bases import made_of
from clinrl.models.generate import Sampler
from clinrl.models.rollout import run as rollout
from clinrl.reports.render import load, render
from clinrl.runtime.progress import progress
from clinrl.tasks.base import Task, parts_of
from clinrl.tasks.parts import NO_RESPONSES, Benchmark
from clinrl.types import Case, Estimate, Strict, Transcript

MAX_DRAWN: Final = 1000
"""Most cases that are drawn with one seed in search of all levels."""
POOL: Final = "exam"
ORACLE: Final = "oracle"
SAMPLED: Final = "sampled"
EXAMINED: Final = "as examined"
"""The answers that `clinrl evaluate` kept, at the temperature of the mode: greedy if that is 0."""
ALL: Final = "all"
SCORES: Final = {"theirs": "published score", "ours": "corrected score"}


class Cell(Strict):
    """One episode of the published protocol: the first case of its level that its seed draws."""

    seed: int
    level: str
    case_id: str


class Played(Strict):
    """The scores of a model, a policy or the oracle in the published protocol."""

    who: str
    mode: str
    """Empty for a policy and the oracle."""
    scores: dict[str, tuple[float, ...]]
    """Key of `SCORES` to the scores, in the order of the cells."""
    means: dict[str, dict[str, Estimate]]
    """Key of `SCORES` to the mean score by level and over all; the interval is a bootstrap over cells."""


class Level(Strict):
    """Results on the exam's episodes of one level."""

    quality: Estimate
    """The benchmark's quality, a mean over episodes; the interval is a bootstrap over episodes."""
    statistic: Estimate | None
    """The benchmark's statistic; None if it is undefined."""
    recall: dict[str, Estimate]
    """The recall of each label that is right in some decision; n counts the decisions in which it is right, and the
    interval is a bootstrap over episodes."""


class Sat(Strict):
    """The exam of a model, a policy or the oracle, level by level."""

    who: str
    mode: str
    decoding: str
    """`SAMPLED` or `EXAMINED`; empty, as the mode, for a policy and the oracle."""
    levels: dict[str, Level]


class Above(Strict):
    """Whether, at each level, the quality's interval of `ProtocolReport.name` lies wholly above that of another row."""

    other: str
    mode: str
    decoding: str
    levels: dict[str, bool]


class ProtocolReport(Strict):
    """A version or a base in the published protocol and on its exam. Holds no times: equal answers, equal bytes."""

    name: str
    task: str
    task_version: int
    adapter_digest: str
    exam: str
    exam_digest: str
    against: str | None
    """The ancestor or base that the model is compared with, by the rows of its own report; None for none."""
    settings: dict[str, Any]
    """Seeds, levels, temperature and episodes."""
    modes: dict[str, dict[str, Any]]
    """Decoding of each mode in the exam. Sampled episodes have the same, except for the temperature."""
    sampler: dict[str, str] = Field(default_factory=dict, exclude_if=lambda sampler: not sampler)
    """The software that generated the sampled episodes, at the full scale."""
    cells: tuple[Cell, ...] = Field(min_length=1)
    played: tuple[Played, ...]
    """Rows for the model in each mode, the model `against`, policies, and the oracle."""
    sat: tuple[Sat, ...]
    """The same rows, each with the exam."""
    above: tuple[Above, ...]
    printed: dict[str, dict[str, float]]
    """Published row to its score at each level."""
    note: str = NOTE


def stage(params: Params, name: str) -> None:
    """Evaluate a version or a base in the published protocol, and on its exam at a temperature; write report and page.

    Raises ParamsError if params.yaml has no protocol of `name`, or one of more episodes than the exam has,
    ArtefactError if an input is missing or altered, if the exam was answered by another adapter or sampler, or if the
    report that it is compared with is missing, of other episodes or by another sampler, DataError if a seed draws no
    case of a level or a prompt leaves no room for the budget, and Busy if another command writes the same report.
    """
    protocols = params.protocols
    if name not in protocols.all:
        raise ParamsError(f"params.yaml has no protocol of {name!r}; {did_you_mean(name, protocols.all)}")
    spec, model = protocols.all[name], params.model(name)
    task, published = model.task, published_of(model.task)
    target = paths.protocol_report(name)
    with exclusive(target):
        run = replace(open_run(params, model), adapter_digest=made_of(task, model.folder)["adapter"])
        check_apart(params, run.model, run.cases)
        drawn = draw(task, spec.seeds, spec.levels)
        head = ProtocolReport(
            name=name, task=task.name, task_version=task.version, adapter_digest=run.adapter_digest,
            exam=model.exam, exam_digest=run.exam_digest,
            against=protocols.versions[name].against if name in protocols.versions else None,
            settings=spec.model_dump(mode="json", include={"seeds", "levels", "temperature", "episodes"}),
            modes=run.modes,
            cells=tuple(Cell(seed=seed, level=level, case_id=case.id) for (seed, level), case in drawn.items()),
            played=(), sat=(), above=(), printed={row: dict(found) for row, found in published.printed.items()},
        )  # fmt: skip
        # Before the expensive part, so that a missing report, or one on other episodes, is found early.
        before = _before(head)
        places = chosen(task, run.cases, spec.levels, spec.episodes, f"the exam {model.exam}")
        kept = {(mode, EXAMINED): _kept(run, mode, places) for mode in run.modes}
        exam = [run.cases[place] for place in places]
        sampler = open_sampler(params, model)
        head = head.model_copy(update={"sampler": dict(sampler.identity)})
        of_exam = read_manifest(paths.graded(name)).spec.get("sampler", {})
        same_sampler(name, head.sampler, f"{name} as examined", of_exam)
        if before:
            same_sampler(name, head.sampler, before.name, before.sampler)
        played, sampled = _sample(params, model, sampler, spec.temperature, drawn, exam)
        report = report_of(head, task, before, list(drawn.values()), played, exam, sampled | kept)
        write_json(target, report.model_dump(mode="json"))
        write_pages(target, task, params.modes)


def write_pages(target: Path, task: Task, modes: Iterable[str]) -> None:
    """Write the page of a report beside it."""
    report = load(target, task, modes, ProtocolReport)
    text = render("benchmark", report=report, scores=SCORES, verdicts=verdicts(report))
    write_text(target.with_suffix(".md"), text)


def verdicts(report: ProtocolReport) -> tuple[list[tuple[str, str, str]], dict[str, list[str]]]:
    """The columns, each with mode, decoding and level; and by row, `yes` where the report's interval lies above it."""
    found = {
        (line.other, line.mode, line.decoding, level): "yes" if above else "no"
        for line in report.above
        for level, above in line.levels.items()
    }
    columns = list(dict.fromkeys((mode, decoding, level) for _, mode, decoding, level in found))
    others = dict.fromkeys(line.other for line in report.above)
    return columns, {other: [found[other, *column] for column in columns] for other in others}


def published_of(task: Task) -> Benchmark:
    """The published benchmark of a task."""
    assert task.benchmark is not None  # a params.yaml with a protocol of any other task is refused
    return task.benchmark


def draw(task: Task, seeds: Sequence[int], levels: Sequence[str]) -> dict[tuple[int, str], Case]:
    """The case of each cell: the first of its level among the cases that its seed draws from the published mix.

    The mix decides how often a level is drawn. Cases are of the exam's pool, whose templates no training uses. Raises
    DataError if a seed draws no case of a level.
    """
    published = published_of(task)
    found: dict[tuple[int, str], Case] = {}
    for seed in seeds:
        firsts: dict[str, Case] = {}
        for case in task.cases(MAX_DRAWN, seed, pool=POOL, mix=published.mix):
            firsts.setdefault(task.reporting.slices[published.by](case), case)
            if set(levels) <= set(firsts):
                break
        for level in levels:
            if level not in firsts:
                raise DataError(f"seed {seed} draws no {level} case of {task.name} among its first {MAX_DRAWN:,}")
            found[seed, level] = firsts[level]
    return found


def chosen(task: Task, exam: Sequence[Case], levels: Sequence[str], episodes: int, title: str) -> list[int]:
    """The places of the first `episodes` cases of each level, in the order of the exam.

    Raises ParamsError, with `title` as the exam's name, if the exam has fewer.
    """
    of = task.reporting.slices[published_of(task).by]
    by_level: dict[str, list[int]] = {level: [] for level in levels}
    for place, case in enumerate(exam):
        if (level := of(case)) in by_level and len(by_level[level]) < episodes:
            by_level[level].append(place)
    for level, places in by_level.items():
        if len(places) < episodes:
            raise ParamsError(
                f"{title} has {len(places)} cases of level {level}, and the protocol asks for {episodes} a level; "
                "lower its episodes or enlarge the exam"
            )
    return sorted(place for places in by_level.values() for place in places)


def _kept(run: Run, mode: str, places: Sequence[int]) -> list[Transcript]:
    """The kept transcripts of the chosen cases in a mode. Raises ArtefactError if another adapter answered."""
    name, folder = run.model.name, paths.graded(run.model.name)
    _, lines = load_graded(run, mode, name)
    if read_manifest(folder).inputs["adapter"] != run.adapter_digest:
        raise ArtefactError(
            f"{folder} was answered by another adapter than {run.model.folder} now holds; examine {name} again"
        )
    return [lines[place].transcript for place in places]


def _before(head: ProtocolReport) -> ProtocolReport | None:
    """The report of the model that a version is compared with, or None if there is no such model.

    Raises ArtefactError if the report is missing or is about other episodes.
    """
    if head.against is None:
        return None
    path = paths.protocol_report(head.against)
    advice = f"run `clinrl protocol {head.against}`"
    before = read_record(
        path, ProtocolReport,
        lambda: f"{path} does not exist, and {head.name} is compared with it; {advice}",
        lambda fault: f"{path} is no report of the protocol ({fault}); {advice}",
    )  # fmt: skip
    for what in ("task_version", "exam_digest", "settings", "modes", "cells"):
        if getattr(before, what) != getattr(head, what):
            raise ArtefactError(
                f"{path} has other {what.replace('_', ' ')} than {head.name} would have; {advice} again"
            )
    return before


def _sample(
    params: Params, model: Model, sampler: Sampler, temperature: float,
    drawn: Mapping[tuple[int, str], Case], exam: Sequence[Case],
) -> tuple[dict[str, list[Transcript]], dict[tuple[str, str], list[Transcript]]]:  # fmt: skip
    """Sampled transcripts of the cells by mode, each with its case's seed, and of the exam by mode and decoding."""
    played, sampled = {}, {}
    for name in params.modes:
        mode = params.mode(name, model.task.name).model_copy(update={"temperature": temperature})
        budget = params.budget(name, model.task.name)
        with progress(f"{model.name} {name}, sampled", len(drawn) + len(exam)) as advance:
            played[name] = [
                rollout(sampler, model.task, [model.sees(case)], mode, budget, seed, progress=advance)[0]
                for (seed, _), case in drawn.items()
            ]
            shown = [model.sees(case) for case in exam]
            sampled[name, SAMPLED] = rollout(sampler, model.task, shown, mode, budget, SEED, progress=advance)
    return played, sampled


def report_of(
    head: ProtocolReport,
    task: Task,
    before: ProtocolReport | None,
    cells: Sequence[Case],
    played: Mapping[str, Sequence[Transcript]],
    exam: Sequence[Case],
    examined: Mapping[tuple[str, str], Sequence[Transcript]],
) -> ProtocolReport:
    """The report on transcripts: of the cells by mode, of the exam by mode and decoding. Asks no model.

    Where there is an earlier report on the same episodes, the rows of policies and the oracle are taken from it.
    """
    of = task.reporting.slices[published_of(task).by]
    mine = [_played(task, head, head.name, mode, cells, some) for mode, some in played.items()]
    rivals = [] if before else list(policies(task, exam))
    with progress(f"{head.name}, intervals", len(examined) + len(rivals)) as advance:

        def by_level(row: str, mode: str, decoding: str, transcripts: Sequence[Transcript]) -> Sat:
            pairs = list(zip(exam, transcripts, strict=True))
            found = {
                level: _level(task, [pair for pair in pairs if of(pair[0]) == level])
                for level in head.settings["levels"]
            }
            advance()
            return Sat(who=row, mode=mode, decoding=decoding, levels=found)

        my_exams = [by_level(head.name, *how, transcripts) for how, transcripts in examined.items()]
        exams = [by_level(row, "", "", transcripts) for row, transcripts in rivals]
    if before:  # its rows are about the same episodes
        others = [row for row in before.played if not row.mode or row.who == before.name]
        exams = [row for row in before.sat if not row.mode or row.who == before.name]
    else:
        others = [_played(task, head, row, "", cells, some) for row, some in policies(task, cells)]
    return head.model_copy(
        update={
            "played": (*mine, *others),
            "sat": (*my_exams, *exams),
            "above": tuple(_above(my_exams, [row for row in exams if row.who != ORACLE])),
        }
    )


def policies(task: Task, cases: Sequence[Case]) -> Iterator[tuple[str, list[Transcript]]]:
    """Name and transcripts of every policy of the task, and last of the oracle, which gives the task's best answer."""
    for name, policy in task.policies().items():
        yield name, [policy(case, Random(f"{baselines.SEED}/{name}/{case.id}")) for case in cases]
    yield ORACLE, [task.gold(case, thinking=False) for case in cases]


def _played(
    task: Task, head: ProtocolReport, row: str, mode: str, cases: Sequence[Case], transcripts: Sequence[Transcript]
) -> Played:
    published = published_of(task)
    pairs = list(zip(cases, transcripts, strict=True))
    found, means = {}, {}
    for name, reward in (("theirs", published.theirs), ("ours", published.ours)):
        totals = tuple(rounded(task.score(case, transcript, reward).total) for case, transcript in pairs)
        by_level = {
            level: [total for total, cell in zip(totals, head.cells, strict=True) if cell.level == level]
            for level in head.settings["levels"]
        }
        found[name] = totals
        means[name] = {level: mean(some) for level, some in (by_level | {ALL: list(totals)}).items()}
    return Played(who=row, mode=mode, scores=found, means=means)


def _level(task: Task, pairs: Sequence[tuple[Case, Transcript]]) -> Level:
    published = published_of(task)
    cases, transcripts = [case for case, _ in pairs], [transcript for _, transcript in pairs]
    golds, answers = [task.label(case) for case in cases], [answer(task, one) for one in transcripts]
    decisions: dict[Any, list[tuple[bool, str]]] = {label: [] for label in task.labels}
    for case, gold, given in zip(cases, golds, answers, strict=True):
        for right, decided in parts_of(task, gold, given).values():
            decisions[right].append((decided == right, case.id))
    statistic = estimates({published.statistic: task.metrics[published.statistic]}, golds, answers)
    quality = measured(
        {published.quality: task.reporting.qualities[published.quality]}, cases, transcripts, NO_RESPONSES
    )
    return Level(
        quality=quality[published.quality],
        statistic=statistic.get(published.statistic),
        recall={
            str(label): rate([hit for hit, _ in some], [case for _, case in some])
            for label, some in decisions.items()
            if some
        },
    )


def _above(mine: Sequence[Sat], others: Sequence[Sat]) -> Iterator[Above]:
    """Compare every row of `mine` with every other row; with another model's only in the same mode and decoding."""
    for row in mine:
        for other in others:
            if other.mode in ("", row.mode) and other.decoding in ("", row.decoding):
                yield Above(
                    other=other.who,
                    mode=row.mode,
                    decoding=row.decoding,
                    levels={
                        level: found.quality.low > other.levels[level].quality.high
                        for level, found in row.levels.items()
                    },
                )
