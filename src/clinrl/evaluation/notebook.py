"""What a notebook asks for: a model evaluated, and two compared, as records. Nothing is written below data/."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from clinrl import paths
from clinrl.analysis import paired
from clinrl.analysis.exam import EvalReport
from clinrl.artifacts import digest
from clinrl.data.dataset import read_cases
from clinrl.data.reward_audit import proven
from clinrl.errors import ArtefactError
from clinrl.evaluation.answers import load_sitting, sitting_of, unanswered
from clinrl.evaluation.evaluate import hear, models_of, reports_of, sit
from clinrl.intervals import Paired
from clinrl.models.judges import Judges
from clinrl.types import Case

if TYPE_CHECKING:
    from clinrl.config.params import Params

GIVEN = "given cases"
"""What a report names as its exam when the cases were given."""


class Registered(Protocol):
    """A model of the registry, such as `load_champion` returns."""

    @property
    def name(self) -> str:
        """The version or merge of params.yaml."""

    @property
    def digest(self) -> str:
        """Identity of its adapter, or of the full model."""


def evaluate(params: "Params", model: str | Registered, cases: Sequence[Case] | None = None) -> dict[str, EvalReport]:
    """The report of each mode on a model: of its exam, or of the given cases. Asks the model; writes nothing.

    `model` is a version, a merge or `<task>-base`, or one of the registry, whose adapter must lie here. The training
    cases are not read, so no row of the report has learned from them. Raises ParamsError for an unknown name,
    ArtefactError if an input is missing or altered, or is another model than that of the registry.
    """
    who = params.model(_name(model))
    made = models_of(who)
    if not isinstance(model, str) and model.digest != made["adapter"]:
        raise ArtefactError(
            f"{who.folder} is not the {model.name} of the registry; restore it with `dvc checkout {who.folder}`"
        )
    if cases is None:
        exam_digest, cases = proven(who.exam, who.task), list(read_cases(paths.cases(who.exam), who.task))
    else:
        who, exam_digest = replace(who, exam=GIVEN), digest([case.id for case in cases])
    judges = Judges(paths.base(who.task.name))
    graded = sit(params, who, cases, judges)
    sittings = {mode: sitting_of(who, mode, params, exam_digest, cases) for mode in params.modes}
    answered = {mode: replace(one, answers=[line.answer for line in graded[mode]]) for mode, one in sittings.items()}
    return reports_of(who, made["adapter"], cases, [], graded, answered, {}, hear(who, cases, graded, judges))


def compare(params: "Params", first: str | Registered, second: str | Registered) -> dict[str, tuple[Paired, ...]]:
    """The paired tests between two models that took the same exam, by mode, on their graded answers. Asks no model.

    Raises ParamsError for an unknown name, ArtefactError if answers are missing, altered or of another exam.
    """
    one, other = params.model(_name(first)), params.model(_name(second))
    _, cases, blank = unanswered(params, one.name)
    return {
        mode: paired.compare(
            load_sitting(one.name, like, cases), load_sitting(other.name, like, cases), one.task.compared
        )
        for mode, like in blank.items()
    }


def _name(model: str | Registered) -> str:
    return model if isinstance(model, str) else model.name
