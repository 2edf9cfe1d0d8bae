"""Lineage: every link holds, and each one that is broken is named, and no other."""

import json
import re
import shutil
import subprocess
from contextlib import chdir
from pathlib import Path

import pytest

import dolls
import examined
import locks
from clinrl import paths
from clinrl.artifacts import MANIFEST, canonical_json, identity, read_manifest, sha256_file, write_json
from clinrl.data import dataset
from clinrl.errors import ArtefactError, ParamsError
from clinrl.evaluation import evaluate
from clinrl.provenance import lock
from clinrl.registry import versions
from clinrl.release import audit_log, decisions, lineage, promotion
from clinrl.signing.keys import keyring, signer
from clinrl.site.standing import History, standing
from clinrl.site.versions import examined as examined_reports
from clinrl.tracking.mlflow_store import connect

pytestmark = pytest.mark.usefixtures("few_draws")

LINKS = ["files", "parent", "base", "data", "exam", "lock", "provenance", "registry"]
UNSIGNED = {("unrecorded", "provenance")}
"""No stage ran here, so nobody signed what one made; all else holds."""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    root = tmp_path_factory.mktemp("lineage")
    examined.copy(examined.registered(), root)
    params = examined.params()
    with chdir(root):
        for name in ("v2", "v2-full"):
            dolls.examine(params, name, examined.RIGHT)
        locks.record(params)
        for name in ("v1", "v2", "v2-full"):
            versions.register(params, name)
            examined.promote(params, name, "Ada Lovelace", decisions.decide(params, name))
    return root, params


@pytest.fixture
def params(built, tmp_path, monkeypatch):
    root, params = built
    examined.copy(root, tmp_path)
    monkeypatch.chdir(tmp_path)
    return params


@pytest.fixture
def shown(built, monkeypatch):
    """The project itself, entered: only read it."""
    root, params = built
    monkeypatch.chdir(root)
    return params


def broken(params, name="v2"):
    return {(link.version, link.link): link.says for link in lineage.walk(params, name) if link.state == "broken"}


@pytest.mark.long
def test_a_released_lineage_holds_from_the_approver_to_the_base(shown):
    links = lineage.walk(shown, "v2")
    assert [(link.version, link.link) for link in links] == [
        *(("v2", link) for link in LINKS), *(("v1", link) for link in LINKS), ("v2", "gate"), ("v2", "approver"),
    ]  # fmt: skip
    assert {(link.state, link.link) for link in links if link.state != "holds"} == UNSIGNED
    said = {(link.version, link.link): link.says for link in links}
    assert said["v1", "provenance"].startswith("nobody here signed what probe@v1, ")
    assert "`dvc repro --force --single-item probe@v1 train@v1 " in said["v1", "provenance"]
    assert said["v2", "registry"] == "is version 2 of the registered model esi, champion"
    assert (
        "passed the gate: cases (all modes) 40 for min 10, critical_under (think) 0 for max 0.35" in said["v2", "gate"]
    )
    assert re.search(r", \d+ comparisons with simple policies$", said["v2", "gate"])
    assert said["v2", "approver"].startswith("was approved by Ada Lovelace at ")
    assert (said["v2", "base"], "rebuilds it" in said["v1", "base"]) == ("was trained on data/bases/esi", True)
    assert all(len(link.digest) == 64 for link in links if link.state == "holds")


def test_a_full_model_leads_to_its_version_and_on_to_the_base(shown):
    links = lineage.walk(shown, "v2-full")
    own = ["files", "parent", "base", "exam", "lock", "provenance", "registry"]
    assert [(link.version, link.link) for link in links] == [
        *(("v2-full", link) for link in own), *(("v2", link) for link in LINKS), *(("v1", link) for link in LINKS),
        ("v2-full", "gate"), ("v2-full", "approver"),
    ]  # fmt: skip
    assert {(link.state, link.link) for link in links if link.state != "holds"} == UNSIGNED
    assert [link.says for link in links[1:2]] == ["is made of v2"]


