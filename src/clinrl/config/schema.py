"""The blocks of params.yaml about data, versions, merges, comparisons and releases; `recipes` and `bases` have more.

Each block checks itself when it is read; `params` checks what they say of each other.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from clinrl.config.base import Count, Distinct, Name, PerScale, Place, Section, Seed, Seeds, Share, Text, refusal


class Mode(Section):
    """One way to question a model. Weights and scorer are the same in every mode."""

    thinking: bool
    """The chat template's thinking switch."""
    temperature: float = Field(ge=0, le=2)
    """Sampling temperature, 0 to 2; 0 is greedy."""
    max_new_tokens: PerScale[Count]
    """Tokens that a turn may use, thinking included."""


MAX_CASES = 1_000_000


class DataSpec(Section):
    """What all data sets have in common."""

    task: str
    """A folder of clinrl/tasks."""
    task_version: Count
    """The task's version that the data set was designed for; the dataset stage requires equality."""
    use: Literal["train", "mine", "exam"]
    """The pool: training, error mining, or the exam. Pools share no template and no patient."""


class DatasetSpec(DataSpec):
    """A data set drawn from one pool of one task."""

    file: Annotated[str, Field(exclude=True)] = ""
    """The file of params/ in which the block stands: what DVC watches. It is no part of what is recorded."""
    mix: str
    """One of the task's class mixes."""
    cases: Annotated[int, Field(ge=1, le=MAX_CASES)]
    """Number of distinct cases, at most a million: more would be drawn for days."""
    seed: Seed
    """Seed of the draw, 0 to 2^32 - 1."""
    edition: str = ""
    """The edition of the guideline that labels the cases, of those that the task has; empty: the newest."""
    emphasis: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Rule to how many times as often it decides a case as the mix has it, above 0; rules not named: once."""


class ImportSpec(DataSpec):
    """A data set read from somebody's records, which stay where they are."""

    source: Place
    """Path of a file, or of a folder, that the task can read."""
    without: Place | Literal[""] = ""
    """Path of other records whose patients and texts are left out: those of an exam on the same patients."""


class VersionSpec(Section):
    """One adapter of a lineage."""

    task: str
    """A folder of clinrl/tasks."""
    file: Annotated[str, Field(exclude=True)] = ""
    """The file of params/ in which the block stands: what DVC watches. It is no part of what is recorded."""
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
    """Two versions of one base as one model: the weighted sum of what their adapters change, or a sparser reading."""

    method: Literal["cat", "svd", "linear", "ties", "dare"]
    """cat: exact, an adapter of both ranks together. svd: the nearest adapter of the versions' own rank. linear, ties,
    dare: on the dense change of every weight, as a full model."""
    first: str
    """A version."""
    second: str
    """Another version of the same task; a chain of blends is not offered."""
    weights: Annotated[tuple[float, float], Field(strict=False)]
    """Of the first and the second version."""
    density: Annotated[float, Field(gt=0, le=1)] = 1.0
    """ties and dare: the share of entries that is kept, above 0 to 1."""
    seed: Seed = 0
    """dare: of the entries that are dropped, 0 to 2^32 - 1."""

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
    """An evaluation of one version on data other than its exam: its error analysis, or its external exam."""

    task: str
    """The task of the version."""
    data: str
    """A data set whose use is mine for an error analysis, exam for an external exam."""


class BaseProtocol(Section):
    """The published protocol played by a base, and its exam answered once more at a temperature."""

    task: str
    """The task, one with a published protocol."""
    exam: str
    """The exam that it took."""
    seeds: Seeds
    """Seeds, each of one episode a level: of the draw and of the sampling."""
    levels: Distinct
    """Levels of the task."""
    temperature: float = Field(gt=0, le=2)
    """Sampling temperature, above 0 to 2."""
    episodes: Count
    """Cases of the exam a level: the first so many."""


class VersionProtocol(BaseProtocol):
    """The same for a version, beside one that it comes from."""

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


class Rival(Section):
    """A classifier on all that a lineage has seen: LightGBM on words, pairs of words and the numbers of a case."""

    task: str
    """The task, one of a single turn."""
    data: Distinct
    """Data sets that it learns from, drawn and for training: those of the versions that it is compared with."""
    exam: str
    """The exam of these versions, whose edition labels the cases of the embedded base, from which it learns too."""


BASE = "base"
"""The row of the untrained base in a comparison; as another input variant it is `base, <variant>`."""


class Pair(Section):
    """Two rows of a comparison that are tested against each other."""

    first: str
    """An arm, a rival, `base`, or `base, <variant>`."""
    second: str
    """Another; differences are the first less the second."""
    says: Text
    """What the first has and the second has not: what a difference between them is about."""

    @model_validator(mode="after")
    def _two(self) -> "Pair":
        if self.first == self.second:
            raise refusal(f"is {self.second!r}, as is first; a test takes two rows", "second")
        return self


