"""Release: a person approves the decision on a candidate, which then becomes champion.

A candidate is a version or a merge; adapters and full models have a champion each.

The approval is written to the audit log before an alias moves, and the promotion after it. A promotion counts only for
the adapter of its decision, and against the champion of its decision; without a decision and the signature of an
approver no alias moves. The candidate is checked against dvc.lock and against its signature in the registry.
"""

import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from clinrl import artifacts, paths
from clinrl.config.params import Params
from clinrl.errors import GateError, SignatureError
from clinrl.provenance import lock
from clinrl.registry import versions
from clinrl.registry.versions import CANDIDATE, CHAMPION, Entry
from clinrl.release import audit_log
from clinrl.release.gate import Decision
from clinrl.release.moves import (
    check_folded,
    check_unspent,
    interrupted,
    last_move,
    moves,
    recorded_before,
    recorded_champion,
    recorded_champions,
    rolled_back_by,
)
from clinrl.release.standing import check_servable
from clinrl.signing import approval as approvals
from clinrl.signing.keys import trusted_keys

PREVIOUS = "previous"


def promote(params: Params, name: str, *, decision: Decision, approval: Mapping[str, Any], approved: str = "") -> Entry:
    """Make a version or a merge the champion of its registered model, and the champion before it `previous`.

    `approval` is the signed approval of the decision (`clinrl.signing.approval`), or of the decision with the digest
    `approved`: the decision on the version that was folded, whose approval counts for its full model too.

    Promoting the champion again changes nothing, unless its approval no longer counts, as after a change of keys: then
    it is approved anew. Raises GateError if the decision is negative, is about another adapter, or was made before the
    champion's name last moved, if the audit log has no approval of the present champion, or if `approved` is about
    another version or was used up; SignatureError if no approver signed, or if the registered model is not what was
    signed; Busy if another promotion is under way. None of these errors changes the champion.
    """
    model = params.model(name).registered
    about = approved or decision.digest
    approver = approvals.check_approver(approvals.approver_of(approval, about, approvals.approvers(params)))
    with _exclusive(model):
        entry = versions.find(model, name, digest=decision.candidate_digest)
        if not decision.promote:
            raise GateError(f"{name} may not be promoted: {'; '.join(decision.reasons)}")
        if (decision.candidate, decision.candidate_digest) != (name, entry.digest):
            raise GateError(f"the decision is about another adapter than the {name} that is registered; decide again")
        if approved:
            lines = audit_log.lines(params)
            check_folded(params, entry, approved, lines)
            check_unspent(entry, approved, lines)
        before = versions.holder(model, CHAMPION)
        if before is not None and before.digest == entry.digest and not _needs_approval(params, entry):
            return _complete(params, before)
        if (before.digest if before else None) != decision.champion_digest:
            now = before.name if before else "nobody"
            raise GateError(f"{now} became the champion of {model} after the decision on {name}; decide again")
        # The name may have moved away and back; an old approval must not bring back a version that was rolled back.
        moved = last_move(model, audit_log.lines(params))
        if (moved.digest if moved else None) != decision.moved:
            raise GateError(f"the champion's name of {model} moved after the decision on {name}; decide again")
        lock.demand(params, name)  # a person may have had a day to answer
        versions.check_intact(params, entry)
        answers = artifacts.identity_of(paths.graded(name))
        body = {"model": model, **_name(entry), "decision": decision.digest, "approver": approver, "answers": answers}
        body |= {"approved": about, "approval": dict(approval)}

        def is_recorded(lines: Sequence[audit_log.Entry]) -> bool:
            return (last := last_move(model, lines, "approval")) is not None and last.body == body

        audit_log.write(params, "approval", body, unless=is_recorded)
        # Its name may later mean another adapter, trained on new data or a new base.
        kept = paths.champions_answers(entry.digest)
        if not kept.exists() or artifacts.identity_of(kept) != answers:
            with artifacts.staged(kept) as out:
                shutil.copytree(paths.graded(name), out, dirs_exist_ok=True)
        if before is not None and before.digest != entry.digest:
            versions.point(model, PREVIOUS, before)
        versions.point(model, CHAMPION, entry)
        return _complete(params, entry)


