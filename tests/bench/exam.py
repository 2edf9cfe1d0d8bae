"""Examining in sorted batches against a plain loop over single cases: the same answers, sooner.

The model is the one that the series ends in, with its adapter, or the bare base where no version is trained yet.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from clinrl.runtime import determinism, forkserver

CASES = 320
"""Cases of the batched exam: enough to fill batches, as an exam of 800 does."""
LOOPED = 40
"""The first of them, answered one at a time too: a rate needs no more."""
SEED = 1


def one_at_a_time(model: Any, tokenizer: Any, prompts: list[str], budget: int) -> list[str]:
    """What a reader of the transformers manual would write."""
    import torch

    texts = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        with torch.inference_mode():
            out = model.generate(**ids, max_new_tokens=budget, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        new = out[0, ids["input_ids"].shape[1] :].tolist()
        written = new[: new.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in new else new
        texts.append(tokenizer.decode(written, skip_special_tokens=False, clean_up_tokenization_spaces=False))
    return texts


def as_a_stage(programs: Sequence[Callable[[], Any]]) -> float:
    """Seconds of an exam in all modes, by a stage that has the machine to itself: modes side by side."""
    with tempfile.NamedTemporaryFile("w", encoding="ascii") as running:
        running.write("1")
        running.flush()
        os.environ[determinism.RUNNING] = running.name
        started = time.perf_counter()
        forkserver.results(programs)
        seconds = time.perf_counter() - started
        del os.environ[determinism.RUNNING]
    return seconds


def main() -> None:
    """Print the rows: three a mode, and one of the whole exam."""
    determinism.settle(SEED)
    from peft import PeftModel

    from clinrl import paths
    from clinrl.config.params import load_params
    from clinrl.models import bases
    from clinrl.models.chat import read_turn, render
    from clinrl.models.generate import Sampler
    from clinrl.models.rollout import run
    from clinrl.tasks.base import get_task
    from clinrl.types import transcript_of

    params = load_params()
    task = get_task("esi")
    model, tokenizer = bases.load(params, task.name, for_training=False)
    adapter = paths.adapter([name for name, block in params.versions.items() if block.task == task.name][-1])
    if adapter.exists():
        model = PeftModel.from_pretrained(model, str(adapter)).eval()
    sampler, sharing = Sampler(model, tokenizer), Sampler(model, tokenizer, shared=True)
    cases = list(task.cases(CASES, SEED, pool="mine", mix=task.checks.mixes[0]))
    rows, programs, looped_s = [], [], 0.0
    for name, mode in params.modes.items():
        budget = params.budget(name, task.name)
        prompts = [render(tokenizer, task.prompt(case.facts), mode.thinking) for case in cases]
        run(sampler, task, cases[:2], mode, budget, SEED)  # warms up
        started = time.perf_counter()
        batched = [transcript.messages[-1] for transcript in run(sampler, task, cases, mode, budget, SEED)]
        middle = time.perf_counter()
        shared = [transcript.messages[-1] for transcript in run(sharing, task, cases, mode, budget, SEED)]
        later = time.perf_counter()
        single = [read_turn(text, mode.thinking) for text in one_at_a_time(model, tokenizer, prompts[:LOOPED], budget)]
        ended = time.perf_counter()
        looped_s += ended - later
        programs.append(partial(run, sharing, task, cases, mode, budget, SEED))
        same = sum(
            task.parse(transcript_of(a)) == task.parse(transcript_of(b))
            for a, b in zip(batched[:LOOPED], single, strict=True)
        )
        rate, plain = CASES / (middle - started), LOOPED / (ended - later)
        note = f"{rate / plain:.1f} times a loop over single cases; {same} of {LOOPED} answers are the same"
        rows.append((f"exam, mode {name}", round(rate, 2), "cases/s", note))
        alike = sum(a == b for a, b in zip(batched, shared, strict=True))
        rate = CASES / (later - middle)
        note = f"{rate / plain:.1f} times a loop over single cases; {alike} of {CASES} answers are the same"
        rows.append((f"exam, mode {name}, shared path", round(rate, 2), "cases/s", note))
        rows.append((f"loop, mode {name}", round(plain, 2), "cases/s", ""))
    rate, plain = len(programs) * CASES / as_a_stage(programs), len(programs) * LOOPED / looped_s
    note = f"{rate / plain:.1f} times a loop over single cases"
    rows.append(("exam, all modes side by side, shared path", round(rate, 2), "cases/s", note))
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
