"""The imaging metrics against scikit-learn, and against the published tables that the matrices give."""

import math
import time
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clinrl.analysis.exam import estimates
from clinrl.tasks.imaging.answer import LABELS
from clinrl.tasks.imaging.metrics import METRICS
from clinrl.tasks.parts import Share, Statistic
from clinrl.types import Unreadable

UNA, MBA, UA = LABELS
NOTHING = Unreadable(reason="unclosed")

MATRICES = {
    "baseline": ((91, 84, 160), (15, 20, 54), (4, 14, 78)),
    "citations": ((191, 67, 76), (18, 42, 27), (8, 48, 40)),
    "llm-eval": ((264, 43, 28), (35, 35, 19), (24, 33, 39)),
    "custom-embedding": ((279, 39, 16), (42, 38, 9), (28, 41, 27)),
    "constant": ((335, 0, 0), (89, 0, 0), (96, 0, 0)),
}
"""Published confusion matrices: rows gold, columns predicted, in the order of the labels."""

PUBLISHED = {
    "baseline": {"macro_f1": 33.5, "weighted_f1": 37.1},
    "citations": {"macro_f1": 45.6, "weighted_f1": 56.6},
    "llm-eval": {"macro_f1": 52.7, "weighted_f1": 65.6},
    "custom-embedding": {"macro_f1": 51.6, "weighted_f1": 65.6},
}
"""Published table, in percent."""

DERIVED = {
    "baseline": {
        "exact": 36.3, "balanced_accuracy": 43.6, "kappa": 18, "dangerous": 31.5, "withheld": 4.2,
        "recall_una": 27, "recall_mba": 22, "recall_ua": 81,
    },
    "citations": {
        "exact": 52.8, "balanced_accuracy": 49.1, "kappa": 31, "dangerous": 16.2, "withheld": 8.3,
        "recall_una": 57, "recall_mba": 48, "recall_ua": 42,
    },
    "llm-eval": {
        "exact": 65.0, "balanced_accuracy": 52.9, "kappa": 46, "dangerous": 10.0, "withheld": 25.0,
        "recall_una": 79, "recall_mba": 39, "recall_ua": 41,
    },
    "custom-embedding": {
        "exact": 66.3, "balanced_accuracy": 51.4, "kappa": 45, "dangerous": 8.5, "withheld": 29.2,
        "recall_una": 84, "recall_mba": 43, "recall_ua": 28,
    },
    "constant": {"exact": 64.4, "balanced_accuracy": 33.3, "kappa": 0, "dangerous": 18.5, "withheld": 100.0},
}  # fmt: skip
"""What was worked out from the matrices elsewhere, in percent."""

labels = st.sampled_from(LABELS)
answers = st.one_of(labels, st.just(NOTHING))


def unrolled(matrix: tuple) -> tuple[list, list]:
    cells = [(LABELS[g], LABELS[a]) for g, row in enumerate(matrix) for a, n in enumerate(row) for _ in range(n)]
    return [gold for gold, _ in cells], [answer for _, answer in cells]


def with_silence(matrix: tuple) -> tuple[list, list]:
    """With the answers that the published plots leave out, as many as a label lacks."""
    golds, given_answers = unrolled(matrix)
    lacking = [(label, n - sum(row)) for label, n, row in zip(LABELS, (335, 89, 96), matrix, strict=True)]
    for label, n in lacking:
        golds += [label] * n
        given_answers += [NOTHING] * n
    return golds, given_answers


def value(name: str, golds: list, given_answers: list) -> float:
    metric = METRICS[name]
    if isinstance(metric, Statistic):
        return metric.value(Counter(zip(golds, given_answers, strict=True)))
    counted = [v for pair in zip(golds, given_answers, strict=True) if (v := metric.of(*pair)) is not None]
    return sum(counted) / len(counted) if counted else math.nan


@pytest.mark.parametrize("arm", MATRICES)
def test_published_matrices_give_the_published_tables(arm):
    golds, given_answers = unrolled(MATRICES[arm])
    for name, percent in PUBLISHED.get(arm, {}).items():
        assert 100 * value(name, *with_silence(MATRICES[arm])) == pytest.approx(percent, abs=0.1), name
    for name, percent in DERIVED[arm].items():
        within = 0.06 if isinstance(percent, float) else 0.51
        assert 100 * value(name, golds, given_answers) == pytest.approx(percent, abs=within), name


