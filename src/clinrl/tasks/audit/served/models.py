"""The messages of a served audit: an action, an observation, a state. None of them holds a part of a case's key."""

from typing import Any

from openenv.core.env_server.types import Action, Observation
from pydantic import Field

from clinrl.tasks import openenv
from clinrl.tasks.audit.cases import MIXES
from clinrl.tasks.openenv import TaskState


class AuditAction(Action):  # type: ignore[misc]  # OpenEnv is an extra
    """One call of a tool, or the end."""

    tool: str | None = Field(
        description="The tool's name. null: no more calls, which ends the audit, handed in or not. A call that could "
        "not be read goes under any other name, for example an empty one: it is answered and counted."
    )
    arguments: dict[str, Any] = Field(default={}, description="The tool's arguments by name.")


class AuditObservation(Observation):  # type: ignore[misc]
    """What the auditor reads. The reward is null at the start, 0 for each call, and the score at the end."""

    text: str = Field(description="At the start the job, the protocol and the proposals; then what the tool says.")


class AuditState(TaskState):
    """How far an episode is."""

    level: str | None = Field(default=None, description="What was asked for at reset. null: no episode was started.")
    proposals: int = Field(default=0, ge=0, description="How many there are to decide about.")
    calls: int = Field(default=0, ge=0, description="Calls that a tool took, the ones with an error among them.")
    calls_left: int = Field(default=0, ge=0, description="How many more the limit allows.")
    malformed: int = Field(default=0, ge=0, description="Calls that no tool takes.")
    submitted: bool = Field(default=False, description="Whether the audit was handed in.")


class Start(openenv.Start):
    """What a reset may ask for."""

    level: str = Field(default="easy", pattern=f"^({'|'.join(MIXES)})$")
    """A level, or a mix of levels."""
