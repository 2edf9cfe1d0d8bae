"""Answers and reports of exams that were taken: where they lie, and how they are read back and checked."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from clinrl import paths
from clinrl.analysis.exam import Estimates, EvalReport, row_metrics
from clinrl.analysis.paired import Answers, comparable
from clinrl.analysis.run import Run
from clinrl.artifacts import verified
from clinrl.config.model import Model
from clinrl.config.params import Params
from clinrl.data.dataset import read_cases
from clinrl.data.reward_audit import proven
from clinrl.errors import ArtefactError, ParamsError, did_you_mean
from clinrl.tasks import importing
from clinrl.tasks.base import Task, get_task
from clinrl.types import Case, Graded, Transcript, Unreadable

SEED = 1
"""Of sampling, in modes with a temperature above 0: the same for all versions, so that comparisons stay paired."""
HISTORY = "history.jsonl"
SUMMARY = "summary.json"
BETWEEN_MODES = "between_modes.json"
ALARMS = "alarms.json"
HISTORY_TABLE = "history.csv"


def answer(task: Task, transcript: Transcript) -> Any | Unreadable:
    """What a transcript commits to; Unreadable if the model took no turn."""
    spoke = any(message.role == "assistant" for message in transcript.messages)
    return task.parse(transcript) if spoke else Unreadable(reason="no assistant turn")


def open_run(params: Params, model: Model) -> Run:
    """A model on its exam, before it answers: what every model that is compared with it must share.

    Raises ArtefactError if the exam is missing, altered or without its proof.
    """
    exam_digest = proven(model.exam, model.task)
    return run_of(params, model, list(read_cases(paths.cases(model.exam), model.task)), exam_digest)


def mode_of(params: Params, mode: str | None) -> str:
    """A mode of params.yaml by its name, the first by default. Raises ParamsError for another."""
    modes = list(params.modes)
    if mode is not None and mode not in modes:
        raise ParamsError(f"{mode!r} is no mode of params.yaml; {did_you_mean(mode, modes)}")
    return mode or modes[0]


def run_of(params: Params, model: Model, cases: Sequence[Case], exam_digest: str) -> Run:
    """A model on given cases, before it answers, decoding as params.yaml says."""
    modes = {mode: decoding(params, mode, model.task.name) for mode in params.modes}
    return Run(model=model, cases=cases, exam_digest=exam_digest, modes=modes)


def decoding(params: Params, mode: str, task: str) -> dict[str, Any]:
    """How answers to a task are decoded in a mode at the active scale, as reports hold it."""
    spec = params.mode(mode, task).model_dump(exclude={"max_new_tokens"})
    return {**spec, "max_new_tokens": params.budget(mode, task)}


def load_report(name: str, mode: str) -> EvalReport:
    """A written report. Raises ArtefactError if there is none."""
    path = paths.report(name) / f"{mode}.json"
    try:
        return EvalReport.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise ArtefactError(f"{path} does not exist: run `dvc repro evaluate@{name}`") from None
    except ValidationError:
        raise ArtefactError(f"{path} is no report; restore it with `git checkout {path}`") from None


def load_answers(run: Run, mode: str, name: str, folder: Path | None = None) -> Answers:
    """The answers of `name`, as `load_graded` checks them."""
    return load_graded(run, mode, name, folder)[0]


def load_graded(run: Run, mode: str, name: str, folder: Path | None = None) -> tuple[Answers, list[Graded]]:
    """The answers of `name` to the exam of a run, in one of its modes; from `folder`, or its graded one.

    Raises ArtefactError if the folder is missing or altered, or if it answers another exam or was decoded otherwise.
    """
    folder = folder or paths.graded(name)
    advice = f"run `dvc repro evaluate@{name}`"
    manifest = verified(folder)
    modes = manifest.spec["modes"]
    if mode not in modes:
        raise ArtefactError(f"{folder} has no answers in mode {mode}, only in {', '.join(modes)}; {advice}")
    mine = run.answers(mode)
    found = replace(
        mine,
        name=name,
        task=manifest.task,
        task_version=manifest.task_version,
        mode_spec=modes[mode],
        exam_digest=manifest.inputs.get("exam") or manifest.inputs["data"],  # the latter of an error analysis
        sampler=manifest.spec.get("sampler", {}),
    )
    comparable(mine, found)
    path = folder / f"{mode}.jsonl"
    lines = read_graded(path)
    if [line.case_id for line in lines] != [case.id for case in run.cases]:
        raise ArtefactError(f"{path} does not answer the cases of this exam in its order; {advice}")
    check_answers(get_task(manifest.task), run.cases, lines, path)
    return replace(found, answers=[line.answer for line in lines]), lines


def check_answers(task: Task, cases: Sequence[Case], lines: Sequence[Graded], path: Path) -> None:
    """Refuse graded answers that are not what their transcripts say, since a folder of answers vouches for itself.

    `lines` answer `cases`, one by one, and stand in `path`. Of an answer to an imported case that could not be read, no
    text is kept, so that only its being unreadable can be read again. Raises ArtefactError naming the first line.
    """
    for number, (case, line) in enumerate(zip(cases, lines, strict=True), start=1):
        read = answer(task, line.transcript)
        is_silent = isinstance(read, Unreadable) and isinstance(line.answer, Unreadable)
        if read != line.answer and not (is_silent and importing.is_imported(case)):
            raise ArtefactError(
                f"{path} line {number} gives another answer to {line.case_id} than its transcript does; restore the "
                "folder with `dvc checkout`, or examine anew"
            )


def load_parent(run: Run, mode: str) -> Answers | None:
    """The answers of the parent of a run's model, under input variants too where it was asked; None for a base.

    Raises ArtefactError as `load_answers` and `load_variant`.
    """
    if run.model.parent is None:
        return None
    folder = paths.graded(run.model.parent)
    found, given = load_graded(run, mode, run.model.parent)
    files = {variant: folder / f"{mode}.{variant}.jsonl" for variant in run.task.reporting.variants}
    there = {variant: path for variant, path in files.items() if path.exists()}
    under = {variant: load_variant(run, given, variant, path) for variant, path in there.items()}
    return replace(found, under={variant: [line.answer for line in lines] for variant, lines in under.items()})


def read_graded(path: Path) -> list[Graded]:
    """Graded answers of one file."""
    with path.open("rb") as stream:
        return [Graded.model_validate_json(line) for line in stream]


def load_variant(run: Run, given: Sequence[Graded], variant: str, path: Path) -> list[Graded]:
    """The graded answers of a file under an input variant; as `given` where a case does not have the variant.

    Raises ArtefactError if the file does not answer the cases that have the variant.
    """
    answered = {line.case_id: line for line in read_graded(path)}
    shown = [case for case in run.cases if run.task.reporting.variants[variant](case) is not None]
    if set(answered) != {case.id for case in shown}:
        raise ArtefactError(
            f"{path} does not answer the cases of this exam that have the variant {variant}; evaluate anew"
        )
    check_answers(run.task, shown, [answered[case.id] for case in shown], path)
    return [answered.get(case.id, line) for case, line in zip(run.cases, given, strict=True)]


def rows_of(run: Run, parent: Answers) -> dict[str, Estimates]:
    """The rows of a parent in the report of a run: of its answers, and of those under input variants."""
    under = {f"{parent.name}, {variant}": answers for variant, answers in parent.under.items()}
    return {row: row_metrics(run, answers) for row, answers in {parent.name: parent.answers, **under}.items()}
