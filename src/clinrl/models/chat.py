"""Text and turns: how a prompt is rendered, how a model's text is read as a turn, and how a turn is written.

Training, evaluation, pretraining and the rewards all read and write a model's text with these functions alone. A
conversation with tools consists of pieces: the opening, the model's turn, the results of its calls with the head of its
next turn, and so on. Each piece is encoded by itself everywhere, so that a model is prompted with the very tokens that
it learned from.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, Literal

from clinrl.errors import Refused
from clinrl.types import CALL, Call, Message, Transcript

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

CLOSE: Final = "</think>"
OPEN: Final = "<think>"
CALLED: Final = "</tool_call>"
QUESTION: Final = {"role": "user", "content": "?"}
CLOCK: Final = "{%- macro strftime_now(form) -%}26 Jul 2024{%- endmacro -%}"
"""Gives a chat template that asks for the date the same date every day: Llama's own default. Otherwise an exam and a
client would use different prompts."""
MAX_BRACKETS: Final = 100
"""The most opening brackets in a call: JSON that is nested too deep can be neither read nor recorded."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a conversation's text, encoded by itself."""

    text: str
    own: bool
    """Whether the model writes it."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A model's output after a prompt."""

    text: str
    """Without the end-of-turn token."""
    stop: Literal["answered", "max_tokens"]
    ids: tuple[int, ...]
    """Its token ids, including the end-of-turn token if there is one."""

    @property
    def tokens(self) -> int:
        return len(self.ids)


def render(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    thinking: bool,
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The prompt as the chat template writes it, ending where the model has to go on.

    With `thinking` it ends in an opened think block, without it in an empty closed one. Templates of the Qwen 3 family
    write these themselves, some of them without the opening tag; for a template without a thinking mode, such as
    Llama's, they are added. `tools`: JSON schemas of the tools that may be called. Raises Refused if the template
    writes calls in a notation that `read_calls` does not read.
    """
    if tools and not _calls_are_read(tokenizer.get_chat_template()):
        raise Refused(
            f"this chat template does not write tool calls as JSON between {CALL} and {CALLED}, and no other notation "
            "is read; choose a checkpoint whose template does, such as Qwen2.5 or Qwen3"
        )
    turns = [{"role": message.role, "content": message.content} for message in messages]
    shown = {"tools": list(tools)} if tools else {}
    return apply_template(tokenizer, turns, enable_thinking=thinking, **shown) + think_block(tokenizer, thinking)


def results(tokenizer: "PreTrainedTokenizerBase", found: Sequence[Message], thinking: bool) -> str:
    """The text between a turn that calls tools and the model's next turn, given one result or more.

    It is the rest of the turn's end, the results, and the head of the next turn. Raises Refused if the template does
    not end a turn with the tokenizer's end token.
    """
    call = {"type": "function", "function": {"name": "tool", "arguments": {}}}
    before: list[dict[str, Any]] = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}]
    after = [{"role": "tool", "name": "tool", "content": message.content} for message in found]
    until_call = apply_template(tokenizer, before, add_generation_prompt=False, enable_thinking=thinking)
    with_results = apply_template(tokenizer, before + after, enable_thinking=thinking)
    # A template may write the last turn differently from an earlier one, so the turn's end is found by counting ends.
    end = str(tokenizer.eos_token)
    ends = until_call.count(end)
    if not ends:
        raise Refused(f"this chat template ends no turn with the tokenizer's {end}; choose a checkpoint that does")
    return with_results.split(end, ends)[ends] + think_block(tokenizer, thinking)


def apply_template(tokenizer: "PreTrainedTokenizerBase", turns: Sequence[Mapping[str, Any]], **how: Any) -> str:
    """Write turns with the chat template, by default up to the head of the model's next turn."""
    given = {"tokenize": False, "add_generation_prompt": True, **how}
    return str(tokenizer.apply_chat_template(list(turns), **given))


def think_block(tokenizer: "PreTrainedTokenizerBase", thinking: bool) -> str:
    """The think block at the head of the model's turn, where its template does not write it."""
    if _switches(tokenizer.get_chat_template()):
        return ""
    return f"{OPEN}\n" if thinking else f"{OPEN}\n\n{CLOSE}\n\n"


def opens(tokenizer: "PreTrainedTokenizerBase", thinking: bool) -> bool:
    """Whether a prompt ends in an opened think block.

    Never without `thinking`; with it, unless the template leaves the opening tag to the model.
    """
    if not thinking:
        return False
    template = tokenizer.get_chat_template()
    return not _switches(template) or _endings(template)[0].rstrip().endswith(OPEN)


def without_prefill(template: str) -> str:
    """A chat template that leaves the think block to the model. Raises ValueError if the template writes one itself."""
    if _switches(template):
        raise ValueError("the chat template writes the think block itself")
    closed = "{{- '" + f"{OPEN}\\n\\n{CLOSE}\\n\\n" + "' }}"
    return template + "{%- if add_generation_prompt and enable_thinking is false %}" + closed + "{%- endif %}"


def without_clock(template: str) -> str:
    """The chat template with a fixed date, so that it writes the same text every day."""
    return CLOCK + template if "strftime_now" in template and not template.startswith(CLOCK) else template


def _switches(template: str) -> bool:
    """Whether a chat template writes the two modes of thinking differently."""
    thinking, direct = _endings(template)
    return thinking != direct


@cache
def _endings(template: str) -> tuple[str, str]:
    """The prompts that a chat template writes with thinking and without."""
    thinking, direct = (
        _bare(template, [QUESTION], add_generation_prompt=True, enable_thinking=thinking) for thinking in (True, False)
    )
    return thinking, direct


@cache
def _calls_are_read(template: str) -> bool:
    """Whether `read_calls` finds the call in a turn that a chat template writes."""
    from jinja2 import TemplateError

    call = Call(name="tool", arguments={"of": 1})
    turn = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call.model_dump()}]}
    try:
        shown = _bare(template, [QUESTION, turn])
    except TemplateError:  # the template refuses such a call
        return False
    return read_calls(Message(role="assistant", content=shown)).calls == (call,)


