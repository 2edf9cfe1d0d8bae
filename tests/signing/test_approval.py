"""Approvals: whose token for which decision counts, and nobody else's for another."""

import base64
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clinrl.config.params import Params
from clinrl.errors import SignatureError
from clinrl.release import promotion
from clinrl.release.gate import Decision
from clinrl.signing import approval, dsse, keys
from intoto import validated
from valid_params import VALID

ADA, ALAN, EVE = (keys._signer_of(ec.derive_private_key(number, ec.SECP256R1())) for number in (11, 12, 13))


def params(scale: str = "embedded", **approvers: keys.Signer) -> Params:
    listed = {name.replace("_", " "): signer.key.line for name, signer in approvers.items()}
    return Params.model_validate({**VALID, "scale": scale, "approvers": listed})


BOTH = params("full", Ada_Lovelace=ADA, Alan_Turing=ALAN)
DIGEST, OTHER = "d1" * 32, "d2" * 32
"""Of two decisions."""


def test_a_token_tells_who_approves() -> None:
    for name, signer in (("Ada Lovelace", ADA), ("Alan Turing", ALAN)):
        token = approval.token(DIGEST, name, signer)
        assert len(token) <= 96
        envelope = approval.check_token(BOTH, DIGEST, f" {token}\n", name)
        assert approval.check_token(BOTH, DIGEST, token, name) == envelope
        assert approval.approver_of(envelope, DIGEST, BOTH.approvers) == name


def test_what_is_signed_is_a_statement_of_in_toto() -> None:
    read = validated(approval.statement(DIGEST, "Ada Lovelace"))
    assert read.pb.subject[0].digest["sha256"] == DIGEST


@pytest.mark.parametrize(
    ("token", "name"),
    [
        (approval.token(OTHER, "Ada Lovelace", ADA), "Ada Lovelace"),  # another decision
        (approval.token(DIGEST, "Alan Turing", ADA), "Alan Turing"),  # in another's name
        (approval.token(DIGEST, "Ada Lovelace", EVE), "Ada Lovelace"),  # not listed
        (approval.token(DIGEST, "Ada Lovelace", ADA), "Alan Turing"),  # the answer names somebody else
        (approval.token(DIGEST, "Eve", EVE), "Eve"),
        ("", "Ada Lovelace"),
        ("A" * 10_000, "Ada Lovelace"),
        ("ü", "Ada Lovelace"),
        (base64.urlsafe_b64encode(b"0" * 70).decode(), "Ada Lovelace"),
    ],
)
def test_any_other_token_is_refused(token: str, name: str) -> None:
    with pytest.raises(SignatureError):
        approval.check_token(BOTH, DIGEST, token, name)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=130))
def test_any_text_is_refused_in_a_sentence(token: str) -> None:
    with pytest.raises(SignatureError, match="no approval of this decision"):
        approval.check_token(BOTH, DIGEST, token, "Ada Lovelace")


def test_on_the_spot_only_with_the_key_that_is_listed(checkout: object) -> None:
    ours = keys.signer("embedded")
    listed = params("full", Ada_Lovelace=ours, Alan_Turing=ALAN)
    envelope = approval.sign_approval(listed, DIGEST, "Ada Lovelace")
    assert approval.approver_of(envelope, DIGEST, listed.approvers) == "Ada Lovelace"
    with pytest.raises(SignatureError, match=r"not the one that `approvers` in params\.yaml lists for 'Alan Turing'"):
        approval.sign_approval(listed, DIGEST, "Alan Turing")
    with pytest.raises(SignatureError, match="does not list 'Eve'"):
        approval.sign_approval(listed, DIGEST, "Eve")


def test_where_nobody_is_listed_the_checkout_approves_at_scale_embedded_alone(checkout: object) -> None:
    token = approval.token(DIGEST, "Anybody", EVE)
    with pytest.raises(SignatureError, match="this checkout has no key"):
        approval.check_token(params(), DIGEST, token, "Anybody")
    envelope = approval.sign_approval(params(), DIGEST, "Anybody")
    assert approval.approver_of(envelope, DIGEST, keys.keyring()) == "Anybody"
    with pytest.raises(SignatureError, match="no approval of this decision"):
        approval.check_token(params(), DIGEST, token, "Anybody")
    token = approval.token(DIGEST, "Anybody", keys.signer("full"))
    assert approval.check_token(params(), DIGEST, token, "Anybody") == envelope
    with pytest.raises(SignatureError, match="lists nobody, so nobody can approve"):
        approval.sign_approval(params("full"), DIGEST, "Anybody")
    with pytest.raises(SignatureError, match="lists nobody, so nobody can approve"):
        approval.check_token(params("full"), DIGEST, token, "Anybody")


@pytest.mark.parametrize(
    "change",
    [
        {"predicateType": "https://example.org/other"},
        {"predicate": {"approver": "Alan Turing"}},
        {"predicate": {"approver": "Ada Lovelace", "but": "not really"}},
        {"predicate": None},
        {"subject": []},
        {"subject": [{"name": "decision", "digest": {"sha256": "0" * 64}}]},
    ],
)
def test_a_listed_persons_signature_on_something_else_is_no_approval(change: dict[str, Any]) -> None:
    envelope = dsse.envelope(approval.statement(DIGEST, "Ada Lovelace") | change, ADA)
    with pytest.raises(SignatureError, match="no approval of the decision"):
        approval.approver_of(envelope, DIGEST, BOTH.approvers)


def test_where_somebody_is_listed_no_other_key_can_promote(checkout: object) -> None:
    """Not that of the checkout, of a rebuilder, or one that is trusted here, whatever name it gives."""
    ours = keys.signer("embedded")
    keys.trust("Ada Lovelace", EVE.key)
    rules = {**VALID, "approvers": {"Ada Lovelace": ADA.key.line}, "rebuilders": {"Alan Turing": ALAN.key.line}}
    params = Params.model_validate(rules)
    decision = Decision(
        model="esi", task="esi", candidate="v3", candidate_digest="c" * 64, champion=None, champion_digest=None,
        moved=None, exam_digest="e" * 64, findings=(), promote=True, reasons=(), rows=(),
    )  # fmt: skip
    for name, signer in [("Ada Lovelace", ours), ("Ada Lovelace", EVE), ("Alan Turing", ALAN), (keys.OURS, ours)]:
        approved = dsse.envelope(approval.statement(decision.digest, name), signer)
        with pytest.raises(SignatureError):
            promotion.promote(params, "v3", decision=decision, approval=approved)
    good = dsse.envelope(approval.statement(decision.digest, "Ada Lovelace"), ADA)
    assert approval.approver_of(good, decision.digest, approval.approvers(params)) == "Ada Lovelace"


@pytest.mark.parametrize("digest", ["", "v3", "E" * 64, DIGEST + "\n", DIGEST[:-1]])
def test_a_decision_is_approved_by_its_digest(digest: str) -> None:
    with pytest.raises(SignatureError, match="64 characters"):
        approval.token(digest, "Ada Lovelace", ADA)
