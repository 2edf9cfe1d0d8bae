"""A clone per run, and the branch by which it hands over what stages wrote."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import chdir, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest

from clinrl import paths
from clinrl.artifacts import write_text
from clinrl.errors import Refused
from clinrl.signing.keys import make_key, signer
from flows import branches, build, clone, make, remote
from processes import free_port

ROOT = Path(__file__).parents[2]
LOCK = "schema: '2.0'\nstages:\n"


def entry(address: str, digest: str) -> str:
    report = f"data/reports/{address.split('@')[1]}.json"
    return f"  {address}:\n    cmd: run\n    outs:\n    - path: {report}\n      md5: {digest}\n"


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A person's checkout with a bare origin, as the working directory."""
    for name in (clone.FOLDER, "MLFLOW_TRACKING_URI", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")  # so that what a clone sets is undone
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "none"))
    folder = tmp_path / "checkout"
    folder.mkdir()
    monkeypatch.chdir(folder)
    git("init", "-q", "-b", "main")
    write_text(Path("dvc.lock"), LOCK + entry("dataset@d1", "aa") + entry("train@v0", "bb"))
    write_text(Path("data/reports/v0.json"), "{}")
    write_text(Path("src/code.py"), "")
    write_text(Path("params.yaml"), "")
    write_text(Path(".gitignore"), (ROOT / ".gitignore").read_text(encoding="utf-8"))
    git("add", "--all")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "begun")
    git("clone", "-q", "--bare", ".", str(tmp_path / "origin"))
    git("remote", "add", "origin", str(tmp_path / "origin"))
    return folder


def made(commit: str, name: str, change: Callable[[], object]) -> str:
    """A worker's branch with what `change` did to the clone."""
    to = branches.branch(commit, name)
    with clone.at(commit, "worker"):
        change()
        branches.hand_over(to, f"{name} made")
    return to


def trained(name: str, digest: str = "cc") -> None:
    """What a stage leaves behind for git."""
    write_text(Path("dvc.lock"), Path("dvc.lock").read_text() + entry(f"train@{name}", digest))
    write_text(Path(f"data/reports/{name}.json"), f'{{"{name}": 1}}')


def may_write(name: str) -> dict[str, list[str]]:
    """What was asked of a worker: the stages of a version, with the paths that each writes."""
    return {f"{stage}@{name}": [f"data/reports/{name}.json"] for stage in ("train", "evaluate")}


@pytest.mark.long
def test_a_worker_thought_lost_does_not_replace_what_its_successor_handed_over(checkout: Path) -> None:
    commit = clone.head()
    to = branches.branch(commit, "v1")
    with clone.at(commit, "lost"):
        trained("v1")
        first = branches.hand_over(to, "v1: train", force=f"--force-with-lease=refs/heads/{to}:{branches.tip(to)}")
        assert branches.tip(to) == first
        git("push", "--force", "origin", f"{commit}:refs/heads/{to}")  # by the successor
        write_text(Path("data/reports/v1.json"), "[]")
        with pytest.raises(clone.Away, match="git push failed"):
            branches.hand_over(to, "v1: evaluate", force=f"--force-with-lease=refs/heads/{to}:{first}")
        assert branches.tip(to) == commit


@pytest.mark.long
def test_two_workers_results_are_one_branch_and_the_checkout_is_untouched(checkout: Path) -> None:
    commit = clone.head()
    write_text(Path("notes.txt"), "mine, not in git")
    offered = {name: made(commit, name, lambda name=name: trained(name)) for name in ("v2", "v1")}
    with clone.at(commit, "build"):
        assert Path.cwd() != checkout
        for name in ("v1", "v2"):
            assert branches.tip(offered[name])
            assert branches.take_in(offered[name], may_write(name), name) == [f"train@{name}"]
        branches.hand_over("built/all", "all")
        assert not branches.tip("built/none")
    assert Path.cwd() == checkout
    assert git("status", "--porcelain") == "?? notes.txt"
    git("fetch", "-q", "origin", "built/all")
    assert git("show", "FETCH_HEAD:dvc.lock") + "\n" == (
        LOCK + entry("dataset@d1", "aa") + entry("train@v0", "bb") + entry("train@v1", "cc") + entry("train@v2", "cc")
    )
    assert git("show", "FETCH_HEAD:data/reports/v2.json") == '{"v2": 1}'
    assert git("rev-parse", "HEAD") == commit


@pytest.mark.long
def test_what_was_handed_over_is_gone_on_with(checkout: Path) -> None:
    commit = clone.head()
    to = made(commit, "v1", lambda: trained("v1"))
    with clone.at(commit, "worker"):
        assert "train@v1" not in Path("dvc.lock").read_text()
        branches.take_in(to, may_write("v1"), "begun before")
        write_text(Path("dvc.lock"), Path("dvc.lock").read_text() + entry("evaluate@v1", "dd"))
        branches.hand_over(to, "evaluated")
        assert [*branches._entries("HEAD")] == ["dataset@d1", "train@v0", "train@v1", "evaluate@v1"]


