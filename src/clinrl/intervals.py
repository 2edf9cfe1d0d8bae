"""Intervals and paired tests: NumPy, SciPy and statsmodels behind functions that return records.

All intervals are at 95%, unless a function is given another level. Nothing here draws from a global generator: equal
inputs give equal numbers.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pydantic import Field

from clinrl.types import Estimate, Strict

LEVEL = 0.95
RESAMPLES = 2000
BOOTSTRAP_SEED = 20240229
"""Fixed, so that an interval depends on the answers alone."""
LEAST_P = 1e-9
"""The smallest p that a test over runs returns."""
DIGITS = 6
"""Decimals kept in records: enough for any table, few enough to hide the last bits of a platform's arithmetic."""


class Paired(Strict):
    """One yes/no metric of two models on the same cases: how they disagree, and the test that `paired` makes."""

    metric: str
    other: str
    """The model that this one is compared with. Differences are this one minus the other."""
    b: int = Field(ge=0)
    """Cases that count for this one and not for the other."""
    c: int = Field(ge=0)
    """Cases that count for the other and not for this one."""
    difference: Estimate
    """Share of this one minus share of the other, in [-1, 1]; n is the count of pairs."""
    p: float = Field(ge=0, le=1)
    """Two-sided and exact, not adjusted for the number of tests. 1.0 if nothing is discordant."""


@lru_cache(maxsize=4096)  # every metric, level and policy asks for the same few counts
def wilson(hits: int, n: int) -> Estimate:
    """A share with its Wilson score interval (Wilson 1927). Raises ValueError unless 0 <= hits <= n and n > 0."""
    from statsmodels.stats.proportion import proportion_confint

    if not 0 <= hits <= n or n == 0:
        raise ValueError(f"a share needs 0 <= hits <= n and n > 0; got hits {hits}, n {n}")
    low, high = proportion_confint(hits, n, alpha=1 - LEVEL, method="wilson")
    return _estimate(hits / n, max(0.0, float(low)), min(1.0, float(high)), n)


Counts = Mapping[tuple[Any, Any], int]
"""The number of cases with each pair of gold label and answer; pairs without a case are left out."""


def bootstrap(
    of: Callable[[Counts], float],
    golds: Sequence[Any],
    answers: Sequence[Any],
    clusters: Sequence[str] | None = None,
) -> Estimate | None:
    """A statistic over cases with its percentile bootstrap interval (Efron 1979), cases drawn with replacement.

    With `clusters`, the name of each case's cluster, whole clusters are drawn instead (Field and Welsh 2007), since
    answers within a cluster are alike. With few clusters the interval is too narrow: in simulations of a share of 2% to
    50% its coverage was 80% to 90% with 10 clusters and 83% to 95% with 35, lowest for small shares, whose upper end is
    too low. If all draws are equal, as when every answer is right, it has no width, which does not mean certainty.

    None if the statistic is undefined (NaN) on the cases themselves. Draws on which it is undefined say nothing about
    its spread and are left out.
    """
    cases = list(zip(golds, answers, strict=True))
    value = of(Counter(cases))
    if math.isnan(value):
        return None
    # Equal cases of a cluster are exchangeable, so a draw of cases is a draw of counts.
    kinds = sorted(set(cases), key=repr)
    index = {kind: i for i, kind in enumerate(kinds)}
    draws: list[list[int]] = _draws([index[case] for case in cases], clusters).tolist()
    return _between(value, [of(_counts(kinds, draw)) for draw in draws], len(cases))


def mean(values: Sequence[float], clusters: Sequence[str] | None = None) -> Estimate:
    """The mean of a number over cases, with a percentile bootstrap interval; `clusters` as for `bootstrap`.

    If all values are equal, so are all draws, and the interval has no width. Raises ValueError for no values.
    """
    import numpy

    if not len(values):
        raise ValueError("a mean needs at least one value")
    distinct, kinds = numpy.unique(numpy.asarray(values, dtype=float), return_inverse=True)
    draws = _draws(kinds.tolist(), clusters).astype(float)
    return _between(math.fsum(values) / len(values), draws @ distinct / draws.sum(axis=1), len(values))


def rate(verdicts: Sequence[bool], clusters: Sequence[str] | None = None) -> Estimate:
    """The share of true verdicts, with Wilson's interval; with `clusters`, with the interval of `mean`.

    If all verdicts are equal, the bootstrap sees no spread; the interval is then Wilson's for as many cases as there
    are clusters, as if each cluster were one case. Raises ValueError for no verdicts.
    """
    hits, n = sum(verdicts), len(verdicts)
    if clusters is None:
        return wilson(hits, n)
    if 0 < hits < n:
        return mean([float(verdict) for verdict in verdicts], clusters)
    apart = len(set(clusters))
    return wilson(apart if hits else 0, apart).model_copy(update={"n": n})


