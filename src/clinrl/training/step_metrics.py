"""The metrics of a training step: its completions, their rewards, and the rows that the stream served."""

from collections.abc import Sequence
from typing import Any

from clinrl.config.recipes import Phase
from clinrl.data.sampling import shares
from clinrl.tasks.base import Task, parts_of
from clinrl.types import Case, Score, Transcript, Unreadable, is_malformed

Line = tuple[Case, str, Transcript, Any, Score, float]
"""A completion: its case, its mode, its transcript, the parsed answer, its score, and its reward."""


def step_metrics(task: Task, lines: Sequence[Line], group: int) -> dict[str, float]:
    """The mean of every term, the shares of each answer and of each gold label, and the shares of groups of `group`
    completions that are all right or all wrong. For each mode, the mean reward, and the shares of unreadable (in
    episodes: not submitted) and of clipped transcripts; in episodes also the share of turns with malformed calls."""
    means: dict[str, list[float]] = {f"{what}/{label}": [] for what in ("answer", "gold") for label in task.labels}
    right: list[bool] = []
    for case, mode, transcript, answer, score, paid in lines:
        for term, value in score.terms.items():
            means.setdefault(f"terms/{term}", []).append(value)
        gold = task.label(case)
        parts = parts_of(task, gold, answer).values()
        for label in task.labels:
            means[f"answer/{label}"].append(sum(given == label for _, given in parts) / len(parts))
            means[f"gold/{label}"].append(sum(right_one == label for right_one, _ in parts) / len(parts))
        right.append(answer == gold)
        means.setdefault(f"reward/{mode}", []).append(paid)
        silent = "parse_fail" if task.episodes is None else "not_submitted"
        means.setdefault(f"{silent}/{mode}", []).append(float(isinstance(answer, Unreadable)))
        means.setdefault(f"clipped/{mode}", []).append(float(transcript.stop == "max_tokens"))
        if task.episodes is not None:
            own = [turn for turn in transcript.messages if turn.role == "assistant"]
            means.setdefault(f"malformed/{mode}", []).append(sum(map(is_malformed, own)) / len(own))
    groups = [right[i : i + group] for i in range(0, len(right), group)]
    means["groups/all_right"] = [float(all(some)) for some in groups]
    means["groups/all_wrong"] = [float(not any(some)) for some in groups]
    return {name: sum(values) / len(values) for name, values in means.items()}


def phase_metrics(values: Sequence[str], numbers: Sequence[int], phases: Sequence[Phase]) -> dict[str, float]:
    """The metrics of a step of a stream with phases, given the slice value and the phase number of each row: the share
    of each value that a phase serves, and the mean phase."""
    served = shares(values, (value for phase in phases for value in phase.values))
    found = {f"served/{value}": share for value, share in served.items()}
    return found | {"phase": sum(numbers) / len(numbers)}
