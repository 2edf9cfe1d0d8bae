"""What a task is: one folder under `clinrl/tasks` that exports `TASK`.

A task's name is its folder's name; importing the folder is the look-up. Everything a stage needs to know about a
task's medicine, prompts and rewards is here, so that adding a task touches no shared module. Twelve members are
required; every other is a part of `parts` with a default that works.
"""

import hashlib
import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel

from clinrl.artifacts import digest
from clinrl.errors import DataError
from clinrl.tasks.parts import (
    NO_PARSE,
    Benchmark,
    Checks,
    Episodes,
    Improvement,
    Judged,
    Ordered,
    Published,
    Reporting,
    Safety,
    Share,
    Statistic,
)
from clinrl.tasks.policies import Policy, lazy_policies
from clinrl.types import Case as AnyCase
from clinrl.types import Message, Pool, Score, Transcript, Unreadable

if TYPE_CHECKING:
    from clinrl.tasks.importing import Source


EXACT = "exact"
"""The metric that every task has: the share of right answers."""
GIVEN = "given"
"""The variant of a case that shows it as it is."""
POOL_SHARE: Mapping[Pool, int] = {"base": 40, "train": 25, "mine": 15, "exam": 20}
"""Percentage of templates in each pool."""
FORM = ("no_parse", "clipped")
"""Measures of every report, after the task's own: answers that cannot be read, and those that were cut off."""


class Task(ABC):
    """The contract of a task folder's `TASK`. `tests/tasks/test_contract.py` checks every folder against it."""

    name: ClassVar[str]
    version: ClassVar[int]
    """Raise it whenever prompts, rules, rewards or cases change meaning; a golden file guards it."""
    Case: ClassVar[type[AnyCase]]
    Reward: ClassVar[type[BaseModel]]
    """Every number of the reward; unknown terms are refused. Has `low` and `high`, the declared range of a total."""
    labels: ClassVar[tuple[Any, ...]]
    """The possible answers, in their order."""
    metrics: ClassVar[Mapping[str, Share | Statistic]]
    """`exact`, the share of right answers, is among them."""

    checks: ClassVar[Checks] = Checks()
    reporting: ClassVar[Reporting] = Reporting()
    safety: ClassVar[Safety] = Safety()
    improvement: ClassVar[Improvement] = Improvement()
    ordered: ClassVar[Ordered | None] = None
    """None: the answers have no order, or are given in several turns."""
    episodes: ClassVar[Episodes | None] = None
    """None: a task of one turn."""
    judged: ClassVar[Judged | None] = None
    """None: the reward needs no other model."""
    published: ClassVar[Published | None] = None
    """What others reached on an external exam."""
    benchmark: ClassVar[Benchmark | None] = None
    """How others evaluated a task that is played in an environment; None: nobody did."""

    def __init_subclass__(cls) -> None:
        """Fill in what reports show where the task leaves it open: all there is, in the order of `metrics`."""
        super().__init_subclass__()
        given, shares = cls.reporting, [name for name, of in cls.metrics.items() if isinstance(of, Share)]
        worse = [name for name, of in cls.metrics.items() if of.worse == "higher"]
        cls.safety = replace(cls.safety, metric=cls.safety.metric or next(iter(worse), next(iter(cls.metrics))))
        cls.reporting = replace(
            given,
            headline=given.headline or (*cls.metrics, *given.qualities, *FORM),
            external=given.external or (*cls.metrics, FORM[0]),
            row_metrics=given.row_metrics or tuple(cls.metrics),
            approval=given.approval or tuple(shares),
            slice_measures=given.slice_measures or tuple(dict.fromkeys((EXACT, cls.safety.metric))),
        )

    @property
    def all_metrics(self) -> Mapping[str, Share | Statistic]:
        """`metrics`, and the share of unreadable answers, which every task has."""
        return {**self.metrics, FORM[0]: NO_PARSE}

    @property
    def compared(self) -> Mapping[str, Share | Statistic]:
        """The shares that every paired test and every slice is about: right answers first, then what must not be."""
        return {name: self.metrics[name] for name in dict.fromkeys((EXACT, self.safety.metric))}

    @property
    def asks(self) -> Judged:
        """`judged`, or what stands for it where the reward needs no other model."""
        return self.judged or Judged(
            models=lambda reward: (),
            requests=lambda case, transcript, reward: (),
            score=lambda case, transcript, reward, responses: self.score(case, transcript, reward),
        )

    @property
    def shares_threads(self) -> bool:
        """Whether fewer threads leave all bytes as they are: torch splits the sums of long episodes between threads."""
        return self.episodes is None

    def is_share(self, measure: str) -> bool:
        """Whether a measure of a report is a share: neither a statistic nor a quality that counts."""
        quality = self.reporting.qualities.get(measure)
        return not (isinstance(self.metrics.get(measure), Statistic) or (quality is not None and quality.counts))

    def called(self, metric: str) -> str:
        """What a page calls the cases of a compared share."""
        nouns = {EXACT: "exact answers", self.safety.metric: self.safety.errors or self.safety.metric}
        return nouns.get(metric, metric)

    @abstractmethod
    def cases(
        self, n: int, seed: int, *, pool: Pool, mix: str, emphasis: Mapping[str, float] = MappingProxyType({})
    ) -> Iterator[AnyCase]:
        """`n` distinct cases of one pool, lazily, the same for the same arguments in any process.

        `emphasis`: rule to how many times as often it decides a case as it does in the mix. A task with
        `checks.editions` takes `edition` too, one of these, or "" for the newest.
        """

    @abstractmethod
    def prompt(self, facts: Any) -> list[Message]:
        """System and user turn. Sees `facts` alone."""

    @abstractmethod
    def gold(self, case: Any, *, thinking: bool, omit: frozenset[str] = frozenset()) -> Transcript:
        """What a reader does who knows every rule except `omit`. With none omitted: the best answer."""

    @abstractmethod
    def label(self, case: Any) -> Any:
        """The gold label."""

    @abstractmethod
    def parse(self, transcript: Transcript) -> Any | Unreadable:
        """The label that a transcript commits to: its last turn, or the decisions in all of them. Never raises on
        model text."""

    @abstractmethod
    def score(self, case: Any, transcript: Transcript, reward: Any) -> Score:
        """The reward, its terms always the same and in the same order.

        Pure. Raises only on a malformed case, never on model text. Where `judged` is set, only a reward that needs no
        model can be scored by this.
        """

    def pool_of(self, group: str) -> Pool:
        """The pool of a group, by its name alone; by default its first part."""
        return group.split("/")[0]  # type: ignore[return-value]  # validation compares it with the pool of the data set

    def omittable(self, case: Any) -> tuple[str, ...]:
        """The rules whose omission changes a case's label."""
        return ()

    def relabel(self, case: Any) -> Any:
        """The label recomputed from the latent facts by the rules; by default the one that the case has."""
        return self.label(case)

    def row(self, case: Any) -> dict[str, Any]:
        """A flat row of a case for `checks.expectations`; by default id, group, label, text and the plain facts."""
        plain = {name: value for name, value in case.facts if isinstance(value, bool | int | float | str | None)}
        text = "\n".join(message.content for message in self.prompt(case.facts) if message.role == "user")
        return {"id": case.id, "group": case.group, "label": self.label(case), self.checks.text: text} | plain

    def recognise(self, path: Path) -> "Source":
        """The records that lie at a path, to be imported. Raises DataError, saying what is expected, for others; by
        default for any."""
        raise DataError(f"{path}: cases of {self.name} must be drawn; no file of them can be imported")

    def policies(self) -> Mapping[str, Policy]:
        """Lazy policies by name (constants, random, prior-matched, hedging, empty, truncated), and "mediocre".

        The mediocre reader must earn more than each of them. By default an answer is written as the gold turn of the
        first case with that label.
        """
        written: dict[Any, str] = {}
        for case in self.cases(1_000, 0, pool="base", mix=self.checks.mixes[0]):
            if (label := self.label(case)) not in written:
                written[label] = self.gold(case, thinking=False).messages[-1].content
            if len(written) == len(self.labels):
                break
        return lazy_policies(self.labels, written.__getitem__, self.label)


