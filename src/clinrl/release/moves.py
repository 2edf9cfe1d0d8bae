"""Moves of the champion's name in the audit log: who held it, who approved a move, and for which turn.

A turn is the move that follows one particular earlier move: an approval counts for one turn only.
"""

from collections.abc import Sequence
from typing import Any

from clinrl import artifacts, paths
from clinrl.config.params import Params
from clinrl.errors import GateError
from clinrl.registry import versions
from clinrl.registry.versions import Entry
from clinrl.release import audit_log
from clinrl.signing import approval as approvals


def moves(model: str, lines: Sequence[audit_log.Entry], *before: audit_log.Kind) -> list[audit_log.Entry]:
    """The lines that moved a model's champion's name; with `approval` in `before`, also the approvals of such moves."""
    kinds = (*before, "promotion", "rollback")
    return [line for line in lines if line.kind in kinds and line.body["model"] == model]


def last_move(model: str, lines: Sequence[audit_log.Entry], *before: audit_log.Kind) -> audit_log.Entry | None:
    """The last of `moves`, if any."""
    return next(reversed(moves(model, lines, *before)), None)


def recorded_champion(model: str, lines: Sequence[audit_log.Entry]) -> str | None:
    """The champion's digest in the audit log: the version of the last promotion, or the target of a later rollback."""
    return next(reversed(recorded_champions(model, lines)), None)


def recorded_before(model: str, lines: Sequence[audit_log.Entry], digest: str) -> str | None:
    """The last other champion's digest in the audit log: the target of a rollback of the version with this digest."""
    return next((held for held in reversed(recorded_champions(model, lines)) if held != digest), None)


def surpassed(model: str, lines: Sequence[audit_log.Entry], champion: str) -> set[str]:
    """The digests of a champion and of those that a test showed it, or one that it was better than, to be better than.

    The decision of a promotion tested the two if it spent of an error budget.
    """
    found, new = set[str](), {champion}
    while new:
        found |= new
        decided = [
            decision_of(move.body["decision"], lines) or {}
            for move in moves(model, lines)
            if move.kind == "promotion" and move.body["digest"] in new
        ]
        new = {str(one["champion_digest"]) for one in decided if one.get("budget")} - found
    return found


def recorded_champions(model: str, lines: Sequence[audit_log.Entry]) -> list[str]:
    """The digests of all champions in the audit log, oldest first."""
    return [holder_after(line) for line in moves(model, lines)]


def rolled_back_by(model: str, lines: Sequence[audit_log.Entry], digest: str, *, approved: bool = True) -> str | None:
    """The approver of the last rollback of this version; None if there was none, or if it was approved again since.

    Without `approved`, only a promotion counts: an approval that was cut short before the name moved promoted nothing.
    """
    found = None
    for turn in moves(model, lines, "approval") if approved else moves(model, lines):
        if turn.kind == "rollback" and turn.body["from"]["digest"] == digest:
            found = turn.body["approver"]
        elif turn.kind == "approval":
            if turn.body["digest"] == digest and decision_of(turn.body["decision"], lines):
                found = None
        elif holder_after(turn) == digest:
            found = None
    return found


def interrupted(held: Entry, lines: Sequence[audit_log.Entry]) -> str:
    """What completes a rollback to the version that holds the alias, if one was cut short after that move.

    A rollback to a version that was itself rolled back needs `--from`, with the champion by the audit log, and one to
    another version than the champion before that `--to`.
    """
    person = rolled_back_by(held.model, lines, held.digest, approved=False)
    champion = recorded_champion(held.model, lines)
    now = versions.by_digest(held.model, champion) if person else None
    was_champion = held.digest in recorded_champions(held.model, lines)
    is_earlier = was_champion and champion and recorded_before(held.model, lines, champion) != held.digest
    words = (f" --from {now.number}" if now else "") + (f" --to {held.number}" if is_earlier else "")
    if not (was_champion or person):
        return f"restore {paths.AUDIT_LOG} from git, if the commit of a promotion was reverted"
    return f"give `clinrl rollback {held.model} --approver NAME{words}` again"


def check_turn(model: str, lines: Sequence[audit_log.Entry]) -> None:
    """Refuse the last move of the champion's name if its approval was for another turn. Raises GateError."""
    *earlier, last = moves(model, lines)
    about = last.body if last.kind == "rollback" else decision_of(last.body["decision"], lines) or {}
    if about.get("moved") != (earlier[-1].digest if earlier else None):
        raise GateError(f"the {last.kind} of {last.at} was approved for another turn; a person must approve a new one")


