"""What an exam can show: the power of a comparison over cases and seeds, and the smallest effect it detects.

Effects and shares are in [-1, 1] and [0, 1]; a point is a hundredth. Pure functions.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from clinrl.intervals import LEVEL, Spread, students, welch
from clinrl.types import Estimate

TARGET = 0.8
"""The power at which an effect is called detectable."""
QUANTILES = 1000, 40
"""Variances of seeds, equally likely, over which power is a mean: where one row has several, and each of two."""


@dataclass(frozen=True, kw_only=True)
class Design:
    """A comparison of two recipes on the same cases, as it is expected before anybody answers."""

    n: float
    """Independent cases: their number, divided by the design effect where they come in clusters (Kish 1965)."""
    discordant: float
    """Expected share of cases that count for one of the two and not for the other."""
    seeds: tuple[int, int]
    """Trainings of either recipe, two or more; 0 for a model that is not trained, which has no spread of seeds."""
    seed_sd: float
    """Expected standard deviation of the share between trainings of one recipe."""
    alpha: float
    """Two-sided level of the test."""

    def spread(self, effect: float) -> Spread:
        """That of the difference of the two means over seeds, as the test will see it.

        Of the cases as for one pair of models: (discordant - effect^2) / n. Further seeds do not lower that part, as
        if all of them erred on the same cases, which is the worst case.
        """
        runs = tuple((self.seed_sd**2 / k, k - 1.0) for k in self.seeds if k > 1 and self.seed_sd)
        return Spread((self.discordant - effect**2) / self.n, max(1.0, self.n - 1), runs)


def power(design: Design, effect: float) -> float:
    """The probability that the test of `average_difference` shows a difference of this size. Raises ValueError if fewer
    cases are discordant than the effect needs."""
    if not abs(effect) <= design.discordant <= 1:
        raise ValueError(f"a difference of {effect:g} needs at least as many discordant cases, not {design.discordant}")
    spread = design.spread(effect)
    return _shown(spread, effect, design.alpha, _found(spread.runs, design.alpha))


def detectable(design: Design) -> float | None:
    """The smallest difference, above 0, that is significant with a probability of 80%; None if no possible one is."""
    found = _found(design.spread(0.0).runs, design.alpha)
    return _least(lambda effect: _shown(design.spread(effect), effect, design.alpha, found), design.discordant)


def detectable_from(spread: Spread, alpha: float, tests: int = 1) -> float | None:
    """The same for a spread that was found, with alpha divided by the number of tests, of which Holm's first step takes
    as much. None if nothing varies, which says nothing of other cases."""
    if spread.is_none:
        return None
    level = alpha / tests
    found = _found(spread.runs, level)
    return _least(lambda effect: _shown(spread, effect, level, found), 10 * spread.reach(level))


def spread_of(difference: Estimate) -> Spread:
    """That of a difference of two single models, from its normal interval over cases."""
    from scipy.stats import norm

    error = (difference.high - difference.low) / (2 * float(norm.ppf((1 + LEVEL) / 2)))
    return Spread(error**2, math.inf, ())


def _found(runs: Sequence[tuple[float, float]], alpha: float) -> Any:
    """What runs may add to the square of the reach, each value as likely as another.

    The variance that a test finds of a row is that of a chi-squared variable, whatever its mean (Cochran 1934).
    """
    import numpy
    from scipy.stats import chi2

    if not runs:
        return numpy.zeros(1)
    count = QUANTILES[len(runs) - 1]
    places = (numpy.arange(count) + 0.5) / count
    parts = numpy.meshgrid(*(part * chi2.ppf(places, df) / df for part, df in runs))
    freedom = welch([(part, df) for part, (_, df) in zip(parts, runs, strict=True)])
    return (students(alpha, freedom) ** 2 * sum(parts)).ravel()


def _shown(spread: Spread, effect: float, alpha: float, found: Any) -> float:
    """The probability that a normal estimate is farther from 0 than the reach of its interval, `found` as `_found` has
    it. The variance of cases is taken for known, which it nearly is."""
    import numpy
    from scipy.stats import norm

    error = math.sqrt(spread.cases + math.fsum(part for part, _ in spread.runs))
    if not error:  # every discordant case counts for the same one, and seeds do not differ: signs tell
        return float(effect != 0 and 2 * 0.5 ** (spread.cases_df + 1) < alpha)
    reach = numpy.sqrt(students(alpha, spread.cases_df) ** 2 * spread.cases + found)
    return float(numpy.mean(norm.sf((reach - effect) / error) + norm.cdf((-reach - effect) / error)))


def _least(shown: Callable[[float], float], most: float) -> float | None:
    """The effect up to `most` that is shown with a probability of 80%."""
    from scipy.optimize import brentq

    if shown(most) < TARGET:
        return None
    return float(brentq(lambda effect: shown(effect) - TARGET, 0.0, most))
