"""Read the one level that a turn commits to. Strict on purpose: a policy learns to exploit a lenient reader.

The contract is a line of its own, `ANSWER: ESI n` with n in 1 to 5. Letter case, spaces and tabs between the parts, any
white space at the ends of the line and before one closing period, and markdown asterisks are tolerated; nothing else
is: no word or roman numeral for n, no hyphen, no range, no digit or colon outside of ASCII, no bullet. A line that
starts with `ANSWER:` and says anything beyond a level is a hedged answer, not a missing one, so no other line, be it
clean, earlier or later, repairs it. The start of a line is matched leniently: white space, list marks and all other
characters but letters are skipped, and compatible forms of letters, such as full-width ones, count as plain letters.
Other lines claim nothing, even if they mention an answer.
"""

import re
import unicodedata
from typing import Final

from clinrl.types import Unreadable

EMPTY: Final = "empty"
NO_ANSWER_LINE: Final = "no_answer_line"
OUT_OF_RANGE: Final = "out_of_range"
HEDGED: Final = "hedged"
CONTRADICTORY: Final = "contradictory"
REASONS: Final = (EMPTY, NO_ANSWER_LINE, OUT_OF_RANGE, HEDGED, CONTRADICTORY)
"""Every reason that `parse` gives, in no order; for a turn with several, `parse` has an order of precedence."""

# Each pattern is matched once, from the start of a text. Neighbouring parts share no character, so there is nothing to
# back-track into.
_CONTRACT = re.compile(r"answer[ \t]*:[ \t]*esi[ \t]+([+-]?[0-9]+)", re.IGNORECASE | re.ASCII)
_START = re.compile(r"[0-9]*answer:")
_PASSED_OVER = re.compile(r"[^a-z0-9:]+")
_LEVELS = {str(level): level for level in range(1, 6)}


def parse(content: str) -> int | Unreadable:
    """The ESI level, 1 (most urgent) to 5, of a turn's content, or Unreadable with a reason out of `REASONS`.

    `content` is the turn without its thinking block; an answer inside that block is not an answer. Never raises, and
    takes time in proportion to the length of the text.

    Reasons, in order of precedence: `empty` (nothing but white space), `hedged` (an answer line that says more than
    one level, or puts it otherwise than the contract does), `out_of_range` (level 0, 6 or above), `contradictory` (two
    answer lines with different levels), `no_answer_line` (nothing that commits to a level, or an answer line that ends
    before it names one).
    """
    if not content.strip():
        return Unreadable(reason=EMPTY)
    claims = [_claim(line) for line in content.splitlines()]
    levels = [claim for claim in claims if isinstance(claim, int)]
    for reason in (HEDGED, OUT_OF_RANGE):
        if reason in claims:
            return Unreadable(reason=reason)
    if len(set(levels)) > 1:
        return Unreadable(reason=CONTRADICTORY)
    if not levels or NO_ANSWER_LINE in claims:
        return Unreadable(reason=NO_ANSWER_LINE)
    return levels[-1]


def _claim(line: str) -> int | str | None:
    """The claim of one line: a level, a reason why it is none, or None for a line that is no answer."""
    text = line.replace("*", "").strip()
    level = _CONTRACT.match(text)
    if level is not None and text[level.end() :].strip() in ("", "."):
        return _LEVELS.get(level[1], OUT_OF_RANGE)
    letters = _PASSED_OVER.sub("", unicodedata.normalize("NFKC", text).casefold())
    start = _START.match(letters)
    if start is None:
        return None
    return NO_ANSWER_LINE if "esi".startswith(letters[start.end() :]) else HEDGED
