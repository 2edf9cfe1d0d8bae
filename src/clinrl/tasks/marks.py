"""Find the marks by which chat templates and tokenizers tell turns, tools and thinking apart.

A tokenizer reads such a mark as one token wherever it occurs. In a text from elsewhere the mark would end a turn or
begin another, so no such text may hold one. Importers have no tokenizer, hence the fixed shapes; a caller with a
tokenizer adds its tokens.
"""

import re
import unicodedata
from collections.abc import Iterable

_SHAPES = re.compile(
    r"<\|"  # <|im_end|>, <|eot_id|>, <|endoftext|> and all others of this shape, whole or begun
    r"|\|>"
    r"|</?(?:think|answer|tool_call|tool_response|tools|start_of_turn|end_of_turn)\b"
    r"|</?(?:s|pad|unk|bos|eos|cls|sep|mask|image|audio|video|start_of_image|end_of_utterance)>"
    r"|<(?:function|parameter)=|<fim_(?:prefix|middle|suffix)>|\[(?:CLS|SEP|PAD|UNK|MASK)\]"
    r"|\[/?(?:INST|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)\]"
    r"|<</?SYS>>",
    re.IGNORECASE,
)
_BEGIN = re.compile(r"[<\[|]")


def holds_mark(text: str, added: Iterable[str] = ()) -> bool:
    """Whether a text holds a mark, or a Unicode compatible form of one; `added` are the marks of a tokenizer."""
    if not text.isascii():
        # Character by character: for a long run of accents, the time of the whole grows with its square.
        text = f"{text}\n{''.join(unicodedata.normalize('NFKC', character) for character in text)}"
    return (_BEGIN.search(text) is not None and _SHAPES.search(text) is not None) or any(own in text for own in added)
