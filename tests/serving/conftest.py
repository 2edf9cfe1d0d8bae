"""A project with a champion and a candidate that answer, and a server of both in this process."""

import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
import uvicorn

import dolls
import examined
import exhibits
import locks
from clinrl import paths
from clinrl.artifacts import identity, read_manifest, write_json
from clinrl.config.params import Params
from clinrl.data import dataset
from clinrl.registry import versions
from clinrl.release import promotion
from clinrl.runtime.guard import Fence, Limits
from clinrl.serving.backends import Local
from clinrl.serving.live import Live
from clinrl.serving.protocol import refused
from clinrl.serving.server import BODY_BYTES, Bounds, Server, Service
from once import once

ADA = "Ada Lovelace"
BOUNDS = Bounds(at_once=4, queue=32, tokens=256, request_s=60.0)
MERGES = {"folds": {"v1-full": {"task": "esi", "version": "v1", "exam": "x1"}}}
SECTIONS = {"gates": examined.GATES, "merges": MERGES, "datasets": examined.DATASETS}


def params() -> Params:
    return dolls.params(**SECTIONS)


def build() -> None:
    """v2 was champion and v1 is, so that a rollback brings v2 back; v2 is the candidate too, and v3 was refused."""
    shutil.copytree(dolls.built(), Path(), dirs_exist_ok=True)
    examined.YAML().dump(dolls.PARAMS | SECTIONS, Path("params.yaml"))
    dataset.stage(params(), "x1")
    named = {"data": {"name": "x1", "identity": identity(read_manifest(paths.cases("x1")))}}
    write_json(paths.data_proof("x1"), named)
    with dolls.few_draws():
        dolls.examine(params(), "esi-base", [1])
        for name, pattern in {"v1": examined.RIGHT, "v2": examined.GOOD}.items():
            exhibits.adapter(name, int(name[1]))
            dolls.examine(params(), name, pattern)
        locks.record(params())
        for name in ("v1", "v2"):
            versions.register(params(), name)
        for name in ("v2", "v1"):
            examined.promote(params(), name, ADA, promotion.decide(params(), name))
    versions.point("esi", "candidate", versions.find("esi", "v2"))


@pytest.fixture(scope="session")
def made() -> Path:
    """The project. Only copy it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return once("served", build)


@pytest.fixture
def project(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Params:
    """A copy of the project, entered."""
    examined.copy(made, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return params()


@dataclass
class Running:
    """A server that runs in this process."""

    url: str
    live: Live
    service: Service
    server: Server
    client: openai.OpenAI


@contextmanager
def running(given: Params, *, token: str | None = None, bounds: Bounds = BOUNDS, **of_live: float) -> Iterator[Running]:
    backend = Local("embedded", bounds.at_once)
    live = Live(given, "esi", backend, **{"keep_s": 60.0} | of_live)
    live.renew()
    service = Service(live, backend, bounds)
    limits = Limits(body_bytes=BODY_BYTES, request_s=bounds.request_s, idle_s=1.0)
    config = uvicorn.Config(
        Fence(service, token=token, limits=limits, refuse=refused), port=0, log_level="warning", access_log=False
    )
    server = Server(config, service)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            threading.Event().wait(0.01)
        host, port = server.servers[0].sockets[0].getsockname()
        url = f"http://{host}:{port}/v1"
        with openai.OpenAI(base_url=url, api_key=token or "none", max_retries=0) as client:
            yield Running(url, live, service, server, client)
    finally:
        server.should_exit = True
        thread.join()
        live.end()


@pytest.fixture(scope="module")
def served(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server that only answers, for the tests of a module."""
    folder = tmp_path_factory.mktemp("served")
    examined.copy(made, folder)
    with chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        with running(params()) as one:
            yield one


Start = Callable[..., Running]
