"""The exam: a version, or the base, answers every case in every mode; the answers are graded, stored and reported.

Graded answers go to `paths.graded(name)`, one JSON Lines file per mode, in exam order. If the task has input variants,
the first mode with thinking answers the cases once more under each. Everything in `paths.report(name)` follows from the
graded answers, from those of the parent and from the training cases.
"""

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from clinrl import paths
from clinrl.analysis import alerts, baselines
from clinrl.analysis.exam import Agreement, Estimates, EvalReport, build, column, row_metrics, seen_clauses, summary
from clinrl.analysis.paired import Answers, between_modes, comparable, compare
from clinrl.analysis.run import Run
from clinrl.artifacts import canonical_json, exclusive, remove_published, seal, staged, write_json, write_text
from clinrl.config.bases import EmbeddedBase
from clinrl.config.model import Model
from clinrl.config.params import Params
from clinrl.data.dataset import corpora, manifest_of, read_cases
from clinrl.errors import ArtefactError
from clinrl.evaluation import rival
from clinrl.evaluation.answers import (
    ALARMS,
    BETWEEN_MODES,
    HISTORY,
    HISTORY_TABLE,
    SEED,
    SUMMARY,
    answer,
    load_parent,
    open_run,
    rows_of,
)
from clinrl.evaluation.record import record_of, write_record
from clinrl.evaluation.sampler import open_journal, open_sampler
from clinrl.models.bases import made_of
from clinrl.models.journal import Journal
from clinrl.models.judges import Judges, judge_responses, scores
from clinrl.models.pretrain import corpus
from clinrl.models.rollout import run as rollout
from clinrl.reports import figures
from clinrl.reports.render import load, render
from clinrl.runtime import determinism, forkserver
from clinrl.runtime.progress import progress
from clinrl.tasks import importing
from clinrl.tasks.base import Task
from clinrl.tasks.parts import NO_RESPONSES, Responses
from clinrl.types import Case, Graded, Pool, Transcript


def stage(params: Params, name: str) -> None:
    """Evaluate a version, a merge or `<task>-base`, and write its graded answers and reports; or evaluate a rival.

    Raises ParamsError for a name that params.yaml does not have, ArtefactError if an input is missing, altered, built
    for another task version or without the exam's proof, or if the parent took another exam, and Busy if another
    command evaluates the same name. If it is killed, the same command continues from its journal; on the CPU to the
    same bytes.
    """
    if name in params.rivals:
        rival.stage(params, name)
        return
    model = params.model(name)
    task = model.task
    with exclusive(paths.graded(name)):
        run = open_run(params, model)
        training = [*chain.from_iterable(corpora(params, model).values())] if model.data else []
        inputs = {"exam": run.exam_digest, **made_of(task, model.folder)}
        remove_published(name)  # DVC has recorded the adapter by now
        # Checked before the expensive part, and the parent's answers too, which may be to another exam.
        check_apart(params, run.model, run.cases)
        parent = {mode: answers for mode in run.modes if (answers := load_parent(run, mode)) is not None}
        judges = Judges(paths.base(task.name))
        journal = open_journal(params, run, inputs)
        run = replace(answer_exam(params, run, judges, parent, journal), adapter_digest=inputs["adapter"])
        keep(paths.graded(name), run, inputs, seed=SEED)
        reports = reports_of(run, training, parent, responses_of(run, judges), seen_by(params, run))
        with staged(paths.report(name)) as out:
            write_reports(out, run, reports)
        write_record(task, record_of(run), model.exam, model.data)
        if journal is not None:
            journal.remove()


def keep(target: Path, run: Run, inputs: dict[str, str], **spec: Any) -> None:
    """Write the graded answers of a run and seal them. For imported cases no text is stored."""
    model, by_id = run.model, {case.id: case for case in run.cases}
    with staged(target) as out:
        for mode, lines in run.graded.items():
            kept = (importing.redact(run.task, by_id[line.case_id], line) for line in lines)
            rows = (canonical_json(line.model_dump(mode="json")) + "\n" for line in kept)
            write_text(out / f"{mode}.jsonl", "".join(rows))
        seal(
            out,
            kind="graded",
            name=model.name,
            task=run.task.name,
            task_version=run.task.version,
            spec={
                "modes": run.modes,
                **spec,
                "reward": model.reward.model_dump(mode="json"),
                **({"sampler": dict(run.sampler)} if run.sampler else {}),
            },
            inputs=inputs,
        )


