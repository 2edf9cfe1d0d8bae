"""The names of params.yaml that a command accepts, and the error message for any other name."""

from collections.abc import Mapping

from clinrl.cli.commands import COMMANDS
from clinrl.config.params import Params
from clinrl.errors import ParamsError, did_you_mean, format_value, nearest

FURTHER_KINDS = {
    "evaluate": ("MERGE", "BASE", "RIVAL"),
    **dict.fromkeys(("show", "protocol", "compare", "params", "doctor", "export inspect"), ("BASE",)),
}
"""Kinds of name that a command accepts besides the kind in its usage."""


def names(params: Params, kind: str) -> Mapping[str, str]:
    """Every name of a kind, with its task."""
    versions = {name: spec.task for name, spec in params.versions.items()}
    merges = {name: merge.task for name, merge in params.merges.all.items()}
    return {
        "TASK": {task: task for task in params.bases},
        "BASE": params.roots,
        "DATASET": {name: spec.task for name, spec in params.all_data.items()},
        "VERSION": versions,
        "MERGE": merges,
        "NAME": {**versions, **merges},
        "RIVAL": {name: spec.task for name, spec in params.rivals.items()},
        "COMPARISON": {name: spec.task for name, spec in params.comparisons.items()},
        "MODEL": {model: task for task in params.bases for model in (task, f"{task}-merged")},
    }[kind]


def check_name(params: Params, name: str, command: str, *, kind: str = "", task: str = "") -> str:
    """The task of a name that a command accepts. `kind` is the kind in the command's usage unless it is given.

    Raises ParamsError for any other name. The message suggests names of `task`, or of the task that the name begins
    with if there is one; for an alias such as esi@champion it names the command that looks the alias up.
    """
    word, _, action = command.partition(" ")
    described = COMMANDS[word].actions[action] if action else COMMANDS[word]
    kind = kind or described.arguments[0].settings["metavar"]
    kinds = [kind, *(FURTHER_KINDS.get(command, ()) if kind != "COMPARISON" else ())]
    accepted = {name: task for each in kinds for name, task in names(params, each).items()}
    if name in accepted:
        return accepted[name]
    model, mark, alias = name.removeprefix("models:/").replace("/", "@").partition("@")
    if mark and alias and model in names(params, "MODEL"):
        alias = nearest(alias, ("champion", "candidate", "previous")) or alias
        hint = f"to say what an alias stands for: `clinrl lookup {model} {alias}`"
    else:
        task = task or next((task for task in params.bases if f"{name}-".startswith(f"{task}-")), "")
        hint = did_you_mean(name, [other for other, of in accepted.items() if task in ("", of)])
    raise ParamsError(f"{format_value(name)} is no {kind.lower()} that `clinrl {command}` knows; {hint}")
