"""The audit environment: its tools, what they say and what they do not, and that nothing a model writes raises."""

import inspect
import re
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers.utils import get_json_schema

from audits import replay, was_submitted
from clinrl.tasks.audit.cases import AuditKey, cases, differences_of
from clinrl.tasks.audit.env import ARGUMENTS, CLOSED, AuditEnv, calls_for, perform
from clinrl.tasks.audit.observations import CATEGORICAL, NUMERIC, RISK_WEIGHTS
from clinrl.tasks.audit.prompt import prompt
from clinrl.tasks.audit.rules import AGE


@cache
def drawn(mix="hard", n=30):
    return tuple(cases(n, 23, pool="train", mix=mix))


def started(case):
    env = AuditEnv()
    env.reset(case)
    return env


def everything(case):
    """Every look-up that a case has, and a decision about each proposal."""
    for proposal in case.facts.proposals:
        yield "review_proposal", {"proposal_id": proposal.proposal_id}
    for record in case.facts.records:
        yield "investigate_patient", {"patient_id": record.patient_id}
        yield "temporal_audit", {"patient_id": record.patient_id}
    for feature in (*NUMERIC, *CATEGORICAL):
        yield "cohort_analysis", {"feature": feature}
    for record in case.facts.records:
        for feature in NUMERIC:
            yield "request_shap", {"patient_id": record.patient_id, "feature": feature}


def test_the_public_methods_are_the_eight_tools_and_reset():
    public = {name for name, _ in inspect.getmembers(AuditEnv, inspect.isfunction) if not name.startswith("_")}
    assert public == {*ARGUMENTS, "reset"}
    assert len(ARGUMENTS) == 8
    fresh = AuditEnv()
    bound = {name for name, _ in inspect.getmembers(fresh, inspect.ismethod) if not name.startswith("_")}
    assert bound == public
    assert fresh.log == ()
    assert fresh.submitted is False


@pytest.mark.parametrize("tool", ARGUMENTS)
def test_tools_have_schemas_that_a_template_can_show(tool):
    schema = get_json_schema(getattr(AuditEnv(), tool))["function"]
    assert schema["name"] == tool
    assert schema["description"]
    assert tuple(schema["parameters"]["properties"]) == ARGUMENTS[tool]
    assert schema["parameters"]["required"] == list(ARGUMENTS[tool])
    assert all(one == {"type": "string", "description": one["description"]} and one["description"]
               for one in schema["parameters"]["properties"].values())  # fmt: skip


def test_what_the_tools_say():
    case = next(case for case in drawn() if any(d.death is not None for d in differences_of(case.facts).values()))
    env = started(case)
    found = differences_of(case.facts)
    for proposal in case.facts.proposals:
        said = env.review_proposal(proposal.proposal_id)
        assert said == (
            f"{proposal.proposal_id} {proposal.patient_id} {proposal.action} confidence {proposal.confidence:.2f}. "
            f"{proposal.text} cites: {', '.join(proposal.citations)}"
        )
    for record in case.facts.records:
        d = found[record.patient_id]
        said = env.investigate_patient(record.patient_id)
        assert said.startswith(
            f"{record.patient_id} age {record.age_years}, lower {d.lower:+d}, upper {d.upper:+d}; "
            f"stage {record.stage}; comorbidity {record.comorbidity_index}, threshold {d.threshold:+d}\n"
        )
        days = {"enrolled_day", "treatment_day", "death_day"}
        for value in record.model_dump(exclude=days).values():
            assert str(value) in said
        death = "none" if d.death is None else f"{d.death:+d}"
        assert env.temporal_audit(record.patient_id) == (
            f"{record.patient_id} delay {d.delay_days}, standard {d.standard:+d}, "
            f"stage IV {d.stage_iv:+d}, death {death}"
        )


def test_shapley_values_add_up_to_the_distance_from_the_mean_score():
    case = drawn()[0]

    def risk(record):
        return sum(RISK_WEIGHTS[feature] * read(record) for feature, read in NUMERIC.items())

    mean = sum(map(risk, case.facts.records)) / len(case.facts.records)
    for record in case.facts.records:
        env = started(case)
        said = [env.request_shap(record.patient_id, feature) for feature in NUMERIC]
        total = sum(float(line.split("shap ")[1]) for line in said)
        assert total == pytest.approx(risk(record) - mean, abs=0.005)


