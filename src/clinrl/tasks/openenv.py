"""Serve a task with OpenEnv to external trainers: the shared parts, and the environment of a task of one turn.

The extra `openenv` installs the imports of this module. A session plays one case at a time; sessions share nothing.
The server never sends a case's key, nor its id or seed, from which a reader of this package could work the key out.
"""

from collections.abc import Collection, Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from secrets import randbits
from typing import Any, ClassVar, Final
from uuid import uuid4

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from openenv.core import EnvClient
from openenv.core.client_types import StepResult
from openenv.core.env_server import Environment, create_fastapi_app
from openenv.core.env_server.types import Action, ConcurrencyConfig, EnvironmentMetadata, Observation, State
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.responses import JSONResponse

from clinrl.errors import ParamsError, did_you_mean
from clinrl.runtime.guard import Fence, Limits, refusal_response
from clinrl.tasks.base import Task, get_task, task_names
from clinrl.types import Case, Message, Pool, Strict, transcript_of

CASES: Final = 200
"""The number of cases served of each seed, pool and mix. Drawing the last takes a third of a second; a seed nothing."""
SESSIONS: Final = 64
"""The default number of sessions that a server has room for. Each is a thread."""
LIMITS: Final = Limits(body_bytes=64 * 1024, request_s=30.0, idle_s=600.0)
"""The limits of a client. A call has a few hundred bytes, and a score takes milliseconds."""
CLOSED: Final = "closed"
"""The reply to a call before an episode begins or after it ends."""


class Impossible(ValueError):
    """Raised for a reset that asks for something that does not exist, or is not open."""


class Start(Strict):
    """The options of every reset. Equal values give equal episodes."""

    seed: int | None = Field(default=None, ge=0)
    """None: the server draws one and does not disclose it."""
    pool: Pool = "train"
    index: int = Field(default=0, ge=0, lt=CASES)
    """The position of the case in the data set of this seed, pool and mix."""


class MixedStart(Start):
    """The options of a reset of a task of one turn."""

    mix: str | None = None
    """None: the task's first mix."""


class Answer(Action):  # type: ignore[misc]  # OpenEnv is an extra
    """The whole answer to a case."""

    content: str = Field(description="What stands after the think block, as the model wrote it.")
    thinking: str | None = Field(default=None, description="What stands in the think block. null: there is none.")


class TaskObservation(Observation):  # type: ignore[misc]
    """What the model reads. The reward is null at the start, and the score at the end."""

    text: str = Field(description="At the start the case; after an answer nothing.")
    system: str = Field(default="", description="At the start what stands before the case as the system's turn.")


class TaskState(State):  # type: ignore[misc]
    """The progress of an episode."""

    model_config = ConfigDict(extra="forbid")

    pool: str | None = Field(default=None, description="Who may train on the case. null: no episode was started.")
    done: bool = Field(default=True, description="Whether the episode is over.")


class TaskEnvironment(Environment):  # type: ignore[misc]
    """One session. Model text never raises; a reset that asks for something that does not exist does."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    start_type: ClassVar[type[Start]]
    action_type: ClassVar[type[Any]]
    observation_type: ClassVar[type[Any]]
    state_type: ClassVar[type[TaskState]]

    def __init__(self, task: Task, reward: BaseModel | None = None, *, open_exam: bool = False) -> None:
        """`reward`: the reward to pay, by default the task's own. `open_exam`: whether the pool `exam` is served.

        Raises ParamsError for a reward that needs other models: the server runs no judge.
        """
        super().__init__()
        self._reward: Any = task.Reward() if reward is None else reward
        self._task, self._open_exam = task, open_exam
        if models := task.asks.models(self._reward):
            raise ParamsError(f"this reward needs {', '.join(models)}, which are not served; choose another")
        self._case: Any = None
        self._state: Any = self.state_type()

    def _checked_start(self, seed: int | None, options: Mapping[str, Any]) -> Any:
        """A reset's options. Raises Impossible for an unknown option, a wrong value, and a closed exam."""
        try:
            start = self.start_type.model_validate({"seed": seed, **options})
        except ValidationError as wrong:  # OpenEnv's client would show its title alone
            raise Impossible(_sentence(wrong.errors())) from None
        if start.pool == "exam" and not self._open_exam:
            raise Impossible("pool: the exam is closed; start the server with --open-exam to open it")
        return start

    def _begin(self, case: Case, episode_id: str | None, **state: Any) -> None:
        episode_id = str(uuid4()) if episode_id is None else episode_id
        self._case, self._state = case, self.state_type(episode_id=episode_id, done=False, **state)

    @property
    def state(self) -> Any:
        """The progress of the episode."""
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        """The server's description of itself."""
        about = (type(self._task).__doc__ or self._task.name).splitlines()[0]
        described = f"{about} Synthetic; research only."
        return EnvironmentMetadata(name=self._task.name, description=described, version=str(self._task.version))


