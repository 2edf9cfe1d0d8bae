"""Exams as traces of MLflow on its own SQLite store: each answer once, found by MLflow's search, labelled by people."""

import json
from contextlib import chdir, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import auditors
import examined
from clinrl import paths
from clinrl.cli import main as cli
from clinrl.errors import DataError, RegistryError
from clinrl.evaluation.answers import load_report, open_run, read_graded
from clinrl.exports import traces
from clinrl.registry.log_run import DIGEST
from clinrl.registry.versions import find, register
from clinrl.tasks.base import get_task, parts_of
from clinrl.tracking.mlflow_store import connect, store

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("few_draws")]


def search(where=None, task="esi", **options):
    """What MLflow's own search finds in the experiment of a task."""
    with connect() as client:
        experiment = client.get_experiment_by_name(task).experiment_id
        return list(client.search_traces(locations=[experiment], filter_string=where, max_results=500, **options))


def cases_of(found):
    return [trace.info.tags["case_id"] for trace in found]


def wrong_ids(name, mode):
    """The cases that a version answers wrongly, sorted."""
    run = open_run(examined.params(), examined.params().model(name))
    lines = read_graded(paths.graded(name) / f"{mode}.jsonl")
    return sorted(line.case_id for line, gold in zip(lines, run.golds, strict=True) if line.answer != gold)


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """A project in which every answer of v2 is a trace. Only read it."""
    folder = tmp_path_factory.mktemp("logged")
    examined.copy(examined.registered(), folder)
    with chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        traces.stage(examined.params(), "v2", every=True)
    return folder


