"""Release: a candidate is decided upon, approved by a person, and takes the champion's name.

A version or a merge; adapters and full models have a champion each.

What is decided is written to the audit file before anything is renamed, and what was renamed after it. A promotion
holds only for the adapter, and against the champion, that its decision was about; without a decision and the signature
of somebody who may approve nothing moves. What is decided upon is held against dvc.lock, what is promoted against its
signature in the registry.
"""

import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path
from typing import Any

from clinrl import artifacts, paths
from clinrl.analysis import baselines
from clinrl.analysis.paired import Answers
from clinrl.config.params import Params
from clinrl.data.dataset import corpora
from clinrl.errors import ArtefactError, GateError, SignatureError
from clinrl.evaluation.answers import load_answers, open_run
from clinrl.provenance import lock, rebuilt
from clinrl.registry import versions
from clinrl.registry.log_run import stated
from clinrl.registry.versions import CANDIDATE, CHAMPION, Entry
from clinrl.release import audit_log, budget, gate, superiority
from clinrl.release.change_control import outside_plan, trained_otherwise
from clinrl.release.gate import Decision
from clinrl.runtime.dvc_digest import md5
from clinrl.signing import approval as approvals
from clinrl.signing.keys import signer, trusted_keys

PREVIOUS = "previous"
APPROVER = re.compile(r"[^\x00-\x1f\x7f\ud800-\udfff]{2,80}")
"""A person's name as it goes into tags and the audit file."""


def decide(params: Params, name: str) -> Decision:
    """Hold the task's gate against the exam of a registered version or merge; say so in the audit file and its tags.

    The same question asked again adds no line to the audit file. Raises GateError if the task has no gate, if the
    version is outside its change plan, if the error budget of the exam is used up, or if the registry has another
    champion than the audit file; RegistryError if the version was never registered; and ArtefactError if it and the
    champion did not take the same exam in the same modes, or if something of either is not what dvc.lock records or
    what its transcripts say.
    """
    model = params.model(name).registered
    entry = versions.find(model, name, digest=_answered_by(paths.graded(name)))
    versions.check_intact(params, entry)
    decision = judge(params, name, _champion(params, model, entry.digest))
    if entry.digest != decision.candidate_digest:
        raise GateError(
            f"the answers of {name} are not those of the {name} that is registered; run `clinrl register {name}` first"
        )
    body = decision.model_dump(mode="json")

    def is_recorded(lines: Sequence[audit_log.Entry]) -> bool:
        budget.check_current(lines, decision)
        decisions = [line.body for line in lines if line.kind == "decision"]
        return next((b for b in reversed(decisions) if b["candidate_digest"] == entry.digest), None) == body

    _write(params, "decision", body, unless=is_recorded)
    tags = {"gate": "passed" if decision.promote else "refused", "decision": decision.digest}
    versions.tag(entry, tags | ({"budget_left": f"{decision.budget.left_after:.4g}"} if decision.budget else {}))
    if not decision.promote and CANDIDATE in entry.aliases:
        versions.point(model, CANDIDATE, None)
    return decision


def _champion(params: Params, model: str, candidate: str) -> Entry | None:
    """Who holds the champion's name, by the audit file too: whoever can write to the registry may move the name.

    A registry that lost its champion gets it back by a decision on that very one. Raises GateError.
    """
    held, lines = versions.holder(model, CHAMPION), audit_log.lines(params)
    recorded, last = recorded_champion(model, lines), _last_line(model, lines, "approval")
    known = [recorded]
    if last is not None and last.kind == "approval":  # a promotion cut short
        known.append(last.body["digest"])
    if (held.digest if held else None) in known or (held is None and candidate == recorded):
        return held
    raise GateError(
        f"{held.name if held else 'nobody'} is the champion of {model} in the registry, and {paths.audit_log()} tells "
        "otherwise: if a scheduled retraining promoted it, merge its branch; else the name was moved by hand, or a "
        f"rollback was cut short: give `clinrl rollback {model}` again, or move the name back in MLflow"
    )


