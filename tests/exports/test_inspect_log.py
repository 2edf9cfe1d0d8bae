"""Exams as logs of Inspect: the same numbers, the same turns, no time and no record of a person."""

import json
from pathlib import Path

import pytest

import auditors
import clients
import dolls
import esi_sources
import examined
from clinrl import paths
from clinrl.artifacts import identity, read_manifest, seal, write_json
from clinrl.cli import main as cli
from clinrl.data import dataset
from clinrl.errors import ArtefactError, DataError
from clinrl.evaluation.answers import load_report, may_repeat_records, open_run, read_graded
from clinrl.exports import inspect_log, traces
from clinrl.tracking.mlflow_store import STORE

READ = """
import json, sys
from inspect_ai.log import read_eval_log
from inspect_ai.analysis import samples_df

log = read_eval_log(sys.argv[1])
rows = samples_df(sys.argv[1]).set_index("id")
print(json.dumps({
    "model": log.eval.model,
    "scores": {score.name: {name: one.value for name, one in score.metrics.items()} for score in log.results.scores},
    "headline": log.results.headline.model_dump(),
    "exact": {name: float(value) for name, value in rows["score_exact"].items()},
    "rewards": {name: json.loads(value)["total"] for name, value in rows["score_reward"].items()},
    "targets": dict(rows["target"]),
    "samples": {one.id: {
        "answer": one.scores["exact"].answer,
        "turns": [(turn.role, turn.text, [call.function for call in getattr(turn, "tool_calls", None) or []])
                  for turn in one.messages],
    } for one in log.samples},
}))
"""


pytestmark = pytest.mark.usefixtures("few_draws")


@pytest.fixture
def triage() -> Path:
    return examined.answered()


@pytest.fixture
def audits() -> Path:
    """A project about the audit whose base slips now and then."""
    return auditors.reported()


def exported(params, name, mode="think"):
    run = open_run(params, params.model(name))
    lines = read_graded(paths.graded(name) / f"{mode}.jsonl")
    return run, lines, load_report(name, mode), inspect_log.log_of(run, mode, lines, load_report(name, mode))


def test_every_number_of_the_report_is_in_the_log(triage, monkeypatch):
    monkeypatch.chdir(triage)
    run, lines, report, log = exported(examined.params(), "v2")
    assert 0 < report.metrics["exact"].value < 1
    found = {score["name"]: score["metrics"] for score in log["results"]["scores"]}
    told = {name: (found[name]["share"] if name in found else found["report"][name]) for name in report.metrics}
    assert {name: one["value"] for name, one in told.items()} == {
        name: one.value for name, one in report.metrics.items()
    }
    assert {name: one["metadata"] for name, one in told.items()} == {
        name: one.model_dump(exclude={"value"}) for name, one in report.metrics.items()
    }
    assert found["reward"]["total"]["value"] == report.reward
    assert log["eval"]["model"] == f"clinrl/v2@{read_manifest(paths.graded('v2')).inputs['adapter']}"
    for sample, case, line in zip(log["samples"], run.cases, lines, strict=True):
        assert (sample["id"], sample["target"]) == (case.id, str(run.task.label(case)))
        assert sample["scores"]["exact"]["value"] == float(line.answer == run.task.label(case))
        assert sample["scores"]["reward"]["value"] == {"total": line.score.total, **line.score.terms}
        assert sample["input"][-1]["content"] == run.task.prompt(case.facts)[-1].content
        assert sample["messages"][-1]["content"] == line.transcript.messages[-1].content
    outside = [one["scores"]["recall_level_1"]["value"] for one in log["samples"] if one["target"] != "1"]
    assert all(value != value for value in outside), "no number outside of a denominator"


def test_a_log_has_no_moment_and_is_the_same_twice(triage, monkeypatch):
    monkeypatch.chdir(triage)
    first, again = (json.dumps(exported(examined.params(), "v2")[3]) for _ in range(2))
    assert first == again
    assert '"created": "1970-01-01T00:00:00+00:00"' in first
    assert first != json.dumps(exported(examined.params(), "v2", "direct")[3])


def test_turns_and_calls_of_an_episode_follow_each_other(audits, monkeypatch):
    monkeypatch.chdir(audits)
    _, lines, _, log = exported(auditors.params(), "audit-base")
    for sample, line in zip(log["samples"], lines, strict=True):
        turns = sample["messages"][len(sample["input"]) :]
        assert [turn["role"] for turn in turns] == [message.role for message in line.transcript.messages]
        assert len({turn["id"] for turn in sample["messages"]}) == len(sample["messages"])
        calls = [call for turn in turns for call in turn.get("tool_calls", [])]
        results = [turn["tool_call_id"] for turn in turns if turn["role"] == "tool"]
        assert results == [call["id"] for call in calls][: len(results)]
        assert [call["function"] for call in calls] == [
            call.name for turn in line.transcript.messages for call in turn.calls
        ]
        assert turns[0]["content"][0]["type"] == "reasoning"


