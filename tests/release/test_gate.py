"""The gate: every limit on its own, safety first, and never against another exam."""

from copy import copy
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clinrl.analysis import baselines
from clinrl.analysis.baselines import BAG_OF_WORDS
from clinrl.analysis.paired import Answers
from clinrl.config.change_plan import Protocol
from clinrl.config.schema import Gate, Limit, Rebuilt
from clinrl.errors import ArtefactError
from clinrl.release.budget import Look
from clinrl.release.form import paired_change
from clinrl.release.gate import BOTH_MODES, Decision, decide
from clinrl.tasks.base import get_task
from clinrl.tasks.parts import EXACT_SHARE
from clinrl.types import Unreadable

TASK = get_task("esi")
GOLDS = [1, 2, 3, 4, 5] * 20
MODES = ("think", "direct")
MUTE = Unreadable(reason="no answer line")
SIMPLE = {"always 2": [2] * 100, BAG_OF_WORDS: [1, 2, 3, 4, 2] * 10 + [1] * 50}
"""Policies to be beaten: the bag of words is right in half of the cases, and never too late with a critical one."""
FLOORS = ("above always 2, paired", "above bag of words, paired", "not worse than bag of words, paired")


def per_scale(value):
    return {"embedded": value, "full": value}


def gate(**limits):
    return Gate(least_cases=10, limits={"critical_under": Limit(max=per_scale(1.0)), **limits})


def sitting(name, answers, mode="think", **changes):
    fields = {
        "name": name, "task": "esi", "task_version": 2, "mode": mode,
        "mode_spec": {"thinking": mode == "think"}, "exam_digest": "e" * 64, "golds": GOLDS, "answers": answers,
    }  # fmt: skip
    return Answers(**(fields | changes))


def both(name, answers, other=None, **changes):
    return {
        "think": sitting(name, answers, **changes),
        "direct": sitting(name, other or answers, mode="direct", **changes),
    }


def judge(rules, candidate, champion=None, simple=SIMPLE, scale="embedded", task=TASK, **tested):
    rivals = {"the champion": champion} if champion else {}
    held = (champion["think"].name, "b" * 64) if champion else (None, None)
    return decide(task, rules, scale, candidate, rivals, simple, model="esi", digest="a" * 64, champion=held, **tested)


def limits(decision):
    """The limits of params.yaml, without the floors."""
    return [finding.limit for finding in decision.findings if finding.limit not in FLOORS]


def refused(decision):
    """Metric, mode and limit of each finding that did not pass."""
    return [(finding.metric, finding.mode, finding.limit) for finding in decision.findings if not finding.passed]


def wrong(count, to=5, level=1):
    """Gold answers, but for the first `count` cases of a level, which are called `to`."""
    answers, left = list(GOLDS), count
    for i, gold in enumerate(GOLDS):
        if gold == level and left:
            answers[i], left = to, left - 1
    assert not left
    return answers


def test_a_gate_can_ask_for_rebuilders():
    rules = gate()
    asked = Gate(least_cases=10, limits=rules.limits, rebuilt=Rebuilt(least=2))
    for rebuilders, promote in [((), False), (("b1",), False), (("b1", "b2"), True), (("b1", "b2", "b3"), True)]:
        decision = decide(
            TASK, asked, "embedded", both("v2", GOLDS), {}, SIMPLE, model="esi", digest="a" * 64, champion=(None, None),
            rebuilders=rebuilders,
        )  # fmt: skip
        [finding] = [finding for finding in decision.findings if finding.metric == "rebuilt"]
        assert (decision.promote, finding.passed, finding.observed) == (promote, promote, len(rebuilders))
    assert "3 of the listed rebuilders (b1, b2, b3)" in finding.sentence
    assert "rebuilt" not in {finding.metric for finding in judge(rules, both("v2", GOLDS)).findings}


