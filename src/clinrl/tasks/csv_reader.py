"""Read CSV files of other programs: compressed, with a damaged byte-order mark, or in an older encoding.

Certain repairs are made silently; anything uncertain is refused with file and line. A file is read row by row and the
length of a row is limited, so memory does not grow with the file. No refusal quotes a value: the rows may be about real
people.
"""

import csv
import gzip
import io
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, TextIO, cast

from clinrl.errors import DataError
from clinrl.tasks.importing import WHOLE, Row, Unclear

_MARK = "\ufeff".encode()
MARKS = (_MARK.decode("cp1252").encode().decode("cp1252").encode(), _MARK.decode("cp1252").encode(), _MARK)
"""A byte-order mark encoded three times, twice and once: programs that read UTF-8 as cp1252 write such marks."""

MAX_ROW_BYTES: Final = 1 << 20
"""The most bytes of a line, and the most characters of a record with its quoted line ends. Longer ones are refused
unread, so that no file can fill the memory. The csv module's own limit is too low for the abstracts of one record."""

_NO_CP1252: Final = re.compile(rb"[\x81\x8d\x8f\x90\x9d]|[a-z][\x82-\x84\x87-\x8b\x8e\x98\x9b\x9f][a-z]")
"""A byte that cp1252 does not have, or between two letters a sign or a capital: some vowels of Mac Roman or DOS."""


@dataclass(frozen=True)
class Table:
    """A CSV file whose encoding is known and whose header was read."""

    path: Path
    encoding: str
    columns: tuple[str, ...]
    """Names in lower case, with underscores for spaces."""
    lines: int
    """The number of physical lines, an upper bound on the records: a cell may hold line ends."""
    _mark: int

    def require(self, names: Sequence[str]) -> None:
        """Raise DataError with the names of all missing columns, if any."""
        missing = [name for name in names if name not in self.columns]
        if missing:
            raise DataError(
                f"{self.path} lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}; "
                "give the file as it was published, with its header and separated by commas"
            )

    def rows(self) -> Iterator[Row]:
        """Yield every record after the header, with its cells by column; skip lines without cells.

        Raises DataError for a quote that is not closed, or closed in the middle of a cell, and for a record that is
        longer than MAX_ROW_BYTES.
        """
        with open_bytes(self.path) as raw, _text(raw, self._mark, self.encoding) as stream:
            records = _records(self.path, stream, "repair the quotes of that record")
            next(records, None)
            for line, cells in records:
                if cells and len(cells) != len(self.columns):
                    yield line, Unclear(WHOLE, "has another number of cells than the header")
                elif cells:
                    yield line, dict(zip(self.columns, cells, strict=True))


def open_table(path: Path) -> Table:
    """Scan a CSV file, plain or .gz, for its encoding, and read its header.

    A byte-order mark is dropped, however often it was encoded. A damaged mark takes the first letter of the header with
    it, so "ubject_id" after a mark is subject_id. Raises DataError if the file is missing, no text, in two encodings,
    or has a line that is longer than MAX_ROW_BYTES.
    """
    with open_bytes(path) as raw, _text(raw, 0, "latin-1") as stream:  # a character a byte; line ends as csv sees them
        mark, encoding, lines = _scan(path, stream)
    with open_bytes(path) as raw, _text(raw, mark, encoding) as stream:
        _, header = next(_records(path, stream, "its first line must be a header"), (1, []))
    columns = ["_".join(cell.lower().split()) for cell in header]
    if mark and columns[:1] == ["ubject_id"]:
        columns[0] = "subject_id"
    twice = sorted(name for name, count in Counter(columns).items() if name and count > 1)
    if twice:
        places = ", ".join(str(number) for number, column in enumerate(columns, 1) if column == twice[0])
        raise DataError(f"{path} has two columns of the same name (columns {places}); keep one")
    return Table(path, encoding, tuple(columns), lines, mark)


def locate(folder: Path, name: str) -> Path | None:
    """The file `name`, plain or .gz, in a folder or its subfolders ed/ and hosp/; None if it is in none of them.

    Raises DataError for several, which may be of different age.
    """
    places = [place / f"{name}{end}" for place in (folder, folder / "ed", folder / "hosp") for end in ("", ".gz")]
    found = [path for path in places if path.is_file()]
    if len(found) > 1:
        raise DataError(f"{folder} holds {' and '.join(map(str, found))}; keep one")
    return found[0] if found else None


@contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """A stream of a file's bytes, decompressed if its name ends in .gz. An error of reading it becomes a DataError."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as stream:
            yield cast("BinaryIO", stream)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; name the file or folder as it lies on this machine") from None
    except (IsADirectoryError, PermissionError) as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); name a file that you may read") from None
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise DataError(f"{path} is not a whole gzip file; fetch it again") from None


def without_mark(line: bytes) -> bytes:
    """A file's first line without its byte-order mark, however often that was encoded."""
    while found := next((mark for mark in MARKS if line.startswith(mark)), b""):
        line = line[len(found) :]
    return line


def _text(raw: BinaryIO, mark: int, encoding: str) -> TextIO:
    """A stream of the text after the byte-order mark, with unchanged line ends."""
    raw.read(mark)
    return io.TextIOWrapper(raw, encoding, newline="")


def _records(path: Path, stream: TextIO, advice: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the line on which each record begins, and its cells, header included.

    Raises DataError, whose message ends in `advice`. A record with an unclosed quote may run to the end of the file.
    """
    csv.field_size_limit(MAX_ROW_BYTES)
    before = 0

    def lines() -> Iterator[str]:
        size = 0
        for number, line in enumerate(stream, 1):
            size = len(line) if number == before + 1 else size + len(line)
            if size > MAX_ROW_BYTES:
                raise csv.Error(f"record longer than {MAX_ROW_BYTES:,} characters")
            yield line

    reader = csv.reader(lines(), strict=True)
    try:
        for cells in reader:
            yield before + 1, cells
            before = reader.line_num
    except csv.Error as error:
        raise DataError(f"{path} line {before + 1}: {error}; {advice}") from None


def _scan(path: Path, stream: TextIO) -> tuple[int, str, int]:
    """The length of the byte-order mark, the encoding and the number of lines, from a stream of one character a byte.

    The encoding is cp1252 (which holds Latin-1) only if no line is UTF-8 beyond ASCII: a single line proves nothing.
    Raises DataError for a line that is too long or is no text, and for lines in two encodings.
    """
    utf8 = other = mark = number = 0
    while text := stream.readline(MAX_ROW_BYTES + 1):
        number, line = number + 1, text.encode("latin-1")
        if len(line) > MAX_ROW_BYTES:
            raise DataError(
                f"{path} line {number} is longer than {MAX_ROW_BYTES:,} bytes; save it as CSV with one record a line"
            )
        if number == 1:
            bare = without_mark(line)
            line, mark = bare, len(line) - len(bare)
        if b"\0" in line:
            raise DataError(f"{path} line {number} holds a zero byte, so it is no CSV text; save it as UTF-8")
        if line.isascii():
            continue
        try:
            line.decode("utf-8")
            utf8 = utf8 or number
        except UnicodeDecodeError:
            other = other or number
            if _NO_CP1252.search(line):
                raise DataError(f"{path} line {number} is neither UTF-8 nor cp1252 text; save it as UTF-8") from None
    if utf8 and other:
        raise DataError(
            f"{path} is in two encodings: line {utf8} is UTF-8 and line {other} is not; save all of it as UTF-8"
        )
    return mark, "cp1252" if other else "utf-8", number
