"""OpenAI's chat completions, as far as they are served: the fields of a request, and the form of an answer.

Names of fields are OpenAI's, but for vLLM's `chat_template_kwargs` and `reasoning`. Other fields are refused: if one
were ignored in silence, the answer would be to another question.
"""

import json
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import AfterValidator, ConfigDict, Field, ValidationError, model_validator
from starlette.responses import JSONResponse

from clinrl.models.chat import CLOSE, OPEN
from clinrl.types import Message, Strict

MAX_TURNS = 64
COLDEST = 0.01
"""The lowest temperature above 0: division by less makes scores that are no numbers."""


class RequestPart(Strict):
    """A part of a request. Text is never converted to a number. Null means absent, of any field."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, part: Any) -> Any:
        return {key: value for key, value in part.items() if value is not None} if isinstance(part, dict) else part


class Text(RequestPart):
    type: Literal["text"]
    text: str


class Turn(RequestPart):
    role: Literal["system", "user", "assistant"]
    content: str | list[Text]
    reasoning: str | None = None
    """As in an answer that comes back as history; a prompt has content alone, as in training."""

    @property
    def message(self) -> Message:
        parts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content]
        return Message(role=self.role, content="\n".join(parts))


class TemplateOptions(RequestPart):
    enable_thinking: bool


class StreamOptions(RequestPart):
    include_usage: bool = False


def _computable(temperature: float | None) -> float | None:
    if temperature is not None and 0 < temperature < COLDEST:
        raise ValueError(f"must be 0, or from {COLDEST} to 2")
    return temperature


class ChatRequest(RequestPart):
    """The body of a request."""

    model: str
    messages: list[Turn] = Field(min_length=1, max_length=MAX_TURNS)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    """The former name of `max_completion_tokens`."""
    temperature: Annotated[float | None, Field(ge=0, le=2), AfterValidator(_computable)] = None
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    n: Literal[1] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    chat_template_kwargs: TemplateOptions | None = None

    @property
    def most(self) -> int | None:
        """The most tokens that an answer may have by the request; None: it leaves that open."""
        return min((n for n in (self.max_completion_tokens, self.max_tokens) if n is not None), default=None)

    @property
    def thinking(self) -> bool | None:
        """Whether the request asks for thinking; None: it leaves that open."""
        return None if self.chat_template_kwargs is None else self.chat_template_kwargs.enable_thinking


class Refusal(Exception):
    """A request that is not answered, with the status and the reason."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code


BUSY = {429: "1", 503: "5"}
"""Seconds after which a client may ask again, by status."""


def error(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body of a refusal, in the form that OpenAI's clients read."""
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def refused(status: int, message: str, param: str | None = None, code: str | None = None) -> JSONResponse:
    """The HTTP response of a refusal."""
    headers = {"Retry-After": BUSY[status]} if status in BUSY else None
    return JSONResponse(error(status, message, param, code), status, headers)


def read(body: bytes) -> ChatRequest:
    """Parse the body of a request. Raises Refusal, which does not quote the request."""
    try:
        return ChatRequest.model_validate_json(body)
    except ValidationError as invalid:
        first = invalid.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(map(str, first["loc"]))[:80]
    if first["type"] == "extra_forbidden":
        raise Refusal(400, f"{where} is not supported by this server", param=where, code="unsupported_parameter")
    raise Refusal(400, f"{where or 'the body'}: {first['msg'][:200]}", param=where or None)


def settled(text: str, is_opened: bool) -> Message:
    """The part of an unfinished turn that stays, however the model goes on with `text`."""
    text = text.rstrip("\ufffd")  # of half a character
    if not is_opened:
        head = text.lstrip()
        if not head.startswith(OPEN):
            return Message(role="assistant", content="" if OPEN.startswith(head) else text.lstrip("\n"))
        text = head.removeprefix(OPEN)
    before, closed, after = text.partition(CLOSE)
    if not closed:
        begun = next((size for size in range(len(CLOSE) - 1, 0, -1) if before.endswith(CLOSE[:size])), 0)
        before = before[: len(before) - begun]
    return Message(role="assistant", content=after.lstrip("\n"), thinking=before.strip("\n"))


class Answer:
    """One answer in progress: its identifiers, and the events of its stream."""

    def __init__(self, model: str, fingerprint: str, prompt_tokens: int) -> None:
        self._names = {"id": f"chatcmpl-{uuid4().hex}", "created": int(time.time()), "model": model}
        self._names["system_fingerprint"] = fingerprint
        self._prompt_tokens = prompt_tokens
        self._sent = {"reasoning": "", "content": ""}

    @property
    def id(self) -> str:
        """The id under which the client may send the label of this answer later."""
        return str(self._names["id"])

    def whole(self, turn: Message, stop: str, tokens: int) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        message = {"role": "assistant", "content": turn.content, "refusal": None}
        message |= {} if turn.thinking is None else {"reasoning": turn.thinking}
        choice = {"index": 0, "message": message, "finish_reason": _reason(stop), "logprobs": None}
        return {**self._names, "object": "chat.completion", "choices": [choice], "usage": self._usage(tokens)}

    def begin(self) -> bytes:
        """The first event."""
        return self._chunk({"role": "assistant", "content": ""})

    def more(self, turn: Message) -> Iterator[bytes]:
        """The events for the part of a turn that was not sent yet."""
        for name, text in {"reasoning": turn.thinking or "", "content": turn.content}.items():
            if len(text) > len(self._sent[name]) and text.startswith(self._sent[name]):
                yield self._chunk({name: text[len(self._sent[name]) :]})
                self._sent[name] = text

    def end(self, turn: Message, stop: str, tokens: int, *, with_usage: bool) -> Iterator[bytes]:
        """The last events, of a whole turn. Raises Refusal if it does not begin with what was sent."""
        yield from self.more(turn)
        if self._sent != {"reasoning": turn.thinking or "", "content": turn.content}:  # by a batch without room
            raise Refusal(500, "the answer could not be written")
        yield self._chunk({}, _reason(stop))
        if with_usage:
            yield event({**self._names, "object": CHUNK, "choices": [], "usage": self._usage(tokens)})
        yield b"data: [DONE]\n\n"

    def _chunk(self, delta: Mapping[str, str], reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}
        return event({**self._names, "object": CHUNK, "choices": [choice]})

    def _usage(self, tokens: int) -> dict[str, int]:
        total = self._prompt_tokens + tokens
        return {"prompt_tokens": self._prompt_tokens, "completion_tokens": tokens, "total_tokens": total}


CHUNK = "chat.completion.chunk"


def event(body: Mapping[str, Any]) -> bytes:
    """A server-sent event."""
    return f"data: {json.dumps(body)}\n\n".encode()


def _reason(stop: str) -> str:
    return "stop" if stop == "answered" else "length"
