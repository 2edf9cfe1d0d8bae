"""The wordings of the triage notes, and who may read which: the words of an exam are not those of its training data.

Every finding, complaint, cue and form of a number is said in many ways, in `words/*.toml`. The hash of a wording gives
its vocabulary for good: two fifths stand in training data, two fifths are known to the embedded base alone, as any
language model has read more than it was tuned on, and one fifth no model has ever read. All text is written for this
project; none comes from a handbook or a record.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Literal

Vocabulary = Literal["training", "base_only", "unseen"]
Readers = Vocabulary | Literal["base"]
"""Whose words a note is written in; `base` has those of training and its own."""
SPANS: Final[Mapping[Vocabulary, tuple[float, float]]] = {
    "training": (0.0, 0.4), "base_only": (0.4, 0.8), "unseen": (0.8, 1.0),
}  # fmt: skip
"""Of the wordings of one item, by their hashes, where those of each vocabulary begin and end."""
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_END = re.compile(r"[.;]")
FOLDER: Final = Path(__file__).parent / "words"


@cache
def table() -> Mapping[str, tuple[str, ...]]:
    """Every item, such as `findings/arrest/yes`, with all its wordings."""
    trees = [tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.toml"))]
    return {item: wordings for tree in trees for item, wordings in _items(tree)}


def _items(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    for name, held in tree.items():
        if isinstance(held, list):
            yield above + name, tuple(held)
        else:
            yield from _items(held, f"{above}{name}/")


def clauses(narrative: str) -> list[str]:
    """The clauses of a note in lower case, each number masked: what two notes may have word for word in common."""
    masked = _NUMBER.sub("#", narrative.lower())
    return [clause.strip() for clause in _END.split(masked) if clause.strip()]


def readings(text: str) -> dict[str, float]:
    """The vital signs of a note, by any wording of `styles`; of a pressure the systolic one, of several the first."""
    found = {sign: shape.search(text.lower()) for sign, shape in _shapes().items()}
    return {sign: float(next(filter(None, match.groups()))) for sign, match in found.items() if match}


@cache
def _shapes() -> Mapping[str, re.Pattern[str]]:
    """For each vital sign all its wordings as one pattern, the longest first."""
    return {
        sign: re.compile("|".join(map(_shape, sorted(table()[f"styles/{sign}"], key=len, reverse=True))))
        for sign in ("hr", "rr", "spo2", "bp", "temp")
    }


def _shape(wording: str) -> str:
    before, *after = re.split(r"\\\{[01]?\\\}", re.escape(wording.lower()))
    return rf"(?<![a-z0-9/]){before}([0-9]{{1,3}}(?:\.[0-9])?){r'[0-9]+'.join(after)}"


@cache
def wordings(item: str, readers: Readers) -> tuple[str, ...]:
    """The wordings of an item in one vocabulary, or in both that the base reads. Never empty."""
    if readers == "base":
        return wordings(item, "training") + wordings(item, "base_only")
    ranked = sorted(table()[item], key=lambda wording: sha256(f"{item}/{wording}".encode()).digest())
    start, end = SPANS[readers]
    return tuple(ranked[round(start * len(ranked)) : round(end * len(ranked))])
