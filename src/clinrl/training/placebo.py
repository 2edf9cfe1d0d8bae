"""Placebo rewards: controls that pay for something other than right answers, to see what a reward adds to training.

After Shao et al., Spurious Rewards: Rethinking Training Signals in RLVR (2025, arXiv:2506.10947), where random, format
and majority rewards improved some models about as much as true labels.
"""

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

from clinrl.types import Unreadable


def placebo_rewards(
    placebo: str, totals: Sequence[float], answers: Sequence[Any], group: int, low: float, high: float, random: Random
) -> list[float]:
    """The placebo rewards of the completions of a step, each in [low, high]; `totals` are the task's own scores.

    random: `low` or `high` with equal chances. shuffled: `totals`, permuted. format: `high` for a readable answer, else
    `low`. majority: `high` for the most frequent readable answer of its group of `group` completions (of equally
    frequent ones, the one that comes first), else `low`. Only shuffled depends on labels.
    """
    if placebo == "shuffled":
        return random.sample(totals, len(totals))
    is_paid = [not isinstance(answer, Unreadable) for answer in answers]
    if placebo == "random":
        is_paid = [random.random() < 0.5 for _ in answers]
    if placebo == "majority":
        groups = [answers[first : first + group] for first in range(0, len(answers), group)]
        counts = [Counter(answer for answer in some if not isinstance(answer, Unreadable)) for some in groups]
        best = [count.most_common(1)[0][0] if count else None for count in counts]
        is_paid = [answer == best[place // group] for place, answer in enumerate(answers)]
    return [high if paid else low for paid in is_paid]
