"""The trial protocol, a patient's record, and the rules that a record can break.

`violations` reads nothing but the final record, so that it can check the labels of the generator. A delay is counted
from enrolment to the start of treatment. Stage IV patients have a longer window, unless their comorbidity is above the
protocol's threshold. Trials, patients and limits are inventions, no clinical guidance.
"""

from typing import Final, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from clinrl.types import Strict

ErrorType = Literal[
    "age_boundary_error", "temporal_inconsistency", "protocol_window_violation", "comorbidity_override_miss"
]
AGE: Final = "age_boundary_error"
TEMPORAL: Final = "temporal_inconsistency"
WINDOW: Final = "protocol_window_violation"
OVERRIDE: Final = "comorbidity_override_miss"
ERROR_TYPES: Final[tuple[ErrorType, ...]] = (AGE, TEMPORAL, WINDOW, OVERRIDE)

Stage = Literal["I", "II", "III", "IV"]
STAGES: Final[tuple[Stage, ...]] = ("I", "II", "III", "IV")


class TrialProtocol(Strict):
    """The limits that the trial sets for its patients."""

    protocol_id: str = Field(min_length=1)
    age_min_years: int = Field(ge=0, le=110)
    """Youngest age that is allowed."""
    age_max_years: int = Field(ge=0, le=110)
    """Oldest age that is allowed."""
    window_days: int = Field(ge=1)
    """Longest delay that is allowed."""
    stage_iv_window_days: int = Field(ge=1)
    """Longest delay in stage IV."""
    comorbidity_threshold: int | None = Field(default=None, ge=0)
    """Comorbidity above which a stage IV patient has the window of all others. None: comorbidity does not matter."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.age_min_years > self.age_max_years:
            raise ValueError(f"ages {self.age_min_years} to {self.age_max_years} are no range")
        if self.window_days >= self.stage_iv_window_days:
            raise ValueError(f"stage IV window {self.stage_iv_window_days} is not longer than {self.window_days}")
        return self


class PatientRecord(Strict):
    """One patient as entered. Days are study days: day 0 is the opening of the trial."""

    patient_id: str = Field(min_length=1)
    age_years: int = Field(ge=0, le=120)
    sex: Literal["F", "M"]
    ethnicity: str
    arm: Literal["treatment", "control"]
    stage: Stage
    enrolled_day: int
    treatment_day: int
    death_day: int | None
    """None: alive."""
    outcome: Literal["deceased", "survived"]
    site: str
    country: str
    drug: str
    comorbidity_index: int = Field(ge=0, le=12)
    ecog: int = Field(ge=0, le=4)
    """Performance status of the Eastern Cooperative Oncology Group; 0 is best."""
    prior_chemo_cycles: int = Field(ge=0)
    ldh_u_l: float = Field(ge=0.0)
    """Lactate dehydrogenase, units per litre."""
    bmi_kg_m2: float = Field(ge=0.0)
    insurance: str
    smoking: str
    tumor_site: str
    histology: str


class Differences(NamedTuple):
    """The signed distances of a record from each limit, and the values that the tools show with them."""

    age_years: int
    lower: int
    """Age minus the youngest allowed, years: below 0 is too young."""
    upper: int
    """Age minus the oldest allowed, years: above 0 is too old."""
    stage: str
    comorbidity: int
    threshold: int | None
    """Comorbidity minus the threshold; None where the protocol has none."""
    delay_days: int
    standard: int
    """Delay minus the window, days."""
    stage_iv: int
    """Delay minus the window of stage IV, days, whatever the patient's stage."""
    death: int | None
    """Death minus start of treatment, days: below 0 is impossible. None: alive."""


def differences(record: PatientRecord, protocol: TrialProtocol) -> Differences:
    """The signed differences between a record and the protocol's limits. Pure."""
    delay = record.treatment_day - record.enrolled_day
    limit = protocol.comorbidity_threshold
    return Differences(
        age_years=record.age_years,
        lower=record.age_years - protocol.age_min_years,
        upper=record.age_years - protocol.age_max_years,
        stage=record.stage,
        comorbidity=record.comorbidity_index,
        threshold=None if limit is None else record.comorbidity_index - limit,
        delay_days=delay,
        standard=delay - protocol.window_days,
        stage_iv=delay - protocol.stage_iv_window_days,
        death=None if record.death_day is None else record.death_day - record.treatment_day,
    )


def violations(record: PatientRecord, protocol: TrialProtocol) -> tuple[ErrorType, ...]:
    """Every rule that a record breaks, in the order of `ERROR_TYPES`. Pure."""
    broken: list[ErrorType] = []
    if not protocol.age_min_years <= record.age_years <= protocol.age_max_years:
        broken.append(AGE)
    if record.death_day is not None and record.death_day < record.treatment_day:
        broken.append(TEMPORAL)
    delay_days = record.treatment_day - record.enrolled_day
    limit = protocol.comorbidity_threshold
    revoked = record.stage == "IV" and limit is not None and record.comorbidity_index > limit
    extended = record.stage == "IV" and not revoked
    if delay_days > (protocol.stage_iv_window_days if extended else protocol.window_days):
        broken.append(OVERRIDE if revoked and delay_days <= protocol.stage_iv_window_days else WINDOW)
    return tuple(broken)


def deciding(rule: ErrorType, found: Differences) -> tuple[str, ...]:
    """The names of the differences that settle whether a rule is broken, in the order in which the tools show them."""
    if rule == AGE:
        return ("lower",) if found.lower < 0 else ("upper",) if found.upper > 0 else ("lower", "upper")
    if rule == TEMPORAL:
        return ("death",)
    if rule == OVERRIDE:
        return ("threshold", "standard", "stage_iv")
    if found.stage != "IV" or found.standard <= 0:
        return ("standard",)  # within the shorter window nothing else matters
    if found.stage_iv > 0 or found.threshold is None:
        return ("stage_iv",)
    return ("threshold", "stage_iv")
