"""Fixtures that several test modules share."""

import copy
from typing import Any

import pytest

from valid_params import VALID


@pytest.fixture
def valid() -> dict[str, Any]:
    """A valid params.yaml as a mapping that is free to be edited."""
    return copy.deepcopy(VALID)
