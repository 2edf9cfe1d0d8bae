"""Novelty detection: whether a text is unlike the texts of the exam that a model took. The model is not asked.

A model answers everything, even a shopping list, and the form of its answer does not show that. Here a text is
described by its pairs of neighbouring words. It is novel if its share of new pairs is larger than in all but a few of
the exam's own cases, or if it has fewer pairs, or more, than any of those. Novel means "the exam says nothing about
such a text", and no more: a familiar text may be misread, and a novel one read correctly. So the flag is shown beside
the answer and changes none.

The record of an exam holds hashes of pairs, two sizes and a share. Pairs can be guessed from their hashes, so nothing
is kept of imported cases, which are about real patients: with such an exam, every text is unknown.
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
"""unknown: there is no record of the exam, or the text was not read."""
TAIL = 0.005
"""Share of the exam's own cases that may have more new pairs than a familiar text."""
FOLDS = 10
HASH_BYTES = 8

_WORD = re.compile(r"[^\W\d_]+|\d+")


@dataclass(frozen=True)
class Examined:
    """The record of an exam's texts, with which other texts are compared."""

    pairs: frozenset[str]
    """Hashes of the pairs of neighbouring words."""
    least: int
    """The number of different pairs in the shortest text."""
    most: int
    """The number of different pairs in the longest text."""
    share: float
    """The largest share of new pairs in a familiar text."""


def learn(texts: Sequence[Sequence[str]], groups: Sequence[str]) -> Examined:
    """The record of the texts of an exam. Each text is several strings. Raises ValueError if there is no text.

    The share of new pairs in one of the texts is measured against the texts of the other nine folds. A group is in one
    fold, since cases of a group are alike.
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
    """`FAMILIAR` or `NOVEL`; `UNKNOWN` without a record of the exam."""
    if examined is None:
        return UNKNOWN
    found = frozenset(pairs(text))
    is_sized = examined.least <= len(found) <= examined.most
    return FAMILIAR if is_sized and _new(found, examined.pairs) <= examined.share else NOVEL


def strings(value: Any) -> Iterator[str]:
    """Every string in plain data, depth first, such as the texts of a case."""
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
    """Write the record of an exam, or `null` if there is none."""
    kept = examined and {**vars(examined), "pairs": sorted(examined.pairs)}
    write_json(path, kept)


def read(path: Path) -> Examined | None:
    """The record that `write` wrote. Raises ArtefactError if the file is missing or malformed."""
    try:
        kept = json.loads(path.read_bytes())
        return None if kept is None else Examined(**{**kept, "pairs": frozenset(kept["pairs"])})
    except (OSError, ValueError, TypeError, KeyError):
        raise ArtefactError(f"{path} is no record of an exam's texts; register the version again") from None


def _new(found: frozenset[str], known: frozenset[str]) -> float:
    """The share of pairs that are not known; 1 for a text without pairs."""
    return len(found - known) / len(found) if found else 1.0
