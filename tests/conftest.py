"""Fixtures that several test modules share."""

import base64
import copy
import gc
import logging
import os
import shutil
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import hypothesis
import pytest

from clinrl.reports import figures
from clinrl.runtime import determinism
from clinrl.tracking import mlflow_store
from once import once
from valid_params import VALID

gc.disable()  # until the first test: of what is imported nothing is garbage, and looking for it takes seconds
determinism.pin()  # before any test module imports torch, which chooses its kernels then
for profile, examples in {"quick": 25, "clinrl": 30, "many": 500}.items():  # `--hypothesis-profile` names another
    hypothesis.settings.register_profile(profile, deadline=None, max_examples=examples)  # a busy machine is no failure
hypothesis.settings.load_profile("clinrl")

# A test run in the background ignores these, and would hand that on to the programs whose end is tested.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, usual)


BEGIN = mlflow_store._begin
FIGURES = {name: getattr(figures, name) for name in ("arms", "confusion", "curves", "groups")}
DOT = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGP4DwABAQEAsTj2FAAAAABJRU5ErkJggg==")
"""A picture of one pixel."""
TOGETHER = ("flows", "faults")
"""Folders whose files share a server, or a project that takes long to build."""
APART = ("test_clone", "test_steps")
"""Files there that need neither."""
LONGEST = (
    "flows",
    "faults",
    "test_clone",
    "test_pyfunc",
    "test_launch",
    "test_promotion",
    "test_versions",
    "test_privacy",
    "test_contract",
    "test_compare",
    "test_verify",
    "test_pipeline",
    "test_imaging_intake",
)
"""Groups of tests that take long."""


def group(nodeid: str) -> str:
    """The tests that one process runs: those of a file, or of a folder."""
    path = PurePosixPath(nodeid.partition("::")[0])
    return path.parent.name if path.parent.name in TOGETHER and path.stem not in APART else path.stem


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Longest first, so that no process is left alone with them."""
    found = [group(item.nodeid) for item in items]
    order = {name: LONGEST.index(name) if name in LONGEST else len(LONGEST) for name in found}
    items.sort(key=lambda item: order[group(item.nodeid)])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Send a group to one process. xdist's own groups set a test's node id, which pytest 9.2 no longer lets them."""
    from xdist.scheduler import LoadScopeScheduling

    class Grouped(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid)

    return Grouped(config, log)


@pytest.fixture(autouse=True, scope="module")
def _settled() -> None:
    """Keep the garbage collector from walking the loaded libraries, millions of objects that stay."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> None:
    """Take Prefect's handler from the root logger: it writes to the stream of the test that imported it, closed now."""
    for handler in [one for one in logging.root.handlers if type(one).__module__.startswith("prefect.")]:
        logging.root.removeHandler(handler)


@pytest.fixture(autouse=True, scope="session")
def _one_thread(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests run beside each other, so a second thread in each process costs more than it brings. What a training or an
    exam computes is the same; it is told that it has one processor, however many there are."""
    running = tmp_path_factory.mktemp("beside") / "running"
    running.write_text("1000", encoding="ascii")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(determinism.RUNNING, str(running))
        yield


@pytest.fixture(autouse=True, scope="session")
def _made_once() -> Iterator[None]:
    """An empty MLflow store takes seconds to make and a figure half of one. So each store begins as a copy of one that
    was made as usual, and each figure is the same dot; tests of either ask for `real`."""

    def begin(file: Path) -> None:
        shutil.copyfile(once("store", lambda: BEGIN(Path("mlflow.db").absolute())) / "mlflow.db", file)
        with closing(sqlite3.connect(file)) as store, store:
            store.execute("UPDATE experiments SET artifact_location = ?", [f"{(file.parent / 'artifacts').as_uri()}/0"])
        from mlflow.store.db import utils  # which reads all migrations to know the last, for each store that is opened

        if not hasattr(utils._get_latest_schema_revision, "cache_info"):
            patch.setattr(utils, "_get_latest_schema_revision", cache(utils._get_latest_schema_revision))

    def dot(*given: Any, **_options: Any) -> None:
        next(one for one in given if isinstance(one, Path)).write_bytes(DOT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlflow_store, "_begin", begin)
        for name in FIGURES:
            patch.setattr(figures, name, dot)
        yield


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores and figures are made as they are outside of tests."""
    monkeypatch.setattr(mlflow_store, "_begin", BEGIN)
    for name, draw in FIGURES.items():
        monkeypatch.setattr(figures, name, draw)


@pytest.fixture(scope="module")
def few_draws() -> Iterator[None]:
    """Intervals of fewer draws: a registration counts each again, which takes longest of all that it does."""
    import dolls  # which imports much: not for tests without it

    with dolls.few_draws():
        yield


@pytest.fixture
def seconds() -> Iterator[None]:
    """Fail after ten seconds of processor time: what would take minutes over a long text is a failure, and no hang."""

    def hangs(*_: object) -> None:
        raise AssertionError("still at work after ten seconds of processor time")

    before = signal.signal(signal.SIGVTALRM, hangs)
    signal.setitimer(signal.ITIMER_VIRTUAL, 10)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@pytest.fixture
def valid() -> dict[str, Any]:
    """A valid params.yaml as a mapping that is free to be edited."""
    return copy.deepcopy(VALID)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory without any key."""
    for name in [*os.environ]:
        if name.startswith("CLINRL_SIGNING") or name == "SSH_AUTH_SOCK":
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path
