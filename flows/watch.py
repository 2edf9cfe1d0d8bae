"""Watching of served models by a schedule: an alarm is sent as an event, and an automation acts on it.

    python -m flows watch esi

Drift starts the retraining, which records that it has begun. A champion with a safety metric above its limit is rolled
back, if a person approved that beforehand. Anybody who reaches the server can send such an event, so the rollback
checks the counts itself.
"""

import os
from collections.abc import Sequence

from prefect import State, flow
from prefect.events import emit_event
from prefect.events.schemas.deployment_triggers import DeploymentEventTrigger
from prefect.logging import get_run_logger
from prefect.states import Completed

from clinrl import paths
from clinrl.config.params import Params, load_params
from clinrl.errors import GateError, SignatureError
from clinrl.registry import versions
from clinrl.registry.versions import Entry
from clinrl.release import audit_log, promotion
from clinrl.release.moves import recorded_before, recorded_champion, rolled_back_by
from clinrl.signing import keys
from clinrl.signing.approval import approvers
from clinrl.watching import store
from clinrl.watching.standing import ALARM, DRIFT, SAFETY, is_harmful, note, settings_of, standing, was_acted_on
from flows import runs, servers


def resource(task: str) -> dict[str, str]:
    """The resource that the events of a task are about."""
    return {"prefect.resource.id": f"clinrl.served.{task}"}


def trigger(task: str, kind: str) -> DeploymentEventTrigger:
    """The automation that starts a deployment with the name of the task at an alarm of a kind."""
    return DeploymentEventTrigger(
        name=f"clinrl: {kind} of {task}", expect={f"clinrl.{kind}"}, match={**resource(task)}, parameters={"task": task}
    )


def champion_of(params: Params, task: str) -> Entry | None:
    """The champion by the audit log, which an interrupted rollback has not changed yet; without one, by its alias."""
    recorded = recorded_champion(task, audit_log.lines(params))
    return versions.by_digest(task, recorded) or versions.holder(task, versions.CHAMPION)


DAYS = 3
"""Days on which drift of a version is sent: this machine does not see whether another one began a retraining."""
SENT = "{} sent on day {}"


@flow(flow_run_name="watch-{task}")
def watch(task: str) -> State[None]:
    """Check the counts of a task's champion, and send an event for each kind of alarm without a consequence so far.

    A safety alarm is sent at each check until a rollback follows, or once a day where a person has to decide; drift
    is sent on `DAYS` days until a retraining has begun. An event may be lost, so it is sent more than once.
    """
    runs.begin()
    params = load_params()
    champion = champion_of(params, task)
    if champion is None:
        return Completed(message=f"{task} has no champion, so nothing is watched")
    if not paths.watched(task).exists():  # reading the counts would create it
        return Completed(message=f"{task} was never served from this machine, so nothing is watched here")
    found = standing(params, champion)
    new = [kind for kind in found.alarms if kind == SAFETY or kind not in found.raised]
    for kind in new:
        why = left_to_a_person(params, task, champion) if kind == SAFETY else ""
        get_run_logger().warning("alarm: %s of %s", kind, why or champion.name)
        if os.environ.get(servers.PRIVATE):  # nothing acts on an event there
            continue
        today, days = SENT.format(kind, store.today()), store.days(champion.model, champion.digest)
        notes = {bucket for day in days for feature, bucket in day if feature == ALARM}
        if (kind == DRIFT or why) and today in notes:
            continue
        emit_event(f"clinrl.{kind}", resource(task), payload={"version": champion.name, "digest": champion.digest})
        if kind == DRIFT or why:
            sent = [one for one in notes if one.startswith(SENT.format(kind, ""))]
            is_last = kind == DRIFT and len(sent) + 1 == DAYS
            note(params, champion, DRIFT if is_last else today)
    unseen = f"; drift was not looked at: {found.unseen}" if found.unseen else ""
    return Completed(message=f"{champion.name}: {found.requests} requests; {', '.join(new) or 'no'} new alarm{unseen}")


def note_drift(params: Params, task: str) -> None:
    """Record that a retraining has begun, if the champion's requests have drifted by the counts of this machine."""
    champion = champion_of(params, task)
    if champion is None or not paths.watched(task).exists():
        return
    if DRIFT in standing(params, champion).alarms:
        note(params, champion, DRIFT)


def left_to_a_person(params: Params, task: str, champion: Entry) -> str:
    """The reason why a champion above its limit is not rolled back automatically; empty if it is."""
    lines, approver = audit_log.lines(params), settings_of(params, task).approver
    why = "" if approver else f"params.yaml names nobody in watches.{task}.approver"
    try:
        if approver and approvers(params, approver).get(approver) != keys.signer(params.scale).key:
            why = f"no key of this machine is that of {approver}"
    except SignatureError as error:
        why = str(error)
    if why:
        return f"{champion.name} is above its limit, and {why}; give `clinrl rollback {task} --approver NAME`"
    if was_rolled_back(lines, champion):
        return f"{champion.name} is above its limit, and a person chose it after a rollback; a person must decide again"
    before = versions.by_digest(task, recorded_before(task, lines, champion.digest))
    if before is None:
        return f"{champion.name} is above its limit, and no champion before it is registered; a person must decide"
    if is_harmful(params, before) or was_acted_on(before, SAFETY):
        return f"{champion.name} is above its limit, and so was {before.name}; a person must decide"
    if person := rolled_back_by(task, lines, before.digest):
        return f"{champion.name} is above its limit, and {person} rolled {before.name} back; a person must decide"
    return ""


def was_rolled_back(lines: Sequence[audit_log.Entry], champion: Entry) -> bool:
    """Whether a rollback that was approved beforehand took a version's place away once."""
    return any(
        line.kind == "rollback" and line.body.get("beforehand") and line.body["from"]["digest"] == champion.digest
        for line in lines
    )


@flow(flow_run_name="rollback-{task}")
def rollback(task: str) -> State[None]:
    """Restore the previous champion if labels show that the safety metric of the present one is above its limit.

    This happens once per version: a person who makes it the champion again has decided. Raises GateError if nobody
    approved beforehand, if the previous champion is above its limit too or was rolled back, or if there are no counts.
    """
    runs.begin()
    params = load_params()
    champion = champion_of(params, task)
    if not paths.watched(task).exists():
        raise GateError(f"{task} was never served from this machine; rollbacks run where `clinrl serve {task}` does")
    if champion is None or not is_harmful(params, champion):
        return Completed(message=f"nothing to do: the champion of {task} keeps its limit, as far as labels show")
    if was_rolled_back(audit_log.lines(params), champion):
        return Completed(
            message=f"nothing to do: a person chose {champion.name} after a rollback, and has to decide again"
        )
    if why := left_to_a_person(params, task, champion):
        raise GateError(why)
    approver = settings_of(params, task).approver
    entry = promotion.rollback(params, task, approver=approver, of=champion.digest, beforehand=True)
    note(params, champion, SAFETY)
    return Completed(message=f"{entry.name} is the champion of {task} again, approved beforehand by {approver}")
