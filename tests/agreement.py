"""How well the scores of a judge of the imaging task agree with those of the rules."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from clinrl.types import Strict


def spread(pairs: Iterable[tuple[str, str]]) -> Counter[int]:
    """How many lessons have which mean score, rounded."""
    return Counter(round(fmean(json.loads(right).values())) for _, right in pairs)


class Agreement(Strict):
    """How a judge's scores fit those of the rules, on a scale of 0 to 10, beside two judges who have not read."""

    n: int
    silent: float
    """Share of texts without a verdict. They count as 0."""
    pearson: float | None
    """None where either side gives the same score to all."""
    mean_absolute_error: float
    within_one: float
    """Share of texts whose two scores differ by at most 1."""
    constant_error: float
    """Mean absolute error of always giving the median of the right scores: the best that a constant can do."""
    constant_within_one: float
    shuffled_pearson: float | None
    """Of this judge's scores, dealt out among the texts by chance."""
    shuffled_error: float
    shuffled_within_one: float


def agreement(pairs: Sequence[tuple[float, float | None]]) -> Agreement:
    """How well scores agree: pairs of the right score and the judge's, None for no verdict.

    The shuffle is a fixed one, so that the baselines follow from the pairs alone. Raises ValueError for no pairs.
    """
    import numpy

    if not pairs:
        raise ValueError("agreement needs at least one pair of scores")
    right = numpy.array([a for a, _ in pairs], dtype=float)
    judged = numpy.array([b or 0.0 for _, b in pairs], dtype=float)
    constant = numpy.full(len(pairs), numpy.median(right))
    shuffled = numpy.random.default_rng(0).permutation(judged)
    return Agreement(
        n=len(pairs),
        silent=sum(b is None for _, b in pairs) / len(pairs),
        pearson=_pearson(right, judged),
        mean_absolute_error=_error(right, judged),
        within_one=_within_one(right, judged),
        constant_error=_error(right, constant),
        constant_within_one=_within_one(right, constant),
        shuffled_pearson=_pearson(right, shuffled),
        shuffled_error=_error(right, shuffled),
        shuffled_within_one=_within_one(right, shuffled),
    )


def _pearson(a: Any, b: Any) -> float | None:
    import numpy

    return float(numpy.corrcoef(a, b)[0, 1]) if a.std() > 0 and b.std() > 0 else None


def _error(a: Any, b: Any) -> float:
    return float(abs(a - b).mean())


def _within_one(a: Any, b: Any) -> float:
    return float((abs(a - b) <= 1).mean())