def test_a_blend_leads_to_both_its_versions(shown):
    links = [(link.version, link.link, link.state) for link in lineage.walk(shown, "v1-v2")]
    assert links[1:3] == [("v1-v2", "parent", "holds")] * 2
    assert [version for version, link, _ in links if link == "files"] == ["v1-v2", "v1", "v2"]
    assert links[-1] == ("v1-v2", "gate", "open")


def test_a_version_that_was_trained_anew_is_not_what_was_merged(params):
    examined.train("v2", seed=1)
    dolls.examine(params, "v2", examined.RIGHT)
    locks.record(params)
    found = broken(params, "v2-full")
    assert set(found) == {("v2-full", "parent"), ("v2", "registry")}
    assert "v2-full was made from another v2" in found["v2-full", "parent"]


def test_every_stage_of_a_version_itself_was_signed_by_who_ran_it(shown, monkeypatch):
    def state(unsigned):
        def of_stages(stages):
            return [(stage, {}) for stage in stages if stage.endswith("@v2") and stage != unsigned]

        monkeypatch.setattr(lineage.statements, "of_stages", of_stages)
        return [link.state for link in lineage.walk(shown, "v2") if link.link == "provenance"]

    assert state("train@v1") == ["holds", "unrecorded"]
    assert state("train@v2") == ["unrecorded", "unrecorded"]


def test_what_nobody_decided_is_open_and_not_broken(shown):
    gate = lineage.walk(shown, "v1-v2")[-1]
    assert (gate.link, gate.state) == ("gate", "open")


def test_a_champion_of_whom_the_audit_file_tells_nothing_is_broken(params):
    paths.AUDIT_LOG.unlink()
    assert ("v2", "gate") in broken(params)


def test_an_unknown_version_is_refused(shown):
    with pytest.raises(ParamsError):
        lineage.walk(shown, "v9")


def test_an_altered_weight_breaks_its_version_and_the_way_from_its_child(params):
    path = paths.adapter("v1") / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    assert set(broken(params)) == {("v1", "files"), ("v2", "parent")}
    assert "was altered after it was built" in broken(params)["v1", "files"]


def test_a_parent_that_was_trained_anew_is_another_parent(params):
    examined.train("v1", seed=1)
    dolls.examine(params, "v1", examined.GOOD)
    locks.record(params)
    found = broken(params)
    assert set(found) == {("v2", "parent"), ("v1", "registry")}
    assert "v2 was made from another parent" in found["v2", "parent"]


def test_data_that_changed_or_lost_its_proof_is_named(params):
    paths.data_proof("d1").unlink()
    assert set(broken(params)) == {("v1", "data"), ("v2", "data")}
    for malformed in ("{", "[]", '{"data": null}'):
        paths.data_proof("d1").write_text(malformed)
        assert "the record is malformed" in broken(params)["v1", "data"]


def test_an_exam_of_another_adapter_is_named(params):
    manifest = paths.graded("v2") / "manifest.json"
    content = json.loads(manifest.read_text())
    content["inputs"]["adapter"] = "0" * 64
    write_json(manifest, content)
    assert set(broken(params)) == {("v2", "exam"), ("v2", "lock")}


@pytest.mark.parametrize(
    ("folder", "change", "link", "says"),
    [
        ("cases/d1", {"spec": {"use": "mine"}}, "data", "d1 is drawn from the mine pool, .* it must be train data"),
        ("cases/x1", {"spec": {"use": "mine"}}, "exam", "x1 is drawn from the mine pool, so it is no exam of v1"),
        ("cases/x1", {"spec": {"seed": 5}}, "exam", "answers another exam than x1 now is; run `dvc repro evaluate@v1`"),
        ("graded/v1", {"inputs": {"adapter": "0" * 64}}, "exam", "graded/v1 was answered by another model; run"),
    ],
)
def test_what_a_version_was_trained_on_or_asked_that_it_may_not_be_is_named(params, folder, change, link, says):
    """A folder that vouches for itself, and everything that names it made to fit."""
    found = resealed(Path("data") / folder, change)
    if folder == "cases/d1":
        resealed(paths.adapter("v1"), {"inputs": {"data": found}})
        write_json(paths.data_proof("d1"), {"data": {"name": "d1", "identity": found}})
    if "use" in change.get("spec", {}) and folder == "cases/x1":
        resealed(paths.graded("v1"), {"inputs": {"exam": found}})
    assert re.search(says, broken(params, "v1")["v1", link])


