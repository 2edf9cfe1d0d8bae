"""The comparison of recipes over seeds, with the base and simple policies as further rows.

Everything follows from committed answers and their reports, without a model and without transcripts. Answers to another
exam, of another task version or with another decoding are refused.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from clinrl import paths
from clinrl.analysis import baselines, contrasts
from clinrl.analysis.compared import ALL, Compared, Kind
from clinrl.analysis.contrasts import Entry
from clinrl.analysis.costs import Costs
from clinrl.analysis.exam import VARIANTS, EvalReport, note_of
from clinrl.analysis.paired import Answers, comparable
from clinrl.analysis.preregistration import Primary, Registration
from clinrl.analysis.run import Run
from clinrl.artifacts import exclusive, sha256_file, staged, write_json, write_text
from clinrl.config.comparisons import BASE
from clinrl.data.dataset import drawn_again
from clinrl.errors import ArtefactError, ParamsError
from clinrl.evaluation.answers import load_report, open_run
from clinrl.evaluation.preregistration import registered
from clinrl.evaluation.record import Record, answers_of, load_record
from clinrl.evaluation.rival import load_rivals
from clinrl.reports import figures, results
from clinrl.reports.render import load, render
from clinrl.tasks.base import Task
from clinrl.types import Case

if TYPE_CHECKING:
    from clinrl.config.comparisons import Comparison
    from clinrl.config.params import Params


@dataclass(frozen=True, kw_only=True)
class Member:
    """A version of the comparison or the base, in one mode."""

    answers: Answers
    report: EvalReport
    record: Record
    """It covers all modes."""

    @property
    def qualities(self) -> Mapping[str, Sequence[float | None]]:
        """The value of each quality that needs no judge, for every case."""
        return self.record.given[self.answers.mode].qualities


def stage(params: "Params", name: str) -> None:
    """Write data/reports/comparisons/<name>.json, .md and .png, and the full tables, <name>/tables.md.

    Raises ParamsError for published figures of a part that the exam does not have,
    ArtefactError if graded answers or reports are missing, altered, or of another exam, or if the primary measure was
    not registered or has changed since, and Busy if another command writes the same comparison.
    """
    target = paths.comparison_report(name)
    with exclusive(target):
        spec = params.comparisons[name]
        base = f"{spec.task}-base"
        run = open_run(params, params.model(base))
        plan = registered(params, name, run) if spec.primary else None
        members = {
            mode: {version: _member(run, mode, version) for version in (base, *spec.versions)} for mode in run.modes
        }
        for mode in run.modes:
            for member in members[mode].values():  # among other things, by the same sampler
                comparable(members[mode][base].answers, member.answers)
        write_json(target, compared(params, name, run, members, plan).model_dump(mode="json"))
        write_pages(target, run.task, params.modes)


def write_pages(target: Path, task: Task, modes: Iterable[str]) -> None:
    """Write the page and the figure of a comparison beside its report, and the full tables in its folder."""
    report = load(target, task, modes, Compared)
    title = f"{report.name} on {report.exam}"
    curves = results.curves(task, report)
    figures.arms(results.dots(report), results.lines(report), title, target.with_suffix(".png"), curves)
    write_text(target.with_suffix(".md"), render("comparison", report=report))
    with staged(target.with_suffix("")) as out:  # staged, so that files of an earlier report go
        write_text(out / "tables.md", render("comparison_tables", report=report))


def compared(
    params: "Params",
    name: str,
    run: Run,
    members: Mapping[str, Mapping[str, Member]],
    plan: Registration | None = None,
) -> Compared:
    """The report of a comparison, from its members by mode and name.

    `run` is the base's exam, `plan` the registration, if there is one. Raises ParamsError for published figures of a
    part that the exam does not have, and ArtefactError for a test of two rows that no mode has both of.
    """
    spec, task, cases = params.comparisons[name], run.task, run.cases
    places = contrasts.parts(task, cases, spec.parts)
    for part in spec.published_parts:
        if part not in places or part == ALL:
            values = ", ".join(places)
            exam = run.model.exam
            raise ParamsError(f"comparisons.{name}.published_parts: {part!r} is no part of {exam}, only {values}")
    simple = baselines.answers(task, cases, _training(params, spec, task))
    besides = load_rivals(run, spec.rivals) | simple
    lazy = [
        Entry(name=row, kind="rival" if row in spec.rivals else "baseline", versions=(), answers=[answers])
        for row, answers in besides.items()
    ]
    entries = {mode: [*_entries(spec, run, mode, some), *lazy] for mode, some in members.items()}
    _check_pairs(spec, entries)
    return Compared(
        name=name,
        task=task.name,
        task_version=task.version,
        exam=run.model.exam,
        exam_digest=run.exam_digest,
        modes=run.modes,
        adapters={version: member.record.adapter_digest for version, member in next(iter(members.values())).items()},
        columns=spec.columns,
        quality=spec.quality,
        parts=spec.parts,
        tests=spec.tests,
        partition=spec.partition,
        published={ALL: spec.published, **spec.published_parts},
        sections=tuple(
            contrasts.section(task, cases, some, spec, mode=mode, part=part, of=of)
            for mode, some in entries.items()
            for part, of in places.items()
        ),
        note=note_of(cases),
        costs={mode: found for mode, some in members.items() if plan and (found := _costs(spec, some))},
        primary=Primary(
            registration=plan,
            digest=sha256_file(paths.preregistration(name)),
            tests=contrasts.primary_tests(task, cases, entries, plan),
        )
        if plan
        else None,
    )


def _training(params: "Params", spec: "Comparison", task: Task) -> list[Case]:
    """The training cases of all versions of a comparison and of their ancestors, each once: data sets may overlap.

    Empty for a task with episodes, since no simple policy learns from those.
    """
    if task.episodes is not None:
        return []
    names = dict.fromkeys(
        params.versions[ancestor].data for version in spec.versions for ancestor in params.lineage(version)[::-1]
    )
    return list({case.id: case for name in names for case in drawn_again(params, name, task)}.values())


def _costs(spec: "Comparison", members: Mapping[str, Member]) -> dict[str, tuple[Costs, ...]]:
    """The results of thresholds in one mode, for the rows whose versions all have them in their reports."""
    found = {row: [members[name].report.costs for name in versions] for row, versions in spec.arms.items()}
    known = {row: tuple(cost for cost in costs if cost) for row, costs in found.items()}
    return {row: costs for row, costs in known.items() if len(costs) == len(found[row])}


def _check_pairs(spec: "Comparison", entries: Mapping[str, Sequence[Entry]]) -> None:
    """Refuse a test of two rows that no mode has both of: the base answers input variants in one mode at most."""
    present = [{entry.name for entry in some} for some in entries.values()]
    for pair in spec.tests:
        if not any({pair.first, pair.second} <= names for names in present):
            base = paths.report(f"{spec.task}-base")
            raise ArtefactError(
                f"{pair.first!r} cannot be tested against {pair.second!r}: {base} holds no answers under that variant "
                f"in any mode; run `dvc repro baseline@{spec.task}`"
            )


def _entries(spec: "Comparison", run: Run, mode: str, members: Mapping[str, Member]) -> list[Entry]:
    """The rows of models in one mode: arms, the base, and the base under input variants."""
    base = run.model.name
    found = [
        _entry(run.task, row, "arm", {name: members[name] for name in versions}) for row, versions in spec.arms.items()
    ]
    found.append(_entry(run.task, BASE, "base", {base: members[base]}))
    for variant in run.task.reporting.variants:
        if under := members[base].record.given.get(f"{mode}.{variant}"):
            qualities = {name: [values] for name, values in under.qualities.items()}
            row, answers = f"{BASE}, {variant}", [under.answers]
            found.append(Entry(name=row, kind="base", versions=(base,), answers=answers, qualities=qualities))
    return found


def _member(run: Run, mode: str, name: str) -> Member:
    """The member for a version or the base, from its record and its report."""
    report, record = load_report(name, mode), load_record(run, name)
    return Member(answers=answers_of(run, mode, record, report), report=report, record=record)


def _entry(task: Task, row: str, kind: Kind, members: Mapping[str, Member]) -> Entry:
    """The entry of a row, from its versions. Measures that only reports have are included if all reports have them."""
    some = list(members.values())
    measured, reported = some[0].qualities, contrasts.in_all([member.report.metrics for member in some])
    judged = [name for name in task.reporting.qualities if name in reported and name not in measured]
    return Entry(
        name=row,
        kind=kind,
        versions=tuple(members),
        answers=[member.answers.answers for member in some],
        qualities={name: [member.qualities[name] for member in some] for name in measured},
        reported={name: reported[name] for name in judged},
        variants=contrasts.in_all([member.report.slices.get(VARIANTS, {}) for member in some]),
    )
