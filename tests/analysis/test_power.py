"""Power: it grows with what it should grow with, is alpha at no effect, and is what simulations find."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clinrl.analysis.power import TARGET, Design, detectable, detectable_from, power
from clinrl.intervals import average_difference, runs_of_means, wilson
from clinrl.types import Estimate

DESIGN = Design(n=400, discordant=0.15, seeds=(3, 3), seed_sd=0.01, alpha=0.05)
shares = st.floats(0.02, 0.9)
designs = st.builds(
    Design,
    n=st.integers(20, 5000).map(float),
    discordant=shares,
    seeds=st.tuples(st.integers(1, 10), st.integers(0, 10)),
    seed_sd=st.floats(0, 0.05),
    alpha=st.floats(0.001, 0.2),
)
fractions = st.floats(0.01, 0.95)
"""Of the discordant share: the effect."""


@given(designs)
def test_at_no_effect_it_is_alpha(design):
    assert power(design, 0.0) == pytest.approx(design.alpha, abs=1e-9)


@given(designs, fractions)
def test_it_has_no_direction_and_is_a_probability(design, fraction):
    effect = fraction * design.discordant
    assert power(design, effect) == pytest.approx(power(design, -effect), abs=1e-12)
    assert 0 <= power(design, effect) <= 1


@given(designs, fractions, st.floats(1.01, 20))
def test_it_grows_with_cases_with_seeds_and_with_the_effect(design, fraction, times):
    effect = fraction * design.discordant
    now = power(design, effect) - 1e-9
    assert power(replace(design, n=times * design.n), effect) >= now
    assert power(replace(design, seeds=(design.seeds[0] + 1, design.seeds[1])), effect) >= now
    assert power(replace(design, seed_sd=design.seed_sd / times), effect) >= now
    assert power(design, min(times * effect, design.discordant)) >= now


@given(designs)
def test_what_is_detectable_is_shown_four_times_in_five_and_nothing_smaller(design):
    least = detectable(design)
    if least is None:
        assert power(design, design.discordant) < TARGET
        return
    assert power(design, least) == pytest.approx(TARGET, abs=1e-6)
    assert power(design, 0.9 * least) < TARGET


def test_the_sample_size_of_connor_by_hand():
    # (1.959964 sqrt(.3) + .841621 sqrt(.3 - .01))^2 / .01 = 233.1 pairs for 15 points less 5 points, at 80%.
    pairs = (1.959964 * math.sqrt(0.3) + 0.841621 * math.sqrt(0.29)) ** 2 / 0.01
    assert pairs == pytest.approx(233.1, abs=0.05)
    assert power(Design(n=pairs, discordant=0.3, seeds=(0, 0), seed_sd=0, alpha=0.05), 0.1) == pytest.approx(0.8, 1e-4)


def test_one_seed_more_helps_where_seeds_differ_and_not_where_they_do_not():
    assert power(replace(DESIGN, seeds=(5, 5), seed_sd=0.0), 0.05) == power(replace(DESIGN, seed_sd=0.0), 0.05)
    assert power(replace(DESIGN, seeds=(5, 5)), 0.05) > power(DESIGN, 0.05)


def test_an_effect_needs_discordant_cases():
    with pytest.raises(ValueError, match=r"a difference of 0.2 needs at least as many discordant cases, not 0.15"):
        power(DESIGN, 0.2)


def test_where_nothing_varies_the_test_decides_by_itself():
    certain = Design(n=20, discordant=1.0, seeds=(0, 0), seed_sd=0.0, alpha=0.05)
    assert (power(certain, 1.0), power(replace(certain, n=2), 1.0)) == (1.0, 0.0)


@pytest.mark.parametrize("effect", [0.0, 0.03, 0.06])
def test_a_simulation_of_cases_and_seeds_finds_it(effect):
    rng, runs = np.random.default_rng(7), 4000
    up, down = (DESIGN.discordant + effect) / 2, (DESIGN.discordant - effect) / 2
    b, c, _ = rng.multinomial(int(DESIGN.n), [up, down, 1 - up - down], size=runs).T
    seeds = [rng.normal(0, DESIGN.seed_sd, (runs, k)).mean(axis=1) for k in DESIGN.seeds]
    difference = (b - c) / DESIGN.n + seeds[0] - seeds[1]
    noise = DESIGN.seed_sd**2 * sum(1 / k for k in DESIGN.seeds)
    found = np.abs(difference) > 1.959964 * np.sqrt((b + c) / DESIGN.n**2 + noise)
    interval = wilson(int(found.sum()), runs)
    assert interval.low - 0.01 <= power(DESIGN, effect) <= interval.high + 0.01  # 1%: the test estimates its variance


@pytest.mark.parametrize("effect", [0.0, 0.06])
def test_the_test_of_comparisons_finds_it_too(effect):
    rng, runs, n = np.random.default_rng(0), 300, 300
    design = Design(n=n, discordant=0.15, seeds=(1, 1), seed_sd=0.0, alpha=0.05)
    found = 0
    for _ in range(runs):
        mine, theirs = np.full(n, 1.0), np.full(n, 1.0)
        drawn = rng.random(n)
        mine[drawn < (0.15 - effect) / 2] = 0.0
        theirs[drawn > 1 - (0.15 + effect) / 2] = 0.0
        found += average_difference(runs_of_means([mine.tolist()]), runs_of_means([theirs.tolist()]))[1] < design.alpha
    interval = wilson(found, runs)
    assert interval.low <= power(design, effect) <= interval.high


@given(st.floats(0.001, 0.2), st.floats(-0.5, 0.5))
def test_an_interval_says_what_its_test_would_have_seen(error, value):
    interval = Estimate(value=value, low=value - 1.959964 * error, high=value + 1.959964 * error, n=100)
    assert detectable_from(interval, 0.05) == pytest.approx((1.959964 + 0.841621) * error, rel=1e-5)
    assert detectable_from(interval, 0.05, tests=4) > detectable_from(interval, 0.05)


def test_what_is_planned_and_what_is_observed_agree_where_effects_are_small():
    many = replace(DESIGN, n=4000)
    reach = 1.959964 * math.sqrt(many.variance(0.0))
    observed = detectable_from(Estimate(value=0.0, low=-reach, high=reach, n=4000), many.alpha)
    assert observed == pytest.approx(detectable(many), rel=1e-3)


def test_an_interval_without_width_says_nothing():
    assert detectable_from(Estimate(value=0.0, low=0.0, high=0.0, n=100), 0.05) is None
