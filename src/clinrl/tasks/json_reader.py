"""Read files of records as JSON, JSON Lines or CSV: each record is a mapping, with the line on which it begins.

The content of a file decides how it is read, not its name. JSON Lines and CSV are streamed; a JSON file is held in
memory as text and parsed record by record. A file whose name ends in .gz is decompressed. No error quotes a value.
"""

import json
import re
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from clinrl.errors import DataError
from clinrl.tasks.csv_reader import MARKS, MAX_ROW_BYTES, open_bytes, open_table, reading
from clinrl.tasks.importing import WHOLE, Fields, Row, Unclear

MAX_JSON_BYTES: Final = 128 << 20
"""The most bytes of a JSON file, decompressed; a longer one has to be JSON Lines, which is streamed."""

TWICE: Final = object()
"""Stands for a JSON object that names a field twice: it is uncertain which value is meant."""

_SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True)
class Records:
    """A file whose form is known and whose first record, or header, was read."""

    path: Path
    columns: tuple[str, ...]
    """Names of the fields of the first record, or those in the header."""
    lines: int
    """An upper bound on the number of records."""
    rows: Callable[[], Iterator[Row]]
    """Yields every record; each call begins anew."""


def _object(pairs: list[tuple[str, Any]]) -> Any:
    found = dict(pairs)
    return found if len(found) == len(pairs) else TWICE


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def parse_json(text: str) -> Any:
    """A JSON value; an object that names a field twice is `TWICE`. Raises ValueError, also for one nested too deep."""
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError("too deep") from None


def recognise(path: Path, wanted: Callable[[tuple[str, ...]], bool]) -> Records | None:
    """The records of a file; None if `wanted` is false of the names of their fields.

    Raises DataError if the file is missing or damaged.
    """
    with reading(path), open_bytes(path) as raw:
        first = _without_mark(raw.readline(MAX_ROW_BYTES))
        while first and not first.strip():
            first = raw.readline(MAX_ROW_BYTES)
    opening = first.lstrip()[:1]
    if opening not in (b"{", b"["):
        table = open_table(path)
        return Records(path, table.columns, table.lines, table.rows) if wanted(table.columns) else None
    record = _line(first)
    if record is TWICE or (len(first) == MAX_ROW_BYTES and opening == b"{"):  # that line alone may be at fault
        record = next((row for _, row in _lines(path) if isinstance(row, Mapping)), record)
    if isinstance(record, Mapping) and not any(
        isinstance(value, list) and _objects(value) for value in record.values()
    ):
        columns = tuple(record)
        return Records(path, columns, _count(path), lambda: _lines(path)) if wanted(columns) else None
    start, columns, count = _survey(path)
    return Records(path, columns, count, lambda: _elements(path, start)) if wanted(columns) else None


def _objects(values: list[Any]) -> bool:
    return bool(values) and all(isinstance(value, Mapping) or value is TWICE for value in values)


# JSON Lines


def _lines(path: Path) -> Iterator[Row]:
    with reading(path), open_bytes(path) as raw:
        number = 0
        while line := raw.readline(MAX_ROW_BYTES):
            number += 1
            if len(line) == MAX_ROW_BYTES and not line.endswith(b"\n"):
                while (rest := raw.readline(MAX_ROW_BYTES)) and not rest.endswith(b"\n"):
                    pass
                yield number, Unclear(WHOLE, f"is longer than {MAX_ROW_BYTES:,} bytes")
                continue
            line = _without_mark(line) if number == 1 else line
            if line.strip():
                yield number, _fields(_line(line))


def _line(line: bytes) -> Any:
    """The JSON value of a line, or Unclear if the line has none."""
    try:
        return parse_json(line.decode("utf-8"))
    except UnicodeDecodeError:
        return Unclear(WHOLE, "is not UTF-8 text")
    except ValueError:
        return Unclear(WHOLE, "is no JSON")


