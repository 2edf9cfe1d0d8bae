"""The recipes of params.yaml: how training rows are drawn, the shape of the adapter, and the trainer at each scale."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from clinrl.config.base import Count, Distinct, LearningRate, PerScale, Section, Share, check_rows, refusal, unless
from clinrl.errors import format_value


def _targets(value: Any) -> Any:
    if value == "all-linear":
        return value
    names = value if isinstance(value, list | tuple) else ()
    if not names or not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
        raise refusal(f"is {format_value(value)}; it must be all-linear or a list of distinct module names")
    return tuple(sorted(names))


class Lora(Section):
    """The shape of an adapter. A version warm-starts from its parent's tensors, so a lineage has one shape."""

    rank: int = Field(ge=1, le=1024)
    """Rank of the update, 1 to 1024."""
    alpha: float = Field(gt=0)
    """The update is scaled by alpha / rank; above 0."""
    targets: Annotated[str | tuple[str, ...], BeforeValidator(_targets)]
    """all-linear, or names of the modules that are adapted."""

    def __str__(self) -> str:
        return f"rank {self.rank}, alpha {self.alpha:g}, targets {self.targets}"


class Phase(Section):
    """A part of a training that draws from some of the cases only."""

    share: Annotated[float, Field(gt=0, le=1)]
    """Of the optimiser steps, above 0 to 1; the shares of all phases sum to 1."""
    slice: str
    """A slice of the task, the same in all phases."""
    values: Distinct
    """Its values whose cases are drawn."""


class Stream(Section):
    """How training rows are drawn from a data set."""

    repeat: dict[int | str, Annotated[int, Field(ge=1, le=1000)]] = Field(default_factory=dict)
    """Label to how often each of its cases stands in one pass over the data, 1 to 1,000; labels not named: once."""
    cap: dict[int | str, Annotated[float, Field(gt=0, le=1)]] = Field(default_factory=dict)
    """Label to the largest share of rows it may take, above 0 to 1."""
    phases: Annotated[tuple[Phase, ...], Field(strict=False)] = Field(default=(), exclude_if=unless(()))
    """Parts of the training, in order, each with its own cases; empty: all cases throughout."""

    @model_validator(mode="after")
    def _whole(self) -> "Stream":
        total = math.fsum(phase.share for phase in self.phases)
        if self.phases and not math.isclose(total, 1.0, abs_tol=1e-6):
            raise refusal(f"have shares that sum to {total:g}; they must sum to 1", "phases")
        if len(slices := sorted({phase.slice for phase in self.phases})) > 1:
            raise refusal(f"name the slices {', '.join(slices)}; all phases must name one and the same", "phases")
        return self


def lengths(phases: Sequence[Phase], steps: int) -> list[int]:
    """The optimiser steps of each phase, which sum to `steps`. Each differs by at most one from its exact share."""
    ends = [round(math.fsum(phase.share for phase in phases[: place + 1]) * steps) for place in range(len(phases))]
    return [end - start for start, end in pairwise([0, *ends])]


