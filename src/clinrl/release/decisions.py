"""The decision on a candidate: the task's gate, applied to the exam of a registered version or merge.

The inputs of a decision are checked against dvc.lock and against the transcripts. A decision counts for one adapter
against one champion, and is written to the audit log before any alias moves.
"""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from clinrl import artifacts, paths
from clinrl.analysis import baselines
from clinrl.analysis.paired import Answers
from clinrl.artifacts import md5
from clinrl.config.model import Model
from clinrl.config.params import Params
from clinrl.data.dataset import corpora
from clinrl.errors import ArtefactError, GateError
from clinrl.evaluation.answers import check_here, load_answers, open_run
from clinrl.provenance import lock, rebuilt
from clinrl.registry import versions
from clinrl.registry.log_run import stated
from clinrl.registry.versions import CANDIDATE, CHAMPION, Entry
from clinrl.release import audit_log, budget, form, gate
from clinrl.release.change_control import changed_since_training, missing_resit, outside_plan
from clinrl.release.gate import Decision
from clinrl.release.moves import (
    decision_of,
    decisions_on,
    interrupted,
    is_of,
    last_move,
    moves,
    recorded_champion,
    surpassed,
)
from clinrl.release.standing import is_registered


def decide(params: Params, name: str) -> Decision:
    """Apply the task's gate to the exam of a registered version or merge; write the audit log and the registry's tags.

    Repeating the last decision adds no line to the audit log. Raises GateError if the task has no gate, if the version
    was trained on a waiver or with other parameters, if it is outside its change plan, if the error budget of the exam
    is used up, or if the registry has another champion than the audit log; RegistryError if the version was never
    registered; and ArtefactError if it and the champion did not take the same exam in the same modes, if files of
    either are not what dvc.lock records or what its transcripts say, or if the audit log lacks lines that git has.
    """
    audit_log.check_committed(paths.AUDIT_LOG)  # before a look is spent, and counted from too few
    model = params.model(name).registered
    entry = versions.find(model, name, digest=_answered_by(paths.graded(name)))
    versions.check_intact(params, entry)
    _check_remembered(params, entry)
    decision = judge(params, name, _champion(params, model, entry.digest))
    if entry.digest != decision.candidate_digest or not is_registered(params, name):
        raise GateError(
            f"the answers of {name} are not those of the {name} that is registered; run `clinrl register {name}` first"
        )
    body = decision.model_dump(mode="json")

    def is_recorded(lines: Sequence[audit_log.Entry]) -> bool:
        if (look := decision.budget) is not None:
            key = (decision.candidate_digest, decision.champion_digest or "", look.answers)
            spent = budget.account(lines, decision.exam_digest, look.before)
            if key not in spent.looks and len(spent.looks) + 1 != look.number:  # neither recorded nor still the next
                raise GateError(f"another decision looked at this exam while {name} was decided; decide again")
        return decisions_on(entry.digest, lines)[-1:] == [body]

    audit_log.write(params, "decision", body, unless=is_recorded)
    tags = {"gate": "passed" if decision.promote else "refused", "decision": decision.digest}
    versions.tag(entry, tags | ({"budget_left": f"{decision.budget.left_after:.4g}"} if decision.budget else {}))
    if not decision.promote and (held := versions.holder(model, CANDIDATE)) and held.digest == entry.digest:
        versions.point(model, CANDIDATE, None)
    return decision


