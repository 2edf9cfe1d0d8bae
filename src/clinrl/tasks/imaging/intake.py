"""Imports rated imaging procedures as cases, from a JSON, JSON Lines or CSV file in the published schema.

All procedures of a variant are in one pool, by the hash of its condition and text. To hold out whole conditions, give a
folder with a file for each use, named train, mine or exam (as in exam.jsonl). Then the files alone decide, and a
variant that is in two of them is refused in both.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, Final

from clinrl.errors import DataError
from clinrl.tasks import json_reader
from clinrl.tasks.imaging import answer, imported
from clinrl.tasks.imaging.answer import BY_TEXT
from clinrl.tasks.imaging.sentences import citations, split
from clinrl.tasks.importing import (
    WHOLE,
    Fields,
    Intake,
    Source,
    Taken,
    Unclear,
    check_text,
    claims,
    clean,
    find_contested,
    normalise,
    pseudonym,
    sift,
    use_of,
)
from clinrl.tasks.json_reader import TWICE, Records
from clinrl.types import Pool, Unreadable

CONDITION: Final = ("condition", "category")
VARIANT: Final = ("variant",)
PROCEDURE: Final = ("procedure",)
LABEL: Final = ("appropriateness",)
REASONING: Final = ("reasoning_traces", "acr_traces")
CITATIONS: Final = ("citations",)
NEEDED: Final = (CONDITION, VARIANT, PROCEDURE, LABEL, REASONING)
"""Fields that a file must have, each under one of its names."""
NAMES: Final = frozenset(name for names in (*NEEDED, CITATIONS) for name in names)

EXPECTED: Final = (
    "it must be a file of records as JSON (a list, or an object with one list), JSON Lines or CSV (with commas, and "
    "its header as first line), each with condition (or category), variant, procedure, appropriateness, "
    "reasoning_traces (or acr_traces) and perhaps citations; or a folder with such a file for each use, named train, "
    "mine or exam"
)

SHARES: Final[Mapping[Pool, int]] = {"train": 65, "mine": 15, "exam": 20}
"""Percentage of variants in each pool, by their hash."""

MAX_CHARACTERS: Final = {"condition": 300, "category": 300, "variant": 2_000, "procedure": 300}
MAX_ABSTRACT_CHARACTERS: Final = 6_000
MAX_EVIDENCE_CHARACTERS: Final = 100_000
"""Most characters of all abstracts of a record. In a language without spaces the limit of words bounds nothing."""
MAX_WORDS: Final = 3_300
"""Most words of all abstracts of a record. The published data left out records with more."""
PUBLISHED: Final = ("full date", "web address", "e-mail address")
"""Kinds of identifiers that an abstract may hold, because a published one has those of its study and authors."""
NUMBERS: Final = range(1, 100)
"""The reference numbers by which a study may be cited."""

_DISAGREEMENT: Final = re.compile(r"may be appropriate ?\(?\W*disagreement\W*\)?")
_NUMBER: Final = re.compile(r"\[?([0-9]{1,6})\]?", re.ASCII)
_NUMBERED: Final = re.compile(r"(?i)^\s*variant\s*[0-9]{1,3}\s*[:.]")
_CITES_FIRST: Final = re.compile(r"\s*\[[0-9][0-9 ,;\u2013-]{0,80}\]")
_CLOSED: Final = re.compile(r"[.!?][\"')\u2019\u201d]*(?:[ \t]?\[[0-9 ,;\u2013-]{1,80}\])*$")
_OF_RECORDS: Final = re.compile(r"(?i)\.(jsonl?|csv)(\.gz)?$")
_LIKE_A_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,39}")


@dataclass(frozen=True)
class Part:
    """A file of a source and its use. A use of None: the hash of each variant decides."""

    records: Records
    use: Pool | None


@dataclass(frozen=True)
class Request:
    """The request of a record, and its label."""

    condition: str
    variant: str
    procedure: str
    label: str

    @property
    def variant_id(self) -> str:
        """The pseudonym of the variant, which does not depend on the variant's number."""
        return pseudonym("variant", f"{normalise(self.condition)}/{normalise(_NUMBERED.sub('', self.variant))}")

    @property
    def triplet(self) -> str:
        """The identity of the request: equal requests have equal triplets."""
        return f"{self.variant_id}/{pseudonym('procedure', normalise(self.procedure))}"