class Primary(Section):
    """What a comparison is run for, and what is expected of it: `clinrl preregister` writes it down before the runs."""

    measure: str
    """A share among the metrics of the task."""
    modes: Distinct
    """Modes in which it is tested; p is adjusted for their number."""
    first: str
    """An arm or `base`."""
    second: str
    """Another; the difference is the first less the second."""
    effect: Annotated[float, Field(gt=0, le=100)]
    """Smallest effect of interest, in percentage points."""
    alpha: Annotated[float, Field(ge=0.001, le=0.2)] = 0.05
    """Two-sided level of the test."""
    discordant: Share | None = None
    """Expected share of cases that count for one of the two and not for the other. Null, for `exact`: from the error
    analysis of the parent, as if both erred as often as it does, and independently."""
    seed_sd: Annotated[float, Field(ge=0, le=50)]
    """Expected standard deviation of the measure between seeds of one recipe, in percentage points."""
    design_effect: Annotated[float, Field(ge=1)] | None = None
    """How many cases say as much as one by itself, 1 or more; needed for a task whose cases come in clusters."""

    @model_validator(mode="after")
    def _sound(self) -> "Primary":
        if self.first == self.second:
            raise refusal(f"is {self.second!r}, as is first; a test takes two rows", "second")
        if self.discordant is not None and self.discordant < self.effect / 100:
            raise refusal(
                f"is {self.discordant:g}, too few for an effect of {self.effect:g} points, since only discordant cases "
                "make a difference; raise it, or lower the effect",
                "discordant",
            )
        return self


class Partition(Section):
    """Rows of a comparison that tell apart what training by a reward does without it (Gao 2026, arXiv:2606.05932)."""

    parent: str
    """Where all three start."""
    random: str
    """Rewarded by a coin: less the parent, the null share, which steps have that know nothing."""
    majority: str
    """Rewarded for its own most frequent answer: less `random`, the share of elicitation, which the parent knew."""
    labels: str
    """Rewarded by labels: less `majority`, the share of the reward."""

    @property
    def rows(self) -> tuple[str, str, str, str]:
        """All four, in this order."""
        return self.parent, self.random, self.majority, self.labels


class Comparison(Section):
    """Recipes compared over seeds on one exam."""

    task: str
    """The task of all versions."""
    columns: Distinct
    """Metrics of the task that the tables show; the pooled tests are about the first."""
    quality: str = ""
    """The quality of the task that stands for the reasoning in figure and text; empty: none."""
    parts: str = ""
    """A slice of the task whose values are reported one by one too; empty: all cases together only."""
    arms: Annotated[dict[Text, Distinct], Field(min_length=1)]
    """Name of a recipe to its versions, one a seed; a control is an arm too."""
    rivals: dict[Text, str] = Field(default_factory=dict)
    """Name of a row to the rival whose answers it shows; a test may name it."""
    tests: Annotated[tuple[Pair, ...], Field(strict=False)] = ()
    """Which rows are tested against each other, in the order of the text."""
    published: dict[str, dict[str, float]] = Field(default_factory=dict)
    """Arm to what somebody published of the recipe of that name on other data, by metric."""
    published_parts: dict[str, dict[str, dict[str, float]]] = Field(default_factory=dict)
    """The same for values of the slice `parts`."""
    partition: Partition | None = None
    """Which rows tell apart what a reward is worth; null: none do."""
    primary: Primary | None = None
    """What is tested first of all; its registration must exist before the report. Null: the comparison explores."""

    @property
    def versions(self) -> tuple[str, ...]:
        """All versions, each once."""
        return tuple(dict.fromkeys(version for versions in self.arms.values() for version in versions))

    @property
    def primary_rows(self) -> dict[str, tuple[str, ...]]:
        """The versions of the two rows of `primary`, first and second; of the base, none."""
        names = (self.primary.first, self.primary.second) if self.primary else ()
        return {row: self.arms.get(row, ()) for row in names}

    @model_validator(mode="after")
    def _seeds(self) -> "Comparison":
        for row, versions in self.primary_rows.items():
            if len(versions) == 1:
                raise refusal(
                    f"names {row!r}, which has one version; two or more show a spread of seeds, and a test without one "
                    "takes a lucky seed for a better recipe",
                    "primary",
                )
        return self


class Limit(Section):
    """What a release demands of one metric, in every mode."""

    max: PerScale[float] | None = None
    """The metric is at most this."""
    min: PerScale[float] | None = None
    """The metric is at least this."""
    may_rise: Annotated[float, Field(ge=0)] | None = None
    """By how much the metric may be above the champion's on the same cases, 0 or more."""
    may_fall: Annotated[float, Field(ge=0)] | None = None
    """By how much the metric may be below the champion's on the same cases, 0 or more."""
    paired: bool = False
    """A change for the worse counts only if its whole 95% interval lies beyond what is allowed."""

    @model_validator(mode="after")
    def _limits(self) -> "Limit":
        relative = self.may_rise is not None or self.may_fall is not None
        if self.max is None and self.min is None and not relative:
            raise refusal("limits nothing; give max, min, may_rise or may_fall")
        if self.paired and not relative:
            raise refusal("is true, but there is no change to be tested; give may_rise or may_fall too", "paired")
        return self


class Rebuilt(Section):
    """What a release demands of others: that they built the same bytes."""

    least: Count
    """How many of `rebuilders` must have signed that they did."""


class Gate(Section):
    """What a version must show before it may become the champion of its task."""

    least_cases: Count
    """Cases that the exam must have: fewer show too little."""
    limits: dict[str, Limit]
    """Metric to its limit. The safety metric of the task is always among them."""
    rebuilt: Rebuilt | None = None
    """How many others must have rebuilt it; none by default."""


class Schedule(Section):
    """When a task is retrained, and how long its approver may think."""

    cron: str
    """Minute, hour, day of month, month, day of week."""
    timezone: str = "UTC"
    """A name of the IANA time zone database."""
    answer_within_s: Count = 86400
    """Seconds after which an unanswered request for approval is a no."""
    draft: bool = False
    """Whether a retraining that finds nothing stale drafts the next version from the champion's mined errors."""
