"""Draws the record of a patient who breaks one given rule, or none, close to the limits.

Values near a limit lie alike on both sides of it: a breach exceeds its limit by as many years or days as a valid value
stays within it. All other fields have the published distributions, and are independent of the labels.
"""

from random import Random
from typing import Final, Literal

from clinrl.tasks.audit.rules import (
    AGE,
    OVERRIDE,
    STAGES,
    TEMPORAL,
    WINDOW,
    ErrorType,
    PatientRecord,
    Stage,
    TrialProtocol,
)

NEAR_SHARE: Final = 0.85
"""Share of near values among the breaches, and among valid values of the rule that a proposal is about."""
NEAR: Final = 6
"""Greatest distance from a limit, in years or days, that counts as near."""
FAR: Final = 12
"""Greatest distance of a breach, or of a valid value of the rule concerned, from the limit."""
BY_CHANCE: Final = 0.25
"""Probability that a value of another rule is near its limit too."""
REVOKED_TRAPS: Final = 0.2
"""Share of the valid records about the override that are above the threshold but within the shorter window."""
LOWEST_AGE_YEARS: Final = 10
FIRST_DAY, LAST_DAY = 0, 850
DEATH_SHARE: Final = dict(zip(STAGES, (0.04, 0.08, 0.16, 0.32), strict=True))
STAGE_WEIGHTS: Final = (0.24, 0.28, 0.28, 0.20)
COMORBIDITIES: Final = (0, 1, 1, 2, 2, 2, 3, 3, 4, 5, 6)

ETHNICITIES: Final = ("White", "Black", "Hispanic", "Asian", "Native American", "Pacific Islander")
ETHNICITY_WEIGHTS: Final = (0.50, 0.16, 0.15, 0.12, 0.04, 0.03)
SITES: Final = (
    ("Alder", "Norway"), ("Birch", "Sweden"), ("Cedar", "France"), ("Elm", "Spain"), ("Fir", "Italy"),
    ("Hazel", "Poland"), ("Larch", "Japan"), ("Maple", "Canada"), ("Oak", "Brazil"), ("Pine", "India"),
    ("Rowan", "Kenya"), ("Willow", "Chile"),
)  # fmt: skip
DRUGS: Final = ("Axolinib", "Bretumab", "Corvacil")
INSURANCES: Final = ("public", "private", "employer", "self-paid", "none")
SMOKING: Final = ("never", "former", "current", "unknown")
TUMOR_SITES: Final = ("lung", "colon", "breast", "liver", "kidney", "bladder")
HISTOLOGIES: Final = ("adenocarcinoma", "squamous", "small cell", "large cell", "mixed")


def draw_patient(
    rng: Random, protocol: TrialProtocol, patient_id: str, *, broken: ErrorType | None, about: ErrorType | None
) -> PatientRecord:
    """A record that breaks `broken` and no other rule, mostly near the limit of the rule that it is `about`.

    If both are rules about delays, the record is near the limit of the broken one alone.
    """
    stage, comorbidity, delay_days = _timing(rng, protocol, broken, about)
    enrolled_day = rng.randint(FIRST_DAY, LAST_DAY)
    treatment_day = enrolled_day + delay_days
    arm: Literal["treatment", "control"] = rng.choice(("treatment", "control"))
    survival_days = _survival_days(rng, stage, breached=broken == TEMPORAL, near=_near(rng, TEMPORAL, about))
    site, country = rng.choice(SITES)
    return PatientRecord(
        patient_id=patient_id,
        age_years=_age_years(rng, protocol, breached=broken == AGE, near=_near(rng, AGE, about)),
        sex=rng.choice(("F", "M")),
        ethnicity=rng.choices(ETHNICITIES, ETHNICITY_WEIGHTS)[0],
        arm=arm,
        stage=stage,
        enrolled_day=enrolled_day,
        treatment_day=treatment_day,
        death_day=None if survival_days is None else treatment_day + survival_days,
        outcome="survived" if survival_days is None else "deceased",
        site=site,
        country=country,
        drug=rng.choice(DRUGS) if arm == "treatment" else "Placebo",
        comorbidity_index=comorbidity,
        ecog=rng.choice((0, 0, 1, 1, 1, 2, 2, 3)),
        prior_chemo_cycles=rng.choice((0, 0, 0, 1, 2, 3, 4, 6)),
        ldh_u_l=round(max(50.0, rng.gauss(210, 60)), 1),
        bmi_kg_m2=round(max(14.0, rng.gauss(26, 5)), 1),
        insurance=rng.choice(INSURANCES),
        smoking=rng.choice(SMOKING),
        tumor_site=rng.choice(TUMOR_SITES),
        histology=rng.choice(HISTOLOGIES),
    )