def settle(params: Params, name: str) -> Entry | None:
    """Complete the promotion of the model that is here under this name, and return it; None if another is champion.

    A kill may have come between the move of the alias and the line in the audit log. None too if its approval no longer
    counts: then it must be promoted again. Raises GateError if the audit log has no approval of this champion: then
    somebody moved the alias by hand.
    """
    model = params.model(name).registered
    mine = artifacts.identity_of(params.model(name).folder)
    with _exclusive(model):
        champion = versions.holder(model, CHAMPION)
        if champion is None or champion.digest != mine:
            return None
        champion = _complete(params, champion)
        return None if _needs_approval(params, champion) else champion


def _needs_approval(params: Params, champion: Entry) -> bool:
    """Whether the audit log's champion must be approved anew, since the approval of its last move no longer counts."""
    if recorded_champion(champion.model, audit_log.lines(params)) != champion.digest:
        return False
    try:
        check_servable(params, champion, CHAMPION)
    except (GateError, SignatureError):
        return True
    return False


def _complete(params: Params, entry: Entry) -> Entry:
    """Write the champion's promotion and tags and remove its alias `candidate` if a kill prevented it; return the
    champion. Raises GateError if the audit log has no approval of it."""
    model, lines = entry.model, audit_log.lines(params)
    last = last_move(model, lines, "approval")
    # After the loss of a registry the audit log has this champion already, but the new approval needs a promotion too.
    if last is not None and last.kind == "approval" and last.body["digest"] == entry.digest:

        def is_recorded(now: Sequence[audit_log.Entry]) -> bool:
            after = last_move(model, now, "approval")
            return after is not None and after.kind != "approval" and recorded_champion(model, now) == entry.digest

        audit_log.write(params, "promotion", last.body, unless=is_recorded)
    elif recorded_champion(model, lines) != entry.digest:  # an older approval is void
        raise GateError(
            f"{entry.name} is the champion of {model}, but {paths.AUDIT_LOG} knows of no approval that made it so: "
            f"somebody moved the name by hand, or a rollback was cut short; {interrupted(entry, lines)}, or "
            "move the name back in MLflow, and promote with `clinrl promote`"
        )
    for move in moves(model, audit_log.lines(params))[::-1]:
        if move.kind == "promotion" and move.body["digest"] == entry.digest:  # the log is the record, also of tags
            versions.tag(entry, {key: move.body[key] for key in ("approver", "decision")} | {"gate": "passed"})
            break
    if (candidate := versions.holder(model, CANDIDATE)) is not None and candidate.digest == entry.digest:
        versions.point(model, CANDIDATE, None)
    return versions.holder(model, CHAMPION) or entry


def refuse(params: Params, decision: Decision, reason: str) -> None:
    """Record that a person refused a version or a merge, or did not answer in time. The champion stays."""
    reason = reason.encode("utf-8", "replace").decode()  # a refusal counts even if a page sent malformed text
    body = {"model": decision.model, "version": decision.candidate, "decision": decision.digest, "reason": reason}
    audit_log.write(params, "refusal", body)


