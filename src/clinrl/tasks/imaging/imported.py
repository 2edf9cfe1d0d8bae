"""Imported imaging records: their key, and the turn that gives the reasons and the label of their author.

A panel gave the rating and an author the reasons, so no rule of this project can derive them again. The variant takes
the place that a patient has in other tasks: a condition with the text of its variant, whose procedures belong together.
"""

import re
from typing import Annotated, Final, Literal

from pydantic import Field

from clinrl.tasks.imaging.answer import Label
from clinrl.tasks.importing import Unclear, finds
from clinrl.types import Message, Strict

RULE: Final = "imported"
"""The deciding rule of a case whose label no rule of this project gave."""

KIND: Final = "appropriateness"

MAX_SENTENCE_CHARACTERS: Final = 2_000
MAX_SENTENCES: Final = 60

_RATING = r"(?:[1-9]|one|two|three|four|five|six|seven|eight|nine)"
_OF_NINE = r"\W{0,3}(?:of|out of|on|from|over|/)\W{0,3}(?:9|nine)\b"
_JOIN = r"(?:(?:as|at|is|was|it|this|of|an?|the|appropriateness|median|mean|panel)\W{1,3}){0,3}"
NAMES_A_LABEL: Final = (
    r"(?i)\busually\W{1,3}(?:not\W{1,3})?appropriate\b|\bmay\W{1,3}be\W{1,3}appropriate\b"
    rf"|\brat(?:e|es|ed|ing|ings)\W{{1,3}}{_JOIN}{_RATING}{_OF_NINE}"
    rf"|\b(?:panel|acr|appropriateness) rat(?:ed|es|ings?)\W{{1,3}}{_JOIN}{_RATING}\b(?!\.\d)"
    rf"|\brating\s?[:=]\s?{_RATING}\b(?!\.[1-9])"
    rf"|\b{_RATING}(?:\.0\s?/| out of )\s?(?:9|nine)\b(?! \w)|\bhighly\W{{1,3}}appropriate\b"
    rf"|\b(?:is|makes|gets|scores?|scored) (?:of )?(?:an? )?{_RATING}{_OF_NINE}(?!\s\w)"
    rf"|\bappropriateness\W{{1,3}}(?:criteria\W{{1,3}})?(?:score|rating|category|level)s?\W{{1,3}}{_JOIN}{_RATING}\b(?!\.\d)"
    rf"|\bappropriateness\s?[:=]\s?{_RATING}\b(?!\.\d)"
)
"""Pattern of text that gives the answer away: a label, or the rating of 1 to 9 that decides the label."""
_NAMES_A_LABEL = re.compile(NAMES_A_LABEL)


class ImportedKey(Strict):
    """The part of an imported case that only the scorer may see."""

    source: Literal["appropriateness"]
    label: Label
    """The label that the panel gave."""
    rule: Literal["imported"] = RULE
    reasoning: tuple[Annotated[str, Field(min_length=1, max_length=MAX_SENTENCE_CHARACTERS)], ...] = Field(
        min_length=1, max_length=MAX_SENTENCES
    )
    """The reasons as sentences, in order; studies are cited as [n], even those without an abstract."""


def check_shown(text: str, column: str) -> None:
    """Refuse text that names a label, since no prompt may hold it. Raises Unclear."""
    if finds(_NAMES_A_LABEL, text.replace("_", " ")):
        raise Unclear(column, "names a label")


def gold(label: str, reasoning: tuple[str, ...], *, thinking: bool) -> Message:
    """A turn that gives the reasons and ends in the label."""
    return Message(
        role="assistant", content=f"<answer>{label}</answer>", thinking=" ".join(reasoning) if thinking else None
    )