def test_what_is_taken_in_again_is_the_same_commit(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build that was killed finds what workers made of its commits by their digests."""
    commit = clone.head()
    to, found = made(commit, "v1", lambda: trained("v1")), set[str]()
    for day in ("01", "02"):
        for who in ("AUTHOR", "COMMITTER"):
            monkeypatch.setenv(f"GIT_{who}_DATE", f"2031-01-{day}T00:00:00Z")
        with clone.at(commit, "build"):
            branches.take_in(to, may_write("v1"), "v1")
            found.add(git("rev-parse", "HEAD"))
    assert len(found) == 1
    assert found != {commit}


def test_a_report_that_a_worker_removed_is_removed(checkout: Path) -> None:
    def change() -> None:
        Path("data/reports/v0.json").unlink()
        write_text(Path("data/reports/v0/report.md"), "{}")  # moved, as git sees it

    to = made(clone.head(), "v0", change)
    with clone.at(clone.head(), "build"):
        for _ in range(2):
            branches.take_in(to, {"train@v0": ["data/reports/v0.json", "data/reports/v0"]}, "v0")
            assert git("ls-files", "data") == "data/reports/v0/report.md"
            assert not git("status", "--porcelain")


@pytest.mark.long
def test_a_clone_shares_the_cache_of_the_checkout_wherever_it_lies(checkout: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "dvc", "init", "-q"], check=True)
    other, disk = tmp_path / "other", tmp_path / "disk"
    write_text(other / ".dvc/config.local", f"[cache]\n    dir = {disk}\n")
    remote.share_cache(other)
    assert f"url = {disk}\n" in Path(".dvc/config.local").read_text()


def test_a_commit_that_is_not_pushed_is_refused_with_what_to_do(checkout: Path) -> None:
    """And counts not as an origin that is away, which is tried again eight times."""
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "here alone", "--allow-empty")
    lacks = r"the origin lacks the commit [0-9a-f]{40}; `git push` it"
    with pytest.raises(Refused, match=lacks) as error, clone.at(clone.head(), "build"):
        raise AssertionError
    assert not isinstance(error.value, clone.Away)


def test_git_s_reason_is_given_and_not_the_hint_below_it(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    git("init", "-q", "empty")
    monkeypatch.chdir("empty")
    with pytest.raises(Refused, match=r"git rev-parse failed in .*: fatal: ambiguous argument 'HEAD'"):
        clone.head()


def test_why_the_origin_does_not_take_a_branch_is_said(checkout: Path, tmp_path: Path) -> None:
    hook = tmp_path / "origin/hooks/pre-receive"
    write_text(hook, "#!/bin/sh\nexit 1\n", 0o755)
    with pytest.raises(clone.Away, match=r"git push failed in .*: ! \[remote rejected\] .*pre-receive hook declined"):
        branches.hand_over("built/x", "made", only=["dvc.lock"])


def test_a_project_in_a_folder_that_was_never_committed_is_refused(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text(Path("full/params.yaml"), "")
    monkeypatch.chdir(checkout / "full")
    with pytest.raises(Refused, match=r"path 'full/params.yaml' exists on disk, but not in 'HEAD'"):
        clone.head()


def test_a_file_that_the_checkout_has_no_more_is_gone_from_its_clone(checkout: Path) -> None:
    write_text(Path(".dvc/config"), "")
    git("add", "--all")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a project of DVC's")
    git("push", "-q", "origin", "main")
    for own in clone.OWN:
        write_text(own, "former")
        with clone.at(clone.head(), "worker"):
            assert own.read_text() == "former"
        own.unlink()
        with clone.at(clone.head(), "worker"):
            assert not own.exists()


SHARED = {"train@x1": ["data/reports/x1.json"]}
"""A stage that all versions follow from."""


def test_what_versions_share_is_taken_from_a_branch_and_nothing_else_of_it(checkout: Path) -> None:
    def shared_and_own() -> None:
        trained("x1", "aa")
        trained("v1")
        write_text(Path("src/code.py"), "evil")

    commit = clone.head()
    made(commit, "v1", shared_and_own)
    made(commit, "v9", shared_and_own)  # of no version that is known
    with clone.at(commit, "worker"):
        stages = {name: SHARED | may_write(name) for name in ("v1", "v2")}
        assert branches.go_on_with("v2", commit, stages) == []
        assert git("diff", "--name-only", commit).split() == ["data/reports/x1.json", "dvc.lock"]
        assert [*branches._entries("HEAD")] == ["dataset@d1", "train@v0", "train@x1"]
        with pytest.raises(Refused, match=r"changes src/code\.py, which no stage that was asked of it"):
            branches.go_on_with("v1", commit, stages)


def test_a_stage_that_two_branches_have_is_taken_from_the_version_s_own(checkout: Path) -> None:
    commit = clone.head()
    for name, digest in (("v1", "aa"), ("v2", "bb"), ("v3", "cc")):
        made(commit, name, lambda digest=digest: trained("x1", digest))
    with clone.at(commit, "worker"):
        assert branches.go_on_with("v2", commit, {name: SHARED | may_write(name) for name in ("v1", "v2", "v3")}) == []
        assert "bb" in branches._entries("HEAD")["train@x1"]


def test_what_another_made_since_a_version_was_handed_over_is_taken_too(checkout: Path) -> None:
    commit, stages = clone.head(), {name: SHARED | may_write(name) for name in ("v1", "v2")}
    made(commit, "v2", lambda: trained("v2"))
    for is_made in (False, True):
        with clone.at(commit, "worker"):
            assert branches.go_on_with("v2", commit, stages) == []
            assert branches.go_on_with("v2", commit, stages, "train@x1") == []
            assert "train@v2" in branches._entries("HEAD")
            assert ("train@x1" in branches._entries("HEAD")) is is_made
        made(commit, "v1", lambda: trained("x1", "aa"))


def test_only_the_stage_that_is_asked_for_is_taken_and_no_other_that_is_shared(checkout: Path) -> None:
    """The others stay those that the version was trained on."""
    stages = {name: SHARED | {"train@x2": ["data/reports/x2.json"]} | may_write(name) for name in ("v0", "v1", "v2")}
    commit = clone.head()
    made(commit, "v0", lambda: trained("x2", "aa"))  # a branch that has not got so far
    made(commit, "v1", lambda: (trained("x1", "aa"), trained("x2", "aa")))
    made(commit, "v2", lambda: trained("x2", "bb"))
    with clone.at(commit, "worker"):
        branches.go_on_with("v2", commit, stages)
        branches.go_on_with("v2", commit, stages, "train@x1")
        assert "train@x1" in branches._entries("HEAD")
        assert "bb" in branches._entries("HEAD")["train@x2"]


@pytest.mark.parametrize("is_there", [False, True])
def test_the_exam_of_the_base_waits_for_a_training_unless_it_is_there(
    is_there: bool, empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = list[str]()
    monkeypatch.setattr(make, "dvc_states", lambda _: {"baseline@esi": "up to date" if is_there else "not built"})
    monkeypatch.setattr(make.branches, "tip", lambda _: "")
    monkeypatch.setattr(make.branches, "go_on_with", lambda *_: done.append("what others made") or [])
    monkeypatch.setattr(make.remote, "pull", lambda _: None)
    git("init", "-q")
    monkeypatch.setattr(make.remote, "check_may_push", lambda _: done.append("may it push?"))
    monkeypatch.setattr(make.remote, "check_may_write", lambda: done.append("may it write?"))

    def bring(addresses: list[str], _: object) -> list[str]:
        done.extend(addresses)
        return addresses

    monkeypatch.setattr(make.steps, "bring_up_to_date", bring)
    ran = make._make("v1", "a" * 40, base_last=True)
    own = done[-ran:]
    assert own.index("validate@x1") < own.index("baseline@esi") < own.index("train@v1") < own.index("evaluate@v1")
    before = [address for address in own[: own.index("train@v1") + 1] if address != "baseline@esi"]
    begun = ["what others made", "may it push?", "may it write?"]
    assert done[:-ran] == [*begun, *([] if is_there else [*before, "what others made"])]


def test_a_project_in_a_folder_has_branches_of_its_own_and_workers_find_it(checkout: Path) -> None:
    assert (branches.result("esi"), branches.branch("a" * 40, "v1")) == ("built/esi", f"built/{'a' * 12}/v1")
    write_text(Path("full/params.yaml"), "")
    assert make._project("full/") == checkout / "full"
    assert make._project("") == checkout
    for folder in ("other", "..", str(checkout.parent)):
        with pytest.raises(Refused, match="is no project of the clone that this worker starts in"):
            make._project(folder)
    with chdir("full"):
        assert (branches.result("esi"), branches.branch("a" * 40, "")) == (
            "built/_/full/esi",
            f"built/_/full/{'a' * 12}/",
        )


def test_a_branch_that_is_refused_stops_its_own_version_alone(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = clone.head()
    made(commit, "v1", lambda: hidden("  train@v1:"))
    made(commit, "v3", lambda: trained("x1", "aa"))
    stages = {name: SHARED | may_write(name) for name in ("v1", "v2", "v3")}
    with clone.at(commit, "worker"):
        (reason,) = branches.go_on_with("v2", commit, stages)
        assert "is not as DVC writes it" in reason
        assert "train@x1" in branches._entries("HEAD")
    with clone.at(commit, "worker"):
        with pytest.raises(Refused, match="is not as DVC writes it"):
            branches.go_on_with("v1", commit, stages)
        monkeypatch.setattr(branches, "take_in", mock.Mock(side_effect=clone.Away("the origin is away")))
        with pytest.raises(clone.Away):
            branches.go_on_with("v2", commit, stages)


@pytest.mark.parametrize(
    "outs", ["    outs: 5\n", "    outs:\n    - md5: aa\n", "    outs: [\n", "    outs:\n    - path: {}\n"]
)
def test_an_entry_that_dvc_would_not_write_is_refused_and_stops_no_other(checkout: Path, outs: str) -> None:
    def change() -> None:
        write_text(Path("dvc.lock"), Path("dvc.lock").read_text() + f"  train@x1:\n    cmd: run\n{outs}")

    commit = clone.head()
    made(commit, "v1", change)
    stages = {name: SHARED | may_write(name) for name in ("v1", "v2")}
    with clone.at(commit, "worker"):
        (reason,) = branches.go_on_with("v2", commit, stages)
        assert "has an entry of train@x1 that DVC does not write" in reason


@pytest.mark.long
def test_a_version_whose_files_lead_elsewhere_is_not_gathered(checkout: Path, tmp_path: Path) -> None:
    """Its entry is committed before DVC is asked for its files, and goes again."""
    for words in (["init", "-q"], ["remote", "add", "-q", "-d", "store", str(tmp_path / "store")]):
        subprocess.run([sys.executable, "-m", "dvc", *words], check=True)
    write_text(
        Path("dvc.yaml"), "stages:\n  train:\n    foreach: [v1]\n    do: {cmd: run, outs: [data/reports/v1.json]}\n"
    )
    git("add", "--all")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a project of DVC's")
    git("push", "-q", "origin", "main")
    commit = clone.head()
    to = made(commit, "v1", lambda: trained("v1", "../../../evil"))
    stages = {"train@v1": may_write("v1")["train@v1"]}
    with clone.at(commit, "build"):
        with pytest.raises(Refused, match=r"its worker made no train@v2; see its log"):
            build.gather("v2", {"train@v2": may_write("v2")["train@v2"]}, "built/none", "built/all", "")
        with pytest.raises(Refused, match="a digest that DVC was to follow leads out of its cache"):
            build.gather("v1", stages, to, "built/all", "")
        assert git("rev-parse", "HEAD") == commit
        assert not git("status", "--porcelain")
        assert not branches.tip("built/all")


def claimed(path: str) -> None:
    """A stage that was asked for, and a path that it does not write, which its entry says that it does."""
    text = Path("dvc.lock").read_text() + entry("train@v1", "cc") + f"    - path: {path}\n      md5: dd\n"
    write_text(Path("dvc.lock"), text)


def hidden(line: str) -> None:
    """A stage that was asked for, and behind it another by a line that DVC does not write."""
    trained("v1")
    write_text(Path("dvc.lock"), Path("dvc.lock").read_text() + f"{line}\n    cmd: evil\n")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda: write_text(Path("src/code.py"), "evil"), "changes src/code.py, which no stage that was asked of it"),
        (lambda: write_text(Path("dvc.yaml"), "stages: {}"), "changes dvc.yaml, which no stage that was asked of it"),
        (lambda: write_text(Path("data/reports/v0.json"), "[]"), "changes data/reports/v0.json, which no stage that"),
        (lambda: write_text(Path("data/bases/esi/model.safetensors"), "x"), "changes data/bases/esi/model.safetensors"),
        (lambda: trained("v9"), "changes the stage train@v9 in dvc.lock, which was not asked of it"),
        (
            lambda: write_text(Path("dvc.lock"), Path("dvc.lock").read_text().replace("bb", "ee")),
            "changes the stage train@v0 in dvc.lock",
        ),
        (lambda: write_text(Path("dvc.lock"), LOCK + entry("dataset@d1", "aa")), "changes the stage train@v0"),
        (
            lambda: (claimed("src/code.py"), write_text(Path("src/code.py"), "evil")),
            "changes src/code.py, which no stage",
        ),
        (lambda: claimed("src/code.py"), "says that train@v1 writes src/code.py, which it does not by dvc.yaml"),
        (lambda: hidden("  'train@v0':"), "is not as DVC writes it"),
        (lambda: hidden("  train@v0: # as before"), "is not as DVC writes it"),
        (lambda: hidden("  train@v1:"), "is not as DVC writes it"),
        (lambda: hidden("    k:\n        - \x85  train@v9: {cmd: evil}"), "is not as DVC writes it"),
        (lambda: hidden("    k:\n        - \u2028  train@v9: {cmd: evil}"), "is not as DVC writes it"),
        (lambda: write_text(Path("dvc.lock"), Path("dvc.lock").read_text() + "    # "), "is not as DVC writes it"),
    ],
)
def test_a_branch_that_changes_what_was_not_asked_of_it_is_refused(
    checkout: Path, change: Callable[[], object], says: str
) -> None:
    commit = clone.head()
    to = made(commit, "v1", change)
    with clone.at(commit, "build"):
        with pytest.raises(Refused, match=says):
            branches.take_in(to, may_write("v1"), "v1")
        assert git("rev-parse", "HEAD") == commit


def test_a_clone_is_one_process_s_and_is_used_again(checkout: Path) -> None:
    commit = clone.head()
    with clone.at(commit, "worker"):
        first = Path.cwd()
        write_text(Path(".clinrl/checkpoint"), "step 3")
        write_text(Path("left.txt"), "by a run that failed")
        os.chdir(checkout)
        with clone.at(commit, "worker"):
            assert Path.cwd() != first
    with clone.at(commit, "worker"):
        assert Path.cwd() == first
        assert Path(".clinrl/checkpoint").exists()
        assert not Path("left.txt").exists()


def test_what_a_killed_run_left_is_handed_over_before_the_clone_is_used_again(checkout: Path) -> None:
    commit, to, calls = clone.head(), "built/retrain-esi", list[str]()

    def left() -> None:
        calls.append(git("status", "--porcelain"))
        branches.hand_over(to, "left by a run that was killed", only=["data/reports"], force="")

    with clone.at(commit, "retrain", left):
        write_text(Path("data/reports/decisions.jsonl"), "a signed line")
        write_text(Path("src/code.py"), "half written")
    with clone.at(commit, "retrain", left):
        assert len(calls) == 1
        assert not Path("data/reports/decisions.jsonl").exists()
        branches.go_on(to, ["data/reports"])
        assert Path("data/reports/decisions.jsonl").read_text() == "a signed line"
        assert Path("src/code.py").read_text() == ""


def test_what_a_killed_run_left_is_handed_over_with_the_settings_of_now(checkout: Path) -> None:
    commit, seen = clone.head(), list[str]()
    for number in range(2):
        write_text(Path("machine.yaml"), f"# {number}\n")
        with clone.at(commit, "retrain", lambda: seen.append(Path("machine.yaml").read_text())):
            write_text(Path("data/reports/v1.json"), "{}")
    assert seen == ["# 1\n"]


def test_what_a_checkout_that_was_cut_short_left_is_no_run_s_work(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, calls = clone.head(), list[str]()
    run = clone.git

    def cut_short(*words: str, **more: Any) -> str:
        if words[0] == "checkout":
            write_text(Path("src/code.py"), "half of another commit")
            raise Refused("No space left on device")
        return run(*words, **more)

    with clone.at(commit, "retrain", lambda: calls.append("left")):
        pass
    with monkeypatch.context() as patch:
        patch.setattr(clone, "git", cut_short)
        with pytest.raises(Refused, match="No space left"), clone.at(commit, "retrain", lambda: calls.append("left")):
            pass
        os.chdir(checkout)
    with clone.at(commit, "retrain", lambda: calls.append("left")):
        assert Path("src/code.py").read_text() == ""
    assert calls == []


def run_of(commit: str, report: str, to: str = "built/retrain-esi") -> None:
    """A scheduled run, as short as can be: it writes one report, and hands over what another left."""

    with clone.at(commit, "retrain", lambda: branches.hand_over_rest(to, "left", ["data/reports"])):
        branches.go_on(to, ["data/reports"])
        clone.begin_here()
        write_text(Path(f"data/reports/{report}.json"), "{}")
        branches.hand_over(to, report, only=["data/reports"], force="")


def test_what_could_not_be_pushed_is_handed_over_by_the_next_run(checkout: Path, tmp_path: Path) -> None:
    commit, origin = clone.head(), tmp_path / "origin"
    hook = write_text(origin / "hooks/pre-receive", "#!/bin/sh\nexit 1\n") or origin / "hooks/pre-receive"
    hook.chmod(0o755)
    with pytest.raises(clone.Away):
        run_of(commit, "first")
    hook.unlink()
    other = tmp_path / "other"  # somebody adds to the branch meanwhile
    git("clone", "-q", str(origin), str(other))
    write_text(other / "data/reports/theirs.json", "{}")
    git("-C", str(other), "add", "--all")
    git("-C", str(other), "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "theirs")
    git("-C", str(other), "push", "-q", "origin", "HEAD:refs/heads/built/retrain-esi")
    run_of(commit, "second")
    git("fetch", "-q", "origin", "built/retrain-esi")
    held = git("ls-tree", "-r", "--name-only", "FETCH_HEAD", "data/reports").split()
    assert held == [f"data/reports/{name}.json" for name in ("first", "second", "theirs", "v0")]
    before = git("rev-list", "--count", "FETCH_HEAD")
    with clone.at(commit, "retrain", lambda: pytest.fail("nothing is left")):
        pass
    assert git("rev-list", "--count", "FETCH_HEAD") == before


def test_what_a_killed_run_left_is_kept_where_the_branch_does_not_merge(checkout: Path) -> None:
    commit, report = clone.head(), Path("data/reports/v0.json")
    with clone.at(commit, "other"):
        write_text(report, "theirs")
        branches.hand_over("built/retrain-esi", "theirs")
    with clone.at(commit, "retrain"):
        write_text(report, "ours")
    for _ in range(2):
        with pytest.raises(Refused, match="does not merge with"):
            run_of(commit, "second")
    assert git("-C", ".clinrl/clones/retrain-1", "show", f"HEAD:{report}") == "ours"


def test_a_branch_that_was_merged_and_then_refused_is_not_handed_over(checkout: Path) -> None:
    commit = clone.head()
    made(commit, "v1", lambda: trained("v1"))
    with clone.at(commit, "retrain"):
        branches.go_on(branches.branch(commit, "v1"), ["data/reports", "dvc.lock"])
        clone.begin_here()
    with clone.at(commit, "retrain", lambda: pytest.fail("nothing is left")):
        pass
    write_text(Path("src/code.py"), "newer")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qam", "by a person")
    git("push", "-q", "origin", "main")
    for _ in range(2):
        with clone.at(clone.head(), "retrain", lambda: pytest.fail("nothing is left")):
            pass
    git("-C", ".clinrl/clones/retrain-1", "update-ref", "-d", clone.BEGUN)  # as where the first run was killed early
    with clone.at(clone.head(), "retrain", lambda: pytest.fail("nothing is left")):
        pass


def test_a_branch_that_somebody_added_to_is_not_replaced(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit, to = clone.head(), "built/retrain-esi"
    with clone.at(commit, "retrain"):
        branches.hand_over(to, "begun", force="")
        git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "by a person")
        git("push", "-q", "origin", f"HEAD:refs/heads/{to}")
        git("reset", "-q", "--hard", commit)
        write_text(Path("data/reports/v1.json"), "{}")
        monkeypatch.setattr(branches, "go_on", lambda *_: None)  # as if the person had been later than that
        for hand_over in (
            lambda: branches.hand_over(to, "later", force=""),
            lambda: branches.hand_over_rest(to, "later", ()),
        ):
            with pytest.raises(clone.Away):
                hand_over()
    assert git("ls-remote", "--heads", "origin", to).split()[0] != commit


@pytest.mark.parametrize(
    "bring",
    [
        lambda: write_text(Path("data/reports/dvc.yaml"), "stages: {}"),
        lambda: write_text(Path("data/reports/x.dvc"), "outs: []"),
        lambda: write_text(Path("data/reports/.dvcignore"), "*"),
        lambda: write_text(Path("data/reports/.gitattributes"), "* filter=evil"),
        lambda: write_text(Path("data/reports/\u2028/dvc.yaml"), "stages: {}"),  # no line ends there for git
    ],
)
def test_a_branch_that_brings_what_dvc_or_git_obeys_is_refused(checkout: Path, bring: Callable[[], object]) -> None:
    to = made(clone.head(), "v1", bring)
    with clone.at(clone.head(), "retrain"), pytest.raises(Refused, match="which no retraining does"):
        branches.go_on(to, ["data/reports"])


@pytest.mark.parametrize(
    ("brought", "sentence"),
    [("src/code.py", "changes src/code.py, which no retraining does"), (str(paths.AUDIT_LOG), "lacks lines of")],
)
def test_what_one_side_of_a_merge_brought_is_taken_back_by_no_branch_that_has_the_other_side_s_files(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, brought: str, sentence: str
) -> None:
    """Two commits are the last in common then. Git names the younger one, from which such a branch hardly differs."""

    def committed(day: int, path: str, text: str) -> str:
        monkeypatch.setenv("GIT_COMMITTER_DATE", f"2026-01-0{day}T00:00:00")
        write_text(Path(path), text)
        git("add", "--all")
        git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", path)
        return git("rev-parse", "HEAD")

    committed(1, brought, "first\n")
    git("checkout", "-qb", "topic")
    theirs = committed(2, brought, "first\nsecond\n")
    git("checkout", "-q", "main")
    ours = committed(3, "README.md", "")
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    git(*author, "merge", "-q", "--no-ff", "-m", "both", "topic")
    evil = git(*author, "commit-tree", f"{ours}^{{tree}}", "-p", ours, "-p", theirs, "-m", "evil")
    monkeypatch.delenv("GIT_COMMITTER_DATE")
    git("push", "-q", "origin", "main", f"{evil}:refs/heads/built/retrain-esi")
    assert git("merge-base", "main", evil) == ours
    with clone.at(clone.head(), "retrain"):
        with pytest.raises(Refused, match=sentence):
            branches.go_on("built/retrain-esi", ["data/reports"])
        assert Path(brought).read_text() == "first\nsecond\n"
        assert git("status", "--porcelain") == ""
        assert git("rev-parse", "HEAD") == git("-C", str(checkout), "rev-parse", "HEAD")


@pytest.mark.parametrize("is_link", [True, False])
def test_a_branch_that_brings_a_link_or_a_program_is_refused_by_whoever_takes_it(checkout: Path, is_link: bool) -> None:
    def change() -> None:
        trained("v1")
        Path("data/reports/v1.json").chmod(0o755)
        if is_link:
            Path("data/reports/v1.json").unlink()
            Path("data/reports/v1.json").symlink_to("/etc/passwd")

    to = made(clone.head(), "v1", change)
    git("push", "-q", "origin", f"HEAD:refs/tags/{to}")  # which is not asked instead
    with clone.at(clone.head(), "retrain"):
        for take in (
            lambda: branches.go_on(to, ["data/reports", "dvc.lock"]),
            lambda: branches.take_in(to, may_write("v1"), ""),
        ):
            with pytest.raises(Refused, match=r"brings data/reports/v1\.json as a link"):
                take()


@pytest.mark.slow
def test_a_remote_that_is_away_is_said_and_what_was_made_is_kept(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket at an address where nobody listens, then a folder in whose place a file is."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    bucket = {"url": "s3://bucket/x", "access_key_id": "ada", "secret_access_key": "hidden"}
    bucket["endpointurl"] = f"http://127.0.0.1:{free_port()}"
    dvc = [sys.executable, "-m", "dvc"]
    subprocess.run([*dvc, "init", "-q"], check=True)
    write_text(Path(".dvc/config"), "[core]\n    remote = store\n['remote \"store\"']\n")
    with Path(".dvc/config").open("a") as config:
        config.writelines(f"    {key} = {value}\n" for key, value in bucket.items())
    write_text(Path("dvc.yaml"), "stages:\n  train:\n    foreach: [v1]\n    do: {cmd: run, outs: [data/v1.json]}\n")
    digest = hashlib.md5(b"{}").hexdigest()
    recorded = f"  train@v1:\n    cmd: run\n    outs:\n    - path: data/v1.json\n      hash: md5\n      md5: {digest}\n"
    write_text(Path("dvc.lock"), LOCK + recorded + "      size: 2\n")
    with pytest.raises(clone.Away, match=r"^the DVC remote is away: failed to connect to s3 \(bucket/x") as raised:
        remote.pull(["train@v1"])
    assert "hidden" not in str(raised.value)
    kept = Path(".dvc/cache/files/md5", digest[:2], digest[2:])
    for place in (kept, Path("data/v1.json")):
        write_text(place, "{}")
    with pytest.raises(clone.Away, match=r"and is kept here: (?!.*dvc\.org).*Could not connect"):
        remote.push(["train@v1"])
    with pytest.raises(clone.Away, match=r"^nothing can be written to the DVC remote, .*: Could not connect to the"):
        remote.check_may_write()
    write_text(tmp_path / "store", "in the way")
    subprocess.run([*dvc, "remote", "add", "-q", "--force", "--default", "store", str(tmp_path / "store")], check=True)
    with pytest.raises(clone.Away, match=r"^what was made could not be sent to the DVC remote, and is kept here: "):
        remote.push(["train@v1"])
    with pytest.raises(clone.Away, match=r"^nothing can be written to the DVC remote, "):
        remote.check_may_write()
    assert kept.read_text() == "{}"
    (tmp_path / "store").unlink()
    for _ in range(2):  # nor does what it wrote hinder it
        remote.check_may_write()
    first, second = filter(Path.is_file, (tmp_path / "store").rglob("*"))
    for written in (first, second):
        assert written.parent.name + written.name == hashlib.md5(written.read_bytes()).hexdigest()


class Taking(BaseHTTPRequestHandler):
    """A server that takes every file that is posted to it."""

    taken: ClassVar[list[bytes]] = []

    def do_HEAD(self) -> None:
        self.send_response(404)
        self.end_headers()

    def do_POST(self) -> None:
        body = self.rfile
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(body.readline(), 16):
                self.taken.append(body.read(size))
                body.readline()
            body.readline()
        else:
            self.taken.append(body.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_a_remote_that_takes_files_by_http_may_be_written(checkout: Path) -> None:
    """Of a file alone: DVC's HTTP remotes cannot be written in any other way."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Taking) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        dvc, url = [sys.executable, "-m", "dvc"], f"http://127.0.0.1:{server.server_port}/store"
        subprocess.run([*dvc, "init", "-q"], check=True)
        subprocess.run([*dvc, "remote", "add", "-q", "--default", "store", url], check=True)
        remote.check_may_write()
        server.shutdown()
    assert len(Taking.taken) == 1


def test_a_part_that_the_remote_lost_costs_no_other_output(checkout: Path, tmp_path: Path) -> None:
    """DVC takes a listed part for present, and when it is not, its pull puts nothing into its place."""
    dvc = [sys.executable, "-m", "dvc"]
    Path("dvc.lock").unlink()
    for words in (["init", "-q"], ["remote", "add", "-q", "--default", "store", str(tmp_path / "store")]):
        subprocess.run([*dvc, *words], check=True)
    write = "mkdir {0}; echo {0} > {0}/part; echo {0}2 > {0}/2"
    stages = "".join(f"  {name}:\n    cmd: {write.format(name)}\n    outs: [{name}]\n" for name in "ab")
    Path("dvc.yaml").write_text(f"stages:\n{stages}")
    for words in ("repro", "push"):
        subprocess.run([*dvc, words, "-q"], check=True)
    lost = hashlib.md5(b"a\n", usedforsecurity=False).hexdigest()
    (tmp_path / "store/files/md5" / lost[:2] / lost[2:]).unlink()
    for folder in ("a", "b", ".dvc/cache"):
        shutil.rmtree(folder)
    remote.pull(["a", "b"])
    assert Path("b/part").read_text() == "b\n"
    assert not Path("a").exists()


@pytest.mark.parametrize(
    ("why", "is_away"),
    [
        ("internal error", True),
        ("The specified key does not exist.", False),
        ("[Errno 2] No such file or directory: 'x'", False),
    ],
)
def test_a_remote_that_fails_in_a_pull_is_not_one_that_lacks_files(
    monkeypatch: pytest.MonkeyPatch, why: str, is_away: bool
) -> None:
    """What the remote lacks is built; what it could not send is not to be trained again."""
    says = f"ERROR: failed to transfer 'md5: 00' - {why}\nERROR: failed to pull data from the cloud\n"
    monkeypatch.setattr(remote, "_dvc", lambda *_: subprocess.CompletedProcess([], 1, "", says))
    with pytest.raises(clone.Away, match="failed to transfer") if is_away else nullcontext():
        remote.pull(["train@v1"])


def test_what_a_checkout_refuses_after_a_pull_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    says = {"pull": "ERROR: failed to pull data from the cloud\n", "checkout": "clinrl: data/x leads out\n"}
    monkeypatch.setattr(remote, "_dvc", lambda verb, *_: subprocess.CompletedProcess([], 1, "", says[verb]))
    with pytest.raises(Refused, match="data/x leads out"):
        remote.pull(["train@v1"])


def test_what_is_not_committed_cannot_be_built_elsewhere(checkout: Path) -> None:
    write_text(Path("data/reports/v0.json"), "[]")
    with pytest.raises(Refused, match=r"data/reports/v0.json is changed and not committed"):
        clone.head()


@pytest.mark.parametrize("commit", ["main", "--upload-pack=evil", "a" * 39])
def test_only_a_full_digest_is_a_commit(checkout: Path, commit: str) -> None:
    with pytest.raises(Refused, match="no full digest of a commit"), clone.at(commit, "worker"):
        pass


def test_a_clone_signs_with_the_checkout_s_key_and_works_in_its_folder(checkout: Path) -> None:
    key = make_key()
    assert key is not None
    write_text(Path("full/params.yaml"), "scale: full\n")
    git("add", "full")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "full")
    git("push", "-q", "origin", "main")
    with clone.at(clone.head(), "worker"):
        assert signer("embedded").key == key.key
        assert not git("status", "--porcelain")
    os.chdir("full")
    with clone.at(clone.head(), "worker"):
        assert Path("params.yaml").read_text() == "scale: full\n"
        assert Path.cwd().name == "full"


