"""Intervals and paired tests against published and hand-computed numbers."""

import math
from collections import Counter
from itertools import product
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, norm

from clinrl import intervals
from clinrl.intervals import (
    Counts,
    Runs,
    average,
    average_difference,
    bootstrap,
    holm,
    no_better,
    paired,
    rate,
    runs_of,
    runs_of_means,
    wilson,
)
from clinrl.intervals import mean as mean_of
from clinrl.types import Estimate


def mean(counts: Counts) -> float:
    return sum(n * answer for (_, answer), n in counts.items()) / sum(counts.values())


def discordant(b: int, c: int, n: int) -> tuple[list[bool], list[bool]]:
    same = n - b - c
    return [True] * b + [False] * c + [True] * same, [False] * b + [True] * c + [True] * same


@pytest.mark.parametrize(
    ("hits", "low", "high"), [(28, 61.9, 88.3), (30, 68.1, 92.1), (34, 81.9, 98.5), (36, 90.4, 100.0), (0, 0.0, 9.6)]
)
def test_wilson_of_the_published_36_cases(hits, low, high):
    estimate = wilson(hits, 36)
    assert (round(100 * estimate.low, 1), round(100 * estimate.high, 1), estimate.n) == (low, high, 36)


@given(st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_holds_its_share_and_stays_a_share(case):
    estimate = wilson(*case)
    assert 0.0 <= estimate.low <= estimate.value <= estimate.high <= 1.0


@pytest.mark.parametrize(("hits", "n"), [(0, 0), (3, 2), (-1, 5)])
def test_wilson_refuses_what_is_no_share(hits, n):
    with pytest.raises(ValueError, match="a share needs"):
        wilson(hits, n)


@pytest.mark.parametrize(
    ("b", "c", "p"), [(6, 0, 0.03125), (5, 0, 0.0625), (8, 1, 0.03906), (8, 2, 0.1094), (2, 0, 0.5), (0, 0, 1.0)]
)
def test_mcnemar_is_the_exact_binomial_on_the_discordant_pairs(b, c, p):
    test = paired("exact", "parent", *discordant(b, c, 36))
    assert (test.b, test.c, test.difference.n) == (b, c, 36)
    assert test.p == p
    assert test.difference.value == pytest.approx((b - c) / 36, abs=1e-6)


def test_interval_of_a_paired_difference_by_hand():
    # b 8, c 2, n 38: shares 9/40 and 3/40, difference 0.15, variance (0.3 - 0.0225) / 40 = 0.0069375.
    interval = paired("exact", "parent", *discordant(8, 2, 38)).difference
    reach = 1.959964 * math.sqrt(0.0069375)
    assert interval.low == pytest.approx(0.15 - reach, abs=1e-5)
    assert interval.high == pytest.approx(0.15 + reach, abs=1e-5)


def test_no_discordance_is_not_certainty():
    test = paired("exact", "parent", [True] * 20, [True] * 20)
    assert test.p == 1.0
    assert test.difference.low < 0 < test.difference.high


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1))
def test_swapping_the_sides_mirrors_the_test(pairs):
    mine, theirs = [a for a, _ in pairs], [b for _, b in pairs]
    one, other = paired("exact", "x", mine, theirs), paired("exact", "x", theirs, mine)
    assert (one.b, one.c, one.p) == (other.c, other.b, other.p)
    assert one.difference.low == -other.difference.high
    assert one.difference.low <= one.difference.value <= one.difference.high


@given(st.lists(st.integers(-3, 3), max_size=9))
def test_the_randomisation_test_counts_every_way_to_sign_the_gains(gains):
    sums = [sum(sign * abs(gain) for sign, gain in zip(signs, gains, strict=True))
            for signs in product((1, -1), repeat=len(gains))]  # fmt: skip
    counts = Counter(map(abs, gains))
    p = no_better(sum(gains), [counts[size] for size in (1, 2, 3)])
    assert p == pytest.approx(sum(total >= sum(gains) for total in sums) / len(sums))


