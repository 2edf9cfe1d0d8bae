"""How an audit was done, on episodes that known policies play."""

from random import Random

import pytest

from audits import oracle
from clinrl.tasks.audit.cases import cases
from clinrl.tasks.audit.episodes import write
from clinrl.tasks.audit.policies import TRIVIAL, Turn
from clinrl.tasks.audit.quality import QUALITIES
from clinrl.tasks.base import get_task
from clinrl.types import Message, Transcript

TASK = get_task("audit")
CASES = list(cases(30, 4, pool="mine", mix="natural"))
WITH_ERRORS = next(case for case in CASES if sum(truth.error is not None for truth in case.key.truths) >= 2)


def did(case, turns) -> Transcript:
    return write(case, [Turn("", list(actions)) for actions in turns], thinking=True)


def measured(case, transcript) -> dict[str, float | None]:
    return {name: quality.of(case, transcript, {}) for name, quality in QUALITIES.items()}


@pytest.mark.parametrize("case", CASES[:10], ids=lambda case: case.id)
def test_the_oracle_wastes_nothing_and_gives_its_reasons(case):
    found = measured(case, did(case, oracle(case, Random(0))))
    reasons = 1.0 if any(truth.error is not None for truth in case.key.truths) else None
    assert found == {
        "detection": 1.0, "grounded": 1.0, "evidence": reasons, "fallacy_named": reasons,
        "invalid_calls": 0.0, "calls_per_decision": pytest.approx(4 + 1 / len(case.facts.proposals)), "economy": 1.0,
    }  # fmt: skip


def test_nothing_done_is_measured_as_nothing():
    silence = Transcript(messages=(Message(role="assistant", content="Fine."),), stop="answered")
    assert measured(WITH_ERRORS, silence) == dict.fromkeys(QUALITIES) | {"detection": 0.0}


def test_decisions_without_a_look_are_not_grounded():
    found = measured(WITH_ERRORS, did(WITH_ERRORS, TRIVIAL["flag_all"](WITH_ERRORS, Random(0))))
    assert found["grounded"] == 0.0
    assert found["detection"] == 0.0
    assert found["calls_per_decision"] == pytest.approx(1 + 1 / len(WITH_ERRORS.facts.proposals))
    assert found["economy"] == 1.0, "fewer calls than needed are not dear"


def test_look_ups_without_a_decision_have_no_calls_per_decision_and_are_dear():
    found = measured(WITH_ERRORS, did(WITH_ERRORS, TRIVIAL["tool_farming"](WITH_ERRORS, Random(0))))
    assert found["calls_per_decision"] is None
    assert found["economy"] < 1.0


def test_a_refused_call_and_a_repeated_one_are_counted():
    turns = oracle(WITH_ERRORS, Random(0))
    wasted = [[*turns[0], ("review_proposal", {"proposal_id": "A99"}), turns[0][0]], *turns[1:]]
    found = measured(WITH_ERRORS, did(WITH_ERRORS, wasted))
    made = sum(map(len, wasted))
    assert found["invalid_calls"] == pytest.approx(1 / made)
    assert found["calls_per_decision"] == pytest.approx(made / len(WITH_ERRORS.facts.proposals))
    assert found["detection"] == 1.0
    assert found["economy"] == pytest.approx((made - 2) / made)


def test_what_was_found_and_not_handed_in_is_not_detected():
    *turns, last = oracle(WITH_ERRORS, Random(0))
    assert measured(WITH_ERRORS, did(WITH_ERRORS, [*turns, last[:-1]]))["detection"] == 0.0


def test_a_reason_without_evidence_is_seen_and_costs_detection():
    turns = [
        [
            (tool, arguments | {"reason": ""} if tool == "flag_error" else arguments) for tool, arguments in turn
        ]
        for turn in oracle(WITH_ERRORS, Random(0))
    ]  # fmt: skip
    found = measured(WITH_ERRORS, did(WITH_ERRORS, turns))
    assert (found["evidence"], found["fallacy_named"], found["grounded"]) == (0.0, 0.0, 1.0)
    assert 0.0 < found["detection"] < 1.0


def test_no_quality_changes_with_what_follows_the_report():
    turns = oracle(WITH_ERRORS, Random(0))
    after = [*turns, [("approve", {"proposal_id": WITH_ERRORS.facts.proposals[0].proposal_id})]]
    assert measured(WITH_ERRORS, did(WITH_ERRORS, after)) == measured(WITH_ERRORS, did(WITH_ERRORS, turns))