def _fields(value: Any) -> Fields | Unclear:
    if isinstance(value, Mapping | Unclear):
        return value
    return Unclear(WHOLE, "names a field twice" if value is TWICE else "is no JSON object")


def _count(path: Path) -> int:
    with reading(path), open_bytes(path) as raw:
        return 1 + sum(block.count(b"\n") for block in iter(lambda: raw.read(1 << 20), b""))


def _without_mark(line: bytes) -> bytes:
    while found := next((mark for mark in MARKS if line.startswith(mark)), b""):
        line = line[len(found) :]
    return line


# JSON


def _survey(path: Path) -> tuple[int, tuple[str, ...], int]:
    """The position of the list of records, the names of the first record's fields, and the number of records.

    Raises DataError for broken JSON, wherever it breaks.
    """
    text = _text(path)
    start = _list_in(path, text)
    columns: tuple[str, ...] = ()
    count = 0
    for _, record in _values(path, text, start):
        count += 1
        if not columns and isinstance(record, Mapping):
            columns = tuple(record)
    return start, columns, count


def _elements(path: Path, start: int) -> Iterator[Row]:
    text = _text(path)
    line, last = 1, 0
    for at, value in _values(path, text, start):
        line += text.count("\n", last, at)
        last = at
        yield line, _fields(value)


def _text(path: Path) -> str:
    with reading(path), open_bytes(path) as raw:
        data = raw.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise DataError(
            f"{path} is longer than {MAX_JSON_BYTES >> 20} MiB; save it as JSON Lines, one record a line, which may "
            "have any length"
        )
    data = _without_mark(data)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path} line {line} is not UTF-8 text; save all of it as UTF-8") from None


def _list_in(path: Path, text: str) -> int:
    """The position of the list of records: the whole text, or the one list in an object. Checks the text to its end."""
    start = at = _skip(text, 0)
    found = []
    if text[at : at + 1] == "[":
        found, at = [at], _end(_values(path, text, at))
    else:
        at = _skip(text, at + 1)
        while text[at : at + 1] == '"':
            _, at = _decode(path, text, at)
            at = _expect(path, text, at, ":")
            if text[at : at + 1] == "[":
                found.append(at)
                at = _end(_values(path, text, at))
            else:
                _, at = _decode(path, text, at)
            at = _skip(text, at)
            if text[at : at + 1] == ",":
                at = _skip(text, at + 1)
        at = _expect(path, text, at, "}")
    if _skip(text, at) != len(text):
        raise _fault(path, text, _skip(text, at), "goes on after its end")
    if len(found) != 1:
        raise _fault(path, text, start, f"begins an object with {len(found)} lists, not one list of records")
    return found[0]


def _values(path: Path, text: str, at: int) -> Generator[tuple[int, Any], None, int]:
    """Yield each value of the list that begins at `at`, with its position; return the end of the list."""
    at = _skip(text, at + 1)
    if text[at : at + 1] == "]":
        return at + 1
    while True:
        value, end = _decode(path, text, at)
        yield at, value
        at = _skip(text, end)
        if text[at : at + 1] == "]":
            return at + 1
        at = _expect(path, text, at, ",")


def _end(values: Generator[tuple[int, Any], None, int]) -> int:
    while True:
        try:
            next(values)
        except StopIteration as done:
            return int(done.value)


def _decode(path: Path, text: str, at: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        raise _fault(path, text, error.pos, "is broken JSON") from None
    except (ValueError, RecursionError):
        raise _fault(path, text, at, "begins a value that cannot be read") from None


def _expect(path: Path, text: str, at: int, mark: str) -> int:
    """The position after a mark and the white space around it. Raises DataError if the mark is missing."""
    at = _skip(text, at)
    if text[at : at + 1] != mark:
        raise _fault(path, text, at, "is broken JSON")
    return _skip(text, at + 1)


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _fault(path: Path, text: str, at: int, what: str) -> DataError:
    line, column = text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)
    return DataError(f"{path} line {line}, column {column}, {what}; save it again as JSON, or one record a line")
