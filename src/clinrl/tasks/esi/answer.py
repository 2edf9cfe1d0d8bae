"""Reads the one level that a turn commits to. Strict on purpose: a lenient reader is what a policy learns to exploit.

The contract is a line of its own, `ANSWER: ESI n` with n in 1 to 5. Letter case, spaces around the parts, markdown
asterisks and one closing period are tolerated; nothing else is. A line that starts with `ANSWER:` and says anything
beyond that is an answer that hedges, not one that is missing, so a second, clean line does not heal it.
"""

import re
from typing import Final

from clinrl.types import Unreadable

EMPTY: Final = "empty"
NO_ANSWER_LINE: Final = "no_answer_line"
OUT_OF_RANGE: Final = "out_of_range"
HEDGED: Final = "hedged"
CONTRADICTORY: Final = "contradictory"
REASONS: Final = (EMPTY, NO_ANSWER_LINE, OUT_OF_RANGE, HEDGED, CONTRADICTORY)
"""Every reason that `parse` gives, the worst named first when a turn earns several: see `parse`."""

# Each pattern is matched once, from the start of a line without asterisks. Neighbouring parts share no character, so
# there is nothing to back-track into.
_ANSWER = re.compile(r"answer[ \t]*:", re.IGNORECASE | re.ASCII)
_LEVEL = re.compile(r"[ \t]*esi[ \t]+([+-]?[0-9]+)", re.IGNORECASE | re.ASCII)
_BARE_LEVEL = re.compile(r"[ \t]*(?:esi)?[^0-9a-z]*[0-9]", re.IGNORECASE | re.ASCII)
_LEVELS = {str(level): level for level in range(1, 6)}


def parse(content: str) -> int | Unreadable:
    """The ESI level, 1 (most urgent) to 5, of a turn's content, or Unreadable with a reason out of `REASONS`.

    `content` is the turn without its thinking block; an answer inside that block is not an answer. Never raises, and
    takes time in proportion to the length of the text.

    Reasons, in order of precedence: `empty` (nothing but white space), `hedged` (an answer line that says more than
    one level, or puts it otherwise than the contract does), `out_of_range` (level 0, 6 or above), `contradictory` (two
    answer lines with different levels), `no_answer_line` (nothing that commits to a level).
    """
    if not content.strip():
        return Unreadable(reason=EMPTY)
    claims = [_claim(line) for line in content.splitlines()]
    levels = [claim for claim in claims if isinstance(claim, int)]
    for reason in (HEDGED, OUT_OF_RANGE):
        if reason in claims:
            return Unreadable(reason=reason)
    if not levels:
        return Unreadable(reason=NO_ANSWER_LINE)
    if len(set(levels)) > 1:
        return Unreadable(reason=CONTRADICTORY)
    return levels[-1]


def _claim(line: str) -> int | str | None:
    """What one line claims: a level, `HEDGED`, `OUT_OF_RANGE`, or None for a line that claims no level."""
    text = line.replace("*", "").strip()
    answer = _ANSWER.match(text)
    if answer is None:
        return None
    rest = text[answer.end() :]
    level = _LEVEL.match(rest)
    if level is None:
        return HEDGED if _BARE_LEVEL.match(rest) else None
    if rest[level.end() :].strip() not in ("", "."):
        return HEDGED
    return _LEVELS.get(level[1], OUT_OF_RANGE)
