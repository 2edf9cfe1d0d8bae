"""The blocks of params.yaml about data, versions, merges and releases; `recipes`, `bases` and `comparisons` have more.

Each block checks its own values when it is read; `params` checks references between blocks.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from clinrl.config.base import Count, Distinct, Name, PerScale, Place, Section, Seed, Seeds, refusal, unless


class Mode(Section):
    """One way to question a model. Weights and scorer are the same in every mode."""

    thinking: bool
    """The chat template's thinking switch."""
    temperature: float = Field(ge=0, le=2)
    """Sampling temperature, 0 to 2; 0 is greedy."""
    max_new_tokens: PerScale[Count]
    """Tokens that an answer may use, thinking included; of an episode, all turns together."""
    top_p: float = Field(default=1.0, gt=0, le=1, exclude_if=unless(1.0))
    """Probability mass of the likeliest tokens that are sampled from, above 0 to 1; 1: all tokens."""
    turn_tokens: Count | None = Field(default=None, exclude_if=unless(None))
    """Most tokens of one turn of an episode; a turn that reaches them without an end ends the episode. Null: whatever
    its other turns have left."""


class DataSpec(Section):
    """The fields that all data sets have."""

    task: str
    """A folder of clinrl/tasks."""
    task_version: Count
    """The version of the task for which the data set was designed; the stage refuses any other."""
    use: Literal["train", "mine", "exam"]
    """The pool: training, error analysis, or the exam. Pools share no template and no patient."""


class DatasetSpec(DataSpec):
    """A data set drawn from one pool of one task."""

    file: Annotated[str, Field(exclude=True)] = ""
    """Name of the file of params/ that holds the block, without .yaml: DVC watches that file. The name is not
    recorded."""
    mix: str
    """One of the task's class mixes, such as natural: how often each label is drawn."""
    cases: Count
    """Number of distinct cases, at most a million: more would be drawn for days."""
    seed: Seed
    """Seed of the draw, 0 to 2^32 - 1."""
    edition: str = ""
    """The edition of the guideline that labels the cases, one of the task's; empty: the newest."""
    emphasis: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Rule to a factor above 0: cases that it decides are drawn that many times as often. Rules not named: 1."""


class ImportSpec(DataSpec):
    """A data set read from somebody's records, which stay where they are."""

    source: Place
    """Path of a file, or of a folder, that the task can read."""
    without: Place | Literal[""] = ""
    """Path of other records whose patients and texts are left out: those of an exam on the same patients."""
    served: bool = Field(default=False, exclude_if=unless(False))
    """Whether these are records of what a served version was asked."""
    consent: bool = Field(default=False, exclude_if=unless(False))
    """Whether the people in the records consented to a model learning from them. With `served`, the uses train and mine
    are refused without."""

    @model_validator(mode="after")
    def _consents(self) -> "ImportSpec":
        if self.served and self.use != "exam" and not self.consent:
            raise refusal(
                f"is missing; records of a served version are {self.use} data only with consent: set use to exam, or "
                "ask for consent", "consent",
            )  # fmt: skip
        return self


class VersionSpec(Section):
    """One adapter of a lineage."""

    task: str
    """A folder of clinrl/tasks."""
    file: Annotated[str, Field(exclude=True)] = ""
    """Name of the file of params/ that holds the block, without .yaml: DVC watches that file. The name is not
    recorded."""
    parent: str
    """The version it starts from, or <task>-base."""
    data: str
    """A data set whose use is train."""
    exam: str
    """A data set whose use is exam."""
    profile: str
    """The recipe."""
    seed: Seed
    """Seed of the stream, the sampling and the order, 0 to 2^32 - 1."""
    why: str = ""
    """Why the version exists; changing it invalidates nothing."""


class Merge(Section):
    """A model made of finished versions without training."""

    task: str
    """The task of the versions."""
    exam: str
    """The exam of the version, or of the first: the merged model takes it too."""


class Fold(Merge):
    """A full model: a version's adapter added to the weights of its base."""

    version: str
    """The version that is folded."""

    @property
    def parts(self) -> dict[str, str]:
        """Key to version."""
        return {"version": self.version}


class Blend(Merge):
    """Two versions of one base as one model: the weighted sum of their adapters' changes, or a sparser one."""

    method: Literal["cat", "svd", "linear", "ties", "dare"]
    """cat: an exact adapter, whose rank is the sum of both. svd: the nearest adapter of the versions' own rank. linear,
    ties, dare: a full model, from the dense change of every weight."""
    first: str
    """A version."""
    second: str
    """Another version of the same task; a chain of blends is not offered."""
    weights: Annotated[tuple[float, float], Field(strict=False)]
    """Two factors, for the first and the second version."""
    density: Annotated[float, Field(gt=0, le=1)] = 1.0
    """ties and dare: the share of entries that is kept, above 0 to 1."""
    seed: Seed = 0
    """dare: seed of the draw of dropped entries, 0 to 2^32 - 1."""

    @property
    def parts(self) -> dict[str, str]:
        """Key to version."""
        return {"first": self.first, "second": self.second}

    @property
    def is_adapter(self) -> bool:
        """Whether the method gives an adapter; the others give a full model."""
        return self.method in ("cat", "svd")

    @model_validator(mode="after")
    def _needs(self) -> "Blend":
        if self.first == self.second:
            raise refusal(f"is {self.second!r}, as is first; a blend takes two versions", "second")
        if self.density != 1.0 and self.method not in ("ties", "dare"):
            raise refusal(f"is {self.density:g}, but {self.method} drops nothing; leave it out", "density")
        return self