def test_a_project_in_a_folder_takes_in_its_own_files(checkout: Path) -> None:
    write_text(Path("full/dvc.lock"), LOCK + entry("train@v0", "bb"))
    write_text(Path("full/params.yaml"), "")
    write_text(Path("full/data/reports/v0.json"), "{}")
    git("add", "--all")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "full")
    git("push", "-q", "origin", "main")
    os.chdir("full")
    commit = clone.head()
    to = made(commit, "v1", lambda: trained("v1"))
    evil = made(commit, "v2", lambda: (write_text(Path("../data/reports/v2.json"), "above"), git("add", ":/data")))
    with clone.at(commit, "build"):
        assert branches.take_in(to, may_write("v1"), "v1") == ["train@v1"]
        assert git("diff", "--name-only", commit).split() == ["full/data/reports/v1.json", "full/dvc.lock"]
        with pytest.raises(Refused, match=r"changes data/reports/v2\.json, which no stage"):
            branches.take_in(evil, may_write("v2"), "v2")


def test_a_clone_follows_the_origin_of_the_checkout(checkout: Path, tmp_path: Path) -> None:
    commit = clone.head()
    with clone.at(commit, "worker"):
        pass
    (tmp_path / "origin").rename(tmp_path / "moved")
    git("remote", "set-url", "origin", "../moved")
    to = made(commit, "v1", lambda: trained("v1"))
    assert git("--git-dir", str(tmp_path / "moved"), "rev-parse", "--verify", to)


