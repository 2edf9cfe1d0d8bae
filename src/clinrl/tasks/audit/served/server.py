"""The audit environment behind OpenEnv's server.

An episode is over when the audit is submitted, when the limit of calls is reached, when more calls than that could not
be made, or when the auditor says that there are no more. Only then is it scored, by the function that scores every
other transcript.
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

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> AuditObservation:
        """Start an episode and return its prompt. `options`: as in `Start`.

        Raises Impossible as `_checked_start` does; the episode before then goes on.
        """
        start = self._checked_start(seed, options)
        case = draw_case(self._task, start, start.level)
        self._env = AuditEnv()
        self._env.reset(case)
        proposals = len(case.facts.proposals)
        limit = calls_for(proposals)
        self._begin(case, episode_id, level=start.level, pool=start.pool, proposals=proposals, calls_left=limit)
        return AuditObservation(text="\n\n".join(message.content for message in prompt(case.facts)))

    def step(self, action: AuditAction, timeout_s: float | None = None, **_: Any) -> AuditObservation:
        """Make a call. After the end every call is answered with "closed" and earns nothing."""
        state = self._state
        if state.done:
            return AuditObservation(text=CLOSED, done=True, reward=0.0)
        text = "" if action.tool is None else perform(self._env, action.tool, action.arguments)
        taken = len(self._env.log) - state.calls  # 0 or 1
        malformed = state.malformed + (action.tool is not None and not taken)
        is_spent = taken == state.calls_left or malformed > state.calls + state.calls_left
        done = action.tool is None or self._env.submitted or is_spent
        self._state = state.model_copy(
            update={
                "step_count": state.step_count + 1,
                "calls": state.calls + taken,
                "calls_left": state.calls_left - taken,
                "malformed": malformed,
                "submitted": self._env.submitted,
                "done": done,
            }
        )
        return AuditObservation(text=text, done=done, reward=self._total() if done else 0.0)

    def _total(self) -> float:
        log, state = self._env.log, self._state
        return score(self._case, log, submitted=state.submitted, malformed=state.malformed, reward=self._reward).total


ENVIRONMENT: Final = AuditEnvironment
"""The environment that `clinrl openenv audit` serves."""
