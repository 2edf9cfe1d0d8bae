"""The similarity of a reasoning to the gold one: the published mean of best cosines, and a corrected matching.

The published similarity only checks that each gold sentence has a near neighbour among the written ones. More sentences
never lower it, one sentence may serve for all, a copied abstract counts, and so does the opposite of gold. The
corrected one matches sentences one to one, drops pairs that contradict each other, and counts precision and recall.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from clinrl.tasks.imaging import cues
from clinrl.tasks.imaging.sentences import citations, plain_words

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Vectors = NDArray[Any]
    """One unit vector per row."""

COPIED_WORDS: Final = 5
"""A sentence of at least this many words that stands in an abstract is a copy; a shorter one may be a coincidence."""


def mean_similarity(gold: "Vectors", written: "Vectors", *, halved: bool) -> float:
    """Mean over gold sentences of the best cosine among the written ones, in [-1, 1]; 0 if either side is empty.

    `halved`: returns (mean + 1) / 2, in [0, 1], as the published code does; the published formula is the mean.
    """
    if not len(gold) or not len(written):
        return 0.0
    mean = min(1.0, max(-1.0, float((gold @ written.T).max(axis=1).mean())))
    return (mean + 1) / 2 if halved else mean


def matched_similarity(
    gold: Sequence[str],
    written: Sequence[str],
    gold_vectors: "Vectors",
    written_vectors: "Vectors",
    evidence: Sequence[tuple[int, str]],
    *,
    floor: float,
    slack: int,
) -> float:
    """The corrected similarity of a reasoning to gold, in [0, 1]; 0 if either side is empty.

    F1 of the best one-to-one matching of sentences, times the share of cited studies that exist. A pair is worth its
    cosine above `floor`, rescaled to [0, 1]; nothing if the two contradict each other (`cues.agree`), or if the
    sentence repeats an earlier one or is copied from the evidence. `slack`: number of sentences beyond the number of
    gold ones that do not lower precision. `evidence`: number and text of each abstract.
    """
    if not gold or not written:
        return 0.0
    from scipy.optimize import linear_sum_assignment

    worth = ((gold_vectors @ written_vectors.T - floor) / (1 - floor)).clip(0.0, 1.0)
    worth[:, _worthless(written, [text for _, text in evidence])] = 0.0
    gold_cues, written_cues = ([cues.of(sentence) for sentence in side] for side in (gold, written))
    for row, column in zip(*worth.nonzero(), strict=True):
        if not cues.agree(gold_cues[row], written_cues[column]):
            worth[row, column] = 0.0
    total = float(worth[linear_sum_assignment(worth, maximize=True)].sum())
    recall = total / len(gold)
    precision = total / (len(written) if len(written) <= len(gold) else max(len(gold), len(written) - slack))
    f1 = 2 * precision * recall / (precision + recall) if total else 0.0
    named = [number for sentence in gold for number in citations(sentence)]  # an author may cite beyond the abstracts
    return min(1.0, f1) * valid_citations(written, [*named, *(number for number, _ in evidence)])


def valid_citations(written: Sequence[str], known: Sequence[int]) -> float:
    """Share of the cited studies that exist, in [0, 1]; 1 without a citation."""
    cited = {number for sentence in written for number in citations(sentence)}
    return len(cited & set(known)) / len(cited) if cited else 1.0


def _worthless(written: Sequence[str], evidence: Sequence[str]) -> list[int]:
    """The indices of sentences that repeat an earlier one or are copied from the evidence."""
    read = " ".join(f" {plain_words(text)} |" for text in evidence)
    seen: set[tuple[str, tuple[int, ...]]] = set()
    found = []
    for i, sentence in enumerate(written):
        words = plain_words(sentence)
        # "Study [1] supports this" and "Study [2] supports this" are two statements.
        statement = (words, citations(sentence))
        if statement in seen or (words.count(" ") + 1 >= COPIED_WORDS and f" {words} " in read):
            found.append(i)
        seen.add(statement)
    return found
