"""The drafts of a scheduled run: the next version is drafted, and later released or dropped."""

from collections.abc import Callable

from prefect import State
from prefect.states import Completed

from clinrl import paths
from clinrl.config.params import Params
from clinrl.errors import Alarmed
from clinrl.pipeline import propose as drafts
from clinrl.pipeline.propose import Draft
from clinrl.registry.versions import CHAMPION, holder
from clinrl.release.change_control import mine_data, outside_plan, screened_out
from clinrl.release.standing import REFUSED_BY_GATE, is_champion, outcome
from flows import pages, steps
from flows.release import carry_out
from flows.reproduce import mining

NOT_RELEASED, DROPPED = "Not released", "Dropped"
"""The states of a run whose version, or whose draft, does not become champion."""


def draft_next(params: Params, task: str) -> Draft:
    """Draft the next version of a task into params/drafts.yaml, from the present errors of its champion."""
    champion = drafts.champion(params, task)
    mine_data(params, champion)  # raises where nobody mines its errors
    steps.bring_up_to_date(mining(params, champion))
    return steps.draft(task)


def conclude(params: Params, draft: Draft, approver: str | None, hand_over: Callable[[], None]) -> State[None]:
    """Release a draft that is surely better than the champion, and drop any other; `hand_over` as in `carry_out`."""
    name = draft.name
    if not is_champion(params, name):
        if (ended := outcome(params, name)) and not ended.endswith(REFUSED_BY_GATE):
            # A person refused it, rolled it back or put another in its place, and may release it again.
            drafts.conclude(draft, "refused", ended)
            return Completed(name=NOT_RELEASED, message=ended)
        why = outside_plan(params, name)
        if not why:
            held = holder(draft.task, CHAMPION) if draft.task in params.plans else None
            # A champion that a rollback brought back may not be mined yet.
            steps.bring_up_to_date(mining(params, name, *([held.name] if held else [])))
            why = screened_out(params, name)
        if not why and not (decision := steps.decide(name)).promote:
            pages.show_decision(decision)
            why = f"its gate refused it: {decision.reasons[0]}"
        if why:
            return drop_draft(draft, why)
    state = carry_out(params, name, approver, hand_over)
    drafts.conclude(draft, "promoted" if is_champion(params, name) else "refused", str(state.message))
    return state


def drop_draft(draft: Draft, why: str) -> State[None]:
    """Take a draft out of params/drafts.yaml, and return the state of a run that ends with this."""
    steps.drop(draft, why)
    return Completed(name=DROPPED, message=f"{draft.name} is dropped: {why}")


def is_hopeless(failed: steps.StageFailed, version: str) -> bool:
    """Whether the same command would fail again: the probe refused the recipe, or an alarm ended the training."""
    return failed.exit_code == Alarmed.exit_code or paths.probe_proof(version).with_suffix(".failed.json").exists()
