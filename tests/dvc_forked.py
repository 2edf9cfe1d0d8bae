"""DVC in a fork of the test's process, which imports it once: a new process takes half a second to."""

import importlib
import os
import sys
import tempfile
import warnings
from pathlib import Path

NEEDED = (
    *("networkx", "dvc.cli.parser", "dvc.cachemgr", "dvc.lock", "dvc.rwlock", "dvc.utils.strictyaml"),
    *(f"dvc.repo.{part}" for part in ("init", "graph", "index", "reproduce", "status", "trie")),
)
"""What DVC imports not before a command needs it."""


def dvc(*arguments: str, where: Path | None = None, code: int = 0, **environment: str) -> str:
    """What `dvc` prints with these arguments, in a folder. Fails unless it ends with this code."""
    from dvc import logger
    from dvc.cli import main

    for name in NEEDED:
        importlib.import_module(name)
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as complained:
        child = os.fork()
        if child == 0:
            try:
                os.dup2(said.fileno(), 1)
                os.dup2(complained.fileno(), 2)
                sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
                logger.setup()  # or it would write where this process wrote when it imported DVC
                warnings.simplefilter("ignore")
                os.chdir(where or Path())
                os.environ.update(environment)
                ended = main(list(arguments))
                sys.stdout.flush()
                os._exit(ended)
            finally:
                os._exit(70)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        complained.seek(0)
        assert ended == code, complained.read()
        return said.read()
