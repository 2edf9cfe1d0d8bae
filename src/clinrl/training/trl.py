"""The two trainers, built on TRL: their data sets, their settings, and the adapter that they start from.

Both take prompts that `chat.render` wrote, so that the mode of a row decides its prompt, and both take the rows in the
order of the stream. One optimiser step of GRPO is one round of generation, so that training can be resumed exactly from
every checkpoint.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from transformers import set_seed
from trl import GRPOConfig, SFTConfig
from trl.chat_template_utils import qwen3_template

from clinrl import paths
from clinrl.artifacts import write_json
from clinrl.config.machine import sequences_of
from clinrl.config.recipes import Phase, Trainer
from clinrl.data.sampling import phase_of
from clinrl.errors import TrainingError
from clinrl.models import bases, hub, opening
from clinrl.models.chat import encode, encode_pieces, end_tokens, render, results, to_pieces
from clinrl.models.generate import check_room, window
from clinrl.models.judges import Judges
from clinrl.models.rollout import schemas
from clinrl.tasks.base import Task
from clinrl.training.loss import CheckedSFTTrainer, SharedLossTrainer
from clinrl.training.monitor import HeldOut
from clinrl.training.reward_fn import Reader, reward_function
from clinrl.training.rows import Row, Taught
from clinrl.training.step_metrics import phase_metrics
from clinrl.training.world import ALONE, World, is_on_cpu
from clinrl.types import Message


def start_adapter(model: Any, spec: Mapping[str, Any], parent: Path | None) -> Any:
    """The base with a trainable adapter: a copy of the parent's, or without one a new adapter that changes nothing yet.

    Raises TrainingError if nothing in it can be trained, or if its weights are not the parent's, bit for bit.
    """
    lora = spec["lora"]
    if parent is None:
        set_seed(spec["seed"])
        config = LoraConfig(
            r=lora["rank"],
            lora_alpha=lora["alpha"],
            target_modules=lora["targets"],
            lora_dropout=0.0,  # policy and reference must not differ by chance
            bias="none",
            task_type="CAUSAL_LM",
        )
        adapted = get_peft_model(model, config)
        if others := [name for name in adapter_state(adapted) if opening.factor_of(name) is None]:
            raise TrainingError(f"lora.targets adapts {others[0]}, which is no linear layer; leave it out")
        if isinstance(adapted.get_output_embeddings(), LoraLayer):
            raise TrainingError("lora.targets adapts the output layer, whose factors the loss passes by; leave it out")
    else:
        adapted = opening.adapted(model, parent, is_trainable=True)
        # At each checkpoint PEFT compares vocabularies with this config, and given a repository it asks the hub.
        adapted.peft_config["default"].base_model_name_or_path = model.name_or_path
        loaded, saved = adapter_state(adapted), load_file(parent / opening.WEIGHTS)
        if loaded.keys() != saved.keys() or not all(torch.equal(loaded[name], saved[name]) for name in saved):
            raise TrainingError(f"the adapter in memory is not that of {parent}: was the base replaced by another?")
    if not any(parameter.requires_grad for parameter in adapted.parameters()):
        raise TrainingError("the adapter has no trainable parameter")
    return adapted


def adapter_state(model: Any) -> dict[str, torch.Tensor]:
    """A copy of the trained adapter's tensors on the CPU, by their names in its file."""
    state = get_peft_model_state_dict(model, adapter_name="default", save_embedding_layers=False)
    return {name: state[name].detach().cpu().clone().contiguous() for name in sorted(state)}


def differs(model: Any, start: Mapping[str, torch.Tensor]) -> bool:
    """Whether the adapter is no longer what `adapter_state` returned at its start, bit for bit."""
    return any(not torch.equal(tensor, start[name]) for name, tensor in adapter_state(model).items())


def write_adapter(model: Any, tokenizer: Any, spec: dict[str, Any], folder: Path) -> None:
    """Write the adapter's weights, its configuration and the tokenizer: the same bytes for the same weights.

    PEFT would write a set, whose order depends on the hash seed, and the base's path on this machine; the tokenizer
    would write whether HF_HUB_OFFLINE is set. All three are replaced. A base from the hub is named by its repository
    and commit.
    """
    write_weights(model, spec, folder)
    tokenizer.init_kwargs["local_files_only"] = False
    tokenizer.save_pretrained(folder)


