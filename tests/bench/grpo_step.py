"""A GRPO step through clinrl against a bare TRL trainer: same model, prompts, sampling and sizes, in one process.

The learning rate is too small to change a weight's rounding, so both sample the same completions from the same seed,
and the difference is what clinrl adds: the task's reward, its terms and the order check.
"""

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from clinrl import determinism

STEPS = 4
ROUNDS = 2
"""Each trainer runs this often, by turns, so that a slow minute of the machine hits both."""
SEED = 1


def settings() -> tuple[Any, dict[str, Any]]:
    """The project's params, and the spec of a run with the sizes of its last GRPO recipe."""
    from clinrl.params import GrpoProfile, load_params

    params = load_params()
    name, profile = [(n, p) for n, p in params.profiles.items() if isinstance(p, GrpoProfile)][-1]
    version = next(v for v in params.versions.values() if v.profile == name)
    trainer = params.trainer(name).model_dump(mode="json")
    spec = {
        "task": version.task,
        "scale": params.scale,
        "seed": SEED,
        "lora": profile.lora.model_dump(mode="json"),
        "modes": {mode: {"thinking": params.modes[mode].thinking} for mode in profile.modes},
        "reward": dict(profile.reward),
        "trainer": {**trainer, "steps": STEPS, "lr": 1e-30},
        "checkpoint_every": 10 * STEPS,
    }
    return params, spec


def bare(model: Any, tokenizer: Any, spec: dict[str, Any], texts: list[str], golds: list[str], output: Path) -> Any:
    """TRL as its manual shows it, with a reward of one line."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    sizes = spec["trainer"]
    completions = sizes["prompts"] * sizes["group"]
    config = GRPOConfig(
        output_dir=str(output),
        learning_rate=sizes["lr"],
        max_steps=STEPS,
        seed=SEED,
        data_seed=SEED,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=completions,
        steps_per_generation=1,
        num_generations=sizes["group"],
        max_completion_length=sizes["max_completion"],
        temperature=sizes["temperature"],
        beta=sizes["beta"],
        shuffle_dataset=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )

    def exact(completions: list[str], gold: list[str], **_: Any) -> list[float]:
        return [float(text.rstrip().endswith(f"ESI {level}")) for text, level in zip(completions, gold, strict=True)]

    data = Dataset.from_dict({"prompt": texts, "gold": golds})
    return GRPOTrainer(model=model, reward_funcs=[exact], args=config, train_dataset=data, processing_class=tokenizer)


def step_seconds(trainer: Any) -> list[float]:
    """Wall time of each step but the first, which pays for warming up."""
    from transformers import PrinterCallback, TrainerCallback

    begun: list[float] = []
    taken: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            begun.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            taken.append(time.perf_counter() - begun[-1])

    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Clock())
    trainer.train()
    return taken[1:]


def main() -> None:
    """Print the rows."""
    determinism.settle(SEED)
    from clinrl import bases, trainers
    from clinrl.rollout import render
    from clinrl.task import get_task

    params, spec = settings()
    task = get_task(spec["task"])
    cases = list(task.cases(STEPS * spec["trainer"]["prompts"], SEED, pool="mine", mix=task.mixes[0]))
    modes = list(spec["modes"])
    rows = [
        trainers.Row(case, mode, spec["modes"][mode]["thinking"], frozenset())
        for case, mode in ((case, modes[i % len(modes)]) for i, case in enumerate(cases))
    ]
    seconds: dict[str, list[float]] = {"clinrl": [], "bare TRL": []}
    for turn in range(ROUNDS):
        for who in list(seconds) if turn % 2 == 0 else list(seconds)[::-1]:
            determinism.settle(SEED)
            model, tokenizer = bases.load(params, task.name, for_training=True)
            model = trainers.start_adapter(model, spec, None)
            with tempfile.TemporaryDirectory(prefix="clinrl-bench-") as folder:
                if who == "clinrl":
                    trainer = trainers.grpo_trainer(model, tokenizer, task, spec, rows, Path(folder))
                else:
                    texts = [render(tokenizer, task.prompt(row.case.facts), row.thinking) for row in rows]
                    golds = [str(task.label(row.case)) for row in rows]
                    trainer = bare(model, tokenizer, spec, texts, golds, Path(folder))
                seconds[who] += step_seconds(trainer)
    ours, theirs = (statistics.median(taken) for taken in seconds.values())
    size = f"{spec['trainer']['prompts']} prompts x {spec['trainer']['group']} completions"
    print(
        json.dumps(
            [
                {
                    "what": "GRPO step",
                    "value": round(ours, 3),
                    "unit": "s",
                    "note": f"{size}; {ours / theirs:.3f} of bare TRL",
                },
                {"what": "GRPO step, bare TRL", "value": round(theirs, 3), "unit": "s", "note": size},
            ]
        )
    )


if __name__ == "__main__":
    main()
