"""The audit environment behind OpenEnv's server: a session plays one audit at a time, and nothing is shared.

An episode is over when the audit is handed in, when the limit of calls is reached, or when the auditor says that there
are no more calls. Then, and not before, it is scored, by the function that scores every other transcript.
"""

from collections.abc import Collection, Mapping
from functools import partial
from itertools import islice
from secrets import randbits
from typing import Any, Final
from uuid import uuid4

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from openenv.core.env_server import Environment, create_fastapi_app
from openenv.core.env_server.types import ConcurrencyConfig, EnvironmentMetadata
from pydantic import ValidationError
from starlette.responses import JSONResponse

from clinrl.runtime.guard import Fence, Limits, refusal_response
from clinrl.tasks.audit import TASK
from clinrl.tasks.audit.cases import AuditCase, cases
from clinrl.tasks.audit.env import CLOSED, AuditEnv, calls_for, perform
from clinrl.tasks.audit.prompt import prompt
from clinrl.tasks.audit.rewards import CORRECTED, score
from clinrl.tasks.audit.served.models import AuditAction, AuditObservation, AuditState, Start

SESSIONS: Final = 64
"""How many sessions a server has room for unless it is told otherwise. Each is a thread."""
LIMITS: Final = Limits(body_bytes=64 * 1024, request_s=30.0, idle_s=600.0)
"""What a client may take. A call has a few hundred bytes and a score is there in milliseconds."""


class Impossible(ValueError):
    """A reset that asks for what does not exist, or is not open."""


def _start(options: Mapping[str, Any]) -> Start:
    try:
        return Start.model_validate(options)
    except ValidationError as wrong:  # OpenEnv's client would show its title alone
        raise Impossible(_sentence(wrong.errors())) from None


def _sentence(errors: Collection[Any]) -> str:
    """What pydantic found, without the input, which may be long."""
    named = (f"{'.'.join(map(str, one['loc']))[:80] or 'message'}: {one['msg'][:200]}" for one in errors)
    return "; ".join(islice(named, 5))


def draw_case(start: Start) -> AuditCase:
    """The case that a reset asks for."""
    seed = randbits(32) if start.seed is None else start.seed
    found = cases(start.index + 1, seed, pool=start.pool, mix=start.level)
    return next(islice(found, start.index, None))


class AuditEnvironment(Environment):  # type: ignore[misc]  # OpenEnv is an extra
    """One session. Nothing that an agent writes raises; a reset that asks for what does not exist does."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, *, open_exam: bool = False) -> None:
        """`open_exam`: whether a reset may name the pool `exam`."""
        super().__init__()
        self._open_exam = open_exam
        self._env = AuditEnv()
        self._case: AuditCase | None = None
        self._limit = 0
        self._malformed = 0
        self._state = AuditState()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> AuditObservation:
        """Start an episode, and say what there is to do. `options`: as in `Start`.

        Raises Impossible for what is no option or no value of one; the episode before goes on then.
        """
        start = _start({"seed": seed, **options})
        if start.pool == "exam" and not self._open_exam:
            raise Impossible("pool: the exam is closed; whoever serves it opens it with --open-exam")
        case = draw_case(start)
        self._env.reset(case)
        self._case, self._malformed = case, 0
        proposals = len(case.facts.proposals)
        self._limit = calls_for(proposals)
        self._state = AuditState(
            episode_id=str(uuid4()) if episode_id is None else episode_id,
            level=start.level,
            pool=start.pool,
            proposals=proposals,
            calls_left=self._limit,
            done=False,
        )
        return AuditObservation(text="\n\n".join(message.content for message in prompt(case.facts)))

    def step(self, action: AuditAction, timeout_s: float | None = None, **_: Any) -> AuditObservation:
        """Make a call. After the end every call is answered with "closed" and earns nothing."""
        if self._case is None or self._state.done:
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
        return AuditObservation(text=text, done=done, reward=self._total(self._case) if done else 0.0)

    @property
    def state(self) -> AuditState:
        """How far the episode is."""
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        """What the server says of itself."""
        return EnvironmentMetadata(
            name=TASK.name,
            description="Audit with tools what another agent decided about patients of a clinical trial. "
            "Synthetic; research only.",
            version=str(TASK.version),
        )

    def _total(self, case: AuditCase) -> float:
        found = score(case, self._env.log, submitted=self._env.submitted, malformed=self._malformed, reward=CORRECTED)
        return found.total


def application(sessions: int = SESSIONS, *, names: Collection[str] = (), open_exam: bool = False) -> Fence:
    """The ASGI application, with room for so many sessions at once.

    `names`: what it may be called by, beside localhost and its address.
    """
    app = create_fastapi_app(
        partial(AuditEnvironment, open_exam=open_exam),
        AuditAction,
        AuditObservation,
        concurrency_config=ConcurrencyConfig(max_concurrent_envs=sessions, session_timeout=LIMITS.idle_s),
        env_name=TASK.name,
        state_cls=AuditState,
        mode="simulation",
    )
    for kind in (Impossible, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _in_a_sentence)
    return Fence(app, names=names, limits=LIMITS)


async def _in_a_sentence(_: Request, error: Exception) -> JSONResponse:
    """What was wrong with a request, without a traceback and without the request in it."""
    if isinstance(error, HTTPException):
        detail = error.detail
        return refusal_response(error.status_code, detail if isinstance(detail, str) else _sentence(detail))
    return refusal_response(422, _sentence(error.errors()) if isinstance(error, RequestValidationError) else str(error))


app = application()
"""What openenv.yaml names."""
