"""The parts that a task may have beside its twelve members: measures, checks, reporting, episodes, judges and others.

Every part has a default that works, so that a task names only its differences.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, Field

from clinrl.intervals import Counts
from clinrl.types import Pool, Score, Strict, Transcript, Unreadable

Weight = Annotated[float, Field(ge=0.0)]


@dataclass(frozen=True, kw_only=True)
class Share:
    """A metric that is a share of cases. `of(gold, answer)` is None for cases outside the denominator."""

    of: Callable[[Any, Any], bool | None]
    worse: str
    """Which direction is worse: "higher" or "lower"."""


EXACT_SHARE = Share(of=lambda gold, answer: answer == gold, worse="lower")
"""The share of right answers."""
NO_PARSE = Share(of=lambda gold, answer: isinstance(answer, Unreadable), worse="higher")
"""The share of answers that cannot be read."""


def recall(label: Any) -> Share:
    """The share of the cases of one gold label (the denominator) that are answered with that label."""
    return Share(of=lambda gold, answer: answer == label if gold == label else None, worse="lower")


def check_pool(pool: str) -> None:
    """Raise KeyError, with the pools that exist, for any other: a generator would look for a case of it for ever."""
    if pool not in get_args(Pool):
        raise KeyError(f"no pool {pool!r}; pools are {', '.join(get_args(Pool))}")


def by_steps(rank: Callable[[Any], int], holds: Callable[[int], bool], worse: str) -> Share:
    """The share of all cases for which `holds` is true of the answer's steps above gold; false of an unreadable one."""
    return Share(
        of=lambda gold, answer: not isinstance(answer, Unreadable) and holds(rank(answer) - rank(gold)), worse=worse
    )


@dataclass(frozen=True, kw_only=True)
class Statistic:
    """A metric of the counts of all cases by label and answer; its interval is a seeded bootstrap over cases."""

    of: Callable[[Counts], float]
    """Called with one case at least."""
    worse: str
    readable_only: bool = True
    """False: `of` gets the unreadable answers too, and counts them as errors where it counts errors."""

    def value(self, counts: Counts) -> float:
        """The metric of these counts; NaN where it is undefined, such as without a case to count."""
        if self.readable_only:
            counts = {pair: n for pair, n in counts.items() if not isinstance(pair[1], Unreadable)}
        return self.of(counts) if counts else math.nan


def verdicts(shares: Mapping[str, Share], gold: Any, answer: Any) -> dict[str, float]:
    """For each share, 1 if it counts an answer and 0 if not; without shares whose denominator lacks the case."""
    found = {name: share.of(gold, answer) for name, share in shares.items()}
    return {name: float(counts) for name, counts in found.items() if counts is not None}


@dataclass(frozen=True)
class Request:
    """A text that a reward or a measure sends to a model: equal requests have one response."""

    model: Literal["encoder", "judge", "second_judge"]
    text: str
    """The text to embed, or the whole prompt of a judge."""


Responses = Mapping[Request, Any]
"""The responses of the models: a float32 unit vector from the encoder, the unchanged text from a judge."""

NO_RESPONSES: Responses = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Quality:
    """A mean over cases of a measure of the whole transcript, not of the answer alone."""

    of: Callable[[Any, Transcript, Responses], float | None]
    """In [0, 1], or from 0 on if `counts`; None for a case outside the denominator."""
    worse: str
    """Which direction is worse: "higher" or "lower"."""
    asks: tuple[Literal["encoder", "judge", "second_judge"], ...] = ()
    """The models that `requests` asks; empty: `of` needs no model. A base without one of these judges is refused."""
    requests: Callable[[Any, Transcript], Sequence[Request]] = lambda case, transcript: ()
    """The requests whose responses `of` needs."""
    counts: bool = False
    """The measure is a number of things, not a share of them."""
    says: str = ""
    """The measure in a few words, for a headline."""


