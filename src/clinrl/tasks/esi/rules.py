"""The Emergency Severity Index as small pure functions: the clinical authority of the task.

Levels run from 1 (most urgent) to 5. Decision points are asked in order, A → B → C → D; the first of A and B that holds
decides, C counts resource types, and D may raise a C level to 2. Sources: "v5" is the ENA ESI Handbook, 5th edition
(2023); "v4" the AHRQ ESI Implementation Handbook, version 4; "series" are triggers of the published adapter series
that the handbooks do not list; "ours" is a number or a line drawn here where the handbooks leave it to judgement.
Thresholds and lists are restated, never quoted. Research only: not for clinical use.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from pydantic import Field

from clinrl.types import Strict

Edition = Literal["v5", "v4"]
Sex = Literal["female", "male"]
SEXES: tuple[Sex, ...] = get_args(Sex)
EDITIONS: tuple[Edition, ...] = get_args(Edition)
Resource = Literal[
    "labs", "ECG", "x-ray", "CT", "MRI", "ultrasound", "IV fluids", "IV meds", "consult", "procedure", "sedation"
]
RESOURCES: tuple[Resource, ...] = get_args(Resource)
Finding = Literal[
    "arrest", "unresponsive", "seizing", "distress", "slow_breathing", "hypoperfusion", "anaphylaxis", "overdose",
    "major_bleeding", "intubated", "chest_tube", "central_line", "acs", "stroke_signs", "thunderclap", "new_confusion",
    "sepsis_signs", "immunosuppressed", "ectopic", "pregnancy_emergency", "torsion", "suicidal", "dangerous_behaviour",
    "assaulted", "high_fall", "limb_threat", "vision_loss", "chemical_eye", "major_burn", "open_fracture",
    "penetrating", "comfortable",
]  # fmt: skip
"""The facts that may be true of a patient. Another word is an error: a misspelt finding must not look like health."""
FINDING_IDS: tuple[Finding, ...] = get_args(Finding)
SICKLE_CRISIS = "sickle pain"
"""The complaint that is high-risk by itself: a painful crisis of sickle cell disease."""


class Presentation(Strict):
    """The latent facts of one patient at the triage desk. None means not measured. Never shown to the model."""

    age_years: float = Field(ge=0, le=110)
    sex: Sex
    complaint: str
    findings: tuple[Finding, ...]
    """The findings that hold, sorted, without denied or past ones."""
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
    baseline_spo2_pct: int | None = Field(default=None, ge=60, le=100)
    """The patient's stated usual SpO2, if it is low."""
    resources: tuple[Resource, ...] = ()
    """Resource types expected until disposition, sorted and distinct."""


class Decision(Strict):
    """The level, where it was decided, and by which rule."""

    level: int = Field(ge=1, le=5)
    point: Literal["A", "B", "C", "D"]
    rule: str
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

BASELINE_DROP_PCT = 4
"""A saturation this far below a stated baseline is new hypoxia all the same (ours)."""

BRADYCARDIA_BPM = 40
"""Strictly below, from 12 years on (v5 A names severe bradycardia with signs of instability; the number is ours)."""

RESPIRATORY_DEPRESSION_BPM = 8
"""Breaths at or below this, after an overdose (v4 and v5, A; the number is ours)."""

EXTREME_TEMPERATURES_C = (32.0, 40.5)
"""Strictly below the first or at or above the second is high-risk at any age (ours)."""

CHILD_FEVER_C = 39.0
"""Strictly above, from 3 months to under 3 years: at least level 3 (v4 and v5, D: consider)."""

MARGIN_PCT = 10
"""A single vital sign counts as clearly out from 10% beyond its limit; below that the case is ambiguous. Our reading of
"consider"."""

RESOURCE_WEIGHT: Mapping[str, int] = {"sedation": 2}
"""Procedural sedation counts twice, every other type once (v4 and v5, point C)."""


def band(age_years: float, edition: Edition = "v5") -> Band:
    """The danger-zone band of an age."""
    return next(band for band in BANDS[edition] if age_years < band.below_years)


def hypoxic(p: Presentation, limit_pct: int) -> bool:
    """SpO2 strictly below a limit, and not explained by a stated baseline that is itself low."""
    if p.spo2_pct is None or p.spo2_pct >= limit_pct:
        return False
    usual = p.baseline_spo2_pct
    return usual is None or usual >= SPO2_LIMIT_PCT or p.spo2_pct <= usual - BASELINE_DROP_PCT


