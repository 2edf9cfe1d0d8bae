"""From cases to transcripts: a model answers a case, or plays it with the tools of its environment.

A sampler knows nothing of medicine; `run` joins it to a task.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from clinrl.models.chat import read_calls, read_turn
from clinrl.models.generate import Prompt, Sampler
from clinrl.tasks.base import Task
from clinrl.types import Call, Case, Message, Stop, Transcript

if TYPE_CHECKING:
    from clinrl.config.schema import Mode


def run(
    sampler: Sampler,
    task: Task,
    cases: Sequence[Case],
    mode: "Mode",
    budget: int,
    seed: int,
    progress: Callable[[], None] | None = None,
) -> list[Transcript]:
    """One transcript a case, in the order of the cases, in one mode. `budget`: tokens of all turns together."""
    if task.episodes is not None:
        return converse(sampler, task, cases, mode, budget, seed, progress)
    completions = sampler.sample(
        [Prompt(case.id, task.prompt(case.facts)) for case in cases],
        thinking=mode.thinking,
        temperature=mode.temperature,
        budget=budget,
        seed=seed,
        progress=progress,
    )
    return [
        Transcript(messages=(read_turn(completion.text, mode.thinking),), stop=completion.stop)
        for completion in completions
    ]


def converse(
    sampler: Sampler,
    task: Task,
    cases: Sequence[Case],
    mode: "Mode",
    budget: int,
    seed: int,
    progress: Callable[[], None] | None = None,
) -> list[Transcript]:
    """One episode a case: the model's turns, and what the environment answers to their calls, until a turn calls none.

    An episode also ends after so many turns of its task, and where the budget leaves no room for results or for more of
    a turn; calls whose results the model could not read any more are not in it as made: no result follows them. Results
    that fill the budget to the last token are its end, as in TRL's loop.
    """
    most, tools = _turns(task), schemas(task)
    episodes = [_Episode(task, case, sampler.opening(task.prompt(case.facts), tools, mode.thinking)) for case in cases]
    for turn in range(most):
        if not (going := [episode for episode in episodes if episode.stop is None]):
            break
        completions = sampler.sample(
            [
                Prompt(episode.case.id, [*episode.prompt, *episode.said], episode.ids, budget - episode.used)
                for episode in going
            ],
            thinking=mode.thinking,
            temperature=mode.temperature,
            budget=max(budget - episode.used for episode in going),
            seed=seed + turn,
        )
        for episode, completion in zip(going, completions, strict=True):
            left = budget - episode.used
            written = completion if completion.tokens <= left else sampler.cut(completion, left)
            said = read_calls(read_turn(written.text, mode.thinking))
            episode.said.append(said)
            if written.stop == "max_tokens" or not said.calls or turn == most - 1:
                ended: Stop = "max_turns" if said.calls else "answered"
                episode.stop = "max_tokens" if written.stop == "max_tokens" else ended
            else:
                found = [act(episode.environment, call) for call in said.calls]
                ids = [*written.ids, *sampler.after(found, mode.thinking)]
                if episode.used + len(ids) > budget:
                    episode.stop = "max_tokens"
                else:
                    episode.said += found
                    episode.ids += ids
                    episode.stop = "max_tokens" if episode.used == budget else None
            if episode.stop is not None and progress is not None:
                progress()
    return [Transcript(messages=tuple(episode.said), stop=episode.stop or "max_turns") for episode in episodes]


def _turns(task: Task) -> int:
    assert task.episodes is not None
    return task.episodes.turns


class _Episode:
    """A conversation in progress."""

    def __init__(self, task: Task, case: Case, opening: list[int]) -> None:
        assert task.episodes is not None
        self.case, self.prompt = case, task.prompt(case.facts)
        self.environment = task.episodes.environment()
        self.environment.reset(case=case)
        self.opened, self.ids = len(opening), opening
        self.said: list[Message] = []
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
    """Make a call, and say what it returned.

    A tool that does not exist, or not with these arguments, is answered as TRL answers it: with an error for the model
    to read. Whatever else a tool raises is a fault of the environment and is raised.
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