def recognise(path: Path) -> Source:
    """The source at a path. Raises DataError, with a message about what is expected, for any other file or folder."""
    if not path.exists():
        raise DataError(f"{path} does not exist; {EXPECTED}")
    parts = _parts(path)
    columns = {name for part in parts for name in part.records.columns}
    return Source(
        kind=imported.KIND,
        files={part.records.path.name: part.records.path for part in parts},
        used=frozenset(columns & NAMES),
        # A field of JSON can have any name, and a name that looks like text must not get into a report.
        dropped=frozenset(name for name in columns - NAMES if _LIKE_A_NAME.fullmatch(name)),
        uses=tuple(SHARES) if parts[0].use is None else tuple(part.use for part in parts if part.use),
        lines=sum(part.records.lines for part in parts),
        cases=lambda use, intake: _cases(parts, use, intake),
    )


def _parts(path: Path) -> tuple[Part, ...]:
    if not path.is_dir():
        return (Part(_records(path), None),)
    parts: list[Part] = []
    files = sorted(file for file in path.iterdir() if file.is_file())
    for file in files:
        if _OF_RECORDS.search(file.name) and file.name.split(".")[0] not in SHARES:
            raise DataError(f"{file} is named after no use; {EXPECTED}")
    for use in SHARES:
        found = [file for file in files if file.name.split(".")[0] == use]
        if len(found) > 1:
            raise DataError(f"{path} holds {len(found)} files for the use {use}; keep one")
        parts += [Part(_records(file), use) for file in found]
    if not parts:
        raise DataError(f"{path} is a folder without such records; {EXPECTED}")
    return tuple(parts)


def _records(path: Path) -> Records:
    found = json_reader.recognise(path)
    if missing := [" or ".join(names) for names in NEEDED if set(found.columns).isdisjoint(names)]:
        raise DataError(f"{path}, or its first record, lacks {', '.join(missing)}; {EXPECTED}")
    return found


def _cases(parts: tuple[Part, ...], use: Pool, intake: Intake) -> Iterator[str]:
    def claimed(row: Fields, part: Part) -> list[tuple[str, str | None]]:
        request = read_request(row)
        return [(request.triplet, request.label), (request.variant_id, part.use)]

    found = [claims(part.records.rows(), partial(claimed, part=part)) for part in parts]
    contested = find_contested(chain.from_iterable(found))

    def taker(part: Part) -> Callable[[Fields, set[str]], Taken]:
        def take(row: Fields, seen: set[str]) -> Taken:
            request = read_request(row)
            triplet, variant_id = request.triplet, request.variant_id
            if variant_id in contested:
                raise Unclear("variant", "is in the file of another use too")
            if triplet in contested:
                raise Unclear("appropriateness", "another row gives the same request another label")
            if triplet in seen:
                raise Unclear(WHOLE, "an earlier row has the same condition, variant and procedure")
            taken = _taken(row, request, part.use or use_of(variant_id, SHARES))
            seen.add(triplet)
            return taken

        return take

    for part in parts:
        yield from sift("imaging", part.records.path.name, part.records.rows, taker(part), use, intake)


def read_request(row: Fields) -> Request:
    """The request and the label of a row. Raises Unclear if one of them cannot be used."""
    condition, variant, procedure = (_request_text(row, names) for names in (CONDITION, VARIANT, PROCEDURE))
    column, value = _value(row, LABEL)
    unlabelled = Request(condition, variant, procedure, "")
    return replace(unlabelled, label=label_of(_string(value, column), column, unlabelled.triplet))


def label_of(text: str, column: str, about: str = "") -> str:
    """The one of the three labels that a clean text is, in any letter case. Raises Unclear for any other text.

    A disagreement of the panel contests every label of the request `about`.
    """
    label = text.casefold()
    if label in BY_TEXT:
        return BY_TEXT[label]
    if not label:
        raise Unclear(column, "is empty")
    if _DISAGREEMENT.fullmatch(label):
        raise Unclear(column, "is a disagreement of the panel, which is no label", about)
    raise Unclear(column, f"is none of the three labels: {', '.join(BY_TEXT)}")


def evidence_of(value: Any, column: str) -> list[dict[str, Any]]:
    """The numbers and texts of the abstracts, in order, without empty ones. Raises Unclear for an invalid value."""
    found = _json(value, column)
    if found is TWICE:
        raise Unclear(column, "has a reference number twice")
    if found is None or found == []:
        return []
    if not isinstance(found, Mapping):
        raise Unclear(column, "is no map of reference numbers to abstracts")
    texts: dict[int, str] = {}
    for name, given in found.items():
        number = _number(name, column)
        if number in texts:
            raise Unclear(column, "has a reference number twice")
        if isinstance(given, Mapping) and "abstract" not in given:
            raise Unclear(column, "has an entry without an abstract")
        text = given["abstract"] if isinstance(given, Mapping) else given
        texts[number] = _string(text, column, "has an abstract that is no text")
    if sum(len(text.split()) for text in texts.values()) > MAX_WORDS:
        raise Unclear(column, f"holds more than {MAX_WORDS:,} words of abstracts")
    if sum(map(len, texts.values())) > MAX_EVIDENCE_CHARACTERS:
        raise Unclear(column, f"holds more than {MAX_EVIDENCE_CHARACTERS:,} characters of abstracts")
    for text in filter(None, texts.values()):
        check_text(text, column, MAX_ABSTRACT_CHARACTERS, PUBLISHED)
        imported.check_shown(text, column)
    return [{"number": number, "text": text} for number, text in sorted(texts.items()) if text]