def resealed(folder, change):
    """Change parts of a manifest. Returns the identity that the folder has then."""
    content = json.loads((folder / "manifest.json").read_text())
    write_json(folder / "manifest.json", content | {part: content[part] | new for part, new in change.items()})
    return identity(read_manifest(folder))


def test_a_resit_is_a_link_that_holds_to_dvc_lock_and_to_the_fresh_exam(params):
    data = examined.DATASETS | {"x2": examined.DATASETS["x1"] | {"seed": 38, "cases": 4}}
    params = dolls.params(**examined.SECTIONS | {"datasets": data}, resits={"v2": {"task": "esi", "data": "x2"}})
    dataset.stage(params, "x2")

    def found():
        (link,) = (link for link in lineage.walk(params, "v2") if link.link == "resit")
        return link.version, link.state, link.says

    assert found() == ("v2", "unrecorded", "dvc.lock records no run of resit@v2; run `dvc repro resit@v2`")
    run = dolls.answered(params, "v2", "x2", examined.GOOD)
    evaluate.keep(paths.resit("v2"), run, {"exam": run.exam_digest, "adapter": run.adapter_digest})
    locks.record(params)
    assert found() == ("v2", "holds", "took x2, drawn from the exam pool, with these very weights")
    cases = paths.cases("x2") / "cases.jsonl"
    cases.write_text((kept := cases.read_text()).replace("1", "2", 1))
    assert found()[1] == "broken"
    cases.write_text(kept)
    for inputs, says in (
        ({"adapter": "0" * 64}, "data/resits/v2 was answered by another model; run `dvc repro resit@v2`"),
        ({"adapter": run.adapter_digest, "exam": "0" * 64}, "data/resits/v2 answers another exam than x2 now is; run "),
    ):
        resealed(paths.resit("v2"), {"inputs": inputs})
        state, reason = found()[1:]
        assert (state, "is not what dvc.lock records of resit@v2" in reason) == ("broken", True)
        locks.record(params)  # whoever can write dvc.lock too
        state, reason = found()[1:]
        assert (state, reason.startswith(says)) == ("broken", True)
    shutil.rmtree(paths.resit("v2"))
    assert found()[1] == "absent"


def test_an_edited_tag_is_named(params):
    versions.tag(versions.find("esi", "v2"), {"data_digest": "0" * 64})
    assert broken(params) == {
        ("v2", "registry"): "the registry's tag data_digest of v2 is not what its manifest says; register it again"
    }
    versions.tag(versions.find("esi", "v2"), {"approver": "Mallory"})
    says = broken(params)["v2", "approver"]
    assert "the registry names 'Mallory' as approver of v2" in says
    assert says.endswith("; `clinrl promote v2 --approver 'Ada Lovelace'` writes it again")
    versions.tag(versions.find("esi", "v1"), {"approver": "Mallory"})
    says = broken(params, "v1")["v1", "approver"]
    assert "`clinrl promote" not in says, "that would decide anew, and make it champion"
    versions.tag(versions.find("esi", "v1"), {"approver": "Ada Lovelace"})
    with connect() as client:
        client.delete_model_version_tag("esi", "2", "data_digest")
    assert "the registry's tag data_digest of v2 is not" in broken(params)["v2", "registry"]
    versions.tag(versions.find("esi", "v2"), {"data_digest": "0" * 64, "decision": "0" * 64})
    assert "none of the audit log's" in broken(params)["v2", "gate"]
    versions.register(params, "v2")
    examined.promote(params, "v2", "Ada Lovelace", decisions.decide(params, "v2"))
    assert not broken(params)
    versions.tag(versions.find("esi", "v2"), {"version": "v9"})
    assert "the registry has lost v2" in broken(params)["v2", "registry"]
    versions.register(params, "v2")
    assert not broken(params)