@pytest.mark.parametrize("silent", [0.0, 0.1])
def test_agrees_with_scikit_learn(silent):
    from sklearn.metrics import balanced_accuracy_score, cohen_kappa_score, f1_score

    draw = Random(5)
    golds = draw.choices(LABELS, (64, 17, 19), k=400)
    said = [NOTHING if draw.random() < silent else draw.choice((gold, *LABELS)) for gold in golds]
    words = ["none" if isinstance(answer, Unreadable) else answer for answer in said]
    for name, average in (("macro_f1", "macro"), ("weighted_f1", "weighted")):
        expected = f1_score(golds, words, labels=LABELS, average=average)
        assert value(name, golds, said) == pytest.approx(expected)
    recalls = [value(name, golds, said) for name in ("recall_una", "recall_mba", "recall_ua")]
    assert value("balanced_accuracy", golds, said) == pytest.approx(sum(recalls) / 3)
    read = [(g, a) for g, a in zip(golds, words, strict=True) if a != "none"]
    ranked = [[LABELS.index(pair[side]) for pair in read] for side in (0, 1)]
    assert value("kappa", golds, said) == pytest.approx(cohen_kappa_score(*ranked, weights="quadratic"))
    if not silent:
        assert value("balanced_accuracy", golds, said) == pytest.approx(balanced_accuracy_score(golds, words))


@given(st.lists(st.tuples(labels, answers), min_size=1))
def test_every_case_is_exactly_one_of_right_over_under_and_unreadable(pairs):
    golds, said = [gold for gold, _ in pairs], [answer for _, answer in pairs]
    silent = sum(answer is NOTHING for answer in said) / len(pairs)
    parts = {name: value(name, golds, said) for name in ("exact", "over_use", "under_use", "adjacent", "dangerous")}
    assert parts["exact"] + parts["over_use"] + parts["under_use"] + silent == pytest.approx(1)
    assert parts["adjacent"] + parts["dangerous"] + silent == pytest.approx(1)
    for name in ("macro_f1", "weighted_f1", "balanced_accuracy"):
        assert 0 <= value(name, golds, said) <= 1


@given(st.lists(st.tuples(labels, labels), min_size=1), st.data())
def test_silence_instead_of_an_answer_never_raises_a_score(pairs, data):
    golds, said = [gold for gold, _ in pairs], [answer for _, answer in pairs]
    i = data.draw(st.integers(0, len(pairs) - 1))
    muted = [*said[:i], NOTHING, *said[i + 1 :]]
    assert value("exact", golds, muted) <= value("exact", golds, said)
    assert value("balanced_accuracy", golds, muted) <= value("balanced_accuracy", golds, said) + 1e-12


def test_unreadable_counts_as_an_error_in_a_report_and_not_against_kappa():
    golds, said = [UNA, UNA, MBA, UA], [UNA, NOTHING, MBA, UA]
    found = estimates(METRICS, golds, said)
    assert found["kappa"].value == 1.0
    assert found["kappa"].n == 3
    assert found["balanced_accuracy"].value == pytest.approx(5 / 6, abs=1e-6)
    assert found["macro_f1"].n == 4
    assert found["macro_f1"].value == pytest.approx((2 / 3 + 1 + 1) / 3, abs=1e-6)
    silent = estimates(METRICS, golds, [NOTHING] * 4)
    assert "kappa" not in silent
    assert silent["macro_f1"].value == 0.0
    assert all(math.isnan(metric.value({})) for metric in METRICS.values() if isinstance(metric, Statistic))


def test_every_share_keeps_silence_in_its_denominator():
    for name, metric in METRICS.items():
        if isinstance(metric, Share):
            verdicts = [metric.of(gold, NOTHING) for gold in LABELS]
            assert True not in verdicts, name
            assert False in verdicts, name


def test_both_directions_are_dangerous():
    assert value("dangerous", [UNA, UA, MBA], [UA, UNA, UA]) == pytest.approx(2 / 3)


@pytest.mark.bench
@pytest.mark.parametrize("name", [name for name, metric in METRICS.items() if isinstance(metric, Statistic)])
def test_a_statistic_takes_less_than_a_tenth_of_a_millisecond(name):
    draw = Random(5)
    golds = draw.choices(LABELS, (64, 17, 19), k=800)
    said = [NOTHING if draw.random() < 0.05 else draw.choice((gold, *LABELS)) for gold in golds]
    start = time.perf_counter()
    for _ in range(200):
        value(name, golds, said)
    each = (time.perf_counter() - start) / 200
    print(f"{name}: {1e6 * each:.0f} microseconds")
    assert each < 300e-6
