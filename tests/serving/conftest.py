"""Projects whose versions answer."""

import shutil
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import pytest
from answering import ADA, Running, running
from ruamel.yaml import YAML

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
from once import once


def register() -> None:
    """v1 and v2 are registered; v2, the later one, is the candidate."""
    shutil.copytree(exhibits.built(), Path(), dirs_exist_ok=True)
    with dolls.few_draws():
        for name in ("v1", "v2"):
            versions.register(exhibits.params(), name)


def promotable() -> Params:
    """The params of the project that `promote` makes."""
    return dolls.params(gates=examined.GATES, datasets=examined.DATASETS)


def promote() -> None:
    """v2 was the champion and v1 is, so that a rollback brings v2 back."""
    shutil.copytree(dolls.built(), Path(), dirs_exist_ok=True)
    YAML().dump(dolls.PARAMS | {"gates": examined.GATES, "datasets": examined.DATASETS}, Path("params.yaml"))
    given = promotable()
    dataset.stage(given, "x1")
    named = {"data": {"name": "x1", "identity": identity(read_manifest(paths.cases("x1")))}}
    write_json(paths.data_proof("x1"), named)
    with dolls.few_draws():
        dolls.examine(given, "esi-base", [1])
        for name, pattern in {"v1": examined.RIGHT, "v2": examined.GOOD}.items():
            exhibits.adapter(name, int(name[1]))
            dolls.examine(given, name, pattern)
        locks.record(given)
        for name in ("v1", "v2"):
            versions.register(given, name)
        for name in ("v2", "v1"):
            examined.promote(given, name, ADA, promotion.decide(given, name))


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
    examined.copy(once("promoted", promote), tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return promotable()


@pytest.fixture(scope="module")
def served(registered: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server that only answers, for the tests of a module."""
    folder = tmp_path_factory.mktemp("served")
    examined.copy(registered, folder)
    with chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        with running(exhibits.params()) as one:
            yield one