def judge(params: Params, name: str, champion: Entry | None) -> Decision:
    """The decision on a version or a merge, computed from its transcripts. Writes nothing; raises as `decide` does.

    A full model is also compared with the version that was folded, since that version was approved. The answers of the
    simple policies are computed here, from the cases of the exam and of the training.
    """
    model = params.model(name)
    task = model.task.name
    if task not in params.gates:
        raise GateError(f"params.yaml has no gate for {task}, and without one nothing is released; add one")
    if reason := stated(params, name, "waiver"):
        raise GateError(f"{name} was trained on a waiver ({reason}) and is never released")
    parts = params.parts(name)
    for version in dict.fromkeys(before for part in parts for before in reversed(params.lineage(part))):
        is_here = version in parts or paths.adapter(version).exists()  # a clone may lack an ancestor's
        if is_here and (field := changed_since_training(params, version)):
            raise GateError(
                f"{version} was trained with another {field} than params.yaml has now; put it back, or run "
                f"`dvc repro evaluate@{version}`"
            )
    digest, lines = _answered_by(paths.graded(name)), audit_log.lines(params)
    is_champion = digest == recorded_champion(model.registered, lines)  # also where the registry has lost it
    if not is_champion and (refusal := outside_plan(params, name)):
        raise GateError(refusal)
    lock.demand(params, name)
    run = open_run(params, model)
    if (modes := artifacts.read_manifest(paths.graded(name)).spec["modes"].keys()) != run.modes.keys():
        raise GateError(
            f"{name} was evaluated in {' and '.join(modes)}, and params.yaml has {' and '.join(run.modes)}; run "
            f"`dvc repro {model.stage}`"
        )

    def answers(other: str, folder: Path) -> dict[str, Answers]:
        return {mode: load_answers(run, mode, other, folder) for mode in run.modes}

    plan = params.plans.get(task)
    rivals, look, spent = {}, None, None
    if champion is not None:
        folder = _champions_answers(params, champion, model, run.exam_digest)
        rivals[form.CHAMPION] = answers(champion.name, folder)
        if plan and digest != champion.digest and not _is_made_of_champion(params, name, champion):
            both = [artifacts.identity_of(one) for one in (paths.graded(name), folder)]
            tests = [rule.model_dump(mode="json") for rule in (plan.protocol, params.gates[task])]
            test = form.TEST if run.clusters is None else form.TEST_OF_CLUSTERS
            key = (digest, champion.digest, artifacts.digest([*both, *tests, [*run.modes], test]))
            spent = budget.account(lines, run.exam_digest, plan.budget.alpha)
            look = budget.look(spent, plan.budget, key, model.exam)
    if name in params.merges.folds:
        version = params.merges.folds[name].version
        rivals[version] = answers(version, paths.graded(version))
    moved = last_move(model.registered, lines)
    return gate.decide(
        model.task,
        params.gates[task],
        params.scale,
        answers(name, paths.graded(name)),
        rivals,
        baselines.answers(model.task, run.cases, [*chain.from_iterable(corpora(params, model).values())]),
        model=model.registered,
        digest=digest,
        champion=(champion.name, champion.digest) if champion else (None, None),
        moved=moved.digest if moved else None,
        rebuilders=rebuilt.count(params, name, digest) if params.gates[task].rebuilt else (),
        protocol=plan.protocol if plan else None,
        look=look,
        spent=spent,
    )


def check_champion(params: Params, model: str) -> None:
    """Refuse a champion that the audit log does not have, as after a rollback that was not pushed. Raises GateError."""
    if held := versions.holder(model, CHAMPION):
        _champion(params, model, held.digest)


def _champion(params: Params, model: str, candidate: str) -> Entry | None:
    """The registry's champion, None without one; it must also be the audit log's, since an alias is easy to move.

    A registry that lost its champion gets it back by a decision on that very version. Raises GateError.
    """
    held, lines = versions.holder(model, CHAMPION), audit_log.lines(params)
    recorded, last = recorded_champion(model, lines), last_move(model, lines, "approval")
    known = [recorded]
    if last is not None and last.kind == "approval":  # a promotion cut short
        known.append(last.body["digest"])
    if (held.digest if held else None) in known or (held is None and candidate == recorded):
        return held
    if held is None:
        body = moves(model, lines)[-1].body
        raise GateError(
            f"the registry has lost {body.get('to', body)['version']}, the champion of {model} by {paths.AUDIT_LOG}: "
            "give `clinrl register` and `clinrl promote` for it again"
        )
    raise GateError(
        f"{held.name} is the champion of {model} in the registry, but not by {paths.AUDIT_LOG}: if a scheduled "
        "retraining promoted it, merge its branch; if another checkout moved the name, pull its commit; if the "
        "registry is a restored backup, set the alias as the log has it; else the name was moved by hand, or a "
        f"rollback was cut short: {interrupted(held, lines)}, or move the name back in MLflow"
    )


