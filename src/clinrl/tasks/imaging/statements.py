"""The statements that a reader may make about a request, their sentences, and the parser that reads them back.

Gold reasoning is a list of statements that follow from the rules. Each has three wordings, and `read` knows all of
them, so the share of gold statements in a text can be counted without a model. No reward uses this share.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Final, Literal, NamedTuple

from clinrl.tasks.imaging.guideline import ELSEWHERE, MODALITIES, TARGETS
from clinrl.tasks.tables import read_table
from clinrl.types import Strict


class Statement(NamedTuple):
    """One statement: its kind, and the values of its slots."""

    kind: str
    about: tuple[str, ...] = ()


Stance = Literal["agrees", "disagrees", "elsewhere"]
"""What a study says on a request: it supports the reader's view, contradicts it, or asked another question."""

CITES: Final = "cites"
RATING: Final = "rating"


class _Words(Strict):
    stances: Mapping[Stance, str]
    wordings: Mapping[str, tuple[str, str, str]]


_WORDS: Final = read_table(__file__, _Words)
STANCES: Final = _WORDS.stances
WORDINGS: Final = _WORDS.wordings
"""Three wordings of every kind of statement."""
SLOTS: Final[Mapping[str, Sequence[str]]] = {
    "modality": MODALITIES,
    "target": TARGETS,
    "region": ELSEWHERE,
    "number": tuple(map(str, range(1, 100))),
    "stance": tuple(STANCES.values()),
    "rating": tuple(map(str, range(1, 10))),
}
"""The possible values of each slot of a wording."""


def to_sentence(statement: Statement, wording: int) -> str:
    """A statement as a sentence, in one of its three wordings (0 to 2)."""
    named = dict(zip(slots(statement.kind), statement.about, strict=True))
    text = WORDINGS[statement.kind][wording].format(**named)
    return text[0].upper() + text[1:]


@lru_cache(maxsize=1 << 13)  # a gold sentence is read again for each answer and each measure
def read(sentence: str) -> Statement | None:
    """The statement that a sentence makes, whatever its letter case and spacing; None for any other sentence."""
    text = " ".join(sentence.split()).lower()
    for kind, patterns in _patterns().items():
        for pattern in patterns:
            if match := pattern.fullmatch(text):
                found = match.groupdict()
                return Statement(kind, tuple(_SPELT[found[slot]] for slot in slots(kind)))
    return None


@cache
def slots(kind: str) -> tuple[str, ...]:
    """The names of the slots of a kind of statement, in the order of `SLOTS`."""
    return tuple(name for name in SLOTS if f"{{{name}}}" in WORDINGS[kind][0])


_SPELT: Final = {value.lower(): value for values in SLOTS.values() for value in values}
"""The spelling of each value, by its lower case."""


@cache
def _patterns() -> Mapping[str, tuple[re.Pattern[str], ...]]:
    def pattern(wording: str) -> re.Pattern[str]:
        text = re.escape(wording.lower())
        for name, values in SLOTS.items():
            longest_first = sorted(map(str.lower, values), key=len, reverse=True)
            text = text.replace(rf"\{{{name}\}}", f"(?P<{name}>{'|'.join(map(re.escape, longest_first))})")
        return re.compile(text)

    return {kind: tuple(map(pattern, wordings)) for kind, wordings in WORDINGS.items()}
