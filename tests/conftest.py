"""Fixtures that several test modules share."""

import copy
from typing import Any

import hypothesis
import pytest

from clinrl import determinism
from valid_params import VALID

determinism.pin()  # before any test module imports torch, which chooses its kernels then
hypothesis.settings.register_profile("clinrl", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("clinrl")


@pytest.fixture
def valid() -> dict[str, Any]:
    """A valid params.yaml as a mapping that is free to be edited."""
    return copy.deepcopy(VALID)