@dataclass(frozen=True, kw_only=True)
class Expect:
    """One Great Expectations rule as plain data: the expectation's class name and its arguments."""

    type: str
    arguments: Mapping[str, Any]
    on: str = "rows"
    """"rows": checked on the table of cases (`Task.row`). "summary": checked on the one-row table of shares."""
    of: str = "all"
    """"all" data sets, "drawn" ones alone, or "imported" ones alone."""


def expect(rule: str, column: str, on: str = "rows", of: str = "all", **arguments: Any) -> Expect:
    """A Great Expectations rule about one column."""
    return Expect(type=rule, arguments={"column": column, **arguments}, on=on, of=of)


def between(column: str, low: float, high: float, on: str = "rows", of: str = "all") -> Expect:
    """A rule that the values of a column lie in a range, both ends included."""
    return expect("ExpectColumnValuesToBeBetween", column, on, of, min_value=low, max_value=high)


@dataclass(frozen=True, kw_only=True)
class Checks:
    """How cases vary, and the expectations that a data set must meet before anything trains on it."""

    rules: tuple[str, ...] = ()
    """Ids of the rules that decide labels; the names that `omit` may use."""
    emphasised: tuple[str, ...] = ()
    """What `emphasis` may name, values of the slice `rule`; empty: the same as `rules`."""
    mixes: tuple[str, ...] = ("natural",)
    """Names of the class mixes that `Task.cases` can draw; a served model's example is drawn from the first."""
    editions: tuple[str, ...] = ()
    """Editions of the guideline that a data set may be labelled by; empty: there is one."""
    readers: tuple[str, ...] = ()
    """Names of policies beside `mediocre` that read the case: rows to beat, but not lazy policies."""
    text: str = "text"
    """The column of `Task.row` that holds the text that the model reads about a case."""
    share: str = "share"
    """The prefix of the columns with the labels' shares: `<share>_<label>`."""
    expectations: Sequence[Expect] = ()

    @property
    def deciding(self) -> tuple[str, ...]:
        """The rules whose cases can be made more frequent."""
        return self.emphasised or self.rules


@dataclass(frozen=True, kw_only=True)
class Reporting:
    """The measures that reports, tables and gates show, in order. An empty field shows all of them."""

    headline: tuple[str, ...] = ()
    """In a summary: names of metrics and qualities, and `no_parse` and `clipped`."""
    row_metrics: tuple[str, ...] = ()
    """In a row of the comparison table: names of metrics."""
    approval: tuple[str, ...] = ()
    """In a request to approve a version: shares among the metrics, `exact` first."""
    external: tuple[str, ...] = ()
    """In a report on an external exam: metrics, and `no_parse`."""
    slice_measures: tuple[str, ...] = ()
    """In each slice: metrics, and qualities that need no model."""
    qualities: Mapping[str, Quality] = field(default_factory=dict)
    """Measures of whole transcripts, reported beside the metrics; no name is in both."""
    slices: Mapping[str, Callable[[Any], str]] = field(default_factory=dict)
    """By the name of a slice, the group of a case. `rule`, if present, is the rule that decided the gold label."""
    variants: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    """Other ways to show a case, by name. Each returns the case with other `facts`, and the reasons that are then gold,
    but the same id, group and label; or None if the case has no such variant. `given`, the case as it is, is never
    among them."""
    clauses: Callable[[Any], Sequence[str]] | None = None
    """The clauses of a case's text, with numbers masked. Reports give the share of an exam's clauses that each corpus
    of the model's training contains. None: reports omit it."""
    readings: Callable[[str], Mapping[str, float]] = lambda text: {}
    """The numbers in a case's text, by name, such as measurements; they are watched while a model is served."""
    cluster: Callable[[Any], str] | None = None
    """The cluster of a case, for intervals: answers within one are alike. None: each case is its own cluster."""


