"""A function in a fork of the test's process: what took seconds to import is there, and nothing it does stays."""

import importlib
import os
import pickle
import select
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

DVC_NEEDS = (
    *("networkx", "dvc.cli.parser", "dvc.cachemgr", "dvc.lock", "dvc.rwlock", "dvc.utils.strictyaml"),
    *(f"dvc.repo.{part}" for part in ("init", "graph", "index", "reproduce", "status", "trie")),
)
"""What DVC imports not before a command needs it."""


class Ended(NamedTuple):
    """How a fork ended."""

    code: int | None
    """Its exit code; minus the signal that killed it; None if it was killed because its time was over."""
    out: str
    err: str
    value: Any = None
    """What the function returned, if it can be pickled and the fork lived to tell."""


def fork(
    function: Callable[[], Any], *, where: Path | None = None, limit_s: float | None = None, **environment: str
) -> Ended:
    """Call a function in a fork, in a folder, with these variables set."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        ours, theirs = os.pipe()
        if (child := os.fork()) == 0:
            code = 1
            try:
                for stream, number in ((out, 1), (err, 2)):
                    os.dup2(stream.fileno(), number)
                sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
                if torch := sys.modules.get("torch"):  # OpenMP's threads did not come along: who waits, waits for ever
                    torch.set_num_threads(1)
                os.chdir(where or Path())
                os.environ.update(environment)
                returned = pickle.dumps(function())
                with os.fdopen(theirs, "wb") as pipe:
                    pipe.write(returned)
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
            except BaseException:  # noqa: BLE001  as a Python that ends with it would print it
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)  # at its usual end it would wait for threads, which did not come along
        os.close(theirs)
        with os.fdopen(ours, "rb") as pipe:
            ended = bool(select.select([pipe], [], [], limit_s)[0])
            if not ended:
                os.kill(child, signal.SIGKILL)
            returned = pipe.read()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        err.seek(0)
        value = pickle.loads(returned) if returned else None  # noqa: S301  our own fork wrote it
        return Ended(code if ended else None, out.read(), err.read(), value)


def dvc(*arguments: str, where: Path | None = None, code: int = 0, **environment: str) -> str:
    """What `dvc` prints with these arguments, in a folder. Fails unless it ends with this code."""
    from dvc import logger
    from dvc.cli import main

    for name in DVC_NEEDS:
        importlib.import_module(name)

    def command() -> None:
        logger.setup()  # or it would write where this process wrote when it imported DVC
        warnings.simplefilter("ignore")
        sys.exit(main(list(arguments)))

    ended = fork(command, where=where, **environment)
    assert ended.code == code, ended.err
    return ended.out