def test_an_edited_audit_file_is_named(params):
    text = paths.AUDIT_LOG.read_text()
    paths.AUDIT_LOG.write_text(text.replace("Ada Lovelace", "Bea Lovelace", 1))
    assert set(broken(params)) == {("v2", "gate")}
    assert "was altered after it was written" in broken(params)["v2", "gate"]


def test_a_promotion_on_a_decision_that_nobody_made_is_named(params):
    """The line of a real promotion, with another decision."""
    lines = audit_log.read(paths.AUDIT_LOG, keyring())
    (body,) = [line.body for line in lines if line.kind == "promotion" and line.body["version"] == "v2"]
    body |= {"decision": "f" * 64}
    audit_log.append(paths.AUDIT_LOG, "promotion", body, signer=signer("embedded"), keys=keyring())
    says = f"v2 was promoted on a decision that {paths.AUDIT_LOG} does not have as passed"
    assert broken(params) == {("v2", "approver"): says}


def test_a_name_moved_by_hand_is_named(params):
    versions.point("esi", "champion", versions.find("esi", "v1"))
    assert "v2 is not the champion of esi in the registry" in broken(params)["v2", "approver"]
    assert "v1 is the champion of esi in the registry" in broken(params, "v1")["v1", "approver"]
    versions.point("esi", "champion", versions.find("esi", "v1-v2"))  # on which nobody decided
    assert "knows of no decision on it" in broken(params, "v1-v2")["v1-v2", "gate"]


def test_an_approval_of_something_else_is_none_of_this(params):
    """A real approval, put beside a decision that nobody approved."""
    lines = audit_log.read(paths.AUDIT_LOG, keyring())
    bodies = {line.body["version"]: line.body for line in lines if line.kind == "promotion"}
    borrowed = bodies["v2"] | {name: bodies["v1"][name] for name in ("approval", "approved")}
    audit_log.append(paths.AUDIT_LOG, "promotion", borrowed, signer=signer("embedded"), keys=keyring())
    assert "v2 is not made" in broken(params)["v2", "approver"]


def test_lines_that_git_has_may_not_be_cut_off(params):
    for words in (["init", "-q"], ["add", "-f", str(paths.AUDIT_LOG)], ["commit", "-qm", "x"]):
        subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x", *words], check=True)
    assert not broken(params)
    lines = paths.AUDIT_LOG.read_text().splitlines(keepends=True)
    paths.AUDIT_LOG.write_text("".join(lines[:-1]))
    assert "lacks lines that it has in git" in broken(params)["v2", "gate"]
    with pytest.raises(ArtefactError, match="lacks lines that it has in git"):
        decisions.decide(params, "v2")


def test_a_rollback_by_somebody_else_breaks_nothing(params):
    promotion.rollback(params, "esi", approver="Grace Hopper")
    assert not broken(params, "v1")
    assert not broken(params, "v2")


def test_a_registry_that_is_not_there_breaks_its_links_only(params):
    shutil.rmtree("mlruns")
    found = broken(params)
    assert set(found) == {("v1", "registry"), ("v2", "registry"), ("v2", "gate"), ("v2", "approver")}
    assert found["v1", "registry"].endswith("run `clinrl register v1`")
    assert "run `clinrl register v2`, then `clinrl promote v2 --approver NAME`" in found["v2", "registry"]


@pytest.mark.long
def test_a_registry_that_was_lost_is_mended_by_the_commands_that_lineage_names(params):
    """Registered again, and approved by somebody else: the audit log tells of both approvals and both promotions."""
    shutil.rmtree("mlruns")
    for name in ("v1", "v2"):
        versions.register(params, name)
    examined.promote(params, "v2", "Grace Hopper", decisions.decide(params, "v2"))
    assert not broken(params)
    told = [line.kind for line in audit_log.read(paths.AUDIT_LOG, keyring())]
    assert told.count("approval") == told.count("promotion")