def rollback(
    params: Params, model: str, *, approver: str, of: str = "", to: str = "", beforehand: bool = False
) -> Entry:
    """Make the previous champion the champion again, or the earlier one with the digest `to`; the champion `previous`.

    `of` is the digest of the champion to replace. Without `of`, a version that was rolled back does not come back:
    two people, or one who gives the command twice, would restore a bad champion. `beforehand` records that
    `approver` agreed to such rollbacks in advance, and that nobody looked at this case. The same call completes a
    rollback that was killed half way. Where a promotion was killed while both aliases named one version, or
    somebody deleted `previous`, the audit log says which version was champion before. Raises GateError if there is
    no previous champion, if the registry lost it, if the champion is another than `of`, if the previous one was
    rolled back and `of` is not given, if `to` is the champion or never was, if `previous` was not the last champion
    before this one by the audit log, or if `approver` is no valid name; SignatureError if this machine's key is not
    that person's; Busy as `promote` does.
    """
    approver = approvals.check_approver(approver)
    with _exclusive(model):
        now, before = versions.holder(model, CHAMPION), versions.holder(model, PREVIOUS)
        if now is None:
            raise GateError(f"{model} has no {CHAMPION} to roll back from")
        lines = audit_log.lines(params)
        last = last_move(model, lines, "approval")
        if last is not None and last.body.get("digest") == now.digest:  # a promotion, perhaps cut short at its end
            now = _complete(params, now)
            lines = audit_log.lines(params)
        recorded = recorded_champion(model, lines)
        if recorded not in (None, now.digest):  # one or both aliases moved without a line in the audit log
            now, before = _registered(model, recorded), now
        if of and now.digest != of:
            raise GateError(f"{now.name}, number {now.number}, is the champion of {model}; nothing was rolled back")
        former = to or recorded_before(model, lines, now.digest)
        before = _earlier(now, to, lines) if to else before
        # A promotion was cut short after it had moved `previous`, which moves first, or somebody deleted that alias.
        if before is None or now.digest == before.digest:
            if former is None:
                raise GateError(f"{model} had no {CHAMPION} before {now.name}; there is nothing to roll back to")
            before = _registered(model, former)
        if before.digest not in recorded_champions(model, lines):
            raise GateError(
                f"{before.name} has the name of a champion of {model}, but {paths.AUDIT_LOG} has no approval: "
                "if a scheduled retraining promoted it, merge its branch first; else the name was moved by hand: move "
                "it back in MLflow"
            )
        if before.digest != former:
            raise GateError(
                f"{before.name} is the previous champion of {model} by name only: {paths.AUDIT_LOG} knows of another "
                "before this one; move the name back in MLflow"
            )
        person = rolled_back_by(model, lines, before.digest, approved=False)
        if not of and person:  # by number, since a name may have been trained more than once
            raise GateError(
                f"{person} rolled {before.name} back, and {now.name} is the champion of {model}; `clinrl rollback "
                f"{model} --approver NAME --from {now.number}{f' --to {before.number}' if to else ''}` undoes that; "
                "--to names an earlier one"
            )
        moved = last_move(model, lines)
        body: dict[str, Any] = {"model": model, "from": _name(now), "to": _name(before), "approver": approver}
        body |= {"moved": moved.digest if moved else None}  # so that the approval counts for this turn alone
        body |= {"beforehand": True} if beforehand else {}
        body["approval"] = approvals.sign_approval(params, artifacts.digest(body), approver)
        versions.check_intact(params, before)
        versions.point(model, CHAMPION, before)
        versions.point(model, PREVIOUS, now)
        audit_log.write(params, "rollback", body)
        return versions.holder(model, CHAMPION) or before


def _earlier(now: Entry, digest: str, lines: Sequence[audit_log.Entry]) -> Entry:
    """The registered version with this digest, if it was champion before `now`. Raises GateError."""
    if digest == now.digest:
        raise GateError(f"{now.name} is the champion of {now.model} already; nothing was rolled back")
    found = _registered(now.model, digest)
    if digest not in recorded_champions(now.model, lines):
        raise GateError(f"{found.name}, number {found.number}, was never champion of {now.model}; name one that was")
    return found


def _registered(model: str, recorded: str) -> Entry:
    if (found := versions.by_digest(model, recorded)) is None:
        raise GateError(f"{model} has lost the version that was champion by {paths.AUDIT_LOG}; register it again")
    return found


def vouch(params: Params, reason: str) -> list[str]:
    """Sign the lines at the end of the audit log whose keys were revoked; return the fingerprints of those keys.

    The person who signs has read those lines. Nothing is written if the last line's key counts. Raises ArtefactError if
    the chain is broken.
    """
    revoked = audit_log.uncounted_keys(paths.AUDIT_LOG, trusted_keys(params))
    if revoked:
        audit_log.write(params, "review", {"reason": reason, "revoked": revoked}, reviewed=True)
    return revoked


def check_listed(params: Params, approver: str) -> str:
    """`approvals.check_approver`, and SignatureError for a name that params.yaml does not list, where it must."""
    name = approvals.check_approver(approver)
    if approvals.is_by_list(params):
        approvals.approvers(params, name)
    return name


def _name(entry: Entry) -> dict[str, Any]:
    return {"version": entry.name, "number": entry.number, "digest": entry.digest}


def _exclusive(model: str) -> AbstractContextManager[None]:
    """Hold the exclusive right to move the aliases of a model, in this checkout and its clones. Raises Busy."""
    return artifacts.exclusive(Path("registry") / "champion" / model, paths.CHAMPIONS)
