"""The process of each flow run, so that the runs of killed processes can be found, and their slots freed.

Prefect does not notice a SIGKILL: such a run would stay Running. So each run is tagged with its process, and every
flow, and whatever waits for a slot, looks for runs of dead processes. A slot is held by a tag too, and ends with its
run; Prefect's limit says how many may. Prefect's own slots are counted, and leased for a day at most: a killed run
leaves its own taken, and one whose lease has ended goes on. Those of deployments end a flow while it asks a person.
"""

import logging
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from typing import Any
from uuid import UUID

import httpx
from prefect import State, get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter
from prefect.client.schemas.objects import StateType
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound, PrefectHTTPStatusError
from prefect.flow_engine import run_flow
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelled, Crashed, Pending

from clinrl.errors import Refused, mask
from clinrl.runtime import determinism, processes

TRAINING = f"clinrl-{os.environ.get('CLINRL_SLOT') or 'training'}"
"""The concurrency limit that training, examining and merging share. Raise it on a machine that has room for two.

Workers that share a Prefect server and no machine, or one machine and no GPU, each name a slot of their own in
CLINRL_SLOT, such as cpu-of-ward or gpu-0."""
OURS = "clinrl"
"""The tag of every deployment, which its runs have from the server: others may use the same one."""
KILLED, NOT_STARTED = "Its process was killed.", "Its process did not start."
PENDING_S = 300.0
"""Seconds that a process may take from accepting a run to `begin`."""
WAIT_S = 5.0
"""Seconds, at least, between two looks for a free slot; at most twice as many, so that two runs do not meet again."""
_PROCESS, _SLOT = "process:", "slot-{}:"

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
        _tag(client, f"{_PROCESS}{processes.identity()}", instead_of=(_PROCESS, "slot-"))
        sweep(client)


def sweep(client: Any) -> list[UUID]:
    """End runs whose process here is dead, or never began, and so free their slots. Returns the runs' ids."""
    swept, now = list[UUID](), parsedate_to_datetime(client.hello().headers["Date"])  # by the clock that dates states
    for run in _unfinished(client):
        owners = [tag.removeprefix(_PROCESS) for tag in run.tags if tag.startswith(_PROCESS)]
        if not all(map(processes.is_dead, owners)) or not (owners or _never_began(run, now)):
            continue
        state: State[None] = Crashed(message=KILLED) if owners else Cancelled(message=NOT_STARTED)
        for task_run in client.read_task_runs(
            flow_run_filter=FlowRunFilter.model_validate({"id": {"any_": [run.id]}}),
            task_run_filter=TaskRunFilter.model_validate({"state": {"type": {"any_": _UNFINISHED}}}),
        ):
            client.set_task_run_state(task_run.id, state, force=True)
        client.set_flow_run_state(run.id, state, force=True)
        swept.append(run.id)
    return swept


def _never_began(run: Any, now: Any) -> bool:
    """Whether a run of a deployment of ours was accepted long ago, by a process that did not come to `begin`."""
    return OURS in run.tags and not run.state.is_paused() and (now - run.state.timestamp).total_seconds() > PENDING_S


def _unfinished(client: Any, **chosen: Any) -> list[Any]:
    """The runs that have not ended. The server lists 200 at a time, and hundreds may wait."""
    runs: list[Any] = []
    unfinished = FlowRunFilter.model_validate({"state": {"type": {"any_": _UNFINISHED}}, **chosen})
    while page := client.read_flow_runs(flow_run_filter=unfinished, offset=len(runs)):
        runs += page
    return runs


@contextmanager
def slot(name: str) -> Iterator[None]:
    """Wait for a slot of a limit, and hold it until the block ends. A limit has one slot unless somebody raised it."""
    with get_client(sync_client=True) as client:
        try:
            client.read_global_concurrency_limit_by_name(name)
        except ObjectNotFound:
            with suppress(ObjectAlreadyExists):  # another run may be quicker
                client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=1))
        tag, is_told = _SLOT.format(name), False
        while not _taken(client, name, tag):
            if not is_told:
                get_run_logger().info("another run holds the limit %s; waiting for its slot", name)
            is_told = True
            time.sleep(WAIT_S * random.uniform(1, 2))
        try:
            yield
        finally:
            with suppress(httpx.HTTPError, ObjectNotFound):  # the server is away, or somebody deleted the run
                _tag(client, instead_of=tag)


def _taken(client: Any, name: str, tag: str) -> bool:
    """Take a slot if one is free. Two runs that take the last one at once both see that, and leave it."""
    try:
        sweep(client)
        own, found = flow_run.get_id(), client.read_global_concurrency_limit_by_name(name)
        if not found.active or len(_tagged(client, tag) - {own}) < found.limit:
            _tag(client, tag)
            holders = _tagged(client, tag)
            if own not in holders:
                raise Refused("the Prefect server counts this run as ended; what it made is kept")
            if not found.active or len(holders) <= found.limit:
                return True
        _tag(client, instead_of=tag)  # an absence of the server may have left it, too
    except httpx.HTTPError as error:
        if not is_away(error):
            raise
        get_run_logger().warning("the Prefect server is away; waiting for it")
    return False


def _tagged(client: Any, tag: str) -> set[str]:
    """The ids of the runs that have a tag and have not ended."""
    return {str(run.id) for run in _unfinished(client, tags={"all_": [tag]})}


def _tag(client: Any, *tags: str, instead_of: str | tuple[str, ...] = ()) -> None:
    """Tag this flow run, instead of its tags that begin so."""
    run = client.read_flow_run(flow_run.get_id())
    wanted = {*tags, *(tag for tag in run.tags if not tag.startswith(instead_of))}
    if wanted != set(run.tags):
        client.update_flow_run(run.id, tags=sorted(wanted))


def _without_traceback(record: logging.LogRecord) -> bool:
    """Reduce a refusal to its sentence; any other error keeps its traceback."""
    if record.exc_info and isinstance(record.exc_info[1], Refused):
        record.exc_info = None
    return True
