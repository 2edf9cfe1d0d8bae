"""What was approved moves the champion's name once; the registry alone moves nothing, nor does one key everything."""

import json
import re
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from test_promotion import ADA, after, champion, params, planned, projects, promoted, trained_anew

import dolls
import examined
import locks
from clinrl import artifacts, paths
from clinrl.artifacts import write_json
from clinrl.errors import ArtefactError, GateError, Refused, SignatureError
from clinrl.registry import versions
from clinrl.release import audit_log, decisions, lineage, moves, promotion, standing
from clinrl.signing import approval, dsse, keys

__all__ = ["params", "projects"]
pytestmark = pytest.mark.usefixtures("few_draws")


@pytest.fixture
def ada():
    """A person with a key of her own: that of the checkout does not approve."""
    return keys._signer_of(generate_private_key(SECP256R1()))


def with_approver(ada):
    return dolls.params(**examined.SECTIONS, approvers={ADA: ada.key.line})


def release(params, ada, name):
    decision = decisions.decide(params, name)
    token = approval.token(decision.digest, ADA, ada)
    signed = approval.check_token(params, decision.digest, token, ADA)
    return promotion.promote(params, name, decision=decision, approval=signed)


def write(params, kind, body):
    """A line that the checkout's key alone signs."""
    trusted = keys.trusted_keys(params)
    return audit_log.append(paths.AUDIT_LOG, kind, body, signer=keys.signer("embedded"), keys=trusted)


def last(params, kind):
    return [line for line in audit_log.read(paths.AUDIT_LOG, keys.trusted_keys(params)) if line.kind == kind][-1].body


def broken(params, name):
    return [link.says for link in lineage.walk(params, name) if link.state == "broken"]


def check(params):
    standing.check_servable(params, versions.holder("esi", "champion"), "champion")


@pytest.mark.long
@after("v2")
def test_an_approval_is_not_good_after_the_name_went_to_and_fro(params):
    first = decisions.decide(params, "v1")
    token = approval.token(first.digest, ADA, keys.signer("embedded"))
    signed = approval.check_token(params, first.digest, token, ADA)
    promotion.promote(params, "v1", decision=first, approval=signed)
    promotion.rollback(params, "esi", approver=ADA)
    with pytest.raises(GateError, match="moved after the decision on v1; decide again"):
        promotion.promote(params, "v1", decision=first, approval=signed)
    assert champion() == "v2"


@after("v1")
@pytest.mark.parametrize(
    ("now", "refusal"),
    [
        (
            None,
            "the registry has lost v1, the champion of esi by .*: give `clinrl register` and `clinrl promote`",
        ),
        ("v2", "v2 is the champion of esi in the registry, but not by "),
    ],
)
def test_a_champion_by_name_only_is_no_rival(params, now, refusal):
    planned_ = planned()
    versions.point("esi", "champion", now and versions.find("esi", now))
    with pytest.raises(GateError, match=refusal):
        decisions.decide(planned_, "v1-v2")


@after("v1")
def test_a_registry_that_lost_its_champion_gets_it_back(params):
    versions.point("esi", "champion", None)
    assert promoted(params, "v1").name == champion() == "v1"
    check(params)


def test_who_rolled_a_version_back_counts_until_it_is_champion_again():
    def rollback(before, after, approver):
        body = {"model": "esi", "from": {"digest": before}, "to": {"digest": after}, "approver": approver}
        return audit_log.Entry.model_construct(kind="rollback", body=body)

    lines = [rollback("a", "b", "Grace Hopper")]
    assert [moves.rolled_back_by("esi", lines, of) for of in ("a", "b")] == ["Grace Hopper", None]
    lines.append(rollback("b", "a", ADA))
    assert [moves.rolled_back_by("esi", lines, of) for of in ("a", "b")] == [None, ADA]


@pytest.mark.parametrize("of", ["v2", "v3"])
def test_neither_a_decision_on_another_version_nor_a_refusal_makes_a_champion(params, ada, of):
    approved = with_approver(ada)
    about = decisions.decide(approved, of).digest
    signed = approval.check_token(approved, about, approval.token(about, ADA, ada), ADA)
    assert not decisions.decide(approved, "v3").promote
    refused = versions.find("esi", "v3")
    of_another = {"model": "esi", "version": "v3", "number": refused.number, "digest": refused.digest}
    body = {"decision": about, "approved": about, "approver": ADA, "approval": signed}
    write(approved, "promotion", of_another | body)
    versions.point("esi", "champion", refused)
    with pytest.raises(GateError, match=r"v3 was promoted on a decision that .* does not have as passed"):
        check(approved)


