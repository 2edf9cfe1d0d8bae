"""The two trainers, over TRL: what they are fed, how a reward reaches them, and how an adapter starts.

Both take prompts that `turns.render` wrote, so that a row's own thinking mode decides its prompt, and both take the
rows in the order of the stream. One optimiser step of GRPO is one round of generation, so that every checkpoint lies
on a boundary where resuming is exact.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import set_seed
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from clinrl.errors import DataError, TrainingError
from clinrl.oracles import Oracles, scores
from clinrl.records import Case, Message, Transcript, Unreadable, said
from clinrl.samplers import Prompt, TransformersSampler, batches, check_room, window
from clinrl.task import GIVEN, Task, seen
from clinrl.turns import Completion, decode, encode, end_tokens, read_turn, render, write_turn

WEIGHTS = "adapter_model.safetensors"
HELD_OUT_SEED = 271828
"""Of the held-out cases of every run: they are the same for all versions."""


@dataclass(frozen=True)
class Row:
    """One row of the stream as the worker holds it: the case, its mode, the mode's switch, and omitted rules (SFT)."""

    case: Case
    mode: str
    thinking: bool
    omit: frozenset[str]


def start_adapter(model: Any, spec: Mapping[str, Any], parent: Path | None) -> Any:
    """The base with a trainable adapter: the parent's, or for a root a fresh one that changes nothing yet.

    Raises TrainingError if nothing in it can be trained, or if it is not the parent's weights bit for bit.
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
    else:
        adapted = PeftModel.from_pretrained(model, parent, is_trainable=True)
        held, saved = adapter_state(adapted), load_file(parent / WEIGHTS)
        if held.keys() != saved.keys() or not all(torch.equal(held[name], saved[name]) for name in saved):
            raise TrainingError(f"the adapter in memory is not that of {parent}: was the base replaced by another?")
    if not any(parameter.requires_grad for parameter in adapted.parameters()):
        raise TrainingError("the adapter has no trainable parameter")
    return adapted


def adapter_state(model: Any) -> dict[str, torch.Tensor]:
    """A copy of the trained adapter's tensors on the CPU, by the names they have in its file."""
    state = get_peft_model_state_dict(model, adapter_name="default", save_embedding_layers=False)
    return {name: state[name].detach().cpu().clone().contiguous() for name in sorted(state)}


def restore_precision(model: Any, start: Mapping[str, torch.Tensor]) -> None:
    """Undo TRL's cast of a quantised model's adapter to bfloat16, which loses small updates, and reload `start`."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    set_peft_model_state_dict(model, dict(start), adapter_name="default")


def common_settings(spec: Mapping[str, Any], output: Path) -> dict[str, Any]:
    """Arguments that both trainers share. The embedded scale stays on the CPU, where its bytes can be promised."""
    on_cpu = spec["scale"] == "embedded" or not torch.cuda.is_available()
    return {
        "output_dir": str(output),
        "learning_rate": spec["trainer"]["lr"],
        "max_steps": spec["trainer"]["steps"],
        "seed": spec["seed"],
        "data_seed": spec["seed"],
        "use_cpu": on_cpu,
        "bf16": not on_cpu,
        "gradient_checkpointing": spec["scale"] != "embedded",
        "report_to": "none",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,  # it would replace a NaN by the mean and let the run go on
        "save_strategy": "steps",
        "save_steps": spec["checkpoint_every"],
        "save_total_limit": 2,
        "disable_tqdm": True,
        "shuffle_dataset": False,
        "eval_strategy": "no",
    }


class Sft(SFTTrainer):  # type: ignore[misc]  # TRL has no types
    """TRL's trainer without its model card, and with a token count that survives a resumed run."""

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Leave the card to `model_card`."""

    def count_from(self, checkpoint: Path) -> None:
        """Go on counting tokens where the checkpoint's last logged step left off."""
        log = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
        self._total_train_tokens = next((entry["num_tokens"] for entry in reversed(log) if "num_tokens" in entry), 0)


def sft_trainer(
    model: Any, tokenizer: Any, task: Task, spec: Mapping[str, Any], rows: Sequence[Row], output: Path
) -> Sft:
    """Supervised fine-tuning on gold turns, less what the rows omit. The loss covers the completion and its end."""
    names, texts = _prompts(tokenizer, task, rows)
    prompt_ids = encode(tokenizer, texts)
    turns = [write_turn(_turn(task, row), row.thinking) + tokenizer.eos_token for row in rows]
    turn_ids = encode(tokenizer, turns)
    check_room(names, [len(p) + len(t) for p, t in zip(prompt_ids, turn_ids, strict=True)], 0, window(model))
    pairs = list(zip(prompt_ids, turn_ids, strict=True))
    dataset = Dataset.from_dict(
        {
            "input_ids": [prompt + turn for prompt, turn in pairs],
            "labels": [[-100] * len(prompt) + turn for prompt, turn in pairs],
        }
    )
    batch = spec["trainer"]["batch"]
    micro = spec["trainer"]["micro_batch"] or batch
    settings = SFTConfig(
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=batch // micro,
        train_sampling_strategy="sequential",
        max_length=None,
        packing=False,
        dataset_kwargs={"skip_prepare_dataset": True},  # tokenised above, prompt and turn apart, as in generation
        **common_settings(spec, output),
    )
    return Sft(model=model, args=settings, train_dataset=dataset, processing_class=tokenizer)