def test_a_champion_that_is_decided_again_keeps_the_decision_of_its_release(params):
    def shown():
        log = History(audit_log.lines(params))
        says = [(link.digest, link.says) for link in lineage.walk(params, "v2") if link.link == "gate"]
        return says, standing(params, params.model("v2"), examined_reports(params, "v2").reports, None, log).findings

    before = shown()
    decisions.decide(params, "v2")
    assert audit_log.lines(params)[-1].body["champion"] == "v2"
    assert shown() == before


def test_answers_that_were_sealed_anew_are_named(params):
    """A folder that vouches for itself: every answer made right, its manifest made to fit."""
    lines = [json.loads(line) for line in (paths.graded("v2") / "think.jsonl").read_text().splitlines()]
    lines[0]["answer"] = 1 + lines[0]["answer"] % 5
    (paths.graded("v2") / "think.jsonl").write_text("".join(canonical_json(line) + "\n" for line in lines))
    manifest = json.loads((paths.graded("v2") / "manifest.json").read_text())
    manifest["files"]["think.jsonl"] = sha256_file(paths.graded("v2") / "think.jsonl")
    write_json(paths.graded("v2") / "manifest.json", manifest)
    assert "is not what dvc.lock records of evaluate@v2" in broken(params)["v2", "lock"]
    with pytest.raises(ArtefactError, match=r"is not what dvc\.lock records of evaluate@v2"):
        decisions.decide(params, "v2")
    locks.record(params)  # whoever can write dvc.lock too
    with pytest.raises(ArtefactError, match=r"line 1 gives another answer to .* than its transcript does"):
        decisions.decide(params, "v2")
    with pytest.raises(ArtefactError, match=r"line 1 gives another answer to .* than its transcript does"):
        versions.register(params, "v2")


def test_a_decision_that_is_gone_from_the_audit_log_is_missed_by_the_registry(params):
    """Cut after a whole line, its chain and its signatures hold."""
    lines = paths.AUDIT_LOG.read_text().splitlines(keepends=True)
    last = max(i for i, line in enumerate(lines) if '"kind":"decision"' in line)
    assert json.loads(lines[last])["body"]["candidate"] == "v2-full"
    paths.AUDIT_LOG.write_text("".join(lines[:last]))
    versions.point("esi-merged", "champion", None)
    assert "merge the branch of the retraining that decided" in broken(params, "v2-full")["v2-full", "gate"]


def test_what_is_absent_and_what_was_never_recorded_are_told_apart(params):
    shutil.rmtree(paths.cases("d1"))
    shutil.rmtree(paths.graded("v1"))
    states = {(link.version, link.link): link.state for link in lineage.walk(params, "v2")}
    assert states["v1", "exam"] == states["v1", "data"] == states["v1", "lock"] == "absent"
    (says,) = (link.says for link in lineage.walk(params, "v1") if link.link == "lock")
    assert says.startswith("data/cases/d1 "), "the first of two"
    assert not broken(params)
    Path("dvc.lock").unlink()
    states = {(link.version, link.link): link.state for link in lineage.walk(params, "v2")}
    assert states["v1", "lock"] == states["v2", "lock"] == "unrecorded"
    (says,) = (link.says for link in lineage.walk(params, "v1") if link.link == "provenance")
    assert says == ("nobody here signed what evaluate@v1 made; `dvc repro --force --single-item evaluate@v1` would")
    folder = paths.adapter("v1")
    manifest = read_manifest(folder)
    write_json(folder / MANIFEST, manifest.model_dump(mode="json") | {"spec": {**manifest.spec, "scale": "full"}})
    (says,) = (link.says for link in lineage.walk(params, "v1") if link.link == "provenance")
    assert says.endswith("made; who ran them has what they signed in .clinrl/provenance"), (
        "it may not be made anew alike"
    )


