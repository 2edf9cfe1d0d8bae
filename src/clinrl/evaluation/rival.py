"""A rival: a classifier that learns from all labels of a lineage, the base's included, and takes the same exam."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from clinrl import paths
from clinrl.analysis.baselines import text
from clinrl.analysis.run import Run
from clinrl.analysis.trees import boosted_trees
from clinrl.artifacts import exclusive
from clinrl.config.params import Params
from clinrl.data.dataset import draw
from clinrl.evaluation.answers import open_run
from clinrl.evaluation.record import Given, Record, answers_of, load_record, write_record
from clinrl.models.pretrain import corpus
from clinrl.tasks.base import get_task
from clinrl.types import Case


def training_cases(params: Params, name: str) -> dict[str, list[Case]]:
    """The training cases of a rival by source: its data sets with their labels, and the corpus of the embedded base,
    labelled by the edition of the exam."""
    spec = params.rivals[name]
    task, base = get_task(spec.task), params.bases[spec.task].embedded
    chosen = getattr(params.all_data[spec.exam], "edition", "") or next(iter(task.checks.editions), "")
    cases = {f"base corpus {chosen}".strip(): list(corpus(task, base, **({"edition": chosen} if chosen else {})))}
    return cases | {data: list(draw(params.datasets[data])) for data in spec.data}


def stage(params: Params, name: str) -> None:
    """Train a rival and write the record of its exam.

    Raises ArtefactError for the same reasons as `open_run`, and Busy if another command writes the record.
    """
    spec = params.rivals[name]
    run = open_run(params, params.model(f"{spec.task}-base"))
    with exclusive(paths.exam_record(spec.task, name)):
        by_source, task = training_cases(params, name), run.task
        cases = list(chain.from_iterable(by_source.values()))
        texts, exam = ([text(task, case) for case in some] for some in (cases, run.cases))
        given = Given(answers=tuple(boosted_trees(texts, [task.label(case) for case in cases], exam)), qualities={})
        record = Record(
            name=name,
            task_version=task.version,
            exam_digest=run.exam_digest,
            modes=run.modes,
            given=dict.fromkeys(run.modes, given),  # it has no modes, so its answers are the same in all
            learned={source: len(some) for source, some in by_source.items()},
        )
        write_record(task, record, run.model.exam, None)


def load_rivals(run: Run, rows: Mapping[str, str]) -> dict[str, Sequence[Any]]:
    """The rivals' answers in exam order, by row; `rows` maps each row to its rival.

    Raises ArtefactError for answers to another exam.
    """
    first = next(iter(run.modes))
    return {row: answers_of(run, first, load_record(run, name, "rival")).answers for row, name in rows.items()}
