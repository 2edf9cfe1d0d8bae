"""From cases to transcripts: a model answers a case, or plays it with the tools of its environment.

A sampler knows nothing of medicine; `run` connects it to a task.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from clinrl.config.schema import Mode
from clinrl.models.chat import read_calls, read_turn
from clinrl.models.generate import Prompt, Sampler
from clinrl.tasks.base import Task
from clinrl.types import Call, Case, Message, Stop, Transcript, transcript_of


def run(
    sampler: Sampler, task: Task, cases: Sequence[Case], mode: Mode, budget: int, seed: int,
    progress: Callable[[], None] = lambda: None,
) -> list[Transcript]:  # fmt: skip
    """One transcript a case, in the order of the cases, in one mode. `budget`: tokens of all turns together.

    A turn of an episode may use `mode.turn_tokens` of them. The sampler chooses which episodes are played together.
    """
    if task.episodes is not None:
        prompts = [task.prompt(case.facts) for case in cases]
        tools = schemas(task)
        episodes = [
            _Episode(case, prompt, task.episodes.environment(), sampler.opening(prompt, tools, mode.thinking))
            for case, prompt in zip(cases, prompts, strict=True)
        ]
        turns, lengths = task.episodes.turns, [len(episode.ids) for episode in episodes]
        for number, places in enumerate(sampler.together(lengths, budget)):
            part = [episodes[place] for place in places]
            _converse(sampler, part, turns, mode, budget, seed + number * turns, progress)
        return [Transcript(messages=tuple(one.messages), stop=one.stop or "max_turns") for one in episodes]
    completions = sampler.sample(
        [Prompt(case.id, task.prompt(case.facts)) for case in cases],
        thinking=mode.thinking,
        temperature=mode.temperature,
        top_p=mode.top_p,
        budget=budget,
        seed=seed,
        progress=progress,
    )
    is_opened = sampler.opens(mode.thinking)
    return [transcript_of(read_turn(completion.text, is_opened), completion.stop) for completion in completions]


def _converse(
    sampler: Sampler, episodes: "list[_Episode]", max_turns: int, mode: Mode, budget: int, seed: int,
    progress: Callable[[], None],
) -> None:  # fmt: skip
    """Play episodes to their ends: the model's turns and the results of their calls, until a turn makes no call.

    An episode also ends after `max_turns`, if the budget has no room for the results or for more of a turn, and if a
    turn reaches the mode's limit for one turn without an end. The calls of a last turn are not made. Results that
    exceed the budget are left out, and results that fill it to the last token end the episode, as in TRL's loop.
    """
    most = min(mode.turn_tokens or budget, budget)
    for turn in range(max_turns):
        if not (going := [episode for episode in episodes if episode.stop is None]):
            break
        asked = [
            Prompt(one.case.id, [*one.prompt, *one.messages], one.ids, min(most, budget - one.used)) for one in going
        ]
        completions = sampler.sample(
            asked, thinking=mode.thinking, temperature=mode.temperature, top_p=mode.top_p,
            budget=max(prompt.left or 0 for prompt in asked), seed=seed + turn,
        )  # fmt: skip
        for episode, completion in zip(going, completions, strict=True):
            left = min(most, budget - episode.used)
            written = completion if completion.tokens <= left else sampler.cut(completion, left)
            message = read_calls(read_turn(written.text, sampler.opens(mode.thinking)))
            episode.messages.append(message)
            if written.stop == "max_tokens":
                episode.stop = "max_tokens"
            elif not message.calls:
                episode.stop = "answered"
            elif turn == max_turns - 1:
                episode.stop = "max_turns"
            else:
                found = [act(episode.environment, call) for call in message.calls]
                ids = [*written.ids, *sampler.after(found, mode.thinking)]
                if episode.used + len(ids) <= budget:
                    episode.messages += found
                    episode.ids += ids
                    episode.stop = "max_tokens" if episode.used == budget else None
                else:
                    episode.stop = "max_tokens"
            if episode.stop is not None:
                progress()


class _Episode:
    """A conversation in progress."""

    def __init__(self, case: Case, prompt: list[Message], environment: Any, opening: list[int]) -> None:
        self.case, self.prompt = case, prompt
        self.environment = environment
        self.environment.reset(case=case)
        self.opened, self.ids = len(opening), opening
        self.messages: list[Message] = []
        self.stop: Stop | None = None

    @property
    def used(self) -> int:
        """Tokens after the prompt."""
        return len(self.ids) - self.opened


def schemas(task: Task) -> list[dict[str, Any]]:
    """JSON schemas of the tools of a task's environment, by name; none for a task without one."""
    from transformers.utils import get_json_schema

    return (
        [] if task.episodes is None else [get_json_schema(tool) for tool in tools(task.episodes.environment).values()]
    )


def tools(environment: Any) -> dict[str, Callable[..., Any]]:
    """The tools of an environment, or of a class of them, by name: its public methods other than `reset`."""
    kind = environment if inspect.isclass(environment) else type(environment)
    names = [name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")]
    return {name: getattr(environment, name) for name in names if name != "reset"}


def act(environment: Any, call: Call) -> Message:
    """Make a call and return the turn with its result.

    If the tool does not exist or does not take these arguments, the result is the one that TRL gives: an error for the
    model to read. Any other error of a tool is a fault of the environment and is raised.
    """
    tool = tools(environment).get(call.name)
    if tool is None:
        return _refused(call, f"Tool {call.name} not found.")
    try:
        return Message(role="tool", content=str(tool(**call.arguments)))
    except TypeError as error:
        try:
            inspect.signature(tool).bind(**call.arguments)
        except TypeError:
            return _refused(call, str(error))
        raise


def _refused(call: Call, why: str) -> Message:
    return Message(role="tool", content=str({"error": why}))
