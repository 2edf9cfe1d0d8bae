"""The comparison of recipes over seeds: their graded answers beside those of the base and of simple policies.

Everything follows from answers that are already graded and from the reports on them; no model is asked. Answers to
another exam, at another task version or with other decoding, are refused.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from clinrl import paths
from clinrl.analysis import baselines, contrasts, controls
from clinrl.analysis.contrasts import ALL, Compared, Entry
from clinrl.analysis.controls import Member
from clinrl.analysis.costs import Costs
from clinrl.analysis.exam import VARIANTS, note_of
from clinrl.analysis.paired import comparable
from clinrl.analysis.preregistration import Primary, Registration
from clinrl.analysis.run import Run
from clinrl.artifacts import exclusive, read_manifest, sha256_file, staged, write_json, write_text
from clinrl.config.schema import BASE
from clinrl.data.dataset import read_cases
from clinrl.errors import ArtefactError, ParamsError, did_you_mean
from clinrl.evaluation.answers import load_answers, load_report, load_variant, open_run, read_graded
from clinrl.evaluation.preregistration import registered
from clinrl.reports import figures, results
from clinrl.reports.render import load, render
from clinrl.tasks.base import Task, as_variant
from clinrl.tasks.importing import is_imported
from clinrl.tasks.parts import NO_RESPONSES
from clinrl.types import Graded

if TYPE_CHECKING:
    from clinrl.config.params import Params
    from clinrl.config.schema import Comparison


def stage(params: "Params", name: str) -> None:
    """Write data/reports/comparisons/<name>.json, .md and .png, and <name>/<version>.json and .md of every version.

    Raises ParamsError for an unknown name, or for published figures of a part that the exam has not, ArtefactError if
    graded answers or reports are missing, altered, or of another exam, or if the primary measure was not registered or
    was registered otherwise, and Busy if another command compares the same.
    """
    if name not in params.comparisons:
        raise ParamsError(f"params.yaml has no comparison {name!r}; {did_you_mean(name, params.comparisons)}")
    target = paths.comparison_report(name)
    with exclusive(target):
        spec = params.comparisons[name]
        base = f"{spec.task}-base"
        run = open_run(params, params.model(base))
        plan = registered(params, name, run) if spec.primary else None
        members = {
            mode: {version: _member(params, spec, run, mode, version) for version in (base, *spec.versions)}
            for mode in run.modes
        }
        # Before the intervals, which take minutes: reports that contradict each other are found out here.
        clusters = None if run.clusters is None else len(set(run.clusters))
        pages = controls.besides(name, run.task, base, members, clusters)
        report = compared(params, name, run, members, plan)
        with staged(paths.comparison_pages(name)) as out:
            for version, one in pages.items():
                write_json(out / f"{version}.json", one.model_dump(mode="json"))
        write_json(target, report.model_dump(mode="json"))
        write_pages(target, run.task, params.modes)


def write_pages(target: Path, task: Task, modes: Iterable[str]) -> None:
    """Write the page and the figure of a comparison beside its report, and the page of each version in its folder."""
    report = Compared.model_validate(load(target, task, modes))
    title = f"{report.name} on {report.exam}"
    curves = results.curves(task, report)
    figures.arms(results.dots(report), results.lines(report), title, target.with_suffix(".png"), curves)
    write_text(target.with_suffix(".md"), render("comparison", report=report))
    for path in sorted(target.with_suffix("").glob("*.json")):
        one = controls.Beside.model_validate(load(path, task, modes))
        write_text(path.with_suffix(".md"), render("controls", report=one, kinds=controls.WHAT))


def compared(
    params: "Params",
    name: str,
    run: Run,
    members: Mapping[str, Mapping[str, Member]],
    plan: Registration | None = None,
) -> Compared:
    """The report of a comparison, from what each of its models answered, by mode and name; `run` is the base's exam.

    `plan` is its registration, if it has one.

    Raises ParamsError for published figures of a part that the exam has not, ArtefactError for a test of rows that are
    in no mode together.
    """
    spec, task, cases = params.comparisons[name], run.task, run.cases
    places = contrasts.parts(task, cases, spec.parts)
    for part in spec.published_parts:
        if part not in places or part == ALL:
            values = ", ".join(places)
            exam = run.model.exam
            raise ParamsError(f"comparisons.{name}.published_parts: {part!r} is no part of {exam}, only {values}")
    training = list(read_cases(paths.cases(params.versions[spec.versions[0]].data), task))
    lazy = [
        Entry(name=row, kind="baseline", versions=(), answers=[answers])
        for row, answers in baselines.answers(task, cases, training).items()
    ]
    entries = {mode: [*_entries(spec, run, mode, some), *lazy] for mode, some in members.items()}
    _check_pairs(spec, entries)
    return Compared(
        name=name,
        task=task.name,
        task_version=task.version,
        exam=run.model.exam,
        exam_digest=run.exam_digest,
        modes={mode: dict(decoding) for mode, decoding in run.modes.items()},
        adapters={
            version: read_manifest(paths.graded(version)).inputs["adapter"]
            for version in (run.model.name, *spec.versions)
        },
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
        costs={mode: found for mode, some in members.items() if (found := _costs(spec, some))},
        primary=Primary(
            registration=plan,
            digest=sha256_file(paths.preregistration(name)),
            tests=contrasts.primary_tests(task, cases, entries, plan),
        )
        if plan
        else None,
    )


def _costs(spec: "Comparison", members: Mapping[str, Member]) -> dict[str, tuple[Costs, ...]]:
    """What thresholds reach in one mode, of the rows all of whose versions' reports say it."""
    found = {row: [members[name].report.costs for name in versions] for row, versions in spec.rows.items()}
    known = {row: tuple(cost for cost in costs if cost) for row, costs in found.items()}
    return {row: costs for row, costs in known.items() if len(costs) == len(found[row])}


