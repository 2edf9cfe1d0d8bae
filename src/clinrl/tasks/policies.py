"""Policies that answer without reading, and a mediocre reader: every reward must pay a real reader more."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from clinrl.types import Message, Stop, Transcript

if TYPE_CHECKING:
    from clinrl.tasks.base import Task

Policy = Callable[[Any, Random], Transcript]

RIGHT = 0.6
"""The share of cases that the mediocre reader answers correctly."""
SIMPLE = ("random", "prior-matched", "bag of words")
"""The rows of `analysis.baselines` that are named alike in every task of one turn."""


def write_answer(content: str, thinking: str | None = None, stop: Stop = "answered") -> Transcript:
    """A transcript of one turn."""
    return Transcript(messages=(Message(role="assistant", content=content, thinking=thinking),), stop=stop)


def bare_answers(task: "Task", cases: Iterable[Any]) -> dict[Any, str]:
    """By label, the last line of the gold turn of the first case with it, or the whole turn if that line alone is
    another answer. Raises TypeError if none of the cases has some label."""
    written: dict[Any, str] = {}
    for case in cases:
        if (label := task.label(case)) not in written:
            turn = task.gold(case, thinking=False).messages[-1].content
            line = turn.strip().rpartition("\n")[2]
            written[label] = line if task.parse(write_answer(line)) == label else turn
        if len(written) == len(task.labels):
            return written
    missing = next(label for label in task.labels if label not in written)
    raise TypeError(
        f"none of the cases of {task.name} that were looked at has the label {missing!r}; give it `policies`"
    )


def lazy_policies(
    labels: Sequence[Any],
    write: Callable[[Any], str],
    gold: Callable[[Any], Any],
    *,
    priors: Mapping[str, Mapping[Any, float]] = MappingProxyType({}),
    hedge: str | None = None,
    truncated: Transcript | None = None,
    near: Callable[[Any], Sequence[Any]] | None = None,
) -> dict[str, Policy]:
    """Policies by name: a constant for each label, guesses, a hedge, silence, an answer cut off, and "mediocre".

    `write` gives the text of an answer, `gold` the label of a case, `priors` label weights by the name of their mix,
    and `near` the labels with which the mediocre reader confuses a label, by default all others.
    """

    def always(label: Any) -> Policy:
        return lambda case, rng: write_answer(write(label))

    def drawn(weights: Mapping[Any, float]) -> Policy:
        known, shares = zip(*weights.items(), strict=True)
        return lambda case, rng: write_answer(write(rng.choices(known, shares)[0]))

    def mediocre(case: Any, rng: Random) -> Transcript:
        label = gold(case)
        if rng.random() >= RIGHT:
            label = rng.choice([other for other in labels if other != label] if near is None else near(label))
        return write_answer(write(label))

    hedged = f"{write(labels[0])} or {write(labels[1])}" if hedge is None else hedge
    cut = write_answer(write(labels[0])[:4], stop="max_tokens") if truncated is None else truncated
    return {
        **{f"always_{label}": always(label) for label in labels},
        "random": drawn(dict.fromkeys(labels, 1.0)),
        **{f"prior_{mix}": drawn(weights) for mix, weights in priors.items()},
        "hedge": lambda case, rng: write_answer(hedged),
        "empty": lambda case, rng: write_answer(""),
        "truncated": lambda case, rng: cut,
        "mediocre": mediocre,
    }
