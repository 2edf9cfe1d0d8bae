"""Imported imaging records: what is known of them, and the turn of a reader who says what their author said.

The rating is a panel's and the reasons are an author's, so no rule of ours gives either of them again. What stands for
a patient elsewhere is the variant here: a condition with the text of its variant, whose procedures belong together.
"""

import re
from typing import Annotated, Final, Literal

from pydantic import Field

from clinrl.tasks.imaging.answer import Label
from clinrl.tasks.importing import Unclear, finds
from clinrl.types import Message, Strict

RULE: Final = "imported"
"""What stands for the deciding rule of a case whose label no rule of ours gave."""

KIND: Final = "appropriateness"

MAX_SENTENCE_CHARACTERS: Final = 2_000
MAX_SENTENCES: Final = 60

_RATING = r"(?:[1-9]|one|two|three|four|five|six|seven|eight|nine)"
_OF_NINE = r"\W{0,3}(?:of|out of|on|from|over|/)\W{0,3}(?:9|nine)\b"
_JOIN = r"(?:(?:as|at|is|was|it|this|of|an?|the|appropriateness|median|mean|panel)\W{1,3}){0,3}"
NAMES_A_LABEL: Final = (
    r"(?i)\busually\W{1,3}(?:not\W{1,3})?appropriate\b|\bmay\W{1,3}be\W{1,3}appropriate\b"
    rf"|\brat(?:e|es|ed|ing|ings)\W{{1,3}}{_JOIN}{_RATING}{_OF_NINE}"
    rf"|\b(?:is|makes|gets|scores?|scored) (?:an? )?{_RATING}{_OF_NINE}(?!\s\w)"
    rf"|\bappropriateness\W{{1,3}}(?:score|rating|category|level)s?\W{{1,3}}{_JOIN}{_RATING}\b(?!\.\d)"
    rf"|\bappropriateness\s?[:=]\s?{_RATING}\b(?!\.\d)"
)
"""Text that gives the answer away: a label, or the rating of 1 to 9 that it follows from."""
_NAMES_A_LABEL = re.compile(NAMES_A_LABEL)


class ImportedKey(Strict):
    """What only the scorer may see of an imported case."""

    source: Literal["appropriateness"]
    label: Label
    """As the panel gave it."""
    rule: Literal["imported"] = RULE
    reasoning: tuple[Annotated[str, Field(min_length=1, max_length=MAX_SENTENCE_CHARACTERS)], ...] = Field(
        min_length=1, max_length=MAX_SENTENCES
    )
    """The reasons as sentences, in order; studies are cited as [n], those without an abstract too."""


def check_shown(text: str, column: str) -> None:
    """Refuse text that no prompt may hold, since it names a label. Raises Unclear."""
    if finds(_NAMES_A_LABEL, text):
        raise Unclear(column, "names a label")


def gold(label: str, reasoning: tuple[str, ...], *, thinking: bool) -> Message:
    """A turn that gives the reasons and ends in the label."""
    return Message(
        role="assistant", content=f"<answer>{label}</answer>", thinking=" ".join(reasoning) if thinking else None
    )
