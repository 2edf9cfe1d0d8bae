"""The client of a served audit."""

from clinrl.tasks.audit.served.models import AuditObservation, AuditState
from clinrl.tasks.openenv import TaskClient


class AuditClient(TaskClient):
    """A session with a server: `with AuditClient(base_url="http://127.0.0.1:8000").sync() as audit: ...`"""

    observation_type, state_type = AuditObservation, AuditState