def test_a_report_about_other_answers_is_refused(triage, monkeypatch):
    monkeypatch.chdir(triage)
    run, lines, report, _ = exported(examined.params(), "v2")
    with pytest.raises(ArtefactError, match="the answers of v2 are of another adapter than"):
        inspect_log.log_of(run, "think", lines, report.model_copy(update={"adapter_digest": "b" * 64}))
    with pytest.raises(ArtefactError, match="the answers of v2 give another exact than data/reports/v2/think"):
        inspect_log.log_of(run, "think", lines, load_report("v1", "think"))


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["v1-v3"], 2, "'v1-v3' is no name that `clinrl export inspect` knows; did you mean v1-v2?"),
        (["v2", "--mode", "thnk"], 2, "'thnk' is no mode of params.yaml; did you mean think?"),
        (["v2"], 1, "clinrl: Inspect is not installed; run `python -m venv .venv-inspect && .venv-inspect/bin/pip "),
    ],
)
def test_what_cannot_be_exported_is_a_sentence(words, code, says, triage, monkeypatch, capsys):
    monkeypatch.chdir(triage)
    assert cli.main(["export", "inspect", *words]) == code
    assert says in capsys.readouterr().err
    assert not paths.EXPORTS.exists()


def test_a_version_that_took_no_exam_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(inspect_log, "_python", str)
    with pytest.raises(ArtefactError, match="data/graded/v1 is not here; run `dvc pull --with-deps evaluate@v1`"):
        inspect_log.stage(dolls.params(), "v1")


@pytest.mark.parametrize("export", [inspect_log.stage, traces.stage])
def test_the_text_of_somebodys_records_does_not_leave(export, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(inspect_log, "_python", str)
    (made,) = esi_sources.mietic_validation(tmp_path / "source", 50, 1)
    entry = {"task": "esi", "task_version": 2, "use": "exam", "source": str(made)}
    versions = {"v1": dolls.PARAMS["versions"]["v1"] | {"exam": "mietic-36"}}
    params = dolls.params(imports={"mietic-36": entry}, versions=versions)
    dataset.stage(params, "mietic-36")
    named = {"data": {"name": "mietic-36", "identity": identity(read_manifest(paths.cases("mietic-36")))}}
    write_json(paths.data_proof("mietic-36"), named)
    paths.graded("v1").mkdir(parents=True)
    with pytest.raises(DataError, match="mietic-36 holds somebody's records, whose text must not leave"):
        export(params, "v1")
    assert not paths.EXPORTS.exists()
    assert not STORE.exists()


@pytest.mark.parametrize("export", [inspect_log.stage, traces.stage])
def test_what_a_model_says_that_learned_from_somebodys_records_does_not_leave(export, triage, monkeypatch):
    monkeypatch.chdir(triage)
    monkeypatch.setattr(inspect_log, "_python", str)
    drawn = examined.params()
    params = drawn.model_copy(update={"imports": dict.fromkeys([drawn.versions["v1"].data])})
    now = {"v1": drawn.versions["v1"].model_copy(update={"data": "x1"})}  # edited after the training
    for edited in (params, params.model_copy(update={"versions": drawn.versions | now})):
        with pytest.raises(DataError, match="v2 learned from somebody's records and may repeat them; nothing was"):
            export(edited, "v2")
    assert not paths.EXPORTS.exists()
    assert not STORE.exists()


def test_parents_that_an_edit_closed_to_a_circle_are_asked_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, parent in (("v1", "v2"), ("v2", "v1")):
        paths.adapter(name).mkdir(parents=True)
        fields = {"kind": "adapter", "name": name, "task": "esi", "task_version": 2, "inputs": {}}
        seal(paths.adapter(name), **fields, spec={"data": "d1", "parent": parent})
    assert not may_repeat_records(dolls.params(), dolls.params().model("v1"))


@pytest.mark.slow
@pytest.mark.parametrize(("project", "name"), [("triage", "v2"), ("audits", "audit-base")])
def test_inspect_itself_reads_the_same_numbers(project, name, request, monkeypatch, capsys, tmp_path):
    """The unmodified client, in an environment of its own, which has no clinrl."""
    venv = clients.client(inspect_log.REQUIREMENT, "pandas", "pyarrow")
    monkeypatch.chdir(request.getfixturevalue(project))
    monkeypatch.setattr(inspect_log, "VENV", venv)
    params = examined.params() if project == "triage" else auditors.params()
    bytes_of = []
    for folder in ("one", "two"):
        inspect_log.stage(params, name, mode="direct", out=tmp_path / folder)
        bytes_of.append(Path(capsys.readouterr().out.strip()).read_bytes())
    assert bytes_of[0] == bytes_of[1]
    run, lines, report, _ = exported(params, name, "direct")
    file = tmp_path / f"one/{name}_direct.eval"
    found = json.loads(clients.run(venv, "python", "-c", READ, file))
    for metric in run.task.compared:
        assert found["scores"][metric]["share"] == report.metrics[metric].value
    assert found["headline"]["scorer"] == "exact"
    assert sum(found["exact"].values()) / len(lines) == pytest.approx(report.metrics["exact"].value, abs=1e-6)
    for case, line in zip(run.cases, lines, strict=True):
        assert found["targets"][case.id] == str(run.task.label(case))
        assert found["rewards"][case.id] == line.score.total
        sample = found["samples"][case.id]
        assert sample["answer"] == (line.answer if isinstance(line.answer, str) else str(line.answer))
        asked = [(turn.role, turn.content, []) for turn in run.task.prompt(case.facts)]
        done = [(turn.role, turn.content, [call.name for call in turn.calls]) for turn in line.transcript.messages]
        assert [tuple(turn) for turn in sample["turns"]] == asked + done
    clients.run(venv, "inspect", "view", "bundle", "--log-dir", file.parent, "--output-dir", tmp_path / "bundle")
    assert (tmp_path / "bundle/index.html").exists()
