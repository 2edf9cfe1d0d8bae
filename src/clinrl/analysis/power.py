"""What an exam can show: the power of a paired comparison over cases and seeds, and the smallest effect it detects.

Effects and shares are in [-1, 1] and [0, 1]; a point is a hundredth. Pure functions.
"""

import math
from dataclasses import dataclass

from clinrl.intervals import LEVEL
from clinrl.types import Estimate

TARGET = 0.8
"""The power at which an effect is called detectable."""


@dataclass(frozen=True, kw_only=True)
class Design:
    """A comparison of two recipes on the same cases, as it is expected before anybody answers."""

    n: float
    """Independent cases: their number, divided by the design effect where they come in clusters (Kish 1965)."""
    discordant: float
    """Expected share of cases that count for one of the two and not for the other."""
    seeds: tuple[int, int]
    """Trainings of either recipe; 0 for a model that is not trained, which has no spread of seeds."""
    seed_sd: float
    """Expected standard deviation of the share between trainings of one recipe."""
    alpha: float
    """Two-sided level of the test."""

    def variance(self, effect: float) -> float:
        """Of the difference of the two means over seeds: that of the cases, and that of the seeds.

        Of the cases as for one pair of models: (discordant - effect^2) / n. Further seeds do not lower that part, as
        if all of them erred on the same cases, which is the worst case.
        """
        return (self.discordant - effect**2) / self.n + self.seed_sd**2 * sum(1 / k for k in self.seeds if k)


def power(design: Design, effect: float) -> float:
    """The probability that a two-sided test of a difference of this size is significant; at 0 it is alpha.

    The normal approximation for McNemar's test without conditioning on the discordant pairs (Miettinen 1968, Connor
    1987), with the variance of seeds added. The exact test is a little weaker; with few seeds, whose variance it takes
    for known, the test over seeds is weaker too. Raises ValueError if fewer cases are discordant than the effect needs.
    """
    from statsmodels.stats.power import normal_power_het

    if not abs(effect) <= design.discordant <= 1:
        raise ValueError(f"a difference of {effect:g} needs at least as many discordant cases, not {design.discordant}")
    null, alternative = (math.sqrt(design.variance(size)) for size in (0.0, effect))
    if not alternative:  # every discordant case counts for the same one, and seeds have no spread
        return float(effect != 0 and abs(effect) > _normal(1 - design.alpha / 2) * null)
    return min(1.0, float(normal_power_het(effect, 1, design.alpha, null, alternative)))


def detectable(design: Design) -> float | None:
    """The smallest difference, above 0, that is significant with a probability of 80%; None if no possible one is."""
    from scipy.optimize import brentq

    if power(design, design.discordant) < TARGET:
        return None
    return float(brentq(lambda effect: power(design, effect) - TARGET, 0.0, design.discordant))


def detectable_from(difference: Estimate, alpha: float, tests: int = 1) -> float | None:
    """The smallest difference that a comparison with an interval of this width detects with a probability of 80%.

    (z of 1 - alpha / 2 + z of 0.8) standard errors (Bloom 1995), with alpha divided by the number of tests, of which
    Holm's first step takes as much. The standard error is taken from the 95% interval as if that were normal: where it
    is Student's over two or three seeds, the power is some 70%, and less for several tests. None if the interval has no
    width, as where no draw differs, which says nothing of other cases.
    """
    error = (difference.high - difference.low) / (2 * _normal((1 + LEVEL) / 2))
    return (_normal(1 - alpha / tests / 2) + _normal(TARGET)) * error or None


def _normal(probability: float) -> float:
    from scipy.stats import norm

    return float(norm.ppf(probability))
