"""Answers of least expected cost: counted by hand, and monotone in the weight."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clinrl.analysis.costs import WEIGHTS, choose, count
from clinrl.tasks.base import get_task
from clinrl.types import Unreadable

ESI = get_task("esi")
ODDS = st.lists(st.floats(0, 1), min_size=2, max_size=6).filter(lambda odds: sum(odds) > 0)
SHARES = ODDS.map(lambda odds: [value / sum(odds) for value in odds])


def expected(shares: list[float], place: int, weight: float) -> float:
    """The mean cost of an answer, by the definition."""
    return sum(p * (weight * (place - gold) if place > gold else gold - place) for gold, p in enumerate(shares))


@given(SHARES, st.sampled_from(WEIGHTS))
def test_no_answer_has_a_smaller_expected_cost(shares: list[float], weight: float) -> None:
    costs = [expected(shares, place, weight) for place in range(len(shares))]
    assert costs[choose(shares, weight)] == pytest.approx(min(costs), abs=1e-9 * (1 + weight))


@given(SHARES)
def test_a_larger_weight_never_chooses_a_less_cautious_answer(shares: list[float]) -> None:
    places = [choose(shares, weight) for weight in WEIGHTS]
    assert places == sorted(places, reverse=True)
    over = [sum(p * max(0, gold - place) for gold, p in enumerate(shares)) for place in places]
    assert all(later >= earlier - 1e-12 for earlier, later in pairwise(over))


def test_counts_are_those_by_hand_and_silence_stays() -> None:
    silent = Unreadable(reason="empty")
    golds: list[Any] = [2, 3, 1, 4]
    answers: list[Any] = [3, 3, silent, 4]
    found = count(ESI, golds, answers, [(0.0, 0.3, 0.7, 0.0, 0.0), (0.0, 0.1, 0.9, 0.0, 0.0), None, None])
    assert (found.n, found.scored) == (4, 2)
    assert found.measures == ("exact", "under_triage", "over_triage", "critical_under")
    assert found.own == (2, 1, 0, 2)
    at = dict(zip(found.weights, found.chosen, strict=True))
    assert at[2.0] == (2, 1, 0, 2)  # 2 * 0.3 < 0.7: the first case stays under
    assert at[4.0] == (3, 0, 0, 1)  # 4 * 0.3 > 0.7: now it is right; 4 * 0.1 < 0.9
    assert at[16.0] == (2, 0, 1, 1)
    assert found.shares("under_triage")[0] == 0.25
    assert len(found.shares("exact")) == 1 + len(WEIGHTS)
