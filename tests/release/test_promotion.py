"""Release: nothing is renamed without a decision, a name, and the champion that the decision was about."""

import json
import shutil
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
from ruamel.yaml import YAML

import dolls
import examined
import locks
from clinrl import paths
from clinrl.artifacts import identity, md5, read_manifest, write_json, write_text
from clinrl.cli import registry_commands
from clinrl.config.params import load_params
from clinrl.config.recipes import Lora, Stream
from clinrl.data import dataset
from clinrl.errors import ArtefactError, Busy, GateError, ParamsError, RegistryError, SignatureError
from clinrl.evaluation import evaluate
from clinrl.registry import versions
from clinrl.release import audit_log, change_control, decisions, lineage, moves, promotion, standing
from clinrl.signing import approval, keys
from clinrl.signing.keys import keyring
from clinrl.tracking.mlflow_store import connect
from once import once

pytestmark = pytest.mark.usefixtures("few_draws")

ADA = "Ada Lovelace"


@pytest.fixture(scope="module")
def projects():
    """By its champion: the project without one, that in which v2 was promoted, and that with v1 after it.

    Made once a test run, since test_replays has them too. Only copy them."""
    built = {None: examined.registered()}

    def release(before, name):
        examined.copy(built[before], Path())
        promoted(examined.params(), name)

    for before, name in ((None, "v2"), ("v2", "v1")):
        built[name] = once(f"promoted-{name}", partial(release, before, name))
    return built


@pytest.fixture
def params(request, projects, tmp_path, monkeypatch):
    """The params of a copy of a project, entered: that without a champion, or the one that `after` names."""
    examined.copy(projects[getattr(request, "param", None)], tmp_path)
    monkeypatch.chdir(tmp_path)
    return examined.params()


def after(champion):
    """The test begins after the promotion of v2, or of v2 and then v1."""
    return pytest.mark.parametrize("params", [champion], indirect=True)


def champion():
    held = versions.holder("esi", "champion")
    return held.name if held else None


def kinds():
    return [line.kind for line in audit_log.read(paths.AUDIT_LOG, keyring())]


def promoted(params, name):
    return examined.promote(params, name, ADA, decisions.decide(params, name))


def trained_anew(params):
    """Another v2 with its full model, both right in all cases, and registered."""
    examined.train("v2", seed=1)
    examined.merge(params, "v2-full")
    for name in ("v2", "v2-full"):
        dolls.examine(params, name, examined.RIGHT)
    locks.record(params)
    for name in ("v2", "v2-full"):
        versions.register(params, name)


@pytest.mark.long
def test_a_first_champion_is_decided_upon_approved_and_named(params):
    decision = decisions.decide(params, "v2")
    assert decision.promote
    assert versions.find("esi", "v2").tags["gate"] == "passed"
    assert champion() is None

    entry = examined.promote(params, "v2", f"  {ADA} ", decision)

    assert entry.aliases == ("champion",)
    assert entry.tags["approver"] == ADA
    assert kinds() == ["decision", "approval", "promotion"]
    assert audit_log.read(paths.AUDIT_LOG, keyring())[-1].body["digest"] == entry.digest


def test_a_log_without_a_decision_that_the_registry_has_admits_no_other(params):
    assert not decisions.decide(params, "v3").promote
    paths.AUDIT_LOG.unlink()  # as after `git revert`, and in a checkout that has not merged the branch
    with pytest.raises(GateError, match=r"decisions\.jsonl lacks the decision on v3 .* merge the branch"):
        decisions.decide(params, "v2")
    assert not decisions.decide(params, "v3").promote, "to decide again writes the line again"
    assert decisions.decide(params, "v2").promote


@after("v2")
def test_a_refused_version_stays_what_it_was(params):
    decision = decisions.decide(params, "v3")
    assert not decision.promote
    assert decision.reasons[0].startswith("critical_under")
    assert versions.find("esi", "v3").tags["gate"] == "refused"
    with pytest.raises(GateError, match="v3 may not be promoted: critical_under"):
        examined.promote(params, "v3", ADA, decision)
    assert champion() == "v2"
    assert versions.find("esi", "v3").aliases == ()
    assert standing.outcome(params, "v3") == "v3 was refused by its gate"
    promoted(params, "v1")
    assert standing.outcome(params, "v3") is None, "refused beside another champion"


def test_who_answers_the_same_to_everything_is_no_first_champion(params):
    dolls.examine(params, "v1", [2])
    locks.record(params)
    with pytest.raises(GateError, match="run `clinrl register v1` first"):
        decisions.decide(params, "v1")
    versions.register(params, "v1")
    decision = decisions.decide(params, "v1")
    assert not decision.promote
    assert any("from always 2 on the same cases" in reason for reason in decision.reasons)


def test_without_its_training_cases_nothing_is_decided(params):
    shutil.rmtree(paths.cases("d1"))
    with pytest.raises(ArtefactError, match="data/cases/d1"):
        decisions.decide(params, "v1")
    assert kinds() == []


