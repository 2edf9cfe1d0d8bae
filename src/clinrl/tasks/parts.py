"""What a task may have beside its twelve members: measures, checks, reporting, episodes, judges and others.

Every part has a default that works, so that a task names only what it does differently.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from clinrl.intervals import Counts
from clinrl.types import Case, Score, Strict, Transcript, Unreadable

Finite = Annotated[float, Field(allow_inf_nan=False)]
Weight = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


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
    """Among cases of one gold label (the denominator), the answer is that label."""
    return Share(of=lambda gold, answer: answer == label if gold == label else None, worse="lower")


def by_steps(rank: Callable[[Any], int], holds: Callable[[int], bool], worse: str) -> Share:
    """Share of all cases whose answer is so many steps above gold; an unreadable one is at no step."""
    return Share(
        of=lambda gold, answer: not isinstance(answer, Unreadable) and holds(rank(answer) - rank(gold)), worse=worse
    )


@dataclass(frozen=True, kw_only=True)
class Statistic:
    """A metric of all cases at once, counted by label and answer; its interval is a seeded bootstrap over cases."""

    of: Callable[[Counts], float]
    worse: str
    readable_only: bool = True
    """False: `of` is given the unreadable answers too, and counts them, as errors where it counts errors."""

    def value(self, counts: Counts) -> float:
        """The metric of these cases; NaN where it is undefined, as it is without a case that it counts."""
        if self.readable_only:
            counts = {pair: n for pair, n in counts.items() if not isinstance(pair[1], Unreadable)}
        return self.of(counts) if counts else math.nan


def verdicts(metrics: Mapping[str, Share | Statistic], gold: Any, answer: Any) -> dict[str, float]:
    """Whether each share counts an answer, as 0 or 1; without those in whose denominator its case is not."""
    found = {name: share.of(gold, answer) for name, share in metrics.items() if isinstance(share, Share)}
    return {name: float(counts) for name, counts in found.items() if counts is not None}


@dataclass(frozen=True)
class Request:
    """What a reward or a measure sends to a model: equal requests have one response."""

    model: Literal["encoder", "judge", "second_judge"]
    text: str
    """What is embedded, or the whole prompt of a judge."""


Responses = Mapping[Request, Any]
"""What the models returned: a float32 unit vector of the encoder, the very text that a judge wrote."""

NO_RESPONSES: Responses = MappingProxyType({})


def no_requests(case: Case, transcript: Transcript) -> Sequence[Request]:
    """For a measure that needs no model."""
    return ()


@dataclass(frozen=True, kw_only=True)
class Quality:
    """A mean over cases of something that is measured on the whole transcript, not on the answer alone."""

    of: Callable[[Any, Transcript, Responses], float | None]
    """In [0, 1], or from 0 on if `counts`; None for a case outside the denominator."""
    worse: str
    """Which direction is worse: "higher" or "lower"."""
    requests: Callable[[Any, Transcript], Sequence[Request]] = no_requests
    """What `of` needs the responses to."""
    counts: bool = False
    """It is a number of things, not a share of them."""
    says: str = ""
    """What it is, in a few words, for a headline."""


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


@dataclass(frozen=True, kw_only=True)
class Checks:
    """How cases vary, and the expectations that a data set must meet before anything trains on it."""

    rules: tuple[str, ...] = ()
    """Ids of the rules that decide labels; the names that `omit` may use."""
    mixes: tuple[str, ...] = ("natural",)
    """Names of the class mixes that `Task.cases` can draw; a served model's example is drawn from the first."""
    editions: tuple[str, ...] = ()
    """Editions of the guideline that a data set may be labelled by; empty: there is one."""
    readers: tuple[str, ...] = ()
    """Policies beside `mediocre` that decide by what the case says: rows to beat, but not lazy."""
    text: str = "text"
    """The column of `Task.row` that holds what the model reads about a case."""
    share: str = "share"
    """What the columns of the labels' shares begin with: `<share>_<label>`."""
    expectations: Sequence[Expect] = ()


