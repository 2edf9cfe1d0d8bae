"""The argparse parser of the command line, made from the table of subcommands. It suggests names for misspelt ones."""

import argparse
import sys
import textwrap
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from clinrl import __version__
from clinrl.cli.arguments import Argument, Command
from clinrl.cli.commands import COMMANDS, GROUPS
from clinrl.errors import nearest

WIDTH = 79
EPILOG = """examples:
  clinrl try
  clinrl plan
  clinrl dataset esi-d3 && clinrl validate esi-d3
  clinrl train --help

exit codes: 0 done; 1 refused; 2 the command or params.yaml is wrong;
3 training ended without an adapter; 4 an alert ended it; 75 busy: another
command writes the same artefact; 130 interrupted; 141 nobody read on.

Commands run in the project's root. `dvc repro` runs what is out of date, in
order."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that keeps line breaks in its texts and suggests a subcommand or option for a misspelt one."""

    def __init__(self, also: Mapping[str, Collection[str]] | None = None, **settings: Any) -> None:
        """`also` maps a subcommand to its synonyms."""
        settings |= {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
        super().__init__(**settings)
        self.also = also or {}

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = [] if action.choices is None else [str(choice) for choice in action.choices]
        if action.choices is None or value in action.choices:
            return
        word = str(value).lower()
        meant = [name for name, words in self.also.items() if word in words]
        near = word if word in choices else " or ".join(meant) or nearest(str(value), choices)
        hint = f"did you mean {near}? " if near else ""
        raise argparse.ArgumentError(action, f"{value[:80]!r} is not one; {hint}{self._allowed(choices)}")

    def _allowed(self, choices: Collection[str]) -> str:
        return f"allowed: {', '.join(choices)}" if len(choices) < 8 else f"`{self.prog} --help` lists what there is"

    def error(self, message: str) -> NoReturn:
        """End with a usage error. If a subcommand or an action is missing, the message lists those that are allowed."""
        for action in self._actions:
            if isinstance(action.choices, Mapping) and message.endswith(f"required: {action.metavar}"):
                message += f"; {self._allowed(action.choices)}"
        super().error(message)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print help so that a full disk or a closed pipe ends the command: argparse ignores an error of `write`."""
        if file is sys.stdout:
            print(message, end="")
        else:
            super()._print_message(message, file)

    def _match_arguments_partial(self, actions: Any, arg_strings_pattern: str) -> list[int]:
        """Leave an optional positional before an option to what follows the option, as later Pythons do."""
        counts: list[int] = super()._match_arguments_partial(actions, arg_strings_pattern)
        if arg_strings_pattern[(end := sum(counts)) : end + 1] == "O":
            while counts and not counts[-1]:
                counts.pop()
        return counts

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse as argparse does, but end with a usage error for unrecognized arguments, with the nearest option."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            near = next(filter(None, (nearest(word, self._option_string_actions) for word in rest)), "")
            self.error(f"unrecognized arguments: {' '.join(rest)}" + (f"; did you mean {near}?" if near else ""))
        return found, rest


def parser(shown: str = argparse.SUPPRESS) -> Parser:
    """The parser of the whole command line. For a shell's completion, `shown` makes argparse list the subcommands."""
    # Each subcommand accepts --params too; without a default there, it does not overwrite one given before the name.
    shared = Parser(add_help=False)
    shared.add_argument("--params", type=Path, metavar="PATH", default=argparse.SUPPRESS, help="default: params.yaml")
    hidden = shown == argparse.SUPPRESS  # a completion script cuts a description after its first line
    top = Parser(
        prog="clinrl",
        usage="clinrl [-h] [--version] [--params PATH] COMMAND ...",
        description="Trains, evaluates and verifies LoRA adapters for clinical reasoning.\nResearch only.",
        epilog=EPILOG,
        also={name: command.also.split() for name, command in COMMANDS.items()},
    )
    top.add_argument("--version", action="version", version=f"clinrl {__version__}")
    top.add_argument("--params", type=Path, metavar="PATH", default=Path("params.yaml"), help="default: params.yaml")
    commands = top.add_subparsers(
        dest="command", metavar="COMMAND", required=True, prog="clinrl", parser_class=Parser,
        title="commands", description=_listing(), help=shown,
    )  # fmt: skip
    for name, command in COMMANDS.items():
        add_command(commands, name, command if hidden else replace(command, description=command.help), parents=[shared])
    return top


def add_command(commands: Any, name: str, command: Command, **settings: Any) -> None:
    """Add a command to the subcommands of a parser. `settings` are those of `add_parser`."""
    subparser = commands.add_parser(
        name,
        help=command.help,
        description=textwrap.fill(command.description, WIDTH, break_on_hyphens=False),
        epilog=f"examples:\n{textwrap.indent(command.examples, '  ')}",
        **settings,
    )
    _add(subparser, command.arguments)
    if command.one_of:
        _add(subparser.add_mutually_exclusive_group(required=True), command.one_of)
    if command.actions:
        actions = subparser.add_subparsers(dest="action", metavar="ACTION", required=True)
        for action, (does, arguments, _) in command.actions.items():
            _add(
                actions.add_parser(action, help=does, description=does, parents=settings.get("parents", ())), arguments
            )


def complete(shell: str) -> None:
    """Print the script with which a shell completes subcommands, options and their choices."""
    import shtab

    print(shtab.complete(parser(shown="a command"), shell))


def _add(place: "argparse._ActionsContainer", arguments: Iterable[Argument]) -> None:
    for flags, settings in arguments:
        place.add_argument(*flags, **settings)


def _listing() -> str:
    """One line for each command, by group."""
    lines: list[str] = []
    for group, commands in GROUPS.items():
        lines += [f"{group}:", *(f"  {name:<11} {command.help}" for name, command in commands.items())]
    return "\n".join(lines)