@dataclass(frozen=True, kw_only=True)
class Episodes:
    """The environment in which a case of several turns is played."""

    environment: Callable[[], Any]
    """A plain class without arguments. `reset(case)` takes a case, or its JSON, and keeps the facts alone; the other
    public methods are the tools."""
    turns: int
    """The most turns that the model may take, 1 or more."""
    parts: Callable[[Any, Any], Mapping[str, tuple[Any, Any]]]
    """The gold and the given label of each decision of an episode, by the decision's name; each is one of `labels`."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A reward that needs other models: a sentence encoder, or judges that write a verdict."""

    models: Callable[[Any], tuple[str, ...]]
    """The models, among those that a `Request` names, that a reward needs; they are inputs of a training."""
    requests: Callable[[Any, Transcript, Any], Sequence[Request]]
    """The requests that `score` needs for a transcript under a reward. Pure."""
    score: Callable[[Any, Transcript, Any, Responses], Score]
    """`Task.score`, given the responses to `requests`; responses to other requests may be among them."""
    lessons: Callable[[str, int, int], Iterator[tuple[str, str]]] = lambda judge, n, seed: iter(())
    """`n` pairs of a prompt to a judge and the right reply, to train an embedded judge."""


@dataclass(frozen=True, kw_only=True)
class Improvement:
    """The costs by which error analysis weighs errors, and how its findings change the next version."""

    triggers: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict)
    """By the name of a rule: whether a case's text shows the finding, which a reader may miss."""
    refine: Callable[[Any, Sequence[str]], Any] = lambda reward, rules: reward
    """The reward with one more term for each of these missed rules for which a term exists.

    The other terms stay as they are, and silence stays or becomes the worst outcome. The same reward if no rule has a
    term, or the reward has them all."""
    cost: Callable[[Any, Any], float] = lambda gold, answer: float(gold != answer)
    """The cost of an answer: 0 for the gold label and above 0 for any other, unreadable included."""


@dataclass(frozen=True, kw_only=True)
class Safety:
    """The errors that a release must limit, and the column of a served model's answer."""

    metric: str = ""
    """The share that every gate must limit; empty: the first whose higher values are worse, else `exact`."""
    errors: str = ""
    """The plural noun for such errors; empty: the metric's name."""
    answer: str = "label"
    """The column of a served model's answer."""


@dataclass(frozen=True, kw_only=True)
class Ordered:
    """Answers that are ordered levels, for thresholds on the probabilities that a model gives them."""

    answers: tuple[Any, ...]
    """The labels, the most cautious first; written as text, none begins with another."""
    prefix: str
    """The text before the answer on the last line of a turn that has the requested form."""
    under: str
    """The metric that is the share of answers that are less cautious than gold."""
    over: str
    """The metric that is the share of answers that are more cautious than gold."""


class PublishedRow(Strict):
    """One published result of a system on an external exam."""

    name: str
    hits: Mapping[str, int]
    """For each share among the task's metrics: the number of cases that it counts."""
    statistics: Mapping[str, float] = {}
    """For each statistic among the task's metrics: its published value."""
    source: str
    """The source of the numbers, and how they were read."""


class Published(Strict):
    """Published results on one and the same exam."""

    exam: str
    labels: Mapping[Any, int]
    """The number of the exam's cases by gold label."""
    rows: Sequence[PublishedRow]


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """How others evaluated this task, the scores that they published, and how an exam of it is judged here."""

    mix: str
    """The mix from which the others drew their episodes."""
    by: str
    """The slice whose values are reported one by one."""
    levels: tuple[str, ...]
    """The values of that slice, the easiest first."""
    theirs: BaseModel
    """The reward that the others scored with."""
    ours: BaseModel
    """The reward of this project, shown beside theirs."""
    quality: str
    """The quality that an exam is judged by; it needs no model."""
    statistic: str
    """A statistic of the task that is shown beside the quality."""
    printed: Mapping[str, Mapping[str, float]]
    """By evaluated model: the score that the others printed for each level."""
    source: str
    """The source of the figures, and why they are not comparable."""