def _check_remembered(params: Params, entry: Entry) -> None:
    """Refuse an audit log without a decision that the registry knows: a look at the exam would be forgotten, as after
    `git revert`, or beside a branch that is not merged. Raises GateError."""
    lines = audit_log.lines(params)
    for other in versions.entries(entry.model):
        digest = other.tags.get("decision")
        if digest and other.digest != entry.digest and decision_of(digest, lines) is None:
            raise GateError(
                f"{paths.AUDIT_LOG} lacks the decision on {other.name} that the registry has: merge the branch of "
                "the retraining that made it, or restore the file from git"
            )


def _is_made_of_champion(params: Params, name: str, champion: Entry) -> bool:
    """Whether a full model is a fold of the champion of the adapters, and the champion that it would replace a fold of
    one that this one was shown to be better than."""
    folds = params.merges.folds
    if name not in folds or champion.name not in folds:
        return False
    version, former = folds[name].version, folds[champion.name].version
    model, lines = params.model(version).registered, audit_log.lines(params)
    held = recorded_champion(model, lines)
    if held is None or artifacts.read_manifest(paths.merged(name)).inputs.get(version) != held:
        return False
    return versions.made_of(champion).get(former) in surpassed(model, lines, held)


def _champions_answers(params: Params, champion: Entry, model: Model, exam_digest: str) -> Path:
    """The folder of the champion's answers to the exam of `model`: graded ones, a resit's, or those kept at promotion.

    Raises ArtefactError if no folder has answers of this adapter, since its name may mean another one by now, if it
    took another exam, or if the answers are neither those that dvc.lock records nor those that its approval names.
    """
    graded, resit, recorded = paths.graded(champion.name), paths.resit(champion.name), lock.read()
    is_named = champion.name in {*params.versions, *params.merges.all}
    examines = params.model(champion.name).stage if is_named else f"evaluate@{champion.name}"
    approved = {
        line.body["answers"] for line in audit_log.lines(params) if line.kind == "approval" and is_of(line, champion)
    }
    for folder in (graded, resit, paths.champions_answers(champion.digest)):
        if not folder.exists() or _answered_by(folder) != champion.digest:
            continue
        if artifacts.read_manifest(folder).inputs["exam"] != exam_digest:
            continue
        if folder == resit:
            stage = f"resit@{champion.name}"
            for fact in lock.facts(recorded, stage):
                if fact.stage == stage and fact.state in ("altered", "unrecorded"):
                    raise ArtefactError(fact.sentence)
            return folder
        is_recorded = folder == graded and lock.outputs(recorded).get(str(graded)) == md5(graded)
        if is_recorded or artifacts.identity(artifacts.verified(folder)) in approved:
            return folder
        raise ArtefactError(
            f"{folder} holds other answers of the champion {champion.name} than dvc.lock and {paths.AUDIT_LOG} know; "
            f"restore it with `dvc checkout`, or remove it and run `dvc repro {examines}`"
        )
    if graded.exists() and _answered_by(graded) == champion.digest:
        stage = f"resit@{champion.name}" if champion.name in params.resits else examines
        raise ArtefactError(
            missing_resit(params, champion.name, model.exam)
            or f"the champion {champion.name} did not answer {model.exam} as it now is; run `dvc repro {stage}`"
        )
    if is_named:
        check_here(params.model(champion.name))
    raise ArtefactError(
        f"{graded} was answered by another adapter than the champion {champion.name}; bring the "
        f"champion's parameters back, run `dvc repro {examines}`, and give what is new a name of its own"
    )


def _answered_by(folder: Path) -> str:
    return artifacts.read_manifest(folder).inputs["adapter"]