@dataclass(frozen=True)
class Runs:
    """One number of several runs on the same cases; the runs are trainings of one recipe with different seeds.

    In each draw all runs are evaluated on the same cases, or whole clusters of cases. This also holds for the runs of
    two recipes on the same cases, so that their draws are paired.
    """

    values: tuple[float, ...]
    """The number of each run."""
    drawn: Any
    """The number of each run (a column) in each draw (a row); NaN where it is undefined."""
    n: int
    """The number of cases behind it."""
    apart: int
    """The number of independent ones: of clusters, or of cases without clusters."""


def runs_of(
    of: Callable[[Counts], float],
    golds: Sequence[Any],
    answers: Sequence[Sequence[Any]],
    clusters: Sequence[str] | None = None,
) -> Runs | None:
    """A statistic of the answers of each run; None if it is undefined for one of them."""
    import numpy

    values = tuple(of(Counter(zip(golds, run, strict=True))) for run in answers)
    if any(map(math.isnan, values)):
        return None
    draws = _case_draws(len(golds), None if clusters is None else tuple(clusters))
    columns = []
    for run in answers:
        cases = list(zip(golds, run, strict=True))
        kinds = sorted(set(cases), key=repr)
        index = {kind: i for i, kind in enumerate(kinds)}
        member = numpy.eye(len(kinds))[[index[case] for case in cases]]
        columns.append([of(_counts(kinds, draw)) for draw in (draws @ member).astype(int).tolist()])
    return Runs(values, numpy.array(columns).T, len(golds), len(set(clusters or range(len(golds)))))


def runs_of_means(values: Sequence[Sequence[float | None]], clusters: Sequence[str] | None = None) -> Runs | None:
    """The mean of a number per run, over the cases for which the run has one; None if a run has none at all."""
    import numpy

    table = numpy.array([[math.nan if value is None else value for value in run] for run in values], dtype=float).T
    inside = ~numpy.isnan(table)
    if not inside.any(axis=0).all():
        return None
    draws = _case_draws(len(table), None if clusters is None else tuple(clusters))
    with numpy.errstate(invalid="ignore"):  # a draw may hold none of the cases: 0 / 0
        drawn = (draws @ numpy.where(inside, table, 0.0)) / (draws @ inside.astype(float))
    means = tuple(math.fsum(column[kept]) / int(kept.sum()) for column, kept in zip(table.T, inside.T, strict=True))
    known = inside.any(axis=1)
    apart = len({name for name, holds in zip(clusters or range(len(table)), known, strict=True) if holds})
    return Runs(means, drawn, int(known.sum()), apart)


@dataclass(frozen=True)
class Spread:
    """The variance of a mean over runs, or of a difference of two such means."""

    cases: float
    """The part that comes from the cases."""
    cases_df: float
    """Degrees of freedom of that part."""
    runs: tuple[tuple[float, float], ...]
    """The part that comes from the runs: variance and degrees of freedom of each side that has several runs."""

    @property
    def is_none(self) -> bool:
        """Whether nothing varies."""
        return not self.cases + sum(part for part, _ in self.runs)

    def reach(self, level: float) -> float:
        """Half the width of an interval that misses with probability `level`.

        The two parts are added in quadrature, each with its own Student's t (after Howe 1974).
        """
        runs = math.fsum(part for part, _ in self.runs)
        of_cases, of_runs = students(level, [self.cases_df, welch(self.runs)])
        return math.sqrt(float(of_cases) ** 2 * self.cases + float(of_runs) ** 2 * runs)


def students(level: float, freedom: Any) -> Any:
    """The value that Student's t exceeds in either direction with probability `level`, for degrees of freedom."""
    from scipy.stats import t

    return t.isf(level / 2, freedom)


def welch(parts: Sequence[tuple[Any, float]]) -> Any:
    """Degrees of freedom of a sum of variances, or of arrays of variances (Welch 1947); 1 if there are none."""
    return sum(part for part, _ in parts) ** 2 / sum(part**2 / df for part, df in parts) if parts else 1.0


@dataclass(frozen=True)
class Difference:
    """A difference of two means over runs, with the test of no difference."""

    estimate: Estimate
    p: float
    """Two-sided."""
    spread: Spread


