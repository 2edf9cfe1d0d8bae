"""A scheduled retraining works in a clone, hands over a branch, and never touches the checkout."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import scripted
from flows.turns import at_work
from scripted import git

import esi_sources
import examined
import laid
from clinrl import paths
from clinrl.artifacts import sha256_file
from clinrl.config.params import load_params
from clinrl.errors import Busy, Refused
from clinrl.registry import versions
from clinrl.release import audit_log, decisions, lineage
from clinrl.signing.approval import sign_approval
from clinrl.signing.keys import keyring

ROOT = Path(__file__).parents[2]
BRANCH = "built/retrain-esi"
CLONE = Path(".clinrl/clones/retrain-esi-1")
pytestmark = pytest.mark.usefixtures("prefect", "alone")


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """What a clone settles in this process's environment goes with the test."""
    with mock.patch.dict(os.environ, GIT_CONFIG_GLOBAL=str(tmp_path / "none")):
        for name in ("CLINRL_CLONES", "MLFLOW_TRACKING_URI"):
            os.environ.pop(name, None)
        yield


def files() -> dict[str, str]:
    """What a person sees in the checkout: every file that git does not ignore, and what git says of them."""
    listed = git("ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    return {path: sha256_file(Path(path)) for path in listed} | {
        "": git("status", "--porcelain"),
        "@": git("rev-parse", "HEAD"),
    }


def scheduled() -> Any:
    from flows.retrain import scheduled

    return scheduled("esi", return_state=True)


@pytest.fixture
def settled(project: Path) -> Path:
    """A checkout in which v2 is champion and nothing is stale. Its schedule drafts, and asks for a second."""
    from flows.retrain import approved_by

    examined.promote(load_params(), "v2", "Ada Lovelace", decisions.decide(load_params(), "v2"))
    assert approved_by("Ada Lovelace")("esi", return_state=True).is_completed()

    def change(content: Any) -> None:
        scripted.with_drafts(content)
        content["schedules"]["esi"]["answer_within_s"] = 1

    laid.edit(project, change)
    scripted.commit()
    return project


