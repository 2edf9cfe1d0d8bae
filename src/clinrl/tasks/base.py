"""The contract of a task: one folder under `clinrl/tasks` that exports `TASK`.

The folder's name is the task's name, and importing the folder looks the task up. A task holds everything that a stage
needs to know about its medicine, prompts and rewards, so that a new task touches no shared module. Twelve members are
required; every other member is a part of `parts` with a default that works.
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
from clinrl.tasks.policies import Policy, bare_answers, lazy_policies
from clinrl.types import Case as AnyCase
from clinrl.types import Message, Pool, Score, Transcript, Unreadable

if TYPE_CHECKING:
    from clinrl.tasks.importing import Source


EXACT = "exact"
"""The metric that every task has: the share of right answers."""
GIVEN = "given"
"""The name of the input variant that shows a case as it is."""
POOL_SHARE: Mapping[Pool, int] = {"base": 40, "train": 25, "mine": 15, "exam": 20}
"""Percentage of templates in each pool."""
FORM = ("no_parse", "clipped")
"""Measures of every report, after the task's own: the shares of unreadable answers and of answers cut off."""


class Task(ABC):
    """The contract of a task folder's `TASK`. `tests/tasks/test_contract.py` checks every folder against it."""

    name: ClassVar[str]
    version: ClassVar[int]
    """Raise it whenever prompts, rules, rewards or cases change meaning; a golden file guards it."""
    Case: ClassVar[type[AnyCase]]
    Reward: ClassVar[type[BaseModel]]
    """The record of a reward's numbers; it refuses unknown terms. `low` and `high` declare the range of a total."""
    labels: ClassVar[tuple[Any, ...]]
    """The possible answers, in their order."""
    metrics: ClassVar[Mapping[str, Share | Statistic]]
    """The metrics by name; `exact`, the share of right answers, is among them."""

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
    """The results that others published on an external exam."""
    benchmark: ClassVar[Benchmark | None] = None
    """How others evaluated a task that is played in an environment; None: no such evaluation is known."""

    def __init_subclass__(cls) -> None:
        """Fill in `safety.metric` and the empty fields of `reporting`: all measures, in the order of `metrics`."""
        super().__init_subclass__()
        if not isinstance(getattr(cls, "metrics", {}).get(EXACT), Share):
            raise TypeError(f"the task {cls.__name__} needs `metrics`, with {EXACT!r} among them; see docs/concepts.md")
        if missing := {"name", "version", "Case", "Reward", "labels"} - {*dir(cls)}:
            raise TypeError(f"the task {cls.__name__} needs {', '.join(sorted(missing))}; see docs/concepts.md")
        given, shares = cls.reporting, [name for name, of in cls.metrics.items() if isinstance(of, Share)]
        worse = [name for name in shares if cls.metrics[name].worse == "higher"]
        cls.safety = replace(cls.safety, metric=cls.safety.metric or next(iter(worse), EXACT))
        named = {"safety.metric": cls.safety.metric}
        if cls.ordered:
            named |= {"ordered.under": cls.ordered.under, "ordered.over": cls.ordered.over}
        for at, name in named.items():
            if name not in shares:
                raise TypeError(f"`{at}` of the task {cls.__name__} is no share of `metrics`: {name!r}")
        cls.reporting = replace(
            given,
            headline=given.headline or (*cls.metrics, *given.qualities, *FORM),
            external=given.external or (*cls.metrics, FORM[0]),
            row_metrics=given.row_metrics or tuple(cls.metrics),
            approval=given.approval or tuple(shares),
            slice_measures=given.slice_measures or tuple(dict.fromkeys((EXACT, cls.safety.metric))),
        )

    @property
    def shares(self) -> Mapping[str, Share]:
        """The shares among `metrics`."""
        return {name: share for name, share in self.metrics.items() if isinstance(share, Share)}

    @property
    def all_metrics(self) -> Mapping[str, Share | Statistic]:
        """`metrics`, and the share of unreadable answers, which every task has."""
        return {**self.metrics, FORM[0]: NO_PARSE}

    @property
    def compared(self) -> Mapping[str, Share]:
        """The shares that every paired test is about: `exact` first, then the safety metric."""
        return {name: self.shares[name] for name in (EXACT, self.safety.metric)}

    @property
    def asks(self) -> Judged:
        """`judged`, or a default that requests nothing and calls `score`, where the reward needs no other model."""
        return self.judged or Judged(
            models=lambda reward: (),
            requests=lambda case, transcript, reward: (),
            score=lambda case, transcript, reward, responses: self.score(case, transcript, reward),
        )

    @property
    def shares_threads(self) -> bool:
        """Whether fewer threads give the same bytes. Not for episodes: torch splits their long sums between threads."""
        return self.episodes is None

    def is_share(self, measure: str) -> bool:
        """Whether a measure of a report is a share: neither a statistic nor a quality that counts things."""
        quality = self.reporting.qualities.get(measure)
        return not (isinstance(self.metrics.get(measure), Statistic) or (quality is not None and quality.counts))

    def noun_of(self, metric: str) -> str:
        """The plural noun by which pages refer to the cases of a compared share, such as "exact answers"."""
        nouns = {EXACT: "exact answers", self.safety.metric: self.safety.errors or self.safety.metric}
        return nouns.get(metric, metric)

    @abstractmethod
    def cases(
        self, n: int, seed: int, *, pool: Pool, mix: str, emphasis: Mapping[str, float] = MappingProxyType({})
    ) -> Iterator[AnyCase]:
        """Yield `n` distinct cases of one pool, the same for the same arguments in any process.

        `emphasis`: for a rule, how many times as often as in the mix it decides a case. A task with `checks.editions`
        also takes `edition`: one of these, or "" for the task's default.
        """

    @abstractmethod
    def prompt(self, facts: Any) -> list[Message]:
        """The system and the user turn, made from `facts` alone."""

    @abstractmethod
    def gold(self, case: Any, *, thinking: bool, omit: frozenset[str] = frozenset()) -> Transcript:
        """The transcript of a reader that knows every rule except `omit`. With none omitted: the best answer."""

    @abstractmethod
    def label(self, case: Any) -> Any:
        """The gold label."""

    @abstractmethod
    def parse(self, transcript: Transcript) -> Any | Unreadable:
        """The label that a transcript commits to in its last turn, or in an episode by the decisions of all turns.
        Never raises on model text."""

    @abstractmethod
    def score(self, case: Any, transcript: Transcript, reward: Any) -> Score:
        """The score of a transcript under a reward; its terms are always the same, in the same order.

        Pure. Raises only on a malformed case, never on model text. Where `judged` is set, this method can apply only a
        reward that needs no other model.
        """

    def pool_of(self, group: str) -> Pool:
        """The pool of a group, from the group's name alone; by default the first part of the name."""
        return group.split("/")[0]  # type: ignore[return-value]  # validation compares it with the pool of the data set

    def omittable(self, case: Any) -> tuple[str, ...]:
        """The rules whose omission changes a case's label."""
        return ()

    def relabel(self, case: Any) -> Any:
        """The label that the rules now give the latent facts; by default the label that the case has."""
        return self.label(case)

    def row(self, case: Any) -> dict[str, Any]:
        """A flat row of a case for `checks.expectations`; by default id, group, label, text and the plain facts."""
        plain = {name: value for name, value in case.facts if isinstance(value, bool | int | float | str | None)}
        text = " ".join(message.content for message in self.prompt(case.facts) if message.role == "user")
        text = text.replace("\n", " ")  # a row's text is one line
        return plain | {"id": case.id, "group": case.group, "label": self.label(case), self.checks.text: text}

    def recognise(self, path: Path) -> "Source":
        """The source of records at a path. Raises DataError, with the files expected, for others; by default all."""
        raise DataError(f"{path}: cases of {self.name} must be drawn; no file of them can be imported")

    def policies(self) -> Mapping[str, Policy]:
        """Lazy policies by name (constants, random, prior-matched, hedging, empty, truncated), and "mediocre".

        The mediocre reader must earn more than each lazy policy. By default the texts are those of `bare_answers`.
        """
        cases = self.cases(1_000, 0, pool="base", mix=self.checks.mixes[0])
        return lazy_policies(self.labels, bare_answers(self, cases).__getitem__, self.label)