def average(runs: Runs, *, is_share: bool = False) -> Estimate:
    """The mean over runs, with the interval of `average_difference`.

    A single run has the interval of `bootstrap`, without any variance between seeds. That of a share is cut at 0 and 1.
    """
    value = _mean_of(runs)
    if len(runs.values) == 1:
        return _between(value, runs.drawn[:, 0], runs.n)
    reach = _spread(runs.drawn.mean(axis=1), [runs]).reach(1 - LEVEL)
    return _within(0.0 if is_share else -math.inf, value, reach, runs.n, 1.0 if is_share else math.inf)


def average_difference(mine: Runs, theirs: Runs, *, is_share: bool = False, level: float = LEVEL) -> Difference:
    """The mean over `mine` less the mean over `theirs`, its interval, and the two-sided p of no difference.

    The variance from cases is that of draws which both sides share, times m / (m - 1) for m independent cases, with
    m - 1 degrees of freedom. The variance from runs is that between the runs of a side, divided by their number, summed
    over the sides with several runs, with the degrees of freedom of Welch 1947: few runs hardly determine it.
    `Spread.reach` combines the two into an interval. p is the level at which the interval ends at 0. The interval of a
    difference of shares is cut at -1 and 1.

    In simulations of 2 to 6 runs a side, or against an untrained model, this errs no more often than it says; with 2
    runs against 5 or 6 it errs in some 6% at 5%, since Welch's degrees of freedom are estimates too. Drawing runs as
    cases are drawn would err up to four times as often at 5%; one t for both parts, twice as often with two runs. If
    neither draws nor runs differ, the interval has no width, and p is that of a sign test: 2 * 0.5^m.
    """
    from scipy.optimize import brentq

    value = _mean_of(mine) - _mean_of(theirs)
    spread = _spread(mine.drawn.mean(axis=1) - theirs.drawn.mean(axis=1), [mine, theirs])
    most = 1 - LEAST_P
    if spread.is_none:
        p = 1.0 if abs(value) < 10.0**-DIGITS else min(1.0, 2 * 0.5 ** min(mine.apart, theirs.apart))
    elif abs(value) <= spread.reach(most):
        p = 1.0
    elif abs(value) >= spread.reach(LEAST_P):
        p = LEAST_P
    else:
        p = float(brentq(lambda level: spread.reach(level) - abs(value), LEAST_P, most))
    end = 1.0 if is_share else math.inf
    estimate = _within(-end, value, spread.reach(1 - level), min(mine.n, theirs.n), end)
    return Difference(estimate, float(f"{p:.4g}"), spread)


def holm(ps: Sequence[float]) -> list[float]:
    """The p values of one family of tests, adjusted for their number (Holm 1979), in the same order.

    This is own code because statsmodels collects garbage at each call, which takes longer than all the tests.
    """
    adjusted, least = list(ps), 0.0
    for rank, place in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        least = max(least, min(1.0, (len(ps) - rank) * ps[place]))
        adjusted[place] = float(f"{least:.4g}")
    return adjusted


def paired(
    metric: str,
    other: str,
    mine: Sequence[bool],
    theirs: Sequence[bool],
    margin_level: float | None = None,
    clusters: Sequence[str] | None = None,
) -> Paired:
    """Compare two models on the same cases, in the same order. Raises ValueError on unequal or empty sequences.

    The test is McNemar's, exact (binomial on the discordant pairs), from statsmodels. The interval of the difference
    is the adjusted Wald interval of Bonett and Price 2012 (one added to each discordant count), which keeps a width
    when nothing is discordant. Being approximate, it can disagree with the exact test near p = 0.05: the test rules.
    With `margin_level`, the level of the interval that a margin is tested with, it also reaches to the ends of Tango's
    score interval (1998), in which each cluster counts as one case. Without this, few discordant cases let a model that
    is worse by the margin pass up to three times as often as the level says, and up to nine times with clusters.

    With `clusters`, the name of each case's cluster, answers within a cluster are taken to be alike: the test is that
    of `no_better`, two-sided, which exchanges the two models in whole clusters, and the interval is that of
    `average_difference`. If each case is its own cluster, both are as without clusters. McNemar's test erred in 11% and
    21% at 5% where 200 patients came four times and 100 came eight times, and half of the visits were decided like the
    other visits of the patient.
    """
    n, level = len(mine), LEVEL if margin_level is None else margin_level
    if n == 0 or n != len(theirs):
        raise ValueError(f"paired verdicts must be of the same cases; got {n} and {len(theirs)}")
    b = sum(x and not y for x, y in zip(mine, theirs, strict=True))
    c = sum(y and not x for x, y in zip(mine, theirs, strict=True))
    if clusters is not None and len(set(clusters)) < n:
        p, low, high = _paired_clusters(mine, theirs, level, clusters)
    else:
        p, (low, high) = _mcnemar(b, c, n), _bonett_price(b, c, n, level)
    if margin_level is not None:
        apart = n if clusters is None else len(set(clusters))
        up, down = b * apart / n, c * apart / n
        low, high = min(low, _tango(up, down, apart, level)), max(high, -_tango(down, up, apart, level))
    difference = _estimate((b - c) / n, low, high, n)
    return Paired(metric=metric, other=other, b=b, c=c, difference=difference, p=float(f"{min(1.0, p):.4g}"))