@dataclass(frozen=True, kw_only=True)
class Reporting:
    """What reports, tables and gates show, in order. What is left empty shows all that there is."""

    headline: tuple[str, ...] = ()
    """A summary: names of metrics and qualities, and `no_parse` and `clipped`."""
    row_metrics: tuple[str, ...] = ()
    """A row of the comparison table: names of metrics."""
    approval: tuple[str, ...] = ()
    """What a person sees who is asked to approve a version: shares among the metrics, `exact` first."""
    external: tuple[str, ...] = ()
    """A report on an exam from elsewhere: metrics, and `no_parse`."""
    slice_measures: tuple[str, ...] = ()
    """What each slice shows: metrics, and qualities that need no model."""
    qualities: Mapping[str, Quality] = field(default_factory=dict)
    """Measures of whole transcripts, reported beside the metrics; no name is in both."""
    slices: Mapping[str, Callable[[Any], str]] = field(default_factory=dict)
    """What cases are grouped by. `rule`, where there is one, is the rule that decided the gold label."""
    variants: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    """Other ways to show a case, by name: the case with other `facts`, and the reasons that then are gold, but the same
    id, group and label; or None where it has no such variant. The case as it is, `given`, is never among them."""
    clauses: Callable[[Any], Sequence[str]] | None = None
    """The clauses of what a case shows, numbers masked: reports say which share of an exam's stands in each corpus that
    the model learned from. None: reports do not say it."""
    readings: Callable[[str], Mapping[str, float]] = lambda text: {}
    """The numbers that a case's text gives, by name, such as what was measured: what is watched while it is served."""
    cluster: Callable[[Any], str] | None = None
    """What cases have in common that makes their answers alike, for intervals; None: each case is by itself."""


@dataclass(frozen=True, kw_only=True)
class Episodes:
    """What a case of several turns is played in."""

    environment: Callable[[], Any]
    """A plain class without arguments. Its `reset(case)` takes a case, or its JSON, and keeps the facts alone; its
    other public methods are the tools."""
    turns: int
    """The most turns that the model may take, 1 or more."""
    parts: Callable[[Any, Any], Mapping[str, tuple[Any, Any]]]
    """By what each decision of an episode is about: right and given label, each one of `labels`."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A reward that needs other models: a sentence encoder, or judges that write a verdict."""

    models: Callable[[Any], tuple[str, ...]]
    """The models, of those that a `Request` names, that a reward needs: part of what a training follows from."""
    requests: Callable[[Any, Transcript, Any], Sequence[Request]]
    """What `score` needs about a transcript under a reward. Pure."""
    score: Callable[[Any, Transcript, Any, Responses], Score]
    """`Task.score`, where the responses to `requests` are known, and those to other requests too."""
    lessons: Callable[[str, int, int], Iterator[tuple[str, str]]] = lambda judge, n, seed: iter(())
    """`n` pairs of a prompt to a judge and the right reply: what an embedded judge learns."""


@dataclass(frozen=True, kw_only=True)
class Improvement:
    """What error analysis weighs errors by, and how the next version is made of what it finds."""

    triggers: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict)
    """Findings that a reader may miss, as the text shows them, by the name of their rule."""
    refine: Callable[[Any, Sequence[str]], Any] = lambda reward, rules: reward
    """The reward with a term more for each of these missed rules that it can have one for.

    What it pays otherwise, and that silence is the worst outcome, stays as it is or becomes so. The same reward if
    none of the rules has a term, or each has it already."""
    cost: Callable[[Any, Any], float] = lambda gold, answer: float(gold != answer)
    """What an answer would cost, 0 for the gold label and above 0 for any other, unreadable included."""


@dataclass(frozen=True, kw_only=True)
class Safety:
    """What a release must limit, and the columns by which a served model is asked and answers."""

    metric: str = ""
    """The metric whose limit every gate has; empty: the first whose higher values are worse, else the first."""
    errors: str = ""
    """What such errors are called; empty: as the metric is."""
    answer: str = "label"
    """The column of a served model's answer."""


@dataclass(frozen=True, kw_only=True)
class Ordered:
    """Answers that are ordered levels, for thresholds on the probabilities that a model gives them."""

    answers: tuple[Any, ...]
    """The labels, the most cautious first; written as text, none begins with another."""
    prefix: str
    """What stands before the answer on the last line of a turn of the form that is asked for."""
    under: str
    """The share among the metrics of answers that are less cautious than gold."""
    over: str
    """The share of those that are more cautious."""


class PublishedRow(Strict):
    """What somebody published about a system on an exam of their own."""

    name: str
    hits: Mapping[str, int]
    """Share of the task's metrics to the count of cases that it holds for."""
    statistics: Mapping[str, float] = {}
    """Statistic of the task's metrics to its published value."""
    source: str
    """Where the numbers come from, and how they were read."""


class Published(Strict):
    """Published results on one and the same exam."""

    exam: str
    labels: Mapping[Any, int]
    """How many of its cases have each gold label."""
    rows: Sequence[PublishedRow]


@dataclass(frozen=True, kw_only=True)
class Benchmark:
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
    """The quality that an exam is judged by; it needs no model."""
    statistic: str
    """A statistic of the task that is shown beside it."""
    printed: Mapping[str, Mapping[str, float]]
    """Who they examined to the score that they printed, by level."""
    source: str
    """Where the figures come from, and why they are not comparable."""