def test_cohorts_count_every_patient_once():
    case = drawn()[0]
    env = started(case)
    for feature in CATEGORICAL:
        said = env.cohort_analysis(feature)
        counts = [int(part.split()[-1]) for arm in said.split("; ") for part in arm.split(", ") if part[-1].isdigit()]
        assert sum(counts) == len(case.facts.records)
    arm = [record for record in case.facts.records if record.arm == "treatment"]
    if arm:
        mean = sum(record.age_years for record in arm) / len(arm)
        assert f"treatment mean {mean:.1f} of {len(arm)}" in env.cohort_analysis("age")


def test_decisions_answer_alike_whether_right_or_wrong():
    for case in drawn():
        env = started(case)
        for number, proposal in enumerate(case.facts.proposals):
            said = env.approve(proposal.proposal_id) if number % 2 else env.flag_error(proposal.proposal_id, AGE, "")
            assert said == "recorded"
        assert env.submit_audit_report("") == "submitted"
        assert env.submitted
        assert was_submitted(env.log)


def test_another_key_changes_no_observation():
    for case in drawn():
        truths = tuple(truth.model_copy(update={"broken": None, "error": None}) for truth in case.key.truths)
        other = case.model_copy(update={"key": AuditKey(truths=truths, pool_errors=0)})
        logs = []
        for one in (case, other):
            env = started(one.model_dump_json())
            logs.append([perform(env, tool, arguments) for tool, arguments in everything(one)])
            held = [getattr(env, slot) for slot in AuditEnv.__slots__]
            assert not any(text in repr(held) for text in ("Truth(", "pool_errors", "fallacy="))
        assert logs[0] == logs[1]


def test_text_and_case_start_the_same_audit_whatever_else_is_in_the_row():
    case = drawn()[0]
    actions = list(everything(case))[:20]
    env = AuditEnv()
    env.reset(case=case.model_dump_json(), prompt=[], seed=1)
    for tool, arguments in actions:
        perform(env, tool, arguments)
    assert env.log == replay(case, actions).log
    with pytest.raises(ValidationError):
        env.reset(case="{}")


def test_a_used_instance_carries_nothing_over():
    first, second = drawn()[:2]
    used = started(first)
    for tool, arguments in everything(first):
        perform(used, tool, arguments)
    used.approve("A1")
    used.submit_audit_report("all of it")
    used.reset(second)
    assert used.log == ()
    assert not used.submitted
    fresh = started(second)
    for tool, arguments in [*everything(second), ("approve", {"proposal_id": "A1"})]:
        assert perform(used, tool, arguments) == perform(fresh, tool, arguments)
    assert used.log == fresh.log


def test_after_submission_and_beyond_the_limit_nothing_happens():
    case = drawn()[0]
    env = started(case)
    env.submit_audit_report("done")
    log = env.log
    for tool, arguments in [
        *everything(case),
        ("approve", {"proposal_id": "A1"}),
        ("submit_audit_report", {"report": ""}),
    ]:
        assert perform(env, tool, arguments) == CLOSED
    assert env.log == log
    env = started(case)
    limit = calls_for(len(case.facts.proposals))
    for _ in range(limit):
        assert env.review_proposal("A1") != CLOSED
    assert env.submit_audit_report("late") == CLOSED
    assert not env.submitted
    assert len(env.log) == limit
    assert AuditEnv().review_proposal("A1") == CLOSED


@pytest.mark.parametrize(
    ("tool", "arguments", "names"),
    [
        ("review_proposal", {"proposal_id": "A99"}, "A1 A2"),
        ("review_proposal", {"proposal_id": ""}, "A1 A2"),
        ("investigate_patient", {"patient_id": "A1"}, "P"),
        ("temporal_audit", {"patient_id": None}, "P"),
        ("request_shap", {"patient_id": "P", "feature": "age"}, "P"),
        ("cohort_analysis", {"feature": "blood_pressure"}, "ethnicity"),
        ("flag_error", {"proposal_id": "A1", "error_type": "hallucination", "reason": ""}, AGE),
        ("flag_error", {"proposal_id": "A1", "error_type": AGE, "reason": 3}, "text"),
        ("approve", {"proposal_id": ["A1"]}, "A1 A2"),
        ("submit_audit_report", {"report": {}}, "text"),
    ],
)
def test_what_cannot_be_done_is_said_counted_and_changes_nothing(tool, arguments, names):
    env = started(drawn()[0])
    said = perform(env, tool, arguments)
    assert said.startswith("error: ")
    assert names in said
    assert [call.valid for call in env.log] == [False]
    assert env.log[0].arguments == arguments
    assert not env.submitted
    assert env.approve("A1") == "recorded"


