"""The strict parser of the one label in a turn, and the lenient parsers of the published system for comparison.

A turn must hold one answer block with one label in it, and no text outside the block. White space, letter case and one
closing full stop are forgiven. Labels are compared whole, because all three contain "appropriate". A tag inside the
reasoning makes a turn unreadable: a parser that takes the first match would read the answer there.
"""

import re
from typing import Final, Literal, get_args

from clinrl.types import Message, Unreadable

Label = Literal["Usually Not Appropriate", "May Be Appropriate", "Usually Appropriate"]
LABELS: Final[tuple[Label, ...]] = get_args(Label)
"""The labels in ordinal order, from the least to the most appropriate."""

UNKNOWN: Final = "Unknown"
"""The result of the published reader for a text without a label."""

Fault = Literal[
    "empty", "empty_think", "stray_tag", "no_answer", "unclosed", "nested", "duplicate", "preamble", "trailing",
    "empty_answer", "hedged", "unknown_label",
]  # fmt: skip
REASONS: Final[tuple[Fault, ...]] = get_args(Fault)
"""Every reason that `parse` gives. Its docstring lists them in order of precedence."""

MIN_THOUGHT_WORDS: Final = 3
"""Least number of words in a think block. With fewer, a model could write the block without thinking."""

_TAG = re.compile(r"<(/?)(think|answer)>", re.IGNORECASE)
_WORD = re.compile(r"[^\W\d_]{2,}")
BY_TEXT: Final = {label.lower(): label for label in LABELS}
"""Each label by its lower case."""


def parse(message: Message) -> str | Unreadable:
    """The label of a turn, one of `LABELS`, or Unreadable with a reason out of `REASONS`.

    Never raises, and takes time in proportion to the length of the text. Reasons, in order of precedence: `empty` (no
    content, as when the think block never ended), `empty_think` (a block with fewer than `MIN_THOUGHT_WORDS` words),
    `stray_tag` (any tag within the reasoning, a think tag or a closing tag out of place after it), `no_answer` (no
    answer tag), `unclosed`, `nested`, `duplicate` (more than one block), `preamble`, `trailing` (text before or after
    the block), `empty_answer`, `hedged` (a label and more, or several), `unknown_label`.
    """
    reason = _fault_of_thought(message.thinking) if message.content.strip() else "empty"
    if reason:
        return Unreadable(reason=reason)
    tags = list(_TAG.finditer(message.content))
    reason = _fault_of_tags([tag[0].lower() for tag in tags])
    if reason:
        return Unreadable(reason=reason)
    opening, closing = tags
    if message.content[: opening.start()].strip():
        return Unreadable(reason="preamble")
    if message.content[closing.end() :].strip():
        return Unreadable(reason="trailing")
    return _label(message.content[opening.end() : closing.start()])


def full_text(message: Message) -> str:
    """The turn as the model wrote it, with its think block: the text that the published rewards read."""
    return message.content if message.thinking is None else f"<think>{message.thinking}</think>{message.content}"


def published_label(text: str) -> str:
    """The label as the published reward reads it, or `UNKNOWN`.

    The text of the first answer block must begin with a label; the rest of it is ignored. A block without a closing
    tag ends at the next "<".
    """
    tags = [tag for tag in _TAG.finditer(text) if tag[2].lower() == "answer"]
    opening = next((tag for tag in tags if not tag[1]), None)
    if opening is None:
        return UNKNOWN
    closing = next((tag for tag in tags if tag[1] and tag.start() >= opening.end()), None)
    end = text.find("<", opening.end()) if closing is None else closing.start()
    written = (text[opening.end() :] if end < 0 else text[opening.end() : end]).strip().lower()
    return next((label for low, label in BY_TEXT.items() if written.startswith(low)), UNKNOWN)


def published_format(text: str) -> bool:
    """Whether the published format reward is paid: for one think block, then one answer block, and no other text.

    The contents of the blocks do not matter: both may be empty, and one may hold a second opening tag.
    """
    thinks, answers = _blocks(text, "think"), _blocks(text, "answer")
    if len(thinks) != 1 or len(answers) != 1:
        return False
    (start, thought), (answered, end) = thinks[0], answers[0]
    between = thought <= answered and not text[thought:answered].strip()
    return between and not text[:start].strip() and not text[end:].strip()


def _fault_of_thought(thinking: str | None) -> Fault | None:
    if thinking is None:
        return None
    if len(_WORD.findall(thinking)) < MIN_THOUGHT_WORDS:
        return "empty_think"
    return "stray_tag" if _TAG.search(thinking) else None


def _fault_of_tags(tags: list[str]) -> Fault | None:
    """The fault in the content's tags, given in order; None for one answer block and no other tag."""
    if any("think" in tag for tag in tags):
        return "stray_tag"
    if not tags:
        return "no_answer"
    if tags[0] == "</answer>":
        return "stray_tag"
    if tags == ["<answer>", "</answer>"]:
        return None
    if "</answer>" not in tags:
        return "unclosed"
    if tags[1] == "<answer>":
        return "nested"
    return "duplicate" if "<answer>" in tags[2:] else "stray_tag"


def _label(inner: str) -> str | Unreadable:
    text = " ".join(inner.lower().split()).removesuffix(".").rstrip()
    if not text:
        return Unreadable(reason="empty_answer")
    if text in BY_TEXT:
        return BY_TEXT[text]
    return Unreadable(reason="hedged" if any(label in text for label in BY_TEXT) else "unknown_label")


def _blocks(text: str, name: str) -> list[tuple[int, int]]:
    """The start and end of each closed block of a kind, from the left: an opening tag up to the next closing tag."""
    found: list[tuple[int, int]] = []
    start: int | None = None
    for tag in _TAG.finditer(text):
        if tag[2].lower() != name:
            continue
        if tag[1] and start is not None:
            found.append((start, tag.end()))
            start = None
        elif not tag[1] and start is None:
            start = tag.start()
    return found