def test_a_clone_pushes_where_the_checkout_pushes(checkout: Path, tmp_path: Path) -> None:
    commit, other = clone.head(), str(tmp_path / "other")
    git("clone", "-q", "--bare", str(tmp_path / "origin"), other)
    git("remote", "set-url", "--push", "origin", "../other")
    to = made(commit, "v1", lambda: trained("v1"))
    assert git("--git-dir", other, "for-each-ref", f"refs/heads/{to}")
    assert not git("--git-dir", str(tmp_path / "origin"), "for-each-ref", f"refs/heads/{to}")
    git("config", "--unset", "remote.origin.pushurl")
    to = made(commit, "v2", lambda: trained("v2"))
    assert git("--git-dir", str(tmp_path / "origin"), "for-each-ref", f"refs/heads/{to}")


def test_keys_that_only_a_clone_has_are_refused(checkout: Path) -> None:
    with clone.at(clone.head(), "build"):
        make_key()
    clone.share("embedded")
    with pytest.raises(Refused, match="holds keys that count in this clone alone"), clone.at(clone.head(), "build"):
        pass


def test_a_clone_in_which_git_or_dvc_was_killed_works_again(checkout: Path) -> None:
    with clone.at(clone.head(), "worker"):
        left = [Path(".git/index.lock"), Path(".git/refs/heads/main.lock"), Path(".dvc/tmp/rwlock")]
        for path in left:
            write_text(path, "{")
    with clone.at(clone.head(), "worker"):
        assert not any(path.exists() for path in left)


