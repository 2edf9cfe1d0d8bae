"""Small projects that are attacked: the doll's real stages, and one whose version is champion."""

import os
import shutil
import sys
from collections.abc import Iterable
from contextlib import chdir
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from attempts import WENT_ON, forked

import dolls
import exhibits
import forks
import laid
from clinrl import paths
from clinrl.analysis import baselines
from clinrl.artifacts import identity, read_manifest, write_json, write_text
from clinrl.cli import main as cli
from clinrl.config.params import Params, load_params
from clinrl.data import dataset
from clinrl.provenance import dvc_yaml, statements
from clinrl.release import decisions, promotion
from clinrl.signing import approval, keys
from clinrl.signing.keys import Signer
from clinrl.tasks.base import get_task

ROOT = Path(__file__).resolve().parents[2]
APPROVER = "Ada Lovelace"
NAME = "v2"
"""The version that is promoted; v1 is its parent."""
EXAM = 40
"""Cases of the exam: enough for the limits of a gate."""
RECORDED = {
    "dataset": ("d1", "x1"),
    "validate": ("d1", "x1"),
    **dict.fromkeys(("probe", "train", "evaluate"), ("v1", "v2")),
}
"""Commands whose provenance is signed, and what they were about."""
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
    "rivals": {},
    "protocols": {"bases": {}, "versions": {}},
    "gates": {"esi": {"least_cases": 20, "limits": {"critical_under": {"max": {"embedded": 0.5, "full": 0.5}}}}},
    "schedules": {},
}


def write_params(folder: Path, **sections: Any) -> None:
    """Write the parameters and the real dvc.yaml into a project."""
    shutil.copyfile(ROOT / "dvc.yaml", folder / "dvc.yaml")
    laid.lay(folder, dolls.PARAMS | SECTIONS | sections)


def dvc(*words: str) -> int:
    """Run DVC in this process and the working directory; its exit code."""
    from dvc.cli import main

    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return int(main([*words, "--quiet"]))


def committed(groups: Iterable[str]) -> None:
    """Tell DVC that the outputs of groups of stages are up to date. Fails if DVC refuses."""
    assert dvc("commit", "--force", *groups) == 0


def released(folder: Path) -> None:
    """Build a project whose v2 is registered and promoted: real adapters on a real base, made-up answers, real reports.

    Every tenth case is called level 2, and of v1 every fifth; the others are answered right.
    """
    from dvc.repo import Repo

    shutil.copytree(dolls.built(), folder, dirs_exist_ok=True)
    write_params(folder, approvers={APPROVER: approver(folder).key.line})
    with chdir(folder):
        params = load_params(Path("params.yaml"))
        assert dvc("init", "--no-scm") == 0
        dvc_yaml.prove(Path("params.yaml"))
        dataset.stage(params, "x1")
        for data in ("d1", "x1"):
            proof = {"data": {"name": data, "identity": identity(read_manifest(paths.cases(data)))}}
            write_json(paths.data_proof(data), proof)
            write_text(paths.data_docs(data) / "index.html", f"<html>{data}</html>")
        dolls.examine(params, "esi-base", [3])
        for shift, (name, every) in enumerate({"v1": 5, NAME: 10}.items(), start=1):
            exhibits.adapter(name, shift)
            dolls.examine(params, name, [*[0] * (every - 1), 2])
        with Repo() as repo:
            repo.commit(force=True)  # all of it, which is read once then
        for command, names in RECORDED.items():
            for name in names:
                statements.record(command, name, params.scale)
        for name in ("v1", NAME):
            assert cli.main(["register", name]) == 0
        promote(params)


def released_apart(folder: Path) -> Path:
    """`released` in a process of its own, so that this one holds no open store when it is forked; the folder again."""
    preload()
    dolls.built()
    outcome = forked(partial(released, folder), 900)
    assert outcome.kind == WENT_ON, outcome.says
    return folder


def learned(folder: Path) -> None:
    """Let this process learn what every decision asks: what the simple policies answer to the exam of a project.

    They are remembered by their cases, so that a fork of this process learns nothing, unless it finds other cases.
    """
    with chdir(folder):
        version, task = load_params().versions[NAME], get_task("esi")
        exam, training = (list(dataset.read_cases(paths.cases(name), task)) for name in (version.exam, version.data))
        baselines.answers(task, exam, training)