class Grpo(GRPOTrainer):  # type: ignore[misc]  # TRL has no types
    """TRL's trainer for prompts that are rendered already, in the mode of their row.

    Overrides `_tokenize_prompts` so that no second begin-of-text token is added, and checks in
    `_generate_and_score_completions` that rows are served in the order of the stream.
    """

    held_out: "HeldOut | None" = None
    """Asked before the first step and every so many steps after it."""

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Leave the card to `model_card`."""

    def _tokenize_prompts(self, prompts: list[str]) -> tuple[list[list[int]], None, dict[str, Any]]:
        return encode(self.processing_class, prompts), None, {}

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
        scored: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if self.held_out is not None and self.state.global_step % self.held_out.every == 0:
            for name, value in self.held_out.look(self.accelerator.unwrap_model(self.model)).items():
                self._metrics["train"][f"held_out/{name}"].append(value)
        return scored


def grpo_trainer(
    model: Any,
    tokenizer: Any,
    task: Task,
    spec: Mapping[str, Any],
    rows: Sequence[Row],
    output: Path,
    oracles: Oracles,
) -> Grpo:
    """GRPO on the task's reward: each row is one group of completions, each step one round of generation."""
    trainer = spec["trainer"]
    names, texts = _prompts(tokenizer, task, rows)
    lengths = [len(ids) for ids in encode(tokenizer, texts)]
    check_room(names, lengths, trainer["max_completion"], window(model))
    dataset = Dataset.from_dict(
        {
            "prompt": texts,
            "case": [row.case.model_dump_json() for row in rows],
            "mode": [row.mode for row in rows],
            "row": list(range(len(rows))),
        }
    )
    completions = trainer["prompts"] * trainer["group"]
    micro = trainer["micro_batch"] or completions
    settings = GRPOConfig(
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=completions // micro,
        steps_per_generation=completions // micro,
        num_generations=trainer["group"],
        max_completion_length=trainer["max_completion"],
        temperature=trainer["temperature"],
        beta=trainer["beta"],
        scale_rewards=trainer["scale_rewards"],
        use_vllm=trainer["vllm"],
        **common_settings(spec, output),
    )
    reward = task.Reward.model_validate_json(json.dumps(spec["reward"]))
    score = reward_function(
        task,
        reward,
        thinking={mode: switch["thinking"] for mode, switch in spec["modes"].items()},
        tokenizer=tokenizer,
        ends=end_tokens(model, tokenizer),
        group=trainer["group"],
        oracles=oracles,
    )
    return Grpo(model=model, args=settings, reward_funcs=[score], train_dataset=dataset, processing_class=tokenizer)


class HeldOut:
    """Cases of the mine pool that a policy answers while it trains: how often it is right, and how far it has moved.

    `exact` is the share of greedy answers that are the gold label; `excess/<label>` by how much the share of a label
    among the answers exceeds that among the golds. `kl` estimates the divergence from the parent in
    nats a token: the mean of r - 1 - log r over tokens that the parent sampled, r being the ratio of the policy's
    probability to the parent's (Schulman's low-variance estimator). Built before training, with the parent's weights.
    """

    def __init__(self, model: Any, tokenizer: Any, task: Task, spec: Mapping[str, Any]) -> None:
        settings = spec["trainer"]["held_out"]
        self.every: int = settings["every"]
        self.task, self.tokenizer = task, tokenizer
        drawn = task.cases(settings["cases"], HELD_OUT_SEED, pool="mine", mix=task.mixes[-1])
        self.cases = [seen(task, case, spec.get("view", GIVEN)) for case in drawn]
        self.thinking = {mode: switch["thinking"] for mode, switch in spec["modes"].items()}
        self.budget: int = spec["trainer"]["max_completion"]
        self.texts = [
            (prompt, completion.text + (tokenizer.eos_token if completion.stop == "answered" else ""))
            for thinking in self.thinking.values()
            for prompt, completion in zip(self._prompts(thinking), self._sample(model, thinking, 1.0), strict=True)
        ]
        self.before = self._log_probabilities(model)

    def look(self, model: Any) -> dict[str, float]:
        """What the policy does now, by metric."""
        answers = [
            self.task.parse(said(read_turn(completion.text, thinking)))
            for thinking in self.thinking.values()
            for completion in self._sample(model, thinking, 0.0)
        ]
        golds = [self.task.label(case) for case in self.cases] * len(self.thinking)
        exact = sum(answer == gold for answer, gold in zip(answers, golds, strict=True)) / len(golds)
        excess = {
            f"excess/{label}": (sum(answer == label for answer in answers) - golds.count(label)) / len(golds)
            for label in self.task.labels
        }
        change = self._log_probabilities(model) - self.before
        return excess | {"exact": exact, "kl": float((change.exp() - 1 - change).mean())}

    def _prompts(self, thinking: bool) -> list[str]:
        return [render(self.tokenizer, self.task.prompt(case.facts), thinking) for case in self.cases]

    def _sample(self, model: Any, thinking: bool, temperature: float) -> list[Completion]:
        prompts = [Prompt(case.id, self.task.prompt(case.facts)) for case in self.cases]
        sampler = TransformersSampler(model, self.tokenizer)
        return sampler.sample(
            prompts, thinking=thinking, temperature=temperature, budget=self.budget, seed=HELD_OUT_SEED
        )

    def _log_probabilities(self, model: Any) -> torch.Tensor:
        """Of every token that the parent wrote, in one row."""
        prompts, written = (encode(self.tokenizer, list(texts)) for texts in zip(*self.texts, strict=True))
        found = []
        was_training = model.training
        model.eval()
        try:
            with torch.inference_mode():
                for batch in batches([len(p) + len(w) for p, w in zip(prompts, written, strict=True)], 0, 8192):
                    rows = [torch.tensor(prompts[i] + written[i], device=model.device) for i in batch]
                    ids = torch.nn.utils.rnn.pad_sequence(
                        rows, batch_first=True, padding_value=self.tokenizer.pad_token_id
                    )
                    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
                    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].float()
                    picked = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
                    for place, i in enumerate(batch):
                        first = len(prompts[i]) - 1
                        found.append(picked[place, first : first + len(written[i])].cpu())
        finally:
            model.train(was_training)
        return torch.cat(found)