@pytest.mark.slow
def test_a_draft_is_a_branch_and_the_checkout_is_as_it_was(settled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flows import release

    handed, answer = list[str](), release.answer

    def asked(*words: Any) -> Any:
        handed.append(git("-C", str(settled), "show", f"{BRANCH}:{paths.AUDIT_LOG}"))
        return answer(*words)

    monkeypatch.setattr(release, "answer", asked)
    Path("params/esi.yaml").write_text(Path("params/esi.yaml").read_text() + "# half a thought\n")
    Path("notes.txt").write_text("mine")
    before = files()
    state = scheduled()
    assert (state.name, state.is_completed()) == ("Not approved", True), state
    assert '"kind":"decision"' in handed[0].replace(" ", ""), "a machine may die while it waits for a person"
    assert files() == before
    assert "esi-v3" not in load_params().versions
    held = git("ls-tree", "-r", "--name-only", BRANCH).splitlines()
    assert {str(paths.draft("esi-v3")), str(paths.report("esi-v3") / "think.json")} <= {*held}
    assert "train@esi-v3:" in git("show", f"{BRANCH}:dvc.lock")
    assert "half a thought" not in git("show", f"{BRANCH}:params/esi.yaml")

    assert scheduled().name == "Nothing to do"  # the branch was not merged, and no second draft is made
    assert git("rev-list", "--count", f"HEAD..{BRANCH}") == "2"
    assert files() == before

    git("checkout", "--quiet", "--", "params/esi.yaml")
    git("merge", "--quiet", "--ff-only", BRANCH)
    subprocess.run([sys.executable, "-m", "dvc", "checkout", "--quiet", "--with-deps", "evaluate@esi-v3"], check=True)
    assert [line.kind for line in audit_log.read(paths.AUDIT_LOG, keyring())][-2:] == ["decision", "refusal"]
    links = {link.link: link.state for link in lineage.walk(load_params(), "esi-v3") if link.version == "esi-v3"}
    assert (links["files"], links["lock"], links["registry"], links["gate"]) == ("holds",) * 4, links


@pytest.mark.slow
def test_a_promotion_is_handed_over_before_its_full_models_are_made(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This takes hours, in which the machine may die: of the promotion only an alias would be left."""
    from flows import release

    scripted.commit()
    handed, made = list[str](), release.full_model

    def full_model(*names: Any) -> str | None:
        handed.append(git("-C", str(project), "show", f"{BRANCH}:{paths.AUDIT_LOG}"))
        return made(*names)

    monkeypatch.setattr(
        release, "answer", lambda params, decision, _: (sign_approval(params, decision.digest, "Ada Lovelace"), "")
    )
    monkeypatch.setattr(release, "full_model", full_model)
    assert scheduled().is_completed()
    assert '"kind":"promotion"' in handed[0].replace(" ", "")


@pytest.mark.slow
def test_a_run_that_failed_is_continued_by_the_next(settled: Path) -> None:
    Path("fail").write_text("evaluate")
    git("add", "fail")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "it fails today")
    before = files()
    assert scheduled().is_failed()
    assert files() == before
    assert "esi-v3" in git("show", f"{BRANCH}:params/drafts.yaml")
    git("rm", "-q", "fail")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "it does not")
    assert scheduled().name == "Not approved"
    words = [json.loads(line)["words"] for line in (CLONE / "worked.jsonl").read_text().splitlines()]
    assert words.count(["train", "esi-v3"]) == 1


@pytest.mark.slow
def test_a_branch_with_code_of_somebody_else_is_refused(settled: Path) -> None:
    git("checkout", "-q", "-b", BRANCH)
    Path("dvc.yaml").write_text(Path("dvc.yaml").read_text() + "# evil\n")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qam", "evil")
    git("checkout", "-q", "main")
    state = scheduled()
    assert state.is_failed()
    assert f"branch {BRANCH} changes dvc.yaml, which no retraining does" in state.message


@pytest.mark.long
@pytest.mark.parametrize("is_in_git", [True, False])
def test_lines_of_the_audit_log_that_are_not_committed_are_committed_first(project: Path, is_in_git: bool) -> None:
    """A clone would not have them, and two logs that have both grown cannot be merged."""
    log = paths.AUDIT_LOG
    if is_in_git:
        decisions.decide(load_params(), "v1")
    scripted.commit()
    decisions.decide(load_params(), "v2")
    before = log.read_bytes()
    state = scheduled()
    assert state.is_failed()
    assert state.message.endswith(
        f"{log} has lines that are not committed; commit it, push it if there is an origin, and run this again"
    )
    assert not CLONE.exists()
    assert log.read_bytes() == before
    assert not git("for-each-ref", f"refs/heads/{BRANCH}")


RECORDS = Path("data/sources/MIETIC.csv")


@pytest.mark.long
def test_a_run_that_another_overtook_does_nothing(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flows import turns

    scripted.commit()
    before = files()
    monkeypatch.setattr(turns, "is_overtaken", lambda: True)
    state = scheduled()
    assert (state.name, state.message) == ("Overtaken", "a run that began after this one was due did its work")
    assert files() == before


@pytest.mark.long
@pytest.mark.parametrize("kind", ["git", "dvc", "champion"])
def test_where_nothing_may_be_written_or_released_nothing_is_begun(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    from flows import retrain

    scripted.commit()
    build = mock.Mock(side_effect=AssertionError)
    monkeypatch.setattr(retrain, "build", build)
    monkeypatch.setattr(retrain, "note_drift", noted := mock.Mock())
    if kind == "git":
        git("remote", "add", "origin", str(project))
        git("remote", "set-url", "--push", "origin", str(tmp_path / "none"))
    elif kind == "champion":  # as after a rollback whose line in the audit log was not pushed
        versions.point("esi", "champion", versions.find("esi", "v1"))
    else:
        (tmp_path / "store").write_text("in the way")
        Path(".dvc/config.local").write_text(f"[core]\n    remote = s\n['remote \"s\"']\n    url = {tmp_path}/store\n")
    state = scheduled()
    assert state.is_failed()
    reasons = {
        "git": "git push failed", "dvc": "nothing can be written to the DVC remote",
        "champion": "v1 is the champion of esi in the registry, but not by data/reports/decisions.jsonl",
    }  # fmt: skip
    assert reasons[kind] in state.message
    assert not build.called
    assert not noted.called, "a retraining that did not begin answers no alarm"


@pytest.mark.long
def test_what_a_run_left_is_sent_to_the_cache_of_a_checkout_with_settings_of_its_own(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings are copied into the clone, over the remote that the run before had added there."""
    from prefect.states import Completed

    from flows import branches, clone, retrain

    def renew(*_: object) -> Any:
        Path("data/reports/left.json").write_text("{}")
        return Completed()

    scripted.commit()
    Path(".dvc/config.local").write_text("[core]\n    checksum_jobs = 1\n")
    monkeypatch.setattr(retrain, "renew", renew)
    with monkeypatch.context() as patch:
        patch.setattr(branches, "hand_over", mock.Mock(side_effect=clone.Away("the origin is away")))
        assert scheduled().is_failed()
    monkeypatch.setattr(retrain, "renew", lambda *_: Completed())
    state = scheduled()
    assert state.is_completed(), state.message
    assert git("show", f"{BRANCH}:data/reports/left.json") == "{}"


@pytest.mark.long
def test_records_that_git_ignores_are_read_where_they_are_or_the_run_is_refused(project: Path) -> None:
    """Served records are mined by a scheduled run, which works in a clone."""
    from prefect import flow

    from flows import clone, records, steps

    def change(content: Any) -> None:
        spec = {"task": "esi", "task_version": 2, "use": "mine", "source": str(RECORDS), "served": True}
        content["imports"] = {"ward": {**spec, "consent": True}}

    RECORDS.parent.mkdir(parents=True)
    esi_sources.mietic(RECORDS.parent, 60, 3)
    laid.edit(project, change)
    git("init", "-q", "-b", "main")
    Path(".git/info/exclude").write_text("/data/sources/\n")  # in this checkout alone
    scripted.commit()

    @flow
    def imported() -> list[str]:
        with clone.at(git("rev-parse", "HEAD"), "retrain-esi"):
            records.link(load_params(), project)
            ran = steps.bring_up_to_date(["import@ward", "validate-import@ward"])
            assert steps.bring_up_to_date(ran) == []
            assert not [line for line in git("status", "--porcelain").splitlines() if "sources" in line]
            records.link(load_params().model_copy(update={"imports": {}}), project)
            assert not RECORDS.is_symlink(), "a link to what is imported no more would be committed"
            return ran

    assert imported() == ["import@ward", "validate-import@ward"]
    RECORDS.rename("data/elsewhere")
    with pytest.raises(Refused, match=r"import@ward reads data/sources/MIETIC\.csv, which this machine has not"):
        imported()


def test_the_second_is_told_that_the_first_is_at_work(project: Path) -> None:
    from flows.release import release

    scripted.commit()
    with at_work("esi", "the schedule of esi"):
        states = scheduled(), release("v2", return_state=True)
    for state in states:
        assert isinstance(state.result(raise_on_failure=False), Busy)
        assert "the schedule of esi (process " in state.message


ONE = """
from flows.retrain import scheduled
state = scheduled("esi", return_state=True)
print(state.name, "at work" in str(state.message))
"""


@pytest.mark.slow
def test_of_ten_at_once_one_trains_and_nine_wait_for_it(project: Path) -> None:
    from prefect.settings import PREFECT_API_URL

    def change(content: Any) -> None:
        content["versions"]["v3"] = {**content["versions"]["v2"], "parent": "v2", "seed": 9}
        content["schedules"]["esi"]["answer_within_s"] = 1

    laid.edit(project, change)
    scripted.SLOW.write_text("40")
    scripted.commit()
    before = files()
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT}/src", "PREFECT_API_URL": str(PREFECT_API_URL.value())}
    ten = [
        subprocess.Popen(
            [sys.executable, "-c", ONE], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(10)
    ]
    said = [process.communicate(timeout=600) for process in ten]
    assert Counter(out.strip() for out, _ in said) == {"Not approved False": 1, "Nothing to do False": 9}, said
    words = [json.loads(line)["words"] for line in (CLONE / "worked.jsonl").read_text().splitlines()]
    assert words.count(["train", "v3"]) == 1
    assert [entry.name for entry in versions.entries("esi")].count("v3") == 1
    assert files() == before