def check_apart(params: Params, model: Model, cases: Sequence[Case]) -> None:
    """Refuse imported cases that share a patient or a text with cases on which the model or its ancestors were trained
    or, where those are here, mined. Cases that errors are mined on are compared with the model's own exam.

    Raises DataError for such a case, and ArtefactError if training data is missing, or if data here was altered.
    """
    if model.kind == "base" or not any(map(importing.is_imported, cases)):
        return
    ancestors = [version for part in model.parts for version in params.lineage(part)]
    trained = dict.fromkeys(params.versions[version].data for version in ancestors)
    mined = [params.mining[version].data for version in ancestors if version in params.mining]
    others = [params.model(model.name).exam] if model.exam in mined else mined
    here = dict.fromkeys([*trained, *(data for data in others if paths.cases(data).exists())])
    training = ((data, read_cases(paths.cases(data), model.task)) for data in here if data in params.imports)
    importing.check_apart(training, model.exam, cases)


def open_apart(params: Params, name: str, data: str, pool: Pool, use: str) -> tuple[Run, dict[str, str]]:
    """The run of a version on a data set other than its exam, and the digests of what the version is made of.

    Raises ArtefactError if an input is missing or altered, or if the data set is not of the pool (`use` ends that
    message), and DataError if the version was trained on patients or texts of the data set.
    """
    model = replace(params.model(name), exam=data, variants=())
    drawn = manifest_of(paths.cases(data), model.task).spec["use"]
    if drawn != pool:
        raise ArtefactError(f"{paths.cases(data)} is drawn from the {drawn} pool; {use}")
    run = open_run(params, model)
    check_apart(params, model, run.cases)
    inputs = made_of(model.task, model.folder)
    return replace(run, adapter_digest=inputs["adapter"]), inputs


def seen_by(params: Params, run: Run) -> Estimates:
    """The share of the exam's clauses that are in the model's training data sets, or in the corpus of a base."""
    model, task = run.model, run.task
    if task.reporting.clauses is None or model.kind == "merge":
        return {}
    if model.kind == "version":
        return seen_clauses(task, run.cases, corpora(params, model))
    spec = params.base(task.name)
    return seen_clauses(task, run.cases, {"base corpus": corpus(task, spec)} if isinstance(spec, EmbeddedBase) else {})


def answer_exam(
    params: Params,
    run: Run,
    judges: Judges,
    parent: Mapping[str, Answers] = MappingProxyType({}),
    journal: Journal | None = None,
) -> Run:
    """The run with its cases answered and graded in every mode. The model is loaded once.

    The first mode with thinking also answers the cases under each input variant that they have. If a task's answers are
    ordered, their probabilities are kept, except under input variants and from vLLM. If this stage has several
    processors, modes and variants run in parallel, since no answer depends on another. Raises ArtefactError before the
    first answer if those of `parent` are from another sampler.
    """
    model, task = run.model, run.task
    sampler = open_sampler(params, model)
    run, sampler.journal = replace(run, sampler=sampler.identity), journal
    for mode, others in parent.items():
        comparable(run.answers(mode), others)
    passes = {mode: (mode, run.shown) for mode in params.modes}
    thoughtful = next((name for name, mode in params.modes.items() if mode.thinking), None)
    for variant in model.variants if thoughtful else ():
        cases = [other for case in run.cases if (other := task.reporting.variants[variant](case)) is not None]
        passes |= {f"{thoughtful}.{variant}": (thoughtful, cases)} if thoughtful and cases else {}

    def answer_pass(name: str) -> tuple[list[Graded], Any]:
        if task.shares_threads:
            determinism.share()
        if journal is not None:
            journal.begin(name)
        mode, shown = passes[name]
        watch = None
        if task.ordered is not None and name == mode and sampler.can_watch:
            from clinrl.models.probabilities import Watch

            watch = Watch(sampler.tokenizer, task.ordered)
            sampler.watch = [watch]
        with progress(f"{model.name} {name}", len(shown)) as advance:
            budget = params.budget(mode, task.name)
            spec = params.mode(mode, task.name)
            transcripts = rollout(sampler, task, shown, spec, budget, SEED, progress=advance)
        sampler.watch = ()
        graded = grade(task, mode, shown, transcripts, model.reward, judges)
        return graded, watch.read(task, shown, graded, thinking=params.modes[mode].thinking) if watch else None

    programs = [partial(answer_pass, name) for name in passes]
    results = forkserver.results(programs) if task.shares_threads else [program() for program in programs]
    found = dict(zip(passes, results, strict=True))
    return replace(
        run,
        graded={name: graded for name, (graded, _) in found.items()},
        probabilities={name: chances for name, (_, chances) in found.items() if chances is not None},
    )