def write_weights(model: Any, spec: Mapping[str, Any], folder: Path) -> None:
    """Write only the adapter's weights and its configuration."""
    save_file(adapter_state(model), folder / opening.WEIGHTS, metadata={"format": "pt"})
    config = model.peft_config["default"].to_dict()
    config["inference_mode"] = True
    named = bases.reference(paths.base(spec["task"]))  # other machines have no such folder, and load it from the hub
    config["base_model_name_or_path"] = named.get("repo", str(paths.base(spec["task"])))
    config["revision"] = hub.COMMIT.fullmatch(named.get("commit", "")) and named["commit"]
    write_json(folder / opening.CONFIG, {key: _plain(value) for key, value in config.items()})


def _plain(value: Any) -> Any:
    """The value as JSON can hold it, always in the same order: sets sorted, enums as their values."""
    if isinstance(value, set):
        return sorted(value)
    return value.value if isinstance(value, Enum) else value


def restore_precision(model: Any, start: Mapping[str, torch.Tensor]) -> None:
    """Cast the adapter back to float32 and reload `start`: TRL casts a quantised model's to bfloat16, which loses small
    updates. Raises TrainingError if it then still differs from `start`."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    set_peft_model_state_dict(model, dict(start), adapter_name="default")
    if differs(model, start):
        raise TrainingError("building the trainer changed the adapter, which must start as its parent's")


def common_settings(spec: Mapping[str, Any], output: Path, world: World = ALONE) -> dict[str, Any]:
    """The settings that both trainers share.

    The embedded scale stays on the CPU, where the bytes of its results are reproducible. Raises TrainingError if a
    training on the CPU has an optimizer that needs CUDA.
    """
    on_cpu = is_on_cpu(spec["scale"])
    trainer = Trainer.model_validate(
        {key: value for key, value in spec["trainer"].items() if key in Trainer.model_fields}
    )
    if on_cpu and trainer.optimizer.endswith("8bit"):
        raise TrainingError(
            f"the optimizer {trainer.optimizer} needs CUDA, and this training runs on the CPU; train on a GPU, or set "
            "optimizer to adamw_torch_fused"
        )
    rows = sequences_of(spec["trainer"])
    micro = spec["trainer"]["micro_batch"] or rows // world.size
    return {
        "output_dir": str(output),
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": rows // (micro * world.size),
        "learning_rate": trainer.lr,
        "lr_scheduler_type": trainer.scheduler,
        "warmup_steps": trainer.warmup,
        "optim": trainer.optimizer,
        "adam_beta2": trainer.adam_beta2,
        "weight_decay": trainer.weight_decay,
        "max_grad_norm": trainer.max_grad_norm,
        "max_steps": trainer.steps,
        "seed": spec["seed"],
        "data_seed": spec["seed"],
        "use_cpu": on_cpu,
        "ddp_backend": "gloo" if on_cpu and torch.distributed.is_initialized() else None,
        "ddp_find_unused_parameters": False,
        "bf16": not on_cpu,
        "gradient_checkpointing": spec["scale"] != "embedded",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,  # it would replace a NaN by the mean and let the run go on
        "save_steps": spec["checkpoint_every"],
        "disable_tqdm": True,
        "shuffle_dataset": False,
    }


class Sft(CheckedSFTTrainer):
    """TRL's trainer of supervised fine-tuning, with a token count that continues in a resumed run."""

    served: Sequence[Mapping[str, float]] = ()
    """For each step, more metrics to log: of its phases, or of the rejection sampling before the first step."""

    def log(self, logs: dict[str, float], *arguments: Any, **named: Any) -> None:
        """Log a step with its metrics in `served`."""
        if self.served and "loss" in logs:
            logs = {**logs, **self.served[self.state.global_step - 1]}
        super().log(logs, *arguments, **named)

    def count_from(self, checkpoint: Path) -> None:
        """Count tokens on from the last logged step of a checkpoint."""
        log = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
        self._total_train_tokens = next((entry["num_tokens"] for entry in reversed(log) if "num_tokens" in entry), 0)


