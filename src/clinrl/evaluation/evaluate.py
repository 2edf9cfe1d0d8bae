"""The exam: a version, or the base, answers every case in every mode; the answers are graded, kept and reported.

Graded answers go to `paths.graded(name)`, one JSON Lines file a mode, in exam order. Where the task can show its cases
in other ways, the first mode with thinking is asked once more under each of these views. Everything in
`paths.report(name)` follows from them, from the parent's graded answers and from the training cases.
"""

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, TypeAdapter
from pydantic_core import to_jsonable_python

from clinrl import paths
from clinrl.analysis import alerts, baselines
from clinrl.analysis.exam import Agreement, EvalReport, build, column, summary
from clinrl.analysis.paired import Sitting, between_modes, compare
from clinrl.artifacts import (
    canonical_json,
    exclusive,
    identity,
    read_manifest,
    seal,
    staged,
    verified,
    write_json,
    write_text,
)
from clinrl.config.model import Model
from clinrl.data.dataset import progress, read_cases
from clinrl.data.reward_audit import proven
from clinrl.errors import ArtefactError
from clinrl.evaluation.answers import (
    ALARMS,
    BETWEEN_MODES,
    HISTORY,
    HISTORY_TABLE,
    SEED,
    SUMMARY,
    answer,
    load_sitting,
    rows_of,
    sitting_of,
    with_views,
)
from clinrl.evaluation.record import write_record
from clinrl.models.generate import Sampler
from clinrl.models.judges import Judges, judge_responses, scores
from clinrl.models.rollout import run
from clinrl.reports import figures
from clinrl.reports.render import load, render
from clinrl.tasks import importing
from clinrl.tasks.base import Task
from clinrl.tasks.parts import NO_RESPONSES, Responses
from clinrl.types import Case, Graded, Transcript

if TYPE_CHECKING:
    from clinrl.config.params import Params


def stage(params: "Params", name: str) -> None:
    """Examine a version, a merge, or `<task>-base`: write its graded answers and its reports.

    Raises ParamsError for a name that params.yaml does not have, ArtefactError if an input is missing, altered, built
    for another task version or without the exam's proof, or if the parent sat another exam, Busy if another command
    examines the same name.
    """
    who = params.model(name)
    with exclusive(paths.graded(name)):
        exam_digest = proven(who.exam, who.task)
        cases = list(read_cases(paths.cases(who.exam), who.task))
        training = list(read_cases(paths.cases(who.data), who.task)) if who.data else []
        inputs = {"exam": exam_digest, **models_of(who)}
        blank = {mode: sitting_of(who, mode, params, exam_digest, cases) for mode in params.modes}
        # Before the expensive part: a parent that sat another exam is found out now.
        check_apart(params, name, who, cases)
        parent = who.parent
        before = (
            {mode: with_views(load_sitting(parent, like, cases), cases) for mode, like in blank.items()}
            if parent
            else {}
        )
        judges = Judges(paths.base(who.task.name))
        graded = sit(params, who, cases, judges)
        spec = {"modes": {mode: dict(sitting.mode_spec) for mode, sitting in blank.items()}, "seed": SEED}
        keep(paths.graded(name), who, cases, graded, spec=spec, inputs=inputs)
        with staged(paths.report(name)) as out:
            after = {mode: replace(blank[mode], answers=[line.answer for line in graded[mode]]) for mode in blank}
            responses = hear(who, cases, graded, judges)
            write_reports(out, who, inputs["adapter"], cases, training, graded, after, before, responses)
        write_record(who.task, name, who.exam, who.data)


def keep(
    target: Path,
    who: Model,
    cases: Sequence[Case],
    graded: Mapping[str, Sequence[Graded]],
    *,
    spec: Mapping[str, Any],
    inputs: dict[str, str],
) -> None:
    """Write graded answers, by mode in the order of the cases, and seal them. Of imported cases no text is kept."""
    by_id = {case.id: case for case in cases}
    with staged(target) as out:
        for mode, lines in graded.items():
            kept = (importing.withheld(who.task, by_id[line.case_id], line) for line in lines)
            rows = (canonical_json(line.model_dump(mode="json")) + "\n" for line in kept)
            write_text(out / f"{mode}.jsonl", "".join(rows))
        seal(
            out,
            kind="graded",
            name=who.name,
            task=who.task.name,
            task_version=who.task.version,
            spec={**spec, "reward": who.reward.model_dump(mode="json")},
            inputs=inputs,
        )


