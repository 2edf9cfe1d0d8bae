"""The reward function for TRL: it reads completions as an exam does, scores them, and logs the step's metrics."""

import time
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from clinrl.config.recipes import Phase
from clinrl.models.chat import decode, opens, read_calls, read_turn
from clinrl.models.judges import Judges, scores
from clinrl.tasks.base import Task
from clinrl.training.placebo import placebo_rewards
from clinrl.training.step_metrics import phase_metrics, step_metrics
from clinrl.training.world import ALONE, World
from clinrl.types import Call, Message, Transcript, transcript_of

UNMADE = "unmade_calls"
"""The key of the calls in a turn that was cut off. TRL's tool loop does not look there, so it runs no such calls: in an
exam, too, a turn that was cut off is the last."""


class Reader:
    """A tokenizer whose `parse_response`, by which TRL's tool loop finds the calls in a turn, reads it as an exam does.

    TRL's own parser accepts calls that our records cannot hold, and it would accept them in training only.
    """

    def __init__(self, tokenizer: Any, thinking: bool, ends: frozenset[int]) -> None:
        self.tokenizer, self.thinking, self.ends = tokenizer, thinking, ends

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def parse_response(self, ids: Sequence[int], **_: Any) -> dict[str, Any]:
        """The turn with these tokens, as a dict for TRL; `episode_transcript` reads it back."""
        written = decode(self.tokenizer, ids, self.ends)
        turn = read_calls(read_turn(written.text, opens(self.tokenizer, self.thinking)))
        read: dict[str, Any] = {"role": "assistant", "content": turn.content}
        if turn.thinking is not None:
            read["reasoning_content"] = turn.thinking
        if turn.calls:
            place = "tool_calls" if written.stop == "answered" else UNMADE
            read[place] = [{"type": "function", "function": dict(call)} for call in turn.calls]
        return read


def episode_transcript(turns: Sequence[Mapping[str, Any]], *, clipped: bool, most: int) -> Transcript:
    """The transcript of an episode, from the turns that TRL's tool loop returns and `Reader` parsed.

    `clipped`: whether the last turn was cut off. `most`: the number of turns after which the loop ends. If it ended
    earlier although the last turn has calls, there was no room for their results, so the stop is `max_tokens`.
    """
    messages = tuple(
        Message(role="tool", content=turn["content"])
        if turn["role"] == "tool"
        else Message(
            role="assistant",
            content=turn["content"],
            thinking=turn.get("reasoning_content"),
            calls=tuple(Call(**call["function"]) for call in turn.get("tool_calls") or turn.get(UNMADE) or ()),
        )
        for turn in turns
    )
    if messages[-1].calls and not clipped:
        own = sum(message.role == "assistant" for message in messages)
        return Transcript(messages=messages, stop="max_turns" if own == most else "max_tokens")
    return Transcript(messages=messages, stop="max_tokens" if clipped else "answered")


def reward_function(
    task: Task, reward: Any, *, thinking: Mapping[str, bool], tokenizer: Any, ends: frozenset[int], group: int,
    judges: Judges, phases: Sequence[Phase] = (), placebo: str = "", seed: int = 0, world: World = ALONE,
) -> Callable[..., list[float]]:  # fmt: skip
    """The reward function for TRL, which calls it once for all completions of a step, so judges get them in one batch.

    Each completion is decoded from its token ids, so that the reward sees the exact text that the model wrote; an
    episode is read from TRL's turns. The function logs `step_metrics` over groups of `group` completions and, with
    `phases`, `phase_metrics`. With a `placebo`, whose random numbers follow from `seed`, it returns the placebo's
    rewards, but still logs the terms of the task's score. An error of the score ends the training.

    Of several processes in `world`, each scores and is paid for its own completions. Placebos and metrics cover the
    completions of all processes, in the order of their ranks, which is that of the stream. Process 0 logs the metrics.
    """

    def task_reward(
        *,
        completion_ids: Sequence[Sequence[int]],
        completions: Sequence[Any],
        case: Sequence[str],
        mode: Sequence[str],
        row: Sequence[int],
        log_metric: Callable[[str, float], None],
        phase: Sequence[int] = (),
        **_: Any,
    ) -> list[float]:
        known = {text: task.Case.model_validate_json(text) for text in dict.fromkeys(case)}
        if task.episodes is None:
            written = [decode(tokenizer, ids, ends) for ids in completion_ids]
            done = [
                transcript_of(read_turn(text.text, opens(tokenizer, thinking[name])), text.stop)
                for text, name in zip(written, mode, strict=True)
            ]
        else:
            done = [
                episode_transcript(turns, clipped=ids[-1] not in ends, most=task.episodes.turns)
                for turns, ids in zip(completions, completion_ids, strict=True)
            ]
        pairs = [(known[text], transcript) for text, transcript in zip(case, done, strict=True)]
        began = time.monotonic()
        earned = scores(task, pairs, reward, judges)
        log_metric("reward_time", time.monotonic() - began)  # not in the history, since a clock decides it
        here = list(zip(case, mode, done, earned, map(task.parse, done), strict=True))
        texts, modes, transcripts, rewards, answers = zip(*world.gathered(here), strict=True)
        numbers = world.gathered(phase) if phases else []
        totals = [score.total for score in rewards]
        if placebo:  # seeded by the row's number in the stream, so that each step differs, and a repeated step does not
            random = Random(f"{seed}:{world.gathered(row)[0]}")
            totals = placebo_rewards(placebo, totals, answers, group, reward.low, reward.high, random)
        paid_here = totals[world.rank * len(here) : (world.rank + 1) * len(here)]
        if not world.is_main:
            return paid_here
        known |= {text: task.Case.model_validate_json(text) for text in dict.fromkeys(texts) if text not in known}
        cases = [known[text] for text in texts]
        logged = step_metrics(task, list(zip(cases, modes, transcripts, answers, rewards, totals, strict=True)), group)
        if phases:
            logged |= phase_metrics([task.reporting.slices[phases[0].slice](one) for one in cases], numbers, phases)
        for name, value in logged.items():
            log_metric(name, value)
        return paid_here

    return task_reward
