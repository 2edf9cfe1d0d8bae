"""Whether shares are above their limits, asked after any answer and as often as anybody likes.

The evidence is an e-process. A likelihood ratio of a higher share against the limit does not grow in the mean while the
chance of each observation, given those before, is within the limit; nor does a mixture over higher shares (Robbins
1970; Howard et al. 2021, "Time-uniform, nonparametric, nonasymptotic confidence sequences"), nor one over the days
since which the share may be higher (Shin et al. 2024, "E-detectors"), without which a long good past hid a bad week.
By Ville's inequality it ever reaches 1 / alpha with a chance of alpha at most, however many looks there are.
"""

import math
from typing import Any

WORTH = 20.0
"""Observations that the mixture over shares is worth: a beta distribution around the limit, cut off below it."""
NEVER = 1.0 - 1e-9
"""No share is above a limit from here on."""


def evidence(hits: Any, n: Any, limits: Any) -> Any:
    """Logarithm of the evidence that shares are above their limits, a number a share.

    `hits` and `n` are counts with a row a share and a column a day, in order; `limits` has a number a share, in [0, 1].
    """
    import numpy
    from scipy.special import betaincc, betaln, logsumexp, xlog1py, xlogy

    hits, n = (numpy.cumsum(numpy.asarray(one, float)[:, ::-1], axis=1)[:, ::-1] for one in (hits, n))
    cut = numpy.minimum(numpy.asarray(limits, float), NEVER)[:, None]
    a, b, days = 0.5 + WORTH * cut, 0.5 + WORTH * (1 - cut), numpy.arange(1, hits.shape[1] + 1)
    with numpy.errstate(divide="ignore"):  # none at all is no evidence
        mixed = betaln(a + hits, b + n - hits) + numpy.log(betaincc(a + hits, b + n - hits, cut))
        prior = betaln(a, b) + numpy.log(betaincc(a, b, cut))
        since = mixed - prior - xlogy(hits, cut) - xlog1py(n - hits, -cut)
    # Weights that sum to 1 over all days, those to come among them.
    return logsumexp(numpy.where(cut < NEVER, since, 0.0) - numpy.log(days * (days + 1)), axis=1)


def least(hits: Any, n: Any, alpha: float) -> Any:
    """Lower ends of confidence sequences: the least shares that counts, as those of `evidence`, do not refute.

    A share that never changes is above its lower end at all looks together with a chance of 1 - alpha.
    """
    import numpy

    high = numpy.sum(hits, axis=1) / numpy.maximum(1, numpy.sum(n, axis=1))
    low = numpy.zeros_like(high)
    for _ in range(30):
        middle = (low + high) / 2
        is_refuted = evidence(hits, n, middle) >= -math.log(alpha)
        low, high = numpy.where(is_refuted, middle, low), numpy.where(is_refuted, high, middle)
    return low