class Trainer(Section):
    """The settings that all trainers have."""

    lr: LearningRate
    """Peak learning rate, above 0 and below 1."""
    steps: Count
    """Optimiser steps; with the sequences of a step, at most 10,000,000 in all."""
    micro_batch: Count | None = None
    """Sequences that are in memory at once; divides the sequences of a step. Null: all of them."""
    checkpoint_every: Count = 5
    """Optimiser steps between two checkpoints: what a killed run can lose."""
    on_alarm: Literal["stop", "warn"] = "stop"
    """What follows from an alert of level stop. stop: it ends the training. warn: it is printed, and the training goes
    on."""
    loss_path: Literal["stock", "shared"] = Field(default="stock", exclude_if=unless("stock"))
    """How the loss is computed. stock: by TRL, from every row of a step, padded to the longest. shared: the same loss,
    from rows of like length together; GRPO also skips rows that cannot change the gradient, and reads a group's prompt
    once. The first step compares both, and TRL's is used if they differ. In GRPO the logged entropy is of computed
    rows."""
    scheduler: Literal["linear", "cosine"] = Field(default="linear", exclude_if=unless("linear"))
    """How the learning rate falls to 0 after the warm-up: along a line, or half a cosine."""
    warmup: int = Field(default=0, ge=0, exclude_if=unless(0))
    """Optimiser steps in which the learning rate rises from 0 to its peak, 0 or more, fewer than steps."""
    optimizer: Literal["adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit"] = Field(
        default="adamw_torch_fused", exclude_if=unless("adamw_torch_fused")
    )
    """AdamW of torch, or with states of 8 bits, which needs CUDA. paged: states that do not fit on the GPU move to the
    host."""
    adam_beta2: float = Field(default=0.999, ge=0, lt=1, exclude_if=unless(0.999))
    """AdamW's beta2, 0 to below 1; its beta1 is 0.9."""
    weight_decay: Share = Field(default=0.0, exclude_if=unless(0.0))
    """Decoupled weight decay of the adapter's matrices, 0 to 1."""
    max_grad_norm: float = Field(default=1.0, gt=0, exclude_if=unless(1.0))
    """Norm to which a step's gradient is clipped, above 0."""
    generation_path: Literal["stock", "shared"] = Field(default="stock", exclude_if=unless("stock"))
    """How completions are written, in training and in the version's exams. stock: by TRL and transformers. shared: the
    same, but each prompt is read once, and ended completions leave the batch. Greedy tokens differ by rounding alone;
    the same seed draws other tokens."""

    @model_validator(mode="after")
    def _warms_up(self) -> "Trainer":
        if self.warmup >= self.steps:
            raise refusal(f"is {self.warmup}; it must be less than steps ({self.steps})", "warmup")
        return self

    def _check_step(self, sequences: int, what: str) -> None:
        check_rows(self.steps, sequences, what)
        if self.micro_batch and sequences % self.micro_batch:
            raise refusal(f"is {self.micro_batch}; it must divide {what} ({sequences})", "micro_batch")


class SftTrainer(Trainer):
    """Supervised fine-tuning at one scale."""

    batch: Count
    """Sequences a step."""

    @model_validator(mode="after")
    def _fits(self) -> "SftTrainer":
        self._check_step(self.batch, "batch")
        return self


class HeldOut(Section):
    """Checks of a run in progress on cases that it does not train on."""

    cases: Count
    """Cases of the mine pool, each answered greedily once in every mode of the recipe."""
    every: Count
    """Optimiser steps between two checks; the first is before the first step."""


class RejectionTrainer(SftTrainer):
    """Rejection sampling at one scale: prompts x group completions of the parent, then imitation of the kept ones."""

    prompts: Count
    """Prompts of the stream that are sampled before the first step, in all; prompts x group is at most 10,000,000."""
    group: Count
    """Completions a prompt."""
    temperature: float = Field(gt=0, le=2)
    """Sampling temperature, above 0 to 2."""
    max_completion: int = Field(ge=8, le=1_000_000)
    """Tokens of a completion, 8 to 1,000,000."""
    keep: Count = 4
    """Most completions of a prompt that are imitated: of different ones, those of the highest reward."""
    threshold: float | None = None
    """Least reward of a completion that is kept. Null: its answer is the gold label, whatever else it earns."""
    relabel: bool = Field(default=False, exclude_if=unless(False))
    """Whether every completion is kept, with the gold label in place of its own: labels are imitated after the parent's
    own reasons. For tasks with ordered answers."""

    @model_validator(mode="after")
    def _samples(self) -> "RejectionTrainer":
        check_rows(self.prompts, self.group, "group", "prompts")
        return self


