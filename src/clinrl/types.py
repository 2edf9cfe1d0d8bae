"""The records that every stage passes on: frozen, strict, and the same for all tasks.

A `Case` keeps what the model may see (`facts`) apart from what only a scorer may see (`key`), so a prompt builder that
is given `facts` cannot leak the answer by accident. An answer that could not be read is its own type, never a class.
"""

import math
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Pool = Literal["base", "train", "mine", "exam"]
"""The use that a case is reserved for: building the embedded base, training, error analysis, or the exam.

A group never changes its pool.
"""

Stop = Literal["answered", "max_tokens", "max_turns", "tool_error"]
"""Why a transcript ended. Running out of tokens is never confused with a wrong answer."""


class Strict(BaseModel):
    """Frozen; unknown fields, NaN and infinity are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Case(Strict):
    """One immutable vignette. Tasks subclass it with their own `facts` and `key`."""

    id: str = Field(pattern=r"^[a-z][a-z0-9_]*-[0-9a-f]{16}$")
    """Content hash of facts and key, prefixed with the task: equal cases have equal ids."""
    group: str = Field(min_length=1)
    """The template the case grew from. All cases of a group are in one pool."""
    facts: Any
    """What the model may see."""
    key: Any
    """What only the scorer may see."""


class Call(Strict):
    """A tool call of a turn, as the model wrote it: its name and arguments need not fit any tool."""

    name: str
    arguments: dict[str, Any]


CALL: Final = "<tool_call>"
"""The text with which a tool call begins in a turn."""


class Message(Strict):
    """One turn. `thinking` is the text inside the think block, kept apart from the rest of the turn."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    thinking: str | None = None
    """None: no think block in this turn. An unclosed block leaves `content` empty."""
    calls: tuple[Call, ...] = Field(default=(), exclude_if=lambda calls: not calls)
    """The tools that an assistant turn calls, in order. Their results follow as turns of the role `tool`."""


SILENT: Final = Message(role="assistant", content="")


def is_malformed(turn: Message) -> bool:
    """Whether a turn tried to call a tool and made no call."""
    return CALL in turn.content and not turn.calls


class Transcript(Strict):
    """A model's turns on one case, after the prompt, and why they ended."""

    messages: tuple[Message, ...]
    stop: Stop


def transcript_of(turn: Message, stop: Stop = "answered") -> Transcript:
    """The transcript of a single turn."""
    return Transcript(messages=(turn,), stop=stop)


def last_turn(transcript: Transcript) -> Message:
    """The last turn of the model; an empty turn, which is unreadable, if there is none."""
    return next((turn for turn in reversed(transcript.messages) if turn.role == "assistant"), SILENT)


class Unreadable(Strict):
    """The outcome of parsing a turn that holds no single valid answer. Never a class, never a plain zero."""

    reason: str


class Score(Strict):
    """A reward and its terms: signed contributions that sum to the total."""

    terms: dict[str, float]
    total: float

    @model_validator(mode="after")
    def _sums(self) -> "Score":
        if not math.isclose(math.fsum(self.terms.values()), self.total, abs_tol=1e-9):
            raise ValueError(f"terms {self.terms} do not sum to the total {self.total}")
        return self


class Graded(Strict):
    """One case answered in one mode, parsed and scored. One line of a graded JSONL file."""

    case_id: str
    mode: str
    answer: int | str | Unreadable
    score: Score
    transcript: Transcript


class Estimate(Strict):
    """A number with its 95% interval and the count of cases behind it. NaN-free: an undefined value is not reported."""

    value: float
    low: float
    high: float
    n: int = Field(ge=0)


class Manifest(Strict):
    """What determines an artefact, and the digests of its files.

    It holds no times, no hosts and no run ids: equal inputs, equal bytes.
    """

    kind: Literal["base", "cases", "adapter", "merged", "graded"]
    name: str
    task: str
    task_version: int
    spec: dict[str, Any]
    """The part of params.yaml that determined the artefact, as parsed."""
    inputs: dict[str, str]
    """Digest of each input artefact, by its name: the manifest digest of a directory, or the SHA-256 of a file."""
    files: dict[str, str]
    """SHA-256 of each file beside the manifest, by its relative path."""
