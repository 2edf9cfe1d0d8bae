"""CSV files as they come from elsewhere: compressed, with a damaged byte-order mark, or in an older encoding.

What is certain is put right without a word; what is not is refused with file and line. A file is read row by row and
no row may be long, so memory does not grow with it. No refusal quotes a value: the rows may be about real people.
"""

import csv
import gzip
import io
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
"""A byte-order mark encoded three times, twice and once: what programs that take UTF-8 for cp1252 leave behind."""

MAX_ROW_BYTES: Final = 1 << 20
"""Bytes of a line, and characters of a record with its quoted line ends. What is beyond it is refused unread, so that
no file can fill the memory. The csv module's own limit is below what the abstracts of one record can take."""


@dataclass(frozen=True)
class Table:
    """A CSV file whose encoding is known and whose header was read."""

    path: Path
    encoding: str
    columns: tuple[str, ...]
    """Names in lower case, with underscores for spaces."""
    lines: int
    """Physical lines: at least the number of records, since a cell may hold line ends."""
    _mark: int

    def require(self, names: Sequence[str]) -> None:
        """Raise DataError naming all columns that are missing."""
        missing = [name for name in names if name not in self.columns]
        if missing:
            raise DataError(
                f"{self.path} lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}; "
                "give the file as it was published, with its header and separated by commas"
            )

    def rows(self) -> Iterator[Row]:
        """Every record after the header, with its cells by column."""
        for line, cells in self.cells():
            if len(cells) == len(self.columns):
                yield line, dict(zip(self.columns, cells, strict=True))
            else:
                yield line, Unclear(WHOLE, "has another number of cells than the header")

    def cells(self) -> Iterator[tuple[int, list[str]]]:
        """The line on which each record begins, and as many cells as it has; lines without any cell are no records.

        Raises DataError for a quote that is not closed, or closed in the middle of a cell, and for a record that is
        longer than MAX_ROW_BYTES.
        """
        with reading(self.path), _text(self.path, self._mark, self.encoding) as stream:
            records = _records(self.path, stream, "repair the quotes of that record")
            next(records, None)
            for line, cells in records:
                if cells:
                    yield line, cells


def open_table(path: Path) -> Table:
    """Find out the encoding and the header of a CSV file, plain or .gz, reading it once.

    A byte-order mark is dropped, however often it was encoded; where one stood, a first column "ubject_id" is
    subject_id, whose first letter it ate. Raises DataError if the file is missing, no text, in two encodings, or has a
    line that is longer than MAX_ROW_BYTES.
    """
    with reading(path), _text(path, 0, "latin-1") as stream:  # a character for each byte, and lines end as for csv
        mark, encoding, lines = _scanned(path, stream)
    with reading(path), _text(path, mark, encoding) as stream:
        _, header = next(_records(path, stream, "its first line must be a header"), (1, []))
    columns = ["_".join(cell.lower().split()) for cell in header]
    if mark and columns[:1] == ["ubject_id"]:
        columns[0] = "subject_id"
    twice = sorted(name for name, count in Counter(columns).items() if count > 1)
    if twice:
        places = ", ".join(str(number) for number, column in enumerate(columns, 1) if column == twice[0])
        raise DataError(f"{path} has two columns of the same name (columns {places}); keep one")
    return Table(path, encoding, tuple(columns), lines, mark)


def locate(folder: Path, name: str) -> Path | None:
    """`name`, plain or .gz, in a folder or in its ed/ or hosp/; None if it is nowhere."""
    places = [place / f"{name}{end}" for place in (folder, folder / "ed", folder / "hosp") for end in ("", ".gz")]
    return next((path for path in places if path.is_file()), None)


def opened(path: Path) -> BinaryIO:
    """The bytes of a file, decompressed if its name ends in .gz."""
    return cast("BinaryIO", gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns what can go wrong while a file is read into a DataError."""
    try:
        yield
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; name the file or folder as it lies on this machine") from None
    except (IsADirectoryError, PermissionError) as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); name a readable CSV file") from None
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise DataError(f"{path} is not a whole gzip file; fetch it again") from None


def _text(path: Path, mark: int, encoding: str) -> TextIO:
    """The text after the byte-order mark, with line ends as they are."""
    raw = opened(path)
    raw.read(mark)
    return io.TextIOWrapper(raw, encoding, newline="")


def _records(path: Path, stream: TextIO, advice: str) -> Iterator[tuple[int, list[str]]]:
    """The line on which each record begins, the header's too, and its cells. Raises DataError, which ends in `advice`.

    A record of which a quote is never closed may go on to the end of the file, over any number of cells.
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


def _scanned(path: Path, stream: TextIO) -> tuple[int, str, int]:
    """Length of the byte-order mark, encoding, and number of lines, from a stream of one character for each byte.

    cp1252 (which holds Latin-1) is believed only if no line at all is UTF-8 beyond ASCII: single lines prove nothing.
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
            while found := next((form for form in MARKS if line.startswith(form)), b""):
                line, mark = line[len(found) :], mark + len(found)
        if b"\0" in line:
            raise DataError(f"{path} line {number} holds a zero byte, so it is no CSV text; save it as UTF-8")
        if line.isascii():
            continue
        try:
            line.decode("utf-8")
            utf8 = utf8 or number
        except UnicodeDecodeError:
            other = other or number
            try:
                line.decode("cp1252")
            except UnicodeDecodeError:
                raise DataError(f"{path} line {number} is neither UTF-8 nor cp1252 text; save it as UTF-8") from None
    if utf8 and other:
        raise DataError(
            f"{path} is in two encodings: line {utf8} is UTF-8 and line {other} is not; save all of it as UTF-8"
        )
    return mark, "cp1252" if other else "utf-8", number
