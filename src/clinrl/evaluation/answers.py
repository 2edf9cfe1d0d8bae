"""Reads and checks the answers and reports of earlier exams."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from clinrl import paths
from clinrl.analysis.exam import Estimates, EvalReport, row_metrics
from clinrl.analysis.paired import Answers, comparable
from clinrl.analysis.run import Run, filled
from clinrl.artifacts import read_manifest, read_record, remake, verified
from clinrl.config.model import Model
from clinrl.config.params import Params
from clinrl.data.dataset import is_import, read_cases
from clinrl.data.reward_audit import validated_identity
from clinrl.errors import ArtefactError, ParamsError, did_you_mean
from clinrl.tasks import importing
from clinrl.tasks.base import Task, get_task
from clinrl.types import Case, Graded, Transcript, Unreadable

SEED = 1
"""The seed of sampling in modes with a temperature above 0: one for all versions, so that comparisons are paired."""
HISTORY = "history.jsonl"
SUMMARY = "summary.json"
BETWEEN_MODES = "between_modes.json"
ALARMS = "alarms.json"
HISTORY_TABLE = "history.csv"


def answer(task: Task, transcript: Transcript) -> Any | Unreadable:
    """The answer in a transcript; Unreadable if the model took no turn."""
    spoke = any(message.role == "assistant" for message in transcript.messages)
    return task.parse(transcript) if spoke else Unreadable(reason="no assistant turn")


def open_run(params: Params, model: Model) -> Run:
    """The run of a model on its exam, without answers yet.

    Models are comparable if they share its exam, task version and modes. Raises ArtefactError if the exam is missing,
    altered or without its proof.
    """
    exam_digest = validated_identity(model.exam, model.task)
    return run_of(params, model, list(read_cases(paths.cases(model.exam), model.task)), exam_digest)


def check_here(*models: Model) -> None:
    """Raise ArtefactError if graded answers are missing, as in a clone, with the command that brings all that is."""
    missing = [model for model in models if not paths.graded(model.name).exists()]
    if missing:
        folders = " and ".join(str(paths.graded(model.name)) for model in missing)
        stages = " ".join(model.stage for model in missing)
        raise ArtefactError(
            f"{folders} {'is' if len(missing) == 1 else 'are'} not here; run `dvc pull --with-deps {stages}` where a "
            f"remote has them, or `dvc repro {stages}`; both bring the exam too"
        )


def mode_of(params: Params, mode: str | None) -> str:
    """The name of a mode in params.yaml: `mode`, or the first if that is None. Raises ParamsError for other names."""
    modes = list(params.modes)
    if mode is not None and mode not in modes:
        raise ParamsError(f"{mode!r} is no mode of params.yaml; {did_you_mean(mode, modes)}")
    return mode or modes[0]


def run_of(params: Params, model: Model, cases: Sequence[Case], exam_digest: str) -> Run:
    """The run of a model on given cases, without answers yet, with the decoding of params.yaml."""
    modes = {mode: decoding(params, mode, model.task.name) for mode in params.modes}
    return Run(model=model, cases=cases, exam_digest=exam_digest, modes=modes)


def decoding(params: Params, mode: str, task: str) -> dict[str, Any]:
    """The decoding settings of a task in a mode at the active scale, as reports store them."""
    spec = params.mode(mode, task).model_dump(exclude={"max_new_tokens"})
    return {**spec, "max_new_tokens": params.budget(mode, task)}


def may_repeat_records(params: Params, model: Model) -> bool:
    """Whether a model or an ancestor learned from imported records, by params.yaml or by the manifest of an adapter
    that is here: params.yaml can be edited after a training."""
    names = [*model.parts]
    for name in names:
        folder = paths.adapter(name)
        if folder.exists() and "data" in (spec := read_manifest(folder).spec):
            if spec["data"] in params.imports or is_import(paths.cases(spec["data"])):
                return True
            if spec["parent"] not in names:  # an edited manifest may name a descendant
                names.append(spec["parent"])
    return params.records_of(*model.parts) == "training"


def load_report(name: str, mode: str) -> EvalReport:
    """A written report. Raises ArtefactError if there is none."""
    path = paths.report(name) / f"{mode}.json"
    return read_record(
        path,
        EvalReport,
        missing=lambda: f"{path} does not exist: {remake(path.with_name(SUMMARY), f'evaluate@{name}')}",
        broken=lambda _: f"{path} is no report; restore it with `git checkout {path}`",
    )


def load_answers(run: Run, mode: str, name: str, folder: Path | None = None) -> Answers:
    """The answers of `name`, checked by `load_graded`."""
    return load_graded(run, mode, name, folder)[0]


def load_graded(run: Run, mode: str, name: str, folder: Path | None = None) -> tuple[Answers, list[Graded]]:
    """The answers of `name` to the exam of a run in one of its modes, from `folder` (by default its graded answers).

    Raises ArtefactError if the folder is missing or altered, or if its answers are to another exam or were decoded
    differently.
    """
    folder = folder or paths.graded(name)
    group = {paths.mined(name): "mine", paths.resit(name): "resit"}.get(folder, "evaluate")
    stage = f"{group}@{name}"
    manifest = verified(folder)
    modes = manifest.spec["modes"]
    if mode not in modes:
        advice = f"only in {', '.join(modes)}; {remake(folder, stage)}"
        raise ArtefactError(f"{folder} has no answers in mode {mode}, {advice}")
    expected = run.answers(mode)
    found = replace(
        expected,
        name=name,
        task=manifest.task,
        task_version=manifest.task_version,
        mode_spec=modes[mode],
        exam_digest=manifest.inputs.get("exam") or manifest.inputs["data"],  # error analyses have the latter
        sampler=manifest.spec.get("sampler", {}),
    )
    comparable(expected, found)
    path = folder / f"{mode}.jsonl"
    lines = read_graded(path)
    if [line.case_id for line in lines] != [case.id for case in run.cases]:
        raise ArtefactError(f"{path} does not answer the cases of this exam in its order; {remake(folder, stage)}")
    check_answers(get_task(manifest.task), run.cases, lines, path)
    return replace(found, answers=[line.answer for line in lines]), lines


def check_answers(task: Task, cases: Sequence[Case], lines: Sequence[Graded], path: Path) -> None:
    """Check graded answers against their transcripts. The manifest only shows that their folder has not changed.

    `lines` are the answers to `cases`, in the same order, read from `path`. For an imported case, no text of an
    unreadable answer is kept, so its check is only that it is still unreadable. Raises ArtefactError naming the first
    line that differs.
    """
    for number, (case, line) in enumerate(zip(cases, lines, strict=True), start=1):
        read = answer(task, line.transcript)
        is_silent = isinstance(read, Unreadable) and isinstance(line.answer, Unreadable)
        if read != line.answer and not (is_silent and importing.is_imported(case)):
            raise ArtefactError(
                f"{path} line {number} gives another answer to {line.case_id} than its transcript does; restore the "
                "folder with `dvc checkout`, or evaluate again"
            )


def load_parent(run: Run, mode: str) -> Answers | None:
    """The answers of the parent to the exam of a run, with those under input variants if there are any.

    None for a base, and if the parent takes another exam.

    Raises ArtefactError for the same reasons as `load_graded` and `load_variants`.
    """
    if run.model.compared is None:
        return None
    folder = paths.graded(run.model.compared)
    found, given = load_graded(run, mode, run.model.compared)
    under = load_variants(run, mode, folder, run.task.reporting.variants)
    whole = {variant: filled(given, lines) for variant, lines in under.items()}
    return replace(found, under={variant: [line.answer for line in lines] for variant, lines in whole.items()})


def read_graded(path: Path) -> list[Graded]:
    """The graded answers in a file."""
    with path.open("rb") as stream:
        return [Graded.model_validate_json(line) for line in stream]


def load_variants(run: Run, mode: str, folder: Path, variants: Iterable[str]) -> dict[str, list[Graded]]:
    """The graded answers of a mode under each input variant that has a file in a folder, for the cases that have it.

    Raises ArtefactError if a file does not answer these cases, each once and in the exam's order.
    """
    files = {variant: folder / f"{mode}.{variant}.jsonl" for variant in variants}
    found = {variant: read_graded(path) for variant, path in files.items() if path.exists()}
    for variant, lines in found.items():
        shown = [case for case in run.cases if run.task.reporting.variants[variant](case) is not None]
        if [line.case_id for line in lines] != [case.id for case in shown]:
            raise ArtefactError(
                f"{files[variant]} does not answer the cases of this exam that have the variant {variant}, in its "
                "order; evaluate again"
            )
        check_answers(run.task, shown, lines, files[variant])
    return found


def rows_of(run: Run, parent: Answers) -> dict[str, Estimates]:
    """The rows of a parent in the report of a run: one for its answers, and one for each input variant."""
    under = {f"{parent.name}, {variant}": answers for variant, answers in parent.under.items()}
    return {row: row_metrics(run, answers) for row, answers in {parent.name: parent.answers, **under}.items()}