class Merges(Section):
    """Models made of finished versions without training."""

    folds: dict[Name, Fold] = Field(default_factory=dict)
    """Name to fold."""
    blends: dict[Name, Blend] = Field(default_factory=dict)
    """Name to blend."""

    @property
    def all(self) -> dict[str, Fold | Blend]:
        """Both by name."""
        return {**self.folds, **self.blends}


class FurtherData(Section):
    """An evaluation of a model on data other than its exam: its error analysis, its external exam, or a resit."""

    task: str
    """The task of the model."""
    data: str
    """A data set whose use is mine for an error analysis, exam for an external exam or a resit."""


class BaseProtocol(Section):
    """The evaluation of a base by the published protocol, and once more on its exam at a temperature."""

    task: str
    """The task, one with a published protocol."""
    exam: str
    """The exam that it took."""
    seeds: Seeds
    """Seeds of the draw and of the sampling, 0 to 2^32 - 1; each gives one episode at every level."""
    levels: Distinct
    """Levels of the task."""
    temperature: float = Field(gt=0, le=2)
    """Sampling temperature, above 0 to 2."""
    episodes: Count
    """How many of the exam's cases of each level are answered again; the first ones."""


class VersionProtocol(BaseProtocol):
    """The evaluation of a version by the published protocol, in comparison with an ancestor or the base."""

    against: str
    """Its parent, another ancestor or the base; it needs a protocol of its own with the same settings."""


class Protocols(Section):
    """Evaluations beyond the exam, of tasks that are played in an environment."""

    bases: dict[Name, BaseProtocol] = Field(default_factory=dict)
    """Base to its protocol."""
    versions: dict[Name, VersionProtocol] = Field(default_factory=dict)
    """Version to its protocol."""

    @property
    def all(self) -> dict[str, BaseProtocol]:
        """Both by name."""
        return {**self.bases, **self.versions}


class Limit(Section):
    """The limits of one metric that a release must keep in every mode."""

    max: PerScale[float] | None = None
    """Greatest value of the metric, as measured; its interval is not looked at."""
    min: PerScale[float] | None = None
    """Least value of the metric, as measured."""
    may_rise: Annotated[float, Field(ge=0)] | None = None
    """By how much the metric may be above the champion's on the same cases, 0 or more."""
    may_fall: Annotated[float, Field(ge=0)] | None = None
    """By how much the metric may be below the champion's on the same cases, 0 or more."""
    paired: bool = False
    """Whether a change for the worse counts only if its whole 95% interval lies beyond what is allowed; for shares."""

    @model_validator(mode="after")
    def _limits(self) -> "Limit":
        relative = self.may_rise is not None or self.may_fall is not None
        if self.max is None and self.min is None and not relative:
            raise refusal("limits nothing; give max, min, may_rise or may_fall")
        if self.paired and not relative:
            raise refusal("is true, but there is no change to be tested; give may_rise or may_fall too", "paired")
        for scale, most in (self.max or {}).items():
            if self.min and (least := self.min[scale]) > most:
                raise refusal(f"is {least:g}, above max ({most:g}), so that nothing holds both", f"min.{scale}")
        return self


class Rebuilt(Section):
    """A release's condition that others have rebuilt the same bytes."""

    least: Count
    """How many of `rebuilders` must have signed that they did."""


class Gate(Section):
    """The conditions that a version must meet before it becomes the champion of its task."""

    least_cases: Count
    """Fewest cases that the exam must have."""
    limits: dict[str, Limit]
    """Metric to its limit. The safety metric of the task is always among them."""
    rebuilt: Rebuilt | None = None
    """How many others must have rebuilt it; null: none."""


class Schedule(Section):
    """When a task is retrained, and how long its approver has for a decision."""

    cron: str
    """Minute, hour, day of month, month, day of week."""
    timezone: str = "UTC"
    """A name of the IANA time zone database."""
    answer_within_s: Annotated[int, Field(ge=1, le=30 * 86400)] = 86400
    """Seconds after which an unanswered request for approval is a no, 1 to 2,592,000 (30 days)."""
    draft: bool = False
    """Whether a retraining that finds nothing stale drafts the next version from the champion's error analysis."""


class Watch(Section):
    """How the served models of a task are watched."""

    cron: str = "*/10 * * * *"
    """When the counts are looked at, in UTC: minute, hour, day of month, month, day of week."""
    alpha: float = Field(default=0.05, gt=0, lt=1)
    """Chance of a false alarm of each kind in the life of a version, above 0 and below 1. The test of drift
    begins anew with each exam that the version takes."""
    margin: float = Field(default=0.05, gt=0, lt=1)
    """By how much a share of requests may differ from the exam's before it counts as drift, above 0 and below 1."""
    limit: float | None = Field(default=None, gt=0, lt=1)
    """Share of harmful errors among all labels above which an alarm is raised, above 0 and below 1. Null: the gate's
    limit, which is meant for the exam's mix of patients and may be 0."""
    keep_days: Annotated[int, Field(ge=1, le=3660)] = 90
    """Days for which an answer waits for its label, 1 to 3,660."""
    approver: str = ""
    """Name of the person who approves beforehand that a champion above its safety limit is rolled back; this machine
    holds their key. Empty: a person rolls back."""
