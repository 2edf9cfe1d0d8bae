"""The parts of a subcommand, and the arguments that several subcommands share."""

import argparse
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

MAX_DIGITS = 18
"""Most digits of a number argument. `int` itself refuses only a few thousand."""
LAST_PORT = 65535


class Argument(NamedTuple):
    """One argument of a command, for argparse's `add_argument`. Its `dest` is a parameter of the command's function."""

    flags: tuple[str, ...]
    settings: Mapping[str, Any]


class Action(NamedTuple):
    """A subcommand of a command."""

    help: str
    arguments: tuple[Argument, ...]
    runs: str = ""
    """As of a command, without the word for the action; empty: the command's function runs it, which takes the word."""


def arg(*flags: str, **settings: Any) -> Argument:
    """An argument from the flags and settings of `add_argument`."""
    return Argument(flags, settings)


@dataclass(frozen=True, kw_only=True)
class Command:
    """A subcommand. Its function takes the arguments by keyword and returns an exit code, or None for 0."""

    help: str
    """One line for `clinrl --help`."""
    description: str
    examples: str
    runs: str = ""
    """`module:function` below clinrl, imported when the command runs; empty if a stage or its actions run instead."""
    stage: str = ""
    """The module of a stage of dvc.yaml: its function `stage` takes params and a name. The inputs are compared with
    dvc.lock, and the outputs are signed."""
    arguments: tuple[Argument, ...] = ()
    one_of: tuple[Argument, ...] = ()
    """Arguments of which the user must give exactly one."""
    actions: Mapping[str, Action] = field(default_factory=dict)
    """By name."""
    takes: tuple[str, ...] = ("params",)
    """What the function takes besides the arguments: `params`, checked; `source`, the path that they are read from."""
    also: str = ""
    """Synonyms, separated by spaces. The error message for a synonym suggests this command."""


JSON = arg("--json", dest="as_json", action="store_true", help="JSON instead of a table")


def name(kind: str, text: str = "") -> Argument:
    """The argument for a name from params.yaml. `kind` selects the names that are accepted (`names.names`)."""
    return arg("name", metavar=kind, help=text or f"a {kind.lower()} of params.yaml")


def natural(least: int, most: int | None = None) -> Callable[[str], int]:
    """A parser of whole numbers from `least` to `most`, or without an upper limit.

    The parser raises ArgumentTypeError for anything else.
    """

    def parse(text: str) -> int:
        is_number = text.isdecimal() and len(text) <= MAX_DIGITS
        if not is_number or not least <= int(text) <= (most or int(text)):
            ends = "up" if most is None else f"to {most}"
            raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a whole number from {least} {ends}")
        return int(text)

    return parse


def share(text: str) -> float:
    """Parse a share of cases, above 0 and below 1. Raises ArgumentTypeError for anything else."""
    with suppress(ValueError):
        if 0 < float(text) < 1:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a share above 0 and below 1")


def folder(text: str) -> Path:
    """Parse the path of a folder, which need not exist. Raises ArgumentTypeError for a file or below one."""
    for place in (Path(text), *Path(text).parents):
        # Path.exists would raise for a name that is too long.
        if os.path.exists(place) and not os.path.isdir(place):
            raise argparse.ArgumentTypeError(f"{str(place)[:80]!r} is no folder")
    return Path(text)


def file(text: str) -> Path:
    """Parse the path of a file, which need not exist. Raises ArgumentTypeError for a folder or below another file."""
    if os.path.isdir(text or "."):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is a folder; name a file")
    folder(os.path.dirname(text))
    return Path(text)


def value(flag: str, parse: Callable[[str], Any], text: str, default: Any = None, **settings: Any) -> Argument:
    """An option that takes a number or a share; its help ends with its default, if it has one."""
    help = text if default is None else f"{text}; default: {default}"
    return arg(flag, type=parse, metavar="SHARE" if parse is share else "N", default=default, help=help, **settings)
