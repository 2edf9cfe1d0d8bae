"""What an exam left, small enough for git: answers without their text, and the digests on which comparisons depend.

A comparison of versions rests on these files alone, so a clone that has none of the transcripts makes it again, and
versions may be trained on different days and machines. A stage of DVC cannot list as many inputs as a comparison has
versions, but it can depend on a folder: on that of a task's records. A new version then needs no edit of dvc.yaml.
"""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from pydantic import ValidationError

from clinrl import paths
from clinrl.analysis.contrasts import without_models
from clinrl.analysis.exam import EvalReport
from clinrl.analysis.paired import Answers, comparable
from clinrl.analysis.run import Run
from clinrl.artifacts import canonical_json, write_json
from clinrl.errors import ArtefactError
from clinrl.runtime.dvc_digest import md5
from clinrl.tasks.base import GIVEN, Task, as_variant
from clinrl.tasks.importing import is_imported
from clinrl.tasks.parts import NO_RESPONSES, Share
from clinrl.types import Case, Graded, Strict, Unreadable

ANSWERS = "answers.json"


class Given(Strict):
    """What a model answered in one mode, and under one input variant, in exam order."""

    answers: tuple[int | str | Unreadable, ...]
    qualities: dict[str, tuple[float | None, ...]]
    """Of each quality that asks no judge, its number for every case. Imported cases have none: no text is kept."""


class Taken(Strict):
    """The exam of a model. Holds no times: equal answers give equal bytes."""

    task_version: int
    exam_digest: str
    adapter_digest: str
    modes: dict[str, dict[str, Any]]
    """How each mode decoded."""
    given: dict[str, Given]
    """By mode; by `<mode>.<variant>` too, where it was asked under variants: as given, for a case that has it not."""


def taken(run: Run) -> str:
    """The text of ANSWERS for a run that was graded."""
    given = {}
    for mode in run.modes:
        lines = run.graded[mode]
        given[mode] = _given(run.task, run.cases, lines, run.model.variant)
        for variant, some in run.variants(mode).items():
            under = {line.case_id: line for line in some}
            all_of = [under.get(case.id, line) for case, line in zip(run.cases, lines, strict=True)]
            given[f"{mode}.{variant}"] = _given(run.task, run.cases, all_of, variant)
    modes = {mode: dict(spec) for mode, spec in run.modes.items()}
    found = Taken(
        task_version=run.task.version,
        exam_digest=run.exam_digest,
        adapter_digest=run.adapter_digest,
        modes=modes,
        given=given,
    )
    return canonical_json(found.model_dump(mode="json")) + "\n"


def _given(task: Task, cases: Sequence[Case], lines: Sequence[Graded], variant: str = GIVEN) -> Given:
    measured = () if any(map(is_imported, cases)) else without_models(task)
    pairs = [(as_variant(task, case, variant), line.transcript) for case, line in zip(cases, lines, strict=True)]
    qualities = {
        name: tuple(task.reporting.qualities[name].of(case, transcript, NO_RESPONSES) for case, transcript in pairs)
        for name in measured
    }
    return Given(answers=tuple(line.answer for line in lines), qualities=qualities)


def load_taken(run: Run, name: str) -> Taken:
    """What `name` answered to the exam of a run. Raises ArtefactError if it is missing or is about another exam."""
    path, advice = paths.report(name) / ANSWERS, f"run `dvc repro evaluate@{name}`"
    try:
        found = Taken.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise ArtefactError(f"{path} does not exist: {advice}") from None
    except ValidationError:
        raise ArtefactError(f"{path} holds no answers to an exam; restore it from git, or {advice}") from None
    if any(len(given.answers) != len(run.cases) for given in found.given.values()):
        raise ArtefactError(f"{path} does not answer the {len(run.cases):,} cases of {run.model.exam}; {advice}")
    return found


def answers_of(run: Run, mode: str, name: str, found: Taken, report: EvalReport) -> Answers:
    """The answers of a model in a mode of a run's exam.

    Raises ArtefactError if they answer another exam, were decoded otherwise, or are not those that the report is about.
    """
    path, advice = paths.report(name) / ANSWERS, f"run `dvc repro evaluate@{name}`"
    if mode not in found.given:
        raise ArtefactError(f"{path} has no answers in mode {mode}, only in {', '.join(found.modes)}; {advice}")
    answers = Answers(
        name=name,
        task=run.task.name,
        task_version=found.task_version,
        mode=mode,
        mode_spec=found.modes[mode],
        exam_digest=found.exam_digest,
        golds=run.golds,
        answers=list(found.given[mode].answers),
        clusters=run.clusters,
    )
    comparable(run.answers(mode), answers)
    comparable(answers, report)
    differing = [
        name
        for name, metric in run.task.metrics.items()
        if isinstance(metric, Share)
        and not math.isclose(_share(metric, answers), report.metrics[name].value, abs_tol=1e-6)
    ]
    if differing or report.adapter_digest != found.adapter_digest:
        what = f"give another {differing[0]} than" if differing else "are of another adapter than"
        raise ArtefactError(f"the answers in {path} {what} {path.with_name(f'{mode}.json')}; {advice}")
    return answers


def _share(metric: Share, answers: Answers) -> float:
    verdicts = (metric.of(gold, answer) for gold, answer in zip(answers.golds, answers.answers, strict=True))
    return fmean(counted) if (counted := [verdict for verdict in verdicts if verdict is not None]) else 0.0


def write_record(task: Task, name: str, exam: str, data: str | None) -> None:
    """Record the answers and reports of an exam, and the cases that they are about and were learned from.

    Digests are DVC's, as dvc.lock has them. Raises OSError if one of these cannot be read.
    """
    reports = sorted(paths.report(name).glob("*.json"))
    kept = [paths.graded(name)] if paths.graded(name).exists() else []  # a rival, which says nothing, keeps none
    used = [*kept, *reports, *(paths.cases(cases) for cases in (exam, data) if cases)]
    write_json(paths.exam_record(task.name, name), {"name": name, "md5": {path.as_posix(): md5(path) for path in used}})
