"""params.yaml as text: a block is put in or taken out, and every other byte stays where it is.

People write comments and align columns in params.yaml; a YAML library that writes the file anew would lose both. Only
the place of a block is looked up in the parsed file.
"""

from collections.abc import Mapping
from io import StringIO
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from clinrl.errors import ParamsError

WIDTH = 132
"""Columns of the longest line that is written in braces; what is longer gets a line for each key."""


def entry(name: str, content: Any, depth: int = 1) -> str:
    """An entry of a section in the manner of params.yaml, ending in a line break: in braces where a line holds it."""
    head = f"{'  ' * depth}{name}:"
    braced = f"{head} {_braces(content)}\n"
    if len(braced) <= WIDTH + 1 or not isinstance(content, Mapping):
        return braced
    return f"{head}\n" + "".join(entry(str(key), value, depth + 1) for key, value in content.items())


def insert(text: str, section: str, new: str) -> str:
    """The text with a new entry, as `entry` writes it, at the end of a section. A section may be empty or absent.

    Raises ParamsError if the section is written in braces, where no line can be added.
    """
    found = _parsed(text)
    if section not in found:
        return f"{text.rstrip(chr(10))}\n\n{section}:\n{new}"
    lines = text.splitlines(keepends=True)
    held = found[section]
    start = found.lc.key(section)[0]
    if not held:  # `mining: {}`, maybe with a comment
        head, colon, rest = lines[start].partition(":")
        comment = rest[rest.index("#") :].rstrip("\n") if "#" in rest else ""
        lines[start] = f"{head}{colon}{' ' * 17 * bool(comment)}{comment}\n{new}"
        return "".join(lines)
    if held.fa.flow_style():
        raise ParamsError(f"{section} is written in braces; give each of its entries a line of its own, then try again")
    end = _end(lines, list(held.lc.data.values())[-1][0])
    if not lines[end - 1].endswith("\n"):
        lines[end - 1] += "\n"
    return "".join([*lines[:end], new, *lines[end:]])


def remove(text: str, section: str, name: str) -> str:
    """The text without an entry of a section; the same text if there is no such entry."""
    found = _parsed(text)
    if name not in (found.get(section) or {}):
        return text
    lines = text.splitlines(keepends=True)
    start = found[section].lc.key(name)[0]
    end = _end(lines, start)
    if len(found[section]) == 1:
        head = found.lc.key(section)[0]
        lines[head] = lines[head].replace(":", ": {}", 1)
    return "".join(lines[:start] + lines[end:])


def _end(lines: list[str], start: int) -> int:
    """The line after the last one of the entry that starts at a line: the next that is not indented more deeply."""
    depth = _indent(lines[start])
    end = start + 1
    while end < len(lines) and lines[end].strip() and _indent(lines[end]) > depth:
        end += 1
    return end


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _parsed(text: str) -> CommentedMap:
    found = YAML().load(text)
    if not isinstance(found, CommentedMap):
        raise ParamsError("params.yaml holds no mapping")
    return found


def _braces(value: Any) -> str:
    """A value as YAML writes it on one line."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = True
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # declared as None
    yaml.width = 1 << 16
    stream = StringIO()
    yaml.dump({"_": value}, stream)
    return stream.getvalue().strip().removeprefix("{_: ").removesuffix("}")