def reasoning_of(value: Any, column: str) -> tuple[str, ...]:
    """The reasons as sentences, each closed, so that they can be joined. Raises Unclear for an invalid value."""
    given = value
    if isinstance(value, str):
        is_list = value.lstrip()[:1] == "[" and value.rstrip()[-1:] == "]" and not _CITES_FIRST.match(value)
        given = _json(value, column) if is_list else value.splitlines()
    if given is None:
        raise Unclear(column, "is empty")
    if not isinstance(given, list) or not all(isinstance(line, str) for line in given):
        raise Unclear(column, "is no list of sentences")
    sentences = (sentence for line in given for sentence in split(clean(line)))
    # Without its full stop a sentence would run into the next one.
    found = tuple(sentence if _CLOSED.search(sentence) else f"{sentence}." for sentence in sentences)
    if not found:
        raise Unclear(column, "is empty")
    if len(found) > imported.MAX_SENTENCES:
        raise Unclear(column, f"has more than {imported.MAX_SENTENCES} sentences")
    for sentence in found:
        check_text(sentence, column, imported.MAX_SENTENCE_CHARACTERS)
        if not all(number in NUMBERS for number in citations(sentence)):
            raise Unclear(column, f"cites a number outside {NUMBERS[0]} to {NUMBERS[-1]}")
    return found


def _taken(row: Fields, request: Request, pool: Pool) -> Taken:
    column, value = _value(row, REASONING)
    reasoning = reasoning_of(value, column)
    if isinstance(answer.parse(imported.gold(request.label, reasoning, thinking=True)), Unreadable):
        raise Unclear(column, "is too short to be a reasoning")
    facts = {
        "condition": request.condition,
        "variant": request.variant,
        "procedure": request.procedure,
        "evidence": evidence_of(_value(row, CITATIONS)[1], CITATIONS[0]),
    }
    check_text(f"{request.condition} | {request.variant} | {request.procedure}", WHOLE)
    key = imported.ImportedKey.model_validate({"source": imported.KIND, "label": request.label, "reasoning": reasoning})
    return Taken(pool, request.variant_id, facts, key.model_dump(), request.label)


def _request_text(row: Fields, names: tuple[str, ...]) -> str:
    """One text of the request, from the field with one of these names. Raises Unclear if it cannot be used."""
    column, value = _value(row, names)
    short = isinstance(value, str) and len(value) <= 2 * MAX_CHARACTERS[column]
    return _prompt_text(value if short else _string(value, column), column)


@lru_cache(1 << 13)
def _prompt_text(value: str, column: str) -> str:
    """The text, cleaned and checked for a prompt. Cached, since the rows of a variant repeat all but the procedure."""
    text = clean(value)
    check_text(text, column, MAX_CHARACTERS[column])
    imported.check_shown(text, column)
    return text


def _value(row: Fields, names: tuple[str, ...]) -> tuple[str, Any]:
    """The name under which a row has a field, and its value or None. Raises Unclear for two different values."""
    given = {name: row[name] for name in names if row.get(name) not in (None, "")}
    if len(given) > 1 and len({repr(value) for value in given.values()}) > 1:
        raise Unclear(names[0], f"says something else than {names[1]}")
    if given:
        return next(iter(given.items()))
    return next((name for name in names if name in row), names[0]), None


def _string(value: Any, column: str, reason: str = "is no text") -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise Unclear(column, reason)
    return clean(value)


def _json(value: Any, column: str) -> Any:
    """The JSON value in a text, None for a blank one; any other value as it is. Raises Unclear for invalid JSON."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json_reader.parse_json(value)
    except ValueError:
        raise Unclear(column, "is no JSON") from None


def _number(name: str, column: str) -> int:
    match = _NUMBER.fullmatch(name.strip())
    if not match:
        raise Unclear(column, "has a key that is no reference number")
    if int(match[1]) not in NUMBERS:
        raise Unclear(column, f"has a reference number outside {NUMBERS[0]} to {NUMBERS[-1]}")
    return int(match[1])
