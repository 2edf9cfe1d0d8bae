"""What a task is: one folder under `clinrl/tasks` that exports `TASK`.

A task's name is its folder's name; importing the folder is the look-up. Everything a stage needs to know about a
task's medicine, prompts and rewards is here, so that adding a task touches no shared module.
"""

import hashlib
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import BaseModel

from clinrl.types import Case as AnyCase
from clinrl.types import Message, Pool, Score, Transcript, Unreadable

if TYPE_CHECKING:
    from clinrl.tasks.importing import Source


GIVEN = "given"
"""The view of a case as it is."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """A metric that is a share of cases. `of(gold, answer)` is None for cases outside the denominator."""

    of: Callable[[Any, Any], bool | None]
    worse: str
    """Which direction is worse: "higher" or "lower"."""


@dataclass(frozen=True, kw_only=True)
class Statistic:
    """A metric over all golds and answers at once; its interval is a seeded bootstrap over cases."""

    of: Callable[[Sequence[Any], Sequence[Any]], float]
    worse: str
    readable_only: bool = True
    """False: `of` is given the unreadable answers too, and counts them, as errors where it counts errors."""


@dataclass(frozen=True)
class Ask:
    """What a reward or a measure wants to hear from a model: equal asks have one answer."""

    model: Literal["encoder", "judge", "second_judge"]
    text: str
    """What is embedded, or the whole prompt of a judge."""


Heard = Mapping[Ask, Any]
"""What the models answered: a float32 unit vector of the encoder, the very text that a judge wrote."""

NOTHING_HEARD: Heard = MappingProxyType({})


def no_asks(case: AnyCase, transcript: Transcript) -> Sequence[Ask]:
    """For a measure that asks no model."""
    return ()


@dataclass(frozen=True, kw_only=True)
class Quality:
    """A mean over cases of something that is measured on the whole transcript, not on the answer alone."""

    of: Callable[[Any, Transcript, Heard], float | None]
    """In [0, 1], or from 0 on if `counts`; None for a case outside the denominator. `heard` holds the answers to
    `asks`."""
    worse: str
    """Which direction is worse: "higher" or "lower"."""
    asks: Callable[[Any, Transcript], Sequence[Ask]] = no_asks
    counts: bool = False
    """It is a number of things, not a share of them."""


@dataclass(frozen=True, kw_only=True)
class Expect:
    """One Great Expectations rule as plain data: the expectation's class name and its arguments."""

    type: str
    arguments: Mapping[str, Any]
    on: str = "rows"
    """"rows": checked on the table of cases (`Task.row`). "summary": checked on the one-row table of shares."""
    of: str = "all"
    """"all" data sets, "drawn" ones alone, or "imported" ones alone."""


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """What somebody published about a system on an exam of their own."""

    name: str
    hits: Mapping[str, int]
    """Share of the task's metrics to the count of cases that it holds for."""
    statistics: Mapping[str, float]
    """Statistic of the task's metrics to its published value."""
    source: str
    """Where the numbers come from, and how they were read."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """Published results on one and the same exam."""

    exam: str
    labels: Mapping[Any, int]
    """How many of its cases have each gold label."""
    rows: Sequence[PublishedRow]


@dataclass(frozen=True, kw_only=True)
class PublishedProtocol:
    """How somebody else evaluated this task, what they reached, and what an exam of it is judged by here."""

    mix: str
    """The mix that their episodes are drawn from."""
    by: str
    """The slice whose values are reported one by one."""
    levels: tuple[str, ...]
    """Its values, the easiest first."""
    theirs: BaseModel
    """The reward that they scored with."""
    ours: BaseModel
    """The reward that stands beside it."""
    quality: str
    """The quality that an exam is judged by; it asks no model."""
    statistic: str
    """A statistic of the task that is shown beside it."""
    printed: Mapping[str, Mapping[str, float]]
    """Who they examined to the score that they printed, by level."""
    source: str
    """Where the figures come from, and why they are not comparable."""


class Task(Protocol):
    """The contract of a task folder's `TASK`. `tests/tasks/test_contract.py` checks every folder against it."""

    name: str
    version: int
    """Raise it whenever prompts, rules, rewards or cases change meaning; a golden file guards it."""
    Case: type[AnyCase]
    Reward: type[BaseModel]
    """Every number of the reward; unknown terms are refused. Has `low` and `high`, the declared range of a total."""
    labels: tuple[Any, ...]
    """The possible answers, in order of urgency."""
    rules: tuple[str, ...]
    """Rule ids that decide labels; the names that `omit` may use."""
    mixes: tuple[str, ...]
    """Names of the class mixes that `cases` can draw."""
    metrics: Mapping[str, Share | Statistic]
    qualities: Mapping[str, Quality]
    """Measures of whole transcripts, reported beside the metrics; no name is in both."""
    headline: tuple[str, ...]
    """What a summary shows, in order: names of `metrics` and `qualities`, and `no_parse` and `clipped`."""
    row_metrics: tuple[str, ...]
    """Names of `metrics` that a row of the comparison table shows."""
    form_metrics: tuple[str, ...]
    """The shares among `metrics` that a person sees who is asked to approve a version, `exact` first."""
    slice_measures: tuple[str, ...]
    """What each slice shows, `exact` and `dangerous` first: metrics, and qualities that ask no model."""
    views: Mapping[str, Callable[[AnyCase], AnyCase | None]]
    """Other ways to show a case, by name: the case with other `facts`, and the reasons that then are gold, but the same
    id, group and label; or None where it has no such view. The case as it is, `given`, is never among them."""
    cluster: Callable[[AnyCase], str] | None
    """What cases have in common that makes their answers alike, for intervals; None: each case is by itself."""
    slices: Mapping[str, Callable[[AnyCase], str]]
    """What cases are grouped by: `rule`, the id of the rule that decided the gold label, and others."""
    triggers: Mapping[str, Callable[[AnyCase], bool]]
    """Findings that a reader may miss, as the text shows them, by the name of their rule."""
    expectations: Sequence[Expect]
    published: Published | None
    """What others reached on an external exam."""
    protocol: PublishedProtocol | None
    """How others evaluated a task that is played in an environment; None: nobody did."""
    terms: tuple[str, ...]
    """Names of all reward terms, as they appear in scores, logs and reports."""

    environment: Callable[[], Any] | None
    """What a case of several turns is played in, or None for a task of one turn: a plain class without arguments. Its
    `reset(case)` takes a case, or its JSON, and keeps the facts alone; its other public methods are the tools."""
    turns: int
    """The most turns that the model may take, 1 or more."""

    def cases(
        self, n: int, seed: int, *, pool: Pool, mix: str, emphasis: Mapping[str, float] = MappingProxyType({})
    ) -> Iterator[AnyCase]:
        """`n` distinct cases of one pool, lazily, the same for the same arguments in any process.

        `emphasis`: rule to how many times as often it decides a case as it does in the mix.
        """

    def recognise(self, path: Path) -> "Source":
        """The records that lie at a path, to be imported. Raises DataError, saying what is expected, for others."""

    def pool_of(self, group: str) -> Pool:
        """The pool of a template, by its name alone: its hash, or for an imported case what it names."""

    def case_id(self, facts: Any, key: Any) -> str:
        """The content hash that must be the case's id."""

    def omittable(self, case: AnyCase) -> tuple[str, ...]:
        """The rules whose omission changes this case's label."""

    def prompt(self, facts: Any) -> list[Message]:
        """System and user turn. Sees `facts` alone."""

    def gold(self, case: AnyCase, *, thinking: bool, omit: frozenset[str] = frozenset()) -> Transcript:
        """What a reader does who knows every rule except `omit`. With none omitted: the best answer."""

    def label(self, case: AnyCase) -> Any:
        """The gold label."""

    def relabel(self, case: AnyCase) -> Any:
        """The label recomputed from the latent facts by the rules, never read from the case."""

    def parse(self, transcript: Transcript) -> Any | Unreadable:
        """The label that a transcript commits to: its last turn, or the decisions in all of them. Never raises on
        model text."""

    def parts(self, gold: Any, answer: Any | Unreadable) -> Sequence[tuple[Any, Any | Unreadable]]:
        """Right and given label, each one of `labels`: the two themselves, or those of each decision of an episode."""

    def part_names(self, gold: Any) -> Sequence[str]:
        """What each of `parts` is about, in their order."""

    def oracles(self, reward: Any) -> tuple[str, ...]:
        """The models, of those that an `Ask` names, that this reward asks: part of what a training follows from."""

    def asks(self, case: AnyCase, transcript: Transcript, reward: Any) -> Sequence[Ask]:
        """What `score` wants to hear about this transcript. Pure."""

    def score(self, case: AnyCase, transcript: Transcript, reward: Any, heard: Heard = NOTHING_HEARD) -> Score:
        """The reward, where `heard` holds the answers to `asks`, of other asks too.

        Pure. Raises only on a malformed case, never on model text.
        """

    def lessons(self, judge: str, n: int, seed: int) -> Iterator[tuple[str, str]]:
        """`n` pairs of a prompt to a judge and the right reply: what an embedded judge learns. Nothing: no judges."""

    def refine(self, reward: Any, rules: Sequence[str]) -> Any:
        """The reward with a term more for each of these missed rules that it can have one for.

        What it pays otherwise, and that silence is the worst outcome, stays as it is or becomes so. The same reward if
        none of the rules has a term, or each has it already.
        """

    def cost(self, gold: Any, answer: Any | Unreadable) -> float:
        """What an answer would cost a patient, 0 for the gold label and above 0 for any other, unreadable included."""

    def policies(self) -> Mapping[str, Callable[[AnyCase, Random], Transcript]]:
        """Lazy policies by name (constants, random, hedging, empty, truncated, prior-matched), and "mediocre".

        The mediocre reader must earn more than each of them.
        """

    def row(self, case: AnyCase) -> dict[str, Any]:
        """A flat row of the case for the table of expectations."""


