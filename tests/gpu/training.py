"""Steps of SFT or GRPO with clinrl's own trainers above a random checkpoint: seconds by part, memory, KL at step 1.

The reward is a toy, the share of even tokens, since random weights earn equal rewards and such a step has no gradient.
"""

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import shaped

from clinrl.runtime import determinism

CHECKPOINT_EVERY = 2
KL_AT_START = 5e-3
"""Nats; what rounding in bfloat16 leaves is below it, and the alert `first_kl` warns above it."""


def sizes(method: str, tiny: bool) -> dict[str, Any]:
    """The numbers of a recipe: those of esi-v49 and esi-v43 at full, in fewer steps."""
    common = {"lr": 1e-5, "steps": 2, "micro_batch": 2 if tiny else 8, "temperature": 1.0, "beta": 0.04}
    if method == "sft":
        return common | {"batch": 4 if tiny else 16, "micro_batch": 2 if tiny else 4}
    rows = (
        {"prompts": 2, "group": 2, "max_completion": 8} if tiny else {"prompts": 8, "group": 8, "max_completion": 256}
    )
    return common | rows | {"scale_rewards": "group", "vllm": False}


def even(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The share of even tokens."""
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]


def trainer_of(model: Any, tokenizer: Any, method: str, trainer: dict[str, Any], output: Path) -> tuple[Any, int]:
    """clinrl's trainer with the toy reward, and the tokens of its longest prompt or text."""
    from clinrl.models.chat import encode, render
    from clinrl.models.judges import Judges
    from clinrl.tasks.base import get_task
    from clinrl.training import trl
    from clinrl.training.rows import Row, Taught

    task = get_task("esi")
    spec = {
        "scale": "full", "seed": 1, "checkpoint_every": CHECKPOINT_EVERY, "stream": {}, "lora": shaped.LORA,
        "modes": {"think": {"thinking": True}}, "reward": task.Reward().model_dump(mode="json"), "trainer": trainer,
    }  # fmt: skip
    asked = trainer["steps"] * trainer.get("batch", trainer.get("prompts", 0))
    cases = list(task.cases(asked, 0, pool="train", mix=task.checks.mixes[0]))
    texts = [render(tokenizer, task.prompt(case.facts), True) for case in cases]
    longest = max(map(len, encode(tokenizer, texts)))
    adapted = trl.start_adapter(model, spec, None)
    start = trl.adapter_state(adapted)
    made: Any
    if method == "sft":
        taught = [Taught(case, "think", True, task.gold(case, thinking=True)) for case in cases]
        made = trl.sft_trainer(adapted, tokenizer, task, spec, taught, output)
    else:
        rows = [Row(case, "think", True) for case in cases]
        made = trl.grpo_trainer(adapted, tokenizer, task, spec, rows, output, Judges(output))
        made.reward_funcs = [even]
    made.scale = "full"
    trl.restore_precision(adapted, start)
    return made, longest


def fit(trainer: Any, *, kill: int = 0, resume: Path | None = None) -> dict[str, float]:
    """Train; the seconds that went into generation. Killed in step `kill`, if that is not 0."""
    from transformers import PrinterCallback, TrainerCallback

    parts = {"generation": 0.0}

    class Steps(TrainerCallback):  # type: ignore[misc]  # transformers has no types
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if kill and state.global_step + 1 == kill:
                os.kill(os.getpid(), signal.SIGKILL)

    write = getattr(trainer, "_generate_single_turn", None)
    if write is not None:

        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return write(*arguments, **named)
            finally:
                parts["generation"] += time.perf_counter() - began

        trainer._generate_single_turn = timed
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Steps())
    began = time.perf_counter()
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    return parts | {"all": time.perf_counter() - began}


def main(arguments: list[str] | None = None) -> None:
    """Train two steps; print the rows."""
    parser = shaped.options("method", "shape", "kind")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--prompts", type=int)
    parser.add_argument("--completion", type=int)
    parser.add_argument("--paths", default="stock")
    parser.add_argument("--kill", type=int, default=0)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--keep", type=Path)
    asked = parser.parse_args(arguments)
    determinism.settle(1)
    import torch
    from safetensors.torch import save_file

    from clinrl.models.generate import window
    from clinrl.training import trl

    nf4, numbers = asked.kind == "nf4", sizes(asked.method, asked.tiny)
    numbers |= {"steps": asked.steps} if asked.steps else {}
    numbers |= {"prompts": asked.prompts} if asked.prompts else {}
    numbers |= {"max_completion": asked.completion} if asked.completion else {}
    numbers |= {"loss_path": asked.paths, "generation_path": asked.paths} if asked.paths != "stock" else {}
    model, tokenizer, _ = shaped.load(shaped.checkpoint(asked.shape, tiny=asked.tiny), nf4=nf4)
    assert window(model)
    output = asked.output or Path(tempfile.mkdtemp(prefix="clinrl-gpu-run-"))
    trainer, prompt = trainer_of(model.train(), tokenizer, asked.method, numbers, output)
    shaped.forget()
    took = fit(trainer, kill=asked.kill, resume=asked.resume)
    if asked.keep:
        save_file(trl.adapter_state(trainer.model), asked.keep)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    steps, size = len(logged), shaped.estimate_gb(asked.shape, nf4=nf4, tiny=asked.tiny)
    written = numbers.get("max_completion", 0)
    rows, micro = numbers.get("batch", 0) or numbers["prompts"] * numbers["group"], numbers["micro_batch"]
    need = size.weights + max(
        size.training(micro * (prompt + written), micro * max(written, 1), checkpointed=True),
        size.writing(prompt, prompt + written, rows) if written else 0,
    )
    what = f"{asked.method.upper()} {asked.shape} in {asked.kind}"
    if asked.paths != "stock":
        what += f", paths {asked.paths}"
        print(json.dumps(trainer.loss_record()), file=sys.stderr)
    found = [
        (f"{what}, step", round(took["all"] / steps, 2), "s", f"{rows} rows, mean of {steps}"),
        (f"{what}, peak", round(shaped.held_gb(), 3), "GB", f"estimate {need / 1e9:.3f}"),
    ]
    if written:
        tokens = sum(entry["completions/mean_length"] for entry in logged) * rows
        kl = float(logged[0].get("kl", 0.0))
        found += [
            (f"{what}, generation", round(took["generation"] / steps, 2), "s a step", f"{written} tokens at most"),
            (f"{what}, loss and reward", round((took["all"] - took["generation"]) / steps, 2), "s a step", ""),
            (f"{what}, written", round(tokens / took["generation"], 1), "tokens/s", ""),
            (f"{what}, KL at step 1", kl, "nats", "fits" if abs(kl) <= KL_AT_START else f"above {KL_AT_START:g}"),
        ]
    assert torch.isfinite(torch.tensor([entry["loss"] for entry in logged])).all()
    print(json.dumps(found))


if __name__ == "__main__":
    determinism.pin()
    main()
