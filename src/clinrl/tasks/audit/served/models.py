"""What goes over the wire: an action, an observation, a state. Nothing of a case's key is in any of them.

Neither a case's id nor its seed is in a state: both would let a reader of this package work the key out.
"""

from typing import Any, Final

from openenv.core.env_server.types import Action, Observation, State
from pydantic import ConfigDict, Field

from clinrl.tasks.audit.cases import MIXES
from clinrl.types import Pool, Strict

CASES: Final = 200
"""How many cases of each seed, pool and mix are served. The last costs a third of a second to draw; a seed nothing."""


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


class AuditState(State):  # type: ignore[misc]
    """How far an episode is."""

    model_config = ConfigDict(extra="forbid")

    level: str | None = Field(default=None, description="What was asked for at reset. null: no episode was started.")
    pool: str | None = Field(default=None, description="Who may train on the case, as asked for at reset.")
    proposals: int = Field(default=0, ge=0, description="How many there are to decide about.")
    calls: int = Field(default=0, ge=0, description="Calls that a tool took, the ones with an error among them.")
    calls_left: int = Field(default=0, ge=0, description="How many more the limit allows.")
    malformed: int = Field(default=0, ge=0, description="Calls that no tool takes.")
    submitted: bool = Field(default=False, description="Whether the audit was handed in.")
    done: bool = Field(default=True, description="Whether the episode is over.")


class Start(Strict):
    """What a reset may ask for. Equal values, equal episodes."""

    seed: int | None = Field(default=None, ge=0)
    """None: one drawn by the server, which tells nobody."""
    level: str = Field(default="easy", pattern=f"^({'|'.join(MIXES)})$")
    """A level, or a mix of levels."""
    pool: Pool = "train"
    index: int = Field(default=0, ge=0, lt=CASES)
    """Which of the cases that the data set of this seed, pool and mix holds."""
