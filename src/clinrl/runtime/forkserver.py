"""Stages of a chain without the time of their imports: each is forked from a process that holds the libraries.

`python -m clinrl.runtime.forkserver dvc repro ...` runs a command. A stage below it that trains or asks a model hands
itself over: a fork of the server does its work, in the stage's folder, with its environment and standard streams, and
the stage waits for the exit code. The server imports and forks, nothing else, so a fork computes what a new process
would. It has the code of the server's start, and functions for the end of Python (`atexit`) are not called. A stage
whose server has gone works by itself. So do all where there is a GPU, which no fork can use.

Ends follow each other: signals that a stage receives reach its fork; a fork whose stage has gone ends as one whose
starter has gone (`clinrl.runtime.starter`); and the server ends with the command.
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
from pathlib import Path
from socketserver import BaseRequestHandler, ForkingMixIn, UnixStreamServer

from clinrl.errors import exit_code_of
from clinrl.runtime import determinism, starter

SERVER = "CLINRL_FORKSERVER"
"""Names the server's socket to the stages below a command."""
LIBRARIES = (
    "clinrl.training.worker", "clinrl.training.trl", "clinrl.training.callback", "clinrl.training.monitor",
    "clinrl.evaluation.evaluate", "clinrl.models.opening", "clinrl.models.decoding", "clinrl.reports.figures",
    "sklearn.linear_model", "sklearn.feature_extraction.text", "matplotlib.figure",
)  # fmt: skip
"""What trainings and exams import."""
CLI = "clinrl.cli.main"
BEGUN = b"+"
"""A fork's first word. Its second, where it lives to say it, is its exit code."""
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STREAMS = 3
IS_FORK = False
"""Whether this process is a fork of the server."""


class Server(ForkingMixIn, UnixStreamServer):
    """Forks for each stage that asks."""


class Stage(BaseRequestHandler):
    """Runs in a fork: becomes the stage that asked, and ends with it."""

    request: socket.socket
    server: Server

    def handle(self) -> None:
        """Read what is asked and do it. Does not return, so that nothing of the server goes on in the fork."""
        head, streams, _, _ = socket.recv_fds(self.request, 1 << 16, STREAMS)
        if not head:  # it has gone while the server imported
            return
        with self.request.makefile("rb") as rest:
            asked = json.loads(head if head.endswith(b"\n") else head + rest.readline())
        self.server.socket.close()  # else who asks after the server's end would wait for this fork
        self.request.sendall(BEGUN)
        os.setpgid(0, 0)  # the terminal's signals come by way of the stage alone
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            if stream >= STREAMS:
                os.close(stream)
        os.environ.clear()
        os.environ.update(asked["environment"])
        del os.environ[SERVER]
        os.chdir(asked["folder"])
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Thread(target=self._follow, daemon=True).start()
        end_with(
            lambda: importlib.import_module(CLI).main(asked["words"]),
            say=lambda code: self.request.sendall(str(code).encode()),
        )

    def _follow(self) -> None:
        """Pass on the signals that the stage received; end once it has gone."""
        with suppress(OSError):
            while number := self.request.recv(1):
                os.kill(os.getpid(), number[0])
        starter.end()


class Fork:
    """A child process by fork, with as much of `subprocess.Popen` as a training needs. In a session of its own."""

    def __init__(self, program: Callable[[], int]) -> None:
        self.returncode: int | None = None
        began, tell = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            os.setsid()
            os.close(began)
            os.close(tell)
            end_with(program)
        os.close(tell)
        os.read(began, 1)  # until the child is in its session, where signals to its group find it
        os.close(began)

    def poll(self) -> int | None:
        """The exit code, minus a signal's number if that ended it; None while it runs."""
        if self.returncode is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if found else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, when it has ended. Nobody waits for one that was not killed, so there is no time-out."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def end_with(program: Callable[[], int], say: Callable[[int], object] = lambda code: None) -> None:
    """Run a program and end this fork with its exit code, as a process would; `say` is called with the code before."""
    global IS_FORK
    IS_FORK = True
    code = 1
    try:
        code = program()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001  as Python prints it at the end of a process
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        for number in (signal.SIGINT, starter.GONE):
            signal.signal(number, signal.SIG_IGN)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        with suppress(OSError):
            say(code)
        os._exit(code)


def ask(words: Sequence[str]) -> int | None:
    """Have `clinrl` with these arguments run by a fork of the server; its exit code. None if there is no server."""
    address = os.environ.get(SERVER)
    if not address:
        return None
    with socket.socket(socket.AF_UNIX) as server:
        asked = {"words": list(words), "folder": os.getcwd(), "environment": dict(os.environ)}
        try:
            server.connect(address)
            message = json.dumps(asked).encode() + b"\n"
            server.sendall(message[socket.send_fds(server, [message], range(STREAMS)) :])
            begun = server.recv(1)
        except OSError:
            return None
        if begun != BEGUN:
            return None

        def forward(number: int, _frame: object) -> None:
            with suppress(OSError):  # it has ended, and its exit code is on the way
                server.sendall(bytes([number]))

        before = {number: signal.signal(number, forward) for number in FORWARDED}
        code = b""
        try:
            with suppress(OSError):
                while part := server.recv(16):
                    code += part
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return int(code) if code else 128 + signal.SIGKILL


def main(command: Sequence[str]) -> int:
    """Run a command with a server for the stages below it; its exit code, 128 and the number if a signal ended it.

    Elsewhere than on Linux there is no server: the libraries of macOS do not survive a fork.
    """

    def run() -> int:
        determinism.pin()  # some of it is read when a process starts: the server is one
        # An interrupt is the command's, which has it from the terminal; what it started takes time to end.
        signal.signal(signal.SIGINT, lambda *_: None)
        with tempfile.TemporaryDirectory(prefix="clinrl-") as folder:
            address = str(Path(folder) / "stages")
            serving = [sys.executable, "-m", "clinrl.runtime.forkserver", "--serve", address]
            server = subprocess.Popen(serving, stdin=subprocess.PIPE) if sys.platform == "linux" else None
            try:
                running = subprocess.Popen(command, env=os.environ | {SERVER: address})
                for number in (signal.SIGTERM, signal.SIGHUP):
                    signal.signal(number, lambda number, _frame: running.send_signal(number))
                code = running.wait()
                return code if code >= 0 else 128 - code
            finally:
                if server is not None:
                    server.kill()
                    server.communicate()

    return exit_code_of(run)


def serve(address: str) -> None:
    """Import what stages need, then fork for each that asks, until standard input ends. Those that ask before wait.

    Ends where there is a GPU: bitsandbytes initialises CUDA when it is imported, and no fork can use it then.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Server(address, Stage) as server:
        threading.Thread(target=_end_with_input, daemon=True).start()
        for name in LIBRARIES:
            importlib.import_module(name)
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
            return
        gc.freeze()  # a collection in a fork would copy what it shares with the server
        server.serve_forever()


def _end_with_input() -> None:
    os.read(sys.stdin.fileno(), 1)  # by its number: a thread that waits in sys.stdin holds its lock, in each fork too
    os._exit(0)


def _run(arguments: Sequence[str]) -> int:
    if arguments[:1] != ["--serve"]:
        return main(arguments)
    determinism.pin()
    serve(*arguments[1:])
    return 0


if __name__ == "__main__":
    # By its own name, under which a fork is asked whether it is one.
    sys.exit(importlib.import_module("clinrl.runtime.forkserver")._run(sys.argv[1:]))
