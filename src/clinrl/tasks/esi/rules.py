"""The Emergency Severity Index as small pure functions: the clinical authority of the task.

Levels run from 1 (most urgent) to 5. Decision points are asked in order, A → B → C → D; the first of A and B that holds
decides, C counts resource types, and D may raise a C level to 2. Sources: "v5" is the ENA ESI Handbook, 5th edition
(2023); "v4" the AHRQ ESI Implementation Handbook, version 4; "series" are triggers of the published adapter series
that the handbooks do not list. Thresholds and lists are restated, never quoted. Research only: not for clinical use.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from pydantic import Field

from clinrl.types import Strict

Edition = Literal["v5", "v4"]
Sex = Literal["female", "male"]
SEXES: tuple[Sex, ...] = get_args(Sex)
Resource = Literal[
    "labs", "ECG", "x-ray", "CT", "ultrasound", "IV fluids", "IV meds", "consult", "procedure", "sedation"
]
FindingId = Literal[
    "acs", "anaphylaxis", "arrest", "central_line", "chest_tube", "distress", "ectopic", "high_fall", "hypoperfusion",
    "immunosuppressed", "intubated", "limb_threat", "major_bleeding", "new_confusion", "open_fracture", "overdose",
    "penetrating", "seizing", "sepsis_signs", "stroke_signs", "suicidal", "thunderclap", "torsion", "unresponsive",
    "vision_loss",
]  # fmt: skip
"""Every finding that there is. Another id is refused: no rule would see it, and the patient would be an ESI 5."""


class Presentation(Strict):
    """The latent facts of one patient at the triage desk. None means not measured. Never shown to the model."""

    age_years: float = Field(ge=0, le=110)
    sex: Sex
    complaint: str
    findings: tuple[FindingId, ...]
    """Ids of the findings that hold, sorted; what is denied or past is not here."""
    hr_bpm: int | None = Field(default=None, ge=0, le=300)
    rr_bpm: int | None = Field(default=None, ge=0, le=120)
    spo2_pct: int | None = Field(default=None, ge=40, le=100)
    sbp_mmhg: int | None = Field(default=None, ge=30, le=280)
    dbp_mmhg: int | None = Field(default=None, ge=10, le=180)
    temp_c: float | None = Field(default=None, ge=25, le=44)
    pain: int | None = Field(default=None, ge=0, le=10)
    """Reported pain, 0 to 10."""
    pain_site: Literal["visceral", "limb", "none"] = "none"
    """Visceral or systemic pain may mark ESI 2; isolated limb or surface pain stays at decision point C."""
    baseline_hypoxia: bool = False
    """A low SpO2 is this patient's stated baseline."""
    resources: tuple[Resource, ...] = ()
    """Resource types expected until disposition, sorted and distinct."""


class Decision(Strict):
    """The level, where it was decided, and by which rule."""

    level: int = Field(ge=1, le=5)
    point: Literal["A", "B", "C", "D"]
    rule: str
    fired: tuple[str, ...]
    """All rules of points A, B and D that hold, in the order of asking; `rule` is the first unless point C decides."""
    over: tuple[str, ...]
    """Vital signs beyond the danger zone of the age band: any of HR, RR, SpO2."""
    resource_count: int
    ambiguous: bool
    """A reasonable nurse may differ: a single vital sign that is marginally out. Kept out of exams."""


@dataclass(frozen=True, kw_only=True)
class Band:
    """Danger-zone limits of one age band: strictly above is out. Lower edge included, upper edge excluded."""

    name: str
    below_years: float
    hr_bpm: int
    rr_bpm: int


MONTH = 1 / 12

BANDS: Mapping[Edition, tuple[Band, ...]] = {
    "v5": (
        Band(name="under 1 month", below_years=MONTH, hr_bpm=190, rr_bpm=60),
        Band(name="1-12 months", below_years=1, hr_bpm=180, rr_bpm=55),
        Band(name="1-3 years", below_years=3, hr_bpm=140, rr_bpm=40),
        Band(name="3-5 years", below_years=5, hr_bpm=120, rr_bpm=35),
        Band(name="5-12 years", below_years=12, hr_bpm=120, rr_bpm=30),
        Band(name="12-18 years", below_years=18, hr_bpm=100, rr_bpm=20),
        Band(name="adult", below_years=float("inf"), hr_bpm=100, rr_bpm=20),
    ),
    "v4": (
        Band(name="under 3 months", below_years=3 * MONTH, hr_bpm=180, rr_bpm=50),
        Band(name="3 months-3 years", below_years=3, hr_bpm=160, rr_bpm=40),
        Band(name="3-8 years", below_years=8, hr_bpm=140, rr_bpm=30),
        Band(name="over 8 years", below_years=float("inf"), hr_bpm=100, rr_bpm=20),
    ),
}
"""Danger-zone vital signs (v5 and v4, decision point D)."""

SPO2_LIMIT_PCT = 92
"""Strictly below is out, unless it is the stated baseline (v4 and v5, point D)."""