@pytest.fixture
def entered(logged, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(logged)
    return find("esi", "v2")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project in which nothing is logged yet, entered."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    examined.copy(examined.registered(), tmp_path)
    monkeypatch.chdir(tmp_path)


def test_mlflow_finds_answers_by_score_label_and_tag(entered):
    for mode in examined.params().modes:
        found = search(f"feedback.correct = 'false' AND tags.mode = '{mode}'")
        assert sorted(cases_of(found)) == wrong_ids("v2", mode) != []
    of_level = search("expectation.gold = '2' AND tags.mode = 'think'")
    assert 0 < len(of_level) < 40
    assert {trace.info.tags["level"] for trace in of_level} == {"level_2"}
    assert len(search("feedback.reward < 0")) + len(search("feedback.reward >= 0")) == 80


def test_a_trace_holds_request_turns_score_and_where_it_comes_from(entered):
    params = examined.params()
    run = open_run(params, params.model("v2"))
    lines = {line.case_id: line for line in read_graded(paths.graded("v2") / "think.jsonl")}
    with connect() as client:
        (model,) = client.search_logged_models([client.get_run(entered.run_id).info.experiment_id],
                                               filter_string=f"tags.{DIGEST} = '{entered.digest}'")  # fmt: skip
    ours = search(f"metadata.`mlflow.modelId` = '{model.model_id}' AND tags.mode = 'think'")
    assert sorted(cases_of(ours)) == sorted(lines)
    golds = {case.id: gold for case, gold in zip(run.cases, run.golds, strict=True)}
    requests = {case.id: run.task.prompt(case.facts) for case in run.cases}
    for trace in ours:
        line = lines[trace.info.tags["case_id"]]
        held = {one.name: one.value for one in trace.info.assessments}
        assert held.pop("gold") == golds[line.case_id]
        assert held.pop("correct") == (line.answer == golds[line.case_id])
        assert held.pop("reward") == line.score.total
        assert {name[6:]: held[name] for name in held if name.startswith("terms/")} == line.score.terms
        answer, prompt, turn, score = trace.data.spans
        assert [span.name for span in (answer, prompt, turn, score)] == ["answer", "prompt", "turn 1", "score"]
        assert {span.parent_id for span in (prompt, turn, score)} == {answer.span_id}
        assert [one["content"] for one in answer.inputs["messages"]] == [one.content for one in requests[line.case_id]]
        assert turn.outputs["choices"][0]["message"]["content"] == line.transcript.messages[-1].content
        assert score.outputs == {"reward": line.score.total, **line.score.terms}


def test_the_exam_is_one_evaluation_dataset_and_the_pages_open_on_answers(entered, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store())  # by which a data set finds its rows
    with connect() as client:
        experiment = client.get_run(entered.run_id).info.experiment_id
        (dataset,) = client.search_datasets(experiment_ids=[experiment])
        tags = client.get_experiment(experiment).tags
    assert dataset.name == f"x1-{load_report('v2', 'think').exam_digest[:8]}"
    rows = dataset.to_df()
    run = open_run(examined.params(), examined.params().model("v2"))
    assert sorted(one["gold"] for one in rows["expectations"]) == sorted(run.golds)
    assert tags["mlflow.experimentKind"] == "genai_development"
    assert tags["mlflow.experiment.primaryMetric.name"] == "think/reward"


def test_the_sample_is_wrong_answers_first_and_nothing_is_logged_twice(project, monkeypatch, capsys):
    wrong = {mode: wrong_ids("v2", mode) for mode in examined.params().modes}
    most = len(wrong["think"]) + 3
    monkeypatch.setattr(traces, "SAMPLE", most)
    assert cli.main(["traces", "v2"]) == 0
    assert f"v2: {2 * most} traces are new, 0 were there" in capsys.readouterr().err
    found = cases_of(search("tags.mode = 'think'", order_by=["timestamp_ms DESC"]))
    assert found[: len(wrong["think"])] == wrong["think"]
    assert found[len(wrong["think"]) :] == sorted(found[len(wrong["think"]) :])
    assert cli.main(["traces", "v2"]) == 0
    assert f"v2: 0 traces are new, {2 * most} were there" in capsys.readouterr().err
    assert cli.main(["traces", "v2", "--all"]) == 0
    assert f"v2: {80 - 2 * most} traces are new, {2 * most} were there" in capsys.readouterr().err


def test_what_was_killed_is_completed(project, monkeypatch):
    from mlflow.tracing.client import TracingClient

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(traces, "SAMPLE", 3)
    with monkeypatch.context() as patch:
        patch.setattr(TracingClient, "log_spans", killed)
        with pytest.raises(KeyboardInterrupt):
            traces.stage(examined.params(), "v2")
    traces.stage(examined.params(), "v2")
    found = search()
    assert len(found) == 6
    for trace in found:
        names = [one.name for one in trace.info.assessments]
        assert len(names) == len(set(names))
        assert len(trace.data.spans) == 4


def test_labels_of_people_come_back_by_case(project, monkeypatch, capsys):
    import mlflow
    from mlflow.entities import AssessmentSource

    monkeypatch.setattr(traces, "SAMPLE", 3)
    traces.stage(examined.params(), "v2")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store())
    first, second = sorted(search("tags.mode = 'direct'"), key=lambda trace: trace.info.tags["case_id"])[:2]
    ada, ben = (AssessmentSource(source_type="HUMAN", source_id=name) for name in ("ada", "ben"))
    mlflow.log_feedback(trace_id=second.info.trace_id, name="label", value="3", source=ben)
    mlflow.log_expectation(trace_id=first.info.trace_id, name="label", value=2, source=ben)
    mlflow.log_expectation(trace_id=first.info.trace_id, name="label", value=4.0, source=ada)
    mlflow.log_feedback(trace_id=first.info.trace_id, name="tone", value="good", source=ada)
    corrected = mlflow.log_feedback(trace_id=second.info.trace_id, name="label", value=1, source=ada)
    mlflow.override_feedback(trace_id=second.info.trace_id, assessment_id=corrected.assessment_id, value=5, source=ada)
    assert cli.main(["labels", "esi", "--out", "found/labels.jsonl"]) == 0
    rows = [json.loads(line) for line in Path("found/labels.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(row["case_id"], row["person"], row["label"]) for row in rows] == [
        (first.info.tags["case_id"], "ada", 4), (first.info.tags["case_id"], "ben", 2),
        (second.info.tags["case_id"], "ada", 5), (second.info.tags["case_id"], "ben", 3),
    ]  # fmt: skip
    assert {(row["version"], row["mode"]) for row in rows} == {("v2", "direct")}
    assert "4 labels; 1 assessments by people are not called label and were left out" in capsys.readouterr().err

    mlflow.log_feedback(trace_id=first.info.trace_id, name="label", value="urgent", source=ben)
    assert cli.main(["labels", "esi", "--out", "found/again.jsonl"]) == 1
    err = capsys.readouterr().err
    assert f"the label 'urgent' of the trace {first.info.trace_id} is none of esi; allowed: 1, 2, 3, 4, 5" in err
    assert not Path("found/again.jsonl").exists()


def test_a_version_that_is_not_registered_as_examined_is_refused(project):
    with pytest.raises(RegistryError, match="has no 'v9'"):
        find("esi", "v9")
    entry = find("esi", "v2")
    with connect() as client:
        experiment = client.get_run(entry.run_id).info.experiment_id
        (model,) = client.search_logged_models([experiment], filter_string=f"tags.{DIGEST} = '{entry.digest}'")
        client.delete_logged_model(model.model_id)
    with pytest.raises(RegistryError, match="MLflow has no model of v2 any more; run `clinrl register v2`"):
        traces.stage(examined.params(), "v2")
    examined.examine(examined.params(), "v2", [1])
    traces_before = len(search())
    report = load_report("v2", "think")
    for mode in examined.params().modes:
        path = paths.report("v2") / f"{mode}.json"
        path.write_text(path.read_text().replace(report.adapter_digest, "b" * 64))
    with pytest.raises(RegistryError, match="v2 is not registered as it was examined; run `clinrl register v2`"):
        traces.stage(examined.params(), "v2")
    assert len(search()) == traces_before


@pytest.mark.parametrize("is_erased", [False, True])
def test_a_version_whose_run_was_deleted_is_logged_once_it_is_registered_again(project, monkeypatch, capsys, is_erased):
    with connect() as client:
        former = find("esi", "v2").run_id
        client.delete_run(former)
        if is_erased:  # as `mlflow gc` does
            client._tracking_client.store._hard_delete_run(former)
    assert cli.main(["traces", "v2"]) == 1
    assert "MLflow has no finished run of v2; run `clinrl register v2`" in capsys.readouterr().err
    register(examined.params(), "v2")
    monkeypatch.setattr(traces, "SAMPLE", 3)
    traces.stage(examined.params(), "v2")
    with connect() as client:
        for trace in search():
            assert client.get_run(trace.info.request_metadata["mlflow.sourceRun"]).info.lifecycle_stage == "active"


def test_turns_and_calls_of_an_audit_are_spans(tmp_path, monkeypatch):
    """The base stands for a version here: what it played is what matters."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(auditors.reported())
    exam = traces.examined(auditors.params(), "audit-base", "think")
    run, lines, report = exam
    with connect() as client:
        experiment = client.create_experiment("audit")
        known = client.create_run(experiment)
        client.create_logged_model(experiment, name="audit-base", tags={DIGEST: report.adapter_digest})
        assert traces._log(client, known, run, report, traces._answers(*exam)[:5]) == 5
    played = {line.case_id: line for line in lines}
    found = search(task="audit")
    assert len(found) == 5
    for trace in found:
        messages = played[trace.info.tags["case_id"]].transcript.messages
        tools = [span for span in trace.data.spans if span.span_type == "TOOL"]
        assert [span.outputs for span in tools] == [one.content for one in messages if one.role == "tool"]
        calls = [call for one in messages for call in one.calls]
        assert [(span.name, span.inputs) for span in tools] == [(call.name, call.arguments) for call in calls][
            : len(tools)
        ]
        turns = [span for span in trace.data.spans if span.span_type == "CHAT_MODEL"]
        assert len(turns) == sum(one.role == "assistant" for one in messages)
        seen = [one["content"] for span in turns[1:] for one in span.inputs["messages"]]
        assert seen == [one.content for one in messages if one.role == "tool"][: len(seen)]


def test_a_label_is_read_as_the_task_writes_it():
    esi, imaging, audit = (get_task(name) for name in ("esi", "imaging", "audit"))
    assert [traces._label(esi, 2, value, "tr-1") for value in (3, "3", 3.0)] == [3, 3, 3]
    label = imaging.labels[0]
    assert traces._label(imaging, label, label, "tr-1") == label
    decided = "; ".join(f"P{number} {label}" for number, label in enumerate(audit.labels[:2]))
    assert traces._label(audit, decided, decided, "tr-1") == decided


@given(
    st.sampled_from(["esi", "imaging", "audit"]), st.text() | st.booleans() | st.floats() | st.integers() | st.none()
)
def test_anything_else_is_refused_in_a_sentence(name, value):
    task = get_task(name)
    gold = "P1 approve" if task.episodes else task.labels[0]
    with suppress(DataError):
        label = traces._label(task, gold, value, "tr-1")
        assert label in task.labels or next(iter(parts_of(task, gold, label).values()))[1] in task.labels
