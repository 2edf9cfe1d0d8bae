"""One flow of a task at a time, among those of one checkout that meet on no server."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from clinrl import paths
from clinrl.artifacts import locked
from clinrl.errors import Busy


@contextmanager
def at_work(task: str, flow: str) -> Iterator[None]:
    """Hold the right to work on a task until the block ends. Raises Busy, naming the flow that holds it.

    The kernel drops the lock with its process.
    """
    file = paths.locks() / f"flow-{task}.lock"
    with locked(file, waits=False) as stream:
        if stream is None:
            holder = file.read_text(encoding="utf-8").strip() or "another flow"
            raise Busy(
                f"{holder} is at work on {task} here; wait for it to end and give the same command again: it continues"
            )
        stream.truncate(0)
        stream.write(f"{flow} (process {os.getpid()}, since {time.strftime('%Y-%m-%d %H:%M')})")
        stream.flush()
        yield