def test_what_a_version_was_made_of_and_examined_on_must_be_here_and_recorded(params):
    exam, held = params.model("v2").exam, lock.read()
    examined_on = [paths.base("esi"), paths.cases(exam), paths.data_proof(exam)]
    for path in (paths.adapter("v2"), *examined_on, paths.graded("v2"), paths.report("v2"), paths.probe_proof("v2")):
        path.rename("away")
        with pytest.raises(ArtefactError, match=rf"{path}(/\w+\.json)? is not here, though dvc\.lock records it"):
            lock.demand(params, "v2")
        Path("away").rename(path)
    lock.demand(params, "v2")
    write_json(Path("dvc.lock"), {"stages": {name: held[name] for name in held if name != "train@v1"}})  # JSON is YAML
    with pytest.raises(ArtefactError, match=r"records no run that made data/adapters/v1, on which evaluate@v1 ran"):
        lock.demand(params, "v2")
    assert {link.state for link in lineage.walk(params, "v2") if link.link == "lock"} == {"unrecorded"}
    outs = [out for out in held["evaluate@v2"]["outs"] if out["path"] != str(paths.graded("v2"))]
    write_json(Path("dvc.lock"), {"stages": {**held, "evaluate@v2": {**held["evaluate@v2"], "outs": outs}}})
    with pytest.raises(ArtefactError, match=r"dvc\.lock records nothing of data/graded/v2"):
        lock.demand(params, "v2")


def test_in_a_clone_a_version_is_absent_and_not_broken(params):
    shutil.rmtree(paths.adapter("v2"))
    links = {(link.version, link.link): link for link in lineage.walk(params, "v2")}
    assert links["v2", "gate"].state == "absent"
    assert links["v2", "gate"].says == (
        "data/adapters/v2 has no manifest.json; run `dvc repro train@v2`, which makes it"
    )
    write_json(paths.adapter("v2") / "manifest.json", {})
    assert set(broken(params)) == {("v2", "files"), ("v2", "gate")}


def test_a_version_that_nobody_registered_is_said_to_be_so_once(tmp_path, monkeypatch):
    examined.copy(examined.registered(), tmp_path)
    monkeypatch.chdir(tmp_path)
    params = examined.params()
    (tmp_path / "mlruns" / "mlflow.db").unlink()
    (link,) = (link for link in lineage.walk(params, "v1") if link.link == "registry")
    assert link.state == "open"
    assert link.says.count("registered") == 1
    assert link.says.endswith("mlflow.db; `clinrl register v1` does it")


def test_what_is_absent_comes_back_from_git_if_that_has_it(params):
    def says(path):
        path.unlink() if path.is_file() else shutil.rmtree(path)
        lock._in_git.cache_clear()
        return next(fact.sentence for fact in lock.facts(lock.read(), "evaluate@v2") if fact.path == str(path))

    Path(".gitignore").write_text("/data/adapters/v2\n")
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (["init", "-q"], ["add", "--all"], [*author, "commit", "-qm", "a"]):
        subprocess.run(["git", *words], check=True)
    proof, adapter = paths.probe_proof("v2"), paths.adapter("v2")
    assert says(proof).endswith(f"restore it with `git checkout {proof}`, or build it with `dvc repro probe@v2`")
    assert f"build it with `dvc repro train@v2`, or restore it with `dvc checkout {adapter}`" in says(adapter)


def test_code_that_was_altered_in_the_store_breaks_the_registry_s_link(params):
    for code in list(Path("mlruns").rglob("code/clinrl/tasks/esi/answer.py")):
        altered = code.read_text() + "\n"
        code.unlink()  # a link to the file of which other tests make copies
        code.write_text(altered)
    said = "".join(broken(params, "v2-full").values()) + "".join(broken(params, "v1-v2").values())
    assert "answer.py' of " in said
    assert "was altered after" in said
