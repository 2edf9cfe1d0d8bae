"""A release: decide, approve, promote, merge, and release what was merged.

    python -m flows release esi-v49 --approver "Ada Lovelace"

A person approves, by name: with `--approver`, or on the page of the paused run. Silence is no. The approval of a
version holds for its full models too: each becomes their champion if its own exam passes the gate.
"""

import math
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

from prefect import Flow, State, flow, get_client
from prefect.exceptions import FlowPauseTimeout, Pause
from prefect.flow_runs import pause_flow_run
from prefect.input import RunInput, read_flow_run_input
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL
from prefect.states import Completed, Running

from clinrl.config.params import Params, load_params
from clinrl.errors import ArtefactError, GateError, Refused, SignatureError
from clinrl.registry import versions
from clinrl.release import promotion as releases
from clinrl.release.gate import Decision
from clinrl.release.moves import approval_of
from clinrl.release.standing import check_unchanged, is_champion, outcome
from clinrl.signing import approval as approvals
from flows import pages, runs, servers, steps
from flows.reproduce import build
from flows.turns import at_work

REFUSED, NOT_APPROVED = "Refused", "Not approved"
"""The states of a release that changes nothing: the gate refused, or nobody approved. Neither is an error."""
POLL_S = 3
DEFAULT_ANSWER_S = 86400


class Approval(RunInput):
    """A person's answer, which is no by default."""

    approve: bool = False
    approver: str = ""
    token: str = ""
    """The output of `clinrl approve DECISION --as APPROVER` on the machine with the approver's key. Anybody who reaches
    this page can write a name, but only the owner of the key can make a token."""
    note: str = ""


def approved_by(approver: str | None) -> Flow[[str], State[None]]:
    """The flow, approved beforehand by a person, or by nobody (None). The approver is no parameter of a run, since
    anybody could set it."""

    @flow(flow_run_name="release-{name}")
    def release(name: str) -> State[None]:
        """Decide on a registered version or merge, ask for approval unless it was given, promote it and merge it."""
        runs.begin()
        return carry_out(load_params(), name, approver)

    return release


@flow(name="release", flow_run_name="release-{name}")
def release(name: str) -> State[None]:
    """The same flow on a server. No other flow may work on the task here meanwhile: both would spend one budget."""
    runs.begin()
    params = load_params()
    with at_work(params.model(name).task.name, f"a release of {name}"):
        return carry_out(params, name, None)


def carry_out(
    params: Params, name: str, approver: str | None, hand_over: Callable[[], None] = lambda: None
) -> State[None]:
    """Release a version or a merge; the state says how that ended. For a champion only the full models are made.

    `hand_over` is called before a person is asked, and after a promotion: hours may follow, in which the machine may
    die, and until then nobody else has the records.
    """
    if releases.settle(params, name) is None:
        decision = steps.decide(name)
        pages.show_decision(decision)
        if not decision.promote:
            return Completed(name=REFUSED, message=f"{name} may not be promoted: {'; '.join(decision.reasons)}")
        hand_over()
        approval, reason = answer(params, decision, approver)
        if approval is None:
            steps.refuse(decision, reason)
            return Completed(name=NOT_APPROVED, message=f"{name} was not approved: {reason}")
        check_unchanged(params, name)
        steps.promote(name, decision, approval)
        hand_over()
    standings = [outcome(params, name), *(full_model(params, fold, name) for fold in folds(params, name))]
    return Completed(message="; ".join(filter(None, standings)))


def full_model(params: Params, fold: str, version: str) -> str | None:
    """Make, examine and register the full model of a champion, and promote it if its own exam passes the gate.

    The approval of the version holds for it.
    """
    build(params, fold)
    if (releases.settle if is_champion(params, fold) else outcome)(params, fold) is None:
        try:
            decision = steps.decide(fold)
            pages.show_decision(decision)
            if decision.promote:
                champion = versions.find(params.model(version).registered, versions.CHAMPION)
                approval, approved = approval_of(params, champion)
                steps.promote(fold, decision, approval, approved)
        except (ArtefactError, GateError) as refused:  # the version is champion all the same
            return f"{fold} is not promoted: {refused}"
    return outcome(params, fold)


