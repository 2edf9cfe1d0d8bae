"""Reads YAML files that somebody else may have written, and checks their size before it builds any value.

A few lines of YAML can expand to gigabytes, so the parser's events are counted first, which builds nothing. DVC uses
the same parser for its templates.
"""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent, ScalarEvent

from clinrl.errors import ParamsError, format_value

MAX_KIB = 256
MAX_DEPTH = 40
MAX_VALUES = 15_000
"""The most keys and values in a file, where each alias counts as everything it stands for."""
MAX_TEXT = 2_000
MAX_NUMBER = 50
OPEN = 0
"""The size of a collection that has not ended yet; any other is 1 or more."""

HIDDEN = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff"
    "\ufff9-\ufffb\U000e0000-\U000e007f]"
)
"""Characters that are invisible, end a line invisibly, or reverse the direction of the following text."""
CONFLICT = re.compile(r"^(?:<{7} |={7}$|>{7} )", re.MULTILINE)
"""The lines that git writes into a file which two branches changed. No mapping has a line that begins so."""
_NUMBER = re.compile(r"[-+]?(?:0[xob][\da-fA-F_]+|[\d_.]+(?:[eE][-+]?\d+)?)")


def read_yaml(path: Path) -> Any:
    """The content of a YAML 1.2 file within the limits. Raises ParamsError with line and column.

    Repeated keys or anchors, tags, hidden characters, marks of a conflict of git, and an alias inside its own anchor
    are errors too.
    """
    text = _text(path)
    if found := HIDDEN.search(text) or CONFLICT.search(text):
        conflict = "a mark of a conflict of git; keep one side and delete the marks"
        line = text.count("\n", 0, found.start()) + 1
        raise ParamsError(f"{path}: line {line}: {_hidden(found) if found.re is HIDDEN else conflict}")
    try:
        _measure(text)
        return YAML(typ="safe").load(text)
    except ParamsError as error:
        raise ParamsError(f"{path}: {error}") from None
    except MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" line {mark.line + 1}, column {mark.column + 1}:" if mark else ""
        raise ParamsError(f"{path}:{place} {' '.join(str(error.problem).split())[:200]}") from None
    except (YAMLError, ValueError) as error:  # the latter for a date that does not exist, for example
        raise ParamsError(f"{path} is not YAML: {' '.join(str(error).split())[:200]}") from None


def _text(path: Path) -> str:
    named = str(path) if str(path).isprintable() and len(str(path)) <= 300 else format_value(str(path))
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_KIB * 1024 + 1)
        if len(content) > MAX_KIB * 1024:
            raise ParamsError(f"{named} is larger than {MAX_KIB} KiB, the most that is read; take out what is old")
        return content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except FileNotFoundError:
        raise ParamsError(f"{named} does not exist; start in the project's root, or name the file: --params") from None
    except IsADirectoryError:
        raise ParamsError(f"{named} is a folder; --params names a YAML file") from None
    except UnicodeDecodeError as error:
        raise ParamsError(f"{named} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except ValueError as error:  # a path that no file can have
        raise ParamsError(f"{named} is no path: {error}") from None
    except OSError as error:
        raise ParamsError(f"{named} cannot be read: {error.strerror}") from None


def _measure(text: str) -> None:
    """Refuse text whose values would be too many, too deep or too long. Raises ParamsError without the path."""
    values, sizes, within = 0, dict[str | None, int](), list[tuple[str | None, int]]()
    for event in YAML(typ="safe").parse(text):
        at = f"line {event.start_mark.line + 1}:" if event.start_mark else "at its end"
        if isinstance(event, CollectionEndEvent):
            anchor, before = within.pop()
            sizes[anchor] = values - before
        elif isinstance(event, AliasEvent):
            if sizes.get(event.anchor) == OPEN:
                raise ParamsError(f"{at} *{event.anchor} stands within &{event.anchor} itself; write out what is meant")
            values += sizes.get(event.anchor, 1)
        elif isinstance(event, ScalarEvent | CollectionStartEvent):
            _check_value(at, event, sizes)
            if isinstance(event, CollectionStartEvent):
                within.append((event.anchor, values))
            if len(within) > MAX_DEPTH:
                raise ParamsError(f"{at} is more than {MAX_DEPTH} levels deep; nothing here needs as many")
            sizes[event.anchor] = OPEN if isinstance(event, CollectionStartEvent) else 1
            values += 1
        if values > MAX_VALUES:
            raise ParamsError(f"{at} holds more than {MAX_VALUES:,} keys and values, aliases written out; use fewer")


def _check_value(at: str, event: ScalarEvent | CollectionStartEvent, anchors: Collection[str | None]) -> None:
    if event.tag:
        raise ParamsError(f"{at} has the tag {event.tag[:60]!r}; write the value without a tag")
    if event.anchor and event.anchor in anchors:
        raise ParamsError(f"{at} &{event.anchor} is there twice; give each anchor a name of its own")
    if not isinstance(event, ScalarEvent):
        return
    value: str = event.value
    if len(value) > MAX_TEXT:
        raise ParamsError(f"{at} has a text of {len(value):,} characters; the longest allowed has {MAX_TEXT:,}")
    if len(value) > MAX_NUMBER and event.implicit[0] and _NUMBER.fullmatch(value):
        raise ParamsError(f"{at} has a number of {len(value):,} characters; the longest allowed has {MAX_NUMBER}")
    if found := HIDDEN.search(value):  # written as an escape: the text itself was searched
        raise ParamsError(f"{at} {_hidden(found)}")


def _hidden(found: re.Match[str]) -> str:
    return f"U+{ord(found[0]):04X} does not show, or turns the direction of text; take it out"
