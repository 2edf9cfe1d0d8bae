"""The table of the subcommands, in the groups in which `--help` lists them.

It imports only the standard library, so that `clinrl --help` answers in a tenth of a second.
"""

from collections.abc import Mapping

from clinrl.cli.arguments import Command
from clinrl.cli.build import DATA, EVALUATE, TRAIN
from clinrl.cli.operate import INSPECT, RELEASE, SETUP

GROUPS: Mapping[str, Mapping[str, Command]] = {
    "data": DATA, "train": TRAIN, "evaluate": EVALUATE, "release": RELEASE, "inspect": INSPECT, "setup": SETUP,
}  # fmt: skip
"""The groups, and the commands within each, in the order of the work."""
COMMANDS: Mapping[str, Command] = {name: command for group in GROUPS.values() for name, command in group.items()}
