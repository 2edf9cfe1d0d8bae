"""Run stages without the time of their imports: each is forked from a server that has loaded the libraries.

`python -m clinrl.runtime.forkserver dvc repro ...` runs a command. A stage below it that trains or asks a model hands
its work over: a fork of the server does the work, in the stage's folder, with its environment and standard streams, and
the stage waits for the exit code. The server only imports and forks, so a fork computes what a new process would. It
has the code as it was when the server started, and does not call functions for the end of Python (`atexit`). A stage
without a server does its own work; a stage whose server is killed meanwhile counts as killed. If there is a GPU, which
no fork can use, all stages do their own work.

Signals that a stage receives reach its fork. A fork whose stage has ended ends like a stage whose starter has ended
(`clinrl.runtime.starter`), and the server ends with the command.
"""

import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, TypeVar

from clinrl.errors import Refused, with_exit_code
from clinrl.runtime import determinism, starter

T = TypeVar("T")
SERVER = "CLINRL_FORKSERVER"
"""The variable that tells the stages below a command the address of the server's socket."""
LIBRARIES = (
    "clinrl.training.worker", "clinrl.training.trl", "clinrl.training.callback", "clinrl.training.monitor",
    "clinrl.evaluation.evaluate", "clinrl.models.opening", "clinrl.models.decoding", "clinrl.reports.figures",
)  # fmt: skip
"""The modules that trainings and exams import at their start."""
LATER = (
    "mlflow.store.tracking.sqlalchemy_store", "matplotlib.figure", "sklearn.linear_model",
    "sklearn.feature_extraction.text",
)  # fmt: skip
"""What they, and the live metrics, import besides. The first stage does not wait for it."""
CLI = "clinrl.cli.main"
BEGUN = b"+"
"""A fork's reply that it begins a stage's work. When the fork has ended, the server sends its exit code."""
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STREAMS = 3
IS_FORK = False
"""Whether this process is a fork."""


class Fork(ForkProcess):
    """A child process by fork, with as much of `subprocess.Popen` as a training needs.

    `apart` moves the fork out of this process's group before the constructor returns, so that a signal to the fork's
    group reaches it from the start.
    """

    pid: int
    """Never None, since the constructor starts the process."""

    def __init__(self, program: Callable[[], int], apart: Callable[[], None] = os.setsid) -> None:
        super().__init__()
        self._program, self._apart = program, apart
        self._began = os.pipe()
        self.start()
        began, tell = self._began
        os.close(tell)
        os.read(began, 1)
        os.close(began)

    def run(self) -> None:
        """In the child: run the program, print its error, and exit with its code, as a process would.

        Does not return and calls no `atexit` functions: those of libraries need threads, which a fork does not have.
        """
        global IS_FORK
        IS_FORK = True
        self._apart()
        for end in self._began:
            os.close(end)
        code: int | str | None = 1
        try:
            code = self._program()
        except SystemExit as end:
            code = end.code
        except BaseException as error:  # noqa: BLE001  as Python prints it at the end of a process
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            for number in (signal.SIGINT, starter.GONE):
                signal.signal(number, signal.SIG_IGN)
            if isinstance(code, str):
                print(code, file=sys.stderr)
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(code if isinstance(code, int) else int(code is not None))

    def poll(self) -> int | None:
        """The exit code, or minus the number of the signal that ended the fork; None while it runs."""
        return self.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code. Raises TimeoutExpired after `timeout` seconds."""
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired(self.name, timeout or 0)
        return self.exitcode


def results(programs: Sequence[Callable[[], T]]) -> list[T]:
    """Run programs and return their results in order. If this stage has several processors, as many run in forks.

    A fork computes with one thread, and ends with this process. An exception of a program is raised here, and Refused
    if a fork was killed.
    """
    at_once = determinism.own_processors()
    if at_once < 2 or _has_gpu():
        return [program() for program in programs]

    waiting, running, found = [*enumerate(programs)], dict[Connection, tuple[int, Fork]](), dict[int, T]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                place, program = waiting.pop(0)
                here, fork = _start_fork(program)
                running[here] = place, fork
            for here in [end for end in wait([*running]) if isinstance(end, Connection)]:
                try:
                    value, error = here.recv()
                except EOFError:
                    raise Refused("a process of this command was killed; give the command again") from None
                if error is not None:
                    raise error
                place, fork = running.pop(here)
                found[place] = value
                fork.join()
    finally:
        for _, fork in running.values():
            fork.kill()
            fork.join()
    return [found[place] for place in range(len(programs))]


def _start_fork(program: Callable[[], Any]) -> tuple[Connection, Fork]:
    def send() -> int:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the starter too, which ends this fork
        if "torch" in sys.modules:
            determinism.use_one_thread()
        try:
            there.send((program(), None))
        except Exception as error:  # noqa: BLE001  raised again in the parent
            there.send((None, error))
        return 0

    here, there = Pipe(duplex=False)
    fork = Fork(send, partial(starter.die_with, os.getpid()))
    there.close()
    return here, fork


def _has_gpu() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_available())


def ask(words: Sequence[str]) -> int | None:
    """Have a fork of the server run `clinrl` with these arguments; return its exit code, or None without a server."""
    address = os.environ.get(SERVER)
    if not address:
        return None
    with socket.socket(socket.AF_UNIX) as server:
        asked = {"words": list(words), "folder": os.getcwd(), "environment": dict(os.environ)}
        try:
            server.connect(address)
            message = json.dumps(asked).encode() + b"\n"
            if rest := message[socket.send_fds(server, [message], range(STREAMS)) :]:
                server.sendall(rest)  # sending nothing would fail if the fork has already ended
            begun = server.recv(1)
        except OSError:
            return None
        if begun != BEGUN:
            return None

        def forward(number: int, _frame: object) -> None:
            with suppress(OSError):  # the fork has ended, and its exit code is on the way
                server.sendall(bytes([number]))

        code = b""
        with starter.handling(FORWARDED, forward), suppress(OSError):
            while part := server.recv(16):
                code += part
        return int(code) if code else 128 + signal.SIGKILL


@with_exit_code
def main(command: Sequence[str]) -> int:
    """Run a command with a server for the stages below it; return its exit code, 128 plus the number for a signal."""
    determinism.pin()  # before the server starts, since a process reads some of it at its start
    # The terminal sends an interrupt to the command itself, whose stages take time to end.
    signal.signal(signal.SIGINT, lambda *_: None)
    with tempfile.TemporaryDirectory(prefix="clinrl-") as folder:
        address = str(Path(folder) / "stages")
        serving = [sys.executable, "-m", "clinrl.runtime.forkserver", "--serve", address]
        server = subprocess.Popen(serving, stdin=subprocess.PIPE)
        try:
            running = subprocess.Popen(command, env=os.environ | {SERVER: address})
            for number in (signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, lambda number, _frame: running.send_signal(number))
            code = running.wait()
            return code if code >= 0 else 128 - code
        finally:
            server.kill()
            server.communicate()


def serve(address: str) -> None:
    """Import what stages need, then fork for each stage that asks, until standard input ends. Earlier requests wait.

    Returns if there is a GPU: bitsandbytes initialises CUDA when it is imported, and no fork can use it then.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        threading.Thread(target=_end_with_input, daemon=True).start()
        for name in LIBRARIES:
            importlib.import_module(name)
        if _has_gpu():
            return
        gc.freeze()  # a collection in a fork would copy what it shares with the server
        _serve_forever(listener)


