"""The tables of a synthetic imaging guideline: conditions, what may lie behind them, and what shows it.

Invented for this project. Nothing here is taken from a published guideline or a study, no panel has rated anything,
and the yields are what makes a learnable table, not what a radiologist would say. Research only: not clinical guidance.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, cast, get_args

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

RADIATION: Final[Mapping[Modality, int]] = {
    "radiography": 1, "ultrasound": 0, "fluoroscopy": 2, "CT": 3, "MRI": 0, "bone scan": 2, "PET/CT": 3,
}  # fmt: skip
"""Relative radiation level: 0 none, 1 low, 2 middling, 3 high."""

ADVANCED: Final[frozenset[Modality]] = frozenset({"CT", "MRI", "bone scan", "PET/CT"})
"""Studies that a first look without red flags does not need."""

CONTRAST: Final[frozenset[Modality]] = frozenset({"CT", "MRI"})
"""Studies that are done with or without intravenous contrast."""

ENHANCED: Final[frozenset[Target]] = frozenset({"an infection", "a bleed", "a tumour", "a clot"})
"""Targets that CT and MRI show fully only with contrast; for the others contrast adds nothing."""

YIELDS: Final[Mapping[Target, tuple[Yield, ...]]] = {
    #                  radiography ultrasound fluoroscopy CT    MRI     bone scan PET/CT
    "a fracture":      ("good",     "poor",    "poor",   "good", "good", "fair",  "poor"),
    "a ligament tear": ("poor",     "good",    "poor",   "poor", "good", "poor",  "poor"),
    "a stone":         ("fair",     "good",    "fair",   "good", "poor", "poor",  "poor"),
    "an infection":    ("poor",     "fair",    "poor",   "good", "good", "good",  "fair"),
    "a bleed":         ("poor",     "fair",    "poor",   "good", "good", "poor",  "poor"),
    "a tumour":        ("fair",     "fair",    "poor",   "good", "good", "fair",  "good"),
    "a clot":          ("poor",     "good",    "poor",   "good", "fair", "poor",  "poor"),
    "an obstruction":  ("good",     "fair",    "good",   "good", "fair", "poor",  "poor"),
}  # fmt: skip
"""What each modality usually shows, in the order of `MODALITIES`."""


@dataclass(frozen=True, kw_only=True)
class Condition:
    """One chapter of the guideline."""

    id: str
    says: str
    """How a request names it."""
    region: str
    targets: tuple[Target, ...]
    """What may lie behind it."""
    local: Mapping[Modality, Yield] = field(default_factory=dict)
    """Modalities that do here what they do not usually do: learned from the chapter, or from studies of it."""
    sex: Sex | None = None
    ages: tuple[int, int] = (2, 88)
    """Years, both ends included."""


def _c(
    says: str, region: str, targets: str, local: str, *, sex: Sex | None = None,
    ages: tuple[int, int] = (2, 88),
) -> Condition:  # fmt: skip
    named = {name.split(" ", 1)[1]: name for name in TARGETS}
    pairs = dict(part.split(": ") for part in local.split(", ")) if local else {}
    known = {modality: cast("Yield", pairs.pop(modality)) for modality in MODALITIES if modality in pairs}
    assert not pairs, pairs
    return Condition(
        id=says.lower().replace(" ", "_"), says=says, region=region,
        targets=tuple(named[name] for name in targets.split(", ")), local=known, sex=sex, ages=ages,
    )  # fmt: skip


CONDITIONS: Final[tuple[Condition, ...]] = (
    _c("Wrist pain after a fall", "wrist", "fracture, ligament tear", "ultrasound: fair, CT: fair, bone scan: good"),
    _c("Ankle sprain", "ankle", "fracture, ligament tear", "ultrasound: good, MRI: fair, radiography: fair"),
    _c("Twisted knee", "knee", "fracture, ligament tear", "ultrasound: poor, CT: fair, radiography: fair"),
    _c("Sore shoulder", "shoulder", "ligament tear, infection", "ultrasound: good, bone scan: fair, MRI: good"),
    _c("Elbow stiffness", "elbow", "fracture, ligament tear", "ultrasound: fair, CT: poor, MRI: fair"),
    _c("Hip pain when walking", "hip", "fracture, tumour", "radiography: good, CT: fair, bone scan: good"),
    _c("Forefoot pain of a runner", "foot", "fracture, infection", "radiography: poor, ultrasound: fair, CT: fair"),
    _c("Low back pain", "lower back", "fracture, tumour", "radiography: poor, CT: fair, bone scan: good"),
    _c("Neck pain after a crash", "neck", "fracture, bleed", "radiography: fair, MRI: fair, ultrasound: poor"),
    _c("Crooked back of a child", "upper back", "fracture, tumour", "radiography: good, CT: poor, MRI: good", ages=(2, 17)),
    _c("Sudden headache", "head", "bleed, clot", "CT: good, MRI: fair, ultrasound: poor"),
    _c("Slow headache", "head", "tumour, infection", "CT: fair, MRI: good, PET/CT: poor"),
    _c("Bump on the head", "head", "fracture, bleed", "radiography: poor, MRI: fair, ultrasound: fair"),
    _c("Failing memory", "head", "tumour, bleed", "PET/CT: good, CT: fair, ultrasound: poor", ages=(50, 88)),
    _c("Hoarse voice", "neck", "tumour, infection", "ultrasound: fair, CT: good, MRI: fair"),
    _c("Lump in the neck", "neck", "tumour, infection", "ultrasound: good, PET/CT: fair, CT: fair"),
    _c("Cough for weeks", "chest", "infection, tumour", "radiography: good, MRI: poor, ultrasound: poor"),
    _c("Sudden breathlessness", "chest", "clot, infection", "ultrasound: fair, radiography: fair, MRI: poor"),
    _c("Chest pain on effort", "chest", "clot, tumour", "CT: fair, MRI: good, PET/CT: fair"),
    _c("Swollen leg", "leg", "clot, infection", "ultrasound: good, CT: fair, MRI: good"),
    _c("Lump in the breast", "breast", "tumour, infection", "ultrasound: good, CT: poor, radiography: good", ages=(18, 88)),
    _c("Yellow skin", "upper abdomen", "stone, obstruction", "ultrasound: good, MRI: good, CT: fair"),
    _c("Pain below the ribs", "upper abdomen", "stone, infection", "ultrasound: fair, MRI: fair, CT: good"),
    _c("Flank pain", "flank", "stone, obstruction", "radiography: good, ultrasound: fair, fluoroscopy: poor"),
    _c("Blood in the urine", "flank", "tumour, stone", "ultrasound: fair, CT: good, fluoroscopy: good"),
    _c("Cramps and vomiting", "belly", "obstruction, infection", "radiography: fair, ultrasound: poor, MRI: good"),
    _c("Pain low on the right", "belly", "infection, obstruction", "ultrasound: good, radiography: poor, MRI: fair"),
    _c("Lump in the groin", "groin", "obstruction, infection", "ultrasound: good, CT: fair, MRI: poor"),
    _c("Pelvic pain", "pelvis", "infection, tumour", "ultrasound: good, CT: poor, MRI: good", sex="woman", ages=(14, 80)),
    _c("Trouble passing urine", "pelvis", "obstruction, tumour", "ultrasound: fair, MRI: good, CT: poor", sex="man", ages=(40, 88)),
)  # fmt: skip
"""Thirty conditions to train and to be examined on."""

HELD_OUT: Final[tuple[Condition, ...]] = (
    _c("Crushed hand", "hand", "fracture, ligament tear", "radiography: fair, ultrasound: good, CT: fair"),
    _c("First seizure", "head", "tumour, bleed", "CT: fair, PET/CT: fair, MRI: fair"),
    _c("Stiff upper back", "upper back", "fracture, infection", "radiography: poor, bone scan: fair, CT: poor"),
    _c("Swelling of the jaw", "jaw", "infection, stone", "ultrasound: good, CT: fair, radiography: good"),
    _c("Trouble swallowing", "throat", "obstruction, tumour", "fluoroscopy: good, CT: poor, radiography: poor"),
)
"""Five conditions that nothing but the exam has: no base text, no training case, no mined error."""

ELSEWHERE: Final[tuple[str, ...]] = tuple(sorted({condition.region for condition in (*CONDITIONS, *HELD_OUT)}))
"""Every region: what a procedure may be of, whatever the question is about."""

BY_ID: Final[Mapping[str, Condition]] = {condition.id: condition for condition in (*CONDITIONS, *HELD_OUT)}


def usual_yield(target: Target, modality: Modality) -> Yield:
    """What a modality shows of a target in most conditions."""
    return YIELDS[target][MODALITIES.index(modality)]


def true_yield(condition: Condition, target: Target, modality: Modality) -> Yield:
    """What it shows in this condition: the chapter's own finding, or the usual."""
    return condition.local.get(modality, usual_yield(target, modality))
