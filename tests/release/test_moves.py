"""Moves of the champion's name, as the audit log tells them."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from clinrl import artifacts
from clinrl.artifacts import digest
from clinrl.errors import GateError
from clinrl.registry import versions
from clinrl.release import audit_log, moves
from clinrl.signing import approval as approvals

ADA = "Ada Lovelace"


def line(kind, body):
    at, key = "2026-01-05T03:00:00+00:00", f"SHA256:{'A' * 43}"
    fields = {"at": at, "kind": kind, "body": body, "previous": audit_log.START, "key": key}
    return audit_log.Entry(**fields, digest=digest(fields), signature="")


def decided(number):
    return {"candidate_digest": f"v{number}", "number": number}


def approved(number):
    return line("approval", {"model": "esi", "digest": f"v{number}", "decision": digest(decided(number))})


ROLLBACK = line("rollback", {"model": "esi", "from": {"digest": "v0"}, "to": {"digest": "v1"}, "approver": ADA})


@pytest.mark.parametrize(("again", "person"), [([], ADA), ([approved(0)], None), ([approved(3)], ADA)])
def test_whether_a_version_was_rolled_back_is_asked_of_its_own_approvals_alone(again, person, monkeypatch):
    """To find the decision behind an approval, decisions are digested: over years of others that took hours."""
    others = range(1, 10)
    lines = [line("decision", decided(n)) for n in (*others, 0)] + [approved(n) for n in others]
    lines += [ROLLBACK, *map(approved, others), *again]
    digested = []
    monkeypatch.setattr(artifacts, "digest", lambda value: digested.append(value) or digest(value))
    assert moves.rolled_back_by("esi", lines, "v0") == person
    assert digested == [decided(0)] * (person is None), "the latest decisions first"


def test_an_approval_of_a_decision_that_was_never_recorded_undoes_no_rollback():
    assert moves.rolled_back_by("esi", [ROLLBACK, approved(0)], "v0") == ADA


@pytest.mark.parametrize("undone", [[], [approved(0)]], ids=["", "by an approval that was cut short"])
def test_the_command_that_completes_a_rollback_names_the_champion_whom_it_left(undone, monkeypatch):
    held, now = (versions.Entry.model_construct(model="esi", digest=f"v{n}", number=n) for n in (0, 1))
    monkeypatch.setattr(versions, "by_digest", lambda _, digest: {"v1": now}[digest])
    lines = [ROLLBACK, line("decision", decided(0)), *undone]
    assert moves.interrupted(held, lines) == "give `clinrl rollback esi --approver NAME --from 1` again"
    held = held.model_copy(update={"digest": "v2"})
    assert moves.interrupted(held, lines).startswith("restore data/reports/decisions.jsonl from git, if the commit")


def promotion(held, **more):
    return line("promotion", {"model": "esi-merged", "digest": held, **more})


def test_the_champion_before_is_the_last_other_one():
    lines = [promotion(held) for held in ("f0", "f1", "f2")]
    assert moves.recorded_before("esi-merged", lines, "f2") == "f1"


def test_the_last_approval_of_a_champion_counts(monkeypatch):
    """The first may be of a person whose key was revoked."""
    signed = [approved(0).body | {"approved": about, "approval": {"of": about}} for about in ("first", "second")]
    rollback = line("rollback", ROLLBACK.body | {"approval": {}})
    monkeypatch.setattr(audit_log, "lines", lambda _: [*(line("approval", body) for body in signed), rollback])
    champions = (("esi", "v0"), ("esi", "v1"), ("pain", "v0"))
    held, *others = (versions.Entry.model_construct(model=model, name="v", digest=of) for model, of in champions)
    assert moves.approval_of(None, held) == ({"of": "second"}, "second")
    for other in others:
        with pytest.raises(GateError, match="knows of no approval of v"):
            moves.approval_of(None, other)


def test_a_rollback_is_approved_as_it_is_and_not_by_a_decision_that_it_names(monkeypatch):
    monkeypatch.setattr(approvals, "approvers", lambda _: {})
    monkeypatch.setattr(approvals, "approver_of", lambda signed, about, _: (signed, about))
    body = ROLLBACK.body | {"approved": digest(decided(0))}
    move = line("rollback", body | {"approval": {}})
    assert moves.approver_of(None, move) == ({}, digest(body))


FOLD = versions.Entry.model_construct(model="esi-merged", name="v0-full", digest="f0")


@pytest.mark.parametrize(
    ("history", "is_spent"),
    [("a01", True), ("0a1", True), ("01a", False), ("a10", False), ("a00", False), ("01a1", False)],
)
def test_an_approval_is_spent_for_a_full_model_that_lost_the_name_after_it_and_not_before(history, is_spent):
    """`a` is the approved decision, and a number the full model that became champion."""
    lines = [line("decision", decided(0)) if what == "a" else promotion(f"f{what}") for what in history]
    with pytest.raises(GateError, match="approve v0-full by itself") if is_spent else nullcontext():
        moves.check_unspent(FOLD, digest(decided(0)), lines)


def test_a_full_model_that_was_taken_back_was_promoted_rightly_before(monkeypatch):
    for name, result in (("check_folded", None), ("approver_of", ADA)):
        monkeypatch.setattr(moves, name, lambda *_, result=result: result)
    made = {"candidate_digest": "f0", "promote": True}
    move = promotion("f0", decision=digest(made), approved=digest(decided(0)), approver=ADA)
    lines = [line("decision", decided(0)), line("decision", made), move, promotion("f1")]
    moves.check_approved(None, FOLD, move, lines)


def test_what_is_no_full_model_is_champion_on_the_approval_of_no_other():
    passed = {"candidate": "v1", "candidate_digest": "v1", "promote": True}
    params = SimpleNamespace(merges=SimpleNamespace(folds={}))
    with pytest.raises(GateError, match=r"the approval is of v1 \(v1\), of which v0-full is not made"):
        moves.check_folded(params, FOLD, digest(passed), [line("decision", passed)])