@pytest.mark.parametrize(
    ("section", "name", "change", "field", "version"),
    [
        ("versions", "v2", {"seed": 99}, "seed", "v2"),
        ("versions", "v2", {"parent": "esi-base"}, "parent", "v2"),
        ("profiles", "reward", {"lora": Lora(rank=2, alpha=8.0, targets="all-linear")}, "lora.rank", "v2"),
        ("profiles", "reward", {"stream": Stream()}, "stream", "v2"),
        ("profiles", "reward", {"qlora": True}, "qlora", "v2"),
        ("versions", "v1", {"seed": 99}, "seed", "v1"),
    ],
)
def test_what_params_says_otherwise_than_was_trained_is_not_decided_upon(params, section, name, change, field, version):
    """A change plan is about what was trained, and params.yaml can be edited afterwards."""
    now = getattr(params, section)
    altered = params.model_copy(update={section: {**now, name: now[name].model_copy(update=change)}})
    says = rf"{version} was trained with another {field} than params\.yaml has now; put it back"
    with pytest.raises(GateError, match=says):
        decisions.decide(altered, "v2")
    assert kinds() == []


def test_a_mode_that_was_evaluated_and_is_left_out_now_is_no_secret(params):
    one = {"modes": ("think",)}
    profiles = {name: profile.model_copy(update=one) for name, profile in params.profiles.items()}
    fewer = params.model_copy(update={"modes": {"think": params.modes["think"]}, "profiles": profiles})
    with pytest.raises(GateError, match=r"v1 was evaluated in direct and think, and params\.yaml has think; run"):
        decisions.decide(fewer, "v1")
    assert kinds() == []


def test_a_candidate_that_came_while_another_was_refused_stays(params, monkeypatch):
    versions.point("esi", "candidate", versions.find("esi", "v3"))
    tag = versions.tag

    def tag_while_another_comes(entry, tags):
        tag(entry, tags)
        versions.point("esi", "candidate", versions.find("esi", "v2"))

    monkeypatch.setattr(versions, "tag", tag_while_another_comes)
    assert not decisions.decide(params, "v3").promote
    assert versions.holder("esi", "candidate").name == "v2"


