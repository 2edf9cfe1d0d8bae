"""The metrics of an imaging exam, and which direction is worse.

Labels are ordered from Usually Not Appropriate to Usually Appropriate. Over-use is an answer more favourable than gold,
which would image too much; under-use is a less favourable one, which would withhold imaging. An unreadable answer is a
wrong answer: it stays in the denominator of every share, and is a miss in the F1s and in balanced accuracy. Since it
names no label, it is neither over- nor under-use, and kappa, which needs two labels, covers readable answers. Hence
exact + over_use + under_use + unreadable = 1 and adjacent + dangerous + unreadable = 1.
"""

from collections.abc import Mapping
from typing import Final

from clinrl.intervals import Counts, quadratic_kappa
from clinrl.tasks.imaging.answer import LABELS
from clinrl.tasks.parts import EXACT_SHARE, Share, Statistic, by_steps, recall

UNA, MBA, UA = LABELS
RANK: Final[Mapping[str, int]] = {label: rank for rank, label in enumerate(LABELS)}


def macro_f1(counts: Counts) -> float:
    """Mean of the F1 of each label that is gold or answered, in [0, 1]."""
    scores = [score for score, _ in _f1s(counts)]
    return sum(scores) / len(scores)


def weighted_f1(counts: Counts) -> float:
    """Mean of the F1 of each label, weighted by its gold cases, in [0, 1]."""
    return sum(score * weight for score, weight in _f1s(counts)) / sum(counts.values())


def balanced_accuracy(counts: Counts) -> float:
    """Mean recall of the labels that are gold, in [0, 1]."""
    recalls = [counts.get((label, label), 0) / n for label, n in _totals(counts, 0).items() if n]
    return sum(recalls) / len(recalls)


def kappa(counts: Counts) -> float:
    """Cohen's kappa with quadratic weights over the readable answers (Cohen 1968), in [-1, 1].

    NaN where it is undefined: without a readable answer, or if gold and answers have the same one label throughout.
    """
    return quadratic_kappa({(RANK[gold], RANK[answer]): n for (gold, answer), n in counts.items()})


def _f1s(counts: Counts) -> list[tuple[float, int]]:
    """F1, 2 hits / (gold + answered), and number of gold cases of each label that is gold or answered."""
    of_gold, of_answer = _totals(counts, 0), _totals(counts, 1)
    hits = {label: counts.get((label, label), 0) for label in LABELS if of_gold[label] or of_answer[label]}
    return [(2 * hit / (of_gold[label] + of_answer[label]), of_gold[label]) for label, hit in hits.items()]


def _totals(counts: Counts, side: int) -> dict[str, int]:
    """Cases of each gold label (side 0) or of each answered label (side 1). Fast, since a bootstrap needs it often."""
    totals: dict[str, int] = dict.fromkeys(LABELS, 0)
    for pair, count in counts.items():
        if type(pair[side]) is str:
            totals[pair[side]] += count
    return totals


METRICS: Mapping[str, Share | Statistic] = {
    "exact": EXACT_SHARE,
    "adjacent": by_steps(RANK.__getitem__, lambda steps: abs(steps) <= 1, "lower"),
    # The opposite of gold: an appropriate study withheld, or an inappropriate one ordered.
    "dangerous": by_steps(RANK.__getitem__, lambda steps: abs(steps) == 2, "higher"),
    "over_use": by_steps(RANK.__getitem__, lambda steps: steps > 0, "higher"),
    "under_use": by_steps(RANK.__getitem__, lambda steps: steps < 0, "higher"),
    # Share of the usually appropriate procedures that the answer calls usually not appropriate.
    "withheld": Share(of=lambda gold, answer: answer == UNA if gold == UA else None, worse="higher"),
    "recall_una": recall(UNA),
    "recall_mba": recall(MBA),
    "recall_ua": recall(UA),
    "macro_f1": Statistic(of=macro_f1, worse="lower", readable_only=False),
    "weighted_f1": Statistic(of=weighted_f1, worse="lower", readable_only=False),
    "balanced_accuracy": Statistic(of=balanced_accuracy, worse="lower", readable_only=False),
    "kappa": Statistic(of=kappa, worse="lower"),
}
