"""Sentences of a reasoning, and the studies that it cites.

A citation such as "[2]", "[1, 3]" or "[2-4]" belongs to the sentence that it closes, even if it follows the full stop.
"""

import re
from collections.abc import Iterator
from typing import Final

WIDEST_RANGE: Final = 50
"""Largest difference between the ends of a cited range. A wider range is read as its two ends: no list of studies is
that long, and a text must not make the program count to a billion."""

TITLES: Final = frozenset(("dr", "mr", "mrs", "ms", "prof", "st", "vs", "cf", "e.g", "i.e", "eg", "ie"))
"""Words whose full stop never ends a sentence."""
NUMBERED: Final = frozenset(("no", "nos", "fig", "figs", "vol", "pp", "ref", "refs", "eq", "tab", "sec"))
"""Words whose full stop ends no sentence if a number follows."""
SHORTENED: Final = frozenset(("al", "etc", "approx", "resp", "ca", "incl", "max", "min", "dept", "ed", "eds", "suppl"))
"""Words whose full stop ends a sentence only if a capital follows."""

_STOP = re.compile(r"(?<![.!?])[.!?]++[\"')\u2019\u201d]*(?:[ \t]?\[[0-9 ,;\u2013-]{1,80}\])*(?=\s|$)")
_LAST_WORD = re.compile(r"[^\s(\[\"']{1,12}$")
_BULLET = re.compile(r"\s*(?:[-*\u2022]|\(?[0-9]{1,2}[.)])\s+")
_CITED = re.compile(r"\[([0-9][0-9 ,;\u2013-]{0,200})\]")
_PART = re.compile(r"([0-9]+)(?: ?[\u2013-] ?([0-9]+))?")
_NOT_WORD = re.compile(r"[\W_]+")


def split(text: str) -> tuple[str, ...]:
    """The sentences of a text, in order, without list marks. A piece without words is no sentence.

    A line end ends a sentence. Decimals, abbreviations and initials do not.
    """
    return tuple(piece.strip() for line in text.splitlines() for piece in _split_line(line) if plain_words(piece))


def published_split(text: str) -> tuple[str, ...]:
    """The sentences as the published similarity splits them: at every full stop, even within a decimal."""
    return tuple(piece.strip() for piece in text.split(".") if piece.strip())


def citations(text: str) -> tuple[int, ...]:
    """The numbers of the studies that a text cites, each once, in the order of their first mention."""
    found: dict[int, None] = {}
    for bracket in _CITED.finditer(text):
        for first, last in _PART.findall(bracket[1]):
            low, high = int(first), int(last or first)
            found |= dict.fromkeys(range(low, high + 1) if 0 <= high - low <= WIDEST_RANGE else (low, high))
    return tuple(found)


def drop_citations(text: str) -> str:
    """The text without its bracketed citations."""
    return " ".join(_CITED.sub(" ", text).split()).replace(" .", ".").replace(" ,", ",")


def plain_words(text: str) -> str:
    """The words of a text, in lower case, without marks and citations: equal for sentences of the same words."""
    return _NOT_WORD.sub(" ", _CITED.sub(" ", text).lower()).strip()


def _split_line(line: str) -> Iterator[str]:
    bullet = _BULLET.match(line)
    start = bullet.end() if bullet else 0
    for stop in _STOP.finditer(line, start):
        if _ends(line, start, stop):
            yield line[start : stop.end()]
            start = stop.end()
    yield line[start:]


def _ends(line: str, start: int, stop: re.Match[str]) -> bool:
    """Whether a full stop, with the citations after it, ends the sentence that began at `start`."""
    word = _LAST_WORD.search(line[max(start, stop.start() - 12) : stop.start()])
    if word is None or stop[0][0] != ".":
        return True
    short, follows = word[0].lower(), line[stop.end() : stop.end() + 8].lstrip()[:1]
    if short in TITLES or (len(short) == 1 and word[0].isupper()):
        return False
    if short in NUMBERED:
        return not follows.isdigit()
    return short not in SHORTENED or follows.isupper() or not follows
