"""One flow of a task at a time, among those of one checkout that meet on no server; and runs that come too late."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

from clinrl import paths
from clinrl.artifacts import locked
from clinrl.errors import Busy

OVERTAKEN = "Overtaken"
"""How a run ends that did nothing, since it `is_overtaken`."""


@contextmanager
def at_work(task: str, flow: str) -> Iterator[None]:
    """Hold the right to work on a task until the block ends. Raises Busy, naming the flow that holds it.

    The kernel drops the lock with its process.
    """
    file = paths.locks() / f"flow-{task}.lock"
    with locked(file, waits=False) as stream:
        if stream is None:
            holder = file.read_text(encoding="utf-8").strip() or "another flow"
            raise Busy(
                f"{holder} is at work on {task} here; wait for it to end and give the same command again: it continues"
            )
        stream.truncate(0)
        stream.write(f"{flow} (process {os.getpid()}, since {time.strftime('%Y-%m-%d %H:%M')})")
        stream.flush()
        yield


def is_overtaken() -> bool:
    """Whether a run with this one's deployment and parameters did its work that began after this was due: after weeks
    off, one is due for each. A run that a person had begin again never is.
    """
    from prefect import get_client  # of flows in a terminal, most need none of it
    from prefect.client.schemas.filters import FlowRunFilter
    from prefect.client.schemas.objects import StateType
    from prefect.runtime import flow_run

    with get_client(sync_client=True) as client:
        mine = client.read_flow_run(UUID(str(flow_run.get_id())))
        done = {"type": {"any_": [StateType.COMPLETED]}, "name": {"not_any_": [OVERTAKEN]}}
        since = {"start_time": {"after_": mine.expected_start_time}, "state": done}
        alike = FlowRunFilter.model_validate({"deployment_id": {"any_": [mine.deployment_id or mine.id]}, **since})
        found = client.read_flow_runs(flow_run_filter=alike)
        return mine.run_count < 2 and any(run.parameters == mine.parameters for run in found)
