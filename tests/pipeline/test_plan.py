"""The plan: order, columns, forms of output, and states as a real DVC project gives them."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from clinrl.config.params import Params, load_params
from clinrl.errors import ParamsError
from clinrl.pipeline import plan

DVC_YAML = """
stages:
  dataset:
    foreach: ${datasets}
    do:
      cmd: mkdir -p data/cases/${key} && echo ${item.cases} > data/cases/${key}/cases.jsonl
      params: ["datasets.${key}.cases"]
      outs: ["data/cases/${key}"]
  validate:
    foreach: ${datasets}
    do:
      cmd: mkdir -p data/reports/data && cp data/cases/${key}/cases.jsonl data/reports/data/${key}.json
      deps: ["data/cases/${key}"]
      outs: [{"data/reports/data/${key}.json": {cache: false}}]
  probe:
    foreach: ${versions}
    do:
      cmd: mkdir -p data/reports/probe && echo 1 > data/reports/probe/${key}.json
      deps: ["data/reports/data/${item.data}.json"]
      outs: [{"data/reports/probe/${key}.json": {cache: false}}]
  train:
    foreach: ${versions}
    do:
      cmd: mkdir -p data/adapters/${key}
      deps: ["data/reports/probe/${key}.json"]
      outs: ["data/adapters/${key}"]
  evaluate:
    foreach: ${versions}
    do:
      cmd: mkdir -p data/graded/${key}
      deps: ["data/adapters/${key}"]
      outs: ["data/graded/${key}"]
"""


def dvc(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "dvc", *arguments], check=True, capture_output=True)


@pytest.fixture
def params(valid, tmp_path, monkeypatch) -> Params:
    """Two versions, the child named first, in an empty folder without DVC."""
    for section in ("merges", "mining", "comparisons"):
        del valid[section]
    valid["versions"] = {name: valid["versions"][name] for name in ("v2", "v1")}
    valid["versions"]["v2"]["why"] = "two\n\tlines"
    with (tmp_path / "params.yaml").open("w", encoding="utf-8") as stream:
        YAML(typ="safe", pure=True).dump(valid, stream)
    monkeypatch.chdir(tmp_path)
    return load_params()


@pytest.fixture
def dvc_project(params, monkeypatch) -> Params:
    """The same in a real DVC project, nothing built."""
    monkeypatch.setenv("DVC_NO_ANALYTICS", "1")
    dvc("init", "--no-scm", "-q")
    Path("dvc.yaml").write_text(DVC_YAML)
    return params


def rows(capsys) -> list[dict[str, str]]:
    header, *lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    return [dict(zip(header, line, strict=True)) for line in lines]


def test_tab_separated_when_not_on_a_terminal(params, capsys):
    plan.stage(params)
    first, second = rows(capsys)
    assert tuple(first) == plan.COLUMNS
    assert (first["version"], second["version"]) == ("v1", "v2")
    assert (second["parent"], second["method"], second["seed"], second["why"]) == ("v1", "grpo", "46", "two lines")
    assert first["steps"] == str(params.trainer("sft").steps)


def test_without_dvc_every_state_is_unknown_and_says_why(params, capsys):
    plan.stage(params, as_json=True)
    printed = capsys.readouterr()
    assert {row[stage] for row in json.loads(printed.out) for stage in plan.STAGES} == {"unknown"}
    assert printed.err == "clinrl: no .dvc folder here, so nothing is known about the stages\n"


def test_one_version_shows_its_ancestors_only(params, capsys):
    plan.stage(params, "v1")
    assert [row["version"] for row in rows(capsys)] == ["v1"]
    plan.stage(params, "v2", as_json=True)
    assert [row["version"] for row in json.loads(capsys.readouterr().out)] == ["v1", "v2"]


def test_json_keeps_numbers(params, capsys):
    plan.stage(params, "v1", as_json=True)
    (row,) = json.loads(capsys.readouterr().out)
    assert tuple(row) == plan.COLUMNS
    assert row["seed"] == 43
    assert isinstance(row["steps"], int)


def test_an_unknown_version_is_refused(params):
    with pytest.raises(ParamsError, match=r"'v9' is not a version; allowed: v1, v2"):
        plan.stage(params, "v9")


def test_no_versions_print_a_header_only(params, capsys):
    plan.stage(params.model_copy(update={"versions": {}}))
    assert rows(capsys) == []


def test_nothing_built_is_missing(dvc_project, capsys):
    plan.stage(dvc_project)
    assert {row[stage] for row in rows(capsys) for stage in plan.STAGES} == {"missing"}


def test_states_follow_dvc(dvc_project, capsys):
    dvc("repro", "-q", "train@v1")
    plan.stage(dvc_project, "v1")
    (row,) = rows(capsys)
    assert [row[stage] for stage in plan.STAGES] == ["up to date"] * 4 + ["missing"]

    Path("params.yaml").write_text(Path("params.yaml").read_text().replace("cases: 4000", "cases: 40"))
    plan.stage(load_params(), "v1")
    (row,) = rows(capsys)
    assert (row["dataset"], row["validate"]) == ("stale", "up to date")

    Path("data/reports/probe/v1.json").unlink()
    plan.stage(load_params(), "v1")
    (row,) = rows(capsys)
    assert (row["probe"], row["train"]) == ("missing", "stale")


def test_a_refusal_of_dvc_makes_states_unknown_and_is_passed_on(dvc_project, capsys):
    Path("dvc.yaml").write_text("stages: {}\n")
    plan.stage(dvc_project)
    printed = capsys.readouterr()
    assert "unknown" in printed.out
    assert "up to date" not in printed.out
    assert printed.err.startswith("clinrl: dvc status: ")
    assert "does not exist" in printed.err


def test_an_aligned_table_on_a_terminal(params):
    """A real terminal: the child's standard output is a pseudo-terminal."""
    parent, child = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "clinrl", "plan"],
        stdout=child,
        stderr=subprocess.PIPE,
        env={**os.environ, "COLUMNS": "220", "TERM": "xterm"},
        check=False,
    )
    os.close(child)
    text = os.read(parent, 65536).decode()
    os.close(parent)
    assert done.returncode == 0
    assert "\t" not in text
    header, first, second = text.splitlines()[:3]
    assert header.split()[0].endswith("version") or "version" in header
    assert "v1" in first
    assert "v2" in second


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ([], "up to date"),
        ([{"changed deps": {"data/x": "modified"}}], "stale"),
        ([{"changed outs": {"present": "modified"}}], "stale"),
        ([{"changed outs": {"present": "not in cache"}}], "stale"),
        ([{"changed outs": {"absent": "not in cache"}}], "missing"),
        ([{"changed deps": {"data/x": "deleted"}}, {"changed outs": {"absent": "deleted"}}], "missing"),
        (["always changed"], "stale"),
        (["changed command"], "stale"),
    ],
)
def test_a_state_is_read_from_dvcs_changes(changes, state, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("present").touch()
    assert plan._state(changes) == state
