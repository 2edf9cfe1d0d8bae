"""What an attack records: one attempt and its outcome; a function that runs in a process of its own; a progress bar."""

import io
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from clinrl.errors import Refused
from forks import fork

Record = dict[str, Any]
"""One attempt as the report holds it: what was done, where or when, with which seed, and what came of it."""

WENT_ON, REFUSED, RAISED, HUNG = "went on", "refused", "raised", "hung"


class Outcome(NamedTuple):
    """How a call in a process of its own ended."""

    kind: str
    """`WENT_ON`, `REFUSED` (one sentence), `RAISED` (a traceback) or `HUNG` (it was killed)."""
    says: str
    """The sentence of a refusal, or the last line of a traceback."""
    seconds: float
    value: Any = None
    """What the call returned."""


def forked(function: Callable[[], Any], limit_s: float = 120.0) -> Outcome:
    """Call a function in a fork of this process, whose modules it finds imported and whose state it cannot change."""

    def report() -> Outcome:
        started = time.perf_counter()
        said = io.StringIO()
        with redirect_stdout(io.StringIO()), redirect_stderr(said):
            try:
                value = function()
                kind, says = WENT_ON, ""
            except Refused as refused:
                kind, says, value = REFUSED, str(refused), None
            except BaseException as error:  # noqa: BLE001  argparse's SystemExit among them: whatever, it is recorded
                last = traceback.format_exception_only(error)[-1].strip()
                kind, says, value = RAISED, last, None
        return Outcome(kind, says or said.getvalue(), time.perf_counter() - started, value)

    ended = fork(report, limit_s=limit_s)
    if ended.code is None:
        return Outcome(HUNG, f"no end after {limit_s:g} s", limit_s)
    return ended.value or Outcome(RAISED, "the process died without a word", 0.0)


def each(items: Iterable[Any], what: str, total: int) -> Iterator[Any]:
    """The items, with a bar on stderr that says how many are left."""
    columns = (TextColumn(f"{what:10}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task(what, total=total)
        for item in items:
            yield item
            progress.advance(task)
