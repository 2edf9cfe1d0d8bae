"""A project of tiny models that answer, in which v1 is the champion and v2 was it before."""

import shutil
from pathlib import Path

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
from clinrl.release import decisions
from once import once

ADA = "Ada Lovelace"
SECTIONS = {"gates": examined.GATES, "datasets": examined.DATASETS}


def params(**changes: object) -> Params:
    """The project's params; `changes` replaces whole sections."""
    return dolls.params(**SECTIONS | changes)


def built() -> Path:
    """A folder with the project, made once a test run. Only copy it."""
    return once("promoted", promote)


def promote() -> None:
    """v2 was the champion and v1 is, so that a rollback brings v2 back."""
    shutil.copytree(dolls.built(), Path(), dirs_exist_ok=True)
    YAML().dump(dolls.PARAMS | SECTIONS, Path("params.yaml"))
    given = params()
    dataset.stage(given, "x1")
    named = {"name": "x1", "identity": identity(read_manifest(paths.cases("x1")))}
    write_json(paths.data_proof("x1"), {"data": named, "summary": {}, "expectations": []})
    with dolls.few_draws():
        dolls.examine(given, "esi-base", [1])
        for name, pattern in {"v1": examined.RIGHT, "v2": examined.GOOD}.items():
            exhibits.adapter(name, int(name[1]))
            dolls.examine(given, name, pattern)
        locks.record(given)
        for name in ("v1", "v2"):
            versions.register(given, name)
        for name in ("v2", "v1"):
            examined.promote(given, name, ADA, decisions.decide(given, name))
