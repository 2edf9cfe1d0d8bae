"""The scheduled run: build what is stale of a task's versions and release the newest; if nothing is stale, draft one.

    python -m flows retrain esi

This command works in the checkout. A scheduled run works in a clone, and hands over a branch.

If the task's schedule says `draft: true`, a run that finds everything built and settled drafts the next version from
the champion's errors. A draft within the change plan that is ahead of the champion on the mine data goes to the gate,
whose look at the exam spends error budget. One that fails is dropped, on record. Without budget, nothing is drafted.
"""

from collections.abc import Callable
from contextlib import chdir, suppress
from pathlib import Path

from prefect import Flow, State, flow
from prefect.logging import get_run_logger
from prefect.states import Completed

from clinrl import paths
from clinrl.config import change_plan
from clinrl.config.params import Params, load_params
from clinrl.errors import ParamsError, Refused
from clinrl.pipeline import propose as drafts
from clinrl.pipeline.plan import dvc_states
from clinrl.provenance.lock import LOCK
from clinrl.release import decisions
from clinrl.release.change_control import no_look_left
from clinrl.release.standing import is_champion, is_registered, outcome
from flows import branches, clone, pages, records, remote, runs, steps, turns
from flows.drafting import NOT_RELEASED, conclude, draft_next, drop_draft, is_hopeless
from flows.release import carry_out, folds
from flows.reproduce import build, mining, order
from flows.watch import note_drift

NOTHING_TO_DO = "Nothing to do"
"""The state of a retraining that finds nothing to build, to release or to draft."""
WRITTEN = (str(LOCK), str(drafts.DRAFTS), "data/reports")
"""The files and folders of git that a retraining changes."""


def approved_by(approver: str | None) -> Flow[[str], State[None]]:
    """The flow, its release approved beforehand by a person, or by nobody; see `flows.release.approved_by`."""

    @flow(flow_run_name="retrain-{task}")
    def retrain(task: str) -> State[None]:
        """Build every version of a task that is stale or not registered, and release the newest; else draft one."""
        runs.begin()
        return renew(load_params(), task, approver)

    return retrain


retrain = approved_by(None)


@flow(name="retrain", flow_run_name="retrain-{task}")
def scheduled(task: str) -> State[None]:
    """The same flow for a schedule: in a clone at the checkout's commit. Its result is the branch built/retrain-TASK.

    Later runs continue that branch until somebody has merged it. A run that fails hands over too; after a killed run,
    the next one hands over what it left. Without a DVC remote the checkout's cache holds the files. Raises Refused if
    the audit log has uncommitted lines, since two logs that have both grown cannot be merged.
    """
    runs.begin()
    clone.share(load_params().scale)
    checkout, to = Path.cwd(), branches.result(f"retrain-{task}")

    def left() -> None:
        remote.share_cache(checkout)
        with suppress(ParamsError):  # the code has changed since, and cannot say what was made
            remote.push(addresses(load_params(), task))
        branches.hand_over_rest(to, f"{task}: left by a run that did not hand over", WRITTEN)

    with (
        runs.slot(f"retrain-{task}"),  # waits until no scheduled run of the task works, or asks a person
        turns.at_work(task, f"the schedule of {task}"),  # Busy if a flow without this server works on it here
        clone.at(head(), f"retrain-{task}", left),
    ):
        if turns.is_overtaken():
            return Completed(name=turns.OVERTAKEN, message="a run that began after this one was due did its work")
        branches.go_on(to, WRITTEN)
        clone.begin_here()
        remote.share_cache(checkout)
        records.link(params := load_params(), checkout)
        remote.pull(addresses(params, task))

        def check() -> None:
            remote.check_may_push(to)
            remote.check_may_write()
            with chdir(checkout):  # the counts are there
                note_drift(load_params(), task)

        def hand_over() -> None:
            if clone.git("status", "--porcelain"):
                remote.push(addresses(load_params(), task))
                branches.hand_over(to, f"{task} retrained", only=WRITTEN, force="")
                get_run_logger().info("`git fetch && git merge origin/%s` takes over what was made", to)

        try:
            return renew(params, task, None, check, hand_over)
        finally:
            hand_over()


