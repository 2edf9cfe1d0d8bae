"""Answers and reports of exams that were taken: where they lie, and how they are read back and checked."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clinrl import paths
from clinrl.analysis.exam import EvalReport, clusters_of
from clinrl.analysis.paired import Sitting, comparable
from clinrl.artifacts import verified
from clinrl.config.model import Model
from clinrl.data.dataset import read_cases
from clinrl.data.reward_audit import proven
from clinrl.errors import ArtefactError
from clinrl.tasks import importing
from clinrl.tasks.base import Task, get_task
from clinrl.types import Case, Graded, Transcript, Unreadable

if TYPE_CHECKING:
    from clinrl.config.params import Params


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


def sitting_of(who: Model, mode: str, params: "Params", exam_digest: str, cases: Sequence[Case]) -> Sitting:
    """The exam of `who` in a mode, before it is answered: everything that two sittings must share to be compared.

    `exam_digest` is the exam's identity, `cases` are its cases in order. The decoding is that of the active scale.
    """
    return Sitting(
        name=who.name,
        task=who.task.name,
        task_version=who.task.version,
        mode=mode,
        mode_spec=decoding(params, mode, who.task.name),
        exam_digest=exam_digest,
        golds=[who.task.label(case) for case in cases],
        answers=(),
        clusters=clusters_of(who.task, cases),
    )


def unanswered(params: "Params", name: str) -> tuple[Model, list[Case], dict[str, Sitting]]:
    """Who `name` is, the cases of its exam, and the exam before it is answered, by mode: what answers are loaded into.

    Raises ArtefactError if the exam is missing, altered or without its proof, ParamsError for an unknown name.
    """
    who = params.model(name)
    cases = list(read_cases(paths.cases(who.exam), who.task))
    exam_digest = proven(who.exam, who.task)
    return who, cases, {mode: sitting_of(who, mode, params, exam_digest, cases) for mode in params.modes}


def decoding(params: "Params", mode: str, task: str) -> dict[str, Any]:
    """How answers to a task are decoded in a mode at the active scale, as reports hold it."""
    spec = params.modes[mode]
    return {"thinking": spec.thinking, "temperature": spec.temperature, "max_new_tokens": params.budget(mode, task)}


def load_report(name: str, mode: str) -> EvalReport:
    """A written report. Raises ArtefactError if there is none."""
    path = paths.report(name) / f"{mode}.json"
    try:
        return EvalReport.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise ArtefactError(f"{path} does not exist: run `dvc repro evaluate@{name}`") from None


def load_sitting(name: str, like: Sitting, cases: Sequence[Case], folder: Path | None = None) -> Sitting:
    """The answers of `name` to the exam, and in the mode, of another sitting; from `folder`, or its graded one.

    Raises ArtefactError if the folder is missing or altered, or if it does not answer the same question as `like`.
    """
    folder = folder or paths.graded(name)
    advice = f"run `dvc repro evaluate@{name}`"
    manifest = verified(folder)
    modes = manifest.spec["modes"]
    if like.mode not in modes:
        raise ArtefactError(f"{folder} has no answers in mode {like.mode}, only in {', '.join(modes)}; {advice}")
    sitting = replace(
        like,
        name=name,
        task=manifest.task,
        task_version=manifest.task_version,
        mode_spec=modes[like.mode],
        exam_digest=manifest.inputs["exam"],
    )
    comparable(like, sitting)
    path = folder / f"{like.mode}.jsonl"
    lines = read_graded(path)
    if [line.case_id for line in lines] != [case.id for case in cases]:
        raise ArtefactError(f"{path} does not answer the cases of this exam in its order; {advice}")
    follows(get_task(manifest.task), cases, lines, path)
    return replace(sitting, answers=[line.answer for line in lines])


def follows(task: Task, cases: Sequence[Case], lines: Sequence[Graded], path: Path) -> None:
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


def with_views(sitting: Sitting, cases: Sequence[Case]) -> Sitting:
    """The same with its answers to the cases as other views show them, where it was asked under any.

    Raises ArtefactError as `answered_under`.
    """
    task, folder = get_task(sitting.task), paths.graded(sitting.name)
    files = {view: folder / f"{sitting.mode}.{view}.jsonl" for view in task.reporting.variants}
    there = {view: path for view, path in files.items() if path.exists()}
    given = read_graded(folder / f"{sitting.mode}.jsonl") if there else []
    shown = {view: answered_under(task, cases, given, view, path) for view, path in there.items()}
    return replace(sitting, under={view: [line.answer for line in lines] for view, lines in shown.items()})


def read_graded(path: Path) -> list[Graded]:
    """Graded answers of one file."""
    with path.open("rb") as stream:
        return [Graded.model_validate_json(line) for line in stream]


def answered_under(task: Task, cases: Sequence[Case], given: Sequence[Graded], view: str, path: Path) -> list[Graded]:
    """The graded answers of a file under a view; as `given` where a case has no such view: it looks the same there.

    Raises ArtefactError if the file does not answer the cases that have the view.
    """
    answered = {line.case_id: line for line in read_graded(path)}
    shown = [case for case in cases if task.reporting.variants[view](case) is not None]
    if set(answered) != {case.id for case in shown}:
        raise ArtefactError(f"{path} does not answer the cases of this exam that have the view {view}; evaluate anew")
    follows(task, shown, [answered[case.id] for case in shown], path)
    return [answered.get(case.id, line) for case, line in zip(cases, given, strict=True)]


def rows_of(parent: Sitting) -> dict[str, Sequence[Any]]:
    """The rows of a parent: its answers, and those to other views of the cases."""
    return {parent.name: parent.answers, **{f"{parent.name}, {view}": shown for view, shown in parent.under.items()}}