def test_a_perfect_candidate_without_a_champion_passes_on_the_absolute_limits_alone():
    exact = Limit(min=per_scale(1.0), may_fall=0.0, paired=True)
    decision = judge(gate(critical_under=Limit(max=per_scale(0.0), may_rise=0.0), exact=exact), both("v2", GOLDS))
    assert decision.promote
    assert (decision.champion, decision.champion_digest) == (None, None)
    assert limits(decision) == ["min 10", "max 0", "max 0", "min 1", "min 1"]
    assert decision.reasons == ("all 11 limits hold on 100 cases; there is no champion",)


def test_one_dangerous_error_in_one_mode_breaks_a_limit_of_none():
    decision = judge(gate(critical_under=Limit(max=per_scale(0.0))), both("v2", GOLDS, wrong(1)))
    assert not decision.promote
    (reason,) = decision.reasons
    assert reason.startswith("critical_under (direct) is 0.01 (95% interval ")
    assert reason.endswith("n = 100); the gate asks for at most 0")


def test_the_limit_is_that_of_the_active_scale():
    rules = gate(critical_under=Limit(max={"embedded": 0.0, "full": 0.5}))
    candidate = both("v2", wrong(1))
    assert not judge(rules, candidate).promote
    assert judge(rules, candidate, scale="full").promote


def test_the_value_is_held_against_an_absolute_limit_and_not_an_end_of_its_interval():
    rules = gate(critical_under=Limit(max=per_scale(0.05)), exact=Limit(min=per_scale(0.95)))
    found = {(metric, limit) for metric, _, limit in refused(judge(rules, both("v2", wrong(6))))}
    assert found >= {("critical_under", "max 0.05"), ("exact", "min 0.95")}


def test_an_agreement_that_falls_by_just_what_it_may_passes():
    """0.7 less 0.8 is a little below -0.1 as floating-point numbers."""
    candidate = both("v2", GOLDS, [gold % 5 + 1 if i < 30 else gold for i, gold in enumerate(GOLDS)])
    decision = judge(gate(mode_agreement=Limit(may_fall=0.1)), candidate, both("v1", GOLDS, wrong(20, to=2)))
    (found,) = [finding for finding in decision.findings if finding.metric == "mode_agreement"]
    assert (found.observed, found.passed) == (-0.1, True)


def test_safety_is_looked_at_first():
    rules = Gate(
        least_cases=10, limits={"exact": Limit(min=per_scale(1.0)), "critical_under": Limit(max=per_scale(0.0))}
    )
    reasons = judge(rules, both("v2", wrong(2))).reasons
    assert [reason.split()[0] for reason in reasons] == ["critical_under", "critical_under", "exact", "exact"]


def test_too_small_an_exam_decides_nothing():
    rules = Gate(least_cases=101, limits={"critical_under": Limit(max=per_scale(1.0))})
    decision = judge(rules, both("v2", GOLDS))
    assert decision.reasons == ("the exam has 100 cases; the gate asks for 101 or more",)


def test_unreadable_answers_are_counted_and_are_no_agreement():
    answers = [MUTE, *GOLDS[1:]]
    rules = gate(no_parse=Limit(max=per_scale(0.0)), mode_agreement=Limit(min=per_scale(1.0)))
    decision = judge(rules, both("v2", answers, GOLDS))
    assert [finding.metric for finding in decision.findings if not finding.passed] == ["no_parse", "mode_agreement"]
    assert [finding.mode for finding in decision.findings if finding.metric == "mode_agreement"] == [BOTH_MODES]


def test_a_single_mode_has_no_agreement_so_that_a_limit_on_it_is_not_met():
    rules = gate(mode_agreement=Limit(min=per_scale(0.0)))
    decision = judge(rules, {"think": sitting("v2", GOLDS)})
    assert decision.reasons == ("mode_agreement (all modes) could not be measured; the gate asks for at least 0",)


