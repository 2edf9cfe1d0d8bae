"""Text and turns: how a prompt is rendered, how a model's text is read as a turn, and how a turn is written.

The functions here are the only ones of their kind: training, evaluation, teaching and the rewards all see a model's
text through them. A conversation with tools is made of pieces: the opening, what the model wrote, the results of its
calls with the head of its next turn, and so on. Each piece is encoded by itself, wherever it is encoded, so that a
model is asked in the very tokens that it learned from.
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
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CLOSE: Final = "</think>"
OPEN: Final = "<think>"
CALLED: Final = "</tool_call>"
QUESTION: Final = {"role": "user", "content": "?"}
CLOCK: Final = "{%- macro strftime_now(form) -%}26 Jul 2024{%- endmacro -%}"
"""Tells a chat template that asks the same of every day, Llama's own default, or an exam would be asked another prompt
than a client."""
MAX_BRACKETS: Final = 100
"""Opening brackets in a call: what is nested without end can be neither read nor recorded."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a conversation's text, encoded by itself."""

    text: str
    own: bool
    """Whether the model writes it."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What a model wrote after a prompt."""

    text: str
    """Without the end-of-turn token."""
    stop: Literal["answered", "max_tokens"]
    ids: tuple[int, ...]
    """Its token ids, that of the end of the turn among them."""

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
    write these themselves, some of them without the opening tag; after one that knows of no thinking, as Llama's, they
    are added. `tools`: JSON schemas of the tools that may be called. Raises Refused if the template has a model call
    them in a notation that `read_calls` does not read.
    """
    if tools and not _calls_are_read(tokenizer.get_chat_template()):
        raise Refused(
            f"this chat template has tools called otherwise than as JSON between {CALL} and {CALLED}, and no other "
            "notation is read here; choose a checkpoint whose template has, as those of Qwen2.5 and Qwen3"
        )
    turns = [{"role": message.role, "content": message.content} for message in messages]
    shown = {"tools": list(tools)} if tools else {}
    return written(tokenizer, turns, enable_thinking=thinking, **shown) + _block(tokenizer, thinking)


def results(tokenizer: "PreTrainedTokenizerBase", found: Sequence[Message], thinking: bool) -> str:
    """What stands between a turn that calls tools and the model's next one: the rest of the turn's end, the results of
    the calls, and the head of the next turn. One result or more. Raises Refused if the template ends no turn."""
    call = {"type": "function", "function": {"name": "tool", "arguments": {}}}
    before: list[dict[str, Any]] = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}]
    after = [{"role": "tool", "name": "tool", "content": message.content} for message in found]
    called = written(tokenizer, before, add_generation_prompt=False, enable_thinking=thinking)
    answered = written(tokenizer, before + after, enable_thinking=thinking)
    # A template may write the last turn otherwise than an earlier one, so the turn's end is found by its number.
    end = str(tokenizer.eos_token)
    ends = called.count(end)
    if not ends:
        raise Refused(f"this chat template ends no turn with the tokenizer's {end}; choose a checkpoint that does")
    return answered.split(end, ends)[ends] + _block(tokenizer, thinking)


def written(tokenizer: "PreTrainedTokenizerBase", turns: Sequence[Mapping[str, Any]], **how: Any) -> str:
    """What the chat template writes of turns, by default up to the head of the model's next one."""
    given = {"tokenize": False, "add_generation_prompt": True, **how}
    return str(tokenizer.apply_chat_template(list(turns), **given))


def _block(tokenizer: "PreTrainedTokenizerBase", thinking: bool) -> str:
    """The think block at the head of the model's turn, where its template does not write it."""
    if _switches(tokenizer.get_chat_template()):
        return ""
    return f"{OPEN}\n" if thinking else f"{OPEN}\n\n{CLOSE}\n\n"


def opens(tokenizer: "PreTrainedTokenizerBase", thinking: bool) -> bool:
    """Whether a prompt ends in an opened think block: never without `thinking`, and with it unless the tokenizer's
    template leaves the tag to the model."""
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
    """A chat template that writes the same on every day."""
    return CLOCK + template if "strftime_now" in template and not template.startswith(CLOCK) else template


def _switches(template: str) -> bool:
    """Whether a chat template writes the two modes of thinking differently."""
    thinking, direct = _endings(template)
    return thinking != direct


@cache
def _endings(template: str) -> tuple[str, str]:
    """A prompt as a chat template writes it with thinking, and without."""
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
    except TemplateError:  # it refuses such a call
        return False
    return read_calls(Message(role="assistant", content=shown)).calls == (call,)


def _bare(template: str, turns: list[dict[str, Any]], **how: Any) -> str:
    """What a chat template writes without a tokenizer, whose marks are left out."""
    from transformers.utils.chat_template_utils import render_jinja_template

    marks = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "")
    return str(render_jinja_template([turns], chat_template=template, **how, **marks)[0][0])


