"""A task's environment served to OpenEnv clients, which train or examine models of their own on it."""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Final

from clinrl.errors import ParamsError, Refused, did_you_mean
from clinrl.tasks.base import task_names

EXAM_IS_OPEN: Final = "whoever trains on cases of the pool exam can show nothing by an exam any more"
INSTALL: Final = "install it with `pip install --no-deps --require-hashes -r constraints.txt`"


def names() -> list[str]:
    """The tasks whose environment can be served."""
    return [name for name in task_names() if find_spec(f"clinrl.tasks.{name}.served") is not None]


SPARE_CONNECTIONS: Final = 32
"""How many connections beyond the sessions are answered; one more gets 503."""
MESSAGE_BYTES: Final = 64 * 1024
"""The longest message of a session."""


def stage(name: str, *, host: str, port: int, sessions: int, open_exam: bool = False) -> None:
    """Serve until interrupted; the first line of the output is the address. Port 0: any free one.

    `open_exam`: whether cases of the pool `exam` are served too.

    Raises ParamsError for a task without one, Refused where OpenEnv is not installed or the address cannot be had.
    """
    if name not in names():
        raise ParamsError(f"{name!r} is no task whose environment can be served; {did_you_mean(name, names())}")
    try:
        server = import_module(f"clinrl.tasks.{name}.served.server")
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] != "openenv":
            raise
        raise Refused(f"OpenEnv is not installed; {INSTALL}") from None
    import uvicorn

    from clinrl.runtime.guard import address_of, listen

    with listen(host, port) as listening:
        print(address_of(listening), flush=True)
        if open_exam:
            print(f"clinrl: THE EXAM IS OPEN: {EXAM_IS_OPEN}", file=sys.stderr, flush=True)
        config = uvicorn.Config(
            server.application(sessions, names=[host], open_exam=open_exam),
            log_level="warning",
            ws_max_size=MESSAGE_BYTES,
            limit_concurrency=sessions + SPARE_CONNECTIONS,
        )
        uvicorn.Server(config).run(sockets=[listening])
