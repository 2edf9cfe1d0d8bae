"""Progress bars of long work."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Advance(Protocol):
    """Moves a progress display forward by some rows; does nothing where nobody watches."""

    def __call__(self, rows: int = 1, /) -> None: ...


@contextmanager
def progress(title: str, rows: int) -> Iterator[Advance]:
    """A progress bar on stderr if that is a terminal, otherwise nothing; yields the function that advances it."""
    if not sys.stderr.isatty():
        yield lambda _rows=1: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=rows)

        def advance(rows: int = 1, /) -> None:
            bar.advance(task, rows)

        yield advance
