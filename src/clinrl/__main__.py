"""Run `clinrl` as `python -m clinrl`, with an interpreter of one's choice."""

import gc
import sys
from io import TextIOWrapper


def program() -> int:
    """Run the command line as a process of its own, and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # the terminal's encoding may lack a character
    try:
        from clinrl.cli.main import main  # here: an interrupt while its modules are read is no fault
    except KeyboardInterrupt:
        print("clinrl: interrupted; give the same command again", file=sys.stderr)
        return 130
    code = main()
    gc.freeze()  # else the interpreter scans all imported objects at exit: a second with MLflow
    return code


if __name__ == "__main__":
    sys.exit(program())
