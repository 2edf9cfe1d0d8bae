"""Forward and backward of the GRPO loss on the committed base: TRL's against the shared path, and each half of that.

One step of triage in shape: 16 groups of 8 completions of 35 tokens, prompts of 71 tokens, 4 groups live. The ways take
turns on the same tokens, which are random, so that no two rows are equal; where rows are, the shared path gains more.
"""

import json
import time
from collections.abc import Callable
from tempfile import gettempdir
from typing import Any

from clinrl import paths
from clinrl.models import bases
from clinrl.runtime import determinism

GROUPS, LIVE, SIZE, PROMPT, COMPLETION = 16, 4, 8, 71, 35
ROUNDS = 5
RANK = 16


def ways(
    model: Any, tokenizer: Any, *, groups: int, live: int, size: int, prompt: int, completion: int
) -> dict[str, Callable[[], Any]]:
    """How the gradient of one batch is computed, by name; each gives it when it is called."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from trl import GRPOConfig, GRPOTrainer

    from clinrl.training.loss import SharedLossTrainer
    from clinrl.training.scores import LiveRows

    adapted = get_peft_model(
        model,
        LoraConfig(r=RANK, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"),
    )
    trainer = SharedLossTrainer(
        model=adapted,
        args=GRPOConfig(
            output_dir=gettempdir(), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
            per_device_train_batch_size=groups * size, num_generations=size, max_completion_length=completion,
        ),
        reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
        train_dataset=Dataset.from_dict({"prompt": ["a"]}),
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    adapted.train()
    random = torch.Generator().manual_seed(0)
    words = len(tokenizer)
    advantages = torch.randn(groups, size, generator=random) * (torch.arange(groups) < live)[:, None]
    mask = torch.ones(groups * size, completion, dtype=torch.long)
    inputs = {
        "prompt_ids": torch.randint(words, (groups, prompt), generator=random).repeat_interleave(size, 0),
        "prompt_mask": torch.ones(groups * size, prompt, dtype=torch.long),
        "completion_ids": torch.randint(words, mask.shape, generator=random),
        "completion_mask": mask,
        "advantages": advantages.flatten(),
        "num_items_in_batch": mask.sum(),
    }
    alive, all_rows = inputs["advantages"] != 0, torch.ones(groups * size, dtype=torch.bool)
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    models = {
        "stock": adapted,
        "prompts shared": LiveRows(adapted, all_rows, mask),
        "dead groups left out": LiveRows(adapted, alive, mask, share_prompts=False),
        "both": LiveRows(adapted, alive, mask),
    }
    return {
        name: lambda way=way: torch.autograd.grad(GRPOTrainer._compute_loss(trainer, way, inputs), trained)
        for name, way in models.items()
    }


def seconds(found: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Least time of each way, which a busy machine spoils least, after a first round that is not counted."""
    taken: dict[str, list[float]] = {name: [] for name in found}
    for turn in range(rounds + 1):
        for name, way in found.items():
            began = time.perf_counter()
            way()
            if turn:
                taken[name].append(time.perf_counter() - began)
    return {name: min(times) for name, times in taken.items()}


def rows(taken: dict[str, float], note: str) -> list[tuple[Any, ...]]:
    """The rows of the report: what each way takes of TRL's time."""
    stock = taken["stock"]
    found = [("GRPO loss and gradient, TRL", round(stock, 3), "s", note)]
    for name in ("both", "dead groups left out", "prompts shared"):
        faster = f"{stock / taken[name]:.1f} times faster"
        what = f"GRPO loss against stock TRL, {name}"
        found.append((what, round(taken[name] / stock, 3), "ratio", faster))
    return found


def main() -> None:
    """Print the rows."""
    task = "esi"
    determinism.settle(0)
    model, tokenizer = bases.open_base(paths.base(task), for_training=True)
    found = ways(model, tokenizer, groups=GROUPS, live=LIVE, size=SIZE, prompt=PROMPT, completion=COMPLETION)
    note = f"{LIVE} of {GROUPS} groups of {SIZE} live, {PROMPT} + {COMPLETION} tokens"
    print(json.dumps(rows(seconds(found, ROUNDS), note)))


if __name__ == "__main__":
    determinism.pin()
    main()
