"""The scheduled run: build what is stale of a task's versions and release the newest; if nothing is stale, draft one.

    python -m flows retrain esi

This command works in the checkout. A scheduled run works in a clone, and hands over a branch.

If the task's schedule says `draft: true`, a run that finds everything built and settled drafts the next version from
the champion's errors. A draft within the change plan that is ahead of the champion on the mine data goes to the gate,
whose look at the exam spends error budget. One that fails is dropped, on record. Without budget, nothing is drafted.
"""

from contextlib import chdir, suppress
from pathlib import Path

from prefect import Flow, State, flow
from prefect.logging import get_run_logger
from prefect.states import Completed

from clinrl import paths
from clinrl.config import change_plan
from clinrl.config.params import Params, load_params
from clinrl.errors import Alarmed, ParamsError, Refused
from clinrl.pipeline import propose as drafts
from clinrl.pipeline.plan import dvc_states
from clinrl.pipeline.propose import Draft
from clinrl.provenance.lock import LOCK
from clinrl.release.change_control import mine_data, no_look_left, outside_plan, screened_out
from clinrl.release.standing import is_champion, is_registered, outcome
from flows import branches, clone, pages, records, runs, steps, turns
from flows.release import carry_out, folds
from flows.reproduce import build, order
from flows.watch import note_drift

NOTHING_TO_DO, NOT_RELEASED, DROPPED = "Nothing to do", "Not released", "Dropped"  # releases nothing
WRITTEN = (str(LOCK), str(drafts.DRAFTS), "data/reports")  # what a retraining changes in git


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
    checkout, to = Path.cwd(), f"{branches.BUILT}/retrain-{task}"

    def left() -> None:
        clone.share_cache(checkout)
        with suppress(ParamsError):  # the code has changed since, and cannot say what was made
            clone.push(addresses(load_params(), task))
        branches.hand_over_rest(to, f"{task}: left by a run that did not hand over", WRITTEN)

    with runs.in_turn(task, f"the schedule of {task}"), clone.at(head(), f"retrain-{task}", left):
        if turns.is_overtaken():
            return Completed(name=turns.OVERTAKEN, message="a run that began after this one was due did its work")
        branches.go_on(to, WRITTEN)
        clone.begin_here()
        clone.share_cache(checkout)
        records.link(params := load_params(), checkout)
        clone.pull(addresses(params, task))
        with chdir(checkout):  # the counts are there
            note_drift(load_params(), task)
        try:
            return renew(params, task, None)
        finally:
            if clone.git("status", "--porcelain"):
                clone.push(addresses(load_params(), task))
                branches.hand_over(to, f"{task} retrained", only=WRITTEN, force="")
                get_run_logger().info("`git fetch && git merge origin/%s` takes over what was made", to)


def head() -> str:
    """The checkout's commit. Raises Refused if the audit log has lines that are not in it."""
    if clone.git("status", "--porcelain", "--", log := str(paths.audit_log())):
        raise Refused(
            f"{log} has lines that are not committed; commit it, push it if there is an origin, and run this again"
        )
    return clone.git("rev-parse", "HEAD")


def renew(params: Params, task: str, approver: str | None) -> State[None]:
    """Build what is stale, and release or draft; the state says how that ended."""
    left = unfinished(params, versions := of_task(params, task))
    if not left and drafts.find(versions[-1]) is None:
        message = f"every version of {task} is up to date and registered, and {outcome(params, versions[-1])}"
        get_run_logger().info("%s", message)
        if task not in params.schedules or not params.schedules[task].draft:
            return Completed(name=NOTHING_TO_DO, message=f"nothing to do: {message}")
        if reason := no_look_left(params, task):
            return Completed(name=NOTHING_TO_DO, message=f"nothing to do: {message}; no draft, since {reason}")
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
        return conclude(params, draft, approver)
    if (standing := outcome(params, newest)) and not is_champion(params, newest):
        return Completed(name=NOT_RELEASED, message=f"everything is up to date and registered; {standing}")
    return carry_out(params, newest, approver)


def draft_next(params: Params, task: str) -> Draft:
    """Draft the next version of a task into params/drafts.yaml, from the present errors of its champion."""
    champion = drafts.champion(params, task)
    steps.bring_up_to_date([*params.data_stages(mine_data(params, champion)), f"mine@{champion}"])
    return steps.draft(task)


def conclude(params: Params, draft: Draft, approver: str | None) -> State[None]:
    """Release a draft that is surely better than the champion, and drop any other."""
    name = draft.name
    if not is_champion(params, name):
        if (ended := outcome(params, name)) and not ended.endswith("refused by its gate"):
            drafts.conclude(draft, "refused", ended)  # a person refused it, or rolled it back, and may release it again
            return Completed(name=NOT_RELEASED, message=ended)
        why = outside_plan(params, name)
        if not why:
            steps.bring_up_to_date([f"mine@{name}"])
            why = screened_out(params, name)
        if not why and not (decision := steps.decide(name)).promote:
            pages.show_decision(decision)
            why = f"its gate refused it: {decision.reasons[0]}"
        if why:
            return drop_draft(draft, why)
    state = carry_out(params, name, approver)
    drafts.conclude(draft, "promoted" if is_champion(params, name) else "refused", str(state.message))
    return state


def drop_draft(draft: Draft, why: str) -> State[None]:
    """Take a draft out of params/drafts.yaml, and return the state of a run that ends with this."""
    steps.drop(draft, why)
    return Completed(name=DROPPED, message=f"{draft.name} is dropped: {why}")


def is_hopeless(failed: steps.StageFailed, version: str) -> bool:
    """Whether the same command would fail again: the probe refused the recipe, or an alarm ended the training."""
    return failed.exit_code == Alarmed.exit_code or paths.probe_proof(version).with_suffix(".failed.json").exists()


def of_task(params: Params, task: str) -> list[str]:
    """The versions of a task, parents first and the newest last. Raises ParamsError if there are none."""
    if not (named := params.versions_of(task)):
        raise ParamsError(f"params.yaml has no version of {task}, so there is nothing to retrain")
    every = dict.fromkeys(before for version in named for before in params.lineage(version))
    return sorted(every, key=params.newest_of(task).__eq__)


def addresses(params: Params, task: str) -> list[str]:
    """The stages of all versions and full models of a task, and of their error analyses."""
    named = [one for version in of_task(params, task) for one in (version, *folds(params, version))]
    mines = [name for name in named if name in params.mining]
    data = [stage for name in mines for stage in params.data_stages(params.mining[name].data)]
    stages = [stage for name in named for stage in order(params, name)]
    return [*dict.fromkeys([*stages, *data, *(f"mine@{name}" for name in mines)])]


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