def test_a_shapley_value_needs_a_number():
    env = started(drawn()[0])
    patient = drawn()[0].facts.records[0].patient_id
    assert env.request_shap(patient, "sex") == f"error: no such number; there are {' '.join(NUMERIC)}"


def test_a_proposal_is_decided_once():
    env = started(drawn()[0])
    assert env.approve("A1") == "recorded"
    assert env.flag_error("A1", AGE, "upper +1") == "error: A1 is already decided"
    assert [call.valid for call in env.log] == [True, False]


def test_calls_that_no_tool_takes_are_answered_and_not_logged():
    env = started(drawn()[0])
    assert perform(env, "reset", {"case": ""}).startswith("error: no such tool")
    assert perform(env, "approve", {}).startswith("error: approve takes")
    assert perform(env, "approve", {"proposal_id": "A1", "confidence": 1}).startswith("error: approve takes")
    assert env.log == ()


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=30)
    | st.sampled_from(["A1", "P10", "age", AGE]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
CALLS = st.sampled_from(sorted(ARGUMENTS)).flatmap(
    lambda tool: st.tuples(st.just(tool), st.fixed_dictionaries(dict.fromkeys(ARGUMENTS[tool], ANYTHING)))
)


@given(st.lists(CALLS, max_size=50))
def test_nothing_that_is_written_raises_and_equal_calls_give_equal_logs(calls):
    case = drawn()[0]
    once, again = replay(case, calls), replay(case, calls)
    assert [call.result for call in once.log] == [call.result for call in again.log]
    assert repr(once.log) == repr(again.log)
    assert len(once.log) <= calls_for(len(case.facts.proposals))
    assert all(call.valid != call.result.startswith("error: ") for call in once.log)
    replayed = replay(case, [(call.tool, call.arguments) for call in once.log])
    assert repr(replayed.log) == repr(once.log)


PROPOSAL = re.compile(r"^(A\S+) (P\S+) (?:clear|reject) [0-9.]+$", re.MULTILINE)
REVIEW = re.compile(r"\S+ \S+ (clear|reject) confidence [0-9.]+\. (.*) cites: ")
PATIENT = re.compile(
    r"age (\d+), lower ([+-]\d+), upper ([+-]\d+); stage (\S+); comorbidity (\d+)(?:, threshold ([+-]\d+))?\n"
)
TIMELINE = re.compile(r"delay (\d+), standard ([+-]\d+), stage IV ([+-]\d+), death (\S+)$")


def test_prompt_and_tools_show_all_that_the_rows_of_readers_decide_by():
    """They decide by `differences_of`, which a model sees in these words alone."""
    for case in drawn():
        env, found = AuditEnv(), differences_of(case.facts)
        env.reset(case)
        listed = PROPOSAL.findall(prompt(case.facts)[-1].content)
        assert listed == [(one.proposal_id, one.patient_id) for one in case.facts.proposals]
        for proposal_id, patient_id in listed:
            one = found[patient_id]
            shown = REVIEW.match(env.review_proposal(proposal_id))
            proposal = next(one for one in case.facts.proposals if one.proposal_id == proposal_id)
            assert shown.groups() == (proposal.action, proposal.text)
            patient = PATIENT.search(env.investigate_patient(patient_id)).groups()
            expected = [one.age_years, one.lower, one.upper, one.stage, one.comorbidity, one.threshold]
            assert [None if text is None else text.lstrip("+") for text in patient] == [
                None if value is None else str(value) for value in expected
            ]
            days = TIMELINE.search(env.temporal_audit(patient_id)).groups()
            expected = [one.delay_days, one.standard, one.stage_iv, "none" if one.death is None else one.death]
            assert [text.lstrip("+") for text in days] == list(map(str, expected))
