"""The table of the subcommands, in the groups in which `--help` lists them.

Only the standard library is imported for it: `clinrl --help` answers in a tenth of a second.
"""

from collections.abc import Mapping

from clinrl.cli.arguments import Command
from clinrl.cli.build import DATA, EVALUATE, TRAIN
from clinrl.cli.operate import INSPECT, RELEASE, SETUP

GROUPS: Mapping[str, Mapping[str, Command]] = {
    "data": DATA, "train": TRAIN, "evaluate": EVALUATE, "release": RELEASE, "inspect": INSPECT, "setup": SETUP,
}  # fmt: skip
"""The groups in the order of the work, and so are the commands of each."""
COMMANDS: Mapping[str, Command] = {name: command for group in GROUPS.values() for name, command in group.items()}
