"""Progress bars for long work, and the time that a thread waits for a processor."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

SCHEDULER = Path("/proc/thread-self/schedstat")
"""This thread's counters on Linux: nanoseconds on a processor, nanoseconds in the queue for one, number of turns."""


@contextmanager
def progress(title: str, rows: int, *, shown: bool = True) -> Iterator[Callable[..., None]]:
    """Show a progress bar on stderr if that is a terminal; yield a function that advances it by rows."""
    if not shown or not sys.stderr.isatty():
        yield lambda _rows=1: None
        return
    with progress_bar() as bar:
        yield partial(bar.advance, bar.add_task(title, total=rows))


def progress_bar(*texts: str) -> Any:
    """A bar on stderr that is not shown yet, with texts between the count and the time left."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *map(TextColumn, texts)
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))


class Queue:
    """Measures how much of its time a thread waits for a processor that others use. Always 0 except on Linux."""

    def __init__(self) -> None:
        self.at_s, self.waited_s = time.monotonic(), _waited_s()

    def share(self) -> float:
        """Waiting share, 0 to 1, of the time since the last call or the beginning. Call it in the measured thread."""
        before_s, waited_s = self.at_s, self.waited_s
        self.at_s, self.waited_s = time.monotonic(), _waited_s()
        return min(1.0, (self.waited_s - waited_s) / max(self.at_s - before_s, 1e-9))


def _waited_s() -> float:
    """Seconds that this thread has spent in the queue for a processor; 0 where the system does not count them."""
    try:
        return int(SCHEDULER.read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
