"""The plan: order, columns, forms of output, and states as a real DVC project gives them."""

import json
import os
import pty
import shutil
import subprocess
import sys
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from clinrl.cli.main import main
from clinrl.config.params import Params, load_params
from clinrl.errors import ParamsError
from clinrl.pipeline import plan
from clinrl.provenance import dvc_yaml
from forks import dvc
from valid_params import VALID

ROOT = Path(__file__).parents[2]
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


@pytest.fixture(scope="module")
def empty(tmp_path_factory) -> Path:
    """A folder of which DVC made a project."""
    folder = tmp_path_factory.mktemp("empty")
    dvc("init", "--no-scm", "-q", where=folder)
    return folder


@pytest.fixture
def dvc_project(params, empty) -> Params:
    """The same in a real DVC project, nothing built."""
    shutil.copytree(empty / ".dvc", ".dvc")
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


def test_a_name_of_a_comparison_and_of_a_version_needs_its_section(valid):
    valid["comparisons"] = dict.fromkeys(("recipes", "v1"), valid["comparisons"]["recipes"])
    params = Params.model_validate(valid)
    assert plan.generations(params, "recipes") == plan.generations(params, "esi") == [["v1"], ["v2", "v3"]]
    with pytest.raises(ParamsError, match=r"has comparisons\.v1 and versions\.v1; give one of these in place of v1"):
        plan.generations(params, "v1")
    assert plan.generations(params, "versions.v1") == [["v1"]]
    assert plan.generations(params, "comparisons.v1") == [["v1"], ["v2", "v3"]]
    with pytest.raises(ParamsError, match=r"'v9' is not a task, a comparison or a version"):
        plan.generations(params, "v9")


def test_no_versions_print_a_header_only(params, capsys):
    plan.stage(params.model_copy(update={"versions": {}}))
    assert rows(capsys) == []


def test_nothing_built_is_missing(dvc_project, capsys):
    plan.stage(dvc_project)
    assert {row[stage] for row in rows(capsys) for stage in plan.STAGES} == {"missing"}


@pytest.mark.long
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


def test_a_stage_whose_record_lacks_something_is_stale(dvc_project):
    dvc("repro", "-q", "train@v1")
    whole = Path("dvc.lock").read_text()
    assert dvc_yaml.states(dvc_yaml.read())["train@v1"] == "up to date"
    drawn = next(name for name, entry in YAML(typ="safe").load(whole)["stages"].items() if "params" in entry)
    for stage, kind in (("train@v1", "deps"), (drawn, "params")):
        lock = YAML(typ="safe").load(whole)
        entry = lock["stages"][stage]
        entry["deps"].pop() if kind == "deps" else next(iter(entry["params"].values())).popitem()
        YAML(typ="safe").dump(lock, Path("dvc.lock"))
        assert dvc_yaml.states(dvc_yaml.read())[stage] == "stale"
        assert ours() == judged()


def test_what_cannot_be_read_makes_states_unknown_and_says_why(dvc_project, capsys):
    for text, why in {
        "stages: {}\n": "dvc.yaml has no stage dataset@",
        "stages: [\n": "dvc.yaml is no pipeline that DVC would run; `dvc status` says why",
        "stages: {train: {cmd: c, wdir: x}}\n": "dvc.yaml: train has wdir, which clinrl does not read",
    }.items():
        Path("dvc.yaml").write_text(text)
        plan.stage(dvc_project)
        printed = capsys.readouterr()
        assert "unknown" in printed.out
        assert "up to date" not in printed.out
        assert printed.err.startswith(f"clinrl: {why}")


def judged() -> dict[str, str]:
    """How DVC itself says that the stages stand that changed."""
    changed = json.loads(dvc("status", "--json"))
    found = {}
    for address, changes in changed.items():
        outs = {path for change in changes if isinstance(change, dict) for path in change.get("changed outs", {})}
        found[address] = "stale" if all(map(os.path.exists, outs)) else "missing"
    return found


def ours() -> dict[str, str]:
    states = dvc_yaml.states(dvc_yaml.read())
    assert len(states) > 8
    return {address: state for address, state in states.items() if state != "up to date"}


