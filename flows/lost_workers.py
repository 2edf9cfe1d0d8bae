"""The automation of the Prefect server that ends the runs of lost workers; Prefect has no such rule by itself."""

from datetime import timedelta

from prefect import get_client
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification

NAME = "clinrl: versions of lost workers"
"""The automation that sets a run to Crashed if its process sends no heartbeat any more."""
SILENCE_S = 90.0
"""Seconds after which a run counts as lost: three of Prefect's heartbeats, which it sends every 30 s at best."""
ENDS = ("Completed", "Failed", "Cancelled", "Crashed")


def watch() -> None:
    """Make sure that the server has this automation, exactly once."""
    begins, beats, ends = (
        "prefect.flow-run.Running",
        "prefect.flow-run.heartbeat",
        {f"prefect.flow-run.{state}" for state in ENDS},
    )
    trigger = EventTrigger(
        after={begins, beats},
        expect={beats, *ends},
        match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
        # Only runs of `make`: its workers send heartbeats in time, and it ends in no other state.
        match_related=ResourceSpecification({"prefect.resource.role": ["flow"], "prefect.resource.name": ["make"]}),
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=timedelta(seconds=SILENCE_S),
    )
    lost = ChangeFlowRunState(name=None, state=StateType.CRASHED, message="Its worker is silent.", force=True)
    with get_client(sync_client=True) as client:
        found = client.read_automations_by_name(NAME)
        alike = [automation for automation in found if automation.trigger == trigger]
        for old in [one for one in found if one not in alike]:
            client.delete_automation(old.id)
        if not alike:
            client.create_automation(AutomationCore(name=NAME, trigger=trigger, actions=[lost]))
