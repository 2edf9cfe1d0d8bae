"""Small projects that are attacked: the doll's real stages, and one whose version was examined, registered and promoted."""

import os
import shutil
import sys
from collections.abc import Iterable
from contextlib import chdir
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

import dolls
import exhibits
from clinrl import cli, dataset, paths
from clinrl.artefacts import identity, read_manifest, write_json, write_text
from clinrl.params import Params, load_params

ROOT = Path(__file__).resolve().parents[2]
APPROVER = "Ada Lovelace"
NAME = "v2"
"""The version that is promoted; v1 is its parent."""
EXAM = 40
"""Cases of the exam: enough for the limits of a gate."""
GROUPS = ("base", "dataset", "validate", "baseline", "probe", "train", "evaluate")
"""Groups of stages whose outputs the released project holds."""
SECTIONS: dict[str, Any] = {
    "versions": {name: dolls.PARAMS["versions"][name] for name in ("v1", NAME)},
    "datasets": {
        **dolls.PARAMS["datasets"],
        "x1": {**dolls.PARAMS["datasets"]["x1"], "cases": EXAM, "seed": 9},
    },
    "merges": {"folds": {}, "blends": {}},
    "mining": {},
    "imports": {},
    "external": {},
    "protocols": {"bases": {}, "versions": {}},
    "gates": {"esi": {"least_cases": 20, "limits": {"dangerous": {"max": {"embedded": 0.5, "full": 0.5}}}}},
    "schedules": {},
}


def write_params(folder: Path, **sections: Any) -> None:
    """Write params.yaml and the real dvc.yaml into a project."""
    shutil.copyfile(ROOT / "dvc.yaml", folder / "dvc.yaml")
    with (folder / "params.yaml").open("w", encoding="utf-8") as stream:
        YAML().dump(dolls.PARAMS | SECTIONS | sections, stream)


def dvc(*words: str) -> int:
    """Run DVC in this process and the working directory; its exit code."""
    from dvc.cli import main

    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return int(main([*words, "--quiet"]))


def committed(groups: Iterable[str]) -> None:
    """Tell DVC that the outputs of groups of stages are up to date. Fails if DVC refuses."""
    assert dvc("commit", "--force", *groups) == 0


def released(folder: Path) -> Params:
    """Build a project whose v2 is registered and promoted: real adapters on a real base, made-up answers, real reports.

    The gold turns are answered with a mistake of one level every tenth case (v1: every fifth).
    """
    shutil.copytree(dolls.built(), folder, dirs_exist_ok=True)
    write_params(folder)
    with chdir(folder):
        params = load_params(Path("params.yaml"))
        assert dvc("init", "--no-scm") == 0
        dataset.stage(params, "x1")
        for data in ("d1", "x1"):
            proof = {"data": {"name": data, "identity": identity(read_manifest(paths.cases(data)))}}
            write_json(paths.data_proof(data), proof)
            write_text(paths.data_docs(data) / "index.html", f"<html>{data}</html>")
        dolls.sit(params, "esi-base", [3])
        for shift, (name, every) in enumerate({"v1": 5, NAME: 10}.items(), start=1):
            exhibits.adapter(name, shift)
            dolls.sit(params, name, levels(params, every))
        committed(GROUPS)
        for name in ("v1", NAME):
            assert cli.main(["register", name]) == 0
        assert cli.main(["promote", NAME, "--approver", APPROVER]) == 0
    return params


def levels(params: Params, every: int) -> list[int]:
    """The right level of each case of the exam, and one level off every so many cases."""
    task = dataset.get_task("esi")
    golds = [task.label(case) for case in dataset.read_cases(paths.cases("x1"), task)]
    return [
        level if place % every else level + (1 if level < 5 else -1) for place, level in enumerate(golds)
    ]