def _mcnemar(b: int, c: int, n: int) -> float:
    from statsmodels.stats.contingency_tables import mcnemar

    return 1.0 if b + c == 0 else float(mcnemar([[n - b - c, b], [c, 0]], exact=True).pvalue)


def _bonett_price(b: float, c: float, n: int, level: float) -> tuple[float, float]:
    from scipy.stats import norm

    up, down = (b + 1) / (n + 2), (c + 1) / (n + 2)
    reach = float(norm.ppf((1 + level) / 2)) * math.sqrt((up + down - (up - down) ** 2) / (n + 2))
    return max(-1.0, up - down - reach), min(1.0, up - down + reach)


def _tango(b: float, c: float, n: int, level: float) -> float:
    """The lower end, by the variance of each difference that is tested, which no lack of discordant cases removes."""
    from scipy.optimize import brentq
    from scipy.stats import norm

    def score(at: float) -> float:
        half = (b + c - (2 * n - b + c) * at) / (4 * n)
        losses = half + math.sqrt(max(0.0, half**2 + c * at * (1 - at) / (2 * n)))
        return (b - c - n * at) / math.sqrt(n * (2 * losses + at * (1 - at)))

    if c > n - 1e-9 or level > 1 - 1e-12:
        return -1.0
    quantile = float(norm.ppf((1 + level) / 2))
    return float(brentq(lambda at: score(at) - quantile, 1e-9 - 1, (b - c) / n - 1e-9))


def _paired_clusters(
    mine: Sequence[bool], theirs: Sequence[bool], level: float, clusters: Sequence[str]
) -> tuple[float, float, float]:
    """The two-sided p if the models are exchanged in whole clusters, and the ends of the interval."""
    import numpy

    gain = [x - y for x, y in zip(mine, theirs, strict=True)]
    gains = Counter[str]()
    for name, one in zip(clusters, gain, strict=True):
        gains[name] += one
    counts, total = Counter(map(abs, gains.values())), sum(gain)
    sizes = [counts[size] for size in range(1, max(counts) + 1)]
    p = 2 * no_better(abs(total), sizes) if total else 1.0
    draws = _draws([one + 1 for one in gain], clusters)  # columns: losses, ties and gains
    drawn = draws @ numpy.arange(-1, draws.shape[1] - 1) / draws.sum(axis=1)
    value, apart = total / len(gain), len(gains)
    spread = _spread(drawn, [Runs((value,), drawn[:, None], len(gain), apart)])
    if spread.is_none:  # all draws are equal: every cluster gains the same share, as that fraction of a case
        return p, *_bonett_price(apart * max(0.0, value), apart * max(0.0, -value), apart, level)
    reach = spread.reach(1 - level)
    return p, max(-1.0, value - reach), min(1.0, value + reach)


