"""Vital signs of synthetic patients: within the limits of the age, unless the deciding rule needs them outside.

The ranges here only aim at a rule; the rules label every case. The order in which numbers are drawn is part of the
task's version: another order gives other cases.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from clinrl.tasks.esi.rules import (
    BASELINE_DROP_PCT,
    BRADYCARDIA_BPM,
    CHILD_FEVER,
    CHILD_FEVER_C,
    DANGER_VITALS,
    EXTREME_TEMPERATURES_C,
    RESPIRATORY_DEPRESSION_BPM,
    Band,
    band,
    hypotension_limit_mmhg,
)

MEASURED: tuple[str, ...] = ("hr_bpm", "rr_bpm", "spo2_pct", "sbp_mmhg", "temp_c")
"""The vital signs that a case may lack; the diastolic pressure goes with the systolic."""

DECIDING: Mapping[str, frozenset[str]] = {
    DANGER_VITALS: frozenset({"hr_bpm", "rr_bpm", "spo2_pct"}),
    "respiratory_failure": frozenset({"spo2_pct"}),
    "shock": frozenset({"sbp_mmhg", "hr_bpm"}),
    "hypotension": frozenset({"sbp_mmhg"}),
    "extreme_temperature": frozenset({"temp_c"}),
    CHILD_FEVER: frozenset({"temp_c"}),
    "overdose_depression": frozenset({"rr_bpm"}),
    "infant_fever": frozenset({"temp_c"}),
    "immunosuppressed_fever": frozenset({"temp_c"}),
}
"""The vital signs on which a rule depends; the cases of the rule never lack them."""

MISSING_SHARE = 0.32
"""The share of cases that lack one or two vital signs."""


@dataclass(frozen=True, kw_only=True)
class Signs:
    """The vital signs that a patient has, measured or not."""

    hr_bpm: int
    rr_bpm: int
    spo2_pct: int
    sbp_mmhg: int
    temp_c: float
    baseline_spo2_pct: int | None = None


def vitals(rng: Random, age_years: float, cell: str, *, slow_breathing: bool) -> dict[str, Any]:
    """The vital-sign fields of a `Presentation` for a case that `cell`, a rule id, decides. None means not measured.

    `slow_breathing`: the note says that the patient breathes slowly, so the respiratory rate must agree.
    """
    if cell == "cardiac_arrest":
        return {}  # nobody measures while the chest is compressed
    signs = _signs(rng, age_years, cell)
    if slow_breathing:
        signs = replace(signs, rr_bpm=rng.randint(4, RESPIRATORY_DEPRESSION_BPM))
    missing = _missing(rng, signs, cell)
    dbp = min(signs.sbp_mmhg - 15, int(signs.sbp_mmhg * rng.uniform(0.52, 0.68)))
    return {
        **{name: None if name in missing else getattr(signs, name) for name in MEASURED},
        "dbp_mmhg": None if "sbp_mmhg" in missing else dbp,
        "baseline_spo2_pct": signs.baseline_spo2_pct,
    }


def _signs(rng: Random, age_years: float, cell: str) -> Signs:
    limits = band(age_years)
    well = _well(rng, age_years, limits)
    if cell == DANGER_VITALS:
        return _in_danger_zone(rng, well, limits, adult=age_years >= 40)
    match cell:
        case "respiratory_failure":
            return replace(well, spo2_pct=rng.randint(76, 89), rr_bpm=_times(rng, limits.rr_bpm, 1.2, 1.8))
        case "breathing_distress":
            return replace(well, spo2_pct=rng.randint(90, 96), rr_bpm=_times(rng, limits.rr_bpm, 1.0, 1.5))
        case "shock":
            if age_years >= 12 and rng.random() < 0.25:
                return replace(well, hr_bpm=rng.randint(BRADYCARDIA_BPM - 14, BRADYCARDIA_BPM - 1))
            low = hypotension_limit_mmhg(age_years)
            return replace(well, sbp_mmhg=rng.randint(low - 26, low - 1), hr_bpm=_times(rng, limits.hr_bpm, 1.0, 1.5))
        case "hypotension":
            low = hypotension_limit_mmhg(age_years)
            return replace(well, sbp_mmhg=rng.randint(low - 20, low - 1))
        case "extreme_temperature":
            low_c, high_c = EXTREME_TEMPERATURES_C
            cold = rng.random() < 0.4
            return replace(
                well, temp_c=round(rng.uniform(low_c - 4, low_c - 0.1) if cold else high_c + rng.random(), 1)
            )
        case "child_fever":
            return replace(well, temp_c=round(rng.uniform(CHILD_FEVER_C + 0.1, 40.4), 1))
        case "overdose_depression":
            return replace(well, rr_bpm=rng.randint(4, RESPIRATORY_DEPRESSION_BPM), spo2_pct=rng.randint(80, 93))
        case "infant_fever" | "immunosuppressed_fever":
            return replace(well, temp_c=round(rng.uniform(38.1, 40.2), 1))
        case _:
            return _perhaps_one_off(rng, well, age_years, limits)


def _well(rng: Random, age_years: float, limits: Band) -> Signs:
    """All signs within the limits of the age."""
    adult = age_years >= 12
    return Signs(
        hr_bpm=rng.randint(60, 100) if adult else _times(rng, limits.hr_bpm, 0.65, 1.0),
        rr_bpm=rng.randint(12, 20) if adult else _times(rng, limits.rr_bpm, 0.55, 1.0),
        spo2_pct=rng.randint(93, 100),
        sbp_mmhg=rng.randint(104, 158) if adult else rng.randint(88, 115),
        temp_c=round(rng.uniform(36.1, 37.8), 1),
    )


def _in_danger_zone(rng: Random, well: Signs, limits: Band, *, adult: bool) -> Signs:
    """Signs clearly out (point D): a fast heart, fast breathing, a low saturation, or the first two together.

    Now and then the saturation is far below a baseline that is low itself.
    """
    out = rng.choice((("hr",), ("rr",), ("spo2",), ("hr", "rr")))
    signs = well
    if "hr" in out:
        signs = replace(signs, hr_bpm=rng.randint(int(limits.hr_bpm * 1.12) + 1, int(limits.hr_bpm * 1.5)))
    if "rr" in out:
        signs = replace(signs, rr_bpm=rng.randint(int(limits.rr_bpm * 1.12) + 1, int(limits.rr_bpm * 1.7)))
    if "spo2" in out:
        spo2 = rng.randint(84, 91)
        usual = spo2 + BASELINE_DROP_PCT + rng.randint(0, 2) if adult and spo2 < 88 and rng.random() < 0.2 else None
        signs = replace(signs, spo2_pct=spo2, baseline_spo2_pct=usual)
    return signs


def _perhaps_one_off(rng: Random, well: Signs, age_years: float, limits: Band) -> Signs:
    """Most often no change; else a slightly fast heart, a low saturation that is usual for the patient, or a fever."""
    if rng.random() < 0.10:
        return replace(well, hr_bpm=rng.randint(limits.hr_bpm + 1, int(limits.hr_bpm * 1.09)))
    if age_years > 40 and rng.random() < 0.08:
        usual = rng.randint(86, 91)
        return replace(well, spo2_pct=usual + rng.randint(-3, 2), baseline_spo2_pct=usual)
    if rng.random() < 0.12 and age_years >= 1:
        return replace(well, temp_c=round(rng.uniform(38.0, 39.5), 1))
    return well


def _times(rng: Random, limit: int, low: float, high: float) -> int:
    """A whole number between two multiples of a limit, both included."""
    return rng.randint(int(limit * low), int(limit * high))


def _missing(rng: Random, signs: Signs, cell: str) -> frozenset[str]:
    """The names of the signs that were not measured."""
    needed = DECIDING.get(cell, frozenset()) | ({"spo2_pct"} if signs.baseline_spo2_pct is not None else frozenset())
    if rng.random() >= MISSING_SHARE:
        return frozenset()
    droppable = [name for name in MEASURED if name not in needed]
    return frozenset(rng.sample(droppable, rng.randint(1, min(2, len(droppable)))))