@pytest.mark.parametrize(("b", "c"), [(5, 0), (14, 2), (9, 3)])
def test_with_one_answer_a_case_it_is_half_of_mcnemars(b, c):
    two_sided = paired("exact", "other", *discordant(b, c, b + c + 1)).p
    assert no_better(b - c, [b + c]) == pytest.approx(two_sided / 2, rel=1e-3)
    assert no_better(c - b, [b + c]) > 0.9
    assert no_better(0, []) == no_better(0, [0, 0]) == no_better(-c, [c]) == 1


def test_visits_of_one_patient_are_one_piece_of_evidence():
    b, c = discordant(12, 2, 60)
    visits = [str(case // 4) for case in range(60)]
    alone, alike = paired("exact", "x", b, c), paired("exact", "x", b, c, clusters=visits)
    assert (alone.b, alone.c, alone.difference.value) == (alike.b, alike.c, alike.difference.value)
    assert alone.p < 0.05 < alike.p == 0.25  # gains of 4, 4, 4 and losses of 2: 2 of 8 signs
    assert alike.difference.high - alike.difference.low > alone.difference.high - alone.difference.low
    assert paired("exact", "x", c, b, clusters=visits).p == alike.p, "two-sided"
    apart = paired("exact", "x", b, c, clusters=[str(case) for case in range(60)])
    assert apart == alone


@pytest.mark.long
def test_a_test_of_patients_errs_no_more_often_than_it_says():
    generator = numpy.random.default_rng(5)
    ps = []
    for _ in range(200):
        base = generator.choice([-1, 0, 1], p=[0.1, 0.8, 0.1], size=60)
        signs = numpy.repeat(base, 6)
        clusters = numpy.repeat(numpy.arange(60), 6).astype(str).tolist()
        ps.append(paired("exact", "x", (signs > 0).tolist(), (signs < 0).tolist(), clusters=clusters).p)
    assert sum(p < 0.05 for p in ps) <= 18  # 10 expected; McNemar's errs in some 100


@pytest.mark.parametrize(
    ("mine", "share"), [([1, 1] * 30, 1), ([0, 0] * 30, 0), ([1, 0] * 30, 0.5), ([1, 1, 0], 2 / 3)]
)
def test_patients_who_all_agree_leave_a_width_around_their_difference(mine, share):
    clusters = ["a"] * 3 if len(mine) == 3 else [str(case // 2) for case in range(60)]
    for sign in (1, -1):
        sides = (list(map(bool, mine)), [False] * len(mine))[::sign]
        found = paired("exact", "x", *sides, clusters=clusters).difference
        assert found.value == pytest.approx(sign * share, abs=1e-6)
        assert found.low <= found.value <= found.high
        assert found.high - found.low > 0.1


def test_the_interval_over_patients_is_that_of_two_runs_on_the_same_draws():
    mine, theirs = discordant(12, 2, 60)
    visits = [str(case // 4) for case in range(60)]
    one, other = (runs_of_means([[*map(float, side)]], visits) for side in (mine, theirs))
    whole = average_difference(one, other, is_share=True).estimate
    assert paired("exact", "x", mine, theirs, clusters=visits).difference == whole


@pytest.mark.parametrize("level", [0.03, 0.025, 0.012, 0.0048])
@pytest.mark.parametrize("patients", [800, 700, 35])
def test_a_test_of_a_margin_errs_no_more_often_than_its_level(level, patients):
    """A model that is in truth worse by a point of 800 cases, and gains none: how often its bound is above that."""
    clusters = [str(case % patients) for case in range(800)]
    passed = 0.0
    for losses in range(9):
        mine, theirs = discordant(0, losses, 800)
        bound = paired("exact", "x", mine, theirs, 1 - 2 * level, clusters).difference.low
        passed += binom.pmf(losses, 800, 0.01) if bound > -0.01 else 0.0
    assert passed <= (level if patients > 35 else 0.0)  # 35 cannot show a loss of less than a point


def test_the_bound_of_a_margin_is_where_the_likelihood_has_it():
    """Tango's score: the difference over its standard error, by the most likely shares that have the difference."""
    b, c, n, error = 3, 9, 200, 0.01
    low = paired("exact", "x", *discordant(b, c, n), 1 - 2 * error).difference.low
    lost = numpy.linspace(-low, (1 - low) / 2, 200_001)[1:-1]
    likely = b * numpy.log(lost + low) + c * numpy.log(lost) + (n - b - c) * numpy.log(1 - 2 * lost - low)
    variance = 2 * lost[likely.argmax()] + low - low**2
    assert low == pytest.approx(-0.08005, abs=1e-5)
    assert ((b - c) / n - low) / math.sqrt(variance / n) == pytest.approx(norm.isf(error), abs=1e-3)


@pytest.mark.parametrize("level", [0.5, 0.94, 1 - 1e-9])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_every_count_has_bounds_at_every_level(n, level):
    for b, c in product(range(n + 1), repeat=2):
        found = paired("exact", "x", *discordant(b, c, max(n, b + c)), level).difference
        assert -1 <= found.low <= found.value <= found.high <= 1


@pytest.mark.parametrize(("mine", "theirs"), [([], []), ([True], [True, False])])
def test_paired_refuses_answers_to_different_cases(mine, theirs):
    with pytest.raises(ValueError, match="same cases"):
        paired("exact", "x", mine, theirs)


def test_bootstrap_of_a_mean_has_the_width_of_theory_and_is_the_same_twice():
    answers = [0] * 200 + [1] * 200
    estimate = bootstrap(mean, [0] * 400, answers)
    assert estimate == bootstrap(mean, [0] * 400, answers)
    assert (estimate.value, estimate.n) == (0.5, 400)
    # Standard error 0.025; half of the 95% interval is 0.049.
    assert estimate.low == pytest.approx(0.451, abs=0.004)
    assert estimate.high == pytest.approx(0.549, abs=0.004)


def test_bootstrap_depends_on_the_cases_and_not_on_their_order():
    golds, answers = [1, 2, 3] * 10, [1, 2, 2] * 10
    order = sorted(range(30), key=lambda i: (i * 7) % 30)
    assert bootstrap(mean, golds, answers) == bootstrap(mean, [golds[i] for i in order], [answers[i] for i in order])


def test_bootstrap_of_the_undefined_is_none_and_undefined_draws_are_left_out():
    assert bootstrap(lambda counts: math.nan, [1], [1]) is None
    assert bootstrap(lambda counts: 1.0 if (1, 1) in counts else math.nan, [1, 2], [1, 2]).low == 1.0
    assert bootstrap(lambda counts: float((1, 1) in counts), [1, 2], [1, 2]).low == 0.0, "a draw without that case"


def test_no_values_have_no_mean():
    with pytest.raises(ValueError, match="a mean needs at least one value"):
        mean_of([])


NUMBERS = st.lists(st.integers(0, 3), min_size=1, max_size=40)
CLUSTERED = st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abcdef")), min_size=1, max_size=40)


@pytest.mark.long
@given(CLUSTERED)
def test_the_order_of_cases_moves_no_clustered_interval(cases):
    def found(rows):
        values, clusters = [row[0] for row in rows], [row[1] for row in rows]
        return bootstrap(mean, values, values, clusters), mean_of(values, clusters)

    one, other = found(cases)
    assert one == other
    assert found(sorted(cases)) == found(cases)
    assert one.low <= one.high
    assert one.n == len(cases)


@given(NUMBERS)
def test_the_mean_is_the_bootstrap_of_the_mean(values):
    assert mean_of(values) == bootstrap(mean, values, values)


def test_answers_that_repeat_within_clusters_are_worth_no_more_than_one():
    """Ten copies of each of 50 cases say what the 50 do: the interval of clusters is theirs, that of cases a third."""
    once = [index % 5 == 0 for index in range(50)]
    copies, names = once * 10, [str(index) for index in range(50)] * 10
    honest, naive, single = mean_of(copies, names), mean_of(copies), mean_of(once)
    assert (honest.high - honest.low) == pytest.approx(single.high - single.low, rel=0.1)
    # The standard error of a share of 0.2 of 50 is 0.0566, of which an interval holds 3.92.
    assert (honest.high - honest.low) == pytest.approx(3.92 * 0.0566, rel=0.1)
    assert (naive.high - naive.low) == pytest.approx((honest.high - honest.low) / math.sqrt(10), rel=0.15)


def test_a_share_of_clusters_keeps_a_width_when_all_agree():
    assert rate([False] * 60, ["a", "b", "c"] * 20) == wilson(0, 3).model_copy(update={"n": 60})
    assert rate([True] * 60, ["a", "b", "c"] * 20).high == 1.0
    assert rate([True, False] * 30) == wilson(30, 60)
    mixed, names = [True, False, False] * 4, [*"aabbccddeeff"]
    assert rate(mixed, names) == mean_of([float(one) for one in mixed], names)


def halves(share: float, n: int = 200) -> list[float]:
    return [1.0] * round(share * n) + [0.0] * (n - round(share * n))


@given(CLUSTERED)
def test_one_run_is_averaged_like_a_single_set_of_answers(cases):
    values, clusters = [float(row[0]) for row in cases], [row[1] for row in cases]
    assert average(runs_of_means([values], clusters)) == mean_of(values, clusters)
    assert average(runs_of(mean, values, [values], clusters)) == bootstrap(mean, values, values, clusters)
    for runs in (runs_of_means([values], clusters), runs_of(mean, values, [values], clusters)):
        assert (runs.n, runs.apart) == (len(values), len(set(clusters)))


def test_an_interval_over_runs_holds_the_spread_of_cases_and_of_runs():
    alike = average(runs_of_means([halves(0.5)] * 3))
    # The same cases in all runs: three of them say no more than one. Standard error 0.0354.
    assert (alike.high - alike.low) == pytest.approx(3.92 * 0.0354, rel=0.1)
    apart = average(runs_of_means([halves(0.3), halves(0.5), halves(0.7)]))
    # Runs add a standard error of sqrt(2 / 3) * 0.2 / sqrt(3) = 0.0943.
    assert (apart.value, apart.n) == (0.5, 200)
    assert (apart.high - apart.low) > 0.3
    below = average(runs_of_means([[-1.0, -2.0], [-2.0, -3.0]]))
    assert below.low < below.value == -2.0, "what is no share is cut nowhere"


def test_a_difference_of_one_lucky_run_is_none_and_one_of_all_runs_is():
    plain = runs_of_means([halves(0.5)] * 3)
    lucky, better = runs_of_means([halves(0.5), halves(0.5), halves(0.8)]), runs_of_means([halves(0.65)] * 3)
    assert average_difference(lucky, plain).p > 0.05
    test = average_difference(better, plain)
    difference, p = test.estimate, test.p
    # 30 of 200 cases differ by one in every run: standard error sqrt(0.15 * 0.85 / 200) = 0.0252, t = 5.94.
    assert difference.value == 0.15
    assert difference.low == pytest.approx(0.15 - 1.97 * 0.0252, abs=0.002)
    assert 1e-9 < p < 1e-7
    same = average_difference(plain, plain)
    assert (same.estimate, same.p) == (Estimate(value=0, low=0, high=0, n=200), 1.0)


def test_where_nothing_varies_the_number_of_cases_is_all_that_tells():
    for n, expected in ((1, 1.0), (4, 0.125)):
        sides = [runs_of_means([[value] * n] * 2) for value in (1.0, 0.0)]
        assert average_difference(*sides).p == average_difference(*reversed(sides)).p == expected
    clusters = ["a"] * 4
    one, none = ([[value, 0.0, 0.0, 0.0]] * 2 for value in (1.0, 0.0))
    assert average_difference(runs_of_means(one, clusters), runs_of_means(none, clusters)).p == 1.0


def test_two_recipes_are_compared_by_welchs_test_where_cases_do_not_differ():
    from scipy.stats import ttest_ind

    runs = [[0.2, 0.3], [0.5, 0.7, 0.6]]
    mine, theirs = (Runs(tuple(values), numpy.tile(values, (10, 1)), 100, 100) for values in runs)
    test = average_difference(mine, theirs)
    expected = ttest_ind(*runs, equal_var=False)
    assert test.p == pytest.approx(expected.pvalue, rel=1e-3)
    assert (test.estimate.low, test.estimate.high) == pytest.approx(tuple(expected.confidence_interval()), abs=1e-6)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=5), st.lists(st.floats(0, 1), min_size=1, max_size=5))
def test_p_is_the_level_at_which_the_interval_ends_at_zero(mine, theirs):
    sides = [runs_of_means([halves(share) for share in shares]) for shares in (mine, theirs)]
    test, back = average_difference(*sides), average_difference(*reversed(sides))
    low, high = test.estimate.low, test.estimate.high
    assert (low > 0 or high < 0) == (test.p < 0.05) or abs(test.p - 0.05) < 1e-3
    assert (back.estimate.value, back.estimate.low, back.p) == pytest.approx((-test.estimate.value, -high, test.p))
    share = average_difference(*sides, is_share=True)
    assert (share.estimate.low, share.estimate.high, share.p) == (max(-1.0, low), min(1.0, high), test.p)
    mean_over_runs, share_over_runs = average(sides[0]), average(sides[0], is_share=True)
    assert share_over_runs.low == max(0.0, mean_over_runs.low)
    assert share_over_runs.high == min(1.0, mean_over_runs.high)


@pytest.mark.long
@pytest.mark.parametrize(("mine", "theirs"), [(2, 0), (3, 0), (2, 5), (5, 5)])
def test_a_test_over_few_runs_errs_no_more_often_than_it_says(mine, theirs):
    """Runs of one recipe differ by 4 points, and agree on most cases. 0: a model that is not trained."""
    generator, n, lives, wrong = numpy.random.default_rng(5), 400, 400, 0

    def answers(runs: int, difficulty: Any) -> list[list[float]]:
        rates = 0.3 + generator.normal(0, 0.04, runs) if runs else numpy.array([0.3])
        own = numpy.where(generator.random((len(rates), n)) < 0.1, generator.random((len(rates), n)), difficulty)
        return (own < rates[:, None]).astype(float).tolist()

    for _ in range(lives):
        difficulty = generator.random(n)
        sides = [runs_of_means(answers(runs, difficulty)) for runs in (mine, theirs)]
        wrong += average_difference(*sides).p < 0.05
    assert wilson(wrong, lives).low < 0.05


def test_few_clusters_are_known_as_badly_as_they_are():
    """The variance of a mean of five clusters, as statistics has it: s^2 / 5, and not (4 / 5) s^2 / 5."""
    clusters, values = [name for name in "abcde" for _ in range(4)], [float(i // 4) for i in range(20)]
    base = runs_of_means([[0.0] * 20], clusters)
    test = average_difference(runs_of_means([values], clusters), base)
    assert test.spread.cases == pytest.approx(numpy.var(range(5), ddof=1) / 5, rel=0.1)
    assert test.spread.cases_df == 4
    two = average_difference(runs_of_means([[0.0, 1.0]], ["a", "b"]), runs_of_means([[0.0, 0.0]], ["a", "b"]))
    assert two.spread.cases_df == 1


def test_cases_outside_a_run_count_in_others_only():
    runs = runs_of_means([[1.0, None, 0.0], [1.0, 1.0, None]])
    assert (runs.values, runs.n) == ((0.5, 1.0), 3)
    fewer = runs_of_means([[1.0, 0.0, None]])
    for sides in ((runs, fewer), (fewer, runs)):
        test = average_difference(*sides)
        assert (test.estimate.n, test.spread.cases_df) == (2, 1), "as little is known as of the side with fewer"
    assert runs_of_means([[1.0, 0.0], [None, None]]) is None
    assert runs_of(lambda counts: math.nan, [1], [[1]]) is None


def test_holm_by_hand():
    # Sorted 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1, never below the one before.
    assert holm([0.04, 0.01, 0.03, 0.02]) == [0.06, 0.04, 0.06, 0.06]
    assert holm([0.9]) == [0.9]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_holm_is_that_of_statsmodels(ps):
    from statsmodels.stats.multitest import multipletests

    assert holm(ps) == pytest.approx(multipletests(ps, method="holm")[1].tolist(), rel=1e-3)


@given(st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=60))
def test_draws_of_clusters_are_those_that_a_table_of_clusters_and_cases_gives(names):
    found = intervals._case_draws(len(names), tuple(names))
    assert numpy.array_equal(found, intervals._draws(range(len(names)), names))
