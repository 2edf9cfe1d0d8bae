"""Shared rules for imported cases of all tasks: which rows are one patient, its pool, and the text that is withheld.

An imported case's group is `<use>/imported/<pseudonym>`, so the group alone gives the pool. A pseudonym is a hash of
the subject if the source names one, else of the narrative. It keeps identifiers out of files; it does not hide them
from a person who has the source, so cases are handled like the source itself. If a source is not about patients, each
pseudonym stands for a unit that the task keeps in one pool.
"""

import hashlib
import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, TextIO, TypeVar, cast, get_args

from pydantic import BaseModel

from clinrl import paths
from clinrl.artifacts import sha256_file
from clinrl.errors import DataError
from clinrl.tasks.base import Task, pool_at
from clinrl.tasks.marks import holds_mark
from clinrl.types import Case, Graded, Message, Pool, Transcript, Unreadable, last_turn, transcript_of

MARK = "/imported/"
MAX_NARRATIVE_CHARACTERS = 4_000
MAX_REASONS = 5
"""The number of reasons for refusals that `Intake.outcome` names, the most frequent first."""
COLUMNS = ("file", "line", "column", "reason")
"""The columns of the list of refused rows."""

CONTROL_CHARACTERS = r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\ufeff]"
"""Characters that no narrative holds: control characters (line ends too) and the commonest invisible ones. Drawn
narratives hold no other invisible ones, and their proofs quote this pattern word for word."""

