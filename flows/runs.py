"""The process of each flow run, so that the runs of killed processes can be found, and their slots freed.

Prefect does not notice a SIGKILL: such a run would stay Running, and keep its concurrency slot. Each run is therefore
tagged with its process and with the lease of the slot it holds; every flow first looks for runs of dead processes.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any
from uuid import UUID

import httpx
from prefect import State, get_client
from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter
from prefect.client.schemas.objects import StateType
from prefect.exceptions import PrefectHTTPStatusError
from prefect.flow_engine import run_flow
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelled, Crashed, Pending

from clinrl.errors import Refused, mask
from clinrl.runtime import determinism, processes

OURS = "clinrl"
"""The tag of every deployment, which its runs have from the server: others may use the same one."""
KILLED, NOT_STARTED = "Its process was killed.", "Its process did not start."
PENDING_S = 300.0
"""Seconds that a process may take from accepting a run to `begin`."""
_PROCESS = "process:"
LEASE = "lease-{}:"
"""The tag with the lease of a slot, by its limit: a run may hold slots of two."""
_UNFINISHED = [StateType.PENDING, StateType.RUNNING, StateType.PAUSED, StateType.CANCELLING]


def start(flow: Any, parameters: dict[str, Any]) -> Any:
    """Run a flow in this process and return its last state. The run is tagged with its process from the start.

    A tag by `prefect.tags` would be inherited by every task run, and cost each a slot of its own. Raises Refused as
    `prefect_errors` does.
    """
    with prefect_errors():
        with get_client(sync_client=True) as client:
            run = client.create_flow_run(
                flow, parameters=parameters, tags=[f"{_PROCESS}{processes.identity()}"], state=Pending()
            )
        return run_flow(flow, flow_run=run, parameters=parameters, return_type="state")


@contextmanager
def prefect_errors() -> Iterator[None]:
    """Raise Refused, with one sentence, if the Prefect server does not answer in this block or refuses credentials."""
    server = f"the Prefect server at {mask(str(PREFECT_API_URL.value()))}"
    try:
        yield
    except PrefectHTTPStatusError as error:
        code, is_api = error.response.status_code, error.request.url.path.rpartition("/api/")[1]
        if code in (404, 405) or (code == 403 and not is_api):  # what Prefect does not know raises ObjectNotFound
            raise Refused(f"{server} is no API of Prefect; the address of one ends in /api") from error
        if code in (401, 403):
            raise Refused(
                f"{server} refused the credentials; set PREFECT_API_AUTH_STRING, as in .clinrl/servers/credentials.env"
            ) from error
        if not is_away(error):
            raise
        raise Refused(f"{server} fails ({error.response.status_code}); see to its database, and try again") from error
    except httpx.TransportError as error:
        raise Refused(
            f"{server} does not answer; start it (or unset PREFECT_API_URL, if the flow needs none), and try again"
        ) from error


def is_away(error: BaseException | None) -> bool:
    """Whether an error, or its cause, is that a Prefect server did not answer, or answered that it cannot, as when its
    database is away."""
    if isinstance(error, PrefectHTTPStatusError):
        return error.response.status_code >= 500
    return isinstance(error, httpx.TransportError) or (error is not None and is_away(error.__cause__))


def begin() -> None:
    """The first step of every flow: no telemetry, this process in the run's tags, and an end to runs of killed ones."""
    determinism.pin()  # a worker of Prefect starts flows by itself, and MLflow would report what they register
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logger = logging.getLogger(name)
        if _without_traceback not in logger.filters:
            logger.addFilter(_without_traceback)
    with get_client(sync_client=True) as client:
        retag(client, f"{_PROCESS}{processes.identity()}")
        sweep(client)


def sweep(client: Any) -> list[UUID]:
    """End runs whose process here is dead, or never began, and free their slots. Returns the runs' ids."""
    swept, now = list[UUID](), now_of(client)
    for run in unfinished(client):
        owners = [tag.removeprefix(_PROCESS) for tag in run.tags if tag.startswith(_PROCESS)]
        if not all(map(processes.is_dead, owners)) or not (owners or _never_began(run, now)):
            continue
        release(client, run)
        state: State[None] = Crashed(message=KILLED) if owners else Cancelled(message=NOT_STARTED)
        for task_run in client.read_task_runs(
            flow_run_filter=FlowRunFilter.model_validate({"id": {"any_": [run.id]}}),
            task_run_filter=TaskRunFilter.model_validate({"state": {"type": {"any_": _UNFINISHED}}}),
        ):
            client.set_task_run_state(task_run.id, state, force=True)
        client.set_flow_run_state(run.id, state, force=True)
        swept.append(run.id)
    return swept


def release(client: Any, run: Any) -> None:
    """Free the slots that a run holds by its tags."""
    for tag in run.tags:
        if tag.startswith("lease"):
            client.release_concurrency_slots_with_lease(UUID(tag.rpartition(":")[2]))


def _never_began(run: Any, now: Any) -> bool:
    """Whether a run of a deployment of ours was accepted long ago, by a process that did not come to `begin`."""
    return OURS in run.tags and not run.state.is_paused() and (now - run.state.timestamp).total_seconds() > PENDING_S


def now_of(client: Any) -> datetime:
    """The time by the server's clock, which dates states and limits."""
    return parsedate_to_datetime(client.hello().headers["Date"])


def unfinished(client: Any) -> list[Any]:
    """The runs that have not ended. The server lists 200 at a time, and hundreds may wait."""
    runs: list[Any] = []
    unfinished = FlowRunFilter.model_validate({"state": {"type": {"any_": _UNFINISHED}}})
    while page := client.read_flow_runs(flow_run_filter=unfinished, offset=len(runs)):
        runs += page
    return runs


def retag(client: Any, *tags: str) -> None:
    """Tag this flow run, in place of earlier tags of the same kind. A tag without a value only removes those."""
    run = client.read_flow_run(flow_run.get_id())
    kinds = tuple(f"{tag.split(':')[0]}:" for tag in tags)
    wanted = {tag for tag in (*tags, *run.tags) if tag not in kinds and (tag in tags or not tag.startswith(kinds))}
    if wanted != set(run.tags):
        client.update_flow_run(run.id, tags=sorted(wanted))


def _without_traceback(record: logging.LogRecord) -> bool:
    """Reduce a refusal to its sentence; any other error keeps its traceback."""
    if record.exc_info and isinstance(record.exc_info[1], Refused):
        record.exc_info = None
    return True