def _near(rng: Random, rule: ErrorType, about: ErrorType | None) -> bool:
    return rng.random() < (NEAR_SHARE if rule == about else BY_CHANCE)


def _distance(rng: Random, least: int, most: int = FAR) -> int:
    """The distance of a value from its limit, `least` to `most`. `least` is 1 beyond the limit and 0 within it."""
    if rng.random() < NEAR_SHARE or most <= NEAR:
        return rng.randint(least, min(NEAR, most))
    return rng.randint(NEAR + 1, most)


def _age_years(rng: Random, protocol: TrialProtocol, *, breached: bool, near: bool) -> int:
    low, high = protocol.age_min_years, protocol.age_max_years
    if breached:
        by = _distance(rng, 1)
        return low - by if rng.random() < 0.5 and low - by >= LOWEST_AGE_YEARS else high + by
    if near:
        by = rng.randint(0, min(NEAR, high - low))
        return low + by if rng.random() < 0.5 else high - by
    while not low <= (age := round(rng.gauss(58, 11))) <= high:
        pass
    return age


def _survival_days(rng: Random, stage: Stage, *, breached: bool, near: bool) -> int | None:
    """Days from treatment to death, below 0 if the temporal rule is `breached`; None: alive."""
    if breached:
        return -_distance(rng, 1)
    if near:
        return rng.randint(0, NEAR)
    return rng.randint(3, 540) if rng.random() < DEATH_SHARE[stage] else None


def _timing(
    rng: Random, protocol: TrialProtocol, broken: ErrorType | None, about: ErrorType | None
) -> tuple[Stage, int, int]:
    """Stage, comorbidity and delay in days, of which at most the rule `broken` is broken."""
    window, longer = protocol.window_days, protocol.stage_iv_window_days
    if broken == OVERRIDE:
        return "IV", _revoking(rng, protocol), _within_extension(rng, protocol)
    if broken == WINDOW:
        stage = _stage(rng, iv=about == OVERRIDE or rng.random() < 0.4)
        delay = (longer if stage == "IV" else window) + _distance(rng, 1)
        return stage, _comorbidity(rng, protocol), delay
    if about == OVERRIDE:
        if rng.random() < REVOKED_TRAPS:
            delay = max(1, window - _distance(rng, 0))
            return "IV", _revoking(rng, protocol), delay
        highest = _threshold(protocol)  # as for an override miss, except that the comorbidity is at most this
        comorbidity = highest - rng.randint(0, min(3, highest))
        return "IV", comorbidity, _within_extension(rng, protocol)
    stage = _stage(rng, iv=rng.random() < (0.4 if about == WINDOW else STAGE_WEIGHTS[-1]))
    comorbidity = _comorbidity(rng, protocol)
    limit = protocol.comorbidity_threshold
    extended = stage == "IV" and (limit is None or comorbidity <= limit)
    allowed = longer if extended else window
    by = _distance(rng, 0) if _near(rng, WINDOW, about) else rng.randint(0, allowed - 1)
    return stage, comorbidity, max(1, allowed - by)


def _within_extension(rng: Random, protocol: TrialProtocol) -> int:
    """A delay that only the window of stage IV allows."""
    return protocol.window_days + _distance(rng, 1, protocol.stage_iv_window_days - protocol.window_days)


def _revoking(rng: Random, protocol: TrialProtocol) -> int:
    return _threshold(protocol) + rng.randint(1, 3)


def _threshold(protocol: TrialProtocol) -> int:
    if protocol.comorbidity_threshold is None:
        raise ValueError(f"protocol {protocol.protocol_id} has no comorbidity threshold, so no record can be about it")
    return protocol.comorbidity_threshold


def _comorbidity(rng: Random, protocol: TrialProtocol) -> int:
    """Any comorbidity; near the threshold with the probability `BY_CHANCE`."""
    limit = protocol.comorbidity_threshold
    if limit is None or rng.random() >= BY_CHANCE:
        return rng.choice(COMORBIDITIES)
    return max(0, limit + rng.randint(-2, 3))


def _stage(rng: Random, *, iv: bool) -> Stage:
    return "IV" if iv else rng.choices(STAGES[:3], STAGE_WEIGHTS[:3])[0]
