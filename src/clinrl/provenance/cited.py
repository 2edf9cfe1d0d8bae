"""Values of artefacts for a document: each is looked up by key, recorded, and shown with a mark of its source file."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from clinrl.artifacts import md5, sha256_file
from clinrl.config.plain_yaml import read_yaml
from clinrl.errors import ArtefactError
from clinrl.provenance import lock
from clinrl.reports.numbers import decimal
from clinrl.types import Estimate, Strict

NOT_DONE = "not done"
NOT_HERE = "not here; `dvc repro` builds it, `dvc pull` brings it from a remote"
"""The text in place of a value whose file dvc.lock records and this machine lacks."""
DIGITS = 4
"""Decimal places of an estimate and its interval."""
MARK = re.compile(r"(?<!\\)\[(S\d+)\]")
"""The mark behind a value: the number of its source file. `plain` escapes the bracket in other text."""

Place = tuple[str, ...]
"""A file, and the keys that lead to a value in it."""


class Value(Strict):
    """A value that a document states, and the place that it was read from."""

    file: str
    key: str
    """JSON pointer (RFC 6901)."""
    value: Any


class Record(Strict):
    """All values that a document states, and their files."""

    name: str
    files: dict[str, str]
    """SHA-256 of each source file, in the order of the marks."""
    values: tuple[Value, ...]


class Cited:
    """Looks values up in artefacts and records which values a document states from which file."""

    def __init__(self, recorded: lock.Lock) -> None:
        """`recorded` is dvc.lock, empty if there is none: it tells an absent file from one that was never made."""
        self._outputs = lock.outputs(recorded)
        self._contents: dict[str, Any] = {str(lock.LOCK): _with_text_keys({"stages": recorded})}
        self._files: dict[str, str] = {}
        self._values: dict[tuple[str, str], Any] = {}
        self.absent: set[str] = set()
        """Files that the document calls not here."""

    def look(self, file: str, *keys: str) -> Any:
        """A value, not recorded as stated; None if the file or the key is missing.

        Raises ArtefactError for a file that cannot be read.
        """
        found = self._content(file)
        for key in keys:
            if isinstance(found, list):
                found = dict(zip(map(str, range(len(found))), found, strict=True))
            found = found.get(key) if isinstance(found, Mapping) else None
        return found

    def names(self, file: str, *keys: str) -> list[str]:
        """The keys below a place: a mapping's keys, or a list's indices; none if there is neither."""
        found = self.look(file, *keys)
        if isinstance(found, list):
            return [str(place) for place in range(len(found))]
        return list(found) if isinstance(found, Mapping) else []

    def at(self, file: str, *keys: str) -> Any:
        """A value, recorded as stated; None if there is none."""
        value = self.look(file, *keys)
        if value is not None:
            self._number(file)
            self._values |= {(file, pointer((*keys, *below))): leaf for below, leaf in leaves(value)}
        return value

    def show(self, file: str, *keys: str) -> str:
        """A value as Markdown with the mark of its source, or the reason why there is none."""
        value = self.at(file, *keys)
        return self._why_absent(file) if value is None else f"{as_text(value)} [S{self._number(file)}]"

    def word(self, file: str, *keys: str) -> str:
        """A name or another word as Markdown, stated without a mark: the mark of the number beside it covers both."""
        value = self.at(file, *keys)
        return self._why_absent(file) if value is None else as_text(value)

    def line(self, files: Mapping[str, str], last: Sequence[str], *keys: str) -> list[str]:
        """A table cell for each last key and each file; the cells of one key are adjacent."""
        return [self.show(file, *keys, key) for key in last for file in files.values()]

    def state(self, file: str) -> str:
        """Whether a file is here, as Markdown with the mark of the file."""
        return f"here [S{self._number(file)}]" if Path(file).exists() else self._why_absent(file)

    def record(self, name: str) -> Record:
        """All values stated so far."""
        values = tuple(Value(file=file, key=key, value=value) for (file, key), value in self._values.items())
        return Record(name=name, files=dict(self._files), values=values)

    def check(self, pairs: Iterator[tuple[Place, Place]]) -> None:
        """Refuse a pair of places with different values, and a stated file that differs from dvc.lock, itself or the
        folder around it.

        Raises ArtefactError naming files, keys and values.
        """
        for one, other in pairs:
            first, second = self.look(*one), self.look(*other)
            if None not in (first, second) and first != second:
                raise ArtefactError(
                    f"{one[0]} says {first!r} at {pointer(one[1:])}, but {other[0]} says {second!r} at "
                    f"{pointer(other[1:])}; restore both from git or with `dvc checkout`, or run `dvc repro`"
                )
        made = {out for file in self._files for out in self._made_at(file)}
        for out in sorted(made):
            if md5(Path(out)) != self._outputs[out]:
                raise ArtefactError(
                    f"{out} is not what dvc.lock records; restore it with `git checkout {out}` or `dvc checkout "
                    f"{out}`, or run `dvc repro`"
                )

    def _content(self, file: str) -> Any:
        if file not in self._contents:
            path, read = Path(file), _READERS[Path(file).suffix]
            try:
                self._contents[file] = _with_text_keys(read(path)) if path.exists() else None
            except ValueError as error:
                raise ArtefactError(f"{file} is not what its name says: {error}; restore it from git") from None
        return self._contents[file]

    def _number(self, file: str) -> int:
        if file not in self._files:
            self._files[file] = sha256_file(Path(file))
        return list(self._files).index(file) + 1

    def _why_absent(self, file: str) -> str:
        if not self._made_at(file) or Path(file).exists():
            return NOT_DONE
        self.absent.add(file)
        return NOT_HERE

    def _made_at(self, file: str) -> set[str]:
        """The output of dvc.lock that a file is, or the one that it lies in."""
        return {file, *map(str, Path(file).parents)} & self._outputs.keys()


def leaves(value: Any) -> Iterator[tuple[Place, Any]]:
    """Every plain value in a structure, with the keys that lead to it. An empty mapping or list counts as one."""
    if not value or not isinstance(value, list | Mapping):
        yield (), value
        return
    for key, inner in enumerate(value) if isinstance(value, list) else value.items():
        for keys, leaf in leaves(inner):
            yield (str(key), *keys), leaf


def pointer(keys: Sequence[str]) -> str:
    """Keys as a JSON pointer (RFC 6901)."""
    return "".join(f"/{key.replace('~', '~0').replace('/', '~1')}" for key in keys)


def as_text(value: Any) -> str:
    """A value as one line of Markdown, with its text escaped; an estimate has its interval and n."""
    if isinstance(value, Mapping):
        with suppress(ValidationError):
            estimate = Estimate.model_validate(value)
            return f"{decimal(estimate, DIGITS)}, n {estimate.n}"
        return ", ".join(f"{plain(str(key))}: {_inner(held)}" for key, held in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(_inner, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value):
        return f"`{value}`"
    return f"{value:g}" if isinstance(value, float) else plain(str(value))


def _inner(value: Any) -> str:
    return f"({as_text(value)})" if isinstance(value, Mapping) else as_text(value)


def plain(text: str) -> str:
    """Text as one line of Markdown, with every character of markup escaped."""
    escaped = re.sub(r"([\\`*\[\]<>&]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", " ".join(text.split()))
    return escaped.replace("|", "&#124;") or "none"


def _with_text_keys(value: Any) -> Any:
    """The value with all keys as text, as JSON has them: YAML reads some labels as numbers."""
    if isinstance(value, Mapping):
        return {str(key): _with_text_keys(held) for key, held in value.items()}
    return [_with_text_keys(held) for held in value] if isinstance(value, list) else value


_READERS: Mapping[str, Callable[[Path], Any]] = {
    ".json": lambda path: json.loads(path.read_bytes()),
    # A line without its end was cut short by a kill, and nothing counts it.
    ".jsonl": lambda path: [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]],
    ".yaml": read_yaml,
}
