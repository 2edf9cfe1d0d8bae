"""Import MIETIC as cases: practice narratives that a language model wrote from MIMIC records.

The validation file has levels that experts kept or removed; it is used as an exam only. The main file asks one of
three questions about each narrative, and the question alone gives the level. In both files the narrative is the only
source: the structured columns may contradict it on purpose, and most of the others record events after triage.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from clinrl.tasks.csv_reader import Table
from clinrl.tasks.esi import imported, measured
from clinrl.tasks.esi.imported import ImportedKey
from clinrl.tasks.importing import (
    Fields,
    Source,
    Taken,
    Unclear,
    claims,
    clean,
    find_contested,
    fingerprint,
    normalise,
    plain_text,
    pseudonym,
    sift,
    use_of,
)
from clinrl.types import Pool

VALIDATION: Final = "mietic-validation"
INSTRUCTIONS: Final = "mietic"

USED: Final = ("subject_id", "stay_id", "acuity", "tiragecase", "final_decision")
ASKED: Final = ("instruction", "input", "output")

SHARES: Final[Mapping[Pool, int]] = {"train": 80, "mine": 20}
"""Percentage of the main file's narratives in each pool, by the hash of the narrative."""

_QUESTIONS: Final = (
    (1, re.compile(r"life[ -]?saving", re.IGNORECASE)),
    (2, re.compile(r"\b(?:esi|level)[ -]?(?:level[ -]?)?2\b|high[ -]risk", re.IGNORECASE)),
    (3, re.compile(r"\bresources?\b", re.IGNORECASE)),
)


Take = Callable[[Fields, set[str]], Taken]


def validation(table: Table) -> Source:
    """The validation file as a source. Raises DataError if it lacks a column that is needed."""
    table.require(USED)
    return _source(VALIDATION, table, USED, ("exam",), lambda: _of_validation(table))


def instructions(table: Table) -> Source:
    """The main file as a source. Raises DataError if it lacks a column."""
    table.require(ASKED)
    return _source(INSTRUCTIONS, table, ASKED[:2], ("train", "mine"), lambda: _of_instructions)


def _source(kind: str, table: Table, used: Sequence[str], uses: tuple[Pool, ...], taker: Callable[[], Take]) -> Source:
    return Source(
        kind=kind,
        files={table.path.name: table.path},
        used=frozenset(used),
        dropped=frozenset(table.columns) - set(used),
        uses=uses,
        lines=table.lines,
        cases=lambda use, intake: sift("esi", table.path.name, table.rows, taker(), use, intake),
    )


def level_of(instruction: str, text: str = "") -> int:
    """The level that a question about a text is for: 1 or 2. Raises Unclear for that about resources, and any other."""
    levels = [level for level, question in _QUESTIONS if question.search(instruction)]
    if levels == [3]:
        about = fingerprint(plain_text({"narrative": text}))
        raise Unclear("instruction", "asks about resources, so the level is 3, 4 or 5 and it is not said which", about)
    if len(levels) != 1:
        raise Unclear("instruction", "is none of the three known questions")
    return levels[0]


def _of_validation(table: Table) -> Take:
    def stay_and_level(row: Fields) -> tuple[str, int]:
        decision = row["final_decision"].strip().upper()
        if decision != "RETAIN":
            known = decision == "REMOVE"
            stay_id = measured.identifier(row["stay_id"], "stay_id") if known else None
            raise Unclear("final_decision", "is REMOVE" if known else "is neither RETAIN nor REMOVE", stay_id)
        return measured.identifier(row["stay_id"], "stay_id"), measured.acuity(row["acuity"])

    disputed = find_contested(claims(table.rows(), lambda row: [stay_and_level(row)]))

    def take(row: Fields, seen: set[str]) -> Taken:
        stay_id, level = stay_and_level(row)
        measured.check_stay(stay_id, seen, disputed)
        text = imported.check(clean(row["tiragecase"]), "tiragecase")
        subject = pseudonym("subject", measured.identifier(row["subject_id"], "subject_id"))
        key = ImportedKey(source=VALIDATION, level=level)
        return Taken("exam", subject, {"narrative": text}, key.model_dump(), level)

    return take


def _of_instructions(row: Fields, _: set[str]) -> Taken:
    text = imported.check(clean(row["input"]), "input")
    level = level_of(row["instruction"], text)
    subject = pseudonym("narrative", normalise(text))
    key = ImportedKey(source=INSTRUCTIONS, level=level)
    return Taken(use_of(subject, SHARES), subject, {"narrative": text}, key.model_dump(), level)