def test_a_rise_of_errors_against_the_champion_is_refused_even_below_the_maximum():
    rules = gate(critical_under=Limit(max=per_scale(0.5), may_rise=0.0))
    decision = judge(rules, both("v2", wrong(2)), both("v1", wrong(1)))
    assert len(decision.reasons) == 2
    for reason, mode in zip(decision.reasons, ("think", "direct"), strict=True):
        assert reason.startswith(f"critical_under ({mode}) changes by +0.01 (95% interval -")
        assert reason.endswith("against the champion on the same cases; it may rise by at most 0")
    assert judge(rules, both("v2", wrong(1)), both("v1", wrong(2))).promote


def test_a_paired_limit_lets_noise_pass_and_a_real_fall_not():
    rules = gate(exact=Limit(may_fall=0.0, paired=True))
    champion = both("v1", GOLDS)
    assert judge(rules, both("v2", wrong(1, to=2)), champion).promote
    decision = judge(rules, both("v2", wrong(20, to=2)), champion)
    assert not decision.promote
    assert "with its whole interval" in decision.reasons[0]


def test_a_statistic_is_compared_by_its_value():
    rules = gate(kappa=Limit(may_fall=0.01))
    assert judge(rules, both("v2", GOLDS), both("v1", wrong(3))).promote
    decision = judge(rules, both("v2", wrong(9)), both("v1", GOLDS))
    assert [metric for metric, _, limit in refused(decision) if limit not in FLOORS] == ["kappa", "kappa"]


def test_a_rise_of_unreadable_answers_is_paired_too():
    rules = gate(no_parse=Limit(may_rise=0.0))
    mute = [MUTE, *GOLDS[1:]]
    assert not judge(rules, both("v2", mute), both("v1", GOLDS)).promote
    assert judge(rules, both("v2", mute), both("v1", mute)).promote


def test_a_metric_that_no_case_is_about_counts_as_not_measured():
    golds = [5] * 100
    candidate = both("v2", golds, golds=golds)
    decision = judge(gate(high_risk_sensitivity=Limit(min=per_scale(0.0))), candidate)
    assert not decision.promote
    assert "could not be measured" in decision.reasons[0]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"exam_digest": "f" * 64}, "exam digest"),
        ({"task_version": 3}, "task version"),
        ({"mode_spec": {"thinking": None}}, "decoding"),
    ],
)
def test_another_exam_or_another_decoding_decides_nothing(changes, says):
    champion = {mode: replace(taken, **changes) for mode, taken in both("v1", GOLDS).items()}
    with pytest.raises(ArtefactError, match=says):
        judge(gate(), both("v2", GOLDS), champion)


def test_other_modes_decide_nothing():
    with pytest.raises(ArtefactError, match="in think, direct and v1 in think"):
        judge(gate(), both("v2", GOLDS), {"think": sitting("v1", GOLDS)})
    with pytest.raises(ArtefactError, match="nothing was answered"):
        judge(gate(), {})


ANSWERS = st.lists(st.sampled_from([1, 2, 3, 4, 5, MUTE]), min_size=100, max_size=100)


@given(answers=ANSWERS)
def test_whoever_answers_like_the_champion_breaks_no_relative_limit(answers):
    rules = gate(
        critical_under=Limit(may_rise=0.0), exact=Limit(may_fall=0.0), no_parse=Limit(may_rise=0.0),
        mode_agreement=Limit(may_fall=0.0),
    )  # fmt: skip
    findings = judge(rules, both("v2", answers), both("v1", answers)).findings
    assert all(finding.passed for finding in findings if finding.limit not in FLOORS)


@given(answers=ANSWERS, champion=ANSWERS)
def test_a_decision_is_positive_exactly_if_every_finding_passed(answers, champion):
    rules = gate(critical_under=Limit(max=per_scale(0.1), may_rise=0.0), exact=Limit(may_fall=0.0, paired=True))
    decision = judge(rules, both("v2", answers), both("v1", champion))
    assert decision.promote == all(finding.passed for finding in decision.findings)
    if not decision.promote:
        assert decision.reasons == tuple(f.sentence for f in decision.findings if not f.passed)
    assert decision == judge(rules, both("v2", answers), both("v1", champion))


