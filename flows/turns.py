"""Turns of flows: one flow of a task at a time in a checkout, if no server orders them; and runs that come too late."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

from clinrl import paths
from clinrl.artifacts import locked
from clinrl.errors import Busy

OVERTAKEN = "Overtaken"
"""The state of a run that did nothing, since it `is_overtaken`."""


@contextmanager
def at_work(task: str, flow: str) -> Iterator[None]:
    """Hold the right to work on a task until the block ends. Raises Busy, naming the flow that holds it.

    The kernel releases the lock when the process ends.
    """
    file = paths.LOCKS / f"flow-{task}.lock"
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
    """Whether another run of this deployment, with the same parameters, began after this one was due, and completed.

    After weeks without a server, a run is due for each week. A run that a person started again is never overtaken.
    """
    from prefect import get_client  # here, since most flows in a terminal do not need it
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
