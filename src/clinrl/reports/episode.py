"""An episode as text for a person: the request, the model's turns, its decisions and its score.

The request and the reasoning of an imported case were not kept; the text says so in their place.
"""

import json
from collections.abc import Iterator, Sequence
from textwrap import wrap

from pydantic import Field

from clinrl.config.model import Model
from clinrl.reports.tables import plain
from clinrl.tasks import importing
from clinrl.tasks.base import parts_of
from clinrl.tasks.importing import is_imported
from clinrl.types import Call, Case, Graded, Message, Score, Stop, Strict, Unreadable

WIDTH = 100
"""Characters of a line."""
STEP = "  "
TURN, ANSWERED = "turn", "answered"
"""Kinds of step besides those of a turn itself (thinks, says, calls): a turn begins; a call returned."""
WITHHELD = "Withheld: the case is imported, and of its text nothing was kept but the line with the answer."
ENDS: dict[Stop, str] = {
    "answered": "by itself",
    "max_tokens": "cut off: out of tokens",
    "max_turns": "cut off: out of turns",
    "tool_error": "cut off: a tool failed",
}


class Part(Strict):
    """One decision: its subject, the right label, and the label that was given."""

    about: str
    right: int | str
    decided: int | str | Unreadable

    @property
    def is_right(self) -> bool:
        """Whether the right label was given."""
        return self.decided == self.right


class Episode(Strict):
    """One graded answer of a model, with its case and its score."""

    name: str
    exam: str
    mode: str
    number: int = Field(ge=1)
    """Place of the case in the exam, from 1."""
    of: int = Field(ge=1)
    """Cases of the exam."""
    case_id: str
    traits: dict[str, str]
    """The values of the task's slices."""
    withheld: bool
    """True for an imported case: its request is not here, and its turns hold the answer line alone."""
    request: tuple[Message, ...]
    messages: tuple[Message, ...]
    stop: Stop
    parts: tuple[Part, ...]
    score: Score


def episode_of(model: Model, case: Case, line: Graded, *, number: int, of: int) -> Episode:
    """The episode of a graded answer. Pure."""
    task, gold = model.task, model.task.label(case)
    withheld = is_imported(case)
    transcript = importing.redact(task, case, line).transcript
    return Episode(
        name=model.name,
        exam=model.exam,
        mode=line.mode,
        number=number,
        of=of,
        case_id=case.id,
        traits={what: value(case) for what, value in task.reporting.slices.items()},
        withheld=withheld,
        request=() if withheld else tuple(task.prompt(model.sees(case).facts)),
        messages=transcript.messages,
        stop=transcript.stop,
        parts=tuple(
            Part(about=about, right=right, decided=given)
            for about, (right, given) in parts_of(task, gold, line.answer).items()
        ),
        score=line.score,
    )


def write(episode: Episode, *, is_again: bool = False) -> str:
    """The episode as text of at most `WIDTH` characters a line, unless a word is longer. Pure.

    `is_again`: the case was shown in another mode, so its traits and the request are left out.
    """
    # The system message is the same for every case, so it is left out.
    asked = [line for one in episode.request if one.role == "user" for line in _wrapped(one.content, STEP)]
    shown = (
        *_wrapped("; ".join(f"{what} {value}" for what, value in episode.traits.items())),
        "",
        "Request",
        *([STEP + WITHHELD] if episode.withheld else asked),
    )
    lines = [
        *_wrapped(
            f"{episode.name} on {episode.exam}, mode {episode.mode}: case {episode.case_id}, "
            f"{episode.number} of {episode.of}"
        ),
        *(() if is_again else shown),
        "",
        *_turns(episode.messages),
        *_wrapped(f"The end: {ENDS[episode.stop]}."),
        "",
        "Decided",
        *_decided(episode.parts),
        "",
        *_score(episode.score),
    ]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _turns(messages: Sequence[Message]) -> Iterator[str]:
    """The lines for the turns of the model, each with the results of its calls."""
    for what, text in steps(messages):
        if what == TURN:
            yield f"Turn {text}"
        else:
            label = f"{STEP}{'':<8}-> " if what == ANSWERED else f"{STEP}{what:<8}"
            yield from _wrapped(text, " " * len(label), first=label)  # further lines begin in the same column


def steps(messages: Sequence[Message]) -> Iterator[tuple[str, str]]:
    """Kind and text of each step, in order: turn number, thoughts, text and calls of each turn, results of calls."""
    number = 0
    waiting: list[Call] = []
    for message in messages:
        if message.role == "assistant":
            yield from _unanswered(waiting)
            number, waiting = number + 1, list(message.calls)
            yield TURN, str(number)
            if message.thinking is not None:
                yield "thinks", message.thinking or "(nothing)"
            if message.content:
                yield "says", message.content
            elif not message.calls:
                yield "says", "(nothing)"
        else:
            if waiting:
                yield "calls", call_text(waiting.pop(0))
            yield ANSWERED, message.content
    yield from _unanswered(waiting)


def _unanswered(waiting: Sequence[Call]) -> Iterator[tuple[str, str]]:
    for call in waiting:
        yield "calls", call_text(call)
        yield ANSWERED, "(no answer)"


def call_text(call: Call) -> str:
    """A call in one line."""
    arguments = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in call.arguments.items())
    return f"{call.name}({', '.join(arguments)})"


def _decided(parts: Sequence[Part]) -> Iterator[str]:
    rows = [
        (part.about, answer_text(part.decided), "right" if part.is_right else f"wrong: {part.right}") for part in parts
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    for about, decided, verdict in rows:
        yield f"{STEP}{about:<{widths[0]}}  {decided:<{widths[1]}}  {verdict}"


def answer_text(decided: int | str | Unreadable) -> str:
    """An answer in one line for a terminal: the label, or why the answer is unreadable."""
    return plain(decided_text(decided))


def decided_text(decided: int | str | Unreadable) -> str:
    """An answer as text: the label, or why the answer is unreadable. Unprintable characters stay."""
    return f"unreadable ({decided.reason})" if isinstance(decided, Unreadable) else str(decided)


def _score(score: Score) -> Iterator[str]:
    """The lines for the total, and for the terms that are not zero."""
    terms = {name: value for name, value in score.terms.items() if value}
    width = max(map(len, terms), default=0)
    yield f"Score {score.total:.4f}" + ("" if terms else ", of no term")
    for name, value in terms.items():
        yield f"{STEP}{name:<{width}}  {value:+.4f}"


def _wrapped(text: str, indent: str = "", first: str | None = None) -> list[str]:
    """Lines of at most `WIDTH` characters; line breaks of the text stay. The first line begins with `first`."""
    lines: list[str] = []
    for line in text.replace("\t", " ").split("\n"):
        head = first if first is not None and not lines else indent
        lines += wrap(
            plain(line), WIDTH, initial_indent=head, subsequent_indent=indent, break_long_words=False,
            break_on_hyphens=False,
        ) or [head]  # fmt: skip
    return lines
