"""The blocks of params.yaml about bases and judges: models that start a lineage, and models that judge its answers."""

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from clinrl.config.base import Count, LearningRate, Section, Seed, Share, check_rows, refusal, unless
from clinrl.config.recipes import Lora

Architecture = Literal["qwen3", "llama", "qwen2"]
Judge = Literal["judge", "second_judge"]


class Embedded(Section):
    """A model that is built here, from scratch: its size and its training."""

    architecture: Architecture = Field(default="qwen3", exclude_if=unless("qwen3"))
    """Kind of decoder: qwen3, llama or qwen2."""
    vocab: int = Field(ge=300, le=65536)
    """Tokens of the byte-level BPE vocabulary, 300 to 65536 (256 bytes and the special tokens must fit)."""
    hidden: int = Field(ge=16, le=8192)
    """Width of the residual stream, 16 to 8192; heads of even width divide it."""
    layers: int = Field(ge=1, le=128)
    """Decoder layers, 1 to 128."""
    heads: Count
    """Attention heads; divides hidden."""
    kv_heads: Count
    """Key and value heads; divides heads."""
    mlp: int = Field(ge=16, le=65_536)
    """Width of the feed-forward layers, 16 to 65,536."""
    steps: Count
    """Optimiser steps; steps x batch is at most 10,000,000."""
    batch: Count
    """Sequences a step."""
    lr: LearningRate
    """Peak learning rate, above 0 and below 1."""
    prompt_weight: Share
    """Weight of prompt tokens in the loss, 0 to 1; tokens of the answer weigh 1."""
    seed: Seed
    """Seed of cases, weights and order, 0 to 2^32 - 1."""

    @model_validator(mode="after")
    def _shape(self) -> "Embedded":
        check_rows(self.steps, self.batch, "batch")
        if self.hidden % (2 * self.heads):
            raise refusal(f"is {self.heads}; it must divide hidden ({self.hidden}) into even widths", "heads")
        if self.heads % self.kv_heads:
            raise refusal(f"is {self.kv_heads}; it must divide heads ({self.heads})", "kv_heads")
        return self


class EmbeddedJudge(Embedded):
    """The recipe of a judge that is built here: it learns the task's lessons, and its prompts are plain text."""

    architecture: Architecture = "qwen2"
    """Kind of decoder: qwen3, llama or qwen2."""
    lessons: Count
    """Pairs of a prompt and the right reply that it learns."""
    prompt_weight: Share = 0.0


class EmbeddedBase(Embedded):
    """The recipe of a base model that is built here, from scratch."""

    template: str = Field(pattern=r"^[a-z0-9_]+$")
    """Name of one of TRL's chat templates that ends a turn as Qwen or Llama does, such as qwen3."""
    cases: Count
    """Cases of the base pool that are rendered as text."""
    forget: Share
    """Chance that a text's reasoning ignores a rule, 0 to 1; drawn for each text and rule. It makes answers noisy on
    purpose."""
    careful: Share = Field(default=0.0, exclude_if=unless(0.0))
    """Share of texts whose reasoning ignores no rule, 0 to 1. A reward can pick such texts out; where several rules
    meet, a model that ignores each of them at random is hardly ever right."""
    max_new_tokens: Count | None = Field(default=None, exclude_if=unless(None))
    """Most tokens of an answer, in place of those of the modes. An episode needs more: all of its turns count, and what
    its tools return. Null: those of the modes."""
    turn_tokens: Count | None = Field(default=None, exclude_if=unless(None))
    """Most tokens of one turn of an episode. Null: those of the modes."""
    judges: dict[Judge, EmbeddedJudge] = Field(default_factory=dict, exclude_if=unless({}))
    """The judges that the task's reward or measures ask, under the names judge and second_judge."""


class HubModel(Section):
    """A checkpoint of the Hugging Face hub, or a folder that holds one: a judge, or a base."""

    repo: str
    """owner/name on the hub, or the absolute path of a folder."""
    revision: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,199}$")
    """Branch, tag or 40-digit commit; the base stage records the commit that it stood for."""
    quantize: Literal["nf4", "none"]
    """nf4: weights held in 4 bits (QLoRA, where they are trained). none: bfloat16."""

    @model_validator(mode="after")
    def _place(self) -> "HubModel":
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", self.repo) and not Path(self.repo).is_absolute():
            says = "it must be owner/name on the hub or the absolute path of a folder, the same in every clone"
            raise refusal(f"is {self.repo!r}; {says}", "repo")
        return self


class HubBase(HubModel):
    """A checkpoint that starts a lineage, and the judges for the task's reward or measures."""

    lora: Lora | None = Field(default=None, exclude_if=unless(None))
    """Shape of every adapter above it, since a lineage has one; null: that of the recipe."""
    recipes: dict[str, dict[str, Any]] = Field(default_factory=dict, exclude_if=unless({}))
    """Recipe to trainer settings, such as those of a publication, that replace its own at the full scale."""
    prefill: bool = Field(default=True, exclude_if=unless(True))
    """Whether the prompt opens the think block in a mode with thinking; false: the model opens it."""
    temperature: float | None = Field(default=None, ge=0, le=2, exclude_if=unless(None))
    """Sampling temperature of exams in every mode, 0 to 2; null: that of the modes."""
    top_p: float | None = Field(default=None, gt=0, le=1, exclude_if=unless(None))
    """Mass of the likeliest tokens that exams sample from, above 0 to 1; null: that of the modes."""
    max_new_tokens: Count | None = Field(default=None, exclude_if=unless(None))
    """As in `embedded`."""
    turn_tokens: Count | None = Field(default=None, exclude_if=unless(None))
    """As in `embedded`."""
    judges: dict[Judge, HubModel] = Field(default_factory=dict, exclude_if=unless({}))
    """The judges that the task's reward or measures ask, under the names judge and second_judge."""


class BaseSpec(Section):
    """The base from which the versions of a task start, at each scale."""

    exam: str
    """The exam data set that the base takes."""
    embedded: EmbeddedBase
    """The base at the embedded scale."""
    full: HubBase
    """The base at the full scale."""
