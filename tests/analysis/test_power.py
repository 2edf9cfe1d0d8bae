"""Power: it grows with what it should grow with, is alpha at no effect, and is what simulations find."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, norm, poisson
from scipy.stats import t as student

from clinrl.analysis import contrasts
from clinrl.analysis.power import (
    EXACT_CASES,
    EXACT_LEAST,
    TARGET,
    Design,
    detectable,
    detectable_from,
    power,
    spread_of,
)
from clinrl.analysis.run import clusters_of, unless_one
from clinrl.intervals import Runs, Spread, average_difference, paired, runs_of_means, wilson
from clinrl.tasks.base import get_task
from clinrl.tasks.importing import MARK
from clinrl.types import Estimate

DESIGN = Design(n=400, discordant=0.15, seeds=(3, 3), seed_sd=0.01, alpha=0.05)
shares = st.floats(0.02, 0.9)
designs = st.builds(
    Design,
    n=st.integers(20, 5000).map(float),
    discordant=shares,
    seeds=st.tuples(*(st.just(0) | st.integers(2, 10) for _ in range(2))),
    seed_sd=st.just(0.0) | st.floats(1e-4, 0.05),
    alpha=st.floats(0.001, 0.2),
)
fractions = st.floats(0.01, 0.95)
"""Of the discordant share: the effect."""


@given(designs)
def test_at_no_effect_it_is_alpha_at_most_and_alpha_where_seeds_do_not_differ(design):
    if 0 in design.seeds or design.seeds[0] == design.seeds[1]:  # rows of unlike numbers of seeds err more often
        assert power(design, 0.0) <= design.alpha * 1.01
    alike = power(replace(design, seed_sd=0.0), 0.0)
    assert alike == pytest.approx(2 * norm.sf(student.isf(design.alpha / 2, design.n - 1)), abs=1e-9)


@given(designs, fractions)
def test_it_has_no_direction_and_is_a_probability(design, fraction):
    effect = fraction * design.discordant
    assert power(design, effect) == pytest.approx(power(design, -effect), abs=1e-12)
    assert 0 <= power(design, effect) <= 1


@given(designs, fractions, st.floats(1.01, 20))
def test_it_grows_with_cases_with_seeds_and_with_the_effect(design, fraction, times):
    effect = fraction * design.discordant
    several = replace(design, seeds=tuple(k + 1 if k else 0 for k in design.seeds))
    now = power(several, effect) - 1e-9
    assert power(several, min(times * effect, design.discordant)) >= now
    alike = replace(several, seed_sd=0.0)
    assert power(replace(alike, n=times * design.n), effect) >= power(alike, effect) - 1e-9
    more = replace(several, seeds=tuple(k + 1 if k else 0 for k in several.seeds))
    assert (detectable(more) or math.inf) <= (detectable(several) or math.inf) + 1e-9


@given(designs)
def test_what_is_detectable_is_shown_four_times_in_five_and_nothing_smaller(design):
    least = detectable(design)
    if least is None:
        assert power(design, design.discordant) < TARGET
        return
    assert power(design, least) == pytest.approx(TARGET, abs=1e-6)
    assert power(design, 0.9 * least) < TARGET


def test_a_sample_size_by_hand():
    # (1.959964 + .841621)^2 (.3 - .01) / .01 = 227.6 pairs for 15 points less 5 points, at 80%; t for z costs two more.
    pairs = (1.959964 + 0.841621) ** 2 * 0.29 / 0.01
    assert pairs == pytest.approx(227.6, abs=0.05)
    design = Design(n=pairs + 2, discordant=0.3, seeds=(0, 0), seed_sd=0, alpha=0.05)
    assert power(design, 0.1) == pytest.approx(0.8, abs=1e-3)


def test_one_seed_more_helps_where_seeds_differ_and_not_where_they_do_not():
    assert power(replace(DESIGN, seeds=(5, 5), seed_sd=0.0), 0.05) == power(replace(DESIGN, seed_sd=0.0), 0.05)
    assert power(replace(DESIGN, seeds=(5, 5)), 0.05) > power(DESIGN, 0.05)


def test_few_clusters_leave_few_degrees_of_freedom():
    clustered = replace(DESIGN, clusters=8, seed_sd=0.0)
    assert clustered.spread(0.0).cases_df == 7
    assert power(clustered, 0.05) < power(replace(clustered, clusters=None), 0.05)


def test_an_exact_test_of_single_models_needs_some_cases():
    assert binomtest(EXACT_LEAST - 1, EXACT_LEAST - 1).pvalue > 0.05 > binomtest(EXACT_LEAST, EXACT_LEAST).pvalue
    assert poisson.sf(EXACT_LEAST - 1, EXACT_CASES) == pytest.approx(TARGET, abs=1e-3)
    alike = paired("exact", "other", [True] * 800, [True] * 800).difference
    assert contrasts._detectable_of_one(alike) == pytest.approx(EXACT_CASES / 800, abs=1e-6)
    assert contrasts._detectable_of_one(alike.model_copy(update={"n": EXACT_LEAST - 1})) is None
    patients = [str(visit % (EXACT_LEAST - 1)) for visit in range(800)]
    assert contrasts._detectable_of_one(alike, patients) is None, "five who all gain are not significant"


@pytest.mark.parametrize("effect", [0.2, -0.2])
def test_an_effect_needs_discordant_cases(effect):
    with pytest.raises(ValueError, match=rf"difference of {effect} needs at least as many discordant cases, not 0.15"):
        power(DESIGN, effect)


def test_where_nothing_varies_the_test_decides_by_itself():
    certain = Design(n=6, discordant=1.0, seeds=(0, 0), seed_sd=0.0, alpha=0.05)
    assert (power(certain, 1.0), power(replace(certain, n=5), 1.0)) == (1.0, 0.0), "2 / 2^6 and 2 / 2^5"


def lives(design: Design, effect: float, runs: int, *, seed: int) -> int:
    """In how many of so many made-up exams the test of comparisons shows an effect, by one draw of cases and seeds."""
    rng, found = np.random.default_rng(seed), 0
    error = math.sqrt(design.spread(effect).cases)

    def side(k: int, shift: float) -> Runs:
        values = shift + (rng.normal(0, design.seed_sd, k) if k else np.zeros(1))
        return Runs(
            tuple(values), np.tile(values, (len(drawn), 1)) + drawn[:, None] / 2 * (1 if shift else -1), 400, 400
        )

    for _ in range(runs):
        drawn = rng.normal(0, error, 200)
        found += (
            average_difference(side(design.seeds[0], effect + rng.normal(0, error)), side(design.seeds[1], 0.0)).p
            < design.alpha
        )
    return found


@pytest.mark.long
@pytest.mark.parametrize("seeds", [(2, 0), (3, 0), (3, 3), (5, 2), (0, 0)])
def test_a_simulation_of_cases_and_seeds_finds_it(seeds):
    design = replace(DESIGN, seeds=seeds, seed_sd=0.015)
    effect = detectable(design) or design.discordant
    interval = wilson(lives(design, effect, 600, seed=7), 600)
    assert interval.low - 0.02 <= power(design, effect) <= interval.high + 0.02  # 2%: Welch's degrees are found too


@pytest.mark.long
@pytest.mark.parametrize("effect", [0.0, 0.06])
def test_the_test_of_comparisons_finds_it_too(effect):
    rng, runs, n = np.random.default_rng(0), 300, 300
    design = Design(n=n, discordant=0.15, seeds=(0, 0), seed_sd=0.0, alpha=0.05)
    found = 0
    for _ in range(runs):
        mine, theirs = np.full(n, 1.0), np.full(n, 1.0)
        drawn = rng.random(n)
        mine[drawn < (0.15 - effect) / 2] = 0.0
        theirs[drawn > 1 - (0.15 + effect) / 2] = 0.0
        found += average_difference(runs_of_means([mine.tolist()]), runs_of_means([theirs.tolist()])).p < design.alpha
    interval = wilson(found, runs)
    assert interval.low <= power(design, effect) <= interval.high


@given(st.floats(0.001, 0.2), st.floats(-0.5, 0.5))
def test_an_interval_of_single_models_says_what_its_test_would_have_seen(error, value):
    interval = Estimate(value=value, low=value - 1.959964 * error, high=value + 1.959964 * error, n=100)
    assert detectable_from(spread_of(interval), 0.05) == pytest.approx((1.959964 + 0.841621) * error, rel=1e-5)
    assert detectable_from(spread_of(interval), 0.05, tests=4) > detectable_from(spread_of(interval), 0.05)


def test_what_is_planned_and_what_is_observed_agree_where_effects_are_small():
    many = replace(DESIGN, n=40000)
    assert detectable_from(many.spread(0.0), many.alpha) == pytest.approx(detectable(many), rel=1e-2)


def test_two_seeds_detect_little_and_where_nothing_varies_nothing_is_known():
    few, many = (detectable_from(Spread(0.0004, 400, ((0.0004, df),)), 0.05) for df in (1, 30))
    assert many == pytest.approx((2.0 + 0.85) * math.sqrt(0.0008), rel=0.03)
    assert few > 4 * many
    assert detectable_from(Spread(0.0, 99, ()), 0.05) is None


def test_where_all_cases_lie_in_one_cluster_they_are_drawn_themselves():
    """Draws of one cluster do not differ: nothing would be known of how far cases vary."""
    task = get_task("imaging")
    cases = list(task.cases(200, 5, pool="mine", mix="reporting"))
    alike = [case for case in cases if task.reporting.cluster(case) == task.reporting.cluster(cases[0])]
    assert len(alike) > 1
    assert unless_one(clusters_of(task, alike)) is None
    assert unless_one(clusters_of(task, cases)) == [task.reporting.cluster(case) for case in cases]


def test_a_part_that_one_patient_fills_is_left_out_and_drawn_cases_beside_imported_ones_are_on_their_own():
    task = get_task("esi")
    cases = list(task.cases(40, 5, pool="exam", mix="reporting"))
    of = task.reporting.slices["age"]
    (first, *others) = sorted(set(map(of, cases)))
    imported = [
        case.model_copy(update={"group": f"exam{MARK}{'one' if of(case) == first else index}"})
        for index, case in enumerate(cases)
    ]
    assert {*contrasts.parts(task, cases, "age")} == {"all", first, *others}
    assert {*contrasts.parts(task, imported, "age")} == {"all", *others}
    both = [*cases[:3], *[case for case in imported if of(case) == first]]
    assert clusters_of(task, both) == [*(case.id for case in cases[:3]), *[f"exam{MARK}one"] * (len(both) - 3)]
