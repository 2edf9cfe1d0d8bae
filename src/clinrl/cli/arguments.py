"""What a subcommand consists of, and the arguments that several of them take."""

import argparse
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

MAX_DIGITS = 18
"""Digits of a number that is read; int() refuses thousands."""
LAST_PORT = 65535


class Argument(NamedTuple):
    """An argument of a command as argparse takes it. Its destination is the parameter of the function."""

    flags: tuple[str, ...]
    settings: Mapping[str, Any]


def arg(*flags: str, **settings: Any) -> Argument:
    """An argument, written as for `add_argument`."""
    return Argument(flags, settings)


@dataclass(frozen=True, kw_only=True)
class Command:
    """A subcommand. Its function gets the arguments by keyword, and returns an exit code or None for 0."""

    help: str
    """One line for `clinrl --help`."""
    description: str
    examples: str
    runs: str = ""
    """`module:function` below clinrl, imported when the command runs; empty for a command that is a stage alone."""
    stage: str = ""
    """The module of a stage of dvc.yaml. Its inputs are held against dvc.lock, and what it made is signed."""
    arguments: tuple[Argument, ...] = ()
    one_of: tuple[Argument, ...] = ()
    """Arguments of which exactly one is given."""
    actions: Mapping[str, tuple[str, tuple[Argument, ...]]] = field(default_factory=dict)
    """Subcommands of the command: what each does, and its arguments."""
    takes: tuple[str, ...] = ("params",)
    """What the function gets besides: `params`, checked; `source`, the path that they are read from."""
    also: str = ""
    """Other words that people use for it, for the sentence after a typing error."""


def stage(module: str, name: Argument, *, help: str, description: str, examples: str, also: str = "") -> Command:
    """A command that runs a stage of dvc.yaml: the function `stage` of a module takes the parameters and a name."""
    return Command(help=help, description=description, examples=examples, stage=module, arguments=(name,), also=also)


JSON = arg("--json", dest="as_json", action="store_true", help="JSON instead of a table")


def name(kind: str, text: str = "") -> Argument:
    """The argument that names something of params.yaml. The kind decides what it is checked against."""
    return arg("name", metavar=kind, help=text or f"a {kind.lower()} of params.yaml")


def natural(least: int, most: int | None = None) -> Callable[[str], int]:
    """A parser of whole numbers from `least` up, or to `most`. It raises ArgumentTypeError for anything else."""

    def parse(text: str) -> int:
        is_number = text.isdecimal() and len(text) <= MAX_DIGITS
        if not is_number or not least <= int(text) <= (most or int(text)):
            ends = "up" if most is None else f"to {most}"
            raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a whole number from {least} {ends}")
        return int(text)

    return parse


def share(text: str) -> float:
    """A share of cases, above 0 and below 1. Raises ArgumentTypeError for anything else."""
    with suppress(ValueError):
        if 0 < float(text) < 1:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a share above 0 and below 1")


def folder(text: str) -> Path:
    """A folder, or where one can be made. Raises ArgumentTypeError below or at what is no folder."""
    for place in (Path(text), *Path(text).parents):
        if os.path.exists(place) and not os.path.isdir(place):  # as Path's, but false where a name is too long
            raise argparse.ArgumentTypeError(f"{str(place)[:80]!r} is no folder")
    return Path(text)


def file(text: str) -> Path:
    """A file, or where one can be made. Raises ArgumentTypeError for a folder, and below what is no folder."""
    if os.path.isdir(text or "."):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is a folder; name a file")
    folder(os.path.dirname(text))
    return Path(text)


def value(flag: str, parse: Callable[[str], Any], text: str, default: Any = None, **settings: Any) -> Argument:
    """An option that takes a number or a share; its help ends with its default, if it has one."""
    says = text if default is None else f"{text}; default: {default}"
    return arg(flag, type=parse, metavar="SHARE" if parse is share else "N", default=default, help=says, **settings)