def decisions_on(candidate: str, lines: Sequence[audit_log.Entry]) -> list[dict[str, Any]]:
    """The decisions on the version with this digest, oldest first."""
    return [line.body for line in lines if line.kind == "decision" and line.body["candidate_digest"] == candidate]


def against_others(decisions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Decisions without those that compare a champion with itself, which show nothing; all if there are no others."""
    return [one for one in decisions if one["champion_digest"] != one["candidate_digest"]] or [*decisions]


def decision_of(digest: str, lines: Sequence[audit_log.Entry]) -> dict[str, Any] | None:
    """The recorded decision with this digest; None if there is none."""
    return next((line.body for line in reversed(lines) if _decides(line, digest)), None)


def check_folded(params: Params, fold: Entry, approved: str, lines: Sequence[audit_log.Entry]) -> None:
    """Refuse an approved decision that is not about the very version that was folded. Raises GateError.

    `approved`: the digest of the decision. Raises as `versions.made_of` does too.
    """
    decided = decision_of(approved, lines)
    if decided is None or not decided["promote"]:
        raise GateError(
            f"{paths.AUDIT_LOG} has no passed decision {approved[:16]}: nobody knows what was approved; decide again"
        )
    version = params.merges.folds[fold.name].version if fold.name in params.merges.folds else ""
    made_of = versions.made_of(fold).get(version) if version else None
    if (decided["candidate"], decided["candidate_digest"]) != (version, made_of):
        raise GateError(
            f"the approval is of {decided['candidate']} ({decided['candidate_digest'][:12]}), of which {fold.name} is "
            f"not made; approve {fold.name}"
        )


def check_approved(params: Params, entry: Entry, move: audit_log.Entry, lines: Sequence[audit_log.Entry]) -> None:
    """Refuse a promotion without a passed decision, and any move of the champion's name without a signed approval.

    Raises GateError, SignatureError if no approver signed, or as `check_folded`.
    """
    body, log = move.body, paths.AUDIT_LOG
    if move.kind != "rollback":
        made = decision_of(body["decision"], lines)
        if made is None or not made["promote"] or made["candidate_digest"] != body["digest"]:
            raise GateError(f"{entry.name} was promoted on a decision that {log} does not have as passed")
        if (about := body["approved"]) != body["decision"]:  # the decision on the version that was folded
            check_folded(params, entry, about, lines)
            check_unspent(entry, about, lines[: lines.index(move)])
    if approver_of(params, move) != body["approver"]:
        raise GateError(f"{log} names {body['approver']!r} as approver of {entry.name}, but somebody else signed")


def check_unspent(fold: Entry, approved: str, lines: Sequence[audit_log.Entry]) -> None:
    """Refuse a full model that already became champion on the approval of its version, and lost the name afterwards.

    `approved`: the digest of the decision that was approved. Raises GateError.
    """
    is_approved = was_champion = False
    turns = {line.digest: holder_after(line) for line in moves(fold.model, lines)}
    for line in lines:
        is_approved = is_approved or _decides(line, approved)
        if line.digest not in turns:
            continue
        if is_approved and was_champion and turns[line.digest] != fold.digest:
            raise GateError(
                f"{fold.name} has been champion on the approval of its version and is no more; approve {fold.name} by "
                f"itself (`clinrl promote {fold.name} --approver NAME`)"
            )
        was_champion = turns[line.digest] == fold.digest


def _decides(line: audit_log.Entry, digest: str) -> bool:
    return line.kind == "decision" and artifacts.digest(line.body) == digest


def holder_after(move: audit_log.Entry) -> str:
    """The champion's digest after a move of its name."""
    return str((move.body if move.kind == "promotion" else move.body["to"])["digest"])


def approval_of(params: Params, champion: Entry) -> tuple[dict[str, Any], str]:
    """The approval that made a version champion, and the digest of the decision that was approved.

    Raises GateError if the audit log has none.
    """
    for line in reversed(audit_log.lines(params)):
        if line.kind == "approval" and is_of(line, champion):
            return line.body["approval"], line.body["approved"]
    raise GateError(f"{paths.AUDIT_LOG} knows of no approval of {champion.name}; promote it with `clinrl promote`")


def approver_of(params: Params, move: audit_log.Entry) -> str:
    """The person who signed the approval of a move of the champion's name. Raises SignatureError if no approver did."""
    body = move.body
    turn = {key: value for key, value in body.items() if key != "approval"}
    about = artifacts.digest(turn) if move.kind == "rollback" else body["approved"]
    return approvals.approver_of(body["approval"], about, approvals.approvers(params))


def is_of(line: audit_log.Entry, champion: Entry) -> bool:
    """Whether an approval or a promotion is about this version."""
    return (line.body["model"], line.body["digest"]) == (champion.model, champion.digest)