def judge(params: Params, name: str, champion: Entry | None) -> Decision:
    """The decision on a version or a merge, from what its transcripts say. Writes nothing; raises as `decide` does.

    A full model is held against its version too, since that is what was approved. The simple policies are computed
    here, from the cases of the exam and of the training.
    """
    model = params.model(name)
    task = model.task.name
    if task not in params.gates:
        raise GateError(f"params.yaml has no gate for {task}, and without one nothing is released; add one")
    if reason := stated(params, name, "waiver"):
        raise GateError(f"{name} was trained on a waiver ({reason}) and is never released")
    for part in params.parts(name):
        if field := trained_otherwise(params, part):
            raise GateError(
                f"{part} was trained with another {field} than params.yaml has now; put it back, or run "
                f"`dvc repro evaluate@{part}`"
            )
    if refusal := outside_plan(params, name):
        raise GateError(refusal)
    lock.demand(params, name)
    run = open_run(params, model)
    if (modes := artifacts.read_manifest(paths.graded(name)).spec["modes"].keys()) != run.modes.keys():
        raise GateError(
            f"{name} was evaluated in {' and '.join(modes)}, and params.yaml has {' and '.join(run.modes)}; run "
            f"`dvc repro evaluate@{name}`"
        )

    def answers(other: str, folder: Path) -> dict[str, Answers]:
        return {mode: load_answers(run, mode, other, folder) for mode in run.modes}

    plan, digest = params.plans.get(task), _answered_by(paths.graded(name))
    rivals, look = {}, None
    if champion is not None:
        folder = _champions_answers(params, champion)
        rivals[superiority.CHAMPION] = answers(champion.name, folder)
        if plan and digest != champion.digest and not _is_made_of_champion(params, name):
            both = [artifacts.identity(artifacts.read_manifest(one)) for one in (paths.graded(name), folder)]
            tests = [rule.model_dump(mode="json") for rule in (plan.protocol, params.gates[task])]
            test = superiority.TEST if run.clusters is None else superiority.TEST_OF_CLUSTERS
            key = (digest, champion.digest, artifacts.digest([*both, *tests, [*run.modes], test]))
            held = budget.account(audit_log.lines(params), run.exam_digest, plan.budget.alpha)
            look = budget.look(held, plan.budget, key, model.exam)
    if name in params.merges.folds:
        version = params.merges.folds[name].version
        rivals[version] = answers(version, paths.graded(version))
    moved = _last_line(model.registered, audit_log.lines(params))
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
    )


def _is_made_of_champion(params: Params, name: str) -> bool:
    """Whether a full model is the champion of the adapters in another form: that it is better was shown for it."""
    if name not in params.merges.folds:
        return False
    version = params.merges.folds[name].version
    held = versions.holder(params.model(version).registered, CHAMPION)
    return held is not None and artifacts.read_manifest(paths.merged(name)).inputs.get(version) == held.digest


def promote(params: Params, name: str, *, decision: Decision, approval: Mapping[str, Any], approved: str = "") -> Entry:
    """Make a version or a merge the champion of its registered model, and the champion before it `previous`.

    `approval` is the signed approval of the decision (`clinrl.signing.approval`), or of the decision whose digest is
    `approved`: that on the very version that was folded, whose approval holds for its full model too.

    Promoting the champion again changes nothing, unless who approved it may approve no more, as after a change of keys:
    then it is approved anew. Raises GateError if the decision is negative, is about another
    adapter, or was made before the champion's name last moved, or if the audit file does not know how the champion
    became what it is; SignatureError if nobody who may approve signed, or if the registered model is not what was
    signed; Busy if another promotion is under way. The champion is then what it was.
    """
    model = params.model(name).registered
    about = approved or decision.digest
    approver = check_approver(approvals.approver_of(approval, about, approvals.approvers(params)))
    with _moving(model):
        entry = versions.find(model, name, digest=decision.candidate_digest)
        if not decision.promote:
            raise GateError(f"{name} may not be promoted: {decision.reasons[0]}")
        if (decision.candidate, decision.candidate_digest) != (name, entry.digest):
            raise GateError(f"the decision is about another adapter than the {name} that is registered; decide again")
        if approved:
            check_folded(params, name, approved)
        before = versions.holder(model, CHAMPION)
        if before is not None and before.digest == entry.digest and not _lost_its_approver(params, entry):
            return _complete(params, before)
        if (before.digest if before else None) != decision.champion_digest:
            now = before.name if before else "nobody"
            raise GateError(f"{now} became the champion of {model} after the decision on {name}; decide again")
        # The name may have moved to and fro, and what was rolled back would come back so.
        moved = _last_line(model, audit_log.lines(params))
        if (moved.digest if moved else None) != decision.moved:
            raise GateError(f"the champion's name of {model} moved after the decision on {name}; decide again")
        lock.demand(params, name)  # a person may have had a day to answer
        versions.check_intact(params, entry)
        answers = artifacts.identity(artifacts.read_manifest(paths.graded(name)))
        body = {"model": model, **_name(entry), "decision": decision.digest, "approver": approver, "answers": answers}
        body |= {"approved": about, "approval": dict(approval)}

        def is_recorded(lines: Sequence[audit_log.Entry]) -> bool:
            return (last := _last_line(model, lines, "approval")) is not None and last.body == body

        _write(params, "approval", body, unless=is_recorded)
        versions.tag(entry, {"approver": approver, "decision": decision.digest, "gate": "passed"})
        _keep_answers(name, entry.digest)
        if before is not None and before.digest != entry.digest:
            versions.point(model, PREVIOUS, before)
        versions.point(model, CHAMPION, entry)
        return _complete(params, entry)


