"""The reward of an ESI answer: a cost for each pair of gold and answered level, plus modifiers for three missed rules.

Levels run from 1 (most urgent) to 5, so an answer above the gold level is under-triage. Every number is a field of
`Reward`; the published arms of the series are parameter sets of the same code.
"""

import math
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import product
from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from clinrl.tasks.esi import triggers
from clinrl.tasks.parts import Weight
from clinrl.types import Score, Strict, Unreadable

LEVELS: Final = (1, 2, 3, 4, 5)
TERMS: Final = ("level", "done_intervention", "open_injury", "severe_pain", "unreadable", "clamp")
"""The terms that every score has; a term that does not apply is zero. `clamp` is the pay that the floor gave back."""

EXACT: Final = 1.0
"""The pay for the right level, under either kind of reward."""

ASYMMETRIC: Final = {
    1: (1.00, 0.00, -1.00, -1.25, -1.25),
    2: (-0.50, 1.00, -0.75, -1.00, -1.25),
    3: (-1.00, -0.25, 1.00, -0.50, -1.10),
    4: (-1.00, -0.50, -0.25, 1.00, -0.40),
    5: (-1.00, -0.75, -0.50, -0.25, 1.00),
}
"""Rows by gold level; columns answered 1 to 5. The cell of gold 1 answered 2 is a placeholder for `Reward.valve`.

Our reconstruction. The pinned facts of the published v46 card are that the exact level is rewarded, that under- and
over-triage are penalised asymmetrically, and that there is a "0.0 safety valve"; its numbers are in no public text.
Ours make under-triage cost at least as much as over-triage of the same distance (the valve apart), always punish a
false ESI 1, and make answering 1 rather than 2 pay from a belief of 0.60 and 2 rather than 3 from 0.42.
"""

MISSED_LIFESAVING: Final = 1.75
"""The cost of gold 1 answered 2, the cell that the safety valve takes out of the matrix: equal to the cost of gold 2
answered 3, the next under-triage by one level."""

BELOW: Final = 0.25
"""The least margin of every answer over silence where `refined` sets the pay for silence; the default has the same."""

Penalty = Annotated[float, Field(le=0.0)]


class Modifiers(Strict):
    """Rule-aware additions. Each needs its trigger in the narrative and the gold level of its row, so that a trigger
    word alone never pays. The rules, their triggers and the 0.5 of severe pain follow the published v49 card; a
    0.5 of the other two is our reading."""

    done_intervention_hit: Weight = 0.0
    """Gold 1, answered 1, with an intervention already done."""
    done_intervention_miss: Penalty = 0.0
    """Gold 1, answered 2 or above, with an intervention already done."""
    open_injury_miss: Penalty = 0.0
    """Gold 2, answered above 2, with an open fracture or penetrating injury."""
    severe_pain_miss: Penalty = 0.0
    """Gold 2, answered above 2, with pain of 7 of 10 or more."""


class Reward(Strict):
    """Every number of the reward.

    A reward under which an unreadable answer is not the worst outcome is allowed here, because two published arms are
    like that. The reward audit refuses to train on it without a waiver.
    """

    kind: Literal["asymmetric", "naive"] = "asymmetric"
    """asymmetric: a cost for each pair of gold and answered level. naive: 1 for the exact level and 0 for any other
    (v45c)."""
    valve: Annotated[float, Field(lt=EXACT)] = 0.0
    """Pay for gold 1 answered 2, below 1; kind asymmetric alone."""
    unreadable: float = -2.0
    """Pay for a turn without one valid answer."""
    modifiers: Modifiers = Modifiers()
    floor: Annotated[float, Field(lt=EXACT)] = -1.75
    """Least pay for a readable answer, below 1: added penalties must not make silence the better choice."""

    @model_validator(mode="after")
    def _valve_has_a_cell(self) -> Self:
        if self.kind == "naive" and self.valve != 0.0:
            raise ValueError(f"valve {self.valve} has no meaning with kind naive; leave it out or use kind asymmetric")
        return self

    @cached_property
    def _readable(self) -> tuple[float, float]:
        totals = [_readable_score(self, *outcome).total for outcome in outcomes()]
        return min(totals), max(totals)

    @property
    def low(self) -> float:
        return min(self._readable[0], self.unreadable)

    @property
    def high(self) -> float:
        return max(self._readable[1], self.unreadable)

    @property
    def unreadable_is_worst(self) -> bool:
        """True if an unreadable turn earns strictly less than every reachable readable one."""
        return self.unreadable < self._readable[0]