class GrpoTrainer(Trainer):
    """GRPO at one scale. A step samples prompts x group completions."""

    prompts: Count
    """Distinct prompts a step."""
    group: int = Field(ge=2)
    """Completions a prompt, 2 or more: the advantage is relative to the group."""
    temperature: float = Field(gt=0)
    """Sampling temperature, above 0: a greedy group has no variance to learn from."""
    beta: float = Field(ge=0)
    """Weight of the KL penalty against the parent, 0 or more; with 0 no reference model is loaded."""
    max_completion: int = Field(ge=8, le=1_000_000)
    """Tokens of a completion, 8 to 1,000,000; of an episode, all of its turns and what its tools return."""
    turn_tokens: int | None = Field(default=None, ge=8, exclude_if=unless(None))
    """Most tokens of one turn of an episode, 8 to max_completion; a turn that reaches them without an end ends the
    episode. Null: whatever is left of max_completion."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """By what an advantage is divided: the standard deviation of rewards in its group, that of the step, or nothing.
    With nothing a small difference of rewards teaches little (as in Dr. GRPO)."""
    loss_type: Literal["dapo", "bnpo", "grpo", "dr_grpo"] = Field(default="dapo", exclude_if=unless("dapo"))
    """By what TRL divides the sum over tokens. dapo: the tokens of the step. bnpo: of the micro-batch. grpo: of the
    completion. dr_grpo: max_completion."""
    vllm: bool = False
    """Always false, and kept since every record has it: `sampler` in machine.yaml says what samples."""
    held_out: HeldOut | None = None
    """Held-out checks while training runs; null: none."""

    @model_validator(mode="after")
    def _fits(self) -> "GrpoTrainer":
        if self.vllm:
            raise refusal(
                "is true, but machine.yaml sets the sampler; leave it out, and set sampler to vllm there", "vllm"
            )
        if self.turn_tokens is not None and self.turn_tokens > self.max_completion:
            raise refusal(
                f"is {self.turn_tokens}; a turn has at most the tokens of all ({self.max_completion})", "turn_tokens"
            )
        self._check_step(self.prompts * self.group, "prompts x group")
        return self


class Profile(Section):
    """The settings that all recipes have."""

    modes: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    """Modes of the training rows. They take turns row by row, in GRPO on episodes step by step; a mode that is listed
    twice has two turns."""
    lora: Lora
    """Shape of the adapter. At the full scale `bases.TASK.full.lora` replaces it, if it is set."""
    stream: Stream = Stream()
    """How rows are drawn."""
    view: str = Field(default="given", exclude_if=unless("given"))
    """How the cases are shown: `given`, as they are, or the name of an input variant of the task."""
    qlora: bool = Field(default=False, exclude_if=unless(False))
    """Whether the base is held in 4 bits (nf4) where it is not quantised itself, in training and in the exam."""
    waiver: str = ""
    """Why a recipe is trained although the reward audit refuses it or an alert would stop it; such a version is never
    released. Empty: it is not trained then."""


class SftProfile(Profile):
    """A recipe that imitates the gold answers: the root of a lineage."""

    method: Literal["sft"]
    """sft, rejection or grpo."""
    omit: dict[str, Share] = Field(default_factory=dict)
    """Rule to the share of its cases, 0 to 1, whose gold answer ignores the rule: a gap that is planted on purpose."""
    labels_only: bool = Field(default=False, exclude_if=unless(False))
    """Whether the answer is taught without reasons; in mode think it follows an empty think block."""
    trainer: PerScale[SftTrainer]
    """The trainer at each scale."""


class RejectionProfile(Profile):
    """A recipe that imitates completions of the parent that the reward keeps; it needs labels and no gold reasons."""

    method: Literal["rejection"]
    """sft, rejection or grpo."""
    reward: dict[str, Any]
    """Settings of the task's reward, by key; keys that are left out have their defaults."""
    trainer: PerScale[RejectionTrainer]
    """The trainer at each scale."""

    @model_validator(mode="after")
    def _has_no_phases(self) -> "RejectionProfile":
        if self.stream.phases:
            raise refusal("are set, but what was sampled is taught in shuffled order; leave them out", "stream.phases")
        return self


class GrpoProfile(Profile):
    """A recipe that follows a reward."""

    method: Literal["grpo"]
    """sft, rejection or grpo."""
    reward: dict[str, Any]
    """Settings of the task's reward, by key; keys that are left out have their defaults."""
    placebo: Literal["", "random", "shuffled", "format", "majority"] = Field(default="", exclude_if=unless(""))
    """What is paid in place of the task's score: a control, which needs a waiver. random: the least or the greatest
    reward, by chance. shuffled: the scores of the step, permuted. format: the greatest for a readable answer, else the
    least. majority: the greatest for the most frequent answer of its group, else the least."""
    trainer: PerScale[GrpoTrainer]
    """The trainer at each scale."""

    @model_validator(mode="after")
    def _is_waived(self) -> "GrpoProfile":
        if self.placebo and not self.waiver:
            raise refusal(
                f"is {self.placebo!r}, a control that is never released; say in waiver what it is for", "placebo"
            )
        return self


HANDLING = {"checkpoint_every", "on_alarm"}
"""Trainer settings that change how a run is handled, but not the adapter."""
