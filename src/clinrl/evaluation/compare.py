"""The comparison of recipes over seeds: their graded answers, those of the base and of who does not read, as a report.

Everything follows from answers that are already graded and from the reports on them; no model is asked. Who sat
another exam, at another task version or with other decoding, is refused.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clinrl import paths
from clinrl.analysis import baselines, contrasts, controls
from clinrl.analysis.contrasts import ALL, Compared, Entry
from clinrl.analysis.exam import VIEW, EvalReport, clusters_of, note_of
from clinrl.analysis.paired import Sitting, comparable
from clinrl.artifacts import exclusive, read_manifest, staged, write_json, write_text
from clinrl.config.model import Model
from clinrl.config.schema import BASE
from clinrl.data.dataset import read_cases
from clinrl.errors import ArtefactError, ParamsError, did_you_mean
from clinrl.evaluation.answers import answered_under, load_report, load_sitting, read_graded, unanswered
from clinrl.reports import figures, results
from clinrl.reports.render import load, render
from clinrl.tasks.base import Task, as_variant
from clinrl.tasks.importing import is_imported
from clinrl.tasks.parts import NO_RESPONSES
from clinrl.types import Case, Graded

if TYPE_CHECKING:
    from clinrl.config.params import Params
    from clinrl.config.schema import Comparison


def stage(params: "Params", name: str) -> None:
    """Write data/reports/comparisons/<name>.json, .md and .png, and <name>/<version>.json and .md of every version.

    Raises ParamsError for an unknown name, or for published figures of a part that the exam has not, ArtefactError if
    graded answers or reports are missing, altered, or of another exam, and Busy if another command compares the same.
    """
    if name not in params.comparisons:
        raise ParamsError(f"params.yaml has no comparison {name!r}; {did_you_mean(name, params.comparisons)}")
    target = paths.comparison_report(name)
    with exclusive(target):
        spec = params.comparisons[name]
        who, cases, blank = unanswered(params, f"{spec.task}-base")
        sat = {
            mode: {version: _sat(params, version, who.task, cases, like) for version in _everybody(spec)}
            for mode, like in blank.items()
        }
        clusters = clusters_of(who.task, cases)
        # Before the intervals, which take minutes: reports that contradict each other are found out here.
        pages = _pages(params, name, who.task, sat, None if clusters is None else len(set(clusters)))
        report = compared(params, name, who, cases, blank, sat)
        with staged(paths.comparison_pages(name)) as out:
            for version, one in pages.items():
                write_json(out / f"{version}.json", one.model_dump(mode="json"))
        write_json(target, report.model_dump(mode="json"))
        write_pages(target, who.task, params.modes)


def write_pages(target: Path, task: Task, modes: Iterable[str]) -> None:
    """Write the page and the figure of a comparison beside its report, and the page of each version in its folder."""
    report = Compared.model_validate(load(target, task, modes))
    title = f"{report.name} on {report.exam}"
    figures.arms(results.dots(report), results.lines(report), title, target.with_suffix(".png"))
    write_text(target.with_suffix(".md"), render("comparison", report=report))
    for path in sorted(target.with_suffix("").glob("*.json")):
        one = controls.Beside.model_validate(load(path, task, modes))
        write_text(path.with_suffix(".md"), render("controls", report=one, kinds=controls.WHAT))


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """Answers to the exam in one mode, under one view of its cases."""

    answers: Sequence[Any]
    qualities: Mapping[str, Sequence[float | None]]
    """Of those that ask no model, a number for every case."""


@dataclass(frozen=True, kw_only=True)
class _Sat(_Seen):
    """What one version answered in one mode. The base under another view has no report of its own, only a slice."""

    sitting: Sitting
    report: EvalReport


def compared(
    params: "Params",
    name: str,
    who: Model,
    cases: Sequence[Case],
    blank: Mapping[str, Sitting],
    sat: Mapping[str, Mapping[str, _Sat]],
) -> Compared:
    """The report of a comparison, from what everybody in it answered, by mode and name; `who` is the base.

    Raises ParamsError for published figures of a part that the exam has not, ArtefactError for a test of rows that are
    in no mode together.
    """
    spec = params.comparisons[name]
    task = who.task
    places = contrasts.parts(task, cases, spec.parts)
    for part in spec.published_parts:
        if part not in places or part == ALL:
            values = ", ".join(places)
            raise ParamsError(f"comparisons.{name}.published_parts: {part!r} is no part of {who.exam}, only {values}")
    training = list(read_cases(paths.cases(params.versions[spec.versions[0]].data), task))
    idle = [
        Entry(name=row, kind="baseline", versions=(), answers=[answers])
        for row, answers in baselines.answers(task, cases, training).items()
    ]
    entries = {mode: [*_entries(spec, task, cases, mode, some), *idle] for mode, some in sat.items()}
    _check_pairs(spec, entries)
    return Compared(
        name=name,
        task=task.name,
        task_version=task.version,
        exam=who.exam,
        exam_digest=next(iter(blank.values())).exam_digest,
        modes={mode: dict(like.mode_spec) for mode, like in blank.items()},
        adapters={version: read_manifest(paths.graded(version)).inputs["adapter"] for version in _everybody(spec)},
        columns=spec.columns,
        quality=spec.quality,
        parts=spec.parts,
        tests=spec.tests,
        published={ALL: spec.published, **spec.published_parts},
        sections=tuple(
            contrasts.section(task, cases, some, mode=mode, part=part, of=of, chosen=spec.columns, pairs=spec.tests)
            for mode, some in entries.items()
            for part, of in places.items()
        ),
        note=note_of(cases),
    )


def _check_pairs(spec: "Comparison", entries: Mapping[str, Sequence[Entry]]) -> None:
    """Refuse a test whose rows are in no mode together: the base is asked under other views in one mode at most."""
    present = [{entry.name for entry in some} for some in entries.values()]
    for pair in spec.tests:
        if not any({pair.first, pair.second} <= names for names in present):
            base = paths.graded(f"{spec.task}-base")
            raise ArtefactError(
                f"{pair.first!r} cannot be tested against {pair.second!r}: {base} holds no answers under that view in "
                f"any mode; run `dvc repro baseline@{spec.task}`"
            )


def _everybody(spec: "Comparison") -> tuple[str, ...]:
    return (f"{spec.task}-base", *spec.versions)


def _pages(
    params: "Params", name: str, task: Task, sat: Mapping[str, Mapping[str, _Sat]], clusters: int | None
) -> dict[str, controls.Beside]:
    """Every version beside the controls, by name. Who is of two rows is of the first."""
    spec = params.comparisons[name]
    recipes = {version: row for row, versions in reversed(spec.rows.items()) for version in versions}
    people = {version: params.model(version) for version in _everybody(spec)}
    members = {
        mode: {
            version: controls.Member(
                recipe=recipes.get(version, ""),
                control=recipes.get(version) in spec.controls,
                parent=people[version].parent,
                data=people[version].data,
                sitting=one.sitting,
                report=one.report,
            )
            for version, one in some.items()
        }
        for mode, some in sat.items()
    }
    return controls.besides(name, task, f"{spec.task}-base", members, clusters)


def _entries(spec: "Comparison", task: Task, cases: Sequence[Case], mode: str, sat: Mapping[str, _Sat]) -> list[Entry]:
    """The rows that a model answered, in one mode: arms, controls, the base, and the base under other views."""
    found = [
        _together(task, row, "arm" if row in spec.arms else "control", versions, [sat[name] for name in versions])
        for row, versions in spec.rows.items()
    ]
    base = f"{spec.task}-base"
    found.append(_together(task, BASE, "base", (base,), [sat[base]]))
    given = read_graded(paths.graded(base) / f"{mode}.jsonl")
    for view in task.reporting.variants:
        path = paths.graded(base) / f"{mode}.{view}.jsonl"
        if path.exists():
            lines = answered_under(task, cases, given, view, path)
            found.append(_together(task, f"{BASE}, {view}", "base", (base,), [_seen(task, cases, lines, view)]))
    return found


def _seen(task: Task, cases: Sequence[Case], lines: Sequence[Graded], view: str) -> _Seen:
    return _Seen(answers=[line.answer for line in lines], qualities=_qualities(task, cases, lines, view))


def _sat(params: "Params", name: str, task: Task, cases: Sequence[Case], like: Sitting) -> _Sat:
    sitting = load_sitting(name, like, cases)  # refuses what is missing, altered, or no answer to this very exam
    report = load_report(name, like.mode)
    comparable(like, report)
    if report.adapter_digest != read_manifest(paths.graded(name)).inputs["adapter"]:
        raise ArtefactError(
            f"{paths.report(name)} is not about the adapter whose answers are in {paths.graded(name)}; restore both "
            "with `dvc checkout` or run the stage of dvc.yaml that examines it"
        )
    lines = read_graded(paths.graded(name) / f"{like.mode}.jsonl")
    qualities = _qualities(task, cases, lines, params.model(name).variant)
    return _Sat(answers=sitting.answers, qualities=qualities, sitting=sitting, report=report)


def _qualities(task: Task, cases: Sequence[Case], lines: Sequence[Graded], view: str) -> dict[str, list[float | None]]:
    """Of each quality that asks no model, its number for every case. Imported cases have none: no text is kept."""
    if any(map(is_imported, cases)):
        return {}
    shown = [as_variant(task, case, view) for case in cases]
    return {
        name: [
            task.reporting.qualities[name].of(case, line.transcript, NO_RESPONSES)
            for case, line in zip(shown, lines, strict=True)
        ]
        for name in contrasts.without_models(task)
    }


def _together(task: Task, row: str, kind: contrasts.Kind, versions: Sequence[str], sat: Sequence[_Seen]) -> Entry:
    """The versions of a row as one entry; of what only reports know, what all of them have."""
    reports = [one.report for one in sat if isinstance(one, _Sat)]
    measured = sat[0].qualities
    asked = [
        quality
        for quality in task.reporting.qualities
        if quality not in measured and reports and all(quality in report.metrics for report in reports)
    ]
    views = [report.slices.get(VIEW, {}) for report in reports]
    return Entry(
        name=row,
        kind=kind,
        versions=tuple(versions),
        answers=[one.answers for one in sat],
        qualities={name: [one.qualities[name] for one in sat] for name in measured},
        reported={name: [report.metrics[name] for report in reports] for name in asked},
        views={view: [some[view] for some in views] for view in (views or [{}])[0] if all(view in v for v in views)},
    )
