"""The texts of the Actor: a fallacy about one rule, and a conclusion.

Every fallacy exists for both actions in words of the same kind, and no sentence holds a number. So a text shows its
rule and its argument, but not whether the Actor is right.
"""

from collections.abc import Mapping
from random import Random
from typing import Final, Literal, NamedTuple

from clinrl.tasks.audit.rules import ErrorType
from clinrl.tasks.tables import read_table
from clinrl.types import Strict

Action = Literal["clear", "reject"]
ACTIONS: Final[tuple[Action, ...]] = ("clear", "reject")

_W = Mapping[Action, tuple[str, ...]]


class _Phrases(Strict):
    fallacies: Mapping[ErrorType, Mapping[str, _W]]
    conclusions: _W
    citations: tuple[str, ...]


_PHRASES: Final = read_table(__file__, _Phrases)
FALLACIES: Final = _PHRASES.fallacies
"""The wordings of each fallacy, by rule, name and action."""
CITATIONS: Final = _PHRASES.citations
FALLACY_NAMES: Final[tuple[str, ...]] = tuple(name for named in FALLACIES.values() for name in named)


class Argument(NamedTuple):
    """The rule and the fallacy of a text of the Actor."""

    rule: ErrorType
    fallacy: str


_ARGUMENTS: Final[Mapping[str, Argument]] = {
    wording: Argument(rule, fallacy)
    for rule, named in FALLACIES.items()
    for fallacy, worded in named.items()
    for wordings in worded.values()
    for wording in wordings
}


def argue(rng: Random, rule: ErrorType, fallacy: str, action: Action) -> str:
    """The Actor's text. Raises KeyError for a fallacy that is not one of the rule's."""
    return f"{rng.choice(FALLACIES[rule][fallacy][action])} {rng.choice(_PHRASES.conclusions[action])}"


def find_argument(text: str) -> Argument | None:
    """The rule and the fallacy of a text of the Actor; None for any other text."""
    return next((found for wording, found in _ARGUMENTS.items() if wording in text), None)
