"""What an audit's decisions are worth, over all proposals of an exam: pooled, so that a rare type counts as it occurs.

An episode that was never handed in has no decisions: its errors are missed and its clean proposals not approved.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from clinrl.records import Unreadable
from clinrl.task import Share, Statistic
from clinrl.tasks.audit.episodes import APPROVED, parts, read
from clinrl.tasks.audit.published import f_beta as f_of
from clinrl.tasks.audit.rules import AGE, ERROR_TYPES, OVERRIDE, TEMPORAL, WINDOW

Answer = str | Unreadable
BETA: Final = 1.5
"""As published: a missed error weighs more than a false alarm."""
SHORT: Final = MappingProxyType({AGE: "age", TEMPORAL: "temporal", WINDOW: "window", OVERRIDE: "override"})


def exact(gold: str, answer: Answer) -> bool:
    """Whether every proposal is decided as it should be, each error by its type."""
    return answer == gold


def dangerous(gold: str, answer: Answer) -> bool | None:
    """Whether an error of the Actor passed: approved, or never decided. None where the Actor makes none."""
    errors = [proposal for proposal, right in read(gold).items() if right != APPROVED]
    if not errors:
        return None
    made = {} if isinstance(answer, Unreadable) else read(answer)
    return any(made.get(proposal, APPROVED) == APPROVED for proposal in errors)


def f_beta(golds: Sequence[str], answers: Sequence[Answer]) -> float:
    """F-beta of the flags, beta 1.5; a flag of another type than the error's is a false alarm and a miss."""
    found = list(_decided(golds, answers))
    flags = sum(given in ERROR_TYPES for _, given in found)
    errors = sum(right != APPROVED for right, _ in found)
    hits = sum(right == given for right, given in found if right != APPROVED)
    return f_of(hits / flags if flags else 0.0, hits / errors if errors else 0.0, BETA)


def specificity(golds: Sequence[str], answers: Sequence[Answer]) -> float:
    """Share of the clean proposals that are approved; undecided ones are not. 0 where there are none."""
    return _share([given == APPROVED for right, given in _decided(golds, answers) if right == APPROVED])


def sensitivity(golds: Sequence[str], answers: Sequence[Answer]) -> float:
    """Share of the errors that are flagged by their type. 0 where there are none."""
    return _share([given == right for right, given in _decided(golds, answers) if right != APPROVED])


def balanced_accuracy(golds: Sequence[str], answers: Sequence[Answer]) -> float:
    """Mean of sensitivity and specificity."""
    return (sensitivity(golds, answers) + specificity(golds, answers)) / 2


def _recall(kind: str) -> Callable[[Sequence[str], Sequence[Answer]], float]:
    return lambda golds, answers: _share([given == kind for right, given in _decided(golds, answers) if right == kind])


def _precision(kind: str) -> Callable[[Sequence[str], Sequence[Answer]], float]:
    return lambda golds, answers: _share([right == kind for right, given in _decided(golds, answers) if given == kind])


def _decided(golds: Sequence[str], answers: Sequence[Answer]) -> Iterator[tuple[str, str | Unreadable]]:
    for gold, answer in zip(golds, answers, strict=True):
        yield from parts(gold, answer)


def _share(verdicts: Sequence[bool]) -> float:
    return sum(verdicts) / len(verdicts) if verdicts else 0.0


def _statistic(of: Callable[[Sequence[str], Sequence[Answer]], float]) -> Statistic:
    return Statistic(of=of, worse="lower", readable_only=False)


METRICS: Final[Mapping[str, Share | Statistic]] = MappingProxyType(
    {
        "exact": Share(of=exact, worse="lower"),
        "dangerous": Share(of=dangerous, worse="higher"),
        "f_beta": _statistic(f_beta),
        "sensitivity": _statistic(sensitivity),
        "specificity": _statistic(specificity),
        "balanced_accuracy": _statistic(balanced_accuracy),
        **{f"recall_{SHORT[kind]}": _statistic(_recall(kind)) for kind in ERROR_TYPES},
        **{f"precision_{SHORT[kind]}": _statistic(_precision(kind)) for kind in ERROR_TYPES},
    }
)
