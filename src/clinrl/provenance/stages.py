"""The stages of dvc.yaml by their addresses: the command of each, and the code of the first.

DVC passes a command to a shell, so no command of dvc.yaml contains a name: each is `clinrl stage "$DVC_STAGE"`, and
the name is read from the address that DVC puts into that variable.
"""

from clinrl.config.base import is_name
from clinrl.config.params import Params
from clinrl.errors import ParamsError, did_you_mean, format_value

STAGES = ("dataset", "validate", "probe", "train", "evaluate")
"""The stages of a version, in their order."""
FIRST = "params"
"""The stage that all others depend on: it checks params.yaml."""

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
    "resit": ("resit", "{}"),
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
"""Group of dvc.yaml to the subcommand of `clinrl`, and to the pattern of the name that the subcommand takes."""


def command_of(address: str) -> tuple[str, str]:
    """The subcommand and the name of an address such as `train@esi-v46`.

    Raises ParamsError for a group that dvc.yaml does not have, or an invalid name.
    """
    own = address.rpartition("dvc.yaml:")[2]  # DVC's prefix of an address if DVC is started in another folder
    group, _, name = own.partition("@")
    if group not in COMMANDS:
        groups = did_you_mean(group, [FIRST, *COMMANDS])
        raise ParamsError(
            f"{format_value(address)} is no stage of dvc.yaml, such as train@esi-v46; of its groups, {groups}"
        )
    if not is_name(name):
        raise ParamsError(f"{format_value(address)} names no stage; a stage is GROUP@NAME, such as train@esi-v46")
    command, pattern = COMMANDS[group]
    return command, pattern.format(name)


def addresses(command: str, name: str) -> list[str]:
    """The possible addresses in dvc.yaml of a subcommand and a name."""
    groups = [(group, pattern) for group, (known, pattern) in COMMANDS.items() if known == command]
    return [f"{group}@{name.removesuffix(pattern[2:])}" for group, pattern in groups if name.endswith(pattern[2:])]


def addresses_of(params: Params, name: str) -> dict[str, str]:
    """The DVC address of each stage that a version, merge, rival or base needs, in their order. Raises KeyError."""
    if name in params.versions:
        made, validated = params.data_stages(params.versions[name].data)
        return {"dataset": made, "validate": validated} | {stage: f"{stage}@{name}" for stage in STAGES[2:]}
    if name in params.merges.all:
        kind = "fold" if name in params.merges.folds else "blend"
        return {"merge": f"{kind}@{name}", "evaluate": params.model(name).stage}
    if name in params.rivals:
        return {"evaluate": f"rival@{name}"}
    return {"base": f"base@{params.roots[name]}", "evaluate": params.model(name).stage}
