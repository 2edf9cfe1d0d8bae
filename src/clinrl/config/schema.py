"""The blocks of params.yaml: what a data set, a recipe, a version, a merge and a gate consist of; `bases` has bases.

Each block checks itself when it is read; `params` checks what they say of each other.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from clinrl.config.base import (
    Count,
    Distinct,
    Label,
    LearningRate,
    Name,
    PerScale,
    Place,
    Section,
    Seed,
    Share,
    Targets,
    Text,
    refusal,
    unless,
)


class Mode(Section):
    """One way to question a model. Weights and scorer are the same in every mode."""

    thinking: bool
    """The chat template's thinking switch."""
    temperature: float = Field(ge=0, le=2)
    """Sampling temperature, 0 to 2; 0 is greedy."""
    max_new_tokens: PerScale[Count]
    """Tokens that a turn may use, thinking included."""


MAX_CASES = 1_000_000


class DatasetSpec(Section):
    """A data set drawn from one pool of one task."""

    task: str
    """A folder of clinrl/tasks."""
    file: Annotated[str, Field(exclude=True)] = ""
    """The file of params/ in which the block stands: what DVC watches. It is no part of what is recorded."""
    task_version: Count
    """The task's version that the data set was designed for; the dataset stage requires equality."""
    use: Literal["train", "mine", "exam"]
    """The pool: training, error mining, or the exam. Pools share no template."""
    mix: str
    """One of the task's class mixes."""
    cases: Annotated[int, Field(ge=1, le=MAX_CASES)]
    """Number of distinct cases, at most a million: more would be drawn for days."""
    seed: Seed
    """Seed of the draw, 0 to 2^32 - 1."""
    emphasis: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Rule to how many times as often it decides a case as the mix has it, above 0; rules not named: once."""


class ImportSpec(Section):
    """A data set read from somebody's records, which stay where they are."""

    task: str
    """A folder of clinrl/tasks."""
    task_version: Count
    """The task's version that the data set was designed for; the dataset stage requires equality."""
    use: Literal["train", "mine", "exam"]
    """The pool whose patients it takes: training, error mining, or the exam."""
    source: Place
    """Path of a file, or of a folder, that the task can read."""
    without: Place | Literal[""] = ""
    """Path of other records whose patients and texts are left out: those of an exam on the same patients."""


class Lora(Section):
    """The shape of an adapter. A version warm-starts from its parent's tensors, so a lineage has one shape."""

    rank: int = Field(ge=1, le=1024)
    """Rank of the update, 1 to 1024."""
    alpha: float = Field(gt=0)
    """The update is scaled by alpha / rank; above 0."""
    targets: Targets
    """all-linear, or names of the modules that are adapted."""

    def __str__(self) -> str:
        return f"rank {self.rank}, alpha {self.alpha:g}, targets {self.targets}"


class Phase(Section):
    """A part of a training that serves some of the cases only."""

    share: Annotated[float, Field(gt=0, le=1)]
    """Of the optimiser steps, above 0 to 1; the shares of all phases sum to 1."""
    slice: str
    """A slice of the task, the same in all phases."""
    values: Distinct
    """Which of its values are served."""


class Stream(Section):
    """How training rows are drawn from a data set."""

    repeat: dict[Label, Count] = Field(default_factory=dict)
    """Label to weight of its cases, 1 or more; labels not named have weight 1."""
    cap: dict[Label, Annotated[float, Field(gt=0, le=1)]] = Field(default_factory=dict)
    """Label to the largest share of rows it may take, above 0 to 1."""
    phases: Annotated[tuple[Phase, ...], Field(strict=False)] = Field(default=(), exclude_if=unless(()))
    """Which cases are served when, in order; empty: all of them throughout."""

    @model_validator(mode="after")
    def _whole(self) -> "Stream":
        total = math.fsum(phase.share for phase in self.phases)
        if self.phases and not math.isclose(total, 1.0, abs_tol=1e-6):
            raise refusal(f"have shares that sum to {total:g}; they must sum to 1", "phases")
        if len(slices := sorted({phase.slice for phase in self.phases})) > 1:
            raise refusal(f"name the slices {', '.join(slices)}; all phases must name one and the same", "phases")
        return self


def lengths(phases: Sequence[Phase], steps: int) -> list[int]:
    """The optimiser steps of each phase, of so many together. Whole ones, each within one of its share."""
    ends = [round(math.fsum(phase.share for phase in phases[: place + 1]) * steps) for place in range(len(phases))]
    return [end - start for start, end in pairwise([0, *ends])]


class Trainer(Section):
    """What all trainers have in common."""

    lr: LearningRate
    """Peak learning rate, above 0 and below 1."""
    steps: Count
    """Optimiser steps."""
    micro_batch: Count | None = None
    """Sequences that are in memory at once; divides the sequences of a step. Null: all of them."""
    checkpoint_every: Count = 5
    """Optimiser steps between two checkpoints: what a killed run can lose."""
    on_alarm: Literal["stop", "warn"] = "stop"
    """stop: an alarm of that level ends the training. warn: it is said, and the training goes on."""

    def _divides(self, sequences: int, what: str) -> None:
        if self.micro_batch and sequences % self.micro_batch:
            raise refusal(f"is {self.micro_batch}; it must divide {what} ({sequences})", "micro_batch")


class SftTrainer(Trainer):
    """Supervised fine-tuning at one scale."""

    batch: Count
    """Sequences a step."""

    @model_validator(mode="after")
    def _fits(self) -> "SftTrainer":
        self._divides(self.batch, "batch")
        return self


class HeldOut(Section):
    """What a run in progress is asked, on cases that it does not train on."""

    cases: Count
    """Cases of the mine pool, each answered greedily once in every mode of the recipe."""
    every: Count
    """Optimiser steps between two looks; the first is before the first step."""