def approval_of(params: Params, champion: Entry) -> tuple[dict[str, Any], str]:
    """The approval that made a version champion, and the digest of the decision that it is about.

    Raises GateError if the audit file has none.
    """
    for line in reversed(audit_log.lines(params)):
        if line.kind == "approval" and _is_of(line, champion):
            return line.body["approval"], line.body["approved"]
    raise GateError(f"{paths.audit_log()} knows of no approval of {champion.name}; promote it with `clinrl promote`")


def check_folded(params: Params, fold: str, approved: str) -> None:
    """Refuse the approval of a decision that is not about the version of which a full model is made."""
    version = params.merges.folds[fold].version if fold in params.merges.folds else ""
    made_of = artifacts.read_manifest(paths.merged(fold)).inputs.get(version) if version else None
    for line in audit_log.lines(params):
        if line.kind == "decision" and artifacts.digest(line.body) == approved:
            if (line.body["candidate"], line.body["candidate_digest"]) == (version, made_of):
                return
            raise GateError(f"the approval is of {line.body['candidate']}, of which {fold} is not made; approve {fold}")
    raise GateError(
        f"{paths.audit_log()} has no decision {approved[:16]}, so nobody knows what was approved; decide again"
    )


def settle(params: Params, name: str) -> Entry | None:
    """The champion if it is what is here under this name, with its promotion completed; None if it is another.

    None too if who approved it may approve no more: it is to be promoted again. A kill may have come between its new
    name and the audit file. Raises GateError if nobody approved of this champion: then somebody moved the name by hand.
    """
    model = params.model(name).registered
    mine = artifacts.identity(artifacts.read_manifest(params.model(name).folder))
    with _moving(model):
        champion = versions.holder(model, CHAMPION)
        if champion is None or champion.digest != mine:
            return None
        champion = _complete(params, champion)
        return None if _lost_its_approver(params, champion) else champion


def _lost_its_approver(params: Params, champion: Entry) -> bool:
    """Whether whoever approved the last move of the champion's name may approve no more, by the keys that count now."""
    last = _last_line(champion.model, audit_log.lines(params), "approval")
    try:
        return last is not None and approver_of(params, last) != last.body["approver"]
    except SignatureError:
        return True


def approver_of(params: Params, move: audit_log.Entry) -> str:
    """Who signed the approval of a move of the champion's name. Raises SignatureError if nobody who may approve did."""
    body = move.body
    turn = {key: value for key, value in body.items() if key != "approval"}
    about = artifacts.digest(turn) if move.kind == "rollback" else body["approved"]
    return approvals.approver_of(body["approval"], about, approvals.approvers(params))


def _complete(params: Params, entry: Entry) -> Entry:
    """The champion, after what a kill may have left out: its line in the audit file, and that it is no candidate."""
    model, lines = entry.model, audit_log.lines(params)
    last = _last_line(model, lines, "approval")
    # Of a registry that was lost, the audit file knows the champion already: the new approval needs its promotion too.
    if last is not None and last.kind == "approval" and last.body["digest"] == entry.digest:

        def is_recorded(now: Sequence[audit_log.Entry]) -> bool:
            after = _last_line(model, now, "approval")
            return after is not None and after.kind != "approval" and recorded_champion(model, now) == entry.digest

        _write(params, "promotion", last.body, unless=is_recorded)
    elif recorded_champion(model, lines) != entry.digest:  # an approval of long ago is none of this
        raise GateError(
            f"{entry.name} is the champion of {model}, but {paths.audit_log()} knows of no approval that made it so: "
            "somebody moved the name by hand, or a rollback was cut short; give `clinrl rollback` again, or move the "
            "name back in MLflow, and promote with `clinrl promote`"
        )
    if (candidate := versions.holder(model, CANDIDATE)) is not None and candidate.digest == entry.digest:
        versions.point(model, CANDIDATE, None)
    return versions.holder(model, CHAMPION) or entry


