"""A served task in a process of its own, and requests that nobody who means it well would send."""

import contextlib
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import psutil

from clinrl.cli.main import main

CASES = 200
"""How many cases a seed has; the server tells it, which takes seconds to import."""


class Served(NamedTuple):
    """Where a server is, and what it has written to its log so far."""

    url: str
    log: Path
    process: psutil.Process

    def cost_s(self) -> float:
        """Seconds of processor time that it has taken since it started."""
        spent = self.process.cpu_times()
        return spent.user + spent.system

    @property
    def socket(self) -> str:
        return f"{self.url.replace('http', 'ws')}/ws"


@contextlib.contextmanager
def served(log: Path, sessions: int = 3, task: str = "audit") -> Iterator[Served]:
    """The server, until the end of the block; what it says on stderr goes to `log`."""
    import clinrl.tasks.audit.served.server  # noqa: F401  before the fork

    ours, theirs = os.pipe()
    with log.open("w") as errors, os.fdopen(ours) as out:
        forking = multiprocessing.get_context("fork")  # what is served was imported, which takes seconds
        server = forking.Process(target=_serve, args=(theirs, errors.fileno(), sessions, task), daemon=True)
        server.start()
        os.close(theirs)
        try:
            yield Served(out.readline().strip(), log, psutil.Process(server.pid))
        finally:
            server.terminate()
            server.join()


def _serve(out: int, errors: int, sessions: int, task: str) -> None:
    os.dup2(out, 1)
    os.dup2(errors, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    sys.exit(main(["openenv", task, "--port", "0", "--sessions", str(sessions)]))


def odd(rng: Random, depth: int = 0) -> Any:
    """A JSON value that nobody asked for."""
    kinds = ["null", "bool", "int", "float", "text", *(["list", "dict"] if depth < 3 else [])]
    match rng.choice(kinds):
        case "null":
            return None
        case "bool":
            return rng.random() < 0.5
        case "int":
            return rng.choice([0, -1, 1, CASES - 1, CASES, 10_000, 2**63, -(2**70), 10**300])
        case "float":
            return rng.choice([0.5, -0.0, 1e308, float("nan"), float("inf")])
        case "text":
            return rng.choice(["", "easy", "exam", "A1", "\x00", "\ud800", "é" * 500, "{}", "../..", "approve", "<b>"])
        case "list":
            return [odd(rng, depth + 1) for _ in range(rng.randrange(4))]
        case _:
            return {rng.choice(FIELDS): odd(rng, depth + 1) for _ in range(rng.randrange(5))}


FIELDS = (
    "seed",
    "level",
    "pool",
    "index",
    "episode_id",
    "action",
    "tool",
    "arguments",
    "timeout_s",
    "data",
    "type",
    "x",
)
PATHS = (
    "/reset", "/reset", "/reset", "/step", "/step", "/mcp", "/state", "/schema", "/audit/tasks", "/audit/task",
    "/audit/num_tasks", "/audit/task_range", "/audit/splits", "/nothing", "/ws",
)  # fmt: skip


def body(rng: Random) -> bytes:
    """The body of a request: options, nearly right or not at all, or no JSON."""
    chosen = rng.random()
    if chosen < 0.1:
        return rng.choice([b"", b"{", b"\xff\xfe", b"[" * 30_000, b'{"seed":' * 5_000, b"1" * 5_000, b"x" * 70_000])
    if chosen < 0.6:
        good = {"seed": 1, "level": "easy", "pool": "train", "index": 0, "action": {"tool": "approve", "arguments": {}}}
        value = good | {rng.choice(FIELDS): odd(rng)}
    else:
        value = odd(rng)
    return json.dumps(value).encode()


def request(rng: Random) -> tuple[str, str, bytes, str]:
    """One request: method, path, body, and what it says that its body is."""
    method = rng.choice(["POST", "POST", "POST", "GET", "PUT"])
    kinds = ["application/json", "application/json", "text/plain", "multipart/form-data", ""]
    return method, rng.choice(PATHS), body(rng), rng.choice(kinds)