def check_apart(params: "Params", name: str, who: Model, cases: Sequence[Case]) -> None:
    """Refuse imported cases that share a patient or a text with what a version or its ancestors trained on.

    `cases` are those that `who` is about to answer. Raises DataError, and ArtefactError if training data is missing.
    """
    if not any(map(importing.is_imported, cases)) or name in params.roots:
        return
    chain = [before for part in params.parts(name) for before in params.lineage(part)]
    trained = dict.fromkeys(params.versions[version].data for version in chain)
    training = ((data, read_cases(paths.cases(data), who.task)) for data in trained if data in params.imports)
    importing.check_apart(training, who.exam, cases)


def sit(params: "Params", who: Model, cases: Sequence[Case], judges: Judges) -> dict[str, list[Graded]]:
    """Answer and grade the cases in every mode, with the model loaded once. The order is that of the cases.

    Under the key `<mode>.<view>` is how it answers the cases that have another view, in their order.
    """
    sampler = open_sampler(params, who)
    shown = {name: (name, [who.sees(case) for case in cases]) for name in params.modes}
    thoughtful = next((name for name, mode in params.modes.items() if mode.thinking), None)
    for view in who.variants if thoughtful else ():
        found = [other for case in cases if (other := who.task.reporting.variants[view](case)) is not None]
        shown |= {f"{thoughtful}.{view}": (thoughtful, found)} if thoughtful and found else {}
    graded = {}
    for name, (mode, asked) in shown.items():
        with progress(f"{who.name} {name}", len(asked)) as advance:
            budget = params.budget(mode, who.task.name)
            transcripts = run(sampler, who.task, asked, params.modes[mode], budget, SEED, progress=advance)
        graded[name] = grade(who.task, mode, asked, transcripts, who.reward, judges)
    return graded


def grade(
    task: Task,
    mode: str,
    cases: Sequence[Case],
    transcripts: Sequence[Transcript],
    reward: BaseModel,
    judges: Judges | None = None,
) -> list[Graded]:
    """Parse and score transcripts, one a case, in order. The judges are those of the task's base by default."""
    pairs = list(zip(cases, transcripts, strict=True))
    earned = scores(task, pairs, reward, judges or Judges(paths.base(task.name)))
    return [
        Graded(case_id=case.id, mode=mode, answer=answer(task, said), score=score, transcript=said)
        for (case, said), score in zip(pairs, earned, strict=True)
    ]


def hear(who: Model, cases: Sequence[Case], graded: Mapping[str, Sequence[Graded]], judges: Judges) -> Responses:
    """What the task's qualities want to hear about the answers that `sit` returned, other views of a case left out."""
    by_id = {case.id: who.sees(case) for case in cases}
    pairs = [
        (by_id[line.case_id], line.transcript) for name, lines in graded.items() if "." not in name for line in lines
    ]
    return judge_responses(who.task, pairs, judges)


def reports_of(
    who: Model,
    adapter_digest: str,
    cases: Sequence[Case],
    training: Sequence[Case],
    graded: Mapping[str, Sequence[Graded]],
    sittings: Mapping[str, Sitting],
    parent: Mapping[str, Sitting],
    responses: Responses = NO_RESPONSES,
) -> dict[str, EvalReport]:
    """The report of each mode on graded answers; the arguments are those of `write_reports`."""
    rows = baselines.answers(who.task, cases, training)
    reports = {}
    for mode, mine in sittings.items():
        others = (rows_of(parent[mode]) if mode in parent else {}) | rows
        rivals = [parent[mode]] if mode in parent else []
        if baselines.BAG_OF_WORDS in rows:
            rivals.append(replace(mine, name=baselines.BAG_OF_WORDS, answers=rows[baselines.BAG_OF_WORDS]))
        reports[mode] = build(
            task=who.task,
            name=who.name,
            mode=mode,
            mode_spec=dict(mine.mode_spec),
            exam=who.exam,
            exam_digest=mine.exam_digest,
            adapter_digest=adapter_digest,
            cases=cases,
            graded=graded[mode],
            others=others,
            tests=[test for rival in rivals for test in compare(mine, rival, who.task.compared)],
            responses=responses,
            view=who.variant,
            views={view: graded[name] for view in who.variants if (name := f"{mode}.{view}") in graded},
        )
    return reports


