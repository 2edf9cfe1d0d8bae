"""The ESI metrics against numbers worked out by hand."""

import math
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clinrl.tasks.esi.metrics import METRICS
from clinrl.tasks.parts import Share, Statistic
from clinrl.types import Unreadable

NOTHING = Unreadable(reason="no answer line")
GOLDS = [1, 1, 2, 2, 3, 3, 4, 5]
ANSWERS = [1, 3, 2, 1, 3, 5, NOTHING, 4]

levels = st.integers(1, 5)
answers = st.one_of(levels, st.just(NOTHING))


def share(name: str, golds: list, answers: list) -> tuple[int, int]:
    metric = METRICS[name]
    assert isinstance(metric, Share)
    counted = [verdict for pair in zip(golds, answers, strict=True) if (verdict := metric.of(*pair)) is not None]
    return sum(counted), len(counted)


def statistic(name: str, golds: list, answers: list) -> float:
    metric = METRICS[name]
    assert isinstance(metric, Statistic)
    return metric.value(Counter(zip(golds, answers, strict=True)))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("exact", (3, 8)),
        ("adjacent", (5, 8)),
        ("under_triage", (2, 8)),
        ("over_triage", (2, 8)),
        ("dangerous", (2, 8)),
        ("two_level_error", (2, 8)),
        ("critical_under", (1, 8)),
        ("high_risk_sensitivity", (3, 4)),
        ("recall_level_1", (1, 2)),
        ("recall_level_2", (1, 2)),
        ("recall_level_3", (1, 2)),
        ("recall_level_4", (0, 1)),
        ("recall_level_5", (0, 1)),
    ],
)
def test_shares_by_hand(name, expected):
    assert share(name, GOLDS, ANSWERS) == expected


def test_one_level_below_a_critical_patient_is_critical_but_not_dangerous():
    assert share("critical_under", [1, 2], [2, 3]) == (2, 2)
    assert share("dangerous", [1, 2], [2, 3]) == (0, 2)


def test_two_levels_too_urgent_is_an_error_but_not_dangerous():
    assert share("two_level_error", [5], [1]) == (1, 1)
    assert share("dangerous", [5], [1]) == (0, 1)


def test_unreadable_is_a_miss_in_every_share_that_counts_hits_and_no_mistriage():
    everything = {name: share(name, [1], [NOTHING]) for name, metric in METRICS.items() if isinstance(metric, Share)}
    assert everything == {
        "exact": (0, 1), "adjacent": (0, 1), "high_risk_sensitivity": (0, 1), "recall_level_1": (0, 1),
        "under_triage": (0, 1), "over_triage": (0, 1), "dangerous": (0, 1), "two_level_error": (0, 1),
        "critical_under": (1, 1),
        "recall_level_2": (0, 0), "recall_level_3": (0, 0), "recall_level_4": (0, 0), "recall_level_5": (0, 0),
    }  # fmt: skip


@given(st.lists(st.tuples(levels, answers), min_size=1))
def test_every_case_is_exactly_one_of_right_under_over_and_unreadable(pairs):
    golds, given_answers = [gold for gold, _ in pairs], [answer for _, answer in pairs]
    silent = sum(isinstance(answer, Unreadable) for answer in given_answers)
    hits = {name: share(name, golds, given_answers)[0] for name in METRICS if isinstance(METRICS[name], Share)}
    assert hits["exact"] + hits["under_triage"] + hits["over_triage"] + silent == len(pairs)
    assert hits["adjacent"] + hits["two_level_error"] + silent == len(pairs)
    assert hits["dangerous"] <= min(hits["under_triage"], hits["two_level_error"])
    assert sum(hits[f"recall_level_{level}"] for level in range(1, 6)) == hits["exact"]


def test_kappa_by_hand():
    # Pairs (1,1) (1,2) (2,2) (3,1): observed squares 0+1+0+4 = 5. Golds 1,1,2,3 and answers 1,2,2,1 all crossed:
    # 1: 0+1+1+0, twice; 2: 1+0+0+1; 3: 4+1+1+4; together 16. Kappa = 1 - 4 * 5 / 16.
    assert statistic("kappa", [1, 1, 2, 3], [1, 2, 2, 1]) == pytest.approx(-0.25)


def test_kappa_agrees_with_scikit_learn():
    from sklearn.metrics import cohen_kappa_score

    draw = Random(3)
    golds = [draw.randint(1, 5) for _ in range(200)]
    given_answers = [min(5, max(1, gold + draw.choice((-1, 0, 0, 1)))) for gold in golds]
    expected = cohen_kappa_score(golds, given_answers, weights="quadratic")
    assert statistic("kappa", golds, given_answers) == pytest.approx(expected)


@given(st.lists(levels, min_size=2).filter(lambda golds: len(set(golds)) > 1))
def test_kappa_of_the_gold_is_one_and_silence_does_not_move_it(golds):
    assert statistic("kappa", golds, golds) == 1.0
    assert statistic("kappa", [*golds, 3], [*golds, NOTHING]) == 1.0


def test_statistics_are_undefined_rather_than_zero():
    assert math.isnan(statistic("kappa", [2, 2], [2, 2]))
    assert math.isnan(statistic("kappa", [1, 2], [NOTHING, NOTHING]))
    assert math.isnan(statistic("mean_signed_error", [1], [NOTHING]))


def test_mean_signed_error_is_positive_towards_under_triage():
    assert statistic("mean_signed_error", [1, 2, 3], [3, 2, NOTHING]) == 1.0
    assert statistic("mean_signed_error", [5], [1]) == -4.0