def test_a_clone_signs_nothing_and_runs_no_hook_of_whoever_works_there(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git("config", "--file", str(tmp_path / "own"), "commit.gpgSign", "true")
    git("config", "--file", str(tmp_path / "own"), "gpg.program", "/bin/false")
    git("config", "--file", str(tmp_path / "own"), "core.hooksPath", str(tmp_path / "hooks"))
    write_text(tmp_path / "hooks/pre-commit", "#!/bin/sh\nexit 1\n")
    (tmp_path / "hooks/pre-commit").chmod(0o755)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "own"))
    assert branches.tip(made(clone.head(), "v1", lambda: trained("v1")))


@pytest.mark.long
@pytest.mark.parametrize(
    "setting",
    ["clone.defaultRemoteName=upstream", "core.excludesFile=/dev/stdin", "merge.ff=only", "merge.verifySignatures=true",
     "push.gpgSign=true", "status.showUntrackedFiles=no", "diff.orderFile=/nowhere"],
)  # fmt: skip
def test_a_run_works_alike_whatever_git_does_for_whoever_works_there(
    setting: str, checkout: Path, tmp_path: Path
) -> None:
    """An audit log that is new to git must be seen, a branch must merge, and all of it be handed over."""
    write_text(tmp_path / "ignored", "*.json\n")
    key, _, value = setting.partition("=")
    git("config", "--file", str(tmp_path / "none"), key, value.replace("/dev/stdin", str(tmp_path / "ignored")))
    retrained(("data/reports/v1.json", "1"))
    write_text(Path("data/reports/decisions.json"), "")
    assert clone.git("status", "--porcelain", "--", "data/reports/decisions.json")
    write_text(Path("src/code.py"), "1\n")
    for words in (("add", "src"), ("commit", "-qm", "mine"), ("push", "-q", "origin", "main")):
        clone.git(*words)
    retrained(("data/reports/v2.json", "2"))
    git("fetch", "-q", git("config", "remote.origin.url"), "built/retrain")
    held = git("ls-tree", "--name-only", "FETCH_HEAD", "data/reports/", "src/")
    assert held.split() == [*(f"data/reports/v{number}.json" for number in range(3)), "src/code.py"]


