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
EXACT_LEAST, EXACT_CASES = 6, 7.91
"""The fewest discordant cases, all for one model, with which an exact McNemar test has p below 0.05; and the expected
number of which as many are seen with a probability of 80% (Poisson)."""
QUANTILES = 1000, 40
"""Numbers of equally likely seed variances to average power over: if one row has several seeds, and for each of two."""


@dataclass(frozen=True, kw_only=True)
class Design:
    """A comparison of two recipes on the same cases, as expected before there are answers."""

    n: float
    """Independent cases: their number, divided by the design effect where they come in clusters (Kish 1965)."""
    clusters: int | None = None
    """Number of clusters, from which the test takes its degrees of freedom; None where cases are independent."""
    discordant: float
    """Expected share of cases that count for one of the two and not for the other."""
    seeds: tuple[int, int]
    """Number of trainings of each recipe, two or more; 0 for an untrained model, which has no spread of seeds."""
    seed_sd: float
    """Expected standard deviation of the share between trainings of one recipe."""
    alpha: float
    """Two-sided level of the test."""

    def spread(self, effect: float) -> Spread:
        """The spread of the difference of the two means over seeds, as the test will estimate it.

        The part from cases is that of one pair of models: (discordant - effect^2) / n. More seeds do not lower it, as
        if all of them erred on the same cases, which is the worst case.
        """
        runs = tuple((self.seed_sd**2 / k, k - 1.0) for k in self.seeds if k > 1 and self.seed_sd)
        return Spread((self.discordant - effect**2) / self.n, max(1.0, (self.clusters or self.n) - 1), runs)


def power(design: Design, effect: float) -> float:
    """The probability that the test of `average_difference` shows a difference of this size.

    Raises ValueError if fewer cases are discordant than the effect needs.
    """
    if not abs(effect) <= design.discordant <= 1:
        raise ValueError(f"a difference of {effect:g} needs at least as many discordant cases, not {design.discordant}")
    spread = design.spread(effect)
    return _shown(spread, effect, design.alpha, _squared_reaches(spread.runs, design.alpha))


def detectable(design: Design) -> float | None:
    """The smallest positive difference that is shown with a probability of 80%; None if no possible difference is."""
    squared = _squared_reaches(design.spread(0.0).runs, design.alpha)
    return _least(lambda effect: _shown(design.spread(effect), effect, design.alpha, squared), design.discordant)


def detectable_from(spread: Spread, alpha: float, tests: int = 1) -> float | None:
    """The smallest detectable difference for an estimated spread; None if nothing varies in these cases.

    Alpha is divided by the number of tests, as in the first step of Holm's procedure.
    """
    level = alpha / tests
    squared = _squared_reaches(spread.runs, level)
    return _least(lambda effect: _shown(spread, effect, level, squared), 10 * spread.reach(level))


def spread_of(difference: Estimate) -> Spread:
    """The spread of the difference of two single models, from its normal interval over cases."""
    from scipy.stats import norm

    error = (difference.high - difference.low) / (2 * float(norm.ppf((1 + LEVEL) / 2)))
    return Spread(error**2, math.inf, ())


def _squared_reaches(runs: Sequence[tuple[float, float]], alpha: float) -> Any:
    """Equally likely values of the part that seeds add to the squared reach of an interval.

    The variance that a test estimates from a row's seeds is a scaled chi-squared variable, independent of their mean
    (Cochran 1934).
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


def _shown(spread: Spread, effect: float, alpha: float, squared: Any) -> float:
    """The probability that a normal estimate is farther from 0 than the reach of its interval.

    `squared` is the result of `_squared_reaches`. The variance over cases is taken as known, which it nearly is.
    """
    import numpy
    from scipy.stats import norm

    error = math.sqrt(spread.cases + math.fsum(part for part, _ in spread.runs))
    if not error:  # every discordant case favours one model, and seeds do not differ: a sign test
        return float(effect != 0 and 2 * 0.5 ** (spread.cases_df + 1) < alpha)
    reach = numpy.sqrt(students(alpha, spread.cases_df) ** 2 * spread.cases + squared)
    return float(numpy.mean(norm.sf((reach - effect) / error) + norm.cdf((-reach - effect) / error)))


def _least(shown: Callable[[float], float], most: float) -> float | None:
    """The effect that is shown with a probability of 80%; None if even `most` is shown less often."""
    from scipy.optimize import brentq

    if shown(most) < TARGET:
        return None
    return float(brentq(lambda effect: shown(effect) - TARGET, 0.0, most))
