"""Fixtures that several test modules share."""

import copy
import gc
import os
import signal
from pathlib import Path, PurePosixPath
from typing import Any

import hypothesis
import pytest

from clinrl.runtime import determinism
from valid_params import VALID

determinism.pin()  # before any test module imports torch, which chooses its kernels then
hypothesis.settings.register_profile("clinrl", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("clinrl")

# A test run in the background ignores these, and would hand that on to the programs whose end is tested.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, usual)


TOGETHER = ("flows", "faults")
"""Folders whose files share a project that takes long to build."""
LONGEST = (
    "flows",
    "faults",
    "test_launch",
    "test_verify",
    "test_privacy",
    "test_pyfunc",
    "test_pipeline",
    "test_live_metrics",
)
"""Groups of tests that take long."""


def group(nodeid: str) -> str:
    """The tests that one process runs: those of a file, or of a folder."""
    path = PurePosixPath(nodeid.partition("::")[0])
    return path.parent.name if path.parent.name in TOGETHER else path.stem


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
    """Keep the garbage collector from walking the loaded libraries: millions of objects that stay, at each collection
    that a library asks for, as statsmodels does with every correction of p values."""
    gc.collect()
    gc.freeze()


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
