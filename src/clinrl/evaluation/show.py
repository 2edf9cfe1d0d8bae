"""`clinrl show`: what a model did with a case of its exam, as a person would read it.

Everything comes from the graded answers that the exam kept and from the cases that it asked; no model is loaded. Of an
imported case neither the request nor what was thought about it was kept, and that is said in its place.
"""

import json
from collections.abc import Iterator, Sequence
from random import Random
from textwrap import wrap
from typing import TYPE_CHECKING

from pydantic import Field

from clinrl import paths
from clinrl.analysis.run import Run
from clinrl.config.model import Model
from clinrl.errors import ParamsError, did_you_mean
from clinrl.evaluation.answers import load_answers, open_run, read_graded
from clinrl.tasks import importing
from clinrl.tasks.base import names_of, parts_of
from clinrl.tasks.importing import is_imported
from clinrl.types import Call, Case, Graded, Message, Score, Stop, Strict, Unreadable

if TYPE_CHECKING:
    from clinrl.config.params import Params

WIDTH = 100
"""Characters of a line."""
STEP = "  "
WITHHELD = "Withheld: the case is imported, and of its text nothing was kept but the line with the answer."
ENDS: dict[Stop, str] = {
    "answered": "by itself",
    "max_tokens": "cut off: out of tokens",
    "max_turns": "cut off: out of turns",
    "tool_error": "cut off: a tool failed",
}


class Part(Strict):
    """One decision: what it was about, what was right, and what was decided."""

    about: str
    right: int | str
    decided: int | str | Unreadable

    @property
    def is_right(self) -> bool:
        """Whether it was decided as it should be."""
        return self.decided == self.right


class Episode(Strict):
    """What a model did with one case, and what came of it."""

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


def stage(
    params: "Params",
    name: str,
    episode: str | None,
    *,
    mode: str | None = None,
    random: int | None = None,
    wrong: int | None = None,
    as_json: bool = False,
) -> None:
    """Print episodes of the exam of a version, a merge or a base: one, or with `wrong` the first so many wrong ones.

    `episode` is a case id, the beginning of one, or a number in the order of the exam; None with `random`, the seed of
    a drawn one, or `wrong`. `mode` is one of params.yaml, the first by default. Raises ParamsError for a name, mode or
    episode that is not there, ArtefactError if the graded answers or the exam are missing, altered, or of another exam.
    """
    modes = list(params.modes)
    if mode is not None and mode not in modes:
        raise ParamsError(f"{mode!r} is no mode of params.yaml; {did_you_mean(mode, modes)}")
    mode = mode or modes[0]
    run = open_run(params, params.model(name))
    load_answers(run, mode, name)  # refuses answers to another exam
    graded = read_graded(paths.graded(name) / f"{mode}.jsonl")
    found = [
        read(run.model, run.cases[place], graded[place], number=place + 1, of=len(run.cases))
        for place in _places(run, graded, episode, random, wrong)
    ]
    if as_json:
        print(json.dumps([one.model_dump(mode="json") for one in found], indent=2, ensure_ascii=False))
    else:
        print("\n".join(written(one) for one in found), end="")


def _places(
    run: Run, graded: Sequence[Graded], episode: str | None, random: int | None, wrong: int | None
) -> list[int]:
    if random is not None:
        return [Random(random).randrange(len(run.cases))]
    if wrong is not None:
        return [i for i, line in enumerate(graded) if is_wrong(run.model, run.cases[i], line)][:wrong]
    return [place([case.id for case in run.cases], episode or "")]


def is_wrong(model: Model, case: Case, line: Graded) -> bool:
    """Whether an answer is not the gold label; an unreadable one never is."""
    return isinstance(line.answer, Unreadable) or bool(line.answer != model.task.label(case))


