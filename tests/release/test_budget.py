"""The error budget of an exam: never overspent, given back on success alone, and counted from the audit log."""

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clinrl.config.change_plan import Budget
from clinrl.errors import GateError
from clinrl.release import budget
from clinrl.release.audit_log import Entry
from clinrl.release.budget import Account, Spent

EXAM = "e" * 64
PLAN = Budget(alpha=0.05, spend=0.6, looks=6)
MANY = Budget(alpha=0.05, spend=0.6, looks=1000)


def line(candidate: str, look: budget.Look | None, *, promote: bool, exam: str = EXAM, champion: str = "c") -> Entry:
    """A decision as the audit log holds it; one from before there were plans without a look."""
    body = {"candidate_digest": candidate, "champion_digest": champion, "exam_digest": exam, "promote": promote}
    if look is not None:
        spent = Spent(**look.model_dump(), left_after=look.level if promote else look.before - look.level)
        body |= {"budget": spent.model_dump(mode="json")}
    return Entry.model_construct(kind="decision", body=body)


def ask(lines: list[Entry], candidate: str, *, promote: bool, plan: Budget = PLAN) -> budget.Look:
    """Decide on a candidate: look, and write the decision down."""
    held = budget.account(lines, EXAM, plan.alpha)
    look = budget.look(held, plan, (candidate, "c", "a"), "x1")
    lines.append(line(candidate, look, promote=promote))
    return look


def left(lines: Sequence[Entry], alpha: float = PLAN.alpha) -> float:
    return budget.account(lines, EXAM, alpha).left


def test_a_refusal_spends_its_level_and_a_success_gets_it_back():
    lines: list[Entry] = []
    assert ask(lines, "1", promote=False).level == pytest.approx(0.03)
    assert left(lines) == pytest.approx(0.02)
    assert ask(lines, "2", promote=True).level == pytest.approx(0.012)
    assert left(lines) == pytest.approx(0.012), "what was kept for a refusal is forfeited"
    third = ask(lines, "3", promote=False)
    assert (third.number, third.level, third.before) == (3, pytest.approx(0.0072), pytest.approx(0.012))


def test_a_question_that_is_asked_again_states_what_is_left_now():
    lines: list[Entry] = []
    first = ask(lines, "1", promote=False)
    ask(lines, "2", promote=False)
    held, key = budget.account(lines, EXAM, PLAN.alpha), ("1", "c", "a")
    assert held.after(key, first, passed=False) == held.left == pytest.approx(0.008)
    assert held.after(key, first, passed=True) == held.left
    third = budget.look(held, PLAN, ("3", "c", "a"), "x1")
    assert held.after(("3", "c", "a"), third, passed=True) == third.level < held.left
    assert held.after(("3", "c", "a"), third, passed=False) == pytest.approx(0.0032)


def test_the_same_question_is_no_further_look():
    lines: list[Entry] = []
    first = ask(lines, "1", promote=False)
    ask(lines, "2", promote=False)
    before = left(lines)
    assert ask(lines, "1", promote=False) == first
    assert left(lines) == before
    held = budget.account(lines, EXAM, PLAN.alpha)
    for other in (("1", "c", "other answers"), ("1", "another champion", "a")):
        assert budget.look(held, PLAN, other, "x1").number == 3


def test_a_question_that_passes_later_leaves_what_a_pass_leaves():
    """It was refused for something else at first, such as a signature that was missing."""
    plan = Budget(alpha=0.05, spend=0.3, looks=6)
    lines: list[Entry] = []
    level = ask(lines, "1", promote=False, plan=plan).level
    assert left(lines) == pytest.approx(0.035)
    ask(lines, "1", promote=True, plan=plan)
    assert left(lines) == pytest.approx(level) == pytest.approx(0.015)
    ask(lines, "2", promote=False, plan=plan)
    before = left(lines)
    ask(lines, "1", promote=True, plan=plan)
    assert left(lines) == before < level, "nothing comes back that another look spent since"


def test_another_exam_and_older_decisions_spend_nothing():
    lines: list[Entry] = [Entry.model_construct(kind="rollback", body={})]
    look = ask(lines, "1", promote=False)
    lines += [line("2", look, promote=False, exam="f" * 64), line("3", None, promote=False)]
    assert left(lines) == pytest.approx(0.02)
    assert left(lines[:1]) == PLAN.alpha


def test_a_budget_that_is_used_up_says_what_to_do():
    lines: list[Entry] = []
    for number in range(PLAN.looks):
        ask(lines, str(number), promote=False)
    with pytest.raises(GateError, match=r"budget of x1 is used up: 6 decisions looked .* at most 6; draw a fresh exam"):
        ask(lines, "one more", promote=False)
    assert ask(lines, "3", promote=False).number == 4, "what was asked before may be asked again"
    emptied = Account(0.0, {})
    with pytest.raises(GateError, match="used up"):
        budget.look(emptied, PLAN, ("1", "c", "a"), "x1")


def test_a_plan_that_allows_less_than_was_spent_leaves_nothing():
    lines: list[Entry] = []
    ask(lines, "1", promote=False)
    assert left(lines, alpha=0.01) == 0
    passed: list[Entry] = []
    ask(passed, "1", promote=True)
    assert left(passed, alpha=0.01) == 0.01, "what a pass keeps is no more than the plan allows by now"


@given(verdicts=st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=40), spend=st.floats(0.01, 0.99))
def test_no_sequence_of_decisions_overspends(verdicts, spend):
    plan = Budget(alpha=0.05, spend=spend, looks=1000)
    lines: list[Entry] = []
    refused: dict[str, float] = {}
    for candidate, promote in verdicts:
        held = budget.account(lines, EXAM, plan.alpha)
        look = ask(lines, str(candidate), promote=promote, plan=plan)
        if look.number > len(held.looks) and not promote:
            refused[str(candidate)] = look.level
        stated = held.after((str(candidate), "c", "a"), look, passed=promote)
        assert stated == left(lines), "a decision states what the audit log then says"
        assert 0 <= left(lines) < 0.05
        assert sum(refused.values()) + left(lines) <= 0.05 + 1e-12


def first_errors(truths: Iterator[bool], lines: list[Entry], depth: int) -> float:
    """The levels of all looks, after any yes and no, at which a first candidate that is no better could pass.

    `truths` says of each version that would be made whether it is better. A yes to one that is no better is the first
    error, so that nothing after it counts; a yes to a better one, and any no, is followed.
    """
    if not depth:
        return 0.0
    is_better, held = next(truths), budget.account(lines, EXAM, MANY.alpha)
    look = budget.look(held, MANY, (str(len(lines)), "c", "a"), "x1")
    after_no = first_errors(truths, [*lines, line(str(len(lines)), look, promote=False)], depth - 1)
    if not is_better:
        return look.level + after_no
    return after_no + first_errors(truths, [*lines, line(str(len(lines)), look, promote=True)], depth - 1)


@given(st.data())
def test_however_versions_follow_from_decisions_first_errors_sum_to_alpha_at_most(data):
    """The theorem that `clinrl.release.budget` states, on whole trees of an adaptive developer."""
    truths = iter(lambda: data.draw(st.booleans()), None)
    assert first_errors(truths, [], depth=5) <= MANY.alpha + 1e-12
