"""A classifier that learned from all that a lineage has seen, base included, and took its exam: a row to beat."""

from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from clinrl import paths
from clinrl.analysis.baselines import text
from clinrl.analysis.run import Run
from clinrl.analysis.trees import boosted_trees
from clinrl.artifacts import exclusive, write_json
from clinrl.data.dataset import draw
from clinrl.errors import ArtefactError
from clinrl.evaluation.answers import open_run
from clinrl.evaluation.record import ANSWERS, write_record
from clinrl.models.pretrain import corpus
from clinrl.tasks.base import get_task
from clinrl.types import Case, Strict

if TYPE_CHECKING:
    from clinrl.config.params import Params


class Sat(Strict):
    """The exam of a rival. Holds no times: equal inputs give equal bytes."""

    exam_digest: str
    learned: dict[str, int]
    """Number of cases by their source."""
    answers: dict[str, int | str]
    """By case id, in exam order."""


def learned(params: "Params", name: str) -> dict[str, list[Case]]:
    """What a rival learns from, by source: the data sets as they are labelled, and the cases that the embedded base
    learned from, all labelled by the edition of the exam."""
    spec = params.rivals[name]
    task, base = get_task(spec.task), params.bases[spec.task].embedded
    chosen = getattr(params.all_data[spec.exam], "edition", "") or next(iter(task.checks.editions), "")
    cases = {f"base corpus {chosen}".strip(): list(corpus(task, base, **({"edition": chosen} if chosen else {})))}
    return cases | {data: list(draw(params.datasets[data])) for data in spec.data}


def stage(params: "Params", name: str) -> None:
    """Write data/reports/<name>/answers.json and the record of the exam. Raises ArtefactError as `open_run`, and Busy
    if another command writes the same."""
    run, path = open_run(params, params.model(f"{params.rivals[name].task}-base")), paths.report(name) / ANSWERS
    with exclusive(path):
        by_source, task = learned(params, name), run.task
        cases = list(chain.from_iterable(by_source.values()))
        texts, asked = ([text(task, case) for case in some] for some in (cases, run.cases))
        labels = boosted_trees(texts, [task.label(case) for case in cases], asked)
        counts = {source: len(some) for source, some in by_source.items()}
        answers = {case.id: label for case, label in zip(run.cases, labels, strict=True)}
        taken = Sat(exam_digest=run.exam_digest, learned=counts, answers=answers)
        write_json(path, taken.model_dump(mode="json"))
        write_record(task, name, run.model.exam, None)


def load_rivals(run: Run, rows: Mapping[str, str]) -> dict[str, list[Any]]:
    """Answers in exam order, by row; `rows` has the rival of each. Raises ArtefactError for those to another exam."""
    found = {}
    for row, name in rows.items():
        path, advice = paths.report(name) / ANSWERS, f"run `dvc repro rival@{name}`"
        try:
            taken = Sat.model_validate_json(path.read_bytes())
        except (FileNotFoundError, ValidationError):
            raise ArtefactError(f"{path} is missing or is no exam of a rival; {advice}") from None
        if taken.exam_digest != run.exam_digest or set(taken.answers) != {case.id for case in run.cases}:
            raise ArtefactError(f"{path} answers another exam than {run.model.exam}; {advice}")
        found[row] = [taken.answers[case.id] for case in run.cases]
    return found
