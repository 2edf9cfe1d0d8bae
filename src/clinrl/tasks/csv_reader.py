"""CSV files as they come from elsewhere: compressed, with a damaged byte-order mark, or in an older encoding.

What is certain is put right without a word; what is not is refused with file and line. A file is read row by row, so
memory does not grow with it. No refusal quotes a value: the rows may be about real people.
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
from typing import BinaryIO, TextIO, cast

from clinrl.errors import DataError
from clinrl.tasks.importing import WHOLE, Row, Unclear

_MARK = "\ufeff".encode()
MARKS = (_MARK.decode("cp1252").encode().decode("cp1252").encode(), _MARK.decode("cp1252").encode(), _MARK)
"""A byte-order mark encoded three times, twice and once: what programs that take UTF-8 for cp1252 leave behind."""

MAX_CELL_CHARACTERS = 1 << 20
"""Characters. The csv module's own limit is below what the abstracts of one record can take."""


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

        Raises DataError for a quote that is not closed, or closed in the middle of a cell.
        """
        csv.field_size_limit(MAX_CELL_CHARACTERS)
        with reading(self.path), _text(self.path, self._mark, self.encoding) as stream:
            reader = csv.reader(stream, strict=True)
            before = 0
            try:
                next(reader, None)
                before = reader.line_num
                for cells in reader:
                    if cells:
                        yield before + 1, cells
                    before = reader.line_num
            except csv.Error as error:
                raise DataError(f"{self.path} line {before + 1}: {error}; repair the quotes of that record") from None


def open_table(path: Path) -> Table:
    """Find out the encoding and the header of a CSV file, plain or .gz, reading it once.

    A byte-order mark is dropped, however often it was encoded; where one stood, a first column "ubject_id" is
    subject_id, whose first letter it ate. Raises DataError if the file is missing, no text, or in two encodings.
    """
    with reading(path), opened(path) as raw:
        mark, encoding, lines = _scanned(path, raw)
    with reading(path), _text(path, mark, encoding) as stream:
        try:
            header = next(csv.reader(stream, strict=True), [])
        except csv.Error as error:
            raise DataError(f"{path} line 1: {error}; its first line must be a header") from None
    columns = ["_".join(cell.lower().split()) for cell in header]
    if mark and columns[:1] == ["ubject_id"]:
        columns[0] = "subject_id"
    twice = sorted(name for name, count in Counter(columns).items() if count > 1)
    if twice:
        raise DataError(f"{path} has two columns of the same name (columns {_numbers(columns, twice[0])}); keep one")
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


def _scanned(path: Path, raw: BinaryIO) -> tuple[int, str, int]:
    """Length of the byte-order mark, encoding, and number of lines.

    cp1252 (which holds Latin-1) is believed only if no line at all is UTF-8 beyond ASCII: single lines prove nothing.
    """
    utf8 = other = mark = number = 0
    for number, line in enumerate(raw, 1):
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


def _numbers(columns: Sequence[str], name: str) -> str:
    return ", ".join(str(number) for number, column in enumerate(columns, 1) if column == name)
