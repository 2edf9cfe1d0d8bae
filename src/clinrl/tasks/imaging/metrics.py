"""The metrics of an imaging exam, and which direction is worse.

Labels are ordered from Usually Not Appropriate to Usually Appropriate. Over-use answers more favourably than gold, and
would image too much; under-use less favourably, and would withhold. An unreadable answer is a wrong answer: it stays in
every denominator of the shares, and is a miss in the F1s and in balanced accuracy. It names no label though, so it is
neither over- nor under-use, and kappa, which needs two labels, is over readable answers. Hence
exact + over_use + under_use + unreadable = 1 and adjacent + dangerous + unreadable = 1.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from clinrl.intervals import quadratic_kappa
from clinrl.tasks.imaging.answer import LABELS
from clinrl.tasks.parts import Share, Statistic
from clinrl.types import Unreadable

UNA, MBA, UA = LABELS
RANK: Final[Mapping[str, int]] = {label: rank for rank, label in enumerate(LABELS)}

Answer = str | Unreadable


def _by_steps(holds: Callable[[int], bool], worse: str) -> Share:
    """Share of all cases whose label is so many steps above gold; an unreadable answer is no label."""
    return Share(
        of=lambda gold, answer: not isinstance(answer, Unreadable) and holds(RANK[answer] - RANK[gold]), worse=worse
    )


def recall(label: str) -> Share:
    """Among cases of one gold label (the denominator), the answer is that label."""
    return Share(of=lambda gold, answer: answer == label if gold == label else None, worse="lower")


def macro_f1(golds: Sequence[str], answers: Sequence[Answer]) -> float:
    """Mean of the F1 of each label that is gold or answered, in [0, 1]. NaN without cases."""
    scores = [score for score, _ in _f1s(golds, answers)]
    return sum(scores) / len(scores) if scores else math.nan


def weighted_f1(golds: Sequence[str], answers: Sequence[Answer]) -> float:
    """Mean of the F1 of each label, weighted by its gold cases, in [0, 1]. NaN without cases."""
    scores = _f1s(golds, answers)
    return sum(score * weight for score, weight in scores) / len(golds) if scores else math.nan


def balanced_accuracy(golds: Sequence[str], answers: Sequence[Answer]) -> float:
    """Mean recall of the labels that are gold, in [0, 1]. NaN without cases."""
    counts, of_gold = _counts(golds, answers), Counter[str]()
    for (gold, _), count in counts.items():
        of_gold[gold] += count
    return sum(counts[label, label] / n for label, n in of_gold.items()) / len(of_gold) if of_gold else math.nan


def kappa(golds: Sequence[str], answers: Sequence[Answer]) -> float:
    """Cohen's kappa with quadratic weights over the readable answers (Cohen 1968), in [-1, 1].

    NaN where it is undefined: no readable answer, or one and the same label throughout in both.
    """
    counts = _counts(golds, answers).items()
    return quadratic_kappa({(RANK[gold], RANK[answer]): n for (gold, answer), n in counts if answer is not None})


def _counts(golds: Sequence[str], answers: Sequence[Any]) -> Counter[tuple[str, str | None]]:
    """Cases by gold and answer; None for every unreadable one. Hashing a record is slow, so that comes first."""
    return Counter(zip(golds, (answer if type(answer) is str else None for answer in answers), strict=True))


def _f1s(golds: Sequence[str], answers: Sequence[Answer]) -> list[tuple[float, int]]:
    """F1 and gold cases of each label that is gold or answered. 2 hits / (gold + answered) is precision and recall."""
    counts = _counts(golds, answers)
    of_gold, of_answer = Counter[str](), Counter[str | None]()
    for (gold, answer), count in counts.items():
        of_gold[gold] += count
        of_answer[answer] += count
    named = [label for label in LABELS if of_gold[label] or of_answer[label]]
    return [(2 * counts[label, label] / (of_gold[label] + of_answer[label]), of_gold[label]) for label in named]


METRICS: Mapping[str, Share | Statistic] = {
    "exact": Share(of=lambda gold, answer: answer == gold, worse="lower"),
    "adjacent": _by_steps(lambda steps: abs(steps) <= 1, worse="lower"),
    # The opposite of gold: an appropriate study withheld, or an inappropriate one ordered.
    "dangerous": _by_steps(lambda steps: abs(steps) == 2, worse="higher"),
    "over_use": _by_steps(lambda steps: steps > 0, worse="higher"),
    "under_use": _by_steps(lambda steps: steps < 0, worse="higher"),
    # Among usually appropriate studies.
    "withheld": Share(of=lambda gold, answer: answer == UNA if gold == UA else None, worse="higher"),
    "recall_una": recall(UNA),
    "recall_mba": recall(MBA),
    "recall_ua": recall(UA),
    "macro_f1": Statistic(of=macro_f1, worse="lower", readable_only=False),
    "weighted_f1": Statistic(of=weighted_f1, worse="lower", readable_only=False),
    "balanced_accuracy": Statistic(of=balanced_accuracy, worse="lower", readable_only=False),
    "kappa": Statistic(of=kappa, worse="lower"),
}
