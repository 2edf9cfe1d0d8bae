"""A command in a process group of its own, which ends with the process that started it, however that process ends.

Killing DVC alone would leave the training that it started running, and writing. A small supervisor, which runs this
file, therefore starts the command, adopts the processes that a killed command leaves behind, and ends all of them when
its standard input closes: the kernel closes it when the starter dies. If the supervisor itself is killed, the stages
below notice by its number, which it left in their environment (`clinrl.runtime.starter`).
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

GRACE_S = 20.0
"""Seconds that a group has to end when its starter asks it to, before it is killed: a long training step."""
ORPHANED_S = 3.0
"""Seconds that a group has if its starter or the command itself was killed: nobody waits for it any more."""


def start(command: Sequence[str], *, grace_s: float = ORPHANED_S, **popen: Any) -> "subprocess.Popen[str]":
    """Start a command that does not outlive this process. If a signal ends it, its exit code is 128 plus the number.

    `grace_s`: seconds that the command has to end by itself if this process dies. `popen` goes to `subprocess.Popen`;
    the command gets its `pass_fds` too. Standard input is in use: closing it ends the command.
    """
    supervisor = [sys.executable, "-I", "-S", __file__, str(grace_s), *command]
    return subprocess.Popen(supervisor, stdin=subprocess.PIPE, start_new_session=True, text=True, **popen)


def run(command: Sequence[str], say: Callable[[str], None], *, python: str = sys.executable) -> int:
    """Run a command, pass on each line of its output as it comes, and return its exit code.

    `python` in the command means the interpreter in the folder of the argument `python`, an absolute path. However this
    call ends, for example by an exception from a signal handler, the whole group is ended first.
    """
    child = start(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace", env=_environment(python), bufsize=1
    )
    # Processes that a killed supervisor leaves behind hold the pipe open.
    threading.Thread(target=_clear_after, args=(child,), daemon=True).start()
    try:
        assert child.stdout is not None
        for line in child.stdout:
            if line.strip():
                say(line.rstrip())
        return child.wait()
    finally:
        end(child)


def end(child: "subprocess.Popen[str]", grace_s: float = GRACE_S) -> None:
    """Ask a started command to end, wait, and kill what is left of its group. The command may have ended already."""
    try:
        if child.poll() is None:
            signal_group(child.pid, signal.SIGTERM)
            child.wait(grace_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        signal_group(child.pid, signal.SIGKILL)
        child.wait()
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                stream.close()


def signal_of(code: int) -> signal.Signals | None:
    """The signal that ended a command or its supervisor, given the exit code of `run`; None if no signal did."""
    number = -code if code < 0 else code - 128
    return signal.Signals(number) if number in {*signal.Signals} else None


def _clear_after(child: "subprocess.Popen[str]") -> None:
    """Once a supervisor has ended, kill what is left of its group."""
    child.wait()
    signal_group(child.pid, signal.SIGKILL)


def _environment(python: str) -> dict[str, str]:
    """This process's environment, in which `python` is the given interpreter and does not buffer its output."""
    path = f"{os.path.dirname(python)}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return os.environ | {"PATH": path, "PYTHONUNBUFFERED": "1"}


def signal_group(group: int, number: int) -> None:
    """Send a signal to a process group, if it has not ended."""
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def _supervise(grace_s: float, command: list[str]) -> int:
    """Run the command as this process's child, in the process group that this process leads."""
    received: list[int] = []
    # Handlers, since the command would inherit SIG_IGN; the group's signals reach the command by themselves.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _frame: received.append(number))
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(0, signal.SIGKILL))
    pr_set_child_subreaper = 36  # become the parent of descendants whose parent dies, to wait for their end too
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)
    # The names are those of clinrl.runtime.starter and forkserver: this program, without libraries, cannot import them.
    # A fork of a server above does not descend from this process, so it could not follow this process.
    env = os.environ | {"CLINRL_STARTER": str(os.getpid())}
    env.pop("CLINRL_FORKSERVER", None)
    # Open files are for the command, and stay open here until it has ended, so that nobody else gets its port.
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=env, close_fds=False)
    threading.Thread(target=_end_with_starter, args=(grace_s,), daemon=True).start()
    code = 0
    while True:
        try:
            pid, status = os.waitpid(0, 0)  # of this group only: a process in a session of its own is meant to stay
        except ChildProcessError:
            return code
        if pid != child.pid:
            continue
        child.returncode = os.waitstatus_to_exitcode(status)
        code = child.returncode if child.returncode >= 0 else 128 - child.returncode
        if received:  # a second SIGTERM would tell the trainer not to finish its step
            continue
        if child.returncode >= 0:
            return code
        os.killpg(0, signal.SIGTERM)
        signal.setitimer(signal.ITIMER_REAL, ORPHANED_S)


def _end_with_starter(grace_s: float) -> None:
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGTERM)
    time.sleep(grace_s)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(_supervise(float(sys.argv[1]), sys.argv[2:]))
