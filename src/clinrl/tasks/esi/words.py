"""The wordings of the triage notes and their vocabularies: an exam has other words than its training data.

Every finding, complaint, cue and form of a number has many wordings, in `words/*.toml`. The hash of a wording fixes
its vocabulary: two fifths occur in training data; two fifths only the embedded base has read, since any language model
has read more than its tuning data; one fifth no model has ever read. All text is written for this project; none comes
from a handbook or a record.
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
"""The vocabulary in which a note is written; `base` has the words of `training` and of `base_only`."""
SPANS: Final[Mapping[Vocabulary, tuple[float, float]]] = {
    "training": (0.0, 0.4), "base_only": (0.4, 0.8), "unseen": (0.8, 1.0),
}  # fmt: skip
"""The part of one item's wordings, ordered by their hashes, that each vocabulary has: its begin and end."""
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_END = re.compile(r"[.;]")
FOLDER: Final = Path(__file__).parent / "words"


@cache
def table() -> Mapping[str, tuple[str, ...]]:
    """Every item, such as `findings/arrest/yes`, with all its wordings."""
    trees = [tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.toml"))]
    return {item: wordings for tree in trees for item, wordings in _items(tree)}


def _items(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    for name, value in tree.items():
        if isinstance(value, list):
            yield above + name, tuple(value)
        else:
            yield from _items(value, f"{above}{name}/")


def clauses(narrative: str) -> list[str]:
    """The clauses of a note in lower case, with each number masked, so that equal wordings give equal clauses."""
    masked = _NUMBER.sub("#", narrative.lower())
    return [clause.strip() for clause in _END.split(masked) if clause.strip()]


def readings(text: str) -> dict[str, float]:
    """The vital signs of a note, in any wording of `styles`: the systolic pressure, and the first of several values."""
    found = {sign: shape.search(text.lower()) for sign, shape in _shapes().items()}
    return {sign: float(next(filter(None, match.groups()))) for sign, match in found.items() if match}


@cache
def _shapes() -> Mapping[str, re.Pattern[str]]:
    """For each vital sign one pattern of all its wordings, the longest first."""
    return {
        sign: re.compile("|".join(map(_shape, sorted(table()[f"styles/{sign}"], key=len, reverse=True))))
        for sign in ("hr", "rr", "spo2", "bp", "temp")
    }


def _shape(wording: str) -> str:
    before, *after = re.split(r"\\\{[01]?\\\}", re.escape(wording.lower()))
    return rf"(?<![a-z0-9/]){before}([0-9]{{1,3}}(?:\.[0-9])?){r'[0-9]+'.join(after)}"


@cache
def wordings(item: str, readers: Readers) -> tuple[str, ...]:
    """The wordings of an item in one vocabulary, or in both vocabularies of the base. Never empty."""
    if readers == "base":
        return wordings(item, "training") + wordings(item, "base_only")
    ranked = sorted(table()[item], key=lambda wording: sha256(f"{item}/{wording}".encode()).digest())
    start, end = SPANS[readers]
    return tuple(ranked[round(start * len(ranked)) : round(end * len(ranked))])