def _bare(template: str, turns: list[dict[str, Any]], **how: Any) -> str:
    """Apply a chat template without a tokenizer: its special tokens are empty."""
    from transformers.utils.chat_template_utils import render_jinja_template

    marks = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "")
    return str(render_jinja_template([turns], chat_template=template, **how, **marks)[0][0])


def encode(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> list[list[int]]:
    """Token ids of rendered texts. The template wrote every special token, so the tokenizer adds none."""
    return [list(ids) for ids in tokenizer(list(texts), add_special_tokens=False)["input_ids"]]


Example = tuple[list[int], bytes]
"""The token ids of a text, and for each token 1 if the model writes it, or 0 if the model is given it."""


def encode_pieces(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[Sequence[Piece]]) -> list[Example]:
    """Encode each text piece by piece."""
    ids = iter(encode(tokenizer, [piece.text for text in texts for piece in text]))
    examples = []
    for text in texts:
        found = [(next(ids), piece.own) for piece in text]
        whole = [token for part, _ in found for token in part]
        examples.append((whole, b"".join(bytes([own]) * len(part) for part, own in found)))
    return examples


def decode(tokenizer: "PreTrainedTokenizerBase", ids: Sequence[int], ends: Collection[int]) -> Completion:
    """The completion that token ids after a prompt hold, up to the first end-of-turn token.

    Special tokens inside the text stay visible: a reward must see everything that the model wrote.
    """
    ids = list(ids)
    end = next((index for index, token in enumerate(ids) if token in ends), None)
    written = ids if end is None else ids[:end]
    text = str(tokenizer.decode(written, skip_special_tokens=False, clean_up_tokenization_spaces=False))
    if end is None:
        return Completion(text=text, stop="max_tokens", ids=tuple(ids))
    return Completion(text=text, stop="answered", ids=tuple(ids[: end + 1]))


def end_tokens(config: "GenerationConfig", tokenizer: "PreTrainedTokenizerBase") -> frozenset[int]:
    """The ids that end a turn: those that a model's generation config declares, and the tokenizer's own."""
    declared = config.eos_token_id
    ids = [declared] if isinstance(declared, int) else list(declared or [])
    return frozenset([*ids, tokenizer.eos_token_id])


def to_pieces(
    tokenizer: "PreTrainedTokenizerBase",
    prompt: Sequence[Message],
    transcript: Transcript,
    thinking: bool,
    tools: Sequence[Mapping[str, Any]] = (),
    end: str = "",
) -> list[Piece]:
    """Split prompt and transcript into pieces: the opening, a turn of the model with its `end`, its results, and so on.

    Encoded piece by piece, they are the tokens that a model is given and those that it would have written.
    """
    pieces = [Piece(render(tokenizer, prompt, thinking, tools), own=False)]
    is_opened = opens(tokenizer, thinking)
    for own, turns in groupby(transcript.messages, key=lambda message: message.role == "assistant"):
        if own:
            pieces += [Piece(write_turn(turn, thinking, is_opened=is_opened) + end, own=True) for turn in turns]
        else:
            pieces.append(Piece(results(tokenizer, list(turns), thinking), own=False))
    return pieces


def read_turn(text: str, is_opened: bool) -> Message:
    """Read a completion's text as an assistant turn. Never raises, and loses nothing but tags and line ends.

    A turn has at most one think block, at its head, opened by the prompt (see `opens`) or else by the model. The block
    reaches to the first closing tag; without that tag the turn has no content. Tags anywhere else are content: a
    closing tag that nothing opened does not hide the answer before it, or a model could answer twice and be scored
    once. Tool calls stay in the content.
    """
    if not is_opened and not text.lstrip().startswith(OPEN):
        return Message(role="assistant", content=text.lstrip("\n"), thinking=None)
    before, closed, after = text.partition(CLOSE)
    before = before if is_opened else before.lstrip().removeprefix(OPEN)
    return Message(role="assistant", content=after.lstrip("\n") if closed else "", thinking=before.strip("\n"))


def read_whole(text: str) -> Message:
    """Read a text from elsewhere as a turn. Its unknown prompt may have opened the think block that the text closes."""
    return read_turn(text, is_opened=CLOSE in text and not text.lstrip().startswith(OPEN))


def read_calls(turn: Message) -> Message:
    """The same turn with the calls in its content parsed, in the notation of the Qwen and Hermes templates.

    A call reaches to the next closing tag, whatever is in between; the text around the calls remains the content. A
    valid call is closed and is JSON with a name, with arguments that are an object or absent, and with no repeated key
    in an object. If one call is invalid, the turn is returned as it is: it then makes no call at all. Never raises.
    """
    around, calls, rest = [], [], turn.content
    while CALL in rest:
        before, _, rest = rest.partition(CALL)
        written, closed, rest = rest.partition(CALLED)
        call = _call(written) if closed else None
        if call is None:
            return turn
        around.append(before)
        calls.append(call)
    if not calls:
        return turn
    texts = (text.strip("\n") for text in (*around, rest))
    return turn.model_copy(update={"content": "\n".join(text for text in texts if text), "calls": tuple(calls)})


def _call(written: str) -> Call | None:
    if written.count("{") + written.count("[") > MAX_BRACKETS:
        return None
    try:
        found = json.loads(written, object_pairs_hook=distinct_keys)
        # Python's JSON accepts Infinity and half of a surrogate pair, which cannot be written to a file.
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments")
    arguments = {} if arguments is None else arguments
    return Call(name=found["name"], arguments=arguments) if isinstance(arguments, dict) else None


def distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object. Raises ValueError for a repeated key: nobody can tell which of its values is meant."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice")
    return found


def write_turn(message: Message, thinking: bool, *, is_opened: bool = True) -> str:
    """The completion's text that `read_turn` and `read_calls` read as this turn, without the end-of-turn token.

    `is_opened`: whether the prompt opened the think block.
    """
    calls = [
        f"{CALL}\n{json.dumps({'name': call.name, 'arguments': call.arguments}, ensure_ascii=False)}\n{CALLED}"
        for call in message.calls
    ]
    answer = "\n".join([*([message.content] if message.content or not calls else []), *calls])
    head = "" if is_opened else f"{OPEN}\n"
    return f"{head}{message.thinking or ''}\n{CLOSE}\n\n{answer}" if thinking else answer
