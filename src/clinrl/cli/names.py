"""The names of params.yaml that a command takes, and the sentence for one that it does not take."""

from collections.abc import Mapping

from clinrl.cli.commands import COMMANDS
from clinrl.config.params import Params
from clinrl.errors import ParamsError, did_you_mean, format_value

BASED = dict.fromkeys(("show", "protocol", "compare", "params", "doctor", "export inspect"), ("BASE",))
BESIDES = {"evaluate": ("MERGE", "BASE", "RIVAL"), **BASED}
"""Kinds that a command takes besides the one that its usage shows."""


def names(params: Params, kind: str) -> Mapping[str, str]:
    """The names of a kind, each with its task."""
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
    """The task of a name that a command takes. `kind` is that of its usage unless another is given.

    Raises ParamsError for another name: with those of `task`, or of the task that the name begins with, where that is
    known, and for an alias such as esi@champion with the command that looks it up.
    """
    kind = kind or COMMANDS[command].arguments[0].settings["metavar"]
    kinds = [kind, *(BESIDES.get(command, ()) if kind != "COMPARISON" else ())]
    taken = {name: task for each in kinds for name, task in names(params, each).items()}
    if name in taken:
        return taken[name]
    model, mark, alias = name.removeprefix("models:/").replace("/", "@").partition("@")
    if mark and alias and model in names(params, "MODEL"):
        hint = f"to say what an alias stands for: `clinrl lookup {model} {alias}`"
    else:
        task = task or next((task for task in params.bases if name.startswith(f"{task}-")), "")
        hint = did_you_mean(name, [other for other, of in taken.items() if task in ("", of)])
    raise ParamsError(f"{format_value(name)} is no {kind.lower()} that `clinrl {command}` knows; {hint}")