def encode(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> list[list[int]]:
    """Token ids of rendered texts. The template wrote every special token, so the tokenizer adds none."""
    return [list(ids) for ids in tokenizer(list(texts), add_special_tokens=False)["input_ids"]]


Example = tuple[list[int], bytes]
"""Token ids of a text, and for each whether the model writes it (1) or is given it (0)."""


def encoded(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[Sequence[Piece]]) -> list[Example]:
    """Token ids of texts, encoded piece by piece."""
    ids = iter(encode(tokenizer, [piece.text for text in texts for piece in text]))
    examples = []
    for text in texts:
        found = [(next(ids), piece.own) for piece in text]
        whole = [token for part, _ in found for token in part]
        examples.append((whole, b"".join(bytes([own]) * len(part) for part, own in found)))
    return examples


def decode(tokenizer: "PreTrainedTokenizerBase", ids: Sequence[int], ends: Collection[int]) -> Completion:
    """Token ids after a prompt, up to the first end-of-turn token, as a completion.

    Special tokens inside the text stay visible: a reward must see all that the model wrote.
    """
    ids = list(ids)
    end = next((index for index, token in enumerate(ids) if token in ends), None)
    written = ids if end is None else ids[:end]
    text = str(tokenizer.decode(written, skip_special_tokens=False, clean_up_tokenization_spaces=False))
    if end is None:
        return Completion(text=text, stop="max_tokens", ids=tuple(ids))
    return Completion(text=text, stop="answered", ids=tuple(ids[: end + 1]))


def end_tokens(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> frozenset[int]:
    """The ids that end a turn: those the model declares and the tokenizer's own."""
    declared = model.generation_config.eos_token_id
    ids = [declared] if isinstance(declared, int) else list(declared or [])
    return frozenset([*ids, tokenizer.eos_token_id])


def spelt(
    tokenizer: "PreTrainedTokenizerBase",
    prompt: Sequence[Message],
    transcript: Transcript,
    thinking: bool,
    tools: Sequence[Mapping[str, Any]] = (),
    end: str = "",
) -> list[Piece]:
    """Prompt and transcript as pieces: the opening, a turn of the model with its `end`, the results of its calls, and
    so on. Piece by piece encoded, they are what a model is asked and would have written."""
    pieces = [Piece(render(tokenizer, prompt, thinking, tools), own=False)]
    is_opened = opens(tokenizer, thinking)
    for own, turns in groupby(transcript.messages, key=lambda message: message.role == "assistant"):
        if own:
            pieces += [Piece(write_turn(turn, thinking, is_opened=is_opened) + end, own=True) for turn in turns]
        else:
            pieces.append(Piece(results(tokenizer, list(turns), thinking), own=False))
    return pieces


def read_turn(text: str, is_opened: bool) -> Message:
    """The assistant turn that a completion's text is. Never raises, and loses nothing but tags and line ends.

    A turn has at most one think block, at its head, which the prompt opened (see `opens`), or else the model may. It
    reaches to the first closing tag, and without one there is no content. Tags anywhere else are content: a closing
    tag that nothing opened hides no answer before it, so that nobody answers twice and is read once. Calls of tools
    are left in the content.
    """
    if not is_opened and not text.lstrip().startswith(OPEN):
        return Message(role="assistant", content=text.lstrip("\n"), thinking=None)
    before, closed, after = text.partition(CLOSE)
    before = before if is_opened else before.lstrip().removeprefix(OPEN)
    return Message(role="assistant", content=after.lstrip("\n") if closed else "", thinking=before.strip("\n"))


def read_whole(text: str) -> Message:
    """The turn that a text from elsewhere is. A prompt may have opened its think block, so it may close what it did not
    open."""
    return read_turn(text, is_opened=CLOSE in text and not text.lstrip().startswith(OPEN))


def read_calls(turn: Message) -> Message:
    """The same turn with the calls that its content writes, in the notation of the Qwen and Hermes templates.

    A call reaches to the next closing tag, whatever is in between; content is what stands around the calls. Unless
    every call is closed and is JSON with a name, with arguments that are an object or absent, and with no key twice in
    an object, none is made and the content stays as it is: a turn with a malformed call does nothing. Never raises.
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
        # Infinity and half a character are JSON to Python, and can be written to no file.
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments")
    arguments = {} if arguments is None else arguments
    return Call(name=found["name"], arguments=arguments) if isinstance(arguments, dict) else None


def distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises ValueError if it has a key twice: which of the two values is meant, nobody can tell."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice")
    return found


def write_turn(message: Message, thinking: bool, *, is_opened: bool = True) -> str:
    """The completion's text that is read as this turn, without the end-of-turn token, after a prompt that opened the
    think block, or did not."""
    calls = [
        f"{CALL}\n{json.dumps({'name': call.name, 'arguments': call.arguments}, ensure_ascii=False)}\n{CALLED}"
        for call in message.calls
    ]
    answer = "\n".join([*([message.content] if message.content or not calls else []), *calls])
    head = "" if is_opened else f"{OPEN}\n"
    return f"{head}{message.thinking or ''}\n{CLOSE}\n\n{answer}" if thinking else answer
