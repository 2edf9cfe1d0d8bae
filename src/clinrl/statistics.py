"""Intervals and paired tests: SciPy and statsmodels behind three functions that return records.

All intervals are at 95%. Nothing here draws from a global generator: equal inputs give equal numbers.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import Field

from clinrl.records import Estimate, Strict

LEVEL = 0.95
RESAMPLES = 2000
BOOTSTRAP_SEED = 20240229
"""Fixed, so that an interval depends on the answers alone."""
DIGITS = 6
"""Decimals kept in records: enough for any table, few enough to hide the last bits of a platform's arithmetic."""


class Paired(Strict):
    """One yes/no metric on the same cases, answered by two: how they disagree, and the exact McNemar test of it."""

    metric: str
    other: str
    """Whom this one is compared with. Differences are this one minus the other."""
    b: int = Field(ge=0)
    """Cases that count for this one and not for the other."""
    c: int = Field(ge=0)
    """Cases that count for the other and not for this one."""
    difference: Estimate
    """Share of this one minus share of the other, in [-1, 1]; n is the count of pairs."""
    p: float = Field(ge=0, le=1)
    """Two-sided exact McNemar p-value, not adjusted for the number of tests. 1.0 if nothing is discordant."""


def wilson(hits: int, n: int) -> Estimate:
    """A share with its Wilson score interval (Wilson 1927). Raises ValueError unless 0 <= hits <= n and n > 0."""
    from statsmodels.stats.proportion import proportion_confint

    if not 0 <= hits <= n or n == 0:
        raise ValueError(f"a share needs 0 <= hits <= n and n > 0; got hits {hits}, n {n}")
    low, high = proportion_confint(hits, n, alpha=1 - LEVEL, method="wilson")
    return _estimate(hits / n, max(0.0, float(low)), min(1.0, float(high)), n)


def bootstrap(
    of: Callable[[Sequence[Any], Sequence[Any]], float], golds: Sequence[Any], answers: Sequence[Any]
) -> Estimate | None:
    """A statistic over cases with its percentile bootstrap interval (Efron 1979), cases drawn with replacement.

    None where the statistic is undefined (NaN) on the cases themselves. Draws on which it is undefined say nothing
    about its spread and are left out.
    """
    import numpy

    value = of(golds, answers)
    if math.isnan(value):
        return None
    # Cases with the same gold and answer are exchangeable, so a draw of cases is a draw of counts of distinct pairs.
    pairs = sorted(set(zip(golds, answers, strict=True)), key=repr)
    index = {pair: i for i, pair in enumerate(pairs)}
    counts = numpy.bincount([index[pair] for pair in zip(golds, answers, strict=True)], minlength=len(pairs))
    generator = numpy.random.default_rng(BOOTSTRAP_SEED)
    draws = generator.multinomial(len(golds), counts / counts.sum(), size=RESAMPLES)
    drawn_golds, drawn_answers = ([pair[side] for pair in pairs] for side in (0, 1))
    values = numpy.array([of(_repeat(drawn_golds, draw), _repeat(drawn_answers, draw)) for draw in draws.tolist()])
    tail = (1 - LEVEL) / 2
    low, high = numpy.nanquantile(values, (tail, 1 - tail)).tolist()
    return _estimate(value, low, high, len(golds))


def paired(metric: str, other: str, mine: Sequence[bool], theirs: Sequence[bool]) -> Paired:
    """Compare two on the same cases, in the same order. Raises ValueError on unequal or empty sequences.

    The test is McNemar's, exact (binomial on the discordant pairs), from statsmodels. The interval of the difference
    is the adjusted Wald interval of Bonett and Price 2012 (one added to each discordant count), which keeps a width
    when nothing is discordant. Being approximate, it can disagree with the exact test near p = 0.05: the test rules.
    """
    from scipy.stats import norm
    from statsmodels.stats.contingency_tables import mcnemar

    n = len(mine)
    if n == 0 or n != len(theirs):
        raise ValueError(f"paired verdicts must be of the same cases; got {n} and {len(theirs)}")
    b = sum(x and not y for x, y in zip(mine, theirs, strict=True))
    c = sum(y and not x for x, y in zip(mine, theirs, strict=True))
    both = sum(x and y for x, y in zip(mine, theirs, strict=True))
    p = 1.0 if b + c == 0 else float(mcnemar([[both, b], [c, n - both - b - c]], exact=True).pvalue)
    up, down = (b + 1) / (n + 2), (c + 1) / (n + 2)
    reach = float(norm.ppf((1 + LEVEL) / 2)) * math.sqrt((up + down - (up - down) ** 2) / (n + 2))
    low, high = max(-1.0, up - down - reach), min(1.0, up - down + reach)
    difference = _estimate((b - c) / n, low, high, n)
    return Paired(metric=metric, other=other, b=b, c=c, difference=difference, p=float(f"{min(1.0, p):.4g}"))


def _repeat(values: Sequence[Any], times: Sequence[int]) -> list[Any]:
    return [value for value, count in zip(values, times, strict=True) for _ in range(count)]


def _estimate(value: float, low: float, high: float, n: int) -> Estimate:
    # Adding 0.0 turns -0.0 into 0.0, so that equal numbers have equal texts.
    return Estimate(value=round(value, DIGITS) + 0.0, low=round(low, DIGITS) + 0.0, high=round(high, DIGITS) + 0.0, n=n)
