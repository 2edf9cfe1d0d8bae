"""Projects whose versions answer."""

import shutil
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import pytest
from answering import Running, running

import champions
import dolls
import examined
import exhibits
from clinrl.config.params import Params
from clinrl.registry import versions
from once import once


def register() -> None:
    """v1 and v2 are registered; v2, the later one, is the candidate."""
    shutil.copytree(exhibits.built(), Path(), dirs_exist_ok=True)
    with dolls.few_draws():
        for name in ("v1", "v2"):
            versions.register(exhibits.params(), name)


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
    examined.copy(champions.built(), tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return champions.params()


@pytest.fixture(scope="module")
def served(registered: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server that only answers, for the tests of a module."""
    folder = tmp_path_factory.mktemp("served")
    examined.copy(registered, folder)
    with chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        with running(exhibits.params()) as one:
            yield one
