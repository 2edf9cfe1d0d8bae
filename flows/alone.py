"""What one process at a time may do in this project: a flow of a task without a server, and starting a server.

Flows that share a server wait for each other there. Each flow that is started on its own has a server to itself, so the
second of a task is told who is at work. The kernel drops a lock with its process: a killed one blocks nobody.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from clinrl import paths
from clinrl.errors import Busy


@contextmanager
def at_work(task: str, flow: str) -> Iterator[None]:
    """Hold the right to work on a task until the block ends. Raises Busy, naming who has it, if another process has."""
    paths.locks().mkdir(parents=True, exist_ok=True)
    with (paths.locks() / f"flow-{task}.lock").open("a+", encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.seek(0)
            holder = stream.read().strip() or "another flow"
            raise Busy(
                f"{holder} is at work on {task} here; wait for it to end and give the same command again: it continues"
            ) from None
        stream.truncate(0)
        stream.write(f"{flow} (process {os.getpid()}, since {time.strftime('%Y-%m-%d %H:%M')})")
        stream.flush()
        yield


@contextmanager
def starting() -> Iterator[None]:
    """Wait until no other process of this project starts a server: two cannot make one database at once."""
    paths.locks().mkdir(parents=True, exist_ok=True)
    with (paths.locks() / "servers.lock").open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
