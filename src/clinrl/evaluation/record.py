"""The record of an exam, small enough for git: answers without their text, and the digests on which comparisons depend.

Comparisons need only these files. So a clone without transcripts can repeat them, and versions may be trained on
different days and machines. A stage of DVC cannot list an input for each version of a comparison, but it can depend on
the folder with a task's records. A new version then needs no edit of dvc.yaml.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import Field

from clinrl import paths
from clinrl.analysis.exam import EvalReport, share
from clinrl.analysis.paired import Answers, comparable
from clinrl.analysis.run import Run, filled
from clinrl.artifacts import canonical_json, md5, read_record, remake, write_text
from clinrl.errors import ArtefactError
from clinrl.tasks.base import Task, as_variant
from clinrl.tasks.importing import is_imported
from clinrl.tasks.parts import NO_RESPONSES
from clinrl.types import Graded, Strict, Unreadable


class Given(Strict):
    """The answers of a model in one mode and under one input variant, in exam order."""

    answers: tuple[int | str | Unreadable, ...]
    qualities: dict[str, tuple[float | None, ...]]
    """The value of each quality that needs no judge, by case. Empty for imported cases, whose text is not kept."""


class Record(Strict):
    """The exam of a model, or of a classifier. It has no times, so equal answers give equal bytes."""

    name: str
    task_version: int
    exam_digest: str
    adapter_digest: str = ""
    """Empty for a classifier."""
    modes: dict[str, dict[str, Any]]
    """The decoding of each mode."""
    sampler: dict[str, str] = Field(default_factory=dict, exclude_if=lambda sampler: not sampler)
    """The identity of the sampler; empty at the embedded scale."""
    given: dict[str, Given]
    """The answers by mode, and by `<mode>.<variant>` if there are input variants. A case without the variant has its
    answer without variant there."""
    learned: dict[str, int] = Field(default_factory=dict, exclude_if=lambda learned: not learned)
    """For a classifier, the number of its training cases by source."""
    md5: dict[str, str] = Field(default_factory=dict)
    """DVC's digests, as in dvc.lock, of the graded answers, the reports, the exam, and the training cases."""


def record_of(run: Run) -> Record:
    """The record of a graded run, without its digests."""
    given = {}
    for mode in run.modes:
        lines = run.graded[mode]
        given[mode] = _given(run, lines, run.model.variant)
        for variant, some in run.variants(mode).items():
            given[f"{mode}.{variant}"] = _given(run, filled(lines, some), variant)
    return Record(
        name=run.model.name,
        task_version=run.task.version,
        exam_digest=run.exam_digest,
        adapter_digest=run.adapter_digest,
        modes=run.modes,
        sampler=dict(run.sampler),
        given=given,
    )


def _given(run: Run, lines: Sequence[Graded], variant: str) -> Given:
    task = run.task
    pairs = [(as_variant(task, case, variant), line.transcript) for case, line in zip(run.cases, lines, strict=True)]
    qualities = {
        name: tuple(quality.of(case, transcript, NO_RESPONSES) for case, transcript in pairs)
        for name, quality in task.reporting.qualities.items()
        if not quality.asks and not any(map(is_imported, run.cases))
    }
    return Given(answers=tuple(line.answer for line in lines), qualities=qualities)


def load_record(run: Run, name: str, stage: str = "evaluate") -> Record:
    """The record of `name` on the exam of a run; `stage` is the stage of dvc.yaml that writes it, for the advice.

    Raises ArtefactError if it is missing or does not answer each case.
    """
    path, stage = paths.exam_record(run.task.name, name), f"{stage}@{name}"
    found = read_record(
        path,
        Record,
        missing=lambda: f"{path} does not exist: {remake(path, stage)}",
        broken=lambda _: f"{path} holds no answers to an exam; restore it from git, or {remake(path, stage)}",
    )
    if any(len(given.answers) != len(run.cases) for given in found.given.values()):
        what = f"does not answer the {len(run.cases):,} cases of {run.model.exam}"
        raise ArtefactError(f"{path} {what}; {remake(path, stage)}")
    return found


def answers_of(run: Run, mode: str, found: Record, report: EvalReport | None = None) -> Answers:
    """The answers of a record to the exam of a run in one mode.

    Raises ArtefactError if they are to another exam, were decoded differently, or are not those in the report.
    """
    path, stage = paths.exam_record(run.task.name, found.name), f"evaluate@{found.name}"
    if mode not in found.given:
        modes = ", ".join(found.modes)
        raise ArtefactError(f"{path} has no answers in mode {mode}, only in {modes}; {remake(path, stage)}")
    expected = run.answers(mode)
    answers = replace(
        expected, name=found.name, task_version=found.task_version, mode_spec=found.modes[mode],
        exam_digest=found.exam_digest, answers=list(found.given[mode].answers), sampler=found.sampler,
    )  # fmt: skip
    comparable(expected, answers)
    if report is None:
        return answers
    comparable(answers, report)
    differing = [
        name
        for name, metric in run.task.shares.items()
        if share(metric, answers.golds, answers.answers, answers.clusters) != report.metrics.get(name)
    ]
    if differing or report.adapter_digest != found.adapter_digest:
        what = f"give another {differing[0]} than" if differing else "are of another adapter than"
        written = paths.report(found.name) / f"{mode}.json"
        advice = remake(path, stage).replace("repro", "repro --force --single-item")  # DVC may call it up to date
        raise ArtefactError(f"the answers in {path} {what} {written}; {advice}")
    return answers


def write_record(task: Task, record: Record, exam: str, data: str | None) -> None:
    """Write the record of an exam, with the digests of its inputs. Raises OSError if one of them cannot be read."""
    kept = [paths.graded(record.name), *paths.report(record.name).glob("*.json")]
    used = [*(path for path in kept if path.exists()), *(paths.cases(cases) for cases in (exam, data) if cases)]
    whole = record.model_copy(update={"md5": {path.as_posix(): md5(path) for path in used}})
    write_text(paths.exam_record(task.name, record.name), canonical_json(whole.model_dump(mode="json")) + "\n")
