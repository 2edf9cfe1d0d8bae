"""Mining: the group whose repair is worth most comes first, and no exam is ever read."""

import json
import shutil
from collections import Counter
from contextlib import chdir
from dataclasses import replace
from itertools import cycle

import pytest
from hypothesis import given
from hypothesis import strategies as st

import contest
import dolls
from clinrl import paths
from clinrl.analysis.run import Run, clusters_of
from clinrl.artifacts import identity, read_manifest, write_json
from clinrl.config.params import Params
from clinrl.data import dataset
from clinrl.data.dataset import read_cases
from clinrl.errors import ArtefactError, ParamsError
from clinrl.evaluation import error_analysis, evaluate
from clinrl.evaluation.error_analysis import Group, MineReport, of_kind
from clinrl.intervals import mean, rate, wilson
from clinrl.tasks.audit import episodes
from clinrl.tasks.audit.policies import Turn
from clinrl.tasks.base import get_task
from clinrl.types import Message, Transcript, transcript_of

TASK = get_task("esi")
MINING = {"v1": {"task": "esi", "data": "m1"}}
DATASETS = {
    **dolls.PARAMS["datasets"],
    "m1": {
        "task": "esi",
        "task_version": 2,
        "use": "mine",
        "mix": "reporting",
        "cases": 60,
        "seed": 6,
        "emphasis": {"severe_pain": 8.0, "done_intervention": 3.0},
    },
}


def params():
    return dolls.params(mining=MINING, datasets=DATASETS)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The doll with a version v1, whose adapter is the base's own, and validated mine data."""
    root = tmp_path_factory.mktemp("mined")
    shutil.copytree(dolls.built(), root, dirs_exist_ok=True)
    with chdir(root):
        dataset.stage(params(), "m1")
        named = {"data": {"name": "m1", "identity": identity(read_manifest(paths.cases("m1")))}}
        write_json(paths.data_proof("m1"), named)
        shutil.copytree(paths.adapter("esi-base"), paths.adapter("v1"))
    return root