def sft_trainer(
    model: Any, tokenizer: Any, task: Task, spec: Mapping[str, Any], rows: Sequence[Taught], output: Path,
    world: World = ALONE,
) -> Sft:  # fmt: skip
    """The trainer of supervised fine-tuning on the transcripts of the rows. The loss covers the model's turns and their
    end tokens, but not the results of its tools."""
    tools = schemas(task)
    distinct = {id(row): row for row in rows}
    taught = [
        to_pieces(tokenizer, task.prompt(row.case.facts), row.transcript, row.thinking, tools, tokenizer.eos_token)
        for row in distinct.values()
    ]
    found = dict(zip(distinct, encode_pieces(tokenizer, taught), strict=True))
    examples = [found[id(row)] for row in rows]
    check_room([row.case.id for row in rows], [len(ids) for ids, _ in examples], 0, window(model))
    dataset = Dataset.from_dict(
        {
            "input_ids": [ids for ids, _ in examples],
            "labels": [
                [token if is_own else -100 for token, is_own in zip(ids, own, strict=True)] for ids, own in examples
            ],
        }
    )
    batch = spec["trainer"]["batch"]
    settings = SFTConfig(
        train_sampling_strategy="sequential",
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},  # tokenised above, prompt and turn separately, as in generation
        **common_settings(spec, output, world),
    )
    sft = Sft(model=model, args=settings, train_dataset=dataset, processing_class=tokenizer)
    sft.loss_path, sft.world = spec["trainer"].get("loss_path", "stock"), world
    phases, numbers = phases_of(spec, len(rows))
    if phases:
        of = task.reporting.slices[phases[0].slice]
        sft.served = [
            phase_metrics([of(row.case) for row in rows[first : first + batch]], numbers[first : first + batch], phases)
            for first in range(0, len(rows), batch)
        ]
    return sft


