"""Projects whose versions answer, and a server of theirs in this process."""

import shutil
import threading
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import uvicorn
from ruamel.yaml import YAML

import dolls
import examined
import exhibits
import locks
from clinrl import paths
from clinrl.artifacts import identity, read_manifest, write_json
from clinrl.config.params import Params
from clinrl.data import dataset
from clinrl.data.dataset import read_cases
from clinrl.evaluation.sampler import open_sampler
from clinrl.models.generate import Prompt
from clinrl.registry import versions
from clinrl.release import promotion
from clinrl.runtime.guard import Fence, Limits
from clinrl.serving.backends import Local
from clinrl.serving.live import Live
from clinrl.serving.protocol import refused
from clinrl.serving.server import BODY_BYTES, Bounds, Server, Service
from clinrl.tasks.base import get_task
from once import once

ADA = "Ada Lovelace"
BOUNDS = Bounds(at_once=4, queue=32, tokens=256, request_s=60.0)


def register() -> None:
    """v1 and v2 are registered; v2, the later one, is the candidate."""
    shutil.copytree(exhibits.built(), Path(), dirs_exist_ok=True)
    with dolls.few_draws():
        for name in ("v1", "v2"):
            versions.register(exhibits.params(), name)


def promotable() -> Params:
    """The params of the project that `promote` makes."""
    return dolls.params(gates=examined.GATES, datasets=examined.DATASETS)


def promote() -> None:
    """v2 was the champion and v1 is, so that a rollback brings v2 back."""
    shutil.copytree(dolls.built(), Path(), dirs_exist_ok=True)
    YAML().dump(dolls.PARAMS | {"gates": examined.GATES, "datasets": examined.DATASETS}, Path("params.yaml"))
    given = promotable()
    dataset.stage(given, "x1")
    named = {"data": {"name": "x1", "identity": identity(read_manifest(paths.cases("x1")))}}
    write_json(paths.data_proof("x1"), named)
    with dolls.few_draws():
        dolls.examine(given, "esi-base", [1])
        for name, pattern in {"v1": examined.RIGHT, "v2": examined.GOOD}.items():
            exhibits.adapter(name, int(name[1]))
            dolls.examine(given, name, pattern)
        locks.record(given)
        for name in ("v1", "v2"):
            versions.register(given, name)
        for name in ("v2", "v1"):
            examined.promote(given, name, ADA, promotion.decide(given, name))


@pytest.fixture(scope="session")
def registered() -> Path:
    """The project of `register`. Only copy it."""
    return once("served", register)


@pytest.fixture
def project(registered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Params:
    """A copy of the project of `register`, entered."""
    examined.copy(registered, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return exhibits.params()


@pytest.fixture
def released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Params:
    """A copy of the project of `promote`, entered."""
    examined.copy(once("promoted", promote), tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return promotable()


@dataclass
class Running:
    """A server that runs in this process."""

    url: str
    live: Live
    service: Service
    client: openai.OpenAI


@contextmanager
def running(given: Params, *, token: str | None = None, bounds: Bounds = BOUNDS, keep_s: float = 60.0) -> Iterator[Any]:
    """A server of the model esi. Nobody looks at the registry but who calls `live.renew`."""
    backend = Local("embedded", bounds.at_once)
    live = Live(given, "esi", backend, keep_s)
    live.renew()
    service = Service(live, backend, bounds)
    limits = Limits(body_bytes=BODY_BYTES, request_s=bounds.request_s, idle_s=1.0)
    fence = Fence(service, token=token, limits=limits, refuse=refused)
    server = Server(uvicorn.Config(fence, port=0, log_level="warning", access_log=False), service)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            threading.Event().wait(0.01)
        host, port = server.servers[0].sockets[0].getsockname()
        url = f"http://{host}:{port}/v1"
        with openai.OpenAI(base_url=url, api_key=token or "none", max_retries=0) as client:
            yield Running(url, live, service, client)
    finally:
        server.should_exit = True
        thread.join()
        live.end()


@pytest.fixture(scope="module")
def served(registered: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server that only answers, for the tests of a module."""
    folder = tmp_path_factory.mktemp("served")
    examined.copy(registered, folder)
    with chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        with running(exhibits.params()) as one:
            yield one


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