def folds(params: Params, version: str) -> list[str]:
    """The full models of params.yaml that are made of a version."""
    return [name for name, fold in params.merges.folds.items() if fold.version == version]


def answer(params: Params, decision: Decision, approver: str | None) -> tuple[dict[str, Any] | None, str]:
    """The signed approval, or None and the reason why there is none. Without `approver`, this waits for a person.

    After a yes with an invalid token it asks again while there is time: a typo or a stranger must not end the release.

    Raises GateError if `approver` is not a valid name, or if none is given and nobody can be asked; SignatureError if
    this machine's key is not that person's.
    """
    if approver is not None:
        return approvals.sign_approval(params, decision.digest, approvals.check_approver(approver)), ""
    if os.environ.get(servers.PRIVATE) or not PREFECT_API_URL.value():
        raise GateError(
            f"{decision.candidate} waits for an approval and nobody can be asked, since no Prefect server is "
            'configured; name the approver (--approver "NAME"), or start `make serve` and set PREFECT_API_URL'
        )
    schedule = params.schedules.get(decision.task)
    within_s = schedule.answer_within_s if schedule else DEFAULT_ANSWER_S
    deadline, wrong = time.monotonic() + within_s, ""
    while (left_s := math.ceil(deadline - time.monotonic())) > 0:
        given = _ask(decision, left_s, wrong)
        if given is None:
            break
        if not given.approve:
            who, note = (" ".join(text.split())[:most] for text, most in ((given.approver, 80), (given.note, 500)))
            # A no needs no token, so the signed audit log must not say that this person gave it.
            return None, f"somebody{f' in the name of {who}' if who else ''} said no{f': {note}' if note else ''}"
        try:
            person = approvals.check_approver(given.approver)
            return approvals.check_token(params, decision.digest, given.token, person), ""
        except (GateError, SignatureError) as refused:
            wrong = f"the last answer was yes, but {refused}"
            get_run_logger().warning("%s", wrong)
    return None, f"nobody answered within {timedelta(seconds=within_s)}{f'; {wrong}' if wrong else ''}"


def _ask(decision: Decision, within_s: int, wrong: str) -> Approval | None:
    """Pause the run until a person answers on its page; None if nobody does in time. `wrong` is why it asks again.

    A server that is away meanwhile ends nothing. Once it is back, the run is still paused, or the same question is put
    again by its key, and Prefect returns the answer that was given; or the time was over, and Prefect gave it up.
    """
    get_run_logger().info("waiting for an answer on the page of this run: %s", flow_run.ui_url)
    question = Approval.with_initial_data(description=pages.approval_page(decision, wrong))
    run, key, deadline = UUID(str(flow_run.get_id())), uuid4().hex, time.monotonic() + within_s
    with get_client(sync_client=True) as client:
        while True:
            left_s = max(1, math.ceil(deadline - time.monotonic()))
            try:
                now = client.read_flow_run(run).state
                if now is None or now.is_running():
                    return pause_flow_run(question, timeout=left_s, poll_interval=min(POLL_S, left_s), key=key)
                form: Any = now.state_details.run_input_keyset
                if now.is_paused() and form and read_flow_run_input(form["schema"], run) is None:
                    question.save(form, run)  # the server went away between the pause and its form
            except FlowPauseTimeout:
                break
            except (Exception, Pause) as error:  # Pause: it was accepted already, and the answer to that was lost
                if not isinstance(error, Pause) and not runs.is_away(error):
                    raise
                get_run_logger().warning("the Prefect server is away; the question stays")
            else:
                if time.monotonic() >= deadline or now.is_final() or now.is_cancelling():
                    break
            time.sleep(min(POLL_S, left_s))
        if (last := client.read_flow_run(run).state) and (last.is_cancelling() or last.is_cancelled()):
            raise Refused("this release was cancelled")
        # The server has given the run up; it goes on, to write down that nobody answered.
        client.set_flow_run_state(run, Running(), force=True)
    return None
