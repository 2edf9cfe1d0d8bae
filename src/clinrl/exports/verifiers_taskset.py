"""A clinrl task for verifiers: its cases, its tools and its reward. clinrl itself reads and scores the answers.

`clinrl export verifiers` copies this file into a package named after the task, beside the cases. verifiers needs an
environment that has clinrl.
"""

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import verifiers.v1 as vf

from clinrl.models.chat import read_whole
from clinrl.models.rollout import tools
from clinrl.tasks.base import get_task
from clinrl.tasks.parts import verdicts
from clinrl.types import CALL, Call, Message, Transcript

HERE = Path(__file__).parent
TASK = get_task(HERE.name.removeprefix("clinrl_"))


class CaseData(vf.TaskData):  # type: ignore[misc]  # verifiers has an environment of its own
    """A case. The model reads `prompt` and `system_prompt`; `case` is the whole case, with its key."""

    case: dict[str, Any]


class CaseTools(vf.Toolset[vf.ToolsetConfig]):  # type: ignore[misc]
    """The tools of one episode, in a separate process."""

    TOOL_PREFIX = None

    async def setup_task(self, task: CaseData) -> None:
        """Start the episode."""
        assert TASK.episodes is not None
        self.environment = TASK.episodes.environment()
        self.environment.reset(case=TASK.Case.model_validate(task.case))

    def register(self, mcp: Any) -> None:
        """Offer every tool of the task's environment."""
        for name, tool in tools(self.environment).items():
            mcp.add_tool(tool, name=name, description=inspect.getdoc(tool))


class CaseTask(vf.Task[CaseData]):  # type: ignore[misc]
    """A case with its reward: the task's own, which asks no other model."""

    @property
    def key(self) -> str:
        """The case's id."""
        return str(self.data.id)

    @classmethod
    def toolsets(cls, config: Any) -> list[CaseTools]:
        """The tools of the episode; an empty list for a task of one turn."""
        return [CaseTools(vf.ToolsetConfig())] if TASK.episodes else []

    @vf.reward  # type: ignore[untyped-decorator]
    async def reward(self, trace: vf.Trace) -> float:
        """clinrl's reward for the whole transcript."""
        case = TASK.Case.model_validate(self.data.case)
        return TASK.score(case, transcript_of(trace), TASK.Reward()).total

    @vf.metric  # type: ignore[untyped-decorator]
    async def counted(self, trace: vf.Trace) -> dict[str, float]:
        """Share to whether it counts the case, as 0 or 1; shares whose denominator excludes the case are left out."""
        gold = TASK.label(TASK.Case.model_validate(self.data.case))
        return verdicts(TASK.compared, gold, TASK.parse(transcript_of(trace)))


class CaseTaskset(vf.Taskset[CaseTask, vf.TasksetConfig]):  # type: ignore[misc]
    """The cases of the file beside this one."""

    def load(self) -> Iterator[CaseTask]:
        """Yield the cases in the order of the file."""
        with (HERE / "cases.jsonl").open(encoding="utf-8") as lines:
            for line in lines:
                case = TASK.Case.model_validate_json(line)
                turns = {turn.role: turn.content for turn in TASK.prompt(case.facts)}
                data = CaseData(
                    id=case.id, prompt=turns["user"], system_prompt=turns.get("system"), case=json.loads(line)
                )
                yield CaseTask(data, self.config.task)


class CaseEnvConfig(vf.EnvConfig):  # type: ignore[misc]
    """By default, everything runs on this machine, with as many turns as an exam allows."""

    agent: vf.AgentConfig = vf.AgentConfig(
        harness={"id": "null"}, runtime=vf.SubprocessConfig(), max_turns=TASK.episodes.turns if TASK.episodes else 1
    )


class CaseEnv(vf.Env[CaseEnvConfig]):  # type: ignore[misc]
    """An environment in which one model answers one case."""

    async def run(self, task: CaseTask, agents: Any) -> None:
        """Let the model answer, or play."""
        await agents.agent.run(task)


def transcript_of(trace: vf.Trace) -> Transcript:
    """The model's transcript in clinrl's own type."""
    turns = (turn_of(message) for message in trace.messages if message.role in ("assistant", "tool"))
    return Transcript(messages=tuple(turns), stop="answered")


def turn_of(message: Any) -> Message:
    """A turn of verifiers in clinrl's own type.

    If the arguments of a call are no JSON object, the turn makes no call, as in an exam.
    """
    text = message.content or ""
    if message.role == "tool":
        return Message(role="tool", content=text if isinstance(text, str) else json.dumps(text, default=str))
    reasons = message.reasoning_content
    turn = read_whole(text) if reasons is None else Message(role="assistant", content=text, thinking=reasons)
    try:
        calls = [(call.name, json.loads(call.arguments or "{}")) for call in message.tool_calls or []]
        return turn.model_copy(update={"calls": tuple(Call(name=name, arguments=given) for name, given in calls)})
    except ValueError:
        return turn.model_copy(update={"content": turn.content + CALL})


if __name__ == "__main__":
    CaseTools.run()
