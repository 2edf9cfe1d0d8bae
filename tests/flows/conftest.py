"""A scripted project in which everything was built once, and Prefect for the tests of the flows."""

import contextlib
import logging
import multiprocessing
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy
from sqlalchemy.schema import CreateIndex, CreateTable

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # the flows are no installed package: they run in the project's root

import scripted  # noqa: E402

import locks  # noqa: E402
from clinrl.config.params import load_params  # noqa: E402
from clinrl.registry import versions  # noqa: E402
from flows import servers  # noqa: E402
from processes import eventually, free_port, is_free  # noqa: E402

BUILT = (
    ("dataset", "d1"), ("dataset", "x1"), ("validate", "d1"), ("validate", "x1"), ("evaluate", "esi-base"),
    ("probe", "v1"), ("train", "v1"), ("evaluate", "v1"), ("probe", "v2"), ("train", "v2"), ("evaluate", "v2"),
    ("merge", "v2-full"), ("evaluate", "v2-full"),
)  # fmt: skip
"""Commands of the scripted project in the order of its graph."""
UNUSED = ("SCHEDULER", "LATE_RUNS", "FOREMAN", "TRIGGERS")
"""What a Prefect server does besides, again and again, and no flow here needs."""


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scripted project in which nothing is built but the base, and params.yaml is proven. Copy it."""
    from dvc.repo import Repo

    folder = tmp_path_factory.mktemp("bare")
    scripted.write_project(folder, scripted.sections())
    with contextlib.chdir(folder), Repo.init(no_scm=True) as repo:
        scripted.main("params")
        scripted.base(load_params(), "esi")
        for stage in ("params", "base@esi"):
            repo.commit(stage, force=True)
    return folder


@pytest.fixture(scope="session")
def whole(bare: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same project with everything built, and both versions registered. Copy it.

    The stages run in this process and DVC is told so, which is many times faster than a process each.
    """
    folder = tmp_path_factory.mktemp("whole") / "project"
    shutil.copytree(bare, folder)
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["scripted.py"])
        for module, name in (
            ("evaluation.evaluate", "answer_exam"),
            ("analysis.baselines", "answers"),
            ("reports.figures", "confusion"),
        ):
            patch.setattr(f"clinrl.{module}.{name}", None)  # to be restored after the script has replaced them
        patch.setattr("clinrl.reports.figures.curves", None)
        params = load_params()
        for address, name in BUILT:
            scripted.run(params, address, name)
        locks.store()
        for name in params.versions:
            versions.register(params, name)
    return folder


@pytest.fixture
def project(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the built project, as the working directory."""
    return _entered(whole, tmp_path, monkeypatch)


@pytest.fixture
def empty(bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the project with nothing but its base, as the working directory."""
    return _entered(bare, tmp_path, monkeypatch)


def _entered(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    shutil.copytree(source, folder)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="package")
def prefect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One Prefect server for these tests, with a database of its own. It ends with them.

    It is a fork of this process, where all that a server imports is there already, and its tables are made as Prefect
    declares them and not by all migrations since the first: together that is half of what these tests would cost.
    """
    folder = tmp_path_factory.mktemp("prefect")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_HOME", str(folder))
        servers.configure()
        from prefect import context, settings
        from prefect.logging.handlers import APILogWorker
        from prefect.server.database.orm_models import Base

        # Not the name that Prefect gives: a server of another process would find tables there and no migration.
        store, port = folder / "forked.db", free_port()
        engine = sqlalchemy.create_engine(f"sqlite:///{store}")
        with engine.begin() as connection:
            for table in Base.metadata.sorted_tables:
                connection.execute(CreateTable(table))
                for index in table.indexes:  # one is declared twice
                    connection.execute(CreateIndex(index, if_not_exists=True))
        engine.dispose()
        known = {
            settings.PREFECT_HOME: folder,
            settings.PREFECT_API_URL: f"http://{servers.HOST}:{port}/api",
            settings.PREFECT_SERVER_DATABASE_CONNECTION_URL: f"sqlite+aiosqlite:///{store}",
            settings.PREFECT_API_DATABASE_MIGRATE_ON_START: False,
            settings.PREFECT_API_BLOCKS_REGISTER_ON_START: False,
            settings.PREFECT_UI_ENABLED: False,
            **{getattr(settings, f"PREFECT_SERVER_SERVICES_{service}_ENABLED"): False for service in UNUSED},
        }
        with settings.temporary_settings(known), contextlib.ExitStack() as stack:
            everywhere = context._temporary_global_settings_context(context.get_settings_context())
            stack.enter_context(everywhere)  # for the threads that answer
            server = multiprocessing.get_context("fork").Process(target=_serve, args=(port,), daemon=True)
            server.start()
            eventually(lambda: not is_free(port), 120)
            yield
            APILogWorker.instance().drain()
            server.terminate()
            server.join()
            for name, logger in logging.root.manager.loggerDict.items():
                if name.startswith("prefect") and isinstance(logger, logging.Logger):
                    logger.disabled = True  # its threads would tell later tests that the server is gone


def _serve(port: int) -> None:
    import uvicorn
    from prefect.server.api.server import create_app

    warnings.simplefilter("ignore")  # in this process it is no test that is warned
    uvicorn.run(create_app(ephemeral=True, final=True), host=servers.HOST, port=port, log_level="error")