@after("v1")
def test_a_promotion_names_as_approver_who_signed(params):
    """The checkout's key writes the last line anew, with another name."""
    named = last(params, "promotion") | {"approver": "Grace Hopper"}
    lines = paths.AUDIT_LOG.read_text().splitlines(keepends=True)
    paths.AUDIT_LOG.write_text("".join(lines[:-1]))
    write(params, "promotion", named)
    versions.tag(versions.find("esi", "v1"), {"approver": "Grace Hopper"})
    with pytest.raises(GateError, match="names 'Grace Hopper' as approver of v1, but somebody else signed"):
        check(params)
    (says,) = broken(params, "v1")
    assert says == f"{paths.AUDIT_LOG} names 'Grace Hopper' as approver of v1, but somebody else signed"


@pytest.mark.long
@after("v1")
@pytest.mark.parametrize("of", ["another version", "another name", "another v2", "nothing known", "a refused one"])
def test_a_full_model_is_champion_on_the_approval_of_the_very_version_of_which_it_is_made(params, of):
    """The checkout's key writes that v2-full was promoted, with a real approval of something else."""
    how, fold = last(params, "approval"), decisions.decide(params, "v2-full")
    says = "the approval is of v1 .*, of which v2-full is not made; approve v2-full"
    if of == "another v2":
        (before,) = [line.body for line in audit_log.lines(params) if line.body.get("version") == "v2"][:1]
        trained_anew(params)
        how, fold = before, decisions.decide(params, "v2-full")
        says = "the approval is of v2 .*, of which v2-full is not made; approve v2-full"
    elif of == "another name":
        of_v2 = next(line.body for line in audit_log.lines(params) if line.body.get("candidate") == "v2")
        write(params, "decision", of_v2 | {"candidate": "v1"})
        about = artifacts.digest(last(params, "decision"))
        how = {"approved": about, "approval": approval.sign_approval(params, about, ADA)}
    elif of != "another version":
        about = "0" * 64 if of == "nothing known" else decisions.decide(params, "v3").digest
        how = {"approved": about, "approval": approval.sign_approval(params, about, ADA)}
        says = f"has no passed decision {about[:16]}: nobody knows what was approved; decide again"
    entry = versions.by_digest("esi-merged", fold.candidate_digest)
    body = {key: how[key] for key in ("approved", "approval")} | promotion._name(entry)
    write(params, "promotion", body | {"model": "esi-merged", "approver": ADA, "decision": fold.digest})
    versions.point("esi-merged", "champion", entry)
    with pytest.raises(GateError, match=says):
        standing.check_servable(params, entry, "champion")
    assert any(re.search(says, one) for one in broken(params, "v2-full"))
    with pytest.raises(GateError, match=says):
        promotion.promote(params, "v2-full", decision=fold, approval=how["approval"], approved=how["approved"])


@after("v2")
@pytest.mark.parametrize("at", ["another", "gone"])
def test_what_a_full_model_is_made_of_is_not_taken_from_whoever_writes_to_the_registry(params, at):
    fold, how = decisions.decide(params, "v2-full"), last(params, "approval")
    promotion.promote(params, "v2-full", decision=fold, approval=how["approval"], approved=how["approved"])
    entry = versions.holder("esi-merged", "champion")
    (manifest,) = Path("mlruns").rglob("merged/manifest.json")
    content = json.loads(manifest.read_text())
    manifest.unlink()  # what a project has copied may be a link
    if at == "another":
        write_json(manifest, content | {"inputs": content["inputs"] | {"v2": "0" * 64}})
    with pytest.raises(Refused, match=r"holds another model than v2-full|has no manifest\.json"):
        standing.check_servable(params, entry, "champion")


@pytest.mark.long
def test_a_rollback_is_approved_for_one_turn(params, ada):
    approved = with_approver(ada)
    release(approved, ada, "v2")
    release(approved, ada, "v1")
    moved = audit_log.read(paths.AUDIT_LOG, keys.trusted_keys(approved))[-1].digest
    two = [promotion._name(versions.find("esi", name)) for name in ("v1", "v2")]
    body = dict(zip(("from", "to"), two, strict=True)) | {"model": "esi", "approver": ADA, "moved": moved}
    signed = body | {"approval": dsse.envelope(approval.statement(artifacts.digest(body), ADA), ada)}
    write(approved, "rollback", signed)
    versions.point("esi", "champion", versions.find("esi", "v2"))
    check(approved)
    versions.point("esi", "previous", versions.find("esi", "v1"))
    release(approved, ada, "v1")

    write(approved, "rollback", signed)
    versions.point("esi", "champion", versions.find("esi", "v2"))
    with pytest.raises(GateError, match="approved for another turn"):
        check(approved)
    assert any("approved for another turn" in one for one in broken(approved, "v2"))

    unlisted = dsse.envelope(approval.statement(artifacts.digest(body), ADA), keys.signer("embedded"))
    write(approved, "rollback", signed | {"approval": unlisted})
    with pytest.raises(SignatureError, match="nobody whose key counts here signed this"):
        check(approved)
    assert any("nobody whose key counts here signed this" in says for says in broken(approved, "v2"))