def place(ids: Sequence[str], episode: str) -> int:
    """The place, from 0, of a case id, of the beginning of one, or of a number from 1.

    Raises ParamsError if no case of the exam is meant, or more than one.
    """
    if episode.isdecimal():
        if not 1 <= int(episode) <= len(ids):
            raise ParamsError(f"there is no episode {episode}; the exam has those from 1 to {len(ids)}")
        return int(episode) - 1
    found = [i for i, name in enumerate(ids) if episode and name.startswith(episode)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise ParamsError(
            f"no case of the exam begins with {episode!r}; give a case id such as {ids[0]}, the beginning of one, or a "
            f"number from 1 to {len(ids)}"
        )
    some = ", ".join(ids[i] for i in found[:3])
    raise ParamsError(f"{len(found)} cases of the exam begin with {episode!r} ({some}{', ...' * (len(found) > 3)})")


def read(model: Model, case: Case, line: Graded, *, number: int, of: int) -> Episode:
    """The episode of a graded answer. Pure."""
    task, gold = model.task, model.task.label(case)
    withheld = is_imported(case)
    transcript = importing.withheld(task, case, line).transcript
    pairs = zip(names_of(task, gold), parts_of(task, gold, line.answer), strict=True)
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
        parts=tuple(Part(about=about, right=right, decided=given) for about, (right, given) in pairs),
        score=line.score,
    )


def written(episode: Episode) -> str:
    """The episode as text of at most `WIDTH` characters a line, unless a word is longer. Pure."""
    lines = [
        *_wrapped(
            f"{episode.name} on {episode.exam}, mode {episode.mode}: case {episode.case_id}, "
            f"{episode.number} of {episode.of}"
        ),
        *_wrapped("; ".join(f"{what} {value}" for what, value in episode.traits.items())),
        "",
        "Request",
        *([STEP + WITHHELD] if episode.withheld else _request(episode.request)),
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


def _request(messages: Sequence[Message]) -> Iterator[str]:
    """What was asked about this case. The system's part is the same for every case, and stays out."""
    for message in messages:
        if message.role == "user":
            yield from _wrapped(message.content, STEP)


def _turns(messages: Sequence[Message]) -> Iterator[str]:
    """The turns of the model, each with the answers to its calls."""
    number = 0
    waiting: list[Call] = []
    for message in messages:
        if message.role == "assistant":
            yield from _unanswered(waiting)
            number, waiting = number + 1, list(message.calls)
            yield f"Turn {number}"
            if message.thinking is not None:
                yield from _labelled("thinks", message.thinking or "(nothing)")
            if message.content:
                yield from _labelled("says", message.content)
            elif not message.calls:
                yield from _labelled("says", "(nothing)")
        else:
            if waiting:
                yield from _labelled("calls", call_text(waiting.pop(0)))
            yield from _labelled("", message.content, mark="-> ")
    yield from _unanswered(waiting)


def _unanswered(waiting: Sequence[Call]) -> Iterator[str]:
    for call in waiting:
        yield from _labelled("calls", call_text(call))
        yield from _labelled("", "(no answer)", mark="-> ")


def call_text(call: Call) -> str:
    """A call in one line."""
    arguments = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in call.arguments.items())
    return f"{call.name}({', '.join(arguments)})"


def _labelled(what: str, text: str, mark: str = "") -> Iterator[str]:
    """Text behind a word that says what it is; further lines stand below the first."""
    yield from _wrapped(text, STEP + " " * 8 + " " * len(mark), first=f"{STEP}{what:<8}{mark}")


def _decided(parts: Sequence[Part]) -> Iterator[str]:
    rows = [(part.about, _answer(part.decided), "right" if part.is_right else f"wrong: {part.right}") for part in parts]
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    for about, decided, verdict in rows:
        yield f"{STEP}{about:<{widths[0]}}  {decided:<{widths[1]}}  {verdict}"


def _answer(decided: int | str | Unreadable) -> str:
    return _plain(f"unreadable ({decided.reason})" if isinstance(decided, Unreadable) else str(decided))


def _score(score: Score) -> Iterator[str]:
    """The total, and the terms that are not zero."""
    terms = {name: value for name, value in score.terms.items() if value}
    width = max(map(len, terms), default=0)
    yield f"Score {score.total:.4f}" + ("" if terms else ", of no term")
    for name, value in terms.items():
        yield f"{STEP}{name:<{width}}  {value:+.4f}"


def _wrapped(text: str, indent: str = "", first: str | None = None) -> list[str]:
    """Lines of at most `WIDTH` characters; line breaks of the text stay. The first line begins with `first`."""
    lines: list[str] = []
    for line in text.split("\n"):
        head = first if first is not None and not lines else indent
        lines += wrap(
            _plain(line), WIDTH, initial_indent=head, subsequent_indent=indent, break_long_words=False,
            break_on_hyphens=False,
        ) or [head]  # fmt: skip
    return lines


def _plain(text: str) -> str:
    """The text with whatever does not print spelt out: a model may write what a terminal obeys."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text.replace("\t", " "))
