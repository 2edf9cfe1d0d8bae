"""The client of a served audit: OpenEnv's own, told what the observations and the state look like."""

from collections.abc import Iterator, Mapping
from typing import Any

from openenv.core import EnvClient
from openenv.core.client_types import StepResult

from clinrl.tasks.audit.episodes import answered_calls
from clinrl.tasks.audit.served.models import AuditAction, AuditObservation, AuditState
from clinrl.types import Transcript, is_malformed


class AuditClient(EnvClient):  # type: ignore[misc]  # OpenEnv is an extra
    """A session with a server: `with AuditClient(base_url="http://127.0.0.1:8000").sync() as audit: ...`"""

    def _step_payload(self, action: AuditAction) -> dict[str, Any]:
        payload: dict[str, Any] = action.model_dump(exclude_defaults=True)
        return payload

    def _parse_result(self, payload: Mapping[str, Any]) -> StepResult:
        ended = {"done": payload["done"], "reward": payload["reward"]}
        return StepResult(observation=AuditObservation(**payload["observation"], **ended), **ended)

    def _parse_state(self, payload: Mapping[str, Any]) -> AuditState:
        return AuditState(**payload)


def actions(transcript: Transcript) -> Iterator[AuditAction]:
    """A transcript as actions: its calls that were answered, its turns that could not be read, and the end."""
    for call, _ in answered_calls(transcript):
        yield AuditAction(tool=call.name, arguments=call.arguments)
    for message in transcript.messages:
        if message.role == "assistant" and is_malformed(message):
            yield AuditAction(tool="")
    yield AuditAction(tool=None)
