"""How close a reasoning comes to the gold one: the published mean of best cosines, and a matching that can lose.

The published similarity only asks whether each gold sentence has a near neighbour among those that were written. More
sentences never hurt it, one sentence may serve for all, a copied abstract counts, and so does the opposite of what gold
says. The corrected one matches sentences one to one, drops pairs that contradict each other, and counts both ways.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from clinrl.tasks.imaging import cues
from clinrl.tasks.imaging.sentences import citations, plain, uncited

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Vectors = NDArray[Any]
    """A unit vector a row."""

COPIED_WORDS: Final = 5
"""A run of at least so many words that stands in an abstract is a copy of it; fewer may be anybody's."""


def published(gold: "Vectors", said: "Vectors", *, halved: bool) -> float:
    """Mean over gold sentences of the best cosine among those said, in [-1, 1]; 0 if either side is empty.

    `halved`: (mean + 1) / 2, in [0, 1], as the published code has it; the published formula has the mean.
    """
    if not len(gold) or not len(said):
        return 0.0
    mean = min(1.0, max(-1.0, float((gold @ said.T).max(axis=1).mean())))
    return (mean + 1) / 2 if halved else mean


def matched(
    gold: Sequence[str],
    said: Sequence[str],
    gold_vectors: "Vectors",
    said_vectors: "Vectors",
    evidence: Sequence[tuple[int, str]],
    *,
    floor: float,
    slack: int,
) -> float:
    """The corrected similarity of what was said to gold, in [0, 1]; 0 if either side is empty.

    F1 of the best one-to-one matching of sentences, times the share of cited studies that exist. A pair is worth its
    cosine above `floor`, rescaled to [0, 1]; nothing if the two contradict each other (`cues.agree`), if the sentence
    repeats an earlier one or is copied from the evidence. `slack`: sentences beyond the number of gold ones that do
    not yet cost precision. `evidence`: number and text of each abstract.
    """
    if not gold or not said:
        return 0.0
    from scipy.optimize import linear_sum_assignment

    worth = ((gold_vectors @ said_vectors.T - floor) / (1 - floor)).clip(0.0, 1.0)
    worth[:, _worthless(said, [text for _, text in evidence])] = 0.0
    hers, his = [cues.of(sentence) for sentence in gold], [cues.of(sentence) for sentence in said]
    for row, column in zip(*worth.nonzero(), strict=True):
        if not cues.agree(hers[row], his[column]):
            worth[row, column] = 0.0
    total = float(worth[linear_sum_assignment(worth, maximize=True)].sum())
    recall = total / len(gold)
    precision = total / (len(said) if len(said) <= len(gold) else max(len(gold), len(said) - slack))
    f1 = 2 * precision * recall / (precision + recall) if total else 0.0
    return min(1.0, f1) * valid_citations(said, [number for number, _ in evidence])


def encoded(sentence: str) -> str:
    """What the encoder is given of a sentence: its words, not the numbers that it cites."""
    return uncited(sentence)


def valid_citations(said: Sequence[str], known: Sequence[int]) -> float:
    """Of the studies that are cited, the share that exist, in [0, 1]; 1 if none is cited."""
    cited = {number for sentence in said for number in citations(sentence)}
    return len(cited & set(known)) / len(cited) if cited else 1.0


def _worthless(said: Sequence[str], evidence: Sequence[str]) -> list[int]:
    """Which sentences repeat an earlier one or are copied from the evidence."""
    read = " ".join(f" {plain(text)} |" for text in evidence)
    seen: set[tuple[str, tuple[int, ...]]] = set()
    found = []
    for i, sentence in enumerate(said):
        words = plain(sentence)
        # "Study [1] supports this" and the same of [2] are two things to say.
        meant = (words, citations(sentence))
        if meant in seen or (words.count(" ") + 1 >= COPIED_WORDS and f" {words} " in read):
            found.append(i)
        seen.add(meant)
    return found
