"""Real processes in tests: whether they live, what they started, and what they come to say."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from clinrl.runtime.determinism import processors

WITHIN_S = 5.0
"""Seconds after which nothing of a stage may be left whose starter was killed."""


def patience_s(within_s: float = WITHIN_S) -> float:
    """So many seconds on an idle machine; where processes queue for a processor, as much longer, to ten times."""
    return within_s * min(max(1.0, os.getloadavg()[0] / processors()), 10.0)


def alive(pid: int) -> bool:
    """Whether a process exists and is not just waiting for its parent to take notice of its end."""
    listed = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return bool(listed.stdout.strip()) and not listed.stdout.strip().startswith("Z")


def below(*pids: int) -> dict[int, str]:
    """The living descendants of processes, by number, and what each was started as."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid=,args=", "-ww"], capture_output=True, text=True, check=True)
    rows = [line.split(None, 2) for line in listed.stdout.splitlines()]
    found: dict[int, str] = {}
    reached = set(pids)
    while new := {int(row[0]): row[2] for row in rows if int(row[1]) in reached and int(row[0]) not in found}:
        found |= new
        reached |= new.keys()
    return {pid: words for pid, words in found.items() if alive(pid)}


def eventually(found: Callable[[], object], within_s: float = 20) -> object:
    """What `found` returns once that is true. Fails after so many seconds, or more on a busy machine."""
    started = time.monotonic()
    while not (value := found()):
        waited_s = time.monotonic() - started
        assert waited_s < patience_s(within_s), "it never happened"
        time.sleep(min(0.2, 0.02 + waited_s / 50))
    return value


def as_reader(folder: Path, code: str) -> "subprocess.CompletedProcess[str]":
    """Run Python code in a folder in which it may read and not write: root loses its right to write all the same."""
    as_root = ["setpriv", "--inh-caps=-all", "--bounding-set=-dac_override,-dac_read_search"]
    words = [*as_root * (os.geteuid() == 0), sys.executable, "-c", code]
    modes = {path: path.stat().st_mode for path in (folder, *folder.rglob("*"))}
    try:
        for path, mode in modes.items():
            path.chmod(mode & 0o555)
        return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    finally:
        for path, mode in modes.items():
            path.chmod(mode)


def is_free(port: int) -> bool:
    """Whether nobody listens on a port of loopback."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do; a closed one's port is free
        return probe.connect_ex(("127.0.0.1", port)) != 0


def free_port() -> int:
    """A port of loopback that nobody listens on, as of now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def gone(pids: dict[int, str]) -> float:
    """The seconds until none of these processes lives any more. Fails, naming who does, when the time is over."""
    started = time.monotonic()
    while left := [words for pid, words in pids.items() if alive(pid)]:
        assert time.monotonic() - started < patience_s(), left
        time.sleep(0.05)
    return time.monotonic() - started


def number_in(path: Path) -> int:
    """The process number in a file, as soon as it is there."""
    return int(str(eventually(lambda: path.exists() and path.read_text().strip())))


def quietly_killed(pids: dict[int, str]) -> None:
    """Kill what a failed test left."""
    for pid in pids:
        if alive(pid):
            os.kill(pid, 9)