def no_better(total: int, sizes: Sequence[int]) -> float:
    """One-sided exact p of a paired randomisation test (Fisher 1935).

    This is the chance of a sum of gains of `total` or more, if each gain were as likely to be a loss of the same size.
    `sizes` holds the number of cases that gained or lost 1, 2 and so on, which is how many more of a case's answers
    count for one model than for the other. With one answer per case this is McNemar's exact test. 1.0 if no case gained
    or lost. The models are taken to be exchangeable: if every loss is large and every gain small, it errs more often.
    """
    most = sum(size * n for size, n in enumerate(sizes, 1))
    return float(_tail(tuple(sizes))[(total + most) // 2])


@lru_cache(maxsize=8192)  # simulations ask for the same sizes again; about 20 MB
def _tail(sizes: tuple[int, ...]) -> Any:
    """The chances that the gains alone sum to at least 0, 1 and so on, by the number of cases of each size."""
    import numpy
    from scipy.stats import binom

    mass = numpy.ones(1)
    for size, n in enumerate(sizes, 1):
        apart = numpy.zeros(size * n + 1)
        apart[::size] = binom.pmf(numpy.arange(n + 1), n, 0.5)
        mass = numpy.convolve(mass, apart)
    return numpy.minimum(numpy.cumsum(mass[::-1])[::-1], 1.0)


def _draws(kinds: Sequence[int], clusters: Sequence[str] | None) -> Any:
    """The number of times that each kind of case, numbered from 0, occurs in each draw: one row per draw."""
    import numpy

    generator = numpy.random.default_rng(BOOTSTRAP_SEED)
    if clusters is None:
        counts = numpy.bincount(kinds)
        return generator.multinomial(len(kinds), counts / counts.sum(), size=RESAMPLES)
    names, of = numpy.unique(numpy.asarray(clusters), return_inverse=True)
    table = numpy.zeros((len(names), max(kinds) + 1))
    numpy.add.at(table, (of, numpy.asarray(kinds)), 1.0)
    drawn = generator.multinomial(len(names), numpy.full(len(names), 1 / len(names)), size=RESAMPLES)
    # As floating point, which holds these counts exactly and which BLAS multiplies fast.
    return (drawn.astype(float) @ table).astype(int)


@lru_cache(maxsize=4)
def _case_draws(n: int, clusters: tuple[str, ...] | None) -> Any:
    """The number of times that each of `n` cases occurs in each draw, the same for every metric: one row per draw."""
    import numpy

    if clusters is None:
        return _draws(range(n), None).astype(float)
    names, of = numpy.unique(numpy.asarray(clusters), return_inverse=True)
    return _draws(range(len(names)), None).astype(float)[:, of]


def _spread(drawn: Any, sides: Sequence[Runs]) -> Spread:
    import numpy

    known = min(side.apart for side in sides) - 1
    cases = float(numpy.nanvar(drawn)) * (known + 1) / max(1, known)
    several = [(side.values, len(side.values)) for side in sides if len(set(side.values)) > 1]
    runs = [(float(numpy.var(values, ddof=1)) / k, k - 1) for values, k in several]
    if cases + math.fsum(part for part, _ in runs) < 10.0 ** (-2 * DIGITS):  # only rounding errors of sums
        cases, runs = 0.0, []
    return Spread(cases, max(1, known), tuple(runs))


def _within(least: float, value: float, reach: float, n: int, most: float) -> Estimate:
    return _estimate(value, max(least, value - reach), min(most, value + reach), n)


def _mean_of(runs: Runs) -> float:
    return math.fsum(runs.values) / len(runs.values)


def _between(value: float, values: Sequence[float], n: int) -> Estimate:
    import numpy

    tail = (1 - LEVEL) / 2
    low, high = numpy.nanquantile(numpy.asarray(values), (tail, 1 - tail)).tolist()
    return _estimate(value, low, high, n)


def quadratic_kappa(counts: Mapping[tuple[int, int], int]) -> float:
    """Cohen's kappa with quadratic weights (Cohen 1968), in [-1, 1], of counts of cases by gold and answered rank.

    NaN where it is undefined: no case, or the same single rank for all gold labels and answers. This is own code
    because a bootstrap calls it thousands of times on a few counts; libraries take whole lists and far more time.
    """
    n = sum(counts.values())
    of_gold, of_answer = Counter[int](), Counter[int]()
    for (gold, answer), count in counts.items():
        of_gold[gold] += count
        of_answer[answer] += count
    observed = sum(count * (gold - answer) ** 2 for (gold, answer), count in counts.items())
    by_chance = sum(a * b * (gold - answer) ** 2 for gold, a in of_gold.items() for answer, b in of_answer.items())
    # The common factor 1 / (ranks - 1)^2 of the weights cancels.
    return 1.0 - n * observed / by_chance if by_chance else math.nan


def _counts(kinds: Sequence[tuple[Any, Any]], draw: Sequence[int]) -> Counts:
    return {kind: count for kind, count in zip(kinds, draw, strict=True) if count}


def _estimate(value: float, low: float, high: float, n: int) -> Estimate:
    return Estimate(value=rounded(value), low=rounded(low), high=rounded(high), n=n)


def rounded(value: float) -> float:
    """A number as reports hold it; no minus before zero, so that equal numbers have equal texts."""
    return round(value, DIGITS) + 0.0
