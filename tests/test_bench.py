"""The benchmarks at toy size: that they run and compare what they say."""

import copy
import math
import shutil
from pathlib import Path

import pytest
from ruamel.yaml import YAML

import dolls
from bench import grpo_step, threads
from bench import run as bench_run
from clinrl.training import launch


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A folder with a project whose v2 follows a reward."""
    shutil.copytree(dolls.built(), tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    content = copy.deepcopy(dolls.PARAMS)
    content["profiles"][content["versions"]["v2"]["profile"]]["trainer"]["embedded"]["on_alarm"] = (
        "warn"  # it knows next to nothing
    )
    YAML(typ="safe").dump(content, Path("params.yaml"))
    return tmp_path


def by_name(rows):
    return {row["what"]: row["value"] for row in rows}


@pytest.mark.slow
def test_a_step_is_compared_with_that_of_a_script(project, monkeypatch):
    monkeypatch.setattr(grpo_step, "MEASURED", "v2")
    with dolls.in_process():
        launch.stage(dolls.params(), "v1")
    (project / "there").mkdir()
    found = by_name(grpo_step.measured(project / "there", steps=3, rounds=1))
    assert next(iter(found)) == "GRPO step against stock TRL"
    ours, theirs = found["GRPO step, clinrl train, shared paths"], found["GRPO step, bare TRL"]
    assert found["GRPO step against stock TRL"] == pytest.approx(ours / theirs, rel=0.05)
    assert 0 < found["GRPO step, arithmetic limit"] < ours
    assert 0 <= found["groups without a signal"] <= 100


def test_waiting_is_compared_with_each_way_alone():
    alone, busy = {threads.OURS: 0.5, threads.OPENMP: 0.4}, {threads.OURS: 1.0, threads.OPENMP: 4.0}
    found = list(by_name(threads.rows(alone, busy)).values())
    assert found == [0.5, 1.25, 2.0, 10.0]


def test_every_benchmark_is_one_that_runs_by_itself():
    scripts = {path.name for path in bench_run.HERE.glob("*.py")}
    assert set(bench_run.SCRIPTS) <= scripts
    assert scripts - set(bench_run.SCRIPTS) == {"run.py", "alarms.py", "judges.py"}  # these write pages of their own
    assert math.isfinite(sum(row["value"] for record in bench_run.recorded().values() for row in record["rows"]))
