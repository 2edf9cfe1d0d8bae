"""Whether a text is unlike anything that a model was examined on: novelty detection, without asking the model.

A model answers everything, a shopping list too, and its form says nothing about that. Here a text is known by its
pairs of neighbouring words. It is novel if more of them are new than in all but a few of the exam's own cases, or if it
has fewer pairs, or more, than any of those. What that says is "the exam does not speak for this text", and no more: a
familiar text may be misread, a novel one read rightly. So the flag stands beside the answer and changes none.

What is kept of an exam are hashes of pairs, two sizes and a share. Pairs can be guessed from their hashes, so nothing
at all is kept of imported cases, which are somebody's: beside such an exam nothing is said about a text.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from clinrl.artifacts import write_json
from clinrl.errors import ArtefactError

FAMILIAR, NOVEL, UNKNOWN = "familiar", "novel", "unknown"
"""unknown: nothing is kept of the exam, or the text was not read."""
TAIL = 0.005
"""Share of the exam's own cases that may have more new pairs than a familiar text."""
FOLDS = 10
HASH_BYTES = 8

_WORD = re.compile(r"[^\W\d_]+|\d+")


@dataclass(frozen=True)
class Examined:
    """What an exam's texts have in common."""

    pairs: frozenset[str]
    """Hashes of the pairs of neighbouring words."""
    least: int
    """Different pairs of the shortest text."""
    most: int
    """Different pairs of the longest text."""
    share: float
    """Of new pairs, up to which a text is familiar."""


def learn(texts: Sequence[Sequence[str]], groups: Sequence[str]) -> Examined:
    """What the texts of an exam have in common. Each is several strings; raises ValueError for no text.

    How many pairs are new to one of them is counted beside the others, group by group in ten folds, since cases of a
    group are alike.
    """
    if not texts:
        raise ValueError("an exam needs a text")
    found = [frozenset(pairs(text)) for text in texts]
    fold_of = {group: place % FOLDS for place, group in enumerate(sorted(set(groups)))}
    folds = [fold_of[group] for group in groups]
    shares = []
    for fold in range(FOLDS):
        known = frozenset[str]().union(*(text for text, other in zip(found, folds, strict=True) if other != fold))
        shares += [_new(text, known) for text, own in zip(found, folds, strict=True) if own == fold]
    return Examined(
        pairs=frozenset[str]().union(*found),
        least=min(map(len, found)),
        most=max(map(len, found)),
        share=sorted(shares)[math.ceil((1 - TAIL) * len(shares)) - 1],
    )


def judge(text: Sequence[str], examined: Examined | None) -> str:
    """`FAMILIAR` or `NOVEL`; `UNKNOWN` without an exam."""
    if examined is None:
        return UNKNOWN
    found = frozenset(pairs(text))
    is_sized = examined.least <= len(found) <= examined.most
    return FAMILIAR if is_sized and _new(found, examined.pairs) <= examined.share else NOVEL


def strings(value: Any) -> Iterator[str]:
    """Every string in plain data, depth first: what a case says in words."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from strings(part)


def pairs(text: Iterable[str]) -> Iterator[str]:
    """The hashes of the pairs of neighbouring words in each string, in lower case; all numbers are one word."""
    for string in text:
        words = ["0" if word.isdecimal() else word for word in _WORD.findall(string.lower())]
        for first, second in pairwise(words):
            yield hashlib.blake2b(f"{first} {second}".encode(), digest_size=HASH_BYTES).hexdigest()


def write(path: Path, examined: Examined | None) -> None:
    """Write what is kept of an exam: `null` for one of which nothing is."""
    kept = examined and {**vars(examined), "pairs": sorted(examined.pairs)}
    write_json(path, kept)


def read(path: Path) -> Examined | None:
    """What `write` wrote. Raises ArtefactError if it is missing or something else."""
    try:
        kept = json.loads(path.read_bytes())
        return None if kept is None else Examined(**{**kept, "pairs": frozenset(kept["pairs"])})
    except (OSError, ValueError, TypeError, KeyError):
        raise ArtefactError(f"{path} does not say what the exam was about; register the version again") from None


def _new(found: frozenset[str], known: frozenset[str]) -> float:
    """The share of pairs that are not known; 1 for a text without any."""
    return len(found - known) / len(found) if found else 1.0
