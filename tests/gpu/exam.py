"""An exam's speed by its batch, and turns of audit episodes, kept in memory between turns and read anew."""

import json
import time
from typing import Any

import shaped

from clinrl.runtime import determinism

TURNS = 4


def answered(model: Any, tokenizer: Any, asked: Any) -> list[tuple[str, float, str, str]]:
    """Cases a minute, with prompts of esi and greedy answers of a fixed length, by tokens that are in flight."""
    from clinrl.models.generate import Prompt, Sampler
    from clinrl.tasks.base import get_task

    task, budget = get_task("esi"), 8 if asked.tiny else 64
    cases = list(task.cases(4 if asked.tiny else 64, 0, pool="exam", mix=task.checks.mixes[0]))
    prompts = [Prompt(case.id, task.prompt(case.facts)) for case in cases]
    rows = []
    for tokens in (400, 4000) if asked.tiny else (8192, 32768, 131072):
        shaped.forget()
        sampler = Sampler(model, tokenizer, max_tokens=tokens, scale="full")
        began = time.perf_counter()
        sampler.sample(prompts, thinking=True, temperature=0.0, budget=budget, seed=0)
        taken_s = time.perf_counter() - began
        note = f"{budget} tokens an answer; peak {shaped.held_gb():.2f} GB"
        rows.append((f"exam, exam_tokens {tokens}", round(60 * len(cases) / taken_s, 1), "cases/min", note))
    return rows


def played(model: Any, tokenizer: Any, asked: Any) -> list[tuple[str, float, str, str]]:
    """Seconds of the turns of audit episodes. Random weights call no tool, so results stand in for a tool's."""
    from clinrl.models.generate import Prompt, Sampler
    from clinrl.models.rollout import schemas
    from clinrl.tasks.base import get_task

    task, budget = get_task("audit"), 8 if asked.tiny else 128
    cases = list(task.cases(2 if asked.tiny else 8, 0, pool="exam", mix=task.checks.mixes[0]))
    result = tokenizer("Patient 7, aged 61, stage IV, started on day 12. " * (1 if asked.tiny else 20))["input_ids"]
    rows = []
    for scale, what in (("full", "kept between turns"), ("embedded", "read anew in each turn")):
        sampler = Sampler(model, tokenizer, scale=scale, max_tokens=1 << 20)
        going = [sampler.opening(task.prompt(case.facts), schemas(task), False) for case in cases]
        began = time.perf_counter()
        for _ in sampler.together([len(ids) for ids in going], TURNS * (budget + len(result))):
            for turn in range(TURNS):
                prompts = [Prompt("audit", [], ids) for ids in going]
                said = sampler.sample(prompts, thinking=False, temperature=0.0, budget=budget, seed=turn)
                going = [[*ids, *one.ids, *result] for ids, one in zip(going, said, strict=True)]
        note = f"{len(cases)} episodes, {budget} tokens written and {len(result)} heard a turn"
        rows.append((f"audit turn, {what}", round((time.perf_counter() - began) / TURNS, 2), "s", note))
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Print the rows."""
    asked = shaped.options("which", "shape", "kind").parse_args(arguments)
    determinism.settle(1)
    model, tokenizer, _ = shaped.load(shaped.checkpoint(asked.shape, tiny=asked.tiny), nf4=asked.kind == "nf4")
    print(json.dumps((answered if asked.which == "exam" else played)(model.eval(), tokenizer, asked)))


if __name__ == "__main__":
    determinism.pin()
    main()
