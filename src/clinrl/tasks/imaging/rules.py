"""The rating of a procedure, the clinical authority of the task, as small pure functions over latent facts.

A rating runs from 1 to 9, as appropriateness panels rate: 7 to 9 is Usually Appropriate, 4 to 6 May Be Appropriate, and
1 to 3 Usually Not Appropriate (that mapping and the three labels are the general scheme; every number behind a rating
is this project's invention). It starts from the procedure's yield and moves by named rules. Not clinical guidance.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from pydantic import Field

from clinrl.tasks.imaging.answer import LABELS, Label
from clinrl.tasks.imaging.guideline import (
    ADVANCED,
    BY_ID,
    CONTRAST,
    ENHANCED,
    RADIATION,
    Modality,
    Sex,
    Target,
    Yield,
    true_yield,
    usual_yield,
)
from clinrl.types import Strict

Phase = Literal["initial", "next"]

START: Final[dict[Yield, int]] = {"good": 8, "fair": 5, "poor": 2}
"""The rating of a procedure that no rule moves, by its yield."""

CHILD_BELOW_YEARS: Final = 16
"""Age in years below which patients are spared high radiation."""

EGFR_LIMIT: Final = 30
"""Filtration rate, mL/min/1.73 m2, below which contrast is avoided."""


class Scenario(Strict):
    """The latent facts of one request: a patient, a question and a procedure. Never shown to the model as such."""

    condition: str
    target: Target
    """The suspected finding."""
    age_years: int = Field(ge=0, le=110)
    sex: Sex
    pregnant: bool = False
    egfr_ml_min: int | None = Field(default=None, ge=5, le=140)
    """Estimated filtration rate per 1.73 m2; None: not known, taken as normal."""
    red_flag: bool = False
    phase: Phase
    done: Modality | None = None
    """The earlier study, which was unclear; None in the initial phase."""
    modality: Modality
    region: str
    """The region that the procedure images."""
    contrast: bool = False


class Decision(Strict):
    """A rating, its label, and every rule that moved it, in the order of `RULES`."""

    rating: int = Field(ge=1, le=9)
    label: Label
    shown: Yield
    """The yield that the reader believes the procedure to have."""
    applied: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule that moves a rating."""

    id: str
    holds: Callable[[Scenario], bool]
    moves: int
    """Points of the rating, -9 to 9; a move of -9 ends at 1."""


def weak_kidneys(s: Scenario) -> bool:
    """Whether the filtration rate is known to be below the limit for contrast."""
    return s.egfr_ml_min is not None and s.egfr_ml_min < EGFR_LIMIT


RULES: Final[tuple[Rule, ...]] = (
    Rule(id="wrong_region", holds=lambda s: s.region != BY_ID[s.condition].region, moves=-9),
    Rule(id="repeat", holds=lambda s: s.modality == s.done, moves=-5),
    Rule(
        id="plain_first", moves=-4,
        holds=lambda s: s.phase == "initial" and not s.red_flag and s.modality in ADVANCED,
    ),
    Rule(id="red_flag", holds=lambda s: s.red_flag and s.modality in ADVANCED, moves=2),
    Rule(id="pregnancy", holds=lambda s: s.pregnant and RADIATION[s.modality] >= 2, moves=-5),
    Rule(id="child", holds=lambda s: s.age_years < CHILD_BELOW_YEARS and RADIATION[s.modality] >= 3, moves=-3),
    Rule(id="kidneys", holds=lambda s: s.contrast and weak_kidneys(s), moves=-5),
    Rule(
        id="contrast_lacking", moves=-2,
        holds=lambda s: not s.contrast and s.modality in CONTRAST and s.target in ENHANCED,
    ),
    Rule(id="contrast_idle", holds=lambda s: s.contrast and s.target not in ENHANCED, moves=-3),
)  # fmt: skip
"""The rules, in the order in which they are applied. After a wrong region no other rule counts."""

LOCAL_YIELD: Final = "local_yield"
"""The knowledge of a modality's unusual yield in a condition. It can be omitted like a rule."""

RULE_IDS: Final[tuple[str, ...]] = (LOCAL_YIELD, *(rule.id for rule in RULES))


def label_of(rating: int) -> Label:
    """The label of a rating: 1 to 3, 4 to 6, 7 to 9."""
    return LABELS[(rating - 1) // 3]


def decide(s: Scenario, omit: frozenset[str] = frozenset(), believed: Yield | None = None) -> Decision:
    """The rating by a reader who knows every rule except `omit`. Pure.

    `believed`: the yield that the evidence reports. A reader who does not know the local yield takes that one, and
    without evidence the usual one; a reader who knows it ignores what the studies report.
    """
    usual = believed or usual_yield(s.target, s.modality)
    shown = usual if LOCAL_YIELD in omit else true_yield(BY_ID[s.condition], s.target, s.modality)
    applied = [rule for rule in RULES if rule.id not in omit and rule.holds(s)]
    if applied and applied[0].id == "wrong_region":
        applied = applied[:1]
    rating = min(9, max(1, START[shown] + sum(rule.moves for rule in applied)))
    return Decision(rating=rating, label=label_of(rating), shown=shown, applied=tuple(rule.id for rule in applied))


def deciding_rule(s: Scenario) -> str:
    """The first rule whose omission changes the label, or "yield" if the procedure's yield decides alone."""
    decision = decide(s)
    candidates = (LOCAL_YIELD, *decision.applied)  # the omission of any other rule changes nothing
    return next((rule for rule in candidates if decide(s, frozenset({rule})).label != decision.label), "yield")