def refuse(params: Params, decision: Decision, reason: str) -> None:
    """Write down that a version or a merge was not approved: a no, or no answer in time. The champion stays."""
    reason = reason.encode("utf-8", "replace").decode()  # a no counts, whatever a page sent
    body = {"model": decision.model, "version": decision.candidate, "decision": decision.digest, "reason": reason}
    _write(params, "refusal", body)


def rollback(params: Params, model: str, *, approver: str, of: str = "") -> Entry:
    """Make the previous champion the champion again, and the champion `previous`, so that a second call undoes it.

    With `of`, the digest of the champion that it is about, nobody looked at this case: `approver` agreed beforehand,
    and the audit file says so. The same call completes one that was killed half way. Where a promotion was killed while
    both names were one version's, the audit file says which was champion before. Raises GateError if there is no
    previous champion, if the registry lost it, if the champion is another than `of`, if the audit file does not know
    that the previous one ever was champion, or if `approver` is no name; SignatureError if this machine's key is not
    that person's; Busy as `promote` does.
    """
    approver = check_approver(approver)
    with _moving(model):
        now, before = versions.holder(model, CHAMPION), versions.holder(model, PREVIOUS)
        if now is None or before is None:
            raise GateError(f"{model} has no {CHAMPION if now is None else PREVIOUS} to roll back from or to")
        lines = audit_log.lines(params)
        last = _last_line(model, lines, "approval")
        if last is not None and last.body.get("digest") == now.digest:  # a promotion, perhaps cut short at its end
            now = _complete(params, now)
            lines = audit_log.lines(params)
        recorded = recorded_champion(model, lines)
        if recorded not in (None, now.digest):  # the names moved, wholly or in part, and the audit file does not say so
            now, before = _registered(model, recorded), now
        if of and now.digest != of:
            raise GateError(f"{now.name} is the champion of {model} by now; nothing was rolled back")
        former = recorded_before(model, lines, now.digest)
        if now.digest == before.digest:  # a promotion was cut short after it had moved the first of the two names
            if former is None:
                raise GateError(f"{model} has {now.name} as champion and as previous; there is nothing to roll back to")
            before = _registered(model, former)
        if before.digest not in _recorded_champions(model, lines):
            raise GateError(f"{before.name} is the previous champion of {model} by name only: nobody ever approved it")
        if before.digest != former:
            raise GateError(
                f"{before.name} is the previous champion of {model} by name only: {paths.audit_log()} knows of another "
                "before this one; move the name back in MLflow"
            )
        moved = _last_line(model, lines)
        body: dict[str, Any] = {"model": model, "from": _name(now), "to": _name(before), "approver": approver}
        body |= {"moved": moved.digest if moved else None}  # for this turn alone
        body |= {"beforehand": True} if of else {}
        body["approval"] = approvals.sign_approval(params, artifacts.digest(body), approver)
        versions.check_intact(params, before)
        versions.point(model, CHAMPION, before)
        versions.point(model, PREVIOUS, now)
        _write(params, "rollback", body)
        return versions.holder(model, CHAMPION) or before


def vouch(params: Params, reason: str) -> list[str]:
    """Sign what stands in the audit file after the key that signed its end was revoked; the keys that count no longer.

    Whoever does that has read those lines. Nothing is written where every line's key counts. Raises ArtefactError if
    the chain is broken.
    """
    revoked = audit_log.uncounted_keys(paths.audit_log(), trusted_keys(params))
    if revoked:
        _write(params, "review", {"reason": reason, "revoked": revoked}, reviewed=True)
    return revoked


def check_approver(approver: str) -> str:
    """A person's name, trimmed. Raises GateError for an empty one or one with control characters: silence is no."""
    name = approver.strip()
    if not APPROVER.fullmatch(name):
        raise GateError("a promotion needs the name of the person who approves it, 2 to 80 characters; nothing moved")
    return name


def recorded_champion(model: str, lines: Sequence[audit_log.Entry]) -> str | None:
    """Whose digest the champion has by the audit file: the last promotion, or where a rollback went to."""
    return next(reversed(_recorded_champions(model, lines)), None)


