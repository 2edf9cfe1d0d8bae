"""Moves of the champion's name, as the audit log tells them."""

import pytest

from clinrl import artifacts
from clinrl.artifacts import digest
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