def _serve_forever(listener: socket.socket) -> None:
    """Fork for each stage that asks, and send it the exit code, 128 plus the number if a signal ended the fork.

    Imports `LATER` once no stage asks.
    """
    forks: dict[int, tuple[Fork, socket.socket]] = {}
    later = [*LATER]
    while True:
        ready = wait([listener, *forks], 0 if later else None)
        if not ready:
            with suppress(Exception):  # whoever needs it says what is wrong
                importlib.import_module(later.pop(0))
            gc.freeze()
        if listener in ready:
            stage, _ = listener.accept()
            others = [listener, *(other for _, other in forks.values())]
            fork = Fork(partial(_run_stage, stage, others), apart=os.setpgrp)
            forks[fork.sentinel] = fork, stage
        for sentinel in forks.keys() & {*ready}:
            fork, stage = forks.pop(sentinel)
            code = fork.wait()
            with stage, suppress(OSError):
                stage.sendall(str(code if code >= 0 else 128 - code).encode())


def _run_stage(stage: socket.socket, others: Sequence[socket.socket]) -> int:
    """In a fork: do the work of a stage in its place, and end with it. `others` are the server's other sockets."""
    for other in others:  # otherwise a stage that asks after the server's end would wait for this fork
        other.close()
    head, streams, _, _ = socket.recv_fds(stage, 1 << 16, STREAMS)
    if not head:  # the stage ended while the server imported
        return 0
    with stage.makefile("rb") as rest:
        asked = json.loads(head if head.endswith(b"\n") else head + rest.readline())
    stage.sendall(BEGUN)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        if stream >= STREAMS:
            os.close(stream)
    os.environ.clear()
    os.environ.update(asked["environment"])
    del os.environ[SERVER]
    os.chdir(asked["folder"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_follow, args=(stage,), daemon=True).start()
    code: int = importlib.import_module(CLI).main(asked["words"])
    return code


def _follow(stage: socket.socket) -> None:
    """Send this fork the signals that its stage receives, and end it once the stage has ended."""
    with suppress(OSError):
        while number := stage.recv(1):
            os.kill(os.getpid(), number[0])
    starter.end()


def _end_with_input() -> None:
    os.read(sys.stdin.fileno(), 1)  # by its number: a thread that reads sys.stdin holds its lock, in each fork too
    os._exit(0)


def _run(arguments: Sequence[str]) -> int:
    if arguments[:1] != ["--serve"]:
        return main(arguments)
    determinism.pin()
    serve(*arguments[1:])
    return 0


if __name__ == "__main__":
    # Not as `__main__`: other modules read IS_FORK from the module of this name.
    sys.exit(importlib.import_module("clinrl.runtime.forkserver")._run(sys.argv[1:]))
