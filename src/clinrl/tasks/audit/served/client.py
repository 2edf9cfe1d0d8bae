"""The client of a served audit, and transcripts as what it sends."""

from collections.abc import Iterator

from clinrl.tasks.audit.episodes import answered_calls
from clinrl.tasks.audit.served.models import AuditAction, AuditObservation, AuditState
from clinrl.tasks.openenv import TaskClient
from clinrl.types import Transcript, is_malformed


class AuditClient(TaskClient):
    """A session with a server: `with AuditClient(base_url="http://127.0.0.1:8000").sync() as audit: ...`"""

    observation_type, state_type = AuditObservation, AuditState


def actions(transcript: Transcript) -> Iterator[AuditAction]:
    """A transcript as actions: its calls that were answered, its turns that could not be read, and the end."""
    for call, _ in answered_calls(transcript):
        yield AuditAction(tool=call.name, arguments=call.arguments)
    for message in transcript.messages:
        if message.role == "assistant" and is_malformed(message):
            yield AuditAction(tool="")
    yield AuditAction(tool=None)
