"""What an exam left, small enough for git: answers without their text, and the digests on which comparisons depend.

A comparison of versions rests on these files alone, so a clone that has none of the transcripts makes it again, and
versions may be trained on different days and machines. A stage of DVC cannot list as many inputs as a comparison has
versions, but it can depend on a folder: on that of a task's records. A new version then needs no edit of dvc.yaml.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import Field, ValidationError

from clinrl import paths
from clinrl.analysis.exam import EvalReport, share
from clinrl.analysis.paired import Answers, comparable
from clinrl.analysis.run import Run
from clinrl.artifacts import canonical_json, md5, write_text
from clinrl.errors import ArtefactError
from clinrl.tasks.base import GIVEN, Task, as_variant
from clinrl.tasks.importing import is_imported
from clinrl.tasks.parts import NO_RESPONSES, Share, no_requests
from clinrl.types import Case, Graded, Strict, Unreadable


class Given(Strict):
    """What a model answered in one mode, and under one input variant, in exam order."""

    answers: tuple[int | str | Unreadable, ...]
    qualities: dict[str, tuple[float | None, ...]]
    """Of each quality that asks no judge, its number for every case. Imported cases have none: no text is kept."""


class Record(Strict):
    """The exam of a model, or of a classifier. Holds no times: equal answers give equal bytes."""

    name: str
    task_version: int
    exam_digest: str
    adapter_digest: str = ""
    """Empty for a classifier, which has none."""
    modes: dict[str, dict[str, Any]]
    """How each mode decoded."""
    sampler: dict[str, str] = Field(default_factory=dict, exclude_if=lambda sampler: not sampler)
    """Who wrote the answers; empty at the embedded scale."""
    given: dict[str, Given]
    """By mode; by `<mode>.<variant>` too, where it was asked under variants: as given, for a case that has it not."""
    learned: dict[str, int] = Field(default_factory=dict, exclude_if=lambda learned: not learned)
    """Number of cases by their source, of a classifier."""
    md5: dict[str, str] = Field(default_factory=dict)
    """DVC's digests, as dvc.lock has them: of the answers with their text, the reports, and the cases that they are
    about and were learned from."""


def record_of(run: Run) -> Record:
    """What is recorded of a run that was graded."""
    given = {}
    for mode in run.modes:
        lines = run.graded[mode]
        given[mode] = _given(run.task, run.cases, lines, run.model.variant)
        for variant, some in run.variants(mode).items():
            under = {line.case_id: line for line in some}
            all_of = [under.get(case.id, line) for case, line in zip(run.cases, lines, strict=True)]
            given[f"{mode}.{variant}"] = _given(run.task, run.cases, all_of, variant)
    modes = {mode: dict(spec) for mode, spec in run.modes.items()}
    return Record(
        name=run.model.name,
        task_version=run.task.version,
        exam_digest=run.exam_digest,
        adapter_digest=run.adapter_digest,
        modes=modes,
        sampler=dict(run.sampler),
        given=given,
    )


def _given(task: Task, cases: Sequence[Case], lines: Sequence[Graded], variant: str = GIVEN) -> Given:
    pairs = [(as_variant(task, case, variant), line.transcript) for case, line in zip(cases, lines, strict=True)]
    qualities = {
        name: tuple(quality.of(case, transcript, NO_RESPONSES) for case, transcript in pairs)
        for name, quality in task.reporting.qualities.items()
        if quality.requests is no_requests and not any(map(is_imported, cases))
    }
    return Given(answers=tuple(line.answer for line in lines), qualities=qualities)


def load_record(run: Run, name: str, stage: str = "evaluate") -> Record:
    """What `name` answered to the exam of a run, in a stage of dvc.yaml.

    Raises ArtefactError if it is missing or does not answer each case.
    """
    path, advice = paths.exam_record(run.task.name, name), f"run `dvc repro {stage}@{name}`"
    try:
        found = Record.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise ArtefactError(f"{path} does not exist: {advice}") from None
    except ValidationError:
        raise ArtefactError(f"{path} holds no answers to an exam; restore it from git, or {advice}") from None
    if any(len(given.answers) != len(run.cases) for given in found.given.values()):
        raise ArtefactError(f"{path} does not answer the {len(run.cases):,} cases of {run.model.exam}; {advice}")
    return found


def answers_of(run: Run, mode: str, found: Record, report: EvalReport | None = None) -> Answers:
    """The answers of a record in a mode of a run's exam.

    Raises ArtefactError if they answer another exam, were decoded otherwise, or are not those that the report is about.
    """
    path, advice = paths.exam_record(run.task.name, found.name), f"run `dvc repro evaluate@{found.name}`"
    if mode not in found.given:
        raise ArtefactError(f"{path} has no answers in mode {mode}, only in {', '.join(found.modes)}; {advice}")
    asked = run.answers(mode)
    answers = replace(
        asked, name=found.name, task_version=found.task_version, mode_spec=found.modes[mode],
        exam_digest=found.exam_digest, answers=list(found.given[mode].answers), sampler=found.sampler,
    )  # fmt: skip
    comparable(asked, answers)
    if report is None:
        return answers
    comparable(answers, report)
    differing = [
        name
        for name, metric in run.task.metrics.items()
        if isinstance(metric, Share)
        and share(metric, answers.golds, answers.answers, answers.clusters) != report.metrics.get(name)
    ]
    if differing or report.adapter_digest != found.adapter_digest:
        what = f"give another {differing[0]} than" if differing else "are of another adapter than"
        written = paths.report(found.name) / f"{mode}.json"
        advice = f"run `dvc repro --force --single-item evaluate@{found.name}`"  # for DVC they may be up to date
        raise ArtefactError(f"the answers in {path} {what} {written}; {advice}")
    return answers


def write_record(task: Task, record: Record, exam: str, data: str | None) -> None:
    """Write the record of an exam, with the digests of what it came from. Raises OSError if one cannot be read."""
    kept = [paths.graded(record.name), *sorted(paths.report(record.name).glob("*.json"))]
    used = [*(path for path in kept if path.exists()), *(paths.cases(cases) for cases in (exam, data) if cases)]
    whole = record.model_copy(update={"md5": {path.as_posix(): md5(path) for path in used}})
    write_text(paths.exam_record(task.name, record.name), canonical_json(whole.model_dump(mode="json")) + "\n")
