"""The page on adding a task holds: its task keeps the contract, and its commands run in order, to the registry."""

import ast
import copy
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from ruamel.yaml import YAML

import clinrl.tasks
import dolls
import locks
from clinrl import paths
from clinrl.cli import main as cli
from clinrl.config.params import load_params
from clinrl.evaluation.answers import load_report
from clinrl.registry import versions
from clinrl.tasks.base import get_task
from clinrl.training import launch, worker

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/tutorials/add-a-task.md").read_text(encoding="utf-8")


FEW = """
import hypothesis
hypothesis.settings.register_profile("few", deadline=None, max_examples=10)
hypothesis.settings.load_profile("few")
"""


def block(language: str) -> str:
    """The one block of code in a language."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return found


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project with nothing but the task of the page, entered. Training runs in this process, which knows the task."""
    home = tmp_path / "tasks" / "qsofa"
    home.mkdir(parents=True)
    (home / "__init__.py").write_text(block("python"), encoding="utf-8")
    monkeypatch.setattr(clinrl.tasks, "__path__", [*clinrl.tasks.__path__, str(home.parent)])
    monkeypatch.setattr(launch, "run_worker", lambda spec, **_: worker.main([str(spec)]))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    folder = tmp_path / "project"
    (folder / "params").mkdir(parents=True)
    with (folder / "params.yaml").open("w") as stream:
        YAML(typ="safe").dump({"scale": "embedded", "modes": copy.deepcopy(dolls.PARAMS["modes"])}, stream)
    (folder / "params/qsofa.yaml").write_text(block("yaml"), encoding="utf-8")
    monkeypatch.chdir(folder)
    yield folder
    for number, handler in before.items():
        signal.signal(number, handler)
    sys.modules.pop("clinrl.tasks.qsofa", None)
    vars(clinrl.tasks).pop("qsofa", None)


def test_the_task_is_as_short_as_the_page_says() -> None:
    assert len(block("python").splitlines()) < 150
    assert max(map(len, block("python").splitlines())) <= 120


def test_each_number_of_its_reward_has_a_meaning() -> None:
    classes = [node for node in ast.parse(block("python")).body if isinstance(node, ast.ClassDef)]
    (body,) = (node.body for node in classes if node.name == "Reward")
    fields = [pair for pair in pairwise(body) if isinstance(pair[0], ast.AnnAssign)]
    assert len(fields) == 4
    assert all(isinstance(after, ast.Expr) for _, after in fields), "write a docstring below the field"


@pytest.mark.long
def test_the_new_folder_keeps_the_contract_of_tasks(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "src/clinrl/tasks/qsofa").mkdir()
    (tmp_path / "src/clinrl/tasks/qsofa/__init__.py").write_text(block("python"), encoding="utf-8")
    contract = shutil.copy(ROOT / "tests/tasks/test_contract.py", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "conftest.py").write_text(FEW)
    env = os.environ | {"PYTHONPATH": f"{tmp_path}/src{os.pathsep}{ROOT}/tests"}
    for words in ([contract, "qsofa"], ["-m", "pytest", "-k", "qsofa", "-p", "no:cacheprovider", contract]):
        done = subprocess.run([sys.executable, *words], env=env, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "golden/qsofa-v1.json").is_file()


@pytest.mark.long
def test_every_command_of_the_page_runs_to_the_registry(project: Path) -> None:
    task = get_task("qsofa")
    policies = task.policies()
    assert {"always_low", "always_high", "random", "hedge", "empty", "truncated", "mediocre"} == set(policies)
    for command in block("sh").splitlines():
        if " register " in command:
            locks.record(load_params())  # as `dvc repro` does
        assert cli.main(command.split()[1:]) == 0, command
    report = load_report("qsofa-v2", "direct")
    assert list(task.compared) == ["exact", "missed"]
    assert {"exact", "missed", "no_parse", "clipped"} <= set(report.metrics)
    assert {test.metric for test in report.paired} == {"exact", "missed"}
    assert "\n| missed | " in (paths.report("qsofa-v2") / "report.md").read_text()
    entry = versions.find("qsofa", "qsofa-v2")
    assert entry is not None