def phases_of(spec: Mapping[str, Any], rows: int) -> tuple[list[Phase], list[int]]:
    """The phases of the stream of a resolved spec, and the phase number of each row, 1 for the first phase. Both are
    empty for a stream without phases."""
    phases = [Phase.model_validate(phase) for phase in spec["stream"].get("phases", ())]
    steps = spec["trainer"]["steps"]
    return phases, [phase_of(row, phases, steps=steps, each=rows // steps) for row in range(rows if phases else 0)]


class Grpo(SharedLossTrainer):
    """TRL's trainer of GRPO for prompts that are already rendered in the mode of their row.

    Overrides `_tokenize_prompts` so that no second begin-of-text token is added, and checks in
    `_generate_and_score_completions` that rows are served in the order of the stream.
    """

    held_out: HeldOut | None = None
    """The held-out evaluation. Only process 0 has one; the others wait while it runs."""
    looks_every: int = 0
    """Steps between two held-out evaluations, of which the first is before the first step; 0: none."""
    switches: Mapping[str, bool] = MappingProxyType({})
    """Whether the model thinks in each mode, of a task with an environment."""
    offered: Sequence[Mapping[str, Any]] = ()
    """The schemas of the environment's tools."""
    ends: frozenset[int] = frozenset()
    """Tokens that end a turn."""
    thinking: bool = True
    """Whether the model thinks in the episodes of the current step."""

    def _play_in(self, modes: Collection[str]) -> None:
        if len(modes) > 1:
            raise TrainingError(
                f"step {self.state.global_step + 1} was served rows in the modes {', '.join(sorted(modes))}, but TRL "
                "plays the episodes of a step together"
            )
        self.thinking = self.switches[next(iter(modes))]
        self._tokenizer = Reader(self.processing_class, self.thinking, self.ends)

    def _tokenize_prompts(self, prompts: list[Any]) -> tuple[list[list[int]], None, dict[str, Any]]:
        texts = [prompt if isinstance(prompt, str) else self._opening(prompt) for prompt in prompts]
        return encode(self.processing_class, texts), None, {}

    def _opening(self, prompt: list[dict[str, Any]]) -> str:
        messages = [Message(role=turn["role"], content=turn["content"]) for turn in prompt]
        return render(self.processing_class, messages, self.thinking, self.offered)

    def _get_tool_suffix_ids(self, tool_messages: list[dict[str, Any]]) -> list[int]:
        found = [Message(role="tool", content=turn["content"]) for turn in tool_messages]
        return encode(self.processing_class, [results(self.processing_class, found, self.thinking)])[0]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        served = [row["row"] for row in inputs]
        first = self.state.global_step * self.args.generation_batch_size
        first += self.accelerator.process_index * len(inputs)
        planned = [(first + offset) // self.num_generations for offset in range(len(inputs))]
        if served != planned:
            raise TrainingError(
                f"step {self.state.global_step + 1} was served rows {sorted(set(served))[:4]}... of the stream, but "
                f"{sorted(set(planned))[:4]}... are planned: TRL's sampler does not keep the order"
            )
        if self.switches:
            self._play_in(set(self.world.gathered([row["mode"] for row in inputs])))
        scored: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if self.looks_every and self.state.global_step % self.looks_every == 0:
            looks = [] if self.held_out is None else [self.held_out.look(self.accelerator.unwrap_model(self.model))]
            for name, value in self.world.gathered(looks)[0].items():
                self._metrics["train"][f"held_out/{name}"].append(value)
        return scored


def grpo_trainer(
    model: Any, tokenizer: Any, task: Task, spec: Mapping[str, Any], rows: Sequence[Row], output: Path, judges: Judges,
    world: World = ALONE, longest: int | None = None,
) -> Grpo:  # fmt: skip
    """The trainer of GRPO on the task's reward: a row is a group of completions, a step is a round of generation.

    TRL's tool loop plays the episodes of a task with an environment. All rows of a step then have one mode, the results
    of tools are masked, and a group shares one episode. `longest`: the tokens that a server takes, prompt included.
    """
    trainer = spec["trainer"]
    tools = schemas(task)
    texts = [render(tokenizer, task.prompt(row.case.facts), row.thinking, tools) for row in rows]
    lengths = [len(ids) for ids in encode(tokenizer, texts)]
    limit = min(filter(None, (window(model), longest)), default=None)
    check_room([row.case.id for row in rows], lengths, trainer["max_completion"], limit)
    prompts = [[turn.model_dump(include={"role", "content"}) for turn in task.prompt(row.case.facts)] for row in rows]
    phases, numbers = phases_of(spec, len(rows))
    dataset = Dataset.from_dict(
        {
            "prompt": texts if task.episodes is None else prompts,
            "case": [row.case.model_dump_json() for row in rows],
            "mode": [row.mode for row in rows],
            "row": list(range(len(rows))),
            **({"phase": numbers} if phases else {}),
        }
    )
    settings = GRPOConfig(
        num_generations=trainer["group"],
        max_completion_length=trainer["max_completion"],
        temperature=trainer["temperature"],
        beta=trainer["beta"],
        scale_rewards=trainer["scale_rewards"],
        loss_type=trainer.get("loss_type", "dapo"),
        **({} if task.episodes is None else {"max_tool_calling_iterations": task.episodes.turns - 1}),
        **common_settings(spec, output, world),
    )
    reward = task.Reward.model_validate_json(json.dumps(spec["reward"]))
    ends = end_tokens(model.generation_config, tokenizer)
    switches = {mode: switch["thinking"] for mode, switch in spec["modes"].items()}
    score = reward_function(
        task, reward, thinking=switches, tokenizer=tokenizer, ends=ends, group=trainer["group"],
        judges=judges, phases=phases, placebo=spec.get("placebo", ""), seed=spec["seed"], world=world,
    )  # fmt: skip
    if task.episodes is not None:  # TRL adds it to templates that it knows byte by byte, and fails at others
        tokenizer.response_template = getattr(tokenizer, "response_template", None) or qwen3_template
    grpo = Grpo(
        model=model,
        args=settings,
        reward_funcs=[score],
        train_dataset=dataset,
        processing_class=tokenizer,
        **({} if task.episodes is None else {"environment_factory": task.episodes.environment}),
    )
    grpo.loss_path = trainer.get("loss_path", "stock")
    grpo.generation_path = trainer.get("generation_path", "stock")
    grpo.turn_tokens = trainer.get("turn_tokens")
    grpo.world, grpo.looks_every = world, (trainer.get("held_out") or {"every": 0})["every"]
    if spec["scale"] == "full" or world.size > 1:  # else bytes of the embedded scale would change
        grpo.seed = spec["seed"]
    if task.episodes is not None:
        grpo.switches, grpo.offered, grpo.ends = switches, tools, ends
    return grpo
