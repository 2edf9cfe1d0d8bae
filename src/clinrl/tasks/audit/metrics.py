"""The metrics of audits, pooled over all proposals of an exam, so that a rare error type counts as often as it occurs.

An audit that was never submitted has no decisions: its errors are missed and its clean proposals not approved.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from operator import attrgetter
from typing import Final, NamedTuple

from clinrl.intervals import Counts
from clinrl.tasks.audit.episodes import APPROVED, parts
from clinrl.tasks.audit.published import f_beta as f_of
from clinrl.tasks.audit.rules import AGE, ERROR_TYPES, OVERRIDE, TEMPORAL, WINDOW
from clinrl.tasks.parts import EXACT_SHARE, Share, Statistic
from clinrl.types import Unreadable

Answer = str | Unreadable
BETA: Final = 1.5
"""As published: a missed error weighs more than a false alarm."""
SHORT: Final = {AGE: "age", TEMPORAL: "temporal", WINDOW: "window", OVERRIDE: "override"}


def dangerous(gold: str, answer: Answer) -> bool | None:
    """Whether an error of the Actor passed: approved, or never decided. None if the Actor makes no error."""
    made = [given for right, given in parts(gold, answer).values() if right != APPROVED]
    return any(given == APPROVED or isinstance(given, Unreadable) for given in made) if made else None


class Tally(NamedTuple):
    """Numbers of proposals of one audit. `kinds` holds, for each error type in order, the number of its errors, of its
    flags, and of proposals that are both."""

    errors: int
    flags: int
    hits: int
    clean: int
    approved: int
    kinds: tuple[tuple[int, int, int], ...]


@lru_cache(maxsize=1 << 16)  # a bootstrap asks about the same audits thousands of times
def tally(gold: str, answer: Answer) -> Tally:
    """The counts of an audit. A flag of another type than the error's is both a false alarm and a miss."""
    found = parts(gold, answer).values()
    kinds = tuple(
        (
            sum(right == kind for right, _ in found),
            sum(given == kind for _, given in found),
            sum(right == given == kind for right, given in found),
        )
        for kind in ERROR_TYPES
    )
    errors, flags, hits = (sum(column) for column in zip(*kinds, strict=True))
    approved = sum(right == given == APPROVED for right, given in found)
    return Tally(errors, flags, hits, len(found) - errors, approved, kinds)


def _share(some: Callable[[Tally], int], of: Callable[[Tally], int]) -> Callable[[Counts], float]:
    """A metric: the sum of `some` as a share of the sum of `of`, over all audits; 0 if the latter is 0."""

    def share(counts: Counts) -> float:
        part = whole = 0
        for audit, n in counts.items():
            one = tally(*audit)
            part += n * some(one)
            whole += n * of(one)
        return part / whole if whole else 0.0

    return share


sensitivity = _share(attrgetter("hits"), attrgetter("errors"))
"""Share of the errors that are flagged by their type."""
specificity = _share(attrgetter("approved"), attrgetter("clean"))
"""Share of the clean proposals that are approved; undecided ones are not."""


precision = _share(attrgetter("hits"), attrgetter("flags"))
"""Share of the flags that are on an error of their type."""


def f_beta(counts: Counts) -> float:
    return f_of(precision(counts), sensitivity(counts), BETA)


def balanced_accuracy(counts: Counts) -> float:
    """Mean of sensitivity and specificity."""
    return (sensitivity(counts) + specificity(counts)) / 2


def _of_kind(place: int, column: int) -> Callable[[Counts], float]:
    """Recall (column 0: share of the errors) or precision (1: share of the flags) of the error type at a place."""
    return _share(lambda one: one.kinds[place][2], lambda one: one.kinds[place][column])


def _statistic(of: Callable[[Counts], float]) -> Statistic:
    return Statistic(of=of, worse="lower", readable_only=False)


METRICS: Final[Mapping[str, Share | Statistic]] = {
    "exact": EXACT_SHARE,
    "dangerous": Share(of=dangerous, worse="higher"),
    "f_beta": _statistic(f_beta),
    "sensitivity": _statistic(sensitivity),
    "specificity": _statistic(specificity),
    "balanced_accuracy": _statistic(balanced_accuracy),
    **{f"recall_{SHORT[kind]}": _statistic(_of_kind(place, 0)) for place, kind in enumerate(ERROR_TYPES)},
    **{f"precision_{SHORT[kind]}": _statistic(_of_kind(place, 1)) for place, kind in enumerate(ERROR_TYPES)},
}
