"""`python -m clinrl` is `clinrl` with the interpreter that runs it."""

import gc
import sys
from io import TextIOWrapper

from clinrl.cli.main import main


def program() -> int:
    """The command line as a process: its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may not have every character
    code = main()
    gc.freeze()  # else Python's end looks through all that was imported, for a second where MLflow was
    return code


if __name__ == "__main__":
    sys.exit(program())
