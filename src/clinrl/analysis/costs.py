"""Answers of least expected cost by a model's own probabilities: the scores that thresholds reach without training.

A reward that charges one direction of error more than the other must be compared with this whole curve. Pure functions
of records: no files, no models, no clock.
"""

import math
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from clinrl.tasks.base import EXACT, Task
from clinrl.types import Strict

WEIGHTS = tuple(2.0**power for power in range(-6, 7))
"""Costs of a step less cautious than the gold label, where a step more cautious costs 1."""

Probabilities = Sequence[float]
"""Probabilities of the ordered answers, the most cautious first; they sum to 1."""


class Costs(Strict):
    """Counts of cases in one mode, for the exam's own answers and for the answers chosen at each weight."""

    n: int = Field(gt=0)
    scored: int = Field(ge=0)
    """Cases whose probabilities were read. All other answers, unreadable ones too, are the same at every weight."""
    measures: tuple[str, ...]
    """Shares of the task that are counted: exact answers, both directions of error, and the safety measure."""
    own: tuple[int, ...]
    """Cases that each of `measures` counts among the exam's own answers."""
    weights: tuple[float, ...]
    chosen: tuple[tuple[int, ...], ...]
    """The same counts as `own` for the answers chosen at each weight."""

    def shares(self, measure: str) -> list[float]:
        """A measure as a share of all cases: for the exam's own answers, then at each weight."""
        place = self.measures.index(measure)
        return [counts[place] / self.n for counts in (self.own, *self.chosen)]


def choose(probabilities: Probabilities, weight: float) -> int:
    """The index of the answer of least expected cost; the most cautious one of equals.

    A step less cautious than the gold label costs `weight`, a step more cautious 1. So the answer is the quantile of
    order 1 / (1 + weight) (Koenker and Bassett, Econometrica 1978), and a larger weight never chooses a less cautious
    answer.
    """
    for place in range(len(probabilities) - 1):
        if weight * math.fsum(probabilities[: place + 1]) >= math.fsum(probabilities[place + 1 :]):
            return place
    return len(probabilities) - 1


def count(
    task: Task, golds: Sequence[Any], answers: Sequence[Any], probabilities: Sequence[Probabilities | None]
) -> Costs:
    """The counts of one mode of a task with ordered answers; `probabilities` are None for cases without."""
    ordered = task.ordered
    assert ordered is not None
    measures = tuple(dict.fromkeys((EXACT, ordered.under, ordered.over, task.safety.metric)))

    def counts(given: Sequence[Any]) -> tuple[int, ...]:
        shares = [task.shares[name] for name in measures]
        return tuple(sum(bool(share.of(*pair)) for pair in zip(golds, given, strict=True)) for share in shares)

    def chosen(weight: float) -> list[Any]:
        pairs = zip(answers, probabilities, strict=True)
        return [own if found is None else ordered.answers[choose(found, weight)] for own, found in pairs]

    return Costs(
        n=len(golds), scored=sum(found is not None for found in probabilities), measures=measures, own=counts(answers),
        weights=WEIGHTS, chosen=tuple(counts(chosen(weight)) for weight in WEIGHTS),
    )  # fmt: skip