def reward_function(
    task: Task,
    reward: Any,
    *,
    thinking: Mapping[str, bool],
    tokenizer: Any,
    ends: frozenset[int],
    group: int,
    oracles: Oracles,
) -> Callable[..., list[float]]:
    """The task's score as TRL calls it: once for all completions of a step, whose asks are asked together.

    Each completion is decoded from its token ids, so that the reward sees the very text the model wrote, and carries
    its case with it. Logs the mean of every term, the shares of each answer and of each gold label, of groups of
    `group` completions that were all right or all wrong, and per mode the mean total and the shares of unreadable and
    clipped turns. Whatever the score raises ends the training.
    """

    def task_reward(
        *,
        completion_ids: Sequence[Sequence[int]],
        case: Sequence[str],
        mode: Sequence[str],
        log_metric: Callable[[str, float], None],
        **_: Any,
    ) -> list[float]:
        known = {text: task.Case.model_validate_json(text) for text in dict.fromkeys(case)}
        means: dict[str, list[float]] = {f"terms/{term}": [] for term in task.terms}
        means |= {f"{what}/{label}": [] for what in ("answer", "gold") for label in task.labels}
        totals: list[float] = []
        right: list[bool] = []
        completions = [decode(tokenizer, ids, ends) for ids in completion_ids]
        turns = [read_turn(completion.text, thinking[name]) for completion, name in zip(completions, mode, strict=True)]
        pairs = [
            (known[text], Transcript(messages=(turn,), stop=completion.stop))
            for text, turn, completion in zip(case, turns, completions, strict=True)
        ]
        began = time.monotonic()
        earned = scores(task, pairs, reward, oracles)
        log_metric("reward_time", time.monotonic() - began)  # no part of the history: a clock decides it
        for completion, turn, score, text, name in zip(completions, turns, earned, case, mode, strict=True):
            if not reward.low - 1e-6 <= score.total <= reward.high + 1e-6:
                raise TrainingError(
                    f"the reward of {known[text].id} is {score.total:g}, outside its declared range "
                    f"{reward.low:g} to {reward.high:g}"
                )
            answer = task.parse(said(turn))
            for term in task.terms:
                means[f"terms/{term}"].append(score.terms.get(term, 0.0))
            gold = task.label(known[text])
            for label in task.labels:
                means[f"answer/{label}"].append(float(answer == label))
                means[f"gold/{label}"].append(float(gold == label))
            right.append(answer == gold)
            means.setdefault(f"reward/{name}", []).append(score.total)
            means.setdefault(f"parse_fail/{name}", []).append(float(isinstance(answer, Unreadable)))
            means.setdefault(f"clipped/{name}", []).append(float(completion.stop == "max_tokens"))
            totals.append(score.total)
        groups = [right[i : i + group] for i in range(0, len(right), group)]
        means["groups/all_right"] = [float(all(some)) for some in groups]
        means["groups/all_wrong"] = [float(not any(some)) for some in groups]
        for name, values in means.items():
            log_metric(name, sum(values) / len(values))
        return totals

    return task_reward


def _prompts(tokenizer: Any, task: Task, rows: Sequence[Row]) -> tuple[list[str], list[str]]:
    """The id of each row's case, to name it by, and its prompt."""
    texts = [render(tokenizer, task.prompt(row.case.facts), row.thinking) for row in rows]
    if not texts:
        raise DataError("the training stream has no rows")
    return [row.case.id for row in rows], texts


def _turn(task: Task, row: Row) -> Message:
    (turn,) = task.gold(row.case, thinking=row.thinking, omit=row.omit).messages
    return turn
