"""params.yaml as text: a block is put in or taken out, and every other byte stays where it is.

People write comments and align columns in params.yaml; a YAML library that writes the file anew would lose both. Only
the place of a block is looked up in the parsed file.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from clinrl.errors import ParamsError

PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_/-]*")
WORDS = frozenset(word for base in ("null", "true", "false") for word in (base, base.capitalize(), base.upper()))
"""Words that YAML does not take for text."""
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
    if not held:  # `mining: {}`, maybe with a comment, which stays in its column
        lines[start] = lines[start].replace(" {}", "   ", 1).rstrip() + f"\n{new}"
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
        key, _, rest = lines[head].partition(":")
        lines[head] = f"{key}: {{}}{rest.removeprefix('   ')}"
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
    """A value in YAML on one line. JSON is YAML, and what a plain word may be is decided here, on the safe side:
    ruamel.yaml leaves some words bare in braces that it cannot read again.
    """
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_braces(key)}: {_braces(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_braces, value))}]"
    if isinstance(value, str) and PLAIN.fullmatch(value) and value not in WORDS:
        return value
    return json.dumps(value, ensure_ascii=not str(value).isprintable(), allow_nan=False)