INVISIBLE_CHARACTERS = (
    r"[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164"
    r"\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
"""Characters that do not show, or turn the direction of a text: Unicode's Default_Ignorable_Code_Point, which holds
variation selectors and tags, and the marks of annotations. Spelt out, since Python's own tables differ by version."""

HIDDEN_CHARACTERS = f"{CONTROL_CHARACTERS}|{INVISIBLE_CHARACTERS}"
"""Characters that no imported narrative holds."""

IDENTIFIERS: dict[str, str] = {
    "social security number": r"\b\d{3}-\d{2}-\d{4}\b",
    "telephone number": r"(?<!\d)(?:\+?\d{1,2}[-. ]?)?(?:\(\d{3}\) ?|\d{3}[-. ])\d{3}[-. ]\d{4}(?!\d)",
    "e-mail address": r"[\w.+-]+@[\w-]+\.\w+",
    "medical record number": r"(?i)\b(?:mrn|medical record (?:number|no))\b[\s:#.]*\d+",
    "full date": r"(?i)\b(?:(?:19|20)\d{2}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.](?:19|20)?\d{2}"
    r"|(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]* \d{1,2},? (?:19|20)\d{2})\b",
    "web address": r"(?i)\b(?:https?://|www\.)\S",
}
"""A tripwire for real people's data: the identifiers of 45 CFR 164.514(b)(2) (HIPAA, Safe Harbor) that have a shape."""

_MONTH = (
    r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    r"|nov(?:ember)?|dec(?:ember)?)"
)
_DAY = r"(?:0?[1-9]|[12]\d|3[01])"
DASHES = dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"), "-")
"""Maps the dashes that word processors write in place of a hyphen to a hyphen."""
IDENTIFIERS_OF_IMPORTS: dict[str, str] = IDENTIFIERS | {
    "e-mail address": rf"(?<![\w.+-]){IDENTIFIERS['e-mail address']}",  # from its first character: time stays linear
    "medical record number": rf"{IDENTIFIERS['medical record number']}"
    r"|\b(?:mrn(?![a-z])[\W_]{0,5}(?:no|number)?|medical record (?:number|no))(?![a-z])[\W_]{0,5}(?:is)?[\W_]{0,5}"
    r"[a-z]{0,2}\d{4}|\bmedical record[\W_]{0,5}(?:is)?[\W_]{0,5}[a-z]{0,2}\d{5}",
    # ITU-T E.164: a country code, of one digit only if that is 1 or 7, and 8 to 15 digits in all. Five digits or more
    # follow a slash, which excludes blood pressures. Excludes a mean difference with its interval: +15.3 (12.1-18.5).
    "telephone number": rf"{IDENTIFIERS['telephone number']}"
    r"|(?:(?<!\d)\+(?!\d{1,2}\.\d{1,2} ?[(\[]-?\d+\.)|(?<![\w:.,/+-])00)"
    r"(?:[17]|[2-689]\d)(?:[-. ()\u00a0]{0,3}\d|/(?=\d{5})){6,14}(?!\d)",
    # A two-digit year needs the same separator twice: an interval such as 12.1-18.5 is no date.
    "full date": r"(?i)\b(?:(?:19|20)\d{2}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.](?:19|20)\d{2}"
    r"|\d{1,2}(?:-\d{1,2}-|/\d{1,2}/|\.\d{1,2}\.)\d{2}"
    r"|(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]* \d{1,2},? (?:19|20)\d{2}"
    rf"|{_DAY}(?:st|nd|rd|th)?[-/., ]{{0,2}}(?:of )?{_MONTH}[-/., ]{{0,2}}(?:19|20)\d{{2}}"
    rf"|{_DAY}[-/.]{_MONTH}[-/.]\d{{2}}"
    rf"|{_MONTH}[-/., ]{{0,2}}{_DAY}(?:st|nd|rd|th)?[-/., ]{{1,2}}(?:19|20)\d{{2}}"
    rf"|(?:19|20)\d{{2}}[-/., ]{{1,2}}{_MONTH}[-/., ]{{0,2}}{_DAY}"
    r"|\d{1,2} ?/ ?\d{1,2} ?/ ?(?:19|20)\d{2})(?:\b|(?=t\d|z\b|_|[ap]m\b))",
}
"""The same tripwire for imported rows, with more shapes. Drawn rows hold none of these, and their proofs quote
`IDENTIFIERS` word for word."""

_CONTROL = re.compile(CONTROL_CHARACTERS)
_INVISIBLE = re.compile(INVISIBLE_CHARACTERS)
_IDENTIFIERS = [(kind, re.compile(shape)) for kind, shape in IDENTIFIERS_OF_IMPORTS.items()]
_WORD = re.compile(r"\w+")
_Named = TypeVar("_Named", str, bytes)
_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode


class Unclear(Exception):
    """Raised for a row that cannot be used; the reason quotes none of its values."""

    def __init__(self, column: str, reason: str, about: str | bytes | None = None) -> None:
        """`about` is what the row gives another label than any that can be used: other rows about it are refused."""
        super().__init__(f"{column}: {reason}")
        self.column, self.reason, self.about = column, reason, about


WHOLE = "(the whole row)"
"""Stands for the column if the reason concerns the whole row."""
Fields = Mapping[str, Any]
Row = tuple[int, Fields | Unclear]
"""The line on which a record begins, from 1, and its fields, or the reason why it has none."""


def fields_of(found: Fields | Unclear) -> Fields:
    """The fields of a row. Raises Unclear if it has none."""
    if isinstance(found, Unclear):
        raise found
    return found


@dataclass
class Intake:
    """Counts of a source's rows by outcome. Refused rows are listed as they come, without their values."""

    refused_to: TextIO
    without: frozenset[str | bytes] = frozenset()
    """Pseudonyms and fingerprints of narratives whose rows are refused: those of an exam (`identities`)."""
    read: int = 0
    kept: int = 0
    elsewhere: int = 0
    """Sound rows whose patients belong to another pool."""
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    """The number of refused rows by column and reason."""

    def refuse(self, file: str, line: int, unclear: Unclear) -> None:
        """Count a refused row, and list it."""
        self.refused[unclear.column, unclear.reason] += 1
        self.refused_to.write(f"{file}\t{line}\t{unclear.column}\t{unclear.reason}\n")

    def outcome(self) -> str:
        """The counts in words, with the commonest reasons for refusals."""
        found = [f"{count:,} for column {of} {reason}" for (of, reason), count in self.refused.most_common(MAX_REASONS)]
        why = f" ({'; '.join(found)})" if found else ""
        kept = f"of {self.read:,} rows {self.kept:,} are kept, {self.elsewhere:,} belong to another pool and "
        return f"{kept}{self.refused.total():,} were refused{why}"

    def record(self, source: "Source") -> dict[str, Any]:
        """The record of an import for reports, which may hold no more than counts and names of columns."""
        refusals: dict[str, dict[str, int]] = {}
        for (column, reason), count in sorted(self.refused.items()):
            refusals.setdefault(column, {})[reason] = count
        return {
            "source": source.kind,
            "read": self.read,
            "kept": self.kept,
            "another_pool": self.elsewhere,
            "refused": self.refused.total(),
            "refusals": refusals,
            "columns_used": sorted(source.used),
            "columns_dropped": sorted(source.dropped),
        }


@dataclass(frozen=True, kw_only=True)
class Source:
    """Records to import, of a recognised kind and not read yet."""

    kind: str
    files: Mapping[str, Path]
    """The files to read, by their names in a list of refused rows."""
    used: frozenset[str]
    dropped: frozenset[str]
    """Columns of the files that are never read: later events, and all others that are not used."""
    uses: tuple[Pool, ...]
    """The pools that its rows can belong to."""
    lines: int
    """About how many rows there are."""
    cases: Callable[[Pool, Intake], Iterator[str]]
    """Yields the cases of one pool as canonical JSON lines, and counts the outcome of each row."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A row that can be used: its patient, the patient's pool, and the content of a case."""

    pool: Pool
    pseudonym: str
    facts: Mapping[str, Any]
    """JSON-ready, as the task's own records dump them."""
    key: Mapping[str, Any]
    label: Any
    """The label in `key`, under any name."""


def claims(rows: Iterable[Row], read: Callable[[Fields], Iterable[tuple[Any, Any]]]) -> Iterator[tuple[Any, Any]]:
    """What each row says of something, as pairs; a row whose refusal is about something says that refusal of it.

    A row with any other refusal says nothing here: it is refused later.
    """
    for _, row in rows:
        try:
            yield from read(fields_of(row))
        except Unclear as unclear:
            if unclear.about is not None:
                yield unclear.about, unclear


def find_contested(claims: Iterable[tuple[_Named, Any]]) -> frozenset[_Named]:
    """The things that two claims label differently: the rows of both are refused, since either may be wrong."""
    labels: dict[_Named, Any] = {}
    return frozenset(named for named, label in claims if labels.setdefault(named, label) != label)


def sift(
    task: str,
    name: str,
    rows: Callable[[], Iterable[Row]],
    take: Callable[[Fields, set[str]], Taken],
    use: Pool,
    intake: Intake,
) -> Iterator[str]:
    """Yield the rows of one pool as lines of cases.

    `name` is the file's name in the list of refused rows; each call of `rows` begins anew. `take` reads the fields of a
    row or raises Unclear; its set keeps what it needs of earlier rows, such as their ids. Rows that give one narrative
    (`plain_text`) different labels are refused. So is a narrative that an earlier row of any pool has, so that no text
    is in two pools of one source.
    """
    earlier: set[str] = set()

    def narrative(fields: Fields) -> list[tuple[bytes, Any]]:
        taken = take(fields, earlier)
        return [(fingerprint(plain_text(taken.facts)), taken.label)]

    disputed = find_contested(claims(rows(), narrative))
    earlier.clear()
    seen: set[bytes] = set()
    for line, row in rows():
        intake.read += 1
        try:
            taken = take(fields_of(row), earlier)
            text = fingerprint(plain_text(taken.facts))
            if taken.pseudonym in intake.without or text in intake.without:
                raise Unclear(WHOLE, "its patient or narrative is among those that are left out")
            if text in disputed:
                raise Unclear(WHOLE, "another row gives the same narrative another label")
            if text in seen:
                raise Unclear(WHOLE, "an earlier row has the same narrative")
        except Unclear as unclear:
            intake.refuse(name, line, unclear)
            continue
        seen.add(text)
        if taken.pool != use:
            intake.elsewhere += 1
            continue
        intake.kept += 1
        yield case_line(task, f"{use}{MARK}{taken.pseudonym}", taken.facts, taken.key)


def opened(task: Task, path: str, without: str | None) -> tuple[Source, Source | None, dict[str, str]]:
    """The source at a path, that of the rows to leave out, and the digests of the files of both, taken afterwards."""
    source, apart = task.recognise(Path(path)), task.recognise(Path(without)) if without else None
    files = {**source.files, **({f"without/{file}": at for file, at in apart.files.items()} if apart else {})}
    return source, apart, {file: sha256_file(at) for file, at in sorted(files.items())}


def identities(source: Source) -> frozenset[str | bytes]:
    """The pseudonyms of a source's patients and the fingerprints of its narratives, in all pools."""
    found: set[str | bytes] = set()
    for use in source.uses:
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            for line in source.cases(use, Intake(nowhere)):
                case = json.loads(line)
                found |= _marks(case["group"], case["facts"])
    return frozenset(found)


def _marks(group: str, facts: Mapping[str, Any]) -> set[str | bytes]:
    """The pseudonym of an imported case's patient, and the fingerprint of its narrative."""
    return {group.partition(MARK)[2], fingerprint(plain_text(facts))}


def case_line(task: str, group: str, facts: Mapping[str, Any], key: Mapping[str, Any]) -> str:
    """The line of a case: equal to the canonical JSON of the validated record, and made several times faster."""
    fact_text, key_text = _encode(facts), _encode(key)
    digest = hashlib.sha256(f"[{fact_text},{key_text}]".encode()).hexdigest()[:16]
    return f'{{"facts":{fact_text},"group":"{group}","id":"{task}-{digest}","key":{key_text}}}'


def pseudonym(kind: str, text: str) -> str:
    """The pseudonym of a subject or a narrative: 16 hexadecimal digits, the same in every source."""
    return hashlib.sha256(f"{kind}:{text}".encode()).hexdigest()[:16]


def use_of(pseudonym: str, shares: Mapping[Pool, int]) -> Pool:
    """The pool of a patient, from the pseudonym alone: the same for any source and machine."""
    return pool_at(int(pseudonym[:8], 16) % 100, shares)


def key_of(value: Any, drawn: type[BaseModel], imported: type[BaseModel]) -> Any:
    """Validate a key as `imported` if it names its source, else as `drawn`, so that an error names its column alone."""
    if not isinstance(value, Mapping):
        return value
    return (imported if "source" in value else drawn).model_validate(value)


def pool_of(group: str) -> Pool | None:
    """The pool that the group of an imported case names; None for any other group."""
    use, mark, _ = group.partition(MARK)
    return cast("Pool", use) if mark and use in get_args(Pool) else None


def is_imported(case: Case) -> bool:
    """Whether a case was imported and not drawn."""
    return pool_of(case.group) is not None


def clean(text: str) -> str:
    """Text in one line: control characters become spaces, white space single spaces; invisible characters are dropped.

    A space in place of these would split a word or a date that a reader sees whole. Joined emoji become single ones.
    """
    return " ".join(_CONTROL.sub(" ", _INVISIBLE.sub("", text)).split())


def check_text(text: str, column: str, longest: int = MAX_NARRATIVE_CHARACTERS, but: Collection[str] = ()) -> None:
    """Raise Unclear for text without a letter or digit, or with more than `longest` characters, half a character, a
    mark of a chat template, or an apparent identifier of any kind except those in `but`."""
    if not any(map(str.isalnum, text)):  # ___ stands for removed text
        raise Unclear(column, "is empty")
    if len(text) > longest:
        raise Unclear(column, f"is longer than {longest:,} characters")
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise Unclear(column, "holds half a character")
    if holds_mark(text):
        raise Unclear(column, "holds a mark of a chat template")
    for kind, shape in _IDENTIFIERS:
        if kind not in but and finds(shape, text):
            raise Unclear(column, f"holds what looks like a {kind}")


def finds(shape: re.Pattern[str], text: str) -> bool:
    """Whether a pattern is found in a text, or in its copy with compatible characters and dashes made plain."""
    plain = text if text.isascii() else unicodedata.normalize("NFKC", text).translate(DASHES)
    return bool(shape.search(text) or shape.search(plain))


def normalise(text: str) -> str:
    """The words of a text in lower case: equal for two copies of one narrative, however their accents are written."""
    return " ".join(_WORD.findall(unicodedata.normalize("NFC", text).casefold()))


def plain_text(facts: Mapping[str, Any]) -> str:
    """The narrative of a case: its facts that are plain texts, in the order of their names; lists are left out."""
    return " ".join(facts[name] for name in sorted(facts) if isinstance(facts[name], str))


def fingerprint(narrative: str) -> bytes:
    """Eight bytes that equal narratives share, whatever their case, spaces and punctuation."""
    return hashlib.blake2b(normalise(narrative).encode(), digest_size=8).digest()


def check_apart(training: Iterable[tuple[str, Iterable[Case]]], exam: str, cases: Iterable[Case]) -> None:
    """Raise DataError if an exam shares a patient or a narrative with training or mine data, given by name.

    Drawn cases are in pools that share no template, so only imported ones are compared.
    """
    asked = {mark for case in filter(is_imported, cases) for mark in _marks(case.group, dict(case.facts))}
    for name, others in training if asked else ():
        shared = sum(not asked.isdisjoint(_marks(case.group, dict(case.facts))) for case in filter(is_imported, others))
        if shared:
            raise DataError(
                f"{paths.cases(name)} and {exam} share patients or narratives ({shared:,} rows); name the source of "
                f"the one under `without` of the other's import, or use other data"
            )


def redact(task: Task, case: Case, line: Graded) -> Graded:
    """A graded answer as it is stored: for an imported case the answer line alone, since the rest may quote the case.

    An answer that spans lines is stored as the task's own constant policy writes it, so that it can be read again.
    """
    if not is_imported(case):
        return line
    turns = tuple(
        turn.model_copy(update={"content": _answer_line(task, case, turn.content, line.answer), "thinking": None})
        for turn in line.transcript.messages
        if turn.role == "assistant"
    )
    return line.model_copy(update={"transcript": Transcript(messages=turns, stop=line.transcript.stop)})


def _answer_line(task: Task, case: Case, content: str, answer: Any) -> str:
    if isinstance(answer, Unreadable):  # the text that made it unreadable may quote the narrative
        return ""
    for line in map(str.strip, content.splitlines()):
        if task.parse(transcript_of(Message(role="assistant", content=line))) == answer:
            return line
    constant = task.policies().get(f"always_{answer}")
    return last_turn(constant(case, Random(0))).content if constant else ""
