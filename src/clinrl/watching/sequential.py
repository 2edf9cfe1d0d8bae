"""Sequential tests of whether shares are above their limits, valid at any time and for any number of looks.

The evidence is an e-process. A likelihood ratio of a higher share against the limit does not grow in the mean while the
chance of each observation, given those before, is within the limit; nor does a mixture over higher shares (Robbins
1970; Howard et al. 2021, "Time-uniform, nonparametric, nonasymptotic confidence sequences"), nor one over the days
since which the share may be higher (Shin et al. 2024, "E-detectors"). Without the latter, a long good past would hide a
bad week. By Ville's inequality the evidence ever reaches 1 / alpha with a chance of alpha at most, however many looks
there are.
"""

import math
from typing import Any

WORTH = 20.0
"""The weight, in observations, of the mixture over shares: a beta distribution around the limit, cut off below it."""
NEVER = 1.0 - 1e-9
"""From this limit on, there is no evidence of a higher share."""


def evidence(hits: Any, n: Any, limits: Any) -> Any:
    """The logarithm of the evidence that each share is above its limit.

    `hits` and `n` are counts with one row per share and one column per day, in order; `limits` has one number per
    share, in [0, 1].
    """
    import numpy
    from scipy.special import betaincc, betaln, logsumexp, xlog1py, xlogy

    hits, n = (numpy.cumsum(numpy.asarray(one, float)[:, ::-1], axis=1)[:, ::-1] for one in (hits, n))
    cut = numpy.minimum(numpy.asarray(limits, float), NEVER)[:, None]
    a, b, days = 0.5 + WORTH * cut, 0.5 + WORTH * (1 - cut), numpy.arange(1, hits.shape[1] + 1)
    with numpy.errstate(divide="ignore"):  # the logarithm of 0 is -inf: no evidence
        mixed = betaln(a + hits, b + n - hits) + numpy.log(betaincc(a + hits, b + n - hits, cut))
        prior = betaln(a, b) + numpy.log(betaincc(a, b, cut))
        since = mixed - prior - xlogy(hits, cut) - xlog1py(n - hits, -cut)
    # Weights that sum to 1 over all days, including those to come.
    return logsumexp(numpy.where(cut < NEVER, since, 0.0) - numpy.log(days * (days + 1)), axis=1)


def least(hits: Any, n: Any, alpha: float) -> Any:
    """Lower ends of confidence sequences: the smallest shares that the counts, as of `evidence`, do not refute.

    They are exact to four significant digits: each further step goes over all days. A share that never changes is above
    its lower end at all looks together with a chance of at least 1 - alpha.
    """
    import numpy

    hits, n = (numpy.asarray(one, float) for one in (hits, n))
    high = numpy.sum(hits, axis=1) / numpy.maximum(1, numpy.sum(n, axis=1))
    low, rest = numpy.zeros_like(high), numpy.arange(len(high))
    for _ in range(30):
        middle = (low[rest] + high[rest]) / 2
        is_refuted = evidence(hits[rest], n[rest], middle) >= -math.log(alpha)
        low[rest[is_refuted]], high[rest[~is_refuted]] = middle[is_refuted], middle[~is_refuted]
        rest = numpy.array([i for i in rest if f"{low[i]:.4g}" != f"{high[i]:.4g}"], int)
    return low