def refined(reward: Reward, rules: Iterable[str]) -> Reward:
    """The reward with the modifiers of these rules (`<rule>_hit`, `<rule>_miss`) at 0.5 and -0.5 where they are 0.

    The published v49 card takes 0.5 off for missed severe pain. Rules without a modifier change nothing. If some
    readable answer then earns no more than an unreadable one, the latter gets the default, or less if needed.
    """
    half = {f"{rule}_{outcome}": value for rule in rules for outcome, value in (("hit", 0.5), ("miss", -0.5))}
    current = reward.modifiers.model_dump()
    added = {name: value for name, value in half.items() if current.get(name) == 0.0}
    if not added:
        return reward
    found = Reward.model_validate(reward.model_dump() | {"modifiers": current | added})
    if found.unreadable_is_worst:
        return found
    unreadable = min(Reward().unreadable, found._readable[0] - BELOW)
    return Reward.model_validate(found.model_dump() | {"unreadable": unreadable})


def outcomes() -> Iterator[tuple[int, int, bool, bool, bool]]:
    """Every readable outcome: gold level, answered level, and whether each of the three triggers is in the narrative
    (done intervention, open injury, severe pain). 200 of them."""
    return product(LEVELS, LEVELS, (False, True), (False, True), (False, True))


def score(gold: int, narrative: str, answer: int | Unreadable, reward: Reward) -> Score:
    """The reward of one answer, split into all of `TERMS`; the total lies in [reward.low, reward.high].

    `gold` and a readable `answer` are levels 1 to 5. Triggers are read in the narrative, never in the completion.
    """
    if isinstance(answer, Unreadable):
        return Score(terms={**dict.fromkeys(TERMS, 0.0), "unreadable": reward.unreadable}, total=reward.unreadable)
    return _readable_score(
        reward,
        gold,
        answer,
        gold == 1 and triggers.done_intervention(narrative),
        gold == 2 and answer > 2 and triggers.open_injury(narrative),
        gold == 2 and answer > 2 and triggers.severe_pain(narrative),
    )


def level_value(reward: Reward, gold: int, answer: int) -> float:
    """The pay for a pair of gold and answered level, before modifiers."""
    if reward.kind == "naive":
        return EXACT if answer == gold else 0.0
    return reward.valve if (gold, answer) == (1, 2) else ASYMMETRIC[gold][answer - 1]


def cost(gold: int, answer: int | Unreadable) -> float:
    """The loss of an answer against the exact level under `ASYMMETRIC`; an ESI 1 answered 2 counts in full.

    0 to 2.25: under-triage costs at least what over-triage of the same distance does. An unreadable answer leaves the
    patient untriaged and costs as much as the worst level. The matrix is our reconstruction.
    """
    values = ASYMMETRIC[gold]
    worst = EXACT - min(values)
    if isinstance(answer, Unreadable):
        return worst
    return MISSED_LIFESAVING if (gold, answer) == (1, 2) else EXACT - values[answer - 1]


def _readable_score(
    reward: Reward, gold: int, answer: int, done_intervention: bool, open_injury: bool, severe_pain: bool
) -> Score:
    terms = dict.fromkeys(TERMS, 0.0)
    terms["level"] = level_value(reward, gold, answer)
    modifiers = reward.modifiers
    if gold == 1 and done_intervention:
        terms["done_intervention"] = (
            modifiers.done_intervention_hit if answer == 1 else modifiers.done_intervention_miss
        )
    if gold == 2 and answer > 2:
        terms["open_injury"] = modifiers.open_injury_miss if open_injury else 0.0
        terms["severe_pain"] = modifiers.severe_pain_miss if severe_pain else 0.0
    total = math.fsum(terms.values())
    if total < reward.floor:
        terms["clamp"] = reward.floor - total
        total = reward.floor
    return Score(terms=terms, total=total)