def vitals_over(p: Presentation, edition: Edition = "v5") -> tuple[str, ...]:
    """The vital signs beyond the danger zone, strictly (point D). A missing vital sign is never out."""
    limits = band(p.age_years, edition)
    over = []
    if p.hr_bpm is not None and p.hr_bpm > limits.hr_bpm:
        over.append("HR")
    if p.rr_bpm is not None and p.rr_bpm > limits.rr_bpm:
        over.append("RR")
    if hypoxic(p, SPO2_LIMIT_PCT):
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
    """Systolic pressure below which we speak of hypotension (ours; rounded, and from 12 years on the adult's)."""
    if age_years >= 12:
        return 90
    return 85 if age_years >= 1 else 70


def resource_count(kinds: Iterable[Resource]) -> int:
    """Number of resource types, sedation twice (point C)."""
    return sum(RESOURCE_WEIGHT.get(kind, 1) for kind in kinds)


def hypotensive(p: Presentation) -> bool:
    """Systolic pressure below the age's limit. Alone it is high-risk (ours: an unstable sign that may not wait)."""
    return p.sbp_mmhg is not None and p.sbp_mmhg < hypotension_limit_mmhg(p.age_years)


Holds = Callable[[Presentation, Edition], bool]


def _has(*findings: Finding) -> Holds:
    wanted = frozenset(findings)
    return lambda p, edition: not wanted.isdisjoint(p.findings)


def respiratory_failure(p: Presentation, edition: Edition) -> bool:
    """Hardly breathing, or SpO2 below 90% that is not baseline with other signs of respiratory compromise (v5, A)."""
    return "slow_breathing" in p.findings or ("distress" in p.findings and hypoxic(p, 90))


def shock(p: Presentation, edition: Edition) -> bool:
    """Hypotension with signs of hypoperfusion (v5, A), or severe bradycardia by itself (ours)."""
    slow = p.age_years >= 12 and p.hr_bpm is not None and p.hr_bpm < BRADYCARDIA_BPM
    return slow or ("hypoperfusion" in p.findings and hypotensive(p))


def overdose_depression(p: Presentation, edition: Edition) -> bool:
    """Overdose with respiratory depression, counted or seen (v4 and v5, A)."""
    few = p.rr_bpm is not None and p.rr_bpm <= RESPIRATORY_DEPRESSION_BPM
    return "overdose" in p.findings and (few or "slow_breathing" in p.findings)


def severe_pain(p: Presentation, edition: Edition) -> bool:
    """Pain of 7 or more that is visceral or systemic, and that the nurse sees too (v4 and v5, B: consider).

    Isolated limb pain stays at C, and so does a high number from somebody who looks at ease.
    """
    return p.pain is not None and p.pain >= 7 and p.pain_site == "visceral" and "comfortable" not in p.findings


def infant_fever(p: Presentation, edition: Edition) -> bool:
    """Above 38.0 °C under 90 days of age (v5, B: at least 2), under 28 days in v4 (D: at least 2)."""
    return p.age_years < (90 if edition == "v5" else 28) / 365 and p.temp_c is not None and p.temp_c > 38.0


def immunosuppressed_fever(p: Presentation, edition: Edition) -> bool:
    """Chemotherapy or transplant with fever of 38.0 °C or more (v5, B)."""
    return "immunosuppressed" in p.findings and p.temp_c is not None and p.temp_c >= 38.0


def extreme_temperature(p: Presentation, edition: Edition) -> bool:
    """Hypothermia or hyperpyrexia beyond `EXTREME_TEMPERATURES_C` (ours)."""
    low, high = EXTREME_TEMPERATURES_C
    return p.temp_c is not None and (p.temp_c < low or p.temp_c >= high)


def child_fever(p: Presentation) -> bool:
    """A fever above `CHILD_FEVER_C` from 3 months to under 3 years of age: at least level 3 (v4 and v5, D)."""
    return 90 / 365 <= p.age_years < 3 and p.temp_c is not None and p.temp_c > CHILD_FEVER_C


@dataclass(frozen=True)
class Rule:
    """One rule of point A (→ 1) or B (→ 2)."""

    id: str
    point: Literal["A", "B"]
    says: str
    """The words that a nurse writes when the rule holds."""
    holds: Holds
    source: str