def test_the_tree_of_a_task(dvc_project, valid, capsys):
    params = Params.model_validate(valid | {"merges": VALID["merges"], "versions": VALID["versions"]})
    plan.draw(params, "esi")
    lines = capsys.readouterr().out.splitlines()
    names = [line.replace("│", "").replace("├─", "").replace("└─", "").split()[0] for line in lines]
    assert names[:2] == ["esi-base", "v1"]
    assert sorted(names) == sorted(
        ["esi-base", *VALID["versions"], *VALID["merges"]["folds"], *VALID["merges"]["blends"]]
    )
    assert lines[1].startswith("└─ v1 ")
    assert max(map(len, lines)) <= 80
    with pytest.raises(ParamsError, match=r"'esl' is not a task with a base; did you mean esi\?"):
        plan.draw(params, "esl")


def test_a_lineage_of_any_length_is_drawn(params, valid, capsys):
    names = ["v1", *(f"z{n}" for n in range(sys.getrecursionlimit()))]
    chain = {name: VALID["versions"]["v2"] | {"parent": parent} for parent, name in pairwise(names)}
    long = Params.model_validate(valid | {"versions": {"v1": VALID["versions"]["v1"], **chain}})
    plan.draw(long, "esi")
    assert f"└─ {names[-1]} " in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.long
def test_dvc_says_the_same(dvc_project):
    """A real project, changed in one way after the other; each change is still there when the next one comes."""
    dvc("repro", "-q")
    assert ours() == judged() == {}
    cache = next(Path(".dvc/cache/files/md5").glob("*/*.dir"))
    held = cache.read_bytes()
    cache.unlink()
    assert ours() == judged() != {}
    cache.write_bytes(held)
    Path("data/adapters/v2/by-hand").touch()
    Path("data/cases/esi-d1/cases.jsonl").write_text("other")
    Path("data/reports/probe/v1.json").unlink()
    Path("params.yaml").write_text(Path("params.yaml").read_text().replace("cases: 4000", "cases: 40"))
    Path("dvc.yaml").write_text(DVC_YAML.replace("cmd: mkdir -p data/graded/", "cmd: mkdir -p  data/graded/"))
    now = ours()
    assert now == judged()
    assert {
        "train@v2": "stale",
        "evaluate@v1": "stale",
        "probe@v1": "missing",
        "dataset@esi-d1": "stale",
    }.items() <= now.items()
    Path("dvc.lock").unlink()
    shutil.rmtree("data/cases")
    assert ours() == judged()


@pytest.mark.long
def test_a_cache_elsewhere_is_found(dvc_project, tmp_path):
    dvc("config", "--local", "cache.dir", str(tmp_path / "elsewhere"))
    dvc("repro", "-q", "train@v1")
    assert dvc_yaml.states(["train@v1"]) == {"train@v1": "up to date"}
    shutil.rmtree(tmp_path / "elsewhere")
    assert dvc_yaml.states(["train@v1"]) == {"train@v1": "stale"}


@pytest.mark.slow  # DVC takes half a minute
def test_dvc_says_the_same_of_the_committed_tree(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert ours() == judged()


@pytest.mark.long
def test_the_plan_of_the_committed_tree_takes_seconds(monkeypatch):
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-m", "clinrl", "plan"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    after = os.times()
    assert "unknown" not in done.stdout
    assert after.children_user + after.children_system - before.children_user - before.children_system < 5


@pytest.mark.parametrize("columns", [220, 80])
def test_an_aligned_table_on_a_terminal(params, monkeypatch, columns):
    """A real terminal: the standard output of a fork of this process is a pseudo-terminal."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    child, terminal = pty.fork()
    if child == 0:
        try:
            sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
            os._exit(main(["plan"]))
        finally:
            os._exit(70)
    said = b""
    with suppress(OSError):  # Linux's word for the end
        while some := os.read(terminal, 65536):
            said += some
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    text = said.decode()
    assert "\t" not in text
    header, first, second = text.splitlines()[:3]
    assert "version" in header
    assert "v1" in first
    assert "v2" in second
    assert ("stands" in header) == (columns == 80)
    assert len(text.splitlines()) == 3 or columns == 220