def content_id(name: str, facts: BaseModel, key: BaseModel) -> str:
    """The id of a case: its task, and a hash of all that it holds."""
    return f"{name}-{digest([facts.model_dump(mode='json'), key.model_dump(mode='json')])[:16]}"


def is_sound_id(task: Task, case: AnyCase) -> bool:
    """Whether a case's id is the hash of what it holds."""
    return case.id == content_id(task.name, case.facts, case.key)


def as_variant(task: Task, case: AnyCase, variant: str) -> AnyCase:
    """The case as an input variant shows it; as given, where it has no such variant."""
    shown = None if variant == GIVEN else task.reporting.variants[variant](case)
    return case if shown is None else shown


def parts_of(task: Task, gold: Any, answer: Any | Unreadable) -> Mapping[str, tuple[Any, Any | Unreadable]]:
    """Right and given label, each one of `Task.labels`, by what they are about: of each decision of an episode, or of
    the one `answer`."""
    return task.episodes.parts(gold, answer) if task.episodes else {"answer": (gold, answer)}


def pool_by_hash(name: str) -> Pool:
    """The pool of a template by the hash of its name: the same for any seed, data set and machine."""
    return pool_at(int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 100, POOL_SHARE)


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
    return _names_in(tuple(importlib.import_module("clinrl.tasks").__path__))


@cache
def _names_in(folders: tuple[str, ...]) -> tuple[str, ...]:
    """Looked up once: params.yaml may name hundreds of versions."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(folders) if module.ispkg))
