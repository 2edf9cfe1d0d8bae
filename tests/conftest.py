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


@pytest.fixture(autouse=True, scope="module")
def _settled() -> None:
    """Keep the garbage collector from walking the loaded libraries, millions of objects that stay.

    Others ask it to, statsmodels with every correction of p values.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def valid() -> dict[str, Any]:
    """A valid params.yaml as a mapping that is free to be edited."""
    return copy.deepcopy(VALID)
