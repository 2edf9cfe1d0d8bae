"""`python -m clinrl` is `clinrl` with the interpreter that runs it."""

import gc
import sys

from clinrl.cli.main import main


def program() -> int:
    """The command line as a process: its exit code."""
    code = main()
    gc.freeze()  # else Python's end looks through all that was imported, for a second where MLflow was
    return code


if __name__ == "__main__":
    sys.exit(program())
