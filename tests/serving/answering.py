"""A server of a small project's model in this process, and what its exam's sampler answers."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import openai
import uvicorn

from clinrl import paths
from clinrl.config.params import Params
from clinrl.data.dataset import read_cases
from clinrl.evaluation.sampler import open_sampler
from clinrl.models.generate import Prompt
from clinrl.runtime.guard import Fence, Limits
from clinrl.serving.backends import Local
from clinrl.serving.live import Live
from clinrl.serving.protocol import refused
from clinrl.serving.server import BODY_BYTES, Bounds, Server, Service, logged
from clinrl.serving.watch import Watch
from clinrl.tasks.base import get_task

BOUNDS = Bounds(at_once=4, queue=32, tokens=256, request_s=60.0)


@dataclass
class Running:
    """A server that runs in this process."""

    url: str
    live: Live
    service: Service
    client: openai.OpenAI
    server: Server


@contextmanager
def running(
    given: Params,
    *,
    token: str | None = None,
    bounds: Bounds = BOUNDS,
    keep_s: float = 60.0,
    shadow: float | None = None,
) -> Iterator[Any]:
    """A server of the model esi. Nobody looks at the registry but who calls `live.renew`.

    With `shadow` it counts, every request by itself, and asks the candidate too.
    """
    backend = Local("embedded", bounds.at_once)
    live = Live(given, "esi", backend, keep_s)
    live.renew()
    watch = None if shadow is None else Watch("esi", live, backend, shadow, least=1)
    service = Service(live, backend, bounds, watch)
    limits = Limits(body_bytes=BODY_BYTES, request_s=bounds.request_s, idle_s=1.0)
    fence = Fence(service, token=token, limits=limits, refuse=refused)
    server = Server(uvicorn.Config(logged(fence), port=0, log_level="warning", access_log=False), service)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            threading.Event().wait(0.01)
        host, port = server.servers[0].sockets[0].getsockname()
        url = f"http://{host}:{port}/v1"
        with openai.OpenAI(base_url=url, api_key=token or "none", max_retries=0) as client:
            yield Running(url, live, service, client, server)
    finally:
        server.should_exit = True
        thread.join()
        if watch is not None:
            watch.end()
        live.end()


def prompts(count: int) -> list[list[dict[str, str]]]:
    """The messages about the first cases of the exam."""
    task = get_task("esi")
    cases = list(read_cases(paths.cases("x1"), task))[:count]
    return [[{"role": one.role, "content": one.content} for one in task.prompt(case.facts)] for case in cases]


def exam(given: Params, name: str, count: int, *, thinking: bool) -> tuple[Any, list[Any]]:
    """The sampler by which a version takes its exam, and what it writes about the first cases, each by itself."""
    task, sampler = get_task("esi"), open_sampler(given, given.model(name))
    cases = list(read_cases(paths.cases("x1"), task))[:count]
    how = {"thinking": thinking, "temperature": 0.0, "budget": 64, "seed": 1}
    return sampler, [sampler.sample([Prompt(case.id, task.prompt(case.facts))], **how)[0] for case in cases]