def seen(task: Task, case: AnyCase, view: str) -> AnyCase:
    """The case as a view shows it; as given, where it has no such view."""
    shown = None if view == GIVEN else task.views[view](case)
    return case if shown is None else shown


def pool_by_hash(name: str, shares: Mapping[Pool, int]) -> Pool:
    """The pool of a template by the hash of its name: the same for any seed, data set and machine."""
    return pool_at(int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 100, shares)


def pool_at(percent: int, shares: Mapping[Pool, int]) -> Pool:
    """The pool into whose share a percentage, 0 to 99, falls. The shares are percentages and sum to 100."""
    for pool, share in shares.items():
        if percent < share:
            return pool
        percent -= share
    raise AssertionError("pool shares do not sum to 100")


def get_task(name: str) -> Task:
    """The task in folder `clinrl/tasks/<name>`. Raises KeyError with the names that exist."""
    if name not in task_names():
        raise KeyError(f"no task {name!r}; tasks are {', '.join(task_names())}")
    task: Task = importlib.import_module(f"clinrl.tasks.{name}").TASK
    return task


def task_names() -> tuple[str, ...]:
    """The names of all task folders, sorted."""
    return _names_in(tuple(importlib.import_module("clinrl.tasks").__path__))


@cache
def _names_in(folders: tuple[str, ...]) -> tuple[str, ...]:
    """Looked up once: params.yaml may name hundreds of versions."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(folders) if module.ispkg))
