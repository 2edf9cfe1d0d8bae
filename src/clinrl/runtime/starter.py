"""A stage ends with the process that started it, however that process ends.

A killed DVC does not end the stages that it runs: a training would go on, and write, for hours. A stage that was
started by DVC, or below a process that the environment names, therefore checks four times a second whether that process
is still among its ancestors. A stage that a person started by hand follows no process: it may outlive its shell.
"""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

from clinrl.errors import Refused

if TYPE_CHECKING:
    from psutil import Process

STARTER = "CLINRL_STARTER"
"""The variable with the number of the process that every stage below it ends with. `child` and `make demo` set it."""
GONE = signal.SIGUSR1
"""The signal that a stage sends itself first. Only stages use it, so unlike SIGTERM it is never a second request."""
EVERY_S = 0.25
"""Seconds between two checks."""
GRACE_S = 2.0
"""Seconds from the first request to the kill: a step of an embedded training and its checkpoint."""
DVCS = ("DVC_ROOT", "DVC_STAGE")
"""Variables that DVC sets for a stage, and for nothing else."""
SHELLS = {"sh", "ash", "bash", "dash", "fish", "ksh", "zsh"}
"""DVC starts a stage through one of these, which may stay between DVC and the stage."""


def follow() -> None:
    """End this process with its starter: first by KeyboardInterrupt, after GRACE_S by SIGKILL.

    Does nothing if there is no process to follow. Raises Refused if the starter has ended already.
    """
    starter = _starter()
    if starter is None:
        return
    if not is_above(starter):
        raise Refused(
            "the process that started this stage has ended, so the stage does not begin; give the same command again"
        )
    signal.signal(GONE, _interrupt)
    watch(starter, end)


def watch(ancestor: int, gone: Callable[[], object]) -> None:
    """Call `gone`, in a thread of its own, once the process with this number is no longer an ancestor of this one."""

    def look() -> None:
        while is_above(ancestor):
            time.sleep(EVERY_S)
        gone()

    threading.Thread(target=look, daemon=True).start()


@contextmanager
def handling(numbers: Iterable[int], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Handle signals in this block by a function, and afterwards as before."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def is_above(pid: int) -> bool:
    """Whether a process is an ancestor of this one. A killed process is none: it loses its children at once."""
    return pid in (process.pid for process in _ancestors())


def _interrupt(number: int, _frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second signal must not interrupt the cleanup that the first began
    raise KeyboardInterrupt


def end() -> None:
    """End this process: first by KeyboardInterrupt, where `follow` was called, after GRACE_S by SIGKILL."""
    os.kill(os.getpid(), GONE)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _starter() -> int | None:
    """The process that this one follows: the named one, or else DVC; 0 if it is gone, None if there is none."""
    if named := os.environ.get(STARTER):
        return int(named) if named.isdecimal() else 0
    if not all(os.environ.get(name) for name in DVCS):
        return None
    found = next((process.pid for process in _ancestors() if _name(process) not in SHELLS), 0)
    # A stage shares the session of its DVC; a process that adopted the stage after DVC's early end does not.
    return found if found and os.getsid(found) == os.getsid(0) else 0


def _ancestors() -> "Iterator[Process]":
    """Yield this process's ancestors, its parent first, up to one that ends meanwhile. Each is looked up in turn."""
    import psutil  # not at the head: a process that follows none may not have it

    with suppress(psutil.NoSuchProcess):
        process = psutil.Process()
        while process := process.parent():
            yield process


def _name(process: "Process") -> str:
    """The name of a process's program; empty if it has ended."""
    import psutil

    with suppress(psutil.Error):
        return str(process.name()).removeprefix("-")
    return ""


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, even by SIGKILL.

    For the worker and the forks of a stage. Without it a killed parent would release its lock while the child went on
    writing.
    """
    pr_set_pdeathsig = 1
    if ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # the parent died before the request
        os.kill(os.getpid(), signal.SIGKILL)
