"""Read files of records as JSON, JSON Lines or CSV: each record is a mapping, with the line on which it begins.

In a JSON list, which may be all on one line, a record has its number in place of a line. The content of a file decides
how it is read, not its name. JSON Lines and CSV are streamed; a JSON file is held in memory. A file whose name ends in
.gz is decompressed. No error quotes a value.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from clinrl.errors import DataError
from clinrl.tasks.csv_reader import MAX_ROW_BYTES, open_bytes, open_table, without_mark
from clinrl.tasks.importing import WHOLE, Fields, Row, Unclear

MAX_JSON_BYTES: Final = 128 << 20
"""The most bytes of a JSON file, decompressed; a longer one has to be JSON Lines, which is streamed.

Parsed, a file of this size takes 0.4 GiB if it holds requests with abstracts, and 3.2 GiB if it is all empty objects.
"""

TWICE: Final = object()
"""Stands for a JSON object that names a field twice: it is uncertain which value is meant."""


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


def recognise(path: Path) -> Records:
    """The records of a file. Raises DataError if the file is missing or damaged."""
    with open_bytes(path) as raw:
        first = without_mark(raw.readline(MAX_ROW_BYTES))
        while first and not first.strip():
            first = raw.readline(MAX_ROW_BYTES)
        is_alone = not any(line.strip() for line in iter(lambda: raw.readline(MAX_ROW_BYTES), b""))
    opening = first.lstrip()[:1]
    if opening not in (b"{", b"["):
        table = open_table(path)
        return Records(path, table.columns, table.lines, table.rows)
    record = _line(first)
    if record is TWICE or (len(first) == MAX_ROW_BYTES and opening == b"{"):  # that line alone may be at fault
        record = next((row for _, row in _lines(path) if isinstance(row, Mapping)), record)
    # A record that is alone, and has a list of objects, is one object with a list of records.
    if isinstance(record, Mapping) and not (is_alone and any(map(_objects, record.values()))):
        return Records(path, tuple(record), _count(path), lambda: _lines(path))
    found = _listed(path)
    columns = next((tuple(row) for row in found if isinstance(row, Mapping)), ())
    return Records(path, columns, len(found), lambda: enumerate(map(_fields, _listed(path)), 1))


def _objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, Mapping) or one is TWICE for one in value)


# JSON Lines


def _lines(path: Path) -> Iterator[Row]:
    with open_bytes(path) as raw:
        number = 0
        while line := raw.readline(MAX_ROW_BYTES):
            number += 1
            if len(line) == MAX_ROW_BYTES and not line.endswith(b"\n"):
                while (rest := raw.readline(MAX_ROW_BYTES)) and not rest.endswith(b"\n"):
                    pass
                yield number, Unclear(WHOLE, f"is longer than {MAX_ROW_BYTES:,} bytes")
                continue
            line = without_mark(line) if number == 1 else line
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
    with open_bytes(path) as raw:
        return 1 + sum(block.count(b"\n") for block in iter(lambda: raw.read(1 << 20), b""))


# JSON


def _listed(path: Path) -> list[Any]:
    """The records of a JSON file: all of it, or the one list in its object. Raises DataError if it is broken."""
    try:
        value = parse_json(_text(path))
    except json.JSONDecodeError as error:
        raise _fault(f"{path} line {error.lineno}, column {error.colno}, is broken JSON") from None
    except ValueError:
        raise _fault(f"{path} holds a value that cannot be read") from None
    if value is TWICE:
        raise _fault(f"{path} is an object that names a field twice")
    lists = [value] if isinstance(value, list) else [item for item in value.values() if isinstance(item, list)]
    if len(lists) != 1:
        raise _fault(f"{path} is an object with {len(lists)} lists, not one list of records")
    return lists[0]


def _fault(what: str) -> DataError:
    return DataError(f"{what}; save it again as JSON, or one record a line")


def _text(path: Path) -> str:
    with open_bytes(path) as raw:
        data = raw.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise DataError(
            f"{path} is longer than {MAX_JSON_BYTES >> 20} MiB; save it as JSON Lines, one record a line, which may "
            "have any length"
        )
    data = without_mark(data)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path} line {line} is not UTF-8 text; save all of it as UTF-8") from None