def test_a_project_in_a_folder_whose_name_is_not_ascii_is_retrained(checkout: Path) -> None:
    write_text(Path("Große Studie/dvc.lock"), LOCK)
    write_text(Path("Große Studie/params.yaml"), "")
    git("add", "--all")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "begun")
    git("push", "-q", "origin", "main")
    os.chdir("Große Studie")
    for number in "12":
        retrained((f"data/reports/v{number}.json", number))


def test_a_run_that_a_hook_started_leaves_the_checkout_alone(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_DIR", str(checkout / ".git"))
    write_text(Path("notes.txt"), "mine")
    retrained(("data/reports/v1.json", "1"))
    assert Path("notes.txt").exists()
    assert git("rev-parse", "--abbrev-ref", "HEAD") == "main"
    assert not Path("data/reports/v1.json").exists()


def test_what_a_person_named_from_the_checkout_is_found_from_the_clone(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mlruns/own.db")
    monkeypatch.setenv("CLINRL_SIGNING_KEY_FILE", "own.pem")
    with clone.at(clone.head(), "build"):
        assert os.environ["MLFLOW_TRACKING_URI"] == f"sqlite:///{checkout}/mlruns/own.db"
        assert os.environ["CLINRL_SIGNING_KEY_FILE"] == str(checkout / "own.pem")


RETRAINED = ("dvc.lock", "data/reports")


def retrained(*changes: tuple[str, str]) -> None:
    """What a run hands over as the branch built/retrain."""
    with clone.at(clone.head(), "retrain"):
        branches.go_on("built/retrain", RETRAINED)
        for path, text in changes:
            write_text(Path(path), text)
        branches.hand_over("built/retrain", "retrained", only=(*RETRAINED, "src/code.py"))


def test_a_run_goes_on_with_a_branch_that_nobody_merged_and_with_what_people_did(checkout: Path) -> None:
    retrained(("data/reports/v1.json", "1"))
    write_text(Path("src/code.py"), "newer")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qam", "newer")
    git("push", "-q", "origin", "main")
    retrained(("data/reports/v2.json", "2"))
    git("fetch", "-q", "origin", "built/retrain")
    assert [git("show", f"FETCH_HEAD:data/reports/v{i}.json") for i in (1, 2)] == ["1", "2"]
    assert git("show", "FETCH_HEAD:src/code.py") == "newer"
    git("merge", "-q", "--ff-only", "FETCH_HEAD")


def test_a_branch_that_is_refused_after_a_push_by_force_keeps_its_lines_of_the_audit_log(checkout: Path) -> None:
    """What a person would lose by deleting the branch."""
    log, author = paths.AUDIT_LOG, ("-c", "user.name=a", "-c", "user.email=a@b")
    write_text(log, "one\n")
    write_text(Path("src/code.py"), "newer")
    git("add", "--all")
    git(*author, "commit", "-qm", "newer")
    git("push", "-q", "origin", "main")
    retrained((str(log), "one\ntwo\n"))
    git("reset", "-q", "--hard", "HEAD^")
    write_text(log, "one\n")
    git("add", "--all")
    git(*author, "commit", "-qm", "another")
    git("push", "-qf", "origin", "main")
    with pytest.raises(Refused, match=r"changes src/code\.py, .* It has lines of .* nowhere else") as refused:
        retrained()
    for command in re.findall(r"`(git [^`]+)`", str(refused.value)):
        subprocess.run(command, shell=True, check=True)
    git(*author, "commit", "-qam", "taken over")
    git("push", "-q", "origin", "main")
    with pytest.raises(Refused) as refused:
        retrained()
    assert "nowhere else" not in str(refused.value)
    assert log.read_text() == "one\ntwo\n"


def test_a_branch_may_add_to_the_audit_log_and_take_nothing_from_it(checkout: Path) -> None:
    log = paths.AUDIT_LOG
    write_text(log, "one\ntwo\n{")  # a kill cut the last line short
    git("add", "--all")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "decided")
    git("push", "-q", "origin", "main")
    retrained((str(log), "one\ntwo\nthree\n"))
    retrained()  # goes on from it
    git("fetch", "-q", "origin", "built/retrain")
    git("merge", "-q", "--ff-only", "FETCH_HEAD")
    git("push", "-q", "origin", "main")
    retrained((str(log), "one\ntwo\n"))  # three took a share of the error budget, say
    with pytest.raises(Refused, match=r"branch built/retrain lacks lines of data/reports/decisions\.jsonl, which only"):
        retrained()


def test_a_branch_that_does_not_merge_or_holds_code_is_said_and_the_next_clone_is_clean(checkout: Path) -> None:
    retrained(("data/reports/v0.json", "of the branch"))
    write_text(Path("data/reports/v0.json"), "of a person")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qam", "by hand")
    git("push", "-q", "origin", "main")
    for _ in range(2):
        with pytest.raises(Refused, match=r"branch built/retrain does not merge with [0-9a-f]+: both changed the same"):
            retrained()
    git("push", "-q", "origin", "--delete", "built/retrain")
    retrained(("src/code.py", "evil"))
    with pytest.raises(Refused, match=r"branch built/retrain changes src/code.py, which no retraining does"):
        retrained()