MARGIN_PCT = 10
"""A single vital sign counts as clearly out from 10% beyond its limit; below that the case is ambiguous. Our reading of
"consider"."""

RESOURCE_WEIGHT: Mapping[str, int] = {"sedation": 2}
"""Procedural sedation counts twice, every other type once (v4 and v5, point C)."""


def band(age_years: float, edition: Edition = "v5") -> Band:
    """The danger-zone band of an age."""
    return next(band for band in BANDS[edition] if age_years < band.below_years)


def vitals_over(p: Presentation, edition: Edition = "v5") -> tuple[str, ...]:
    """The vital signs beyond the danger zone, strictly (point D). A missing vital sign is never out."""
    limits = band(p.age_years, edition)
    over = []
    if p.hr_bpm is not None and p.hr_bpm > limits.hr_bpm:
        over.append("HR")
    if p.rr_bpm is not None and p.rr_bpm > limits.rr_bpm:
        over.append("RR")
    if p.spo2_pct is not None and p.spo2_pct < SPO2_LIMIT_PCT and not p.baseline_hypoxia:
        over.append("SpO2")
    return tuple(over)


def clearly_over(p: Presentation, edition: Edition = "v5") -> bool:
    """Point D as a deterministic policy: SpO2 out, or two signs out, or one out by 10% or more."""
    over, limits = vitals_over(p, edition), band(p.age_years, edition)
    far = any(
        name in over and 100 * (value or 0) >= (100 + MARGIN_PCT) * limit
        for name, value, limit in (("HR", p.hr_bpm, limits.hr_bpm), ("RR", p.rr_bpm, limits.rr_bpm))
    )
    return "SpO2" in over or len(over) >= 2 or far


def hypotension_limit_mmhg(age_years: float) -> int:
    """Systolic pressure below which we speak of hypotension: 90 in adults, the lower normal edge of v5 in children."""
    if age_years >= 12:
        return 90
    return 85 if age_years >= 1 else 70


def resource_count(p: Presentation) -> int:
    """Number of resource types, sedation twice (point C)."""
    return sum(RESOURCE_WEIGHT.get(kind, 1) for kind in p.resources)


def _has(finding: FindingId) -> Callable[[Presentation], bool]:
    return lambda p: finding in p.findings


def cardiac_arrest(p: Presentation) -> bool:
    """Pulseless or apnoeic, now or on the way (v5, A)."""
    return "arrest" in p.findings


def unresponsive(p: Presentation) -> bool:
    """P or U on AVPU, or newly neither speaking nor following commands (v5, A)."""
    return "unresponsive" in p.findings


def respiratory_failure(p: Presentation) -> bool:
    """SpO2 below 90% that is not baseline, with other signs of respiratory compromise (v5, A)."""
    return p.spo2_pct is not None and p.spo2_pct < 90 and not p.baseline_hypoxia and "distress" in p.findings


def shock(p: Presentation) -> bool:
    """Hypotension with signs of hypoperfusion (v5, A)."""
    return p.sbp_mmhg is not None and p.sbp_mmhg < hypotension_limit_mmhg(p.age_years) and "hypoperfusion" in p.findings


def overdose_depression(p: Presentation) -> bool:
    """Overdose with respiratory depression: RR at most 8 (v4 and v5, A; the number is ours)."""
    return "overdose" in p.findings and p.rr_bpm is not None and p.rr_bpm <= 8


def done_intervention(p: Presentation) -> bool:
    """A lifesaving intervention was done before arrival: tube in the airway or chest, or a central line (series).

    The handbooks count an intubated patient at A but list neither chest tube nor central line; the series treats the
    three alike, so they are one rule that can be told apart from the handbook's.
    """
    return not {"intubated", "chest_tube", "central_line"}.isdisjoint(p.findings)


def severe_pain(p: Presentation) -> bool:
    """Pain of 7 or more that is visceral or systemic (v5, B: consider; isolated limb pain stays at C)."""
    return p.pain is not None and p.pain >= 7 and p.pain_site == "visceral"


def open_injury(p: Presentation) -> bool:
    """Open fracture or penetrating wound (series; v5 names penetrating wounds of the trunk, neck and head)."""
    return not {"open_fracture", "penetrating"}.isdisjoint(p.findings)


def infant_fever(p: Presentation) -> bool:
    """Above 38.0 °C under 90 days of age (v5, B: at least 2)."""
    return p.age_years < 90 / 365 and p.temp_c is not None and p.temp_c > 38.0


def immunosuppressed_fever(p: Presentation) -> bool:
    """Chemotherapy or transplant with fever of 38.0 °C or more (v5, B)."""
    return "immunosuppressed" in p.findings and p.temp_c is not None and p.temp_c >= 38.0