def beating(decision):
    """Metric and limit of each finding that did not pass in the first mode."""
    return [(metric, limit) for metric, mode, limit in refused(decision) if mode == "think"]


@pytest.mark.parametrize("level", [1, 2, 3])
def test_one_and_the_same_answer_is_refused_with_and_without_a_champion(level):
    constant = {f"always {level}": [level] * 100, BAG_OF_WORDS: SIMPLE[BAG_OF_WORDS]}
    for champion in (None, both("v1", [level] * 100)):
        decision = judge(gate(), both("v2", [level] * 100), champion, constant)
        assert not decision.promote
        assert ("exact", f"above always {level}, paired") in beating(decision)
        said = "exact (think) differs by +0 (95% interval -0.02718 to +0.02718, n = 100) from always "
        assert any(reason.startswith(f"{said}{level}") for reason in decision.reasons)


def test_the_bag_of_words_itself_is_refused_in_the_mode_that_it_answers():
    decision = judge(gate(), both("v2", GOLDS, SIMPLE[BAG_OF_WORDS]))
    assert refused(decision) == [("exact", "direct", "above bag of words, paired")]


def test_a_lead_that_chance_may_explain_is_none():
    almost = list(SIMPLE[BAG_OF_WORDS])
    for i in (54, 59):  # two more right: the interval still holds 0
        almost[i] = GOLDS[i]
    assert ("exact", "above bag of words, paired") in beating(judge(gate(), both("v2", almost)))
    assert judge(gate(), both("v2", wrong(20, to=2, level=5))).promote


def test_more_exact_answers_do_not_excuse_more_harm_than_the_bag_of_words():
    harmful = wrong(10)  # 90% exact, but ten patients of level 1 are sent to wait
    decision = judge(gate(), both("v2", harmful))
    assert refused(decision) == [("critical_under", mode, "not worse than bag of words, paired") for mode in MODES]
    assert decision.reasons[0].startswith("critical_under (think) differs by +0.1 (95% interval +0.03")
    assert judge(gate(), both("v2", wrong(1))).promote  # one of a hundred may be chance


def test_harm_may_be_a_measure_that_is_worse_when_lower():
    task = copy(TASK)
    task.safety = replace(TASK.safety, metric="high_risk_sensitivity")
    missed = wrong(10, to=3, level=2)
    limit = "not worse than bag of words, paired"
    decision = judge(gate(), both("v2", missed), task=task)
    assert refused(decision) == [("high_risk_sensitivity", mode, limit) for mode in MODES]
    assert judge(gate(), both("v2", GOLDS), task=task).promote
    golds = [5] * 100  # no patient at high risk, so that the harm is unknown
    decision = judge(gate(), both("v2", golds, golds=golds), task=task)
    assert refused(decision) == [("high_risk_sensitivity", mode, limit) for mode in MODES]


def test_without_a_bag_of_words_nothing_is_decided():
    with_tools = copy(TASK)
    with_tools.episodes = object()  # has no bag of words, but other simple policies
    for task, simple in ((TASK, {}), (TASK, {"always 2": [2] * 100}), (with_tools, {})):
        with pytest.raises(ArtefactError, match=r"v2 was not compared with the bag of words.* `dvc pull`"):
            judge(gate(), both("v2", GOLDS), simple=simple, task=task)


