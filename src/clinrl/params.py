"""params.yaml, parsed once: every value, name and cross-reference is checked when it is loaded.

A `Params` object is therefore always sound, and a stage may look up what it names without asking again. Whatever is
wrong is said in one sentence that names the key, the value and what is allowed.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator

from clinrl.errors import ParamsError
from clinrl.section import (
    Count,
    Distinct,
    Label,
    LearningRate,
    Name,
    PerScale,
    Scale,
    Section,
    Seed,
    Share,
    Targets,
    known,
    read_yaml,
    refusal,
    sentence,
)
from clinrl.task import get_task, task_names


class EmbeddedBase(Section):
    """The recipe of a base model that is built here, from scratch."""

    template: str = Field(pattern=r"^[a-z0-9_]+$")
    """Name of the chat template."""
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
    mlp: int = Field(ge=16)
    """Width of the feed-forward layers, 16 or more."""
    cases: Count
    """Cases of the base pool that are rendered as text."""
    forget: Share
    """Share of rendered answers that are deliberately noisy, 0 to 1."""
    steps: Count
    """Optimiser steps."""
    batch: Count
    """Sequences a step."""
    lr: LearningRate
    """Peak learning rate, above 0 and below 1."""
    prompt_weight: Share
    """Weight of prompt tokens in the loss, 0 to 1; tokens of the answer weigh 1."""
    seed: Seed
    """Seed of cases, weights and order, 0 to 2^32 - 1."""

    @model_validator(mode="after")
    def _shape(self) -> "EmbeddedBase":
        if self.hidden % (2 * self.heads):
            raise refusal(f"is {self.heads}; it must divide hidden ({self.hidden}) into even widths", "heads")
        if self.heads % self.kv_heads:
            raise refusal(f"is {self.kv_heads}; it must divide heads ({self.heads})", "kv_heads")
        return self


class HubBase(Section):
    """A checkpoint of the Hugging Face hub, or a folder that holds one."""

    repo: str
    """owner/name on the hub, or an existing folder."""
    revision: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,199}$")
    """Branch, tag or 40-digit commit; the base stage records the commit that it stood for."""
    quantize: Literal["nf4", "none"]
    """nf4: weights held in 4 bits (QLoRA). none: bfloat16."""

    @model_validator(mode="after")
    def _place(self) -> "HubBase":
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", self.repo) and not Path(self.repo).is_dir():
            raise refusal(f"is {self.repo!r}; it must be owner/name on the hub or an existing folder", "repo")
        return self


class BaseSpec(Section):
    """Where a task's lineage starts."""

    exam: str
    """The exam data set that the base sits."""
    embedded: EmbeddedBase
    """The base at the embedded scale."""
    full: HubBase
    """The base at the full scale."""


class Mode(Section):
    """One way to question a model. Weights and scorer are the same in every mode."""

    thinking: bool
    """The chat template's thinking switch."""
    temperature: float = Field(ge=0, le=2)
    """Sampling temperature, 0 to 2; 0 is greedy."""
    max_new_tokens: PerScale[Count]
    """Tokens that a turn may use, thinking included."""


class DatasetSpec(Section):
    """A data set drawn from one pool of one task."""

    task: str
    """A folder of clinrl/tasks."""
    task_version: Count
    """The task's version that the data set was designed for; the dataset stage requires equality."""
    use: Literal["train", "mine", "exam"]
    """The pool: training, error mining, or the exam. Pools share no template."""
    mix: str
    """One of the task's class mixes."""
    cases: Count
    """Number of distinct cases."""
    seed: Seed
    """Seed of the draw, 0 to 2^32 - 1."""


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


class Stream(Section):
    """How training rows are drawn from a data set."""

    repeat: dict[Label, Count] = Field(default_factory=dict)
    """Label to weight of its cases, 1 or more; labels not named have weight 1."""
    cap: dict[Label, Annotated[float, Field(gt=0, le=1)]] = Field(default_factory=dict)
    """Label to the largest share of rows it may take, above 0 to 1."""


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
    vllm: bool = False
    """Sample with vLLM."""

    @model_validator(mode="after")
    def _fits(self) -> "GrpoTrainer":
        self._divides(self.prompts * self.group, "prompts x group")
        return self


class Profile(Section):
    """What all recipes have in common."""

    modes: Distinct
    """Modes that training rows are asked in."""
    lora: Lora
    """Shape of the adapter."""
    stream: Stream = Stream()
    """How rows are drawn."""


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


