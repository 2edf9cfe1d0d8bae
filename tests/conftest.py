"""Fixtures that several test modules share."""

import copy
import gc
import signal
from typing import Any

import hypothesis
import pytest

from clinrl import determinism
from valid_params import VALID

determinism.pin()  # before any test module imports torch, which chooses its kernels then
hypothesis.settings.register_profile("clinrl", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("clinrl")

# A test run in the background ignores these, and would hand that on to the programs whose end is tested.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, usual)


LONGEST = ("flows", "test_train", "test_pipeline", "test_live", "test_privacy", "test_registry", "test_verify")
"""Groups of tests that take long."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep a file in one process, and the flows with the project and the server that they share; longest first, so that
    no process is left alone with them."""

    def group(item: pytest.Item) -> str:
        return "flows" if item.path.parent.name == "flows" else item.path.stem

    for item in items:
        item.add_marker(pytest.mark.xdist_group(group(item)))
    items.sort(key=lambda item: LONGEST.index(group(item)) if group(item) in LONGEST else len(LONGEST))


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