def write_reports(
    out: Path,
    who: Model,
    adapter_digest: str,
    cases: Sequence[Case],
    training: Sequence[Case],
    graded: Mapping[str, Sequence[Graded]],
    sittings: Mapping[str, Sitting],
    parent: Mapping[str, Sitting],
    responses: Responses = NO_RESPONSES,
) -> None:
    """Write reports, tables and plots of graded answers, as `sit` returns them, into a folder. Loads no model.

    `sittings` and `parent` hold the answers by mode; `parent` is empty for the base, and so is `training`. `responses`
    are those that the task's qualities need.
    """
    task = who.task
    reports = reports_of(who, adapter_digest, cases, training, graded, sittings, parent, responses)
    for mode, mine in sittings.items():
        write_json(out / f"{mode}.json", reports[mode].model_dump(mode="json"))
        pairs = zip(mine.golds, mine.answers, strict=True)
        _write_csv(out / f"predictions_{mode}.csv", ("gold", "predicted"), ((g, column(a)) for g, a in pairs))
    golds = [task.label(case) for case in cases]
    agreement = between_modes(golds, {mode: sitting.answers for mode, sitting in sittings.items()}, who.task.compared)
    write_json(out / SUMMARY, summary(list(reports.values()), agreement))
    write_json(out / BETWEEN_MODES, to_jsonable_python(agreement))
    log = who.folder / HISTORY
    if log.exists():
        write_json(out / ALARMS, [alarm.model_dump(mode="json") for alarm in alerts.alarms(alerts.read(log))])
        history = figures.read_history(log)
        columns = figures.history_columns(history)
        _write_csv(out / HISTORY_TABLE, columns, ([line.get(key, "") for key in columns] for line in history))
    write_pages(out, who, sittings)


def write_pages(folder: Path, who: Model, modes: Iterable[str]) -> list[Path]:
    """Write the page and the figures of an exam from the reports in a folder. Loads no model.

    Returns the files that are not here, and whose figures were left as they are. Raises FileNotFoundError if a report
    is missing.
    """
    modes = list(modes)
    reports = [EvalReport.model_validate(load(folder / f"{mode}.json", who.task, modes)) for mode in modes]
    agreement = TypeAdapter(Agreement).validate_python(load(folder / BETWEEN_MODES, who.task, modes))
    raised = alerts.stored(folder / ALARMS)
    text = render("exam", reports=reports, agreement=agreement, parent=who.parent, alarms=raised)
    write_text(folder / "report.md", text)
    for report in reports:
        title, drawing = f"{who.name}, mode {report.mode}, {report.exam}", folder / f"confusion_{report.mode}.png"
        figures.confusion(report.confusion, title, drawing, counted=report.counted)
    if raised is None:
        return []
    table = folder / HISTORY_TABLE
    if not table.exists():
        return [table]
    figures.curves(figures.read_table(table), f"Training of {who.name}", folder / "curves.png", who.task.labels)
    return []


def models_of(who: Model) -> dict[str, str]:
    """Digests of the base and of what was made of it, both unaltered. Raises ArtefactError if they do not fit."""
    base = verified(paths.base(who.task.name))
    model = verified(who.folder)
    if model.task_version != who.task.version:
        raise ArtefactError(
            f"{who.folder} was made at version {model.task_version} of the task {who.task.name}, "
            f"which is now at {who.task.version}; rebuild it with `dvc repro`"
        )
    if model.inputs["base"] != identity(base):
        raise ArtefactError(
            f"{who.folder} was made from another base than {paths.base(who.task.name)} now holds; "
            f"restore both with `dvc checkout` or rebuild it"
        )
    return {"adapter": identity(model), "base": identity(base)}


def open_sampler(params: "Params", who: Model) -> Sampler:
    """What answers as `who`, its model loaded. Settles the process for equal answers."""
    from clinrl.models import bases, opening
    from clinrl.runtime import determinism

    determinism.settle(SEED)
    if (who.folder / "config.json").exists():
        return Sampler(*bases.open_base(who.folder, for_training=False))
    is_adapter = (who.folder / opening.CONFIG).exists()
    if is_adapter:
        opening.check(who.folder)
    qlora = bool(read_manifest(who.folder).spec.get("qlora", False))
    model, tokenizer = bases.load(params, who.task.name, for_training=False, qlora=qlora)
    if is_adapter:
        model = opening.adapted(model, who.folder).eval()
    return Sampler(model, tokenizer)


def _write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as stream:
        table = csv.writer(stream, lineterminator="\n")
        table.writerow(columns)
        table.writerows(rows)