class GrpoTrainer(Trainer):
    """GRPO at one scale. A step samples prompts x group completions."""

    prompts: Count
    """Distinct prompts a step."""
    group: int = Field(ge=2)
    """Completions a prompt, 2 or more: the advantage is relative to the group."""
    temperature: float = Field(gt=0)
    """Sampling temperature, above 0: a greedy group has no variance to learn from."""
    beta: float = Field(ge=0)
    """Weight of the KL penalty against the parent, 0 or more; 0 loads no reference."""
    max_completion: int = Field(ge=8)
    """Tokens of a completion, 8 or more."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """By what an advantage is divided: the deviation within its group, that of the step, or nothing, so that a small
    difference of rewards teaches little (as in Dr. GRPO)."""
    vllm: bool = False
    """Sample with vLLM."""
    held_out: HeldOut | None = None
    """Held-out looks while training runs; null: none."""

    @model_validator(mode="after")
    def _fits(self) -> "GrpoTrainer":
        self._divides(self.prompts * self.group, "prompts x group")
        return self


class Profile(Section):
    """What all recipes have in common."""

    modes: Distinct
    """Modes that training rows are asked in, in turn: row by row, in GRPO on episodes step by step."""
    lora: Lora
    """Shape of the adapter."""
    stream: Stream = Stream()
    """How rows are drawn."""
    view: str = Field(default="given", exclude_if=unless("given"))
    """How the cases are shown: given, as they are, or a view of the task."""
    qlora: bool = Field(default=False, exclude_if=unless(False))
    """Whether the base is held in 4 bits (nf4) where it is not quantised itself, in training and in the exam."""
    waiver: str = ""
    """Why a recipe that the probe refuses, or that an alarm would stop, is trained all the same; what it trains is
    never released. Empty: it is not trained."""


class SftProfile(Profile):
    """A recipe that imitates the gold answers: the root of a lineage."""

    method: Literal["sft"]
    """sft or grpo."""
    omit: dict[str, Share] = Field(default_factory=dict)
    """Rule to the share of its cases whose label ignores it, 0 to 1: the declared gaps of the labels."""
    trainer: PerScale[SftTrainer]
    """The trainer at each scale."""


class GrpoProfile(Profile):
    """A recipe that follows a reward."""

    method: Literal["grpo"]
    """sft or grpo."""
    reward: dict[str, Any]
    """The task's Reward, as a mapping; `Params.reward` gives the object."""
    trainer: PerScale[GrpoTrainer]
    """The trainer at each scale."""


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


class Fold(Section):
    """A full model: a version's adapter added to the weights of its base."""

    task: str
    """The task of the version."""
    version: str
    """The version that is folded."""
    exam: str
    """The version's exam, which the merged model sits too."""


class Blend(Section):
    """Two versions of one base as one model: the weighted sum of what their adapters change, or a sparser reading."""

    task: str
    """The task of both versions."""
    exam: str
    """The first version's exam, which the blend sits too."""
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


class Mining(Section):
    """Error mining of one version."""

    task: str
    """The task of the version."""
    data: str
    """A data set whose use is mine."""


class External(Section):
    """An exam of one version on cases from elsewhere, beside published results."""

    task: str
    """The task of the version."""
    data: str
    """A data set whose use is exam."""


class BaseProtocol(Section):
    """The published protocol played by a base, and its exam answered once more at a temperature."""

    task: str
    """The task, one with a published protocol."""
    exam: str
    """The exam that it sat."""
    seeds: Annotated[tuple[Seed, ...], Field(strict=False, min_length=1)]
    """Seeds, each of one episode a level: of the draw and of the sampling."""
    levels: Distinct
    """Levels of the task."""
    temperature: float = Field(gt=0, le=2)
    """Sampling temperature, above 0 to 2."""
    episodes: Count
    """Cases of the exam a level: the first so many."""

    @model_validator(mode="after")
    def _apart(self) -> "BaseProtocol":
        if len(set(self.seeds)) < len(self.seeds):
            raise refusal(f"names {', '.join(map(str, self.seeds))}; each may be named once", "seeds")
        return self


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


BASE = "base"
"""The row of the untrained base in a comparison; under another view of the task it is `base, <view>`."""


class Pair(Section):
    """Two rows of a comparison that are tested against each other."""

    first: str
    """An arm, a control, `base`, or `base, <view>`."""
    second: str
    """Another; differences are the first less the second."""
    says: Text
    """What the first has and the second has not: what a difference between them is about."""

    @model_validator(mode="after")
    def _two(self) -> "Pair":
        if self.first == self.second:
            raise refusal(f"is {self.second!r}, as is first; a test takes two rows", "second")
        return self


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
    """Name of a recipe to its versions, one a seed."""
    controls: dict[Text, Distinct] = Field(default_factory=dict)
    """Name of a recipe that shows what an arm must beat to its versions, one a seed."""
    tests: Annotated[tuple[Pair, ...], Field(strict=False)] = ()
    """Which rows are tested against each other, in the order of the text."""
    published: dict[str, dict[str, float]] = Field(default_factory=dict)
    """Arm or control to what somebody published of the recipe of that name on other data, by metric."""
    published_parts: dict[str, dict[str, dict[str, float]]] = Field(default_factory=dict)
    """The same for values of the slice `parts`."""

    @property
    def rows(self) -> dict[str, tuple[str, ...]]:
        """The versions of every arm and control."""
        return {**self.arms, **self.controls}

    @property
    def versions(self) -> tuple[str, ...]:
        """All versions, each once."""
        return tuple(dict.fromkeys(version for versions in self.rows.values() for version in versions))


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
