"""Functions for notebooks, which evaluate a model or compare two and return reports. They write nothing below data/."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from clinrl import paths
from clinrl.analysis import paired
from clinrl.analysis.exam import EvalReport
from clinrl.artifacts import digest
from clinrl.errors import ArtefactError, ParamsError
from clinrl.evaluation.answers import check_here, load_answers, open_run, run_of
from clinrl.evaluation.evaluate import answer_exam, check_apart, reports_of, responses_of
from clinrl.intervals import Paired
from clinrl.models.bases import made_of
from clinrl.models.judges import Judges
from clinrl.types import Case

if TYPE_CHECKING:
    from clinrl.config.params import Params
    from clinrl.registry.versions import Champion

GIVEN = "given cases"
"""The name of the exam in a report on given cases."""


def evaluate(params: "Params", model: "str | Champion", cases: Iterable[Case] | None = None) -> dict[str, EvalReport]:
    """Let a model answer its exam, or the given cases, and return the report of each mode. Writes nothing.

    `model` is a version, a merge or `<task>-base`, or one of the registry, whose adapter must be in this checkout. The
    training cases are not read, so the reports have no rows that learn from them, and none of the parent and no tests
    against it. Raises ParamsError for an unknown name or without a case of the task, ArtefactError if an input is
    missing or altered, or differs from the model in the registry, and DataError for cases of patients that the model
    was trained on.
    """
    chosen = params.model(_name(model))
    digests = made_of(chosen.task, chosen.folder)
    if not isinstance(model, str) and model.digest != digests["adapter"]:
        raise ArtefactError(
            f"{chosen.folder} is not the {model.name} of the registry; restore it with `dvc checkout {chosen.folder}`"
        )
    if cases is None:
        run = open_run(params, chosen)
    else:
        if not (cases := tuple(cases)) or not all(isinstance(case, chosen.task.Case) for case in cases):
            raise ParamsError(f"{chosen.name} answers cases of {chosen.task.name}, and other ones or none were given")
        run = run_of(params, replace(chosen, exam=GIVEN), cases, digest([case.id for case in cases]))
    check_apart(params, run.model, run.cases)
    judges = Judges(paths.base(run.task.name))
    run = answer_exam(params, replace(run, adapter_digest=digests["adapter"]), judges)
    return reports_of(run, [], {}, responses_of(run, judges))


def compare(params: "Params", first: "str | Champion", second: "str | Champion") -> dict[str, tuple[Paired, ...]]:
    """The paired tests between two models that took the same exam, by mode, from their graded answers or a resit's.

    Raises ParamsError for an unknown name and for models without a common exam, ArtefactError if answers are missing or
    altered.
    """
    one, other = params.model(_name(first)), params.model(_name(second))
    took, theirs = ({model.exam: paths.graded(model.name), **_resit(params, model.name)} for model in (one, other))
    exam = next((exam for exam in took if exam in theirs), None)
    if exam is None:
        raise ParamsError(
            f"{one.name} took {' and '.join(took)}, {other.name} {' and '.join(theirs)}: no exam is common"
        )
    check_here(*(model for model, of in ((one, took), (other, theirs)) if of[exam] == paths.graded(model.name)))
    run = open_run(params, replace(one, exam=exam))
    return {
        mode: paired.compare(
            load_answers(run, mode, one.name, took[exam]), load_answers(run, mode, other.name, theirs[exam])
        )
        for mode in run.modes
    }


def _resit(params: "Params", name: str) -> dict[str, Path]:
    """The exam that a model took besides its own, and the folder of its answers there."""
    return {params.resits[name].data: paths.resit(name)} if name in params.resits else {}


def _name(model: "str | Champion") -> str:
    return model if isinstance(model, str) else model.name