def grade(
    task: Task,
    mode: str,
    cases: Sequence[Case],
    transcripts: Sequence[Transcript],
    reward: BaseModel,
    judges: Judges | None = None,
) -> list[Graded]:
    """Parse and score transcripts, one per case, in order. By default the judges are those of the task's base."""
    pairs = list(zip(cases, transcripts, strict=True))
    earned = scores(task, pairs, reward, judges or Judges(paths.base(task.name)))
    return [
        Graded(case_id=case.id, mode=mode, answer=answer(task, transcript), score=score, transcript=transcript)
        for (case, transcript), score in zip(pairs, earned, strict=True)
    ]


def responses_of(run: Run, judges: Judges) -> Responses:
    """The judge responses that the task's qualities need for the answers of a run, without those to input variants."""
    by_id = {case.id: case for case in run.shown}
    pairs = [(by_id[line.case_id], line.transcript) for mode in run.modes for line in run.graded[mode]]
    return judge_responses(run.task, pairs, judges)


def reports_of(
    run: Run,
    training: Sequence[Case],
    parent: Mapping[str, Answers],
    responses: Responses = NO_RESPONSES,
    seen: Estimates | None = None,
) -> dict[str, EvalReport]:
    """The report of each mode of a run. It needs no model.

    `parent` has the parent's answers by mode; it is empty for a base, and so is `training`. `responses` are the judge
    responses that the task's qualities need, `seen` is the result of `seen_by`.
    """
    rows = baselines.answers(run.task, run.cases, training)
    lazy = {row: row_metrics(run, answers) for row, answers in rows.items()}  # the same in every mode
    reports = {}
    for mode in run.modes:
        own = run.answers(mode)
        rivals = [parent[mode]] if mode in parent else []
        others = (rows_of(run, parent[mode]) if mode in parent else {}) | lazy
        if baselines.BAG_OF_WORDS in rows:
            rivals.append(replace(own, name=baselines.BAG_OF_WORDS, answers=rows[baselines.BAG_OF_WORDS]))
        tests = [test for rival in rivals for test in compare(own, rival)]
        reports[mode] = build(run, mode, others=others, tests=tests, responses=responses, seen=seen)
    return reports


def write_reports(out: Path, run: Run, reports: Mapping[str, EvalReport]) -> None:
    """Write the reports, tables and plots of a run into a folder. It needs no model."""
    task, model = run.task, run.model
    answers = {mode: run.answers(mode).answers for mode in run.modes}
    for mode, report in reports.items():
        write_json(out / f"{mode}.json", report.model_dump(mode="json"))
        pairs = [(gold, column(answer)) for gold, answer in zip(run.golds, answers[mode], strict=True)]
        if any(map(importing.is_imported, run.cases)):  # by case, this would go to MLflow; sorted, it is counts
            pairs.sort(key=str)
        _write_csv(out / f"predictions_{mode}.csv", ("gold", "predicted"), pairs)
    agreement = between_modes(task, run.golds, answers, run.clusters)
    write_json(out / SUMMARY, summary(list(reports.values()), agreement))
    write_json(out / BETWEEN_MODES, to_jsonable_python(agreement))
    log = model.folder / HISTORY
    if log.exists():
        write_json(out / ALARMS, [alarm.model_dump(mode="json") for alarm in alerts.alarms(alerts.read(log))])
        history = figures.read_history(log)
        columns = figures.history_columns(history)
        _write_csv(out / HISTORY_TABLE, columns, ([line.get(key, "") for key in columns] for line in history))
    write_pages(out, model, run.modes)


def write_pages(folder: Path, model: Model, modes: Iterable[str]) -> list[Path]:
    """Write the page and the figures of an exam from the reports in a folder. It loads no model.

    Returns the missing files whose figures were therefore not drawn again. Raises ArtefactError if a report is
    missing.
    """
    modes = list(modes)
    reports = [load(folder / f"{mode}.json", model.task, modes, EvalReport) for mode in modes]
    agreement = load(folder / BETWEEN_MODES, model.task, modes, Agreement)
    raised = alerts.stored(folder / ALARMS)
    text = render("exam", reports=reports, agreement=agreement, model=model, alarms=raised)
    write_text(folder / "report.md", text)
    for report in reports:
        title, drawing = f"{model.name}, mode {report.mode}, {report.exam}", folder / f"confusion_{report.mode}.png"
        figures.confusion(report.confusion, title, drawing, counted=report.counted)
    if raised is None:
        return []
    table = folder / HISTORY_TABLE
    if not table.exists():
        return [table]
    figures.curves(figures.read_table(table), f"Training of {model.name}", folder / "curves.png", model.task.labels)
    return []


def _write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as stream:
        table = csv.writer(stream, lineterminator="\n")
        table.writerow(columns)
        table.writerows(rows)
