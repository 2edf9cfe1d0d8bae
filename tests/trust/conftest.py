"""What tests of signatures share: an empty checkout of their own, without keys of the environment."""

import os
from pathlib import Path

import pytest


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory without any key."""
    for name in [*os.environ]:
        if name.startswith("CLINRL_SIGNING") or name == "SSH_AUTH_SOCK":
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path