def breathing_distress(p: Presentation) -> bool:
    """Rising work of breathing, not yet failing (v5, B)."""
    return "distress" in p.findings


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule of point A (→ 1) or B (→ 2)."""

    id: str
    point: Literal["A", "B"]
    says: str
    """What a nurse writes when the rule holds."""
    holds: Callable[[Presentation], bool]
    source: str


RULES: tuple[Rule, ...] = (
    Rule(id="cardiac_arrest", point="A", says="arrest", holds=cardiac_arrest, source="v5 A"),
    Rule(id="unresponsive", point="A", says="unresponsive", holds=unresponsive, source="v5 A"),
    Rule(id="active_seizure", point="A", says="seizing", holds=_has("seizing"), source="v5 A"),
    Rule(id="respiratory_failure", point="A", says="respiratory failure", holds=respiratory_failure, source="v5 A"),
    Rule(id="shock", point="A", says="shock", holds=shock, source="v5 A"),
    Rule(id="anaphylaxis", point="A", says="anaphylaxis", holds=_has("anaphylaxis"), source="v5 A"),
    Rule(
        id="overdose_depression",
        point="A",
        says="overdose, not breathing well",
        holds=overdose_depression,
        source="v4/v5 A",
    ),
    Rule(id="major_bleeding", point="A", says="major bleeding", holds=_has("major_bleeding"), source="v5 A"),
    Rule(id="done_intervention", point="A", says="intervention done", holds=done_intervention, source="series"),
    Rule(id="acs", point="B", says="possible ACS", holds=_has("acs"), source="v5 B"),
    Rule(id="stroke_signs", point="B", says="stroke signs", holds=_has("stroke_signs"), source="v5 B"),
    Rule(id="thunderclap", point="B", says="thunderclap headache", holds=_has("thunderclap"), source="v5 B"),
    Rule(id="new_confusion", point="B", says="new confusion", holds=_has("new_confusion"), source="v5 B"),
    Rule(id="breathing_distress", point="B", says="breathing distress", holds=breathing_distress, source="v5 B"),
    Rule(id="suspected_sepsis", point="B", says="sepsis risk", holds=_has("sepsis_signs"), source="v5 B"),
    Rule(
        id="immunosuppressed_fever",
        point="B",
        says="fever on chemotherapy",
        holds=immunosuppressed_fever,
        source="v5 B",
    ),
    Rule(id="infant_fever", point="B", says="infant fever", holds=infant_fever, source="v5 B"),
    Rule(id="ectopic", point="B", says="possible ectopic", holds=_has("ectopic"), source="v5 B"),
    Rule(id="torsion", point="B", says="possible torsion", holds=_has("torsion"), source="v5 B"),
    Rule(id="suicidal", point="B", says="suicidal", holds=_has("suicidal"), source="v5 B"),
    Rule(id="overdose", point="B", says="overdose", holds=_has("overdose"), source="v5 B"),
    Rule(id="high_fall", point="B", says="high fall", holds=_has("high_fall"), source="v5 B"),
    Rule(id="limb_threat", point="B", says="limb threat", holds=_has("limb_threat"), source="v5 B"),
    Rule(id="vision_loss", point="B", says="vision loss", holds=_has("vision_loss"), source="v5 B"),
    Rule(id="open_injury", point="B", says="open injury", holds=open_injury, source="series"),
    Rule(id="severe_pain", point="B", says="severe pain", holds=severe_pain, source="v5 B"),
)
"""Points A and B in the order of asking. Series rules come after the handbook's in their point, and severe pain after
all others, so that the more specific rule names the decision."""

DANGER_VITALS = "danger_vitals"
RULE_IDS: tuple[str, ...] = (*(rule.id for rule in RULES), DANGER_VITALS)
"""Every rule that a reader may not know: the names that `omit` accepts. Resource counting is never omitted."""


def decide(p: Presentation, *, edition: Edition = "v5", omit: frozenset[str] = frozenset()) -> Decision:
    """The ESI level of a presentation, as a reader gives it who knows every rule except `omit`.

    v4 asks point D only of patients who need two or more resources; v5 of all who reach point C.
    """
    fired = tuple(rule for rule in RULES if rule.id not in omit and rule.holds(p))
    names = tuple(rule.id for rule in fired)
    over = vitals_over(p, edition)
    clear = clearly_over(p, edition)
    count = resource_count(p)

    def decided(
        level: int, point: Literal["A", "B", "C", "D"], rule: str, names: tuple[str, ...], *, ambiguous: bool = False
    ) -> Decision:
        return Decision(
            level=level, point=point, rule=rule, fired=names, over=over, resource_count=count, ambiguous=ambiguous
        )

    if fired:
        first = fired[0]
        return decided(1 if first.point == "A" else 2, first.point, first.id, names)
    asks_d = count >= 2 or edition == "v5"
    if asks_d and clear and DANGER_VITALS not in omit:
        return decided(2, "D", DANGER_VITALS, (DANGER_VITALS,))
    level, rule = (3, "resources_many") if count >= 2 else (4, "resources_one") if count == 1 else (5, "resources_none")
    return decided(level, "C", rule, (), ambiguous=asks_d and bool(over) and not clear)
