"""Moves of the champion's name, as the audit log tells them."""

from contextlib import nullcontext

import pytest

from clinrl import artifacts
from clinrl.artifacts import digest
from clinrl.errors import GateError
from clinrl.registry import versions
from clinrl.release import audit_log, moves

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


@pytest.mark.parametrize(("at", "is_spent"), [(0, True), (2, False)])
def test_an_approval_is_spent_for_a_full_model_that_lost_the_name_after_it_and_not_before(at, is_spent):
    fold = versions.Entry.model_construct(model="esi-merged", name="v0-full", digest="f0")
    lines = [line("promotion", {"model": "esi-merged", "digest": held}) for held in ("f0", "f1")]
    lines.insert(at, line("decision", decided(0)))
    with pytest.raises(GateError, match="approve v0-full by itself") if is_spent else nullcontext():
        moves.check_unspent(fold, digest(decided(0)), lines)
