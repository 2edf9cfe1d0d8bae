"""One flow of a task at a time, among those of one checkout that meet on no server."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from clinrl import paths
from clinrl.errors import Busy


@contextmanager
def at_work(task: str, flow: str) -> Iterator[None]:
    """Hold the right to work on a task until the block ends. Raises Busy, naming the flow that holds it.

    The kernel drops the lock with its process.
    """
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
