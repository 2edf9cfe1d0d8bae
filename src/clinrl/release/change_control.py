"""Checks before a gate looks at an exam: whether the task's change plan lets it decide on a version at all."""

import json
from dataclasses import replace
from typing import Any

from clinrl import artifacts, paths
from clinrl.config import change_plan
from clinrl.config.params import Params
from clinrl.data.dataset import read_cases
from clinrl.data.reward_audit import validated_identity
from clinrl.errors import ArtefactError, ParamsError
from clinrl.evaluation.answers import load_answers, open_run
from clinrl.registry import versions
from clinrl.registry.versions import CHAMPION
from clinrl.release import audit_log, budget
from clinrl.release.form import gain
from clinrl.tasks.base import get_task
from clinrl.training.launch import requested

WHOLE = ("omit", "stream", "waiver", "view", "qlora", "labels_only", "placebo")
"""Parts of a recipe of which an absent key says something too, such as that a rule is not omitted."""


def changed_since_training(params: Params, version: str) -> str | None:
    """The first key, such as `trainer.lr`, in which params.yaml differs from the adapter's manifest; None if none does.

    Outside `WHOLE`, a key that only one of the two has, such as a field that came later, is no difference.
    """
    then = artifacts.read_manifest(paths.adapter(version)).spec
    now = json.loads(artifacts.canonical_json(requested(params, version)))
    absent = (key for key in WHOLE if (now.get(key) or None) != (then.get(key) or None))
    return _differing(now, then) or next(absent, None)


def _differing(now: dict[str, Any], then: dict[str, Any], at: str = "") -> str | None:
    for key in sorted(now.keys() & then.keys()):
        if isinstance(now[key], dict) and isinstance(then[key], dict):
            if found := _differing(now[key], then[key], f"{at}{key}."):
                return found
        elif now[key] != then[key]:
            return f"{at}{key}"
    return None


def outside_plan(params: Params, name: str) -> str | None:
    """A sentence that says why a version, or a part of a merge, is outside its task's plan; None if none is.

    Raises ArtefactError if its training cases, or imported ones of an ancestor, are missing or altered.
    """
    task = params.model(name).task
    plan = params.plans.get(task.name)
    if plan and name in params.merges.blends and name not in plan.changes.ancestors:
        return (
            f"{name} is outside plans.{task.name}.changes: it is a blend, whose weights nothing there limits, and "
            "ancestors does not name it; change the plan"
        )

    def count(data: str) -> int:
        return sum(1 for _ in read_cases(paths.cases(data), task))

    return next(filter(None, (change_plan.outside(params, part, count) for part in params.parts(name))), None)


def no_look_left(params: Params, task: str) -> str | None:
    """A sentence that says why the exam of a task's plan allows no further look; None while it does, or without a plan.

    Raises ArtefactError if the exam is missing or altered.
    """
    if task not in params.plans:
        return None
    plan, champion = params.plans[task], versions.holder(task, CHAMPION)
    if champion and (reason := missing_resit(params, champion.name, plan.changes.exam)):
        return reason
    exam = validated_identity(plan.changes.exam, get_task(task))
    lines = audit_log.lines(params)
    spent = budget.account(lines, exam, plan.budget.alpha)
    return budget.used_up(spent, plan.budget, plan.changes.exam)


def missing_resit(params: Params, name: str, exam: str) -> str | None:
    """A sentence that says what to write for a champion that takes another exam than this one.

    None if it takes it, and for a name that params.yaml no longer has.
    """
    if name not in params.versions and name not in params.merges.all:
        return None
    model = params.model(name)
    if exam == model.exam or (name in params.resits and params.resits[name].data == exam):
        return None
    block = f"{name}: {{task: {model.task.name}, data: {exam}}}"
    return (
        f"the champion {name} takes another exam than {exam}; its line under `resits` in params.yaml must be "
        f"`{block}`; then run `dvc repro resit@{name}`"
    )


def mine_data(params: Params, name: str) -> str:
    """The mine data of a version, if params.yaml still has both. Raises ParamsError if its errors are not mined."""
    if name not in params.mining:
        back = "" if name in params.versions else f"bring versions.{name} back and "
        raise ParamsError(f"params.yaml mines no errors of {name}; {back}add mining.{name}")
    return params.mining[name].data


def screened_out(params: Params, name: str) -> str | None:
    """A sentence that says why a draft is not worth a look at the exam; None if it is, or without a plan or a champion.

    On the mine data of both, where a look costs nothing, the p of its gain over the champion, averaged over modes, must
    be at most the plan's `screen`. Raises ParamsError if the errors of one of the two are not mined, or on other data
    than the other's; ArtefactError if the answers of one are missing or another adapter's.
    """
    model = params.model(name)
    task, champion = model.task, versions.holder(model.registered, CHAMPION)
    if task.name not in params.plans or champion is None:
        return None
    if champion.name in params.merges.all:
        return f"the champion {champion.name} is a merge, whose errors nobody mines"
    protocol = params.plans[task.name].protocol
    for one, digest in ((name, artifacts.identity_of(model.folder)), (champion.name, champion.digest)):
        mine_data(params, one)
        if artifacts.read_manifest(paths.mined(one)).inputs["adapter"] != digest:
            raise ArtefactError(f"{paths.mined(one)} is of another adapter than {one}; run `dvc repro mine@{one}`")
    if (mine := mine_data(params, name)) != (theirs := mine_data(params, champion.name)):
        raise ParamsError(f"{name} is mined on {mine} and {champion.name} on {theirs}; give both the same in `mining`")
    run = open_run(params, replace(model, exam=mine, variants=()))
    candidate, before = (
        {mode: load_answers(run, mode, one, paths.mined(one)) for mode in run.modes} for one in (name, champion.name)
    )
    found = gain(task.shares[protocol.superior], candidate, before)
    if found is not None and found[1] <= protocol.screen:
        return None
    p = "could not be measured" if found is None else f"has a one-sided p of {found[1]:.4g}"
    return (
        f"its gain in {protocol.superior} over {champion.name} on {run.model.exam}, averaged over "
        f"{' and '.join(run.modes)}, {p}; the plan asks for at most {protocol.screen:g} before the gate looks at the "
        "exam"
    )
