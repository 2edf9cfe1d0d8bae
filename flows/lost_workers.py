"""How a lost worker is noticed: by an automation of the Prefect server, which has no such rule by itself."""

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from uuid import UUID

from prefect import State, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.events import emit_event
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.states import Cancelled, Crashed, Pending

from flows import runs

NAME = "clinrl: versions of lost workers"
"""The automation that sets a run to Crashed if its process sends no heartbeat any more."""
SILENCE_S = 90.0
"""Seconds after which a run counts as lost: three of Prefect's heartbeats, which it sends every 30 s at best."""
ENDS = ("Completed", "Failed", "Cancelled", "Crashed")
SILENT = "Its worker is silent."
BEAT = "prefect.flow-run.heartbeat"
MAKE = {"prefect.resource.role": "flow", "prefect.resource.name": "make"}
TAGGED = f"prefect.tag.{runs.OURS}"
"""The tag of runs of ours: others may have a flow `make` too."""
AGAIN_S = 600.0
"""Seconds after which the server is asked again to expect a heartbeat; well above SILENCE_S, or it would never fire."""
AT_ONCE = 100
"""Runs asked for at once; Prefect's server answers for 200 at most."""


def watch() -> None:
    """Make sure that the server has this automation, exactly once."""
    trigger = EventTrigger(
        after={"prefect.flow-run.Running", BEAT},
        expect={BEAT, *(f"prefect.flow-run.{state}" for state in ENDS)},
        match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
        # Only runs of `make`: its workers send heartbeats in time, and it ends in no other state.
        match_related=[
            ResourceSpecification({key: [value] for key, value in MAKE.items()}),
            ResourceSpecification({"prefect.resource.id": [TAGGED]}),
        ],
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=timedelta(seconds=SILENCE_S),
    )
    lost = ChangeFlowRunState(name=None, state=StateType.CRASHED, message=SILENT, force=True)
    with get_client(sync_client=True) as client:
        found = client.read_automations_by_name(NAME)
        alike = [automation for automation in found if automation.trigger == trigger]
        for old in [one for one in found if one not in alike]:
            client.delete_automation(old.id)
        if not alike:
            client.create_automation(AutomationCore(name=NAME, trigger=trigger, actions=[lost]))


def states(given: Mapping[str, UUID], seen: dict[UUID, float]) -> dict[str, State[None]]:
    """The states of all runs. A run that the server does not know any more counts as Crashed.

    So does a run that a worker accepted and does not start; it is cancelled too, so that it cannot begin later beside
    another. `seen` holds the time, by this machine's clock, at which each state was first seen; of a run that works,
    the time at which the server was last asked to expect a heartbeat.
    """
    found, asked, now = dict[UUID, State[None]](), [*given.values()], time.monotonic()
    with get_client(sync_client=True) as client:
        for first in range(0, len(asked), AT_ONCE):
            some = FlowRunFilter(id=FlowRunFilterId(any_=asked[first : first + AT_ONCE]))
            for run in client.read_flow_runs(flow_run_filter=some):
                state = found[run.id] = _outcome(client, run)
                waited = now - seen.setdefault(state.id, now)
                if state.is_running() and waited > AGAIN_S:
                    seen[state.id] = now
                    _expect_heartbeat(run)
                if is_late := state.is_pending() and waited > runs.PENDING_S:
                    client.set_flow_run_state(run.id, Cancelled(message=runs.NOT_STARTED), force=True)
                if is_late or (state.is_cancelled() and state.message == runs.NOT_STARTED):  # by another that waits
                    found[run.id] = Crashed(message=runs.NOT_STARTED)
    gone: State[None] = Crashed(message="The server does not know its run any more.")
    return {name: found.get(run, gone) for name, run in given.items()}


def _outcome(client: Any, run: FlowRun) -> State[None]:
    """The state of a run; the one in which it ended, if it was set to Crashed for silence after that."""
    state = run.state or Pending()
    if state.is_crashed() and state.message == SILENT:
        states: list[State[None]] = client.read_flow_run_states(run.id)
        if ended := [one for one in states if one.is_completed() or one.is_failed()]:
            return ended[-1]
    return state


def _expect_heartbeat(run: FlowRun) -> None:
    """Have the automation wait for a run's next heartbeat: it stops that where the server was away meanwhile."""
    flow = {"prefect.resource.id": f"prefect.flow.{run.flow_id}", **MAKE}
    tag = {"prefect.resource.id": TAGGED, "prefect.resource.role": "tag"}
    emit_event(BEAT, {"prefect.resource.id": f"prefect.flow-run.{run.id}"}, related=[flow, tag])