def approver(folder: Path) -> Signer:
    """The key of the person who approves, which is not this checkout's, made at the first call.

    `folder` is the project; the key lies beside it.
    """
    own = folder.with_name("ada")
    own.mkdir(exist_ok=True)
    with chdir(own):
        return keys.signer("embedded")


def promote(params: Params) -> None:
    """Decide on v2 and promote it, as the person who approves it does."""
    decision = decisions.decide(params, NAME)
    token = approval.token(decision.digest, APPROVER, approver(Path.cwd()))
    envelope = approval.check_token(params, decision.digest, token, APPROVER)
    promotion.promote(params, NAME, decision=decision, approval=envelope)


def preload() -> None:
    """Import what commands import when they need it, so that each fork of this process finds it there."""
    for name in (
        *forks.DVC_NEEDS, "alembic.command", "dvc.cli", "dvc.commands.checkout", "dvc.commands.commit", "dvc.repo",
        "great_expectations", "mlflow.store.artifact.local_artifact_repo",
        "mlflow.store.model_registry.sqlalchemy_workspace_store", "mlflow.store.tracking.sqlalchemy_workspace_store",
        "model_signing.signing", "model_signing.verifying", "peft", "sklearn.linear_model",
        "transformers",
        "transformers.models.qwen3.modeling_qwen3", "clinrl.training.trl",
        "clinrl.cli.registry_commands", "clinrl.evaluation.evaluate", "clinrl.evaluation.error_analysis",
        "clinrl.training.launch", "clinrl.data.validate",
    ):  # fmt: skip
        import_module(name)


MINED = {"task": "esi", "task_version": 2, "use": "mine", "mix": "reporting", "cases": 320, "seed": 5}
"""Enough cases of the rule that v2 misses for a draft to be made of them."""
BUILT = (
    ("dataset", "d1"), ("dataset", "x1"), ("dataset", "m1"), ("validate", "d1"), ("validate", "x1"), ("validate", "m1"),
    ("evaluate", "esi-base"), ("probe", "v1"), ("train", "v1"), ("evaluate", "v1"), ("probe", "v2"), ("train", "v2"),
    ("mine", "v2"),
)  # fmt: skip
"""Stages of the scripted project that are done before it is attacked; the exam of v2 is not."""


def doll(folder: Path) -> None:
    """A project of real stages in which nothing is built but the doll's base."""
    folder.mkdir(parents=True)
    fold = {"folds": {"v2-full": {"task": "esi", "version": "v2", "exam": "x1"}}, "blends": {}}
    exam = SECTIONS["datasets"]["x1"]
    mine = {**MINED, "mix": exam["mix"], "cases": EXAM}
    write_params(
        folder,
        merges=fold,
        mining={"v2": {"task": "esi", "data": "m1"}},
        datasets={"d1": dolls.PARAMS["datasets"]["d1"], "x1": exam, "m1": mine},
    )
    for part in (paths.base("esi"), paths.adapter("esi-base")):
        shutil.copytree(dolls.built() / part, folder / part)
    with chdir(folder):
        assert dvc("init", "--no-scm") == 0
        dvc_yaml.prove(Path("params.yaml"))
        committed(["params", "base@esi"])


def scripted_project(folder: Path, built: Iterable[tuple[str, str]] = BUILT) -> None:
    """The project of the flows' tests, in which training and answering are scripted, with these stages done."""
    import scripted

    folder.mkdir(parents=True)
    sections = {**dolls.PARAMS, **scripted.PARAMS, **{name: SECTIONS[name] for name in ("versions", "external")}}
    sections |= {
        "datasets": {**SECTIONS["datasets"], "m1": MINED},
        "merges": {"folds": scripted.PARAMS["merges"]["folds"], "blends": {}},
        "mining": {"v2": {"task": "esi", "data": "m1"}},
    }
    scripted.write_project(folder, sections)

    def build() -> None:
        with chdir(folder):
            sys.argv = ["scripted.py"]
            assert dvc("init", "--no-scm") == 0
            dvc_yaml.prove(Path("params.yaml"))
            params = load_params()
            for stage, name in (("base", "esi"), *built):
                scripted.run(params, stage, name)
            done = [f"{stage}@{name}" for stage, name in (("base", "esi"), *built)]
            committed(["params"])
            committed("baseline@esi" if address == "evaluate@esi-base" else address for address in done)

    outcome = forked(build, 600)  # apart, since the script puts itself in the place of what answers
    assert outcome.kind == WENT_ON, outcome.says