def head() -> str:
    """The checkout's commit. Raises Refused if it lacks params.yaml, or lines of the audit log."""
    if clone.git("status", "--porcelain", "--", log := str(paths.AUDIT_LOG)):
        raise Refused(
            f"{log} has lines that are not committed; commit it, push it if there is an origin, and run this again"
        )
    return clone.git("rev-parse", "HEAD", "HEAD:./params.yaml").split()[0]


def renew(
    params: Params,
    task: str,
    approver: str | None,
    check: Callable[[], None] = lambda: None,
    hand_over: Callable[[], None] = lambda: None,
) -> State[None]:
    """Build what is stale, and release or draft; the state says how that ended.

    `check` is called before any work, and raises if its results could not be handed over; `hand_over` as in
    `flows.release.carry_out`. Raises GateError before any work if the registry has another champion than the audit log.
    """
    left = unfinished(params, versions := of_task(params, task))
    if is_done := not left and drafts.find(versions[-1]) is None:
        message = f"every version of {task} is up to date and registered, and {outcome(params, versions[-1])}"
        get_run_logger().info("%s", message)
        if task not in params.schedules or not params.schedules[task].draft:
            return Completed(name=NOTHING_TO_DO, message=f"nothing to do: {message}")
        if reason := no_look_left(params, task):
            return Completed(name=NOTHING_TO_DO, message=f"nothing to do: {message}; no draft, since {reason}")
    decisions.check_champion(params, params.model(versions[-1]).registered)
    check()
    if is_done:
        try:
            pages.show_draft(draft_next(params, task))
        except drafts.NothingToDraft as nothing:
            return Completed(name=NOTHING_TO_DO, message=f"nothing to do: {message}; no draft, since {nothing}")
        versions = of_task(params := load_params(), task)
    else:
        get_run_logger().info("to do: %s", ", ".join(left) or f"conclude the draft {versions[-1]}")
    draft = drafts.find(newest := versions[-1])
    if draft is not None and not paths.adapter(newest).exists() and (why := change_plan.outside(params, newest)):
        return drop_draft(draft, why)  # before it trains for hours
    for version in versions:
        try:
            build(params, version)
        except steps.StageFailed as failed:
            if draft is None or version != newest or not is_hopeless(failed, version):
                raise
            return drop_draft(draft, f"it cannot be trained: {failed}")
    if draft is not None:
        return conclude(params, draft, approver, hand_over)
    if (standing := outcome(params, newest)) and not is_champion(params, newest):
        return Completed(name=NOT_RELEASED, message=f"everything is up to date and registered; {standing}")
    return carry_out(params, newest, approver, hand_over)


def of_task(params: Params, task: str) -> list[str]:
    """The versions of a task, parents first and the newest last. Raises ParamsError if there are none."""
    if not (named := params.versions_of(task)):
        raise ParamsError(f"params.yaml has no version of {task}, so there is nothing to retrain")
    return sorted(params.family(*named), key=params.newest_of(task).__eq__)


def addresses(params: Params, task: str) -> list[str]:
    """The stages of all versions and full models of a task, and of their error analyses."""
    named = [one for version in of_task(params, task) for one in (version, *folds(params, version))]
    stages = [stage for name in named for stage in order(params, name)]
    return [*dict.fromkeys([*stages, *mining(params, *named)])]


def unfinished(params: Params, versions: list[str]) -> list[str]:
    """The work that is left, in words; none if all is up to date and registered, and the newest version is settled."""
    newest, merges = versions[-1], folds(params, versions[-1])
    states = dvc_states({address for name in (*versions, *merges) for address in order(params, name)})

    def left(names: list[str], released: list[str]) -> list[str]:
        addresses = dict.fromkeys(address for name in names for address in order(params, name))
        stale = [address for address in addresses if states[address] != "up to date"]
        new = [f"register {name}" for name in names if not is_registered(params, name)]
        return stale or new or [f"release {name}" for name in released if not outcome(params, name)]

    return left(versions, [newest]) or (left(merges, merges) if is_champion(params, newest) else [])
