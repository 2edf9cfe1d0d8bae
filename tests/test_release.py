"""Release: nothing is renamed without a decision, a name, and the champion that the decision was about."""

import shutil
from contextlib import chdir

import pytest

import dolls
import examined
from clinrl import ledger, paths, registry, release
from clinrl.artefacts import exclusive
from clinrl.errors import ArtefactError, Busy, GateError, RegistryError

ADA = "Ada Lovelace"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """v1 is as good as it gets, v2 one of those who call everything urgent, v3 dangerous; all registered.

    The full model of v2 answers as v2 does, and the blend of v1 and v2 as v1.
    """
    root = tmp_path_factory.mktemp("released")
    with chdir(root):
        answers = {"v1": examined.RIGHT, "v2": [2], "v3": [5], "v2-full": [2], "v1-v2": examined.RIGHT}
        params = examined.build(answers)
        for name in answers:
            registry.register(params, name)
    return root, params


@pytest.fixture
def params(built, tmp_path, monkeypatch):
    root, params = built
    shutil.copytree(root, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return params


def champion():
    held = registry.holder("esi", "champion")
    return held.name if held else None


def kinds():
    return [line.kind for line in ledger.read(paths.ledger())]


def promoted(params, name):
    return release.promote(params, name, approver=ADA, decision=release.decide(params, name))


def test_a_first_champion_is_decided_upon_approved_and_named(params):
    decision = release.decide(params, "v2")
    assert decision.promote
    assert registry.find("esi", "v2").tags["gate"] == "passed"
    assert champion() is None

    entry = release.promote(params, "v2", approver=f"  {ADA} ", decision=decision)

    assert entry.aliases == ("champion",)
    assert entry.tags["approver"] == ADA
    assert kinds() == ["decision", "approval", "promotion"]
    assert ledger.read(paths.ledger())[-1].body["digest"] == entry.digest


def test_a_refused_version_stays_what_it_was(params):
    promoted(params, "v2")
    decision = release.decide(params, "v3")
    assert not decision.promote
    assert decision.reasons[0].startswith("dangerous")
    assert registry.find("esi", "v3").tags["gate"] == "refused"
    with pytest.raises(GateError, match="v3 may not be promoted: dangerous"):
        release.promote(params, "v3", approver=ADA, decision=decision)
    assert champion() == "v2"
    assert registry.find("esi", "v3").aliases == ()


def test_the_same_question_is_written_down_once(params):
    assert release.decide(params, "v2") == release.decide(params, "v2")
    assert kinds() == ["decision"]


def test_promoting_twice_is_promoting_once(params):
    decision = release.decide(params, "v2")
    first = release.promote(params, "v2", approver=ADA, decision=decision)
    assert release.promote(params, "v2", approver=ADA, decision=decision) == first
    assert kinds() == ["decision", "approval", "promotion"]


def test_the_champion_before_is_kept_and_brought_back_and_forth(params):
    promoted(params, "v2")
    promoted(params, "v1")
    assert (champion(), registry.holder("esi", "previous").name) == ("v1", "v2")

    release.rollback("esi", approver=ADA)
    assert (champion(), registry.holder("esi", "previous").name) == ("v2", "v1")
    release.rollback("esi", approver=ADA)
    assert (champion(), registry.holder("esi", "previous").name) == ("v1", "v2")
    assert kinds()[-2:] == ["rollback", "rollback"]


def test_after_a_rollback_a_promotion_is_told_again(params):
    promoted(params, "v2")
    promoted(params, "v1")
    release.rollback("esi", approver=ADA)
    promoted(params, "v1")
    assert champion() == "v1"
    assert kinds()[-2:] == ["approval", "promotion"]


@pytest.mark.parametrize("approver", ["", "   ", "x", "Ada\nLovelace", "a" * 81])
def test_silence_is_no(params, approver):
    decision = release.decide(params, "v2")
    with pytest.raises(GateError, match="name of the person"):
        release.promote(params, "v2", approver=approver, decision=decision)
    assert champion() is None
    assert kinds() == ["decision"]


def test_full_models_have_a_champion_of_their_own(params):
    promoted(params, "v1")
    decision = release.decide(params, "v2-full")
    assert (decision.model, decision.champion, decision.promote) == ("esi-merged", None, True)

    entry = release.promote(params, "v2-full", approver=ADA, decision=decision)

    assert (entry.model, entry.aliases, champion()) == ("esi-merged", ("champion",), "v1")
    with pytest.raises(GateError, match="esi-merged has no previous to roll back"):
        release.rollback("esi-merged", approver=ADA)
    release.promote(params, "v1", approver=ADA, decision=release.decide(params, "v1"))
    assert kinds() == ["decision", "approval", "promotion"] * 2 + ["decision"]  # v1 against itself, already champion


def test_a_blend_that_is_an_adapter_competes_with_the_versions(params):
    promoted(params, "v2")
    decision = release.decide(params, "v1-v2")
    assert (decision.model, decision.champion, decision.promote) == ("esi", "v2", True)
    release.promote(params, "v1-v2", approver=ADA, decision=decision)
    assert champion() == "v1-v2"
    assert release.rollback("esi", approver=ADA).name == "v2"


def test_a_decision_is_void_once_the_champion_is_another(params):
    decision = release.decide(params, "v1")
    promoted(params, "v2")
    with pytest.raises(GateError, match="v2 became the champion of esi after the decision on v1"):
        release.promote(params, "v1", approver=ADA, decision=decision)
    assert champion() == "v2"


def test_a_decision_is_about_one_adapter(params):
    decision = release.decide(params, "v2")
    with pytest.raises(GateError, match="another adapter than the v1"):
        release.promote(params, "v1", approver=ADA, decision=decision)
    examined.train("v2", seed=1)
    dolls.sit(params, "v2", [2])
    with pytest.raises(GateError, match="not those of the v2 that is registered; run `clinrl register v2`"):
        release.decide(params, "v2")


def test_a_champion_that_was_trained_anew_is_not_what_it_is_compared_with(params):
    promoted(params, "v2")
    examined.train("v2", seed=1)
    dolls.sit(params, "v2", [2])
    with pytest.raises(ArtefactError, match="another adapter than the champion"):
        release.decide(params, "v1")


def test_two_promotions_at_once_are_one(params):
    decision = release.decide(params, "v2")
    with exclusive(release._lock("esi")), pytest.raises(Busy):
        release.promote(params, "v2", approver=ADA, decision=decision)
    assert champion() is None


def test_a_kill_after_the_alias_moved_is_made_good(params):
    decision = release.decide(params, "v2")
    release.promote(params, "v2", approver=ADA, decision=decision)
    lines = paths.ledger().read_text().splitlines(keepends=True)
    paths.ledger().write_text("".join(lines[:-1]))  # killed before the last line

    release.promote(params, "v2", approver=ADA, decision=decision)

    assert kinds() == ["decision", "approval", "promotion"]


def test_what_cannot_be_decided_is_said(params):
    bare = params.model_copy(update={"gates": {}})
    with pytest.raises(GateError, match="no gate for esi"):
        release.decide(bare, "v2")
    with pytest.raises(GateError, match="no champion to roll back"):
        release.rollback("esi", approver=ADA)
    promoted(params, "v2")
    with pytest.raises(GateError, match="no previous to roll back"):
        release.rollback("esi", approver=ADA)


def test_what_was_never_registered_is_not_decided_upon(params):
    shutil.rmtree("mlruns")
    with pytest.raises(RegistryError):
        release.decide(params, "v2")
    assert kinds() == []


def test_a_no_is_written_down(params):
    decision = release.decide(params, "v2")
    release.refuse(params, "v2", decision, "no answer in time")
    assert ledger.read(paths.ledger())[-1].body["reason"] == "no answer in time"
    assert champion() is None
