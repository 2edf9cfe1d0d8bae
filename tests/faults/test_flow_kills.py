"""Ten kills of a retraining, from before its first record to its last merge: it ends where an undisturbed one ends.

Slow: the doll's versions are trained, examined, registered, released and merged, by the project's own commands.
"""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import chdir, closing
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from ruamel.yaml import YAML

import dolls
from clinrl import dataset, determinism, ledger, paths
from clinrl.train import STATUS

pytestmark = [pytest.mark.faults, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
RETRAIN = [sys.executable, "-m", "flows.retrain", "esi", "--approver", "Ada Lovelace"]
SEED = 10
SECTIONS: dict[str, Any] = {
    "versions": {name: dolls.PARAMS["versions"][name] for name in ("v1", "v2")},
    "datasets": {**dolls.PARAMS["datasets"], "x1": {**dolls.PARAMS["datasets"]["x1"], "cases": 40, "seed": 9}},
    "merges": {
        "folds": {"v2-full": {"task": "esi", "version": "v2", "exam": "x1"}},
        "blends": {
            "v1-v2": {
                "task": "esi", "first": "v1", "second": "v2", "method": "cat", "weights": [0.5, 0.5], "exam": "x1"
            }
        },
    },
    "mining": {},
    "gates": {"esi": {"least_cases": 20, "limits": {"dangerous": {"max": {"embedded": 0.5, "full": 0.5}}}}},
    "schedules": {"esi": {"cron": "0 3 * * 1", "answer_within_s": 60}},
}  # fmt: skip


class Moment(NamedTuple):
    """When a run is killed: so many seconds after its log or its files say that something has happened."""

    what: str
    happened: Callable[[Path, str], bool]
    after_s: float


def said(words: str) -> Callable[[Path, str], bool]:
    return lambda _project, log: words in log


def saved(version: str, step: int) -> Callable[[Path, str], bool]:
    """Whether a training has saved a checkpoint at this step, or later."""

    def happened(project: Path, _log: str) -> bool:
        for status in (project / ".clinrl/checkpoints").glob(f"{version}-*/{STATUS}"):
            if json.loads(status.read_text())["step"] >= step:
                return True
        return False

    return happened


MOMENTS = (
    Moment("before its server answers", said(""), 1.0),
    Moment("as it begins", said("Beginning flow run"), 0.2),
    Moment("validating", said("clinrl validate x1"), 1.0),
    Moment("while the trainer of v1 loads", said("clinrl train v1"), 2.0),
    Moment("in the middle of training v1", saved("v1", 4), 0.1),
    Moment("examining v1", said("clinrl evaluate v1"), 3.0),
    Moment("registering v1", said("Task run 'evaluate@v1' - Finished"), 0.5),
    Moment("in the middle of training v2", saved("v2", 4), 0.1),
    Moment("while v2 is promoted", said("limits hold"), 0.05),
    Moment("merging", said("clinrl merge v2-full"), 3.0),
)
"""In the order in which a run comes by. What was done before a kill is not done again."""


def command(project: Path) -> "subprocess.Popen[bytes]":
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_"))}
    with (project / "log").open("w") as log:
        env["PYTHONPATH"] = f"{ROOT}{os.pathsep}{ROOT}/src"
        return subprocess.Popen(RETRAIN, cwd=project, env=env, stderr=log)


def prepared(folder: Path) -> Path:
    """A project of the doll in which nothing is built but its base."""
    folder.mkdir()
    shutil.copyfile(ROOT / "dvc.yaml", folder / "dvc.yaml")
    with (folder / "params.yaml").open("w") as stream:
        YAML().dump(dolls.PARAMS | SECTIONS, stream)
    with chdir(folder):
        determinism.pin()
        doll = dolls.params(**{name: SECTIONS[name] for name in ("versions", "datasets", "merges")})
        dataset.stage(doll, "d1")  # the doll's base learns from these
        dolls.base(paths.base("esi"))
        shutil.rmtree(paths.cases("d1"))
        for words in (("init", "--no-scm", "--quiet"), ("commit", "--force", "base@esi")):
            subprocess.run([sys.executable, "-m", "dvc", *words], check=True, capture_output=True)
    return folder


def killed(project: Path, moment: Moment, jitter_s: float) -> None:
    """Start a retraining, kill it at a moment, and wait until nothing that it started is left."""
    process = command(project)
    while not moment.happened(project, (project / "log").read_text()):
        assert process.poll() is None, f"it ended before: {moment.what}\n{(project / 'log').read_text()}"
        time.sleep(0.02)
    time.sleep(moment.after_s + jitter_s)
    assert process.poll() is None, f"it ended before: {moment.what}"
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while working := processes(project):
        assert time.monotonic() < deadline, f"outlived the flow: {working}"
        time.sleep(0.1)


def processes(project: Path) -> list[str]:
    """The processes whose working directory is the project's, by what they were started as."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and Path(os.readlink(entry / "cwd")) == project:
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # it has ended, or is somebody else's
            continue
    return found


def outcome(project: Path) -> dict[str, Any]:
    """Where a project stands: every file that DVC made, who holds which name, and what the audit file says of it."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{project}/mlruns/mlflow.db")
    folders = [project / "data" / part for part in ("adapters", "merged", "graded", "reports")]
    files = (path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file())
    versions = [
        version
        for model in client.search_registered_models()
        for version in client.search_model_versions(f"name='{model.name}'")
    ]
    return {
        "files": {
            str(path.relative_to(project)): path.read_bytes() for path in files if path.name != "decisions.jsonl"
        },
        "lock": (project / "dvc.lock").read_text(),
        "versions": sorted((version.name, version.tags["version"], version.tags["digest"]) for version in versions),
        "aliases": {
            model.name: {
                alias: client.get_model_version_by_alias(model.name, alias).tags["version"] for alias in model.aliases
            }
            for model in client.search_registered_models()
        },
        "promoted": [
            line.body["version"] for line in ledger.read(project / paths.ledger()) if line.kind == "promotion"
        ],
    }


def states(project: Path) -> set[str]:
    """The states of all runs that Prefect and MLflow know of."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{project}/mlruns/mlflow.db")
    found = {
        run.info.status
        for experiment in client.search_experiments()
        for run in client.search_runs([experiment.experiment_id])
    }
    with closing(sqlite3.connect(project / ".clinrl/prefect/prefect.db")) as database:
        for table in ("flow_run", "task_run"):
            found |= {row[0] for row in database.execute(f"SELECT DISTINCT state_type FROM {table}")}
        assert database.execute("SELECT sum(active_slots) FROM concurrency_limit_v2").fetchone() == (0,)
    return found


def test_ten_kills_of_a_retraining_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = prepared(tmp_path / "start")
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    shutil.copytree(start, undisturbed)
    shutil.copytree(start, disturbed)
    random = Random(SEED)
    for moment in MOMENTS:
        jitter_s = random.uniform(0, 0.5)
        killed(disturbed, moment, jitter_s)
        with capsys.disabled():
            print(f"\nkilled {moment.what}, {moment.after_s + jitter_s:.2f} s later")
    for project in (disturbed, undisturbed):
        assert command(project).wait() == 0, (project / "log").read_text()
    assert outcome(disturbed) == outcome(undisturbed)
    assert outcome(disturbed)["promoted"] == ["v2", "v2-full"]
    assert states(disturbed) <= {"FINISHED", "COMPLETED", "CRASHED"}
    assert states(undisturbed) == {"FINISHED", "COMPLETED"}