def _check_pairs(spec: "Comparison", entries: Mapping[str, Sequence[Entry]]) -> None:
    """Refuse a test whose rows are in no mode together: the base is asked under input variants in one mode at most."""
    present = [{entry.name for entry in some} for some in entries.values()]
    for pair in spec.tests:
        if not any({pair.first, pair.second} <= names for names in present):
            base = paths.graded(f"{spec.task}-base")
            raise ArtefactError(
                f"{pair.first!r} cannot be tested against {pair.second!r}: {base} holds no answers under that variant "
                f"in any mode; run `dvc repro baseline@{spec.task}`"
            )


def _entries(spec: "Comparison", run: Run, mode: str, members: Mapping[str, Member]) -> list[Entry]:
    """The rows that a model answered, in one mode: arms, controls, the base, and the base under input variants."""
    base = run.model.name
    found = [
        _entry(run.task, row, "arm" if row in spec.arms else "control", {name: members[name] for name in versions})
        for row, versions in spec.rows.items()
    ]
    found.append(_entry(run.task, BASE, "base", {base: members[base]}))
    given = read_graded(paths.graded(base) / f"{mode}.jsonl")
    for variant in run.task.reporting.variants:
        path = paths.graded(base) / f"{mode}.{variant}.jsonl"
        if path.exists():
            lines = load_variant(run, given, variant, path)
            qualities = {name: [values] for name, values in _qualities(run, lines, variant).items()}
            answers = [[line.answer for line in lines]]
            found.append(
                Entry(name=f"{BASE}, {variant}", kind="base", versions=(base,), answers=answers, qualities=qualities)
            )
    return found


def _member(params: "Params", spec: "Comparison", run: Run, mode: str, name: str) -> Member:
    """A version or the base as its graded answers and its report have it."""
    answers = load_answers(run, mode, name)  # refuses what is missing, altered, or no answer to this very exam
    report, model = load_report(name, mode), params.model(name)
    comparable(answers, report)
    if report.adapter_digest != read_manifest(paths.graded(name)).inputs["adapter"]:
        raise ArtefactError(
            f"{paths.report(name)} is not about the adapter whose answers are in {paths.graded(name)}; restore both "
            "with `dvc checkout` or run the stage of dvc.yaml that examines it"
        )
    recipe = next((row for row, versions in spec.rows.items() if name in versions), "")
    return Member(
        recipe=recipe,
        control=recipe in spec.controls,
        parent=model.parent,
        data=model.data,
        answers=answers,
        report=report,
        qualities=_qualities(run, read_graded(paths.graded(name) / f"{mode}.jsonl"), model.variant),
    )


def _qualities(run: Run, lines: Sequence[Graded], variant: str) -> dict[str, list[float | None]]:
    """Of each quality that asks no judge, its number for every case. Imported cases have none: no text is kept."""
    if any(map(is_imported, run.cases)):
        return {}
    pairs = [(as_variant(run.task, case, variant), line) for case, line in zip(run.cases, lines, strict=True)]
    return {
        name: [run.task.reporting.qualities[name].of(case, line.transcript, NO_RESPONSES) for case, line in pairs]
        for name in contrasts.without_models(run.task)
    }


def _entry(task: Task, row: str, kind: contrasts.Kind, members: Mapping[str, Member]) -> Entry:
    """The versions of a row as one entry; of what only reports have, what all of them have."""
    some = list(members.values())
    reports, measured = [member.report for member in some], some[0].qualities
    judged = [
        quality
        for quality in task.reporting.qualities
        if quality not in measured and all(quality in report.metrics for report in reports)
    ]
    variants = [report.slices.get(VARIANTS, {}) for report in reports]
    return Entry(
        name=row,
        kind=kind,
        versions=tuple(members),
        answers=[member.answers.answers for member in some],
        qualities={name: [member.qualities[name] for member in some] for name in measured},
        reported={name: [report.metrics[name] for report in reports] for name in judged},
        variants={
            variant: [found[variant] for found in variants]
            for variant in variants[0]
            if all(variant in found for found in variants)
        },
    )
