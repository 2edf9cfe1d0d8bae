"""Read the cells of triage records as values; refuse uncertain cells with a reason that quotes nothing.

None means not measured. Every reader raises `Unclear` with the name of the column.
"""

import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from clinrl.tasks.importing import Unclear

BOUNDS: Final[Mapping[str, tuple[float, float]]] = {
    "age_years": (0, 110),
    "hr_bpm": (20, 300),
    "rr_bpm": (2, 110),
    "spo2_pct": (50, 100),
    "sbp_mmhg": (40, 280),
    "dbp_mmhg": (10, 180),
    "temp_c": (28, 43),
    "pain": (0, 10),
}
"""The limits of a living patient's values, ends included: the bounds of expectations and of imports."""

MIN_PULSE_PRESSURE_MMHG: Final = 5
"""The least difference of the systolic and the diastolic pressure."""

CELSIUS: Final = (25.0, 44.0)
FAHRENHEIT: Final = (77.0, 111.2)
"""The same range of temperatures in both units. The number alone gives the unit; numbers in between are refused."""

BLANK: Final = frozenset({"", "na", "n/a", "nan", "none", "null", "<na>"})
"""The cells of values that were not measured, in lower case."""

WHY_NOT_ASSESSED: Final = frozenset(
    {"asleep", "intubated", "non-verbal", "nonverbal", "refused", "refuses", "sedated", "sleeping", "unresponsive"}
)
"""The words that say why no pain score could be obtained, in lower case. "critical" is rather the nurse's level."""

NOT_ASSESSED: Final = WHY_NOT_ASSESSED | {
    "crit", "critical", "not assessed", "u/a", "ua", "unable", "unable to answer", "unable to assess",
    "unable to obtain", "uta", "uto",
}  # fmt: skip
"""The words that nurses write where no pain score could be obtained, in lower case."""

_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)", re.ASCII)
_PAIN = re.compile(
    r"([0-9]{1,3}(?:\.[0-9]+)?)(?: ?(?:-|\u2013|to) ?([0-9]{1,3}(?:\.[0-9]+)?))?(?: ?(?:/|out of|of) ?10)?", re.ASCII
)
_ID = re.compile(r"([0-9]{1,18})(?:\.0+)?", re.ASCII)
_CACHED = 1 << 16
"""The most texts that a reader caches: a column has far fewer, and a strange file cannot fill the memory."""


def number(text: str, column: str) -> float | None:
    """A decimal number; None for a blank cell."""
    text = text.strip()
    if text.lower() in BLANK:
        return None
    if not _NUMBER.fullmatch(text) or len(text) > 20:
        raise Unclear(column, "is not a number")
    return float(text)


def within(value: float, name: str, column: str) -> None:
    """Raise Unclear for a value outside `BOUNDS`."""
    low, high = BOUNDS[name]
    if not low <= value <= high:
        raise Unclear(column, f"is outside {low:g} to {high:g}")


@lru_cache(_CACHED)
def vital(text: str, name: str, column: str) -> int | None:
    """A vital sign as a whole number, halves upwards, within `BOUNDS`."""
    value = number(text, column)
    if value is None:
        return None
    whole = math.floor(value + 0.5)
    within(value, name, column)
    return whole


@lru_cache(_CACHED)
def temperature_c(text: str) -> float | None:
    """A temperature in °C with one decimal, from °C or °F, within `BOUNDS`."""
    value = number(text, "temperature")
    if value is None:
        return None
    if FAHRENHEIT[0] <= value <= FAHRENHEIT[1]:
        value = (value - 32) * 5 / 9
    elif not CELSIUS[0] <= value <= CELSIUS[1]:
        raise Unclear("temperature", "is neither a body temperature in °C nor one in °F")
    celsius = round(value, 1)
    within(celsius, "temp_c", "temperature")
    return celsius


def phrase(text: str) -> str:
    """The words of a cell in lower case, with single spaces and no full stop."""
    return " ".join(text.lower().split()).rstrip(".!")


@lru_cache(_CACHED)
def pain(text: str) -> int | None:
    """A pain score, 0 to 10: the upper end of a range, with a fraction rounded up; None if not assessed."""
    words = phrase(text)
    if words in BLANK or words in NOT_ASSESSED:
        return None
    match = _PAIN.fullmatch(words)
    if not match:
        raise Unclear("pain", "is neither a score nor a known word")
    low, high = float(match[1]), float(match[2] or match[1])
    if high > BOUNDS["pain"][1]:
        raise Unclear("pain", "is above 10")
    if low > high:
        raise Unclear("pain", "is a range whose ends are the wrong way round")
    if match[2] and low in (0, 1) and high == 10:
        raise Unclear("pain", "is the name of the scale")
    return math.ceil(high)


@lru_cache(_CACHED)
def acuity(text: str) -> int:
    """A level, 1 to 5."""
    value = number(text, "acuity")
    if value is None:
        raise Unclear("acuity", "is missing")
    if value not in (1, 2, 3, 4, 5):
        raise Unclear("acuity", "is not one of 1 to 5")
    return int(value)


def identifier(text: str, column: str) -> str:
    """The digits of an identifier, without the leading zeros and the ".0" that some programs write."""
    if text.isascii() and text.isdecimal() and text[0] != "0" and len(text) <= 18:  # the usual case, made faster
        return text
    match = _ID.fullmatch(text.strip())
    if not match:
        raise Unclear(column, "is missing" if text.strip().lower() in BLANK else "is not a whole number")
    return match[1].lstrip("0") or "0"


def check_stay(stay_id: str, seen: set[str], disputed: frozenset[str]) -> None:
    """Refuse a stay that is in `disputed` (rows give it different levels) or in `seen`; else add it to `seen`."""
    if stay_id in disputed:
        raise Unclear("acuity", "another row gives the same stay another level")
    if stay_id in seen:
        raise Unclear("stay_id", "an earlier row has the same one")
    seen.add(stay_id)


def pressures(sbp_mmhg: int | None, dbp_mmhg: int | None) -> None:
    """Refuse a systolic pressure that is not `MIN_PULSE_PRESSURE_MMHG` above the diastolic."""
    if sbp_mmhg is not None and dbp_mmhg is not None and sbp_mmhg - dbp_mmhg < MIN_PULSE_PRESSURE_MMHG:
        raise Unclear("sbp", f"is not {MIN_PULSE_PRESSURE_MMHG} above dbp")
