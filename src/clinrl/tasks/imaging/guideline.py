"""The chapters of a synthetic imaging guideline, from `guideline.toml`: conditions, and the yields of modalities.

Invented for this project. Nothing here is taken from a published guideline or a study, no panel has rated anything, and
the yields make a table that can be learned, not what a radiologist would say. Research only: not clinical guidance.
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
"""How well a modality shows a target: in a high, middling or low share of the patients who have the target."""

ADVANCED: Final[frozenset[Modality]] = frozenset({"CT", "MRI", "bone scan", "PET/CT"})
"""Modalities that initial imaging without red flags does not need."""

CONTRAST: Final[frozenset[Modality]] = frozenset({"CT", "MRI"})
"""Modalities that are used with or without intravenous contrast."""

ENHANCED: Final[frozenset[Target]] = frozenset({"an infection", "a bleed", "a tumour", "a clot"})
"""Targets that CT and MRI show fully only with contrast; for the others contrast adds nothing."""


class Condition(Strict):
    """One chapter of the guideline."""

    says: str
    """The name of the condition in a request."""
    region: str
    targets: tuple[Target, ...]
    """Its possible causes."""
    local: Mapping[Modality, Yield]
    """Modalities whose yield is unusual in this condition. A reader learns it from the chapter or from studies."""
    sex: Sex | None = None
    ages: tuple[int, int] = (2, 88)
    """Years, both ends included."""

    @property
    def id(self) -> str:
        """The name of the condition within the names of variants."""
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
"""Five conditions that only the exam has. No base text, training case or mined error has them."""
RADIATION: Final = _GUIDELINE.radiation
"""Relative radiation level: 0 none, 1 low, 2 middling, 3 high."""
YIELDS: Final = _GUIDELINE.yields
"""The usual yield of each modality for a target, in the order of `MODALITIES`."""

ELSEWHERE: Final[tuple[str, ...]] = tuple(sorted({condition.region for condition in (*CONDITIONS, *HELD_OUT)}))
"""Every region that a procedure may image, whether or not it is the region of the condition."""

BY_ID: Final[Mapping[str, Condition]] = {condition.id: condition for condition in (*CONDITIONS, *HELD_OUT)}


def usual_yield(target: Target, modality: Modality) -> Yield:
    """The yield of a modality for a target in most conditions."""
    return YIELDS[target][MODALITIES.index(modality)]


def true_yield(condition: Condition, target: Target, modality: Modality) -> Yield:
    """The yield in this condition: the one in its chapter, or else the usual one."""
    return condition.local.get(modality, usual_yield(target, modality))
