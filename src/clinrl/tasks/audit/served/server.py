"""The audit environment behind OpenEnv's server.

An episode is over when the audit is handed in, when the limit of calls is reached, or when the auditor says that there
are no more calls. Then, and not before, it is scored, by the function that scores every other transcript.
"""

from typing import Any, Final

from clinrl.tasks.audit.env import CLOSED, AuditEnv, calls_for, perform
from clinrl.tasks.audit.prompt import prompt
from clinrl.tasks.audit.rewards import score
from clinrl.tasks.audit.served.models import AuditAction, AuditObservation, AuditState, Start
from clinrl.tasks.openenv import TaskEnvironment, draw_case


class AuditEnvironment(TaskEnvironment):
    """One session: an audit, call by call."""

    start_type, action_type, observation_type, state_type = Start, AuditAction, AuditObservation, AuditState

    def __init__(self, *given: Any, **options: Any) -> None:
        """As any task's environment."""
        super().__init__(*given, **options)
        self._env = AuditEnv()
        self._limit = 0
        self._malformed = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> AuditObservation:
        """Start an episode, and say what there is to do. `options`: as in `Start`.

        Raises Impossible for what is no option or no value of one; the episode before goes on then.
        """
        start = self._started(seed, options)
        case = draw_case(self._task, start, start.level)
        self._env.reset(case)
        self._malformed = 0
        proposals = len(case.facts.proposals)
        self._limit = calls_for(proposals)
        self._begin(case, episode_id, level=start.level, pool=start.pool, proposals=proposals, calls_left=self._limit)
        return AuditObservation(text="\n\n".join(message.content for message in prompt(case.facts)))

    def step(self, action: AuditAction, timeout_s: float | None = None, **_: Any) -> AuditObservation:
        """Make a call. After the end every call is answered with "closed" and earns nothing."""
        if self._state.done:
            return AuditObservation(text=CLOSED, done=True, reward=0.0)
        text = "" if action.tool is None else perform(self._env, action.tool, action.arguments)
        log = self._env.log
        if action.tool is not None and len(log) == self._state.calls:
            self._malformed += 1  # no tool took it
        done = action.tool is None or self._env.submitted or len(log) >= self._limit
        self._state = self._state.model_copy(
            update={
                "step_count": self._state.step_count + 1,
                "calls": len(log),
                "calls_left": self._limit - len(log),
                "malformed": self._malformed,
                "submitted": self._env.submitted,
                "done": done,
            }
        )
        return AuditObservation(text=text, done=done, reward=self._total() if done else 0.0)

    def _total(self) -> float:
        log, submitted = self._env.log, self._env.submitted
        return score(self._case, log, submitted=submitted, malformed=self._malformed, reward=self._reward).total


ENVIRONMENT: Final = AuditEnvironment
"""What `clinrl openenv audit` serves."""