class OneTurn(TaskEnvironment):
    """A session of a task of one turn: a case, an answer, and its score by the function that scores exams."""

    start_type, action_type, observation_type, state_type = MixedStart, Answer, TaskObservation, TaskState

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> TaskObservation:
        """Start an episode with a case. `options`: as in `MixedStart`. Raises Impossible as `_checked_start` does."""
        start, mixes = self._checked_start(seed, options), self._task.checks.mixes
        mix = mixes[0] if start.mix is None else start.mix
        if mix not in mixes:
            raise Impossible(f"mix: {did_you_mean(mix, mixes)}")
        self._begin(draw_case(self._task, start, mix), episode_id, pool=start.pool)
        turns = {message.role: message.content for message in self._task.prompt(self._case.facts)}
        return TaskObservation(text=turns["user"], system=turns.get("system", ""))

    def step(self, action: Answer, timeout_s: float | None = None, **_: Any) -> TaskObservation:
        """Score the answer, which ends the episode. A later answer earns nothing."""
        if self._state.done:
            return TaskObservation(text=CLOSED, done=True, reward=0.0)
        self._state = self._state.model_copy(update={"step_count": 1, "done": True})
        turn = Message(role="assistant", content=action.content, thinking=action.thinking)
        score = self._task.score(self._case, transcript_of(turn), self._reward)
        return TaskObservation(text="", done=True, reward=score.total)


class TaskClient(EnvClient):  # type: ignore[misc]
    """A session with a server: `with TaskClient(base_url="http://127.0.0.1:8000").sync() as session: ...`"""

    observation_type: ClassVar[type[Any]] = TaskObservation
    state_type: ClassVar[type[TaskState]] = TaskState

    def _step_payload(self, action: Any) -> dict[str, Any]:
        payload: dict[str, Any] = action.model_dump(exclude_defaults=True)
        return payload

    def _parse_result(self, payload: Mapping[str, Any]) -> StepResult:
        ended = {"done": payload["done"], "reward": payload["reward"]}
        return StepResult(observation=self.observation_type(**payload["observation"], **ended), **ended)

    def _parse_state(self, payload: Mapping[str, Any]) -> Any:
        return self.state_type(**payload)


def draw_case(task: Task, start: Start, mix: str) -> Any:
    """The case for the options of a reset."""
    seed = randbits(32) if start.seed is None else start.seed
    return next(islice(task.cases(start.index + 1, seed, pool=start.pool, mix=mix), start.index, None))


def environment_of(task: Task) -> type[TaskEnvironment]:
    """The environment of a task; a task of several turns has its own. Raises ParamsError if it has none."""
    if task.episodes is None:
        return OneTurn
    place = f"clinrl.tasks.{task.name}.served"
    if find_spec(place) is None:
        raise ParamsError(f"{task.name} is played in several turns, and has no environment that can be served")
    found: type[TaskEnvironment] = import_module(f"{place}.server").ENVIRONMENT
    return found


def application(
    task: Task, reward: BaseModel | None = None, *, sessions: int = SESSIONS, names: Collection[str] = (),
    open_exam: bool = False,
) -> Fence:  # fmt: skip
    """The ASGI application, with room for `sessions` at once. It pays `reward`, by default the task's own.

    `names`: its host names, beside localhost and its address. Raises ParamsError as the environment does.
    """
    kind = environment_of(task)
    new_session = partial(kind, task, reward, open_exam=open_exam)
    new_session()  # refuses a reward now, and not at the first client's call
    app = create_fastapi_app(
        new_session,
        kind.action_type,
        kind.observation_type,
        concurrency_config=ConcurrencyConfig(max_concurrent_envs=sessions, session_timeout=LIMITS.idle_s),
        env_name=task.name,
        state_cls=kind.state_type,
        mode="simulation",
    )
    for error in (Impossible, RequestValidationError, HTTPException):
        app.add_exception_handler(error, _error_response)
    return Fence(app, names=names, limits=LIMITS)


def __getattr__(name: str) -> Fence:
    """The application of the task of this name: OpenEnv's manifests refer to it."""
    if name not in task_names():
        raise AttributeError(name)
    return application(get_task(name))


async def _error_response(_: Request, error: Exception) -> JSONResponse:
    """The fault of a request in a sentence, without a traceback and without the request's content."""
    if isinstance(error, HTTPException):
        detail = error.detail
        return refusal_response(error.status_code, detail if isinstance(detail, str) else _sentence(detail))
    return refusal_response(422, _sentence(error.errors()) if isinstance(error, RequestValidationError) else str(error))


def _sentence(errors: Collection[Any]) -> str:
    """The first errors that pydantic found, without the input, which may be long."""
    named = (f"{'.'.join(map(str, one['loc']))[:80] or 'message'}: {one['msg'][:200]}" for one in errors)
    return "; ".join(islice(named, 5))
