"""The chapters of a synthetic imaging guideline, of `guideline.toml`: conditions, and what shows their cause.

Invented for this project. Nothing here is taken from a published guideline or a study, no panel has rated anything,
and the yields are what makes a learnable table, not what a radiologist would say. Research only: not clinical guidance.
"""

from collections.abc import Mapping
from typing import Final, Literal, get_args

from clinrl.tasks.tables import read_table
from clinrl.types import Strict

Modality = Literal["radiography", "ultrasound", "fluoroscopy", "CT", "MRI", "bone scan", "PET/CT"]
Sex = Literal["woman", "man"]
SEXES: Final[tuple[Sex, ...]] = get_args(Sex)

MODALITIES: Final[tuple[Modality, ...]] = get_args(Modality)

Target = Literal[
    "a fracture", "a ligament tear", "a stone", "an infection", "a bleed", "a tumour", "a clot", "an obstruction"
]
TARGETS: Final[tuple[Target, ...]] = get_args(Target)

Yield = Literal["good", "fair", "poor"]
"""How well a modality shows a target: the share of patients who have it in whom it is seen is high, middling or low."""

ADVANCED: Final[frozenset[Modality]] = frozenset({"CT", "MRI", "bone scan", "PET/CT"})
"""Studies that a first look without red flags does not need."""

CONTRAST: Final[frozenset[Modality]] = frozenset({"CT", "MRI"})
"""Studies that are done with or without intravenous contrast."""

ENHANCED: Final[frozenset[Target]] = frozenset({"an infection", "a bleed", "a tumour", "a clot"})
"""Targets that CT and MRI show fully only with contrast; for the others contrast adds nothing."""


class Condition(Strict):
    """One chapter of the guideline."""

    says: str
    """How a request names it."""
    region: str
    targets: tuple[Target, ...]
    """What may lie behind it."""
    local: Mapping[Modality, Yield]
    """Modalities that do here what they do not usually do: learned from the chapter, or from studies of it."""
    sex: Sex | None = None
    ages: tuple[int, int] = (2, 88)
    """Years, both ends included."""

    @property
    def id(self) -> str:
        """Its name within the names of variants."""
        return self.says.lower().replace(" ", "_")


class _Guideline(Strict):
    conditions: tuple[Condition, ...]
    held_out: tuple[Condition, ...]
    radiation: Mapping[Modality, int]
    yields: Mapping[Target, tuple[Yield, ...]]


_GUIDELINE: Final = read_table(__file__, _Guideline)
CONDITIONS: Final = _GUIDELINE.conditions
"""Thirty conditions to train and to be examined on."""
HELD_OUT: Final = _GUIDELINE.held_out
"""Five conditions that nothing but the exam has: no base text, no training case, no mined error."""
RADIATION: Final = _GUIDELINE.radiation
"""Relative radiation level: 0 none, 1 low, 2 middling, 3 high."""
YIELDS: Final = _GUIDELINE.yields
"""What each modality usually shows, in the order of `MODALITIES`."""

ELSEWHERE: Final[tuple[str, ...]] = tuple(sorted({condition.region for condition in (*CONDITIONS, *HELD_OUT)}))
"""Every region: what a procedure may be of, whatever the question is about."""

BY_ID: Final[Mapping[str, Condition]] = {condition.id: condition for condition in (*CONDITIONS, *HELD_OUT)}


def usual_yield(target: Target, modality: Modality) -> Yield:
    """What a modality shows of a target in most conditions."""
    return YIELDS[target][MODALITIES.index(modality)]


def true_yield(condition: Condition, target: Target, modality: Modality) -> Yield:
    """What it shows in this condition: the chapter's own finding, or the usual."""
    return condition.local.get(modality, usual_yield(target, modality))