class Params(Section):
    """The whole of params.yaml."""

    scale: Scale
    """embedded or full: which block of bases, budgets and trainers is active."""
    bases: dict[str, BaseSpec]
    """Task to its base."""
    modes: dict[Name, Mode]
    """Name to mode."""
    datasets: dict[Name, DatasetSpec]
    """Name to data set."""
    profiles: dict[Name, Annotated[SftProfile | GrpoProfile, Field(discriminator="method")]]
    """Name to recipe."""
    versions: dict[Name, VersionSpec]
    """Name to version."""

    @model_validator(mode="after")
    def _references(self) -> "Params":
        for task, base in self.bases.items():
            known("bases", task, task_names(), "a task")
            self._check_use(f"bases.{task}.exam", base.exam, "exam", task)
        for name, dataset in self.datasets.items():
            known(f"datasets.{name}.task", dataset.task, task_names(), "a task")
            known(f"datasets.{name}.mix", dataset.mix, get_task(dataset.task).mixes, f"a mix of {dataset.task}")
        for name, profile in self.profiles.items():
            for mode in profile.modes:
                known(f"profiles.{name}.modes", mode, self.modes, "a mode")
        for name, version in self.versions.items():
            self._check_names(f"versions.{name}", name, version)
        for name, version in self.versions.items():
            self._check_parent(name, version)
            self._check_recipe(name, version)
        return self

    def _check_names(self, at: str, name: str, version: VersionSpec) -> None:
        if name.endswith("-base") or name in ("data", "probe"):
            raise ParamsError(f"{at} is a reserved name: a version is not called data, probe or anything-base")
        known(f"{at}.task", version.task, self.bases, "a task with a base")
        self._check_use(f"{at}.data", version.data, "train", version.task)
        self._check_use(f"{at}.exam", version.exam, "exam", version.task)
        known(f"{at}.profile", version.profile, self.profiles, "a profile")

    def _check_use(self, at: str, dataset: str, use: str, task: str) -> None:
        """Refuse a data set of another task or another pool: an exam is never training data."""
        fitting = [name for name, spec in self.datasets.items() if (spec.use, spec.task) == (use, task)]
        spec = self.datasets.get(dataset)
        instead = f" but {spec.use} data of {spec.task}" if spec else ""
        known(at, dataset, fitting, f"{use} data of {task}{instead}")

    def _check_parent(self, name: str, version: VersionSpec) -> None:
        root = f"{version.task}-base"
        family = [other for other, spec in self.versions.items() if spec.task == version.task and other != name]
        known(
            f"versions.{name}.parent", version.parent, [root, *family], f"another version of {version.task} or its base"
        )
        self.lineage(name)
        if version.parent == root:
            return
        profile, before = self.profiles[version.profile], self.profiles[self.versions[version.parent].profile]
        at = f"versions.{name}.profile is {version.profile!r}"
        if profile.lora != before.lora:
            raise ParamsError(
                f"{at}, whose lora ({profile.lora}) is not that of its parent {version.parent} "
                f"({before.lora}); only a child of {root} may choose another"
            )
        if (profile.method, before.method) == ("sft", "grpo"):
            raise ParamsError(
                f"{at}, an sft recipe after the grpo version {version.parent}, and imitation would undo what the "
                "reward taught; allowed: a grpo profile, or an sft parent"
            )

    def _check_recipe(self, name: str, version: VersionSpec) -> None:
        """Refuse a profile that does not fit the task of a version that uses it."""
        at, profile, task = f"profiles.{version.profile}", self.profiles[version.profile], get_task(version.task)
        for key, labels in (("repeat", profile.stream.repeat), ("cap", profile.stream.cap)):
            for label in labels:
                known(f"{at}.stream.{key}", label, task.labels, f"a label of {task.name}")
        caps = profile.stream.cap.values()
        if len(caps) == len(task.labels) and sum(caps) < 1:
            raise ParamsError(f"{at}.stream.cap caps every label and sums to {sum(caps):g}; it must reach 1")
        if isinstance(profile, SftProfile):
            for rule in profile.omit:
                known(f"{at}.omit", rule, task.rules, f"a rule of {task.name}")
            return
        self.reward(name)
        quantize = self.bases[version.task].full.quantize
        if profile.trainer["full"].vllm and quantize != "none":
            raise ParamsError(
                f"{at}.trainer.full.vllm is true, but bases.{version.task}.full.quantize is {quantize!r} and vLLM must "
                "serve the weights that are trained; allowed: quantize none, or vllm false"
            )

    def base(self, task: str) -> EmbeddedBase | HubBase:
        """The base of a task at the active scale. Raises ParamsError for a task without one."""
        known("params.yaml", task, self.bases, "a task with a base")
        return self.bases[task].embedded if self.scale == "embedded" else self.bases[task].full

    def trainer(self, profile: str) -> SftTrainer | GrpoTrainer:
        """The trainer of a profile at the active scale. Raises ParamsError for an unknown profile."""
        known("params.yaml", profile, self.profiles, "a profile")
        return self.profiles[profile].trainer[self.scale]

    def budget(self, mode: str) -> int:
        """Tokens that a turn may use in a mode, at the active scale. Raises ParamsError for an unknown mode."""
        known("params.yaml", mode, self.modes, "a mode")
        return self.modes[mode].max_new_tokens[self.scale]

    def lineage(self, version: str) -> tuple[str, ...]:
        """A version and its ancestors, root first, without <task>-base. Raises ParamsError for an unknown version."""
        known("params.yaml", version, self.versions, "a version")
        chain = dict.fromkeys([version])
        while (version := self.versions[version].parent) in self.versions:
            if version in chain:
                circle = " -> ".join([*chain, version])
                raise ParamsError(f"versions.{version}.parent closes a circle ({circle}); a lineage must end at a base")
            chain[version] = None
        return tuple(reversed(chain))

    def reward(self, version: str) -> BaseModel:
        """The task's Reward that a version trains on. Raises ParamsError for an unknown version, or one without."""
        known("params.yaml", version, self.versions, "a version")
        spec = self.versions[version]
        profile, model = self.profiles[spec.profile], get_task(spec.task).Reward
        if isinstance(profile, SftProfile):
            raise ParamsError(f"versions.{version}.profile is {spec.profile!r}, an sft recipe: it has no reward")
        try:
            return model.model_validate(profile.reward, strict=True)
        except ValidationError as error:
            raise ParamsError(sentence(error, model, f"profiles.{spec.profile}.reward")) from None


def load_params(path: Path = Path("params.yaml")) -> Params:
    """Read, parse and check params.yaml. Raises ParamsError with one sentence about the first thing that is wrong."""
    parsed = read_yaml(path)
    try:
        return Params.model_validate(parsed)
    except ValidationError as error:
        raise ParamsError(f"{path}: {sentence(error, Params)}") from None
    except ParamsError as error:
        raise ParamsError(f"{path}: {error}") from None