RULES: tuple[Rule, ...] = (
    Rule("cardiac_arrest", "A", "arrest", _has("arrest"), "v5 A"),
    Rule("unresponsive", "A", "unresponsive", _has("unresponsive"), "v5 A"),
    Rule("active_seizure", "A", "seizing", _has("seizing"), "v5 A"),
    Rule("overdose_depression", "A", "overdose, not breathing well", overdose_depression, "v4/v5 A"),
    Rule("respiratory_failure", "A", "respiratory failure", respiratory_failure, "v5 A"),
    Rule("shock", "A", "shock", shock, "v5 A; bradycardia by itself ours"),
    Rule("anaphylaxis", "A", "anaphylaxis", _has("anaphylaxis"), "v5 A"),
    Rule("major_bleeding", "A", "major bleeding", _has("major_bleeding"), "v5 A"),
    # A lifesaving one, before arrival. The handbooks count an intubated patient at A but list neither chest tube nor
    # central line; the series treats the three alike, so they are one rule that can be told apart from the handbook's.
    Rule("done_intervention", "A", "intervention done", _has("intubated", "chest_tube", "central_line"), "series"),
    Rule("acs", "B", "possible ACS", _has("acs"), "v5 B"),
    Rule("stroke_signs", "B", "stroke signs", _has("stroke_signs"), "v5 B"),
    Rule("thunderclap", "B", "thunderclap headache", _has("thunderclap"), "v5 B"),
    Rule("new_confusion", "B", "new confusion", _has("new_confusion"), "v5 B"),
    Rule("breathing_distress", "B", "breathing distress", _has("distress"), "v5 B"),
    Rule("suspected_sepsis", "B", "sepsis risk", _has("sepsis_signs"), "v5 B"),
    Rule("immunosuppressed_fever", "B", "fever on chemotherapy", immunosuppressed_fever, "v5 B"),
    Rule("infant_fever", "B", "infant fever", infant_fever, "v4 D, v5 B"),
    Rule("ectopic", "B", "possible ectopic", _has("ectopic"), "v5 B"),
    Rule("pregnancy_emergency", "B", "late pregnancy, unwell", _has("pregnancy_emergency"), "v5 B"),
    Rule("torsion", "B", "possible torsion", _has("torsion"), "v5 B"),
    Rule("suicidal", "B", "suicidal", _has("suicidal"), "v5 B"),
    Rule("dangerous_behaviour", "B", "danger to others", _has("dangerous_behaviour"), "v5 B"),
    Rule("assaulted", "B", "sexual or domestic assault", _has("assaulted"), "v5 B"),
    Rule("overdose", "B", "overdose", _has("overdose"), "v5 B"),
    Rule("high_fall", "B", "high fall", _has("high_fall"), "v5 B"),
    Rule("limb_threat", "B", "limb threat", _has("limb_threat"), "v5 B"),
    Rule("vision_loss", "B", "vision loss", _has("vision_loss"), "v5 B"),
    Rule("chemical_eye", "B", "chemical in the eye", _has("chemical_eye"), "v5 B"),
    Rule("major_burn", "B", "major burn", _has("major_burn"), "v5 B; extent, sites: burn-centre referral criteria"),
    Rule("sickle_crisis", "B", "sickle crisis", lambda p, edition: p.complaint == SICKLE_CRISIS, "v4/v5 B"),
    Rule("hypotension", "B", "hypotension", lambda p, edition: hypotensive(p), "ours"),
    Rule("extreme_temperature", "B", "extreme temperature", extreme_temperature, "ours"),
    # The wound is one of trunk, neck, head or groin; v5 names the wounds.
    Rule("open_injury", "B", "open injury", _has("open_fracture", "penetrating"), "series"),
    Rule("severe_pain", "B", "severe pain", severe_pain, "v4/v5 B"),
)
"""Points A and B in the order of asking. Series rules come after the handbook's in their point, and severe pain after
all others, so that the more specific rule names the decision."""

DANGER_VITALS = "danger_vitals"
CHILD_FEVER = "child_fever"
RULE_IDS: tuple[str, ...] = (*(rule.id for rule in RULES), DANGER_VITALS, CHILD_FEVER)
"""Every rule that a reader may not know: the names that `omit` accepts. Resource counting is never omitted."""


def decide(p: Presentation, *, edition: Edition = "v5", omit: frozenset[str] = frozenset()) -> Decision:
    """The ESI level that a reader who knows every rule except `omit` gives a presentation.

    v4 checks danger-zone vital signs only if two or more resources are needed, v5 for every patient who reaches point
    C. Both check a child's fever for any number of resources.
    """
    first = next((rule for rule in RULES if rule.id not in omit and rule.holds(p, edition)), None)
    over = vitals_over(p, edition)
    clear = clearly_over(p, edition)
    count = resource_count(p.resources)

    def decided(level: int, point: Literal["A", "B", "C", "D"], rule: str, *, ambiguous: bool = False) -> Decision:
        return Decision(level=level, point=point, rule=rule, over=over, resource_count=count, ambiguous=ambiguous)

    if first:
        return decided(1 if first.point == "A" else 2, first.point, first.id)
    asks_d = count >= 2 or edition == "v5"
    if asks_d and clear and DANGER_VITALS not in omit:
        return decided(2, "D", DANGER_VITALS)
    doubtful = asks_d and bool(over) and not clear
    if count < 2 and CHILD_FEVER not in omit and child_fever(p):
        return decided(3, "D", CHILD_FEVER, ambiguous=doubtful)
    level, rule = (3, "resources_many") if count >= 2 else (4, "resources_one") if count == 1 else (5, "resources_none")
    return decided(level, "C", rule, ambiguous=doubtful)