@after("v1")
def test_a_promotion_is_approved_for_one_turn(params):
    """The checkout's key writes the lines of the last promotion once more, after a person has taken it back."""
    again = last(params, "promotion")
    promotion.rollback(params, "esi", approver=ADA)
    write(params, "promotion", again)
    versions.point("esi", "champion", versions.find("esi", "v1"))
    with pytest.raises(GateError, match=r"the promotion of .* was approved for another turn"):
        check(params)
    assert any("approved for another turn" in one for one in broken(params, "v1"))


@pytest.mark.long
@after("v2")
def test_a_full_model_that_was_taken_back_needs_an_approval_of_its_own(params):
    """That of its version held for it once. A decision since then, which anybody's question makes, is no yes."""

    def fold():
        how = {key: last(params, "approval")[key] for key in ("approval", "approved")}
        return promotion.promote(params, "v2-full", decision=decisions.decide(params, "v2-full"), **how)

    fold()
    trained_anew(params)
    promoted(params, "v2")
    approved = last(params, "approval")
    assert fold().aliases == ("champion",)
    assert standing.outcome(params, "v2-full") == "v2-full is the champion of esi-merged"
    promotion.rollback(params, "esi-merged", approver=ADA)

    decision = decisions.decide(params, "v2-full")
    assert decision.promote
    assert standing.outcome(params, "v2-full") == f"v2-full was rolled back by {ADA}"
    how = {"approval": approved["approval"], "approved": approved["approved"]}
    with pytest.raises(GateError, match="v2-full has been champion on the approval of its version and is no more"):
        promotion.promote(params, "v2-full", decision=decision, **how)
    taken_back, first = last(params, "rollback")["from"], approved["approved"]
    write(
        params, "decision", next(line.body for line in audit_log.lines(params) if artifacts.digest(line.body) == first)
    )
    write(
        params, "promotion", {**how, **taken_back, "model": "esi-merged", "approver": ADA, "decision": decision.digest}
    )
    versions.point("esi-merged", "champion", versions.by_digest("esi-merged", taken_back["digest"]))
    with pytest.raises(GateError, match="and is no more; approve v2-full by itself"):
        standing.check_servable(params, versions.holder("esi-merged", "champion"), "champion")
    assert any("and is no more" in one for one in broken(params, "v2-full"))

    again = decisions.decide(params, "v2-full")
    examined.promote(params, "v2-full", ADA, again)
    standing.check_servable(params, versions.holder("esi-merged", "champion"), "champion")
    assert last(params, "promotion")["approved"] == again.digest


@after("v1")
@pytest.mark.parametrize("alias", ["previous", "champion"])
def test_a_rollback_goes_where_the_audit_file_says(params, alias):
    promoted(params, "v1-v2")
    versions.point("esi", alias, versions.find("esi", "v2"))  # a champion of before, and not the last one
    with pytest.raises(GateError, match="v2 is the previous champion of esi by name only"):
        promotion.rollback(params, "esi", approver=ADA)


@after("v2")
def test_another_test_of_the_same_answers_is_another_look_and_so_are_other_answers(params):
    first = decisions.decide(planned(protocol={"superior": "critical_under"}), "v1")
    assert decisions.decide(planned(protocol={"superior": "critical_under"}), "v1") == first
    second = decisions.decide(planned(protocol={"superior": "exact"}), "v1")
    assert (first.budget.number, second.budget.number) == (1, 2)
    with pytest.raises(GateError, match="used up"):
        decisions.decide(planned(protocol={"superior": "exact", "screen": 0.2}, budget={"looks": 1}), "v1")
    dolls.examine(params, "v1", examined.GOOD)  # the same adapter gave other answers, as in another environment
    locks.record(params)
    with pytest.raises(GateError, match="used up"):
        decisions.decide(planned(protocol={"superior": "exact"}), "v1")


@after("v2")
def test_a_line_is_what_was_written_byte_by_byte(params):
    text = paths.AUDIT_LOG.read_text()
    paths.AUDIT_LOG.write_text(text.replace('"kind":"promotion"', '"kind":"refusal","kind":"promotion"'))
    with pytest.raises(ArtefactError, match="was altered after it was written"):
        audit_log.read(paths.AUDIT_LOG, keys.keyring())


@after("v2")
def test_a_name_that_cannot_be_written_approves_nothing_and_such_a_reason_is_still_a_no(params):
    decision = decisions.decide(params, "v1")
    with pytest.raises(GateError, match="needs the name of the person"):
        examined.promote(params, "v1", "A\udcff", decision)
    promotion.refuse(params, decision, "no \ud800")
    assert last(params, "refusal")["reason"] == "no ?"
