"""What audits are judged by, against counts by hand and scikit-learn's measures."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import fbeta_score, precision_score, recall_score

from clinrl.tasks.audit.env import RECORDED
from clinrl.tasks.audit.episodes import APPROVED, format_decisions, parse
from clinrl.tasks.audit.metrics import (
    METRICS,
    SHORT,
    balanced_accuracy,
    dangerous,
    f_beta,
    sensitivity,
    specificity,
)
from clinrl.tasks.audit.rules import AGE, ERROR_TYPES, OVERRIDE, TEMPORAL, WINDOW
from clinrl.tasks.base import get_task
from clinrl.types import Call, Message, Transcript, Unreadable

TASK = get_task("audit")
SILENT = Unreadable(reason="not submitted")
GOLD = "A1 approve; A2 age_boundary_error; A3 approve; A4 comorbidity_override_miss"

decisions = st.sampled_from((APPROVED, *ERROR_TYPES))
audits = st.lists(st.lists(st.tuples(decisions, decisions | st.none()), min_size=1, max_size=5), min_size=1, max_size=6)


def texts(audit):
    """An audit's gold text and answer; what is None was not decided."""
    gold = format_decisions({f"A{place}": right for place, (right, _) in enumerate(audit)})
    return gold, format_decisions({f"A{place}": given for place, (_, given) in enumerate(audit) if given is not None})


@pytest.mark.parametrize(
    ("answer", "is_exact", "is_dangerous"),
    [
        (GOLD, True, False),
        (SILENT, False, True),
        ("", False, True),
        ("A1 approve; A2 approve; A3 approve; A4 comorbidity_override_miss", False, True),
        ("A1 approve; A2 age_boundary_error; A3 approve", False, True),  # the last error was never decided
        ("A1 age_boundary_error; A2 temporal_inconsistency; A3 approve; A4 protocol_window_violation", False, False),
    ],
)
def test_an_audit_is_dangerous_if_an_error_passes_and_exact_if_all_is_right(answer, is_exact, is_dangerous):
    assert METRICS["exact"].of(GOLD, answer) is is_exact
    assert dangerous(GOLD, answer) is is_dangerous


def test_decisions_are_one_text_in_whatever_order_they_were_made():
    calls = [Call(name="approve", arguments={"proposal_id": f"A{place}"}) for place in (3, 1, 2)]
    calls.append(Call(name="submit_audit_report", arguments={"report": "done"}))
    results = [Message(role="tool", content=result) for result in (*[RECORDED] * 3, "submitted")]
    messages = (Message(role="assistant", content="", calls=tuple(calls)), *results)
    answer = parse(Transcript(messages=messages, stop="answered"))
    assert answer == "A1 approve; A2 approve; A3 approve"


def test_results_without_calls_are_passed_over():
    messages = [Message(role=role, content="submitted") for role in ("tool", "user", "tool")]
    assert isinstance(parse(Transcript(messages=tuple(messages), stop="answered")), Unreadable)


def test_where_the_actor_makes_no_error_nothing_is_dangerous():
    assert dangerous("A1 approve; A2 approve", SILENT) is None


@pytest.mark.long
@given(audits)
def test_pooled_figures_are_those_of_scikit_learn(found):
    golds, answers = zip(*map(texts, found), strict=True)
    right = [one for audit in found for one, _ in audit]
    given_ = [given or "undecided" for audit in found for _, given in audit]
    kinds = list(ERROR_TYPES)
    counts = Counter(zip(golds, answers, strict=True))
    options = {"labels": kinds, "average": "micro", "zero_division": 0.0}
    assert f_beta(counts) == pytest.approx(fbeta_score(right, given_, beta=1.5, **options))
    assert sensitivity(counts) == pytest.approx(recall_score(right, given_, **options))
    clean = recall_score(right, given_, labels=[APPROVED], average="micro", zero_division=0.0)
    assert specificity(counts) == pytest.approx(clean)
    assert balanced_accuracy(counts) == pytest.approx((sensitivity(counts) + clean) / 2)
    for kind in kinds:
        alone = {"labels": [kind], "average": "micro", "zero_division": 0.0}
        assert METRICS[f"recall_{SHORT[kind]}"].of(counts) == pytest.approx(recall_score(right, given_, **alone))
        assert METRICS[f"precision_{SHORT[kind]}"].of(counts) == pytest.approx(precision_score(right, given_, **alone))


def test_an_audit_that_was_not_handed_in_counts_as_nothing_decided():
    assert [of({(GOLD, SILENT): 1}) for of in (sensitivity, specificity, f_beta)] == [0, 0, 0]
    assert METRICS["recall_override"].of({(GOLD, GOLD): 1, (GOLD, SILENT): 1}) == 0.5


def test_a_flag_of_another_type_is_a_false_alarm_and_a_miss():
    answer = GOLD.replace(AGE, TEMPORAL)
    assert sensitivity({(GOLD, answer): 1}) == 0.5
    assert METRICS["precision_temporal"].of({(GOLD, answer): 1}) == 0.0
    assert {AGE, TEMPORAL, WINDOW, OVERRIDE} == set(SHORT)


def test_every_metric_says_which_way_is_worse():
    assert {name for name, metric in METRICS.items() if metric.worse == "higher"} == {"dangerous"}
    assert set(METRICS) == set(TASK.metrics)
