"""The worker's process: it has a session of its own, gets this process's signals, and never outlives this process."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import TypeAlias

from clinrl.runtime import forkserver, starter
from clinrl.runtime.child import signal_group

WORKER = "clinrl.training.worker"
WORLD = "clinrl.training.world"
LIVE = "clinrl.tracking.live_metrics"
Child: TypeAlias = "subprocess.Popen[bytes] | forkserver.Fork"
GRACE_S = 30
"""Seconds a child has to end after its group was told to stop for good."""
LAST_METRICS_S = 3
"""Seconds that the end of a training waits for its last live metrics; `clinrl register` fills in the others."""


def run_worker(spec: Path, *, several: bool = False) -> int:
    """Run the worker in a session of its own and return its exit code; ask it to stop on SIGINT, SIGTERM and SIGHUP.

    A second signal kills the worker's whole group. The worker dies with this process, however this process ends. With
    `several`, as many workers as the spec says start, and the code is that of one that failed.
    """
    arguments = [str(spec), str(os.getpid())]
    child: Child
    if several:
        command = [sys.executable, "-m", WORLD, *arguments]
        child = subprocess.Popen(command, start_new_session=True)
    elif forkserver.IS_FORK:  # the worker's libraries are in this process
        child = forkserver.Fork(lambda: import_module(WORKER).main(arguments))
    else:
        child = subprocess.Popen([sys.executable, "-m", WORKER, *arguments], start_new_session=True)
    try:
        with _forwarded(child):
            code = child.wait()
        return 128 - code if several and code > 128 else code  # a signal ended a process below
    finally:
        signal_group(child.pid, signal.SIGKILL)
        child.wait(GRACE_S)


@contextmanager
def live_metrics(folder: Path) -> Iterator[Callable[[str], None]]:
    """Send the run's metrics to MLflow, if MLflow is used here, from a process that the training does not depend on.

    Yields a function to call with MLflow's word for how the run ended. The process ends with this one, however this one
    ends, because its standard input is then closed.
    """
    ends: list[str] = []
    sender: Child | None = None
    end, tell = os.pipe()

    def follow() -> int:
        os.close(tell)
        os.dup2(end, 0)
        return int(import_module(LIVE).main([str(folder)]))

    if Path("mlruns").is_dir() or os.environ.get("MLFLOW_TRACKING_URI"):
        # In a session of its own, so that a signal to this one does not keep it from saying how the run ended.
        with suppress(OSError):
            if forkserver.IS_FORK:  # MLflow is, or soon would be, in this process
                sender = forkserver.Fork(follow)
            else:
                command = [sys.executable, "-m", LIVE, str(folder)]
                sender = subprocess.Popen(command, stdin=end, stdout=subprocess.DEVNULL, start_new_session=True)
    os.close(end)
    try:
        yield ends.append
    finally:
        with suppress(BrokenPipeError), open(tell, "wb", buffering=0) as stream:
            stream.write("".join(ends).encode())
        if sender is not None:
            try:
                sender.wait(LAST_METRICS_S)
            except subprocess.TimeoutExpired:
                sender.kill()
                sender.wait()


@contextmanager
def _forwarded(child: Child) -> Iterator[None]:
    # Only the main thread may set handlers; elsewhere the caller's own handling ends this process and the child.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    numbers = [signal.SIGINT, signal.SIGTERM, starter.GONE]
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # `nohup` means that a closed terminal ends nothing
        numbers.append(signal.SIGHUP)

    def forward(number: int, _frame: object) -> None:
        if number == starter.GONE and received:  # the same end may have come as a signal to the group
            return
        received.append(number)
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGTERM if len(received) == 1 else signal.SIGKILL)

    with starter.handling(numbers, forward):
        yield
