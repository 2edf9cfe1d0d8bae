"""Tasks as packages of verifiers: the cases that may leave, and clinrl's own scores from the unmodified library."""

import json
import os
import tomllib
from pathlib import Path

import pytest

import auditors
import clients
import contest
import examined
from clinrl import paths
from clinrl.cli import main as cli
from clinrl.config.params import load_params
from clinrl.data.dataset import read_cases
from clinrl.evaluation.answers import read_graded
from clinrl.exports import verifiers
from clinrl.tasks.base import get_task
from replayed import replaying

pytestmark = pytest.mark.usefixtures("few_draws")
ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ("verifiers==0.4.0", "uv")


def test_the_package_has_cases_of_the_pool_mine_unless_the_exam_is_opened(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(examined.answered())
    task = get_task("esi")
    assert cli.main(["export", "verifiers", "esi", "--out", str(tmp_path / "mine")]) == 0
    assert cli.main(["export", "verifiers", "esi", "--out", str(tmp_path / "exam"), "--open-exam"]) == 0
    told = capsys.readouterr()
    assert told.err.count("THE EXAM IS OPEN") == 1
    assert told.out.splitlines() == [str(tmp_path / pool / "clinrl-esi") for pool in ("mine", "exam")]
    for pool, data in (("mine", "m1"), ("exam", "x1")):
        made = tmp_path / pool / "clinrl-esi"
        lines = (made / "clinrl_esi/cases.jsonl").read_text(encoding="utf-8").splitlines()
        assert list(map(task.Case.model_validate_json, lines)) == list(read_cases(paths.cases(data), task))
        project = tomllib.loads((made / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        assert (project["name"], project["version"]) == ("clinrl-esi", str(task.version))
        assert f"cases of {data}" in project["description"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "version", "folder", "cases"),
    [
        ("esi", "v2", examined.answered, 20),
        ("imaging", "better-1", contest.compared, 20),
        ("audit", "audit-base", auditors.reported, 20),
    ],
)
def test_the_library_itself_scores_as_clinrl_does(name, version, folder, cases, monkeypatch, tmp_path):
    """Unmodified, in an environment of its own that has this checkout's clinrl on its path, asking over HTTP."""
    venv, task, mode = clients.client(*REQUIREMENTS), get_task(name), "think"
    monkeypatch.chdir(folder())
    verifiers.stage(load_params(), name, out=tmp_path, open_exam=True)
    clients.run(venv, "pip", "install", "-q", "--no-deps", "--target", tmp_path / "site", tmp_path / f"clinrl-{name}")
    lines = read_graded(paths.graded(version) / f"{mode}.jsonl")[:cases]
    asked = [task.prompt(case.facts) for case in read_cases(paths.cases("x1"), task)][:cases]
    answers = {prompt[-1].content: line.transcript for prompt, line in zip(asked, lines, strict=True)}
    with replaying(answers) as address:
        options = ("--client.base-url", address, "-m", "replayed", "-n", cases, "-c", 2, "--no-rich", "--no-push")
        where = ("--output-dir", tmp_path / "runs", "--run.dir", "one")
        path = os.pathsep.join([str(ROOT / "src"), str(tmp_path / "site")])
        clients.run(venv, "vf-eval", f"clinrl-{name}", *options, *where, PYTHONPATH=path)
    episodes = (tmp_path / "runs/one/traces.jsonl").read_text(encoding="utf-8").splitlines()
    traces = {(trace := json.loads(line)["traces"][0])["task"]["data"]["id"]: trace for line in episodes}
    assert set(traces) == {line.case_id for line in lines}
    assert len({line.score.total for line in lines}) > 1
    for line, prompt in zip(lines, asked, strict=True):
        found = traces[line.case_id]
        assert (found["ok"], found["errors"]) == (True, [])
        assert found["rewards"]["reward"]["score"] == line.score.total
        said = [(node["message"]["role"], node["message"].get("content") or "") for node in found["nodes"]]
        assert said == [(turn.role, turn.content) for turn in (*prompt, *line.transcript.messages)]
    gold = {case.id: task.label(case) for case in read_cases(paths.cases("x1"), task)}
    exact = [task.metrics["exact"].of(gold[line.case_id], line.answer) for line in lines]
    assert [traces[line.case_id]["metrics"].get("exact") for line in lines] == exact