def content_id(name: str, facts: BaseModel, key: BaseModel) -> str:
    """The id of a case: the task's name, and a hash of the case's facts and key."""
    return f"{name}-{digest([facts.model_dump(mode='json'), key.model_dump(mode='json')])[:16]}"


def is_sound_id(task: Task, case: AnyCase) -> bool:
    """Whether a case's id is the hash of its facts and key."""
    return case.id == content_id(task.name, case.facts, case.key)


def as_variant(task: Task, case: AnyCase, variant: str) -> AnyCase:
    """The case as an input variant shows it, or the case itself if it has no such variant."""
    shown = None if variant == GIVEN else task.reporting.variants[variant](case)
    return case if shown is None else shown


def parts_of(task: Task, gold: Any, answer: Any | Unreadable) -> Mapping[str, tuple[Any, Any | Unreadable]]:
    """The gold and the given label of each decision of an episode, by the decision's name, or of the one `answer`.
    Each label is one of `Task.labels`, or unreadable."""
    return task.episodes.parts(gold, answer) if task.episodes else {"answer": (gold, answer)}


def pool_by_hash(name: str) -> Pool:
    """The pool of a template, from the hash of its name: the same for any seed, data set and machine."""
    return pool_at(int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 100, POOL_SHARE)


def pool_at(percent: int, shares: Mapping[Pool, int]) -> Pool:
    """The pool into whose share a percentage, 0 to 99, falls. The shares are percentages and sum to 100."""
    for pool, share in shares.items():
        if percent < share:
            return pool
        percent -= share
    raise AssertionError("pool shares do not sum to 100")


def get_task(name: str) -> Task:
    """The task in folder `clinrl/tasks/<name>`. Raises KeyError without such a folder, TypeError without its task."""
    if name not in task_names():
        raise KeyError(f"no task {name!r}; tasks are {', '.join(task_names())}")
    task = getattr(importlib.import_module(f"clinrl.tasks.{name}"), "TASK", None)
    if not isinstance(task, Task) or task.name != name:
        raise TypeError(f"clinrl/tasks/{name} needs TASK, an instance of a Task whose `name` is {name!r}")
    return task


def task_names() -> tuple[str, ...]:
    return _names_in(tuple(importlib.import_module("clinrl.tasks").__path__))


@cache
def _names_in(folders: tuple[str, ...]) -> tuple[str, ...]:
    """The names of the task folders. Cached, since params.yaml may name hundreds of versions."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(folders) if module.ispkg))