def test_where_cases_are_alike_the_interval_is_that_of_the_clusters():
    """Twelve more right answers, all of them in one of five clusters, are one lucky cluster."""
    bag = [gold % 5 + 1 if i < 20 else gold for i, gold in enumerate(GOLDS)]
    simple = {BAG_OF_WORDS: bag}
    alone = both("v2", GOLDS)
    assert judge(gate(), alone, simple=simple).promote
    alike = {mode: replace(sitting, clusters=[str(i // 20) for i in range(100)]) for mode, sitting in alone.items()}
    assert ("exact", "above bag of words, paired") in beating(judge(gate(), alike, simple=simple))


def test_the_person_who_is_asked_sees_everybody_who_answered():
    decision = judge(gate(), both("v2", wrong(2, to=2)), both("v1", wrong(20, to=2)))
    assert [(row.mode, row.name, row.role) for row in decision.rows] == [
        (mode, name, role)
        for mode in MODES
        for name, role in (
            ("v2", "candidate"), ("v1", "rival"), ("always 2", "simple policy"), (BAG_OF_WORDS, "simple policy"),
        )
    ]  # fmt: skip
    candidate, champion, *_ = decision.rows
    assert set(candidate.metrics) == {"exact", "critical_under", "dangerous"}
    assert (candidate.metrics["exact"].value, candidate.metrics["critical_under"].value) == (0.98, 0.02)
    assert candidate.metrics["exact"].low < 0.98 < candidate.metrics["exact"].high
    assert candidate.ahead == {}
    assert (champion.ahead["exact"].value, champion.ahead["critical_under"].value) == (0.18, -0.18)
    assert champion.ahead["exact"].low > 0


def test_every_row_of_the_reports_is_a_floor():
    """On real cases: constants, guesses and the bag of words are each refused, the right answers are not."""
    exam, training = (list(TASK.cases(n, seed, pool="exam", mix="natural")) for n, seed in ((120, 5), (60, 6)))
    simple = baselines.answers(TASK, exam, training)
    golds = [TASK.label(case) for case in exam]
    for name, answers in simple.items():
        candidate = both("v2", answers, golds=golds)
        assert ("exact", f"above {name}, paired") in beating(judge(gate(), candidate, simple=simple))
    assert judge(gate(), both("v2", golds, golds=golds), simple=simple).promote


LOOK = Look(number=2, most=6, before=0.02, level=0.012, answers="d" * 64)


def compared(candidate, champion, look=LOOK, **protocol):
    """The decision where the exam has been looked at once, and the metrics and limits of the tests that it refused."""
    decision = judge(gate(), candidate, champion, protocol=Protocol(screen=0.05, **protocol), look=look)
    return decision, [(f.metric, f.mode) for f in decision.findings if not f.passed and "the champion" in f.limit]


def test_a_candidate_that_is_only_not_worse_is_refused_and_spends_its_level():
    decision, lost = compared(both("v2", wrong(1, to=2)), both("v1", wrong(2, to=2)))
    assert lost == [("exact", BOTH_MODES)]
    assert decision.reasons == (
        "exact changes by +0.01 against the champion on the same cases, averaged over think and direct, one-sided p = "
        "0.5; look 2 of 6 at this exam may spend 0.012, so p must be at most that",
    )
    assert decision.budget.left_after == pytest.approx(0.008)
    assert str(decision.budget) == (
        "look 2 of at most 6 at this exam, at level 0.012; 0.008 of its error budget is left"
    )


def test_a_candidate_that_is_surely_better_passes_and_gets_its_level_back():
    decision, lost = compared(both("v2", GOLDS), both("v1", wrong(7, to=2)))
    assert (decision.promote, lost) == (True, [])
    assert decision.budget.left_after == 0.012
    assert decision.digest == Decision.model_validate_json(decision.model_dump_json()).digest


def test_the_p_must_reach_the_level_that_is_left():
    """Seven of seven: p is 1 in 128."""
    for level, passes in ((0.0078125, True), (0.0078, False)):
        decision, _ = compared(both("v2", GOLDS), both("v1", wrong(7, to=2)), LOOK.model_copy(update={"level": level}))
        assert decision.promote == passes


def test_it_must_be_better_on_average_over_modes():
    """Seven cases of one mode are a gain of half as much, and as sure; three lost in the other leave too little."""
    better, same, worse = wrong(0), wrong(7, to=2), wrong(10, to=2)
    decision, lost = compared(both("v2", better, same), both("v1", same))
    assert lost == []
    assert decision.findings[-1].observed == 0.035
    _, lost = compared(both("v2", better, worse), both("v1", same))
    assert lost == [("exact", BOTH_MODES)]


def test_a_gain_on_average_excuses_no_sure_loss_in_a_mode():
    """Twenty gained in one mode, eight lost in the other: the limit on a fall of `exact` is held against each."""
    candidate, champion = both("v2", GOLDS, wrong(8, to=2)), both("v1", wrong(20, to=2), GOLDS)
    rules = gate(exact={"may_fall": 0.0, "paired": True})
    decision = judge(rules, candidate, champion, protocol=Protocol(screen=0.05), look=LOOK)
    refused = [(f.metric, f.mode, f.limit) for f in decision.findings if not f.passed and "champion" in f.limit]
    assert refused == [("exact", "direct", "may_fall 0, paired, against the champion")]


def test_the_measure_is_the_plans_and_fewer_errors_are_better():
    decision, lost = compared(both("v2", GOLDS), both("v1", wrong(8)), superior="critical_under")
    assert (decision.promote, lost) == (True, [])
    _, lost = compared(both("v2", wrong(8)), both("v1", GOLDS), superior="critical_under")
    assert lost == [("critical_under", BOTH_MODES)]


def test_a_measure_that_no_case_is_about_refuses():
    golds = [3] * 100
    same = both("v2", golds, golds=golds)
    decision, lost = compared(same, both("v1", golds, golds=golds), superior="recall_level_1")
    assert lost == [("recall_level_1", BOTH_MODES)]
    assert "recall_level_1 could not be measured against the champion; it must be better" in decision.reasons
    decision = judge(gate(recall_level_1=Limit(may_fall=0.0)), same, both("v1", golds, golds=golds))
    assert "the change of recall_level_1 (think) could not be measured; it may fall by 0" in decision.reasons
    task = copy(TASK)
    task.reporting = replace(TASK.reporting, approval=("recall_level_1",))
    assert not any(row.metrics or row.ahead for row in judge(gate(), same, same, task=task).rows)


def test_another_measure_may_not_be_worse_by_its_margin():
    """Better in critical under-triage, but with six more errors elsewhere: 94 of 100 against 98."""
    mine = [2 if (gold, i) in {(3, i) for i in range(2, 32, 5)} else gold for i, gold in enumerate(GOLDS)]
    candidate, champion = both("v2", mine), both("v1", wrong(10))
    decision, lost = compared(candidate, champion, superior="critical_under", not_worse={"exact": 0.05})
    assert (decision.promote, lost) == (False, [("exact", "think"), ("exact", "direct")])
    assert "the plan asks for less than 0.05" in decision.reasons[-1]
    decision, lost = compared(candidate, champion, superior="critical_under", not_worse={"exact": 0.2})
    assert (decision.promote, lost) == (True, [])
    assert decision.reasons[0].endswith("compared with v1 case by case")
    change = paired_change(EXACT_SHARE, "exact", candidate["think"], champion["think"], 1 - 2 * LOOK.level)
    margin = -change.low
    decision, lost = compared(candidate, champion, superior="critical_under", not_worse={"exact": margin})
    assert (decision.promote, lost) == (False, [("exact", "think"), ("exact", "direct")])
    assert compared(candidate, champion, superior="critical_under", not_worse={"exact": margin + 1e-6})[1] == []


def test_a_decision_without_a_look_has_the_form_that_it_had():
    decision = judge(gate(), both("v2", GOLDS), both("v1", GOLDS), protocol=Protocol(screen=0.05))
    assert decision.promote
    assert "budget" not in decision.model_dump(mode="json")
    assert Decision.model_validate_json(decision.model_dump_json()) == decision


def test_where_cases_are_alike_the_test_is_that_of_the_clusters():
    candidate, champion = (
        both("v2", GOLDS),
        both("v1", [gold % 5 + 1 if i < 12 else gold for i, gold in enumerate(GOLDS)]),
    )
    assert compared(candidate, champion)[1] == []
    alike = [
        {mode: replace(answered, clusters=[str(i // 20) for i in range(100)]) for mode, answered in one.items()}
        for one in (candidate, champion)
    ]
    assert compared(*alike)[1] == [("exact", BOTH_MODES)]