@pytest.fixture
def project(built, tmp_path, monkeypatch):
    shutil.copytree(built, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return params()


def answering(answer):
    """A stand-in for the model: `answer` of a case gives the level, or None for an unreadable turn."""

    def answer_exam(_params, run, *_):
        def transcript(case):
            level = answer(case)
            text = "I do not know." if level is None else f"ANSWER: ESI {level}"
            return Transcript(messages=(Message(role="assistant", content=text),), stop="answered")

        transcripts = [transcript(case) for case in run.cases]
        graded = {mode: evaluate.grade(run.task, mode, run.cases, transcripts, run.model.reward) for mode in run.modes}
        return replace(run, graded=graded)

    return answer_exam


def report() -> MineReport:
    return MineReport.model_validate_json(paths.mine_report("v1").read_bytes())


def misses(rule):
    """A reader who knows everything but one rule."""
    return lambda case: TASK.parse(TASK.gold(case, thinking=False, omit=frozenset({rule})))


def test_a_page_names_six_wrong_answers_of_a_group_and_counts_the_others():
    answers = {f"answer {number}": 9 - number for number in range(9)}
    group = Group(by="rule", value="r", n=9, wrong={}, cost=mean([0.0]), total=0.0, answers=answers)
    assert group.commonest == [*list(answers.items())[:6], ("3 more", 6)]
    few = group.model_copy(update={"answers": dict(list(answers.items())[3:])})
    assert few.commonest == list(few.answers.items())


@pytest.mark.parametrize("rule", ["severe_pain", "done_intervention"])
@pytest.mark.usefixtures("real")
def test_the_rule_that_is_missed_comes_first(project, monkeypatch, rule):
    monkeypatch.setattr(error_analysis, "answer_exam", answering(misses(rule)))
    error_analysis.stage(project, "v1")
    found = report()
    first, *others = of_kind(found, "rule")
    assert first.value == rule
    assert first.total > 0
    assert {group.total for group in others} == {0}
    assert (found.pool, found.n, found.data_digest) == ("mine", 60, identity(read_manifest(paths.cases("m1"))))
    assert {line.rule for line in found.worst} == {rule}
    text = paths.mine_report("v1").with_suffix(".md").read_text()
    assert f"| {rule} | " in text
    assert "of the mine pool, which is neither training nor exam" in text
    assert paths.mine_report("v1").with_suffix(".png").stat().st_size > 5000


def test_dangerous_errors_outweigh_more_frequent_harmless_ones(project, monkeypatch):
    cases = list(read_cases(paths.cases("m1"), TASK))
    urgent = {case.id for case in cases if TASK.label(case) == 2}
    mild = {case.id for case in cases if TASK.label(case) == 5}
    wrong = set(sorted(urgent)[:5]) | mild
    answers = {2: 5, 5: 4}
    monkeypatch.setattr(
        error_analysis,
        "answer_exam",
        answering(lambda case: answers[TASK.label(case)] if case.id in wrong else TASK.label(case)),
    )
    error_analysis.stage(project, "v1")
    assert of_kind(report(), "error")[0].value == "2 answered 5"
    assert report().worst[0].gold == "2"


def test_a_perfect_reader_has_nothing_to_repair(project, monkeypatch):
    monkeypatch.setattr(error_analysis, "answer_exam", answering(TASK.label))
    error_analysis.stage(project, "v1")
    found = report()
    assert found.cost.value == 0
    assert {estimate.value for estimate in found.wrong.values()} == {0}
    assert not of_kind(found, "error")
    assert not found.worst
    assert "## By" not in paths.mine_report("v1").with_suffix(".md").read_text()


def test_silence_is_an_error_that_costs_the_most(project, monkeypatch):
    monkeypatch.setattr(error_analysis, "answer_exam", answering(lambda _case: None))
    error_analysis.stage(project, "v1")
    found = report()
    assert found.wrong["think"].value == 1
    assert {group.value.split(" answered ")[1] for group in of_kind(found, "error")} == {"unreadable"}


@pytest.mark.usefixtures("real")
def test_equal_answers_give_equal_bytes(project, monkeypatch):
    files = [paths.mine_report("v1").with_suffix(suffix) for suffix in (".json", ".md", ".png")]
    levels = cycle([1, 2, 3])
    wrong = {case.id: next(levels) for case in read_cases(paths.cases("m1"), TASK)}
    monkeypatch.setattr(error_analysis, "answer_exam", answering(lambda case: wrong[case.id]))
    kept = []
    for _ in range(2):
        error_analysis.stage(project, "v1")
        kept.append([file.read_bytes() for file in files])
    assert kept[0] == kept[1]


def test_a_real_model_is_mined(project):
    error_analysis.stage(project, "v1")
    found = report()
    assert set(found.wrong) == {"think", "direct"}
    assert read_manifest(paths.mined("v1")).inputs["data"] == found.data_digest
    lines = (paths.mined("v1") / "think.jsonl").read_text().splitlines()
    assert len(lines) == found.n


def test_an_exam_is_refused_even_under_the_name_of_mine_data(project, monkeypatch):
    dataset.stage(project, "x1")
    shutil.rmtree(paths.cases("m1"))
    shutil.copytree(paths.cases("x1"), paths.cases("m1"))
    monkeypatch.setattr(error_analysis, "answer_exam", answering(TASK.label))
    with pytest.raises(ArtefactError, match="is drawn from the exam pool; errors are mined on the mine pool"):
        error_analysis.stage(project, "v1")
    assert not paths.mine_report("v1").exists()


def test_mining_opens_no_file_of_an_exam(project, monkeypatch):
    dataset.stage(project, "x1")
    shutil.rmtree(paths.cases("x1"))
    monkeypatch.setattr(error_analysis, "answer_exam", answering(TASK.label))
    error_analysis.stage(project, "v1")


def test_a_version_that_params_does_not_mine_is_refused(project):
    with pytest.raises(ParamsError, match=r"params\.yaml mines no errors of 'v2'"):
        error_analysis.stage(project, "v2")


def test_the_costliest_episode_is_shown_step_by_step():
    """Its last turn is "Done.", whatever went wrong before."""
    task, params = get_task("audit"), Params.model_validate(contest.mapping())
    (case,) = task.cases(1, 5, pool="mine", mix=task.checks.mixes[0])
    submitted = episodes.write(case, [Turn("", (("submit_audit_report", {"report": "fine"}),))], thinking=False)
    graded = evaluate.grade(task, "direct", [case], [submitted], task.Reward())
    model = replace(params.model("imaging-base"), task=task)
    run = Run(model=model, cases=[case], exam_digest="", modes={"direct": {}}, graded={"direct": graded})
    (worst,) = error_analysis.report_of(run).worst
    assert worst.text.splitlines()[:3] == ["turn 1", 'calls submit_audit_report(report="fine")', "answered submitted"]


def test_of_episodes_the_wrong_decisions_are_counted():
    """An episode of twelve decisions has a label of its own, so counts of whole labels say nothing."""
    task, params = get_task("audit"), Params.model_validate(contest.mapping())
    cases = list(task.cases(40, 5, pool="mine", mix="reporting"))
    decisions = [episodes.read_decisions(task.label(case)) for case in cases]
    approved = [
        Turn("", (*(("approve", {"proposal_id": name}) for name in some), ("submit_audit_report", {"report": "fine"})))
        for some in decisions
    ]
    answers = [episodes.write(case, [turn], thinking=False) for case, turn in zip(cases, approved, strict=True)]
    graded = evaluate.grade(task, "direct", cases, answers, task.Reward())
    model = replace(params.model("imaging-base"), task=task)
    run = Run(model=model, cases=cases, exam_digest="", modes={"direct": {}}, graded={"direct": graded})
    report = error_analysis.report_of(run)
    missed = Counter(right for some in decisions for right in some.values() if right != "approve")
    assert sum(group.answers["approve"] for group in error_analysis.of_kind(report, "level")) == missed.total()
    errors = {group.value: group.answers["approve"] for group in error_analysis.of_kind(report, "error")}
    assert {f"{right} answered approve" for right in missed} >= errors.keys() != set()
    worst = report.worst[0]
    assert "approve" not in worst.gold
    assert worst.answered.count("approve") == worst.gold.count(";") + 1


@given(st.integers(1, 5), st.integers(1, 5))
def test_under_triage_costs_at_least_what_over_triage_of_the_same_distance_does(gold, answered):
    mirrored = 2 * gold - answered
    if answered > gold and mirrored >= 1:
        assert TASK.improvement.cost(gold, answered) >= TASK.improvement.cost(gold, mirrored)


def test_intervals_of_a_task_whose_cases_are_alike_are_over_clusters():
    """A reader who knows half of the conditions: as many answers are wrong, and far less is known of how many."""
    task, params = get_task("imaging"), Params.model_validate(contest.mapping())
    cases = list(task.cases(200, 5, pool="mine", mix="reporting"))
    clusters = clusters_of(task, cases)
    known = set(sorted(set(clusters))[::2])
    turns = [
        contest.turn(case, (float(cluster in known), 0.0), "", thinking=False)
        for case, cluster in zip(cases, clusters, strict=True)
    ]
    graded = evaluate.grade(task, "direct", cases, turns, task.Reward())
    model, modes = params.model("imaging-base"), {"direct": {}}
    found = error_analysis.report_of(
        Run(model=model, cases=cases, exam_digest="", modes=modes, graded={"direct": graded})
    )
    verdicts = [line.answer != task.label(case) for case, line in zip(cases, graded, strict=True)]
    wrong, apart = found.wrong["direct"], wilson(sum(verdicts), len(cases))
    assert wrong == rate(verdicts, clusters)
    assert wrong.high - wrong.low > 1.5 * (apart.high - apart.low)
    costs = [task.improvement.cost(task.label(case), line.answer) for case, line in zip(cases, graded, strict=True)]
    assert found.cost == mean(costs, clusters)
    both = {mode: evaluate.grade(task, mode, cases, turns, task.Reward()) for mode in ("direct", "think")}
    twice = Run(model=model, cases=cases, exam_digest="", modes={mode: {} for mode in both}, graded=both)
    assert error_analysis.report_of(twice).cost == found.cost, "both answers to a case are one piece of evidence"
    alone = next(group for group in of_kind(found, "condition") if group.value not in known)
    assert alone.wrong["direct"] == wilson(alone.n, alone.n)  # of one cluster its cases are drawn


def test_intervals_of_imported_cases_are_over_patients():
    params = Params.model_validate(contest.mapping())
    drawn = TASK.cases(60, 5, pool="mine", mix="natural")
    cases = [case.model_copy(update={"group": f"mine/imported/{n // 3}"}) for n, case in enumerate(drawn)]
    said = [Message(role="assistant", content=f"ANSWER: ESI {n // 3 % 5 + 1}") for n in range(60)]
    graded = evaluate.grade(TASK, "direct", cases, [transcript_of(one) for one in said], TASK.Reward())
    model = replace(params.model("imaging-base"), task=TASK)
    run = Run(model=model, cases=cases, exam_digest="", modes={"direct": {}}, graded={"direct": graded})
    verdicts = [line.answer != TASK.label(case) for case, line in zip(cases, graded, strict=True)]
    assert error_analysis.report_of(run).wrong["direct"] == rate(verdicts, [case.group for case in cases])


def test_the_report_is_canonical_json(project, monkeypatch):
    monkeypatch.setattr(error_analysis, "answer_exam", answering(TASK.label))
    error_analysis.stage(project, "v1")
    assert json.loads(paths.mine_report("v1").read_text())["name"] == "v1"
