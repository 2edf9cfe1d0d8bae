"""Reads the reason of a flag: pairs of a name and a value, and the name of the Actor's fallacy.

"upper +1; generic_range" cites one value and names one fallacy. A reason must be short, so that a reason that lists
everything earns nothing, and every number in it must be true of the patient.
"""

import re
from typing import Final, NamedTuple

from clinrl.tasks.audit.phrases import FALLACY_NAMES
from clinrl.tasks.audit.rules import Differences

MAX_CHARACTERS: Final = 160
"""Most characters of a reason. A longer one is not read."""
MAX_WORDS: Final = 8
"""Most words besides values and fallacies."""
MAX_BEYOND: Final = 2
"""Most true values besides those that decide."""

_VALUE: Final = re.compile(r"[+-]?[0-9]{1,4}|none")
_SEPARATORS: Final = re.compile(r"[\s;,:.]+")

_VALUES: Final = {"age": "age_years", "comorbidity": "comorbidity", "delay": "delay_days"}
"""The field of each value in `Differences`, by the name that a reason gives it."""
_DISTANCES: Final = ("lower", "upper", "standard", "stage_iv", "death")
_NAMES: Final = frozenset((*_VALUES, *_DISTANCES, "threshold"))

Claim = tuple[str, str]
"""A name and a value, as written: ("upper", "+1")."""


class Reason(NamedTuple):
    claims: frozenset[Claim]
    fallacies: tuple[str, ...]
    """Every mention of a fallacy, in order."""
    acceptable: bool
    """False: the reason is too long, has too many words, or has a number without a name."""


NOTHING: Final = Reason(claims=frozenset(), fallacies=(), acceptable=False)


def read(reason: str) -> Reason:
    """The claims and fallacies in a reason. Never raises; reads nothing of a text longer than `MAX_CHARACTERS`."""
    if len(reason) > MAX_CHARACTERS:
        return NOTHING
    claims: set[Claim] = set()
    fallacies: list[str] = []
    words, name, stray = 0, "", False
    for token in _SEPARATORS.split(reason.lower().replace("\u2212", "-").replace("stage iv", "stage_iv")):
        if not token:
            continue
        if token in FALLACY_NAMES:
            fallacies.append(token)
        elif _VALUE.fullmatch(token) and name in _NAMES:
            claims.add((name, token))
            words -= 1  # the name was counted as a word
        elif any(character.isdigit() for character in token):
            stray = True
        else:
            words += 1
            name = token
            continue
        name = ""
    return Reason(frozenset(claims), tuple(fallacies), not stray and words <= MAX_WORDS)


def truths(found: Differences) -> dict[str, frozenset[Claim]]:
    """The true claims about a patient, by the name of the value or difference.

    The distance of the comorbidity from its threshold may have either name; its sign tells it from the value.
    """
    claims = {name: frozenset({(name, str(getattr(found, field)))}) for name, field in _VALUES.items()}
    claims |= {name: frozenset({(name, format_signed(getattr(found, name)))}) for name in _DISTANCES}
    if found.threshold is not None:
        claims["threshold"] = frozenset((name, format_signed(found.threshold)) for name in ("threshold", "comorbidity"))
    return claims


def write(found: Differences, names: tuple[str, ...], fallacy: str) -> str:
    """A reason that cites these differences as the tools show them, and names the fallacy if there is one."""
    cited = [f"{name.replace('_iv', ' IV')} {format_signed(getattr(found, name))}" for name in names]
    return "; ".join((*cited, fallacy) if fallacy else cited)


def format_signed(value: int | None) -> str:
    """A difference as the tools show it."""
    return "none" if value is None else f"{value:+d}"


def supports(reason: Reason, found: Differences, deciding: tuple[str, ...]) -> bool:
    """Whether a reason cites every deciding difference, nothing false, and at most `MAX_BEYOND` other values."""
    true = truths(found)
    return (
        reason.acceptable
        and reason.claims <= frozenset().union(*true.values())
        and all(reason.claims & true[name] for name in deciding)
        and len(reason.claims) <= len(deciding) + MAX_BEYOND
    )


def names_fallacy(reason: Reason, fallacy: str) -> bool:
    """Whether a reason names exactly one fallacy, once, and it is this one."""
    return reason.acceptable and reason.fallacies == (fallacy,)
