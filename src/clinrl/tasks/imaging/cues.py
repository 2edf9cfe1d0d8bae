"""The cues of a sentence: what it claims about its topic, such as good or poor findings, figures, studies, modalities.

A sentence encoder puts "shows it well" and "shows it badly" close together, because the topic is the same. Two
sentences of one topic can still disagree in their cues. The word list of the cues was made without a look at the output
of any model. The encoder alone judges differences that no cue covers.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from clinrl.tasks.imaging.sentences import citations, drop_citations, plain_words
from clinrl.tasks.tables import read_table
from clinrl.types import Strict


class _Cues(Strict):
    axes: Mapping[str, Mapping[str, str]]
    """Patterns by axis and side. The sides of an axis exclude each other; later ones, with the longer phrases, go
    first."""
    flipped: Mapping[str, str]
    """The side that a negation turns each side into."""
    modalities: Mapping[str, str]


_CUES: Final = read_table(__file__, _Cues)

_TURNS: Final = r"not|no|never|without|cannot|neither|nor|hardly|\w+n t"
_NEGATOR: Final = rf"{_TURNS}|nothing|none|lacks?|lacking"
REACH: Final = 5
"""Number of words before a cue, within its clause, in which a negation reverses the cue."""
SAME_WORDS: Final = 0.7
"""Least share of common words, among all words of two sentences, from which only a "not" sets the two apart."""

_AXES = {
    axis: re.compile("|".join(f"(?P<{side}>\\b(?:{words})\\b)" for side, words in reversed(list(sides.items()))))
    for axis, sides in _CUES.axes.items()
}
_DENIAL: Final = (
    r"it (?:is|s) (?:not (?:true|so|correct|right|the case)|wrong|false|untrue|incorrect) that"
    r"|nobody (?:found|said|showed|thinks) that"
)
_NOT = re.compile(rf"\b(?:{_DENIAL}|{_NEGATOR})\b")
_AUXILIARY = re.compile(r"\b(?:do|does|did)\b|\|")
_TURN = re.compile(rf"\b(?:{_TURNS})\b")
_MODALITY = re.compile("|".join(f"(?P<{name}>\\b(?:{words})\\b)" for name, words in _CUES.modalities.items()))
_CLAUSE = re.compile(r"[,;:]\s")
_FIGURE = re.compile(r"[0-9]+(?:\.[0-9]+)?")


@dataclass(frozen=True)
class Cues:
    """The claims that a sentence makes about its topic."""

    sides: Mapping[str, frozenset[str]]
    """The sides that the sentence takes, by axis. Two sides of an axis count as a third one: neither good nor poor."""
    negations: int
    words: frozenset[str]
    """The words without negations and without the auxiliaries (do, does, did) that negations need."""
    figures: Counter[str]
    studies: frozenset[int]
    modalities: frozenset[str]


@lru_cache(maxsize=4096)
def of(sentence: str) -> Cues:
    """The cues of a sentence. Takes linear time."""
    text = " | ".join(plain_words(clause) for clause in _CLAUSE.split(drop_citations(sentence)))
    sides = {axis: frozenset(_sides(pattern, text)) for axis, pattern in _AXES.items()}
    return Cues(
        sides={axis: found for axis, found in sides.items() if found},
        negations=len(_NOT.findall(text)),
        words=frozenset(word.removesuffix("s") for word in _AUXILIARY.sub(" ", _NOT.sub(" ", text)).split()),
        figures=Counter(_FIGURE.findall(drop_citations(sentence))),
        studies=frozenset(citations(sentence)),
        modalities=frozenset(match.lastgroup or "" for match in _MODALITY.finditer(text)),
    )


def agree(a: Cues, b: Cues) -> bool:
    """Whether two sentences may have one meaning. Symmetric; a cue that only one of them has is no conflict.

    They disagree if they take different sides of an axis, if the figures of neither include those of the other, if
    they share no study or no modality though both name some, or if they have the same words but not equally many
    negations. So a sentence that leaves a side out, or names several figures, agrees with a more definite one.
    """
    if any(b.sides.get(axis, found) != found for axis, found in a.sides.items()):
        return False
    if a.figures and b.figures and not (a.figures <= b.figures or b.figures <= a.figures):
        return False
    if any(x and y and not x & y for x, y in ((a.studies, b.studies), (a.modalities, b.modalities))):
        return False
    if a.negations == b.negations:
        return True
    either = a.words | b.words
    return not either or len(a.words & b.words) / len(either) < SAME_WORDS


def _sides(pattern: re.Pattern[str], text: str) -> Iterator[str]:
    for match in pattern.finditer(text):
        side = match.lastgroup or ""
        clause = text[max(0, match.start() - 80) : match.start()].rpartition("|")[2]
        before = " ".join(clause.split()[-REACH:])
        # A negation within the match, as in "adds nothing", is part of the cue and turns nothing.
        yield _CUES.flipped[side] if len(_TURN.findall(before)) % 2 else side
