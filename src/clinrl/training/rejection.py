"""Rejection sampling: supervised fine-tuning on those of the parent's own completions that the reward keeps.

After STaR (Zelikman et al., 2022, arXiv:2203.14465), without its hints of the answer, and RFT (Yuan et al., 2023,
arXiv:2308.01825), which keeps several distinct completions of a prompt. It needs labels, but no gold reasons. One
version is one round: for a second round, train a version whose parent is the first, since a version samples from its
parent.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from clinrl.artifacts import digest, write_text
from clinrl.config.base import Scale
from clinrl.config.schema import Mode
from clinrl.errors import TrainingError
from clinrl.models.generate import Sampler
from clinrl.models.judges import Judges, scores
from clinrl.models.rollout import run
from clinrl.runtime.progress import progress
from clinrl.tasks.base import Task
from clinrl.training.rows import Row, Taught
from clinrl.training.world import ALONE, World
from clinrl.types import Case, Transcript, last_turn

TOGETHER = 64
"""Prompts that are sampled together and written as one part, so the most that a killed run can lose."""
OVER = "over"
"""The empty file beside the parts that says that all are there."""
Paid = tuple[Transcript, float]
"""A completion and its reward."""


def sample(
    folder: Path, sampler: Sampler, task: Task, spec: Mapping[str, Any], rows: Sequence[Row], judges: Judges,
    stops: Callable[[], bool] = lambda: False, world: World = ALONE,
) -> list[list[Paid]] | None:  # fmt: skip
    """The `group` completions of each row with their rewards, or None if `stops` returned True before the last part.

    Each part is written to `folder`, which belongs to one spec, and a run that continues reads it there. The parts are
    shared out among the processes; a part does not depend on the process that samples it.
    """
    trainer, group, budget = spec["trainer"], spec["trainer"]["group"], spec["trainer"]["max_completion"]
    reward = task.Reward.model_validate_json(json.dumps(spec["reward"]))
    found: dict[int, list[Paid]] = {}
    places = {name: [place for place, row in enumerate(rows) if row.mode == name] for name in spec["modes"]}
    parts = [(name, first) for name, some in places.items() for first in range(0, len(some), TOGETHER)]
    mine, is_stopped = parts[world.rank :: world.size], False
    total = sum(len(places[name][first : first + TOGETHER]) for name, first in mine)
    with progress(f"{spec['version']} samples", total, shown=world.is_main) as advance:
        for name, first in mine:
            part, file = places[name][first : first + TOGETHER], folder / f"{name}-{first}.json"
            if not file.exists():
                if is_stopped := stops():
                    break
                cases = [rows[place].case for place in part for _ in range(group)]
                tokens: dict[Scale, int] = {"embedded": budget, "full": budget}
                mode = Mode(**spec["modes"][name], temperature=trainer["temperature"], max_new_tokens=tokens)
                seed = int(digest([spec["seed"], name, first])[:8], 16)
                written = run(sampler, task, cases, mode, budget, seed)
                earned = scores(task, list(zip(cases, written, strict=True)), reward, judges)
                lines = [[one.model_dump(mode="json"), score.total] for one, score in zip(written, earned, strict=True)]
                # Not canonical JSON: the arguments of a tool call are taught in the order in which they were written.
                write_text(file, json.dumps(lines, ensure_ascii=False, allow_nan=False))
            advance(len(part))
    if world.any(is_stopped):
        return None
    (folder / OVER).touch()
    for name, first in parts:
        lines = json.loads((folder / f"{name}-{first}.json").read_text(encoding="utf-8"))
        done = [(Transcript.model_validate(one), paid) for one, paid in lines]
        for number, place in enumerate(places[name][first : first + TOGETHER]):
            found[place] = done[number * group : (number + 1) * group]
    return [found[place] for place in range(len(rows))]


def keep(
    task: Task, case: Case, completions: Sequence[Paid], threshold: float | None, most: int, *, relabel: bool = False
) -> list[Transcript]:
    """The completions of a prompt to train on: at most `most` distinct ones that were not cut off, best first.

    Their reward is at least `threshold`; if that is None, their answer is the gold label. With `relabel`, every
    completion with an answer in the place that the prompt asks for is kept, and the gold label replaces the answer.
    """
    best_first = sorted(completions, key=lambda pair: -pair[1])
    ended = [(one, paid) for one, paid in best_first if one.stop == "answered"]
    if relabel:
        reached = [other for one, _ in ended if (other := with_gold_label(task, case, one)) is not None]
    elif threshold is None:
        reached = [one for one, _ in ended if task.parse(one) == task.label(case)]
    else:
        reached = [one for one, paid in ended if paid >= threshold]
    return list({transcript.model_dump_json(): transcript for transcript in reached}.values())[:most]


def with_gold_label(task: Task, case: Case, transcript: Transcript) -> Transcript | None:
    """The transcript with the gold label as its last answer; None if no line is exactly the prefix and an answer.

    Only for tasks with ordered answers, which define that prefix.
    """
    assert task.ordered is not None
    turn, prefix, gold = last_turn(transcript), task.ordered.prefix, task.label(case)
    answers = "|".join(re.escape(str(answer)) for answer in task.ordered.answers)
    places = [*re.finditer(rf"^{re.escape(prefix)}(?:{answers})$", turn.content, re.MULTILINE)]
    if not places:
        return None
    start, end = places[-1].span()
    named = turn.model_copy(update={"content": f"{turn.content[:start]}{prefix}{gold}{turn.content[end:]}"})
    other = transcript.model_copy(update={"messages": (*transcript.messages[:-1], named)})
    return other if task.parse(other) == gold else None


def taught(
    task: Task, spec: Mapping[str, Any], rows: Sequence[Row], sampled: Sequence[Sequence[Paid]]
) -> tuple[list[Taught], dict[str, float]]:
    """The rows to train on, and the metrics of the sampling.

    There are `steps * batch` rows, in passes over the kept completions that are shuffled anew each time. The metrics
    are the counts of sampled and of kept completions, the share of prompts with a kept one, and the mean reward. Raises
    TrainingError if no completion is kept.
    """
    trainer, random, stream = spec["trainer"], Random(spec["seed"]), list[Taught]()
    pairs = list(zip(rows, sampled, strict=True))
    chosen = {"threshold": trainer["threshold"], "most": trainer["keep"], "relabel": trainer.get("relabel", False)}
    kept = [keep(task, row.case, completions, **chosen) for row, completions in pairs]
    examples = [Taught(**vars(row), transcript=one) for row, some in zip(rows, kept, strict=True) for one in some]
    rewards = [paid for completions in sampled for _, paid in completions]
    if not examples:
        raise TrainingError(
            f"none of {len(rewards):,} sampled completions is kept (the best earned {max(rewards):g}), so there is "
            "nothing to imitate; start from a parent that is sometimes right, raise trainer.group or trainer.prompts, "
            "or lower trainer.threshold"
        )
    needed = trainer["steps"] * trainer["batch"]
    while len(stream) < needed:
        stream += random.sample(examples, len(examples))
    counts = {"completions": len(rewards), "kept": len(examples)}
    means = {"kept_prompts": fmean(map(bool, kept)), "reward": fmean(rewards)}
    return stream[:needed], {f"sampled/{name}": value for name, value in (counts | means).items()}