def recorded_before(model: str, lines: Sequence[audit_log.Entry], digest: str) -> str | None:
    """Whose digest the champion had, by the audit file, before the version with this one: where a rollback goes to."""
    return next((held for held in reversed(_recorded_champions(model, lines)) if held != digest), None)


def _registered(model: str, recorded: str) -> Entry:
    """The version that was champion by the audit file, with this digest. Raises GateError if the registry lost it."""
    if (found := versions.by_digest(model, recorded)) is None:
        raise GateError(f"{model} has lost the version that was champion by {paths.audit_log()}; register it again")
    return found


def _recorded_champions(model: str, lines: Sequence[audit_log.Entry]) -> list[str]:
    """The digests of all that were champion by the audit file, oldest first."""
    held = [line.body if line.kind == "promotion" else line.body["to"] for line in moves(model, lines)]
    return [str(body["digest"]) for body in held]


def _write(params: Params, kind: audit_log.Kind, body: dict[str, Any], **how: Any) -> None:
    ours = signer(params.scale)  # the first one makes a key, which counts then
    audit_log.append(paths.audit_log(), kind, body, signer=ours, keys=trusted_keys(params), **how)


def check_turn(moves: Sequence[audit_log.Entry]) -> None:
    """Refuse a last move that is a rollback and was approved for another turn of the champion's name."""
    *earlier, last = moves
    if last.kind == "rollback" and last.body.get("moved") != (earlier[-1].digest if earlier else None):
        raise GateError(f"the rollback of {last.at} was approved for another turn; a person must approve a new one")


def moves(model: str, lines: Sequence[audit_log.Entry], *before: audit_log.Kind) -> list[audit_log.Entry]:
    """The lines that moved the champion's name of a model; with the kind `approval`, or were to move it."""
    kinds = (*before, "promotion", "rollback")
    return [line for line in lines if line.kind in kinds and line.body["model"] == model]


def _last_line(model: str, lines: Sequence[audit_log.Entry], *before: audit_log.Kind) -> audit_log.Entry | None:
    return next(reversed(moves(model, lines, *before)), None)


def _name(entry: Entry) -> dict[str, Any]:
    return {"version": entry.name, "number": entry.number, "digest": entry.digest}


def _champions_answers(params: Params, champion: Entry) -> Path:
    """The folder of the champion's answers: the graded ones, or those kept when it was promoted.

    Raises ArtefactError if its name stands for another adapter by now and nothing was kept here, or if the answers are
    neither those that dvc.lock records nor those that were there when it was promoted.
    """
    graded, kept = paths.graded(champion.name), paths.champions_answers(champion.digest)
    approved = {
        line.body["answers"] for line in audit_log.lines(params) if line.kind == "approval" and _is_of(line, champion)
    }
    for folder in (graded, kept):
        if not folder.exists() or _answered_by(folder) != champion.digest:
            continue
        is_recorded = folder == graded and lock.outputs(lock.read()).get(str(graded)) == md5(graded)
        if is_recorded or artifacts.identity(artifacts.verified(folder)) in approved:
            return folder
        raise ArtefactError(
            f"{folder} holds other answers of the champion {champion.name} than dvc.lock and {paths.audit_log()} know; "
            f"restore it with `dvc checkout`, or remove it and run `dvc repro evaluate@{champion.name}`"
        )
    raise ArtefactError(
        f"{graded} was answered by another adapter than the champion {champion.name}; bring the "
        f"champion's parameters back, run `dvc repro evaluate@{champion.name}`, and give what is new a name of its own"
    )


def _is_of(line: audit_log.Entry, champion: Entry) -> bool:
    return (line.body["model"], line.body["digest"]) == (champion.model, champion.digest)


def _keep_answers(name: str, digest: str) -> None:
    """Keep a champion's answers, since its name may come to stand for another adapter: new data, or a new base."""
    if not paths.champions_answers(digest).exists():
        with artifacts.staged(paths.champions_answers(digest)) as out:
            shutil.copytree(paths.graded(name), out, dirs_exist_ok=True)


def _answered_by(folder: Path) -> str:
    """Identity of the model whose graded answers a folder holds."""
    return artifacts.read_manifest(folder).inputs["adapter"]


def _moving(model: str) -> AbstractContextManager[None]:
    """Hold the right to move the names of a model, in this checkout and its clones. Raises Busy."""
    return artifacts.exclusive(Path("registry") / "champion" / model, paths.champions())
