"""What a stranger may ask of the three servers: nothing may change, and no request may break them or keep them busy."""

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import attempts
import httpx
from attempts import Record

SLOW_S = 1.0
PLAYED = 150
"""Requests to the environment, which has no password; the others have one."""


def attack(folder: Path, seed: int) -> Iterator[Record]:
    """Ask the served audit what nobody would, then Prefect and MLflow as eight kinds of stranger."""
    folder.mkdir()
    yield from _played(folder / "log", seed)
    yield from _guarded(folder / "guarded", seed)


def _played(log: Path, seed: int) -> Iterator[Record]:
    from oddities import request, served

    random = Random(seed)
    with served(log) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        for number in attempts.each(range(PLAYED), "requests", PLAYED):
            method, path, content, kind = request(random)
            headers = {"Content-Type": kind}
            answer, seconds = _timed(client, method, path, content=content, headers=headers)
            outcome = "traceback" if log.read_text() else played(answer, seconds)
            yield _record(f"request: audit, {method} {path}, number {number + 1}", seed, outcome, seconds, answer)


def played(answer: httpx.Response, seconds: float) -> str:
    """How a request to the environment ended. What is sound after all is played."""
    if answer.status_code >= 500 and answer.status_code != 501:
        return "traceback"
    if answer.status_code < 400:
        return "left out"
    if answer.status_code not in (404, 405) and not _sentence(answer):
        return "no sentence"
    return "refused" if seconds < SLOW_S else "slow"


def _sentence(answer: httpx.Response) -> bool:
    try:
        return isinstance(answer.json()["detail"], str)
    except (ValueError, TypeError, KeyError):
        return False


def _guarded(folder: Path, seed: int) -> Iterator[Record]:
    import strangers

    folder.mkdir()
    with strangers.guarded(folder) as servers, httpx.Client(timeout=60) as client:
        before = servers.everything()
        wanted = [(who, *asked) for who in strangers.STRANGERS for asked in strangers.attempts(servers)]
        for who, method, url, body in attempts.each(wanted, "requests", len(wanted)):
            answer, seconds = _timed(client, method, url, json=body, headers=strangers.STRANGERS[who])
            where = url.replace(servers.prefect, "prefect").replace(servers.mlflow, "mlflow")
            outcome = guarded(answer, seconds)
            yield _record(
                f"request: {who}, {method} {where}".replace(servers.deployment, "ID"), seed, outcome, seconds, answer
            )
        changed = servers.everything() != before
    yield {
        "what": "request: all of these together", "command": "", "seed": seed,
        "outcome": "let in" if changed else "refused", "seconds": 0.0, "says": "",
    }  # fmt: skip


def guarded(answer: httpx.Response, seconds: float) -> str:
    """How a request to a server with a password ended."""
    if answer.status_code not in (401, 403) or any(name.startswith("access-control") for name in answer.headers):
        return "traceback" if answer.status_code >= 500 else "let in"
    return "refused" if seconds < SLOW_S else "slow"


def _timed(client: httpx.Client, method: str, url: str, **request: Any) -> tuple[httpx.Response, float]:
    started = time.perf_counter()
    answer = client.request(method, url, **request)
    return answer, time.perf_counter() - started


def _record(what: str, seed: int, outcome: str, seconds: float, answer: httpx.Response) -> Record:
    says = answer.text
    with contextlib.suppress(ValueError, TypeError, KeyError):
        says = json.loads(says)["detail"]
    return {
        "what": what,
        "command": "",
        "seed": seed,
        "outcome": outcome,
        "seconds": round(seconds, 1),
        "says": ascii(f"{answer.status_code} {says}"[:200])[1:-1],
    }
