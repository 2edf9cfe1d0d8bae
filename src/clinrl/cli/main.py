"""The command line: parse the arguments, load params.yaml, call the command. `commands` holds the table of commands.

Exit codes: 0 done; 1 refused (data, proofs, artefacts, gates, the registry, a full disk); 2 the command or params.yaml
is wrong; 3 training ended without an adapter; 4 an alert ended it; 75 another command is writing the same artefact;
130 interrupted; 141 the reader of the output closed the pipe.
Any other error is a bug and shows its traceback.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from traceback import extract_tb
from typing import Any

from clinrl.cli.commands import COMMANDS
from clinrl.cli.parser import parser
from clinrl.errors import ParamsError, Refused, with_exit_code
from clinrl.runtime import determinism, starter


@with_exit_code
def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. argparse itself exits: 0 after help, 2 after a usage error."""
    determinism.pin()
    words = list(sys.argv[1:] if argv is None else argv)
    if words.count("--") > 1:  # argparse would pass a list where the command takes one argument
        parser().error("-- may be given once")
    arguments = vars(parser().parse_args(words))
    starter.follow()
    try:
        Path.cwd()
    except FileNotFoundError:
        raise Refused("the folder in which this was started is deleted; start it in another") from None
    try:
        return _run(arguments)
    except ModuleNotFoundError as error:
        if find_spec(library := str(error.name).partition(".")[0]):  # the library is installed: this is a bug
            raise
        install = "`pip install 'WHEEL[pipeline]'` with the wheel's file, or `make .venv/.installed` in a checkout"
        file = [frame.filename for frame in extract_tb(error.__traceback__) if not frame.filename.startswith("<")][-1]
        raise Refused(f"{library}, which {file} imports, is not installed; run {install}") from None


def _run(arguments: dict[str, Any]) -> int:
    """Call the command's function with the arguments that it takes. Heavy modules are imported here, not before."""
    name, source = arguments.pop("command"), arguments.pop("params")
    command, given = COMMANDS[name], {}
    runs, full_name = command.runs, name
    if action := arguments.get("action"):
        full_name = f"{name} {action}"
        if own := command.actions[action].runs:
            runs = own
            del arguments["action"]
    if not command.takes and source != Path("params.yaml"):
        raise ParamsError(f"`clinrl {name}` reads no file of --params; leave it out")
    if "source" in command.takes:
        given["source"] = source
    if "params" in command.takes:
        from clinrl.cli.names import check_name
        from clinrl.config.params import load_params

        given["params"] = load_params(source)
        # `compare` accepts names of several kinds, and checks them itself.
        if arguments.get("name") is not None and name != "compare":
            check_name(given["params"], arguments["name"], full_name)
    if not runs:
        from clinrl.cli.stage_commands import make

        make(given["params"], source, name, arguments["name"])
        return 0
    module, _, function = runs.partition(":")
    code: int | None = getattr(import_module(f"clinrl.{module}"), function)(**given, **arguments)
    return code or 0
