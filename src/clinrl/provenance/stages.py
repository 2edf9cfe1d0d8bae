"""The stages of dvc.yaml by their addresses: which command stands behind each, and the first of them.

DVC hands a command to a shell, so no command of dvc.yaml holds a name: each is `clinrl stage "$DVC_STAGE"`, and the
name is read from the address that DVC puts into that variable.
"""

from pathlib import Path

from clinrl import paths
from clinrl.artifacts import write_json
from clinrl.config.base import is_name
from clinrl.config.files import FOLDER, files_with
from clinrl.config.params import Params, load_params
from clinrl.config.plain_yaml import read_yaml
from clinrl.errors import ParamsError, did_you_mean, format_value

STAGES = ("dataset", "validate", "probe", "train", "evaluate")
"""Of a version, in their order."""
FIRST = "params"
"""The stage that all others follow: it proves params.yaml."""

COMMANDS = {
    "base": ("base", "{}"),
    "dataset": ("dataset", "{}"),
    "import": ("dataset", "{}"),
    "validate": ("validate", "{}"),
    "validate-import": ("validate", "{}"),
    "baseline": ("evaluate", "{}-base"),
    "probe": ("probe", "{}"),
    "train": ("train", "{}"),
    "evaluate": ("evaluate", "{}"),
    "mine": ("mine", "{}"),
    "external": ("external", "{}"),
    "protocol-base": ("protocol", "{}"),
    "protocol": ("protocol", "{}"),
    "fold": ("merge", "{}"),
    "blend": ("merge", "{}"),
    "examine-fold": ("evaluate", "{}"),
    "examine-blend": ("evaluate", "{}"),
    "rival": ("evaluate", "{}"),
    "compare": ("compare", "{}"),
}
"""Group of dvc.yaml to the subcommand of `clinrl`, and to what that calls the group's name."""


def command_of(address: str) -> tuple[str, str]:
    """The subcommand and the name that an address such as `train@esi-v46` stands for.

    Raises ParamsError for a group that dvc.yaml has not, or a name that is none.
    """
    own = address.rpartition("dvc.yaml:")[2]  # so DVC begins an address where it is started in another folder
    group, _, name = own.partition("@")
    if group not in COMMANDS:
        groups = did_you_mean(group, [FIRST, *COMMANDS])
        raise ParamsError(
            f"{format_value(address)} is no stage of dvc.yaml, such as train@esi-v46; of its groups, {groups}"
        )
    if not is_name(name):
        raise ParamsError(
            f"{format_value(address)} names {format_value(name)}, which is no name; `clinrl check` says what is wrong"
        )
    command, called = COMMANDS[group]
    return command, called.format(name)


def addresses(command: str, name: str) -> list[str]:
    """The addresses of dvc.yaml that may stand for a subcommand and a name."""
    groups = [(group, called) for group, (known, called) in COMMANDS.items() if known == command]
    return [f"{group}@{name.removesuffix(called[2:])}" for group, called in groups if name.endswith(called[2:])]


def addresses_of(params: Params, name: str) -> dict[str, str]:
    """The DVC address of each stage that a version, merge, rival or base needs, in their order. Raises KeyError."""
    if name in params.versions:
        made, validated = params.data_stages(params.versions[name].data)
        return {"dataset": made, "validate": validated} | {stage: f"{stage}@{name}" for stage in STAGES[2:]}
    if name in params.merges.all:
        kind = "fold" if name in params.merges.folds else "blend"
        return {"merge": f"{kind}@{name}", "evaluate": f"examine-{kind}@{name}"}
    if name in params.rivals:
        return {"evaluate": f"rival@{name}"}
    task = params.roots[name]
    return {"base": f"base@{task}", "evaluate": f"baseline@{task}"}


def check(source: Path) -> None:
    """Refuse parameters that are not sound, or that stand in a file of which DVC knows nothing. Raises ParamsError."""
    load_params(source)
    pipeline = source.parent / "dvc.yaml"
    if pipeline.exists():
        listed = read_yaml(pipeline).get("vars", [])
        for file in files_with(source)[1:]:
            if (name := f"{FOLDER}/{file.name}") not in listed:
                raise ParamsError(f"{name} is not among `vars` in dvc.yaml, so DVC does not see it; list it there")


def prove(source: Path) -> None:
    """Check the parameters, then write the constant that says so.

    What it says never changes, so an edit of params.yaml lets DVC run this again and nothing after it. Raises
    ParamsError.
    """
    check(source)
    write_json(paths.params_proof(), {"params.yaml": "every name and value in it was checked"})