@pytest.mark.parametrize(("change", "is_same"), [({"file": "drafts"}, True), ({"task_version": 1}, False)])
def test_a_block_that_moved_to_another_file_is_the_same(change, is_same, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = deepcopy(dolls.PARAMS)
    YAML().dump(content, Path("params.yaml"))
    before = load_params()
    content["datasets"]["d1"].update(change)
    content["versions"]["v1"].update({key: value for key, value in change.items() if key == "file"}, why="Another.")
    YAML().dump(content, Path("params.yaml"))
    with nullcontext() if is_same else pytest.raises(ParamsError, match="data set d1 has changed"):
        standing.check_unchanged(before, "v2")


@pytest.mark.parametrize(
    ("name", "edit", "says"),
    [
        ("v2", lambda content: content.update(scale="full"), "scale"),
        ("v2", lambda content: content["modes"]["think"].update(temperature=0.5), "modes"),
        ("v2", lambda content: content["versions"]["v1"].update(seed=9), "versions.v1"),
        ("v2", lambda content: content["profiles"]["reward"]["trainer"]["embedded"].update(steps=9), "profiles.reward"),
        ("v2", lambda content: content["bases"]["esi"]["embedded"].update(seed=9), "bases.esi"),
        ("v2", lambda content: content["gates"]["esi"].update(least_cases=9), "gates.esi"),
        ("v2", lambda content: content["plans"]["esi"]["budget"].update(looks=9), "plans.esi"),
        ("v2", lambda content: content["datasets"]["x1"].update(seed=9), "data set x1"),
        ("v2-full", lambda content: content["merges"]["folds"]["v2-full"].update(version="v1"), "merges: v2-full"),
    ],
)
def test_a_release_stops_if_anything_was_edited_that_it_is_about(name, edit, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = deepcopy(dolls.PARAMS | examined.SECTIONS | {"plans": {"esi": PLAN}})
    YAML().dump(content, Path("params.yaml"))
    before = load_params()
    edit(content)
    YAML().dump(content, Path("params.yaml"))
    with pytest.raises(ParamsError, match=f": {says} has changed, so {name} is not released"):
        standing.check_unchanged(before, name)


def test_the_same_question_is_written_down_once(params):
    assert decisions.decide(params, "v2") == decisions.decide(params, "v2")
    assert kinds() == ["decision"]


def test_promoting_twice_is_promoting_once(params):
    decision = decisions.decide(params, "v2")
    first = examined.promote(params, "v2", ADA, decision)
    assert examined.promote(params, "v2", ADA, decision) == first
    assert kinds() == ["decision", "approval", "promotion"]


@after("v1")
def test_the_champion_before_is_kept_and_brought_back_and_forth(params):
    assert (champion(), versions.holder("esi", "previous").name) == ("v1", "v2")
    assert standing.outcome(params, "v2") == "v2 gave way to v1"
    with pytest.raises(GateError, match="v1, number 1, is the champion of esi; nothing was rolled back"):
        promotion.rollback(params, "esi", approver=ADA, of=versions.find("esi", "v2").digest)

    promotion.rollback(params, "esi", approver=ADA)
    assert (champion(), versions.holder("esi", "previous").name) == ("v2", "v1")
    with pytest.raises(
        GateError, match="the champion of esi; `clinrl rollback esi --approver NAME --from 2` undoes that"
    ):
        promotion.rollback(params, "esi", approver=ADA)
    assert (champion(), kinds()[-2:]) == ("v2", ["promotion", "rollback"])
    promotion.rollback(params, "esi", approver=ADA, of=versions.find("esi", "v2").digest)
    assert (champion(), versions.holder("esi", "previous").name) == ("v1", "v2")
    assert kinds()[-2:] == ["rollback", "rollback"]


@pytest.mark.long
@after("v1")
def test_an_earlier_champion_is_brought_back_by_name(params):
    promoted(params, "v1-v2")
    promotion.rollback(params, "esi", approver=ADA)
    with pytest.raises(GateError, match="undoes that; --to names an earlier one"):
        promotion.rollback(params, "esi", approver=ADA)
    earlier = versions.find("esi", "v2").digest
    promotion.rollback(params, "esi", approver=ADA, to=earlier)
    assert (champion(), versions.holder("esi", "previous").name, kinds()[-1]) == ("v2", "v1", "rollback")
    with pytest.raises(GateError, match="v2 is the champion of esi already; nothing was rolled back"):
        promotion.rollback(params, "esi", approver=ADA, to=earlier)
    for stranger in ("v3", "v1-v2"):
        with pytest.raises(GateError, match=r"was never champion of esi|rolled v1-v2 back.*--from 2 --to 4`"):
            promotion.rollback(params, "esi", approver=ADA, to=versions.find("esi", stranger).digest)


@after("v1")
def test_what_was_rolled_back_does_not_return_though_its_successor_was_approved_anew(params, monkeypatch):
    promotion.rollback(params, "esi", approver=ADA)
    with monkeypatch.context() as patch:
        patch.setattr(promotion, "_needs_approval", lambda *_: True)  # as after a change of keys
        promoted(params, "v2")
    assert kinds()[-2:] == ["approval", "promotion"]
    with pytest.raises(GateError, match=f"{ADA} rolled v1 back"):
        promotion.rollback(params, "esi", approver=ADA)
    assert champion() == "v2"


@after("v1")
def test_a_rollback_needs_no_previous_in_the_registry(params):
    versions.point("esi", "previous", None)
    assert promotion.rollback(params, "esi", approver=ADA).name == "v2"
    assert (champion(), versions.holder("esi", "previous").name) == ("v2", "v1")
    versions.point("esi", "previous", None)
    versions.point("esi", "champion", versions.find("esi", "v3"))  # by hand
    with pytest.raises(GateError, match="v3 has the name of a champion of esi"):
        promotion.rollback(params, "esi", approver=ADA)


@after("v1")
def test_nothing_is_rolled_back_to_a_version_that_the_registry_lost(params):
    with connect() as client:
        client.delete_model_version("esi", str(versions.find("esi", "v2").number))
    with pytest.raises(GateError, match=r"esi has lost the version that was champion by .*; register it again"):
        promotion.rollback(params, "esi", approver=ADA)
    assert (champion(), kinds()[-1]) == ("v1", "promotion")


@pytest.mark.long
@after("v1")
def test_after_a_rollback_a_promotion_is_told_again(params):
    promotion.rollback(params, "esi", approver=ADA)
    promoted(params, "v1")
    assert champion() == "v1"
    assert kinds()[-2:] == ["approval", "promotion"]
    body = audit_log.lines(params)[-1].body
    approved = moves.approval_of(params, versions.holder("esi", "champion"))
    assert approved == (body["approval"], body["approved"]), "the last of two"
    promoted(params, "v1-v2")
    assert standing.outcome(params, "v1") == "v1 gave way to v1-v2", "it came back since it was rolled back"


def test_what_was_trained_on_a_waiver_is_never_released_in_whatever_model(params):
    manifest = paths.adapter("v2") / "manifest.json"
    content = json.loads(manifest.read_text())
    write_json(manifest, content | {"spec": content["spec"] | {"waiver": "A control.", "placebo": "random"}})
    for name in [name for name in (*params.versions, *params.merges.all) if "v2" in params.parts(name)]:
        with pytest.raises(GateError, match=rf"{name} was trained on a waiver \(A control.\) and is never released"):
            decisions.decide(params, name)


def test_silence_is_no(params):
    decision = decisions.decide(params, "v2")
    for approver in ("", "   ", "x", "Ada\nLovelace", "a" * 81):
        with pytest.raises(GateError, match="name of the person"):
            examined.promote(params, "v2", approver, decision)
    assert champion() is None
    assert kinds() == ["decision"]


@pytest.mark.long
def test_full_models_have_a_champion_of_their_own(params):
    promoted(params, "v1")
    decision = decisions.decide(params, "v2-full")
    assert (decision.model, decision.champion, decision.promote) == ("esi-merged", None, True)

    entry = examined.promote(params, "v2-full", ADA, decision)

    assert (entry.model, entry.aliases, champion()) == ("esi-merged", ("champion",), "v1")
    with pytest.raises(GateError, match="esi-merged had no champion before v2-full; there is nothing to roll back to"):
        promotion.rollback(params, "esi-merged", approver=ADA)
    examined.promote(params, "v1", ADA, decisions.decide(params, "v1"))
    assert kinds() == ["decision", "approval", "promotion"] * 2 + ["decision"]  # v1 against itself, already champion


@after("v2")
def test_a_blend_that_is_an_adapter_competes_with_the_versions(params):
    decision = decisions.decide(params, "v1-v2")
    assert (decision.model, decision.champion, decision.promote) == ("esi", "v2", True)
    examined.promote(params, "v1-v2", ADA, decision)
    assert champion() == "v1-v2"
    assert promotion.rollback(params, "esi", approver=ADA).name == "v2"


def test_a_decision_is_void_once_the_champion_is_another(params):
    decision = decisions.decide(params, "v1")
    promoted(params, "v2")
    with pytest.raises(GateError, match="v2 became the champion of esi after the decision on v1"):
        examined.promote(params, "v1", ADA, decision)
    assert champion() == "v2"


def test_a_decision_is_about_one_adapter(params):
    decision = decisions.decide(params, "v2")
    with pytest.raises(GateError, match="another adapter than the v1"):
        examined.promote(params, "v1", ADA, decision)
    examined.train("v2", seed=1)
    dolls.examine(params, "v2", examined.GOOD)
    locks.record(params)
    with pytest.raises(GateError, match="not those of the v2 that is registered; run `clinrl register v2`"):
        decisions.decide(params, "v2")


@pytest.mark.long
@after("v2")
def test_a_champion_whose_name_was_trained_anew_is_compared_by_the_answers_that_were_kept(params):
    examined.train("v2", seed=1)
    dolls.examine(params, "v2", [5])
    locks.record(params)
    versions.register(params, "v2")
    refused = decisions.decide(params, "v2")  # the new one, against the old
    assert (refused.champion, refused.promote) == ("v2", False)
    assert refused.candidate_digest != refused.champion_digest
    assert decisions.decide(params, "v1").promote
    shutil.rmtree(".clinrl/champions")
    with pytest.raises(ArtefactError, match=r"another adapter than the champion v2; bring .* give what is new a name"):
        decisions.decide(params, "v1")


@after("v2")
def test_answers_of_the_champion_that_a_clone_has_not_pulled_are_not_here(params):
    shutil.rmtree(".clinrl/champions")
    shutil.rmtree(paths.graded("v2"))
    with pytest.raises(ArtefactError, match="data/graded/v2 is not here; run `dvc pull --with-deps evaluate@v2`"):
        decisions.decide(params, "v1")


@after("v2")
def test_answers_of_the_champion_that_nobody_recorded_or_approved_are_no_rival(params):
    dolls.examine(params, "v2", examined.RIGHT)
    with pytest.raises(ArtefactError, match="holds other answers of the champion v2 than "):
        decisions.decide(params, "v1")


@pytest.mark.long
def test_a_version_that_returns_to_its_first_adapter_is_found_by_it(params):
    first = versions.find("esi", "v2")
    shutil.copytree("data", "kept")
    examined.train("v2", seed=1)
    dolls.examine(params, "v2", examined.GOOD)
    locks.record(params)
    assert versions.register(params, "v2").number == 5
    shutil.rmtree("data")
    shutil.move("kept", "data")
    locks.record(params)
    assert versions.register(params, "v2").aliases == ("candidate",), "in place of the later one with its name"
    assert promoted(params, "v2").number == first.number


def test_two_promotions_at_once_are_one(params):
    decision = decisions.decide(params, "v2")
    for move in (
        lambda: examined.promote(params, "v2", ADA, decision),
        lambda: promotion.settle(params, "v2"),
        lambda: promotion.rollback(params, "esi", approver=ADA),
    ):
        with promotion._exclusive("esi"), pytest.raises(Busy):
            move()
    assert champion() is None


def test_a_kill_after_the_alias_moved_is_made_good(params):
    decision = decisions.decide(params, "v2")
    examined.promote(params, "v2", ADA, decision)
    lines = paths.AUDIT_LOG.read_text().splitlines(keepends=True)
    paths.AUDIT_LOG.write_text("".join(lines[:-1]))  # killed before the last line

    examined.promote(params, "v2", ADA, decision)

    assert kinds() == ["decision", "approval", "promotion"]


@after("v2")
def test_a_kill_before_the_audit_file_was_told_is_made_good_by_the_next_release(params):
    lines = paths.AUDIT_LOG.read_text().splitlines(keepends=True)
    paths.AUDIT_LOG.write_text("".join(lines[:-1]))
    versions.point("esi", "candidate", versions.find("esi", "v2"))
    assert decisions._champion(params, "esi", versions.find("esi", "v1").digest).name == "v2"  # which was approved

    promotion.settle(params, "v2")

    assert kinds() == ["decision", "approval", "promotion"]
    assert versions.find("esi", "v2").aliases == ("champion",)
    promotion.settle(params, "v2")
    assert kinds() == ["decision", "approval", "promotion"]


def test_a_retried_promotion_repeats_no_approval(params, monkeypatch):
    decision = decisions.decide(params, "v2")
    with monkeypatch.context() as patch:
        patch.setattr(versions, "point", lambda *_: (_ for _ in ()).throw(RegistryError("away")))
        for _ in range(2):
            with pytest.raises(RegistryError):
                examined.promote(params, "v2", ADA, decision)
    examined.promote(params, "v2", ADA, decision)
    assert kinds() == ["decision", "approval", "promotion"]


@after("v2")
def test_an_approval_that_moved_no_name_promotes_nothing(params, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(versions, "point", lambda *_: (_ for _ in ()).throw(RegistryError("away")))
        with pytest.raises(RegistryError):
            promoted(params, "v1")
    before = kinds()
    versions.point("esi", "candidate", versions.find("esi", "v1"))
    assert promotion.settle(params, "v1") is None
    assert promotion.settle(params, "v2").name == "v2"
    assert promotion.vouch(params, "read") == []  # no key was revoked
    assert kinds() == before
    assert versions.find("esi", "v1").aliases == ("candidate",)


def test_a_name_moved_by_hand_is_not_taken_for_a_promotion(params):
    versions.point("esi", "champion", versions.find("esi", "v3"))
    decision = decisions.judge(params, "v3", None).model_copy(update={"promote": True})
    for attempt in (
        lambda: examined.promote(params, "v3", ADA, decision),
        lambda: promotion.settle(params, "v3"),
    ):
        with pytest.raises(GateError, match="somebody moved the name by hand"):
            attempt()
    versions.point("esi", "champion", None)
    promoted(params, "v2")
    versions.point("esi", "previous", versions.find("esi", "v3"))
    with pytest.raises(GateError, match=r"v3 has the name of a champion of esi, but .* has no approval"):
        promotion.rollback(params, "esi", approver=ADA)
    assert champion() == "v2"


@after("v1")
def test_a_name_moved_by_hand_is_not_explained_by_an_approval_of_long_ago(params):
    before = kinds()
    versions.point("esi", "champion", versions.find("esi", "v2"))
    with pytest.raises(GateError, match="somebody moved the name by hand"):
        promotion.settle(params, "v2")
    assert kinds() == before


@after("v2")
def test_a_rollback_between_a_scheduled_promotion_and_its_merge_says_to_merge_first(params):
    """The retraining wrote into the audit log of its clone, and the names of the registry have moved for all."""
    held = paths.AUDIT_LOG.read_text()
    promoted(params, "v1")
    paths.AUDIT_LOG.write_text(held)
    for of in ("", versions.find("esi", "v2").digest):
        with pytest.raises(GateError, match=r"v1 has the name .*promoted it, merge its branch first"):
            promotion.rollback(params, "esi", approver=ADA, of=of)
    assert champion() == "v1"


@after("v2")
def test_an_approval_is_not_good_for_the_same_question_after_the_name_moved(params):
    first = decisions.decide(params, "v1")
    token = approval.sign_approval(params, first.digest, ADA)
    promotion.promote(params, "v1", decision=first, approval=token)
    promotion.rollback(params, "esi", approver=ADA)
    again = decisions.decide(params, "v1")
    with pytest.raises(SignatureError, match="no approval of the decision"):
        promotion.promote(params, "v1", decision=again, approval=token)
    assert champion() == "v2"


def test_files_that_changed_while_a_person_thought_are_not_promoted(params):
    decision = decisions.decide(params, "v2")
    with (paths.graded("v2") / "think.jsonl").open("a") as stream:
        stream.write("\n")
    with pytest.raises(ArtefactError, match="was altered since"):
        examined.promote(params, "v2", ADA, decision)
    assert champion() is None


def alter_registered():
    """Another line in the code of all registered models, after somebody signed them."""
    for code in list(Path("mlruns").rglob("code/clinrl/tasks/esi/answer.py")):
        altered = code.read_text() + "\n"
        code.unlink()  # a link to the file of which other tests make copies
        code.write_text(altered)


def test_what_was_altered_in_the_registry_is_neither_decided_upon_nor_promoted(params):
    decision = decisions.decide(params, "v2")
    alter_registered()
    with pytest.raises(SignatureError, match="was altered after"):
        decisions.decide(params, "v2")
    with pytest.raises(SignatureError, match="was altered after"):
        examined.promote(params, "v2", ADA, decision)
    assert (champion(), kinds()) == (None, ["decision"])


@after("v1")
def test_what_was_altered_in_the_registry_is_not_brought_back(params):
    alter_registered()
    with pytest.raises(SignatureError, match="was altered after"):
        promotion.rollback(params, "esi", approver=ADA)
    assert (champion(), kinds()[-1]) == ("v1", "promotion")


@after("v1")
def test_what_was_rolled_back_does_not_return_by_an_approval_that_moved_no_name(params, monkeypatch):
    promotion.rollback(params, "esi", approver=ADA)
    killed_between_the_names(params, monkeypatch, "v1")
    with pytest.raises(GateError, match=f"{ADA} rolled v1 back"):
        promotion.rollback(params, "esi", approver=ADA)
    assert champion() == "v2"


@pytest.mark.parametrize(("moved", "undone"), [(1, False), (2, False), (2, True)])
@after("v1")
def test_a_rollback_killed_half_way_is_completed_by_the_same_command(params, monkeypatch, moved, undone):
    """The same for one that undoes another, which names the version to replace."""
    of = promotion.rollback(params, "esi", approver=ADA).digest if undone else ""
    target, source = ("v1", "v2") if undone else ("v2", "v1")
    point, calls = versions.point, []

    def dying(*arguments):
        calls.append(arguments)
        if len(calls) > moved:
            raise KeyboardInterrupt
        point(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(versions, "point", dying)
        patch.setattr(audit_log, "append", lambda *_, **__: dying())
        with pytest.raises(KeyboardInterrupt):
            promotion.rollback(params, "esi", approver=ADA, of=of)
    for attempt in (decisions.decide, promotion.settle):
        with pytest.raises(
            GateError, match=f"give `clinrl rollback esi --approver NAME{' --from 2' if undone else ''}` again"
        ):
            attempt(params, target)

    assert promotion.rollback(params, "esi", approver=ADA, of=of).name == target

    assert versions.find("esi", source).aliases == ("previous",)
    assert kinds()[-1] == "rollback"
    assert kinds().count("rollback") == 1 + undone


@after("v1")
def test_a_rollback_after_a_promotion_that_was_cut_short_goes_back_from_it(params):
    lines = paths.AUDIT_LOG.read_text().splitlines(keepends=True)
    paths.AUDIT_LOG.write_text("".join(lines[:-1]))

    assert promotion.rollback(params, "esi", approver=ADA).name == "v2"

    assert kinds()[-2:] == ["promotion", "rollback"]
    assert champion() == "v2"


def killed_between_the_names(params, monkeypatch, name):
    """A promotion that moved `previous` and not `champion`; the decision that it was about."""
    decision, point = decisions.decide(params, name), versions.point

    def dying(model, alias, entry):
        if alias == "champion":
            raise KeyboardInterrupt
        point(model, alias, entry)

    with monkeypatch.context() as patch:
        patch.setattr(versions, "point", dying)
        with pytest.raises(KeyboardInterrupt):
            examined.promote(params, name, ADA, decision)
    assert versions.holder("esi", "previous") == versions.holder("esi", "champion")
    return decision


@after("v1")
def test_after_a_promotion_that_was_killed_between_the_names_a_rollback_goes_to_the_champion_before(
    params, monkeypatch
):
    decision = killed_between_the_names(params, monkeypatch, "v1-v2")

    assert promotion.rollback(params, "esi", approver=ADA).name == "v2"

    assert (champion(), versions.holder("esi", "previous").name) == ("v2", "v1")
    assert kinds()[-2:] == ["approval", "rollback"]
    standing.check_servable(params, versions.holder("esi", "champion"), "champion")
    with pytest.raises(GateError, match="v2 became the champion of esi after the decision on v1-v2"):
        examined.promote(params, "v1-v2", ADA, decision)
    assert promotion.rollback(params, "esi", approver=ADA, of=versions.find("esi", "v2").digest).name == "v1"


@after("v2")
def test_a_first_champion_has_nobody_before_it_though_a_promotion_was_killed(params, monkeypatch):
    decision = killed_between_the_names(params, monkeypatch, "v1")
    link = lineage.walk(params, "v1")[-1]
    assert (link.link, link.state) == ("approver", "open"), "approved, and never promoted"
    with pytest.raises(GateError, match="there is nothing to roll back to"):
        promotion.rollback(params, "esi", approver=ADA)
    examined.promote(params, "v1", ADA, decision)
    assert (champion(), promotion.rollback(params, "esi", approver=ADA).name) == ("v1", "v2")


@pytest.mark.long
@after("v2")
def test_a_decision_that_comes_back_is_told_again(params):
    first = decisions.decide(params, "v1-v2")
    promoted(params, "v1")
    second = decisions.decide(params, "v1-v2")
    assert (first.champion, second.champion) == ("v2", "v1")
    promotion.rollback(params, "esi", approver=ADA)
    again = decisions.decide(params, "v1-v2")
    assert again == first.model_copy(update={"moved": again.moved})
    lines = audit_log.read(paths.AUDIT_LOG, keyring())
    assert [line.body["champion"] for line in lines if line.body.get("candidate") == "v1-v2"] == ["v2", "v1", "v2"]


@pytest.mark.long
def test_a_fold_must_keep_up_with_its_own_version(params):
    dolls.examine(params, "v2-full", [4])
    locks.record(params)
    versions.register(params, "v2-full")
    decision = decisions.decide(params, "v2-full")
    assert decision.champion is None
    assert not decision.promote
    assert any("against v2 on the same cases" in reason for reason in decision.reasons)


def test_what_cannot_be_decided_is_said(params):
    bare = params.model_copy(update={"gates": {}})
    with pytest.raises(GateError, match="no gate for esi"):
        decisions.decide(bare, "v2")
    with pytest.raises(GateError, match="no champion to roll back"):
        promotion.rollback(params, "esi", approver=ADA)
    promoted(params, "v2")
    with pytest.raises(GateError, match="esi had no champion before v2; there is nothing to roll back to"):
        promotion.rollback(params, "esi", approver=ADA)


def test_what_was_never_registered_is_not_decided_upon(params):
    shutil.rmtree("mlruns")
    with pytest.raises(RegistryError):
        decisions.decide(params, "v2")
    assert kinds() == []


def test_a_no_is_written_down(params):
    decision = decisions.decide(params, "v2")
    promotion.refuse(params, decision, "no answer in time")
    assert audit_log.read(paths.AUDIT_LOG, keyring())[-1].body["reason"] == "no answer in time"
    assert standing.outcome(params, "v2").startswith("v2 was not approved (no answer in time)")
    assert standing.outcome(params, "v1") is None
    assert champion() is None


PLAN = {
    "changes": {"ancestors": ["esi-base"], "exam": "x1", "most_cases": 30, "recipes": ["imitate", "reward"]},
    "protocol": {"screen": 0.05},
    "budget": {"alpha": 0.2, "spend": 0.6, "looks": 2},
    "impact": "A worse model under-triages more patients.",
}


def planned(**changes):
    """The project's params with a change plan; `changes` replaces parts of its sections."""
    plan = {key: {**part, **changes.get(key, {})} if isinstance(part, dict) else part for key, part in PLAN.items()}
    return dolls.params(**examined.SECTIONS, plans={"esi": plan})


def left():
    """What the last decision on the exam left."""
    bodies = [line.body for line in audit_log.read(paths.AUDIT_LOG, keyring()) if "budget" in line.body]
    return bodies[-1]["budget"]["left_after"]


@pytest.mark.long
@after("v2")
def test_a_release_spends_of_the_budget_and_the_same_question_nothing_more(params):
    refused = decisions.decide(planned(), "v3")
    assert (refused.budget.number, refused.budget.level) == (1, pytest.approx(0.12))
    assert versions.find("esi", "v3").tags["budget_left"] == "0.08"
    lines = kinds()
    assert decisions.decide(planned(), "v3") == refused
    assert kinds() == lines

    better = decisions.decide(planned(), "v1")
    assert (better.promote, better.budget.number, left()) == (True, 2, pytest.approx(0.048))
    again, spent = decisions.decide(planned(), "v3").budget, refused.budget
    assert (again.number, again.level) == (spent.number, spent.level), "asked again after another, still no look"
    assert (spent.left_after, again.left_after) == (pytest.approx(0.08), pytest.approx(0.048))
    examined.promote(planned(), "v1", ADA, decisions.decide(planned(), "v1"))
    assert champion() == "v1"


@after("v2")
def test_a_used_up_budget_refuses_what_is_new_alone(params):
    plan = planned(budget={"looks": 1})
    decisions.decide(plan, "v3")
    assert "the error budget of x1 is used up" in change_control.no_look_left(plan, "esi")
    with pytest.raises(GateError, match=r"the error budget of x1 is used up: 1 decisions .* draw a fresh exam"):
        decisions.decide(plan, "v1")
    assert not decisions.decide(plan, "v3").promote
    assert change_control.no_look_left(planned(), "esi") is None
    assert change_control.no_look_left(params, "esi") is None
    assert change_control.missing_resit(params, "v9", "x2") is None  # a champion that was cut from params.yaml


@pytest.mark.long
@after("v2")
def test_after_a_used_up_exam_the_champion_takes_a_fresh_one_and_keeps_its_own(params):
    decisions.decide(planned(budget={"looks": 1}), "v3")
    x2 = {"datasets": examined.DATASETS | {"x2": examined.DATASETS["x1"] | {"seed": 38}}}
    versions_on = {"v1": dolls.PARAMS["versions"]["v1"] | {"exam": "x2"}}
    plan = {"esi": PLAN | {"changes": PLAN["changes"] | {"exam": "x2"}, "budget": PLAN["budget"] | {"looks": 1}}}
    merges = {"merges": {"folds": examined.MERGES["folds"], "blends": {}}}
    sections = examined.SECTIONS | x2 | merges | {"plans": plan, "versions": dolls.PARAMS["versions"] | versions_on}
    fresh = dolls.params(**sections)
    dataset.stage(fresh, "x2")
    write_json(paths.data_proof("x2"), {"data": {"name": "x2", "identity": identity(read_manifest(paths.cases("x2")))}})
    write_text(paths.data_docs("x2") / "index.html", "<html>x2</html>")
    examined.examine(fresh, "v1", examined.RIGHT)
    versions.register(fresh, "v1")
    assert change_control.no_look_left(fresh, "esi").startswith("the champion v2 takes another exam than x2; its line ")
    with pytest.raises(
        ArtefactError, match=r"v2 takes another exam than x2; its line .* must be `v2: {task: esi, data: x2}`"
    ):
        decisions.decide(fresh, "v1")

    fresh = dolls.params(**sections, resits={"v2": {"task": "esi", "data": "x2"}})
    own = md5(paths.graded("v2"))
    answered = dolls.answered(fresh, "v2", "x2", examined.GOOD)
    evaluate.keep(paths.resit("v2"), answered, {"exam": answered.exam_digest, "adapter": answered.adapter_digest})
    with pytest.raises(ArtefactError, match=r"dvc\.lock records no run of resit@v2"):
        decisions.decide(fresh, "v1")
    locks.record(fresh)
    decision = decisions.decide(fresh, "v1")
    assert (decision.promote, decision.champion, decision.budget.number) == (True, "v2", 1)
    assert decision.exam_digest == identity(read_manifest(paths.cases("x2")))
    assert md5(paths.graded("v2")) == own
    examined.promote(fresh, "v1", ADA, decision)
    assert champion() == "v1"


@after("v2")
def test_a_version_outside_the_plan_is_refused_before_the_exam_is_looked_at(params):
    before = kinds()
    for changes, names in (
        ({"recipes": ["reward"]}, "profiles.imitate.lora.alpha|profiles.imitate.method"),
        ({"most_cases": 29}, "versions.v1.data is 'd1' with 30 cases"),
        ({"ancestors": ["v3"]}, "versions.v1.parent is 'esi-base', which leads to none of v3"),
    ):
        with pytest.raises(GateError, match=f"v1 is outside plans.esi.changes: ({names})"):
            decisions.decide(planned(changes=changes), "v1")
    with pytest.raises(GateError, match=r"v1-v2 is outside plans\.esi\.changes: it is a blend"):
        decisions.decide(planned(), "v1-v2")
    with pytest.raises(GateError, match="v1 is outside"):
        decisions.decide(planned(changes={"most_cases": 29, "ancestors": ["esi-base", "v1-v2"]}), "v1-v2")
    fewer = {"datasets": examined.DATASETS | {"d1": examined.DATASETS["d1"] | {"cases": 20}}}
    plans = {"esi": PLAN | {"changes": PLAN["changes"] | {"most_cases": 29}}}
    with pytest.raises(GateError, match=r"versions\.v1\.data is 'd1' with 30 cases"):  # which params.yaml now halves
        decisions.decide(dolls.params(**examined.SECTIONS | fewer, plans=plans), "v1")
    assert kinds() == before
    decisions.decide(planned(changes={"most_cases": 29}), "v2")  # the champion was decided on before


def test_without_a_champion_there_is_nothing_to_be_better_than(params):
    decision = decisions.decide(planned(), "v2")
    assert (decision.promote, decision.budget) == (True, None)
    assert "budget" not in audit_log.read(paths.AUDIT_LOG, keyring())[-1].body


@pytest.mark.long
@after("v2")
def test_a_full_model_of_the_champion_claims_nothing_new_and_that_of_another_version_does(params):
    for name in ("v2", "v2-full"):
        decision = decisions.decide(planned(), name)
        assert (decision.promote, decision.budget) == (True, None)
    promoted(planned(), "v2-full")
    trained_anew(params)
    assert decisions.decide(planned(), "v2-full").budget.number == 1
    former = versions.holder("esi", "champion")
    versions.point("esi", "champion", versions.find("esi", "v2", digest=identity(read_manifest(paths.adapter("v2")))))
    full = versions.holder("esi-merged", "champion")
    assert decisions.judge(planned(), "v2-full", full).budget.number == 1, "moved by hand"
    versions.point("esi", "champion", former)
    promoted(planned(), "v2")  # shown to be better than the one of which the champion is made
    assert decisions.judge(planned(), "v2-full", full).budget is None


@pytest.mark.long
@after("v2")
def test_decisions_of_before_there_was_a_plan_are_read_and_spend_nothing(params):
    old = decisions.decide(params, "v1")
    assert (old.promote, old.budget) == (True, None)
    assert decisions.decide(planned(), "v1").budget.number == 1


@after("v2")
def test_a_decision_that_another_one_overtook_is_made_anew(params, monkeypatch):
    judged = decisions.judge(planned(), "v1", versions.holder("esi", "champion"))
    decisions.decide(planned(), "v3")
    monkeypatch.setattr(decisions, "judge", lambda *_: judged)
    before = kinds()
    with pytest.raises(GateError, match="another decision looked at this exam while v1 was decided; decide again"):
        decisions.decide(planned(), "v1")
    assert kinds() == before


@after("v1")
def test_a_champion_may_be_asked_that_was_approved_or_brought_back_and_no_other(params):
    def check(alias="champion"):
        standing.check_servable(params, versions.holder("esi", alias), alias)

    check()
    versions.point("esi", "champion", versions.find("esi", "v2"))
    with pytest.raises(GateError, match=r"v2 is the champion of esi by name only: .* no approval that made it so"):
        check()
    versions.point("esi", "champion", versions.find("esi", "v1"))
    promotion.rollback(params, "esi", approver=ADA)
    assert champion() == "v2"
    check()
    decisions.decide(params, "v3")
    versions.point("esi", "candidate", versions.find("esi", "v3"))
    versions.tag(versions.find("esi", "v3"), {"gate": "passed"})  # the audit log knows better
    with pytest.raises(GateError, match="v3 was refused by its gate, or trained on a waiver, and is no candidate"):
        check("candidate")
    undecided = versions.find("esi", "v3").model_copy(update={"digest": "0" * 64, "tags": {}})
    standing.check_servable(params, undecided, "candidate")
    for tags in ({"gate": "refused"}, {"waiver": "A control."}):  # as the registry alone tells
        with pytest.raises(GateError, match="is no candidate"):
            standing.check_servable(params, undecided.model_copy(update={"tags": tags}), "candidate")
    log = paths.AUDIT_LOG.read_text()
    paths.AUDIT_LOG.write_text(log.replace(ADA, "Eve", 1))
    with pytest.raises(ArtefactError, match=r"decisions\.jsonl"):
        check()


@pytest.mark.long
@after("v1")
def test_after_a_change_of_keys_the_champion_is_approved_anew(params):
    """As SECURITY.md says how: the old line is trusted, which makes nobody an approver."""
    old = keys.keyring()[keys.OURS]
    for file in (keys.PUBLIC, keys.PRIVATE):
        file.unlink()
    keys.init()
    keys.trust("Before", old)
    held, before = versions.holder("esi", "champion"), versions.holder("esi", "previous")
    with pytest.raises(SignatureError):
        standing.check_servable(params, held, "champion")
    count = len(kinds())
    for _ in range(2):  # the second changes nothing
        registry_commands.promote(params, "v1", approver=ADA)
        standing.check_servable(params, versions.holder("esi", "champion"), "champion")
    assert kinds()[count:] == ["decision", "approval", "promotion"]
    assert (champion(), versions.holder("esi", "previous")) == ("v1", before)
    promotion.rollback(params, "esi", approver=ADA)
    assert champion() == "v2"
