import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dvc.dvcfile import Lockfile
from dvc.exceptions import DvcException
from dvc.repo import Repo
from dvc.utils.serialize import modify_yaml
from dvc.utils.strictyaml import YAMLSyntaxError, YAMLValidationError
from dvc_data.hashfile.tree import Tree
from dvc_data.index import fetch
from dvc_objects.fs import LocalFileSystem, MemoryFileSystem, generic

from clinrl.artifacts import write_text
from clinrl.runtime import dvc_state
from clinrl.runtime.dvc_command import HEAD, Recorded, Stages, check_fetched, load, modify

ROOT = Path(__file__).parents[2]
SEVERAL = 12
"""Stages of the committed lock; DVC needs seconds for all."""
PIPELINE = """\
stages:
  say:
    foreach: {one: {}, two: {}}
    do:
      cmd: echo ${key} > out/${key}.txt
      deps: [source.txt]
      params: [rate]
      outs: ["out/${key}.txt"]
"""


def of_its_own(folder: Path) -> dict[str, str]:
    """The environment of a DVC that shares nothing with this project's."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("DVC_")}
    return env | {"PYTHONPATH": str(ROOT / "src"), "DVC_NO_ANALYTICS": "1", "DVC_SITE_CACHE_DIR": str(folder / "site")}


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    """Stages of every kind that the committed lock holds, its longest lines among them."""
    stages = Stages((ROOT / "dvc.lock").read_text().removeprefix(HEAD))
    longest = sorted(stages, key=lambda name: -max(len(line) for line in stages[name].splitlines()))[: SEVERAL // 2]
    kinds = {name.partition("@")[0]: name for name in stages}
    kept = {*longest, *kinds.values()}
    path = tmp_path / "dvc.lock"
    path.write_text(HEAD + "".join(text for name, text in stages.items() if name in kept))
    return path


def changed(stage: dict[str, Any]) -> dict[str, Any]:
    """A stage as DVC records it after another run."""
    return {**stage, "outs": [{"path": "data/" + "long/" * 20, "hash": "md5", "md5": "0" * 32, "size": 1}]}


def test_writes_the_bytes_that_dvc_writes(lock: Path) -> None:
    theirs = lock.with_name("theirs.lock")
    shutil.copy(lock, theirs)
    names = [*Stages(lock.read_text().removeprefix(HEAD))]
    for way, path in ((modify, lock), (modify_yaml, theirs)):
        with way(str(path)) as data:
            before = data["stages"].get(names[2], {})
            data["stages"].update({names[2]: changed(before)})
            data["stages"].update({names[0]: data["stages"].get(names[0], {})})
            data["stages"].update({"train@new": changed({"cmd": "true", "params": {"params.yaml": {"lr": 1e-06}}})})
    assert lock.read_bytes() == theirs.read_bytes()
    assert f"  {names[1]}:\n" in lock.read_text()


def test_a_stage_is_read_as_dvc_reads_it(lock: Path) -> None:
    with modify(str(lock)) as ours, modify_yaml(str(lock)) as theirs:
        assert {name: ours["stages"].get(name) for name in theirs["stages"]} == theirs["stages"]
        assert ours["stages"].get("none", {}) == {}


def test_a_lock_is_read_as_dvc_reads_it(lock: Path) -> None:
    theirs = Lockfile(Repo.init(lock.parent, no_scm=True), str(lock))
    ours = load(theirs)["stages"]
    assert isinstance(ours, Recorded)
    assert {name: ours.get(name) for name in ours} == theirs.load()["stages"]
    lock.write_text(lock.read_text() + "datasets: []\n")
    assert not isinstance(load(theirs)["stages"], Recorded)
    lock.unlink()
    assert load(theirs) == theirs.load() == {}


@pytest.mark.parametrize(
    ("text", "error"), [("  bad:\n    outs: []\n", YAMLValidationError), ("  bad:\n    cmd: [\n", YAMLSyntaxError)]
)
def test_what_is_wrong_with_a_stage_is_told_as_dvc_tells_it(
    text: str, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("dvc.lock").write_text(HEAD + "  good:\n    cmd: echo\n" + text)
    theirs = Lockfile(Repo.init(no_scm=True), str(tmp_path / "dvc.lock"))
    stages = load(theirs)["stages"]
    assert stages.get("good") == {"cmd": "echo"}
    with pytest.raises(error) as expected:
        theirs.load()
    with pytest.raises(error) as found:
        stages.get("bad")
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize(
    "text", ["  a:\n    cmd: a\n  a:\n    cmd: b\n", "  a: # by hand\n    cmd: a\n", "  'a':\n    cmd: a\n", "\xff"]
)
def test_doubled_and_odd_stages_are_left_to_dvc(text: str, tmp_path: Path) -> None:
    path = tmp_path / "dvc.lock"
    path.write_bytes((HEAD + text).encode("latin-1"))
    lock = Lockfile(Repo.init(tmp_path, no_scm=True), str(path))
    try:
        expected = lock.load()
    except DvcException as error:
        with pytest.raises(type(error)):
            load(lock)
    else:
        assert load(lock) == expected
        assert not isinstance(load(lock)["stages"], Recorded)


@pytest.mark.parametrize("text", ["", HEAD + "  a:\n    cmd: a\ndatasets: []\n", "schema: '3.0'\nstages: {}\n"])
def test_other_files_are_changed_in_dvcs_own_way(text: str, tmp_path: Path) -> None:
    path = tmp_path / "dvc.lock"
    path.write_text(text)
    with modify(str(path)) as data:
        assert not isinstance(data.get("stages"), Stages)


@pytest.mark.long
def test_a_pipeline_ends_in_the_same_lock(tmp_path: Path) -> None:
    env = of_its_own(tmp_path)
    locks = []
    for module in ("dvc", "clinrl.runtime.dvc_command"):
        folder = tmp_path / module
        (folder / "out").mkdir(parents=True)
        dvc = [sys.executable, "-m", module]
        subprocess.run([*dvc, "init", "--no-scm", "-q"], cwd=folder, env=env, check=True)
        (folder / "dvc.yaml").write_text(PIPELINE)
        (folder / "params.yaml").write_text("rate: 1.0e-6\n")
        for source in ("first", "second"):
            (folder / "source.txt").write_text(source)
            subprocess.run([*dvc, "repro", "-q"], cwd=folder, env=env, check=True)
        locks.append((folder / "dvc.lock").read_bytes())
    assert locks[0] == locks[1]
    assert b"say@two" in locks[0]
    write_text(folder / dvc_state.COPY, locks[1].decode())
    (folder / "dvc.lock").write_bytes(locks[1][: locks[1].rindex(b"md5: ")] + b"m")
    done = subprocess.run([*dvc, "repro", "-q"], cwd=folder, env=env, check=True, capture_output=True, text=True)
    assert "dvc.lock was cut short by a kill; it is as before the last stage again" in done.stderr
    assert (folder / "dvc.lock").read_bytes() == locks[1]


@pytest.mark.long
def test_an_output_that_the_cache_cannot_take_is_not_recorded(tmp_path: Path) -> None:
    env, words = of_its_own(tmp_path), [sys.executable, "-m", "clinrl.runtime.dvc_command"]
    (tmp_path / "out").mkdir()
    subprocess.run([*words, "init", "--no-scm", "-q"], cwd=tmp_path, env=env, check=True)
    (tmp_path / "dvc.yaml").write_text(PIPELINE)
    (tmp_path / "params.yaml").write_text("rate: 1.0e-6\n")
    (tmp_path / "source.txt").write_text("first")
    blocked = tmp_path / ".dvc/cache/files/md5" / hashlib.md5(b"one\n", usedforsecurity=False).hexdigest()[:2]
    blocked.parent.mkdir(parents=True)
    blocked.symlink_to("/proc")  # where not even root can write, as on a full disk
    failed = subprocess.run(
        [*words, "repro", "say@one"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert failed.returncode
    assert "run `dvc commit -f` for the stage, since `dvc repro` would delete it" in failed.stderr.splitlines()[-1]
    assert (tmp_path / "out/one.txt").read_text() == "one\n"
    assert not (tmp_path / "dvc.lock").exists()
    blocked.unlink()
    subprocess.run([*words, "commit", "-f", "-q", "say@one"], cwd=tmp_path, env=env, check=True)
    assert "say@one" in (tmp_path / "dvc.lock").read_text()
    assert len([*blocked.iterdir()]) == 1


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository in which DVC was begun. Only copy it."""
    folder = tmp_path_factory.mktemp("begun")
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    env = of_its_own(tmp_path_factory.mktemp("of"))
    subprocess.run([sys.executable, "-m", "dvc", "init", "-q"], cwd=folder, env=env, check=True)
    return folder


@pytest.mark.long
@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"relpath": "../../.git/config"}, "a folder's listing"),
        ({"relpath": "/etc/passwd"}, "a folder's listing"),
        ({"relpath": "./a"}, "a folder's listing"),
        ({"relpath": "a/.git/config"}, "a folder's listing"),
        ({"relpath": "HEAD"}, "a folder's listing"),
        ({"md5": "../../../evil"}, "a digest"),
    ],
)
def test_what_leads_out_of_a_folder_or_of_the_cache_is_not_pulled(
    changed: dict[str, str], says: str, begun: Path, tmp_path: Path
) -> None:
    """Whoever can write to the remote and to dvc.lock chooses both, and DVC joins them to paths as they are."""
    project, remote = tmp_path / "project", tmp_path / "remote"
    env = of_its_own(tmp_path)
    shutil.copytree(begun, project)
    (project / ".dvc/config").write_text(f"[core]\n    remote = store\n['remote \"store\"']\n    url = {remote}\n")

    def stored(content: bytes, end: str = "") -> str:
        digest = hashlib.md5(content).hexdigest() + end
        (remote / "files/md5" / digest[:2]).mkdir(parents=True, exist_ok=True)
        (remote / "files/md5" / digest[:2] / digest[2:]).write_bytes(content)
        return digest

    (tmp_path / "evil").write_text("evil")
    listing = [{"md5": stored(b"fine"), "relpath": "fine"}, {"md5": stored(b"evil"), "relpath": "file"} | changed]
    made = stored(json.dumps(listing).encode(), ".dir")
    (project / "dvc.yaml").write_text("stages: {make: {cmd: make, outs: [data/made]}}\n")
    outs = f"    outs:\n    - path: data/made\n      hash: md5\n      md5: {made}\n      size: 8\n      nfiles: 2\n"
    (project / "dvc.lock").write_text(f"{HEAD}  make:\n    cmd: make\n{outs}")
    before = (project / ".git/config").read_text()
    command = [sys.executable, "-m", "clinrl.runtime.dvc_command", "pull", "make"]
    done = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, check=False)
    assert done.returncode
    assert f"clinrl: {says} that DVC was to follow leads out of" in done.stderr
    assert (project / ".git/config").read_text() == before
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.read_bytes() == b"evil"
                and remote not in path.parents and path != tmp_path / "evil"]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("words", [("repro", "--no-run-cache", "--single-item", "make"), ("pull", "make"), ("status",)])
def test_a_digest_that_leads_out_of_the_cache_removes_and_reads_nothing(
    words: tuple[str, ...], begun: Path, tmp_path: Path
) -> None:
    """DVC removes from its cache what has another digest than its name says."""
    env = of_its_own(tmp_path)
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    (tmp_path / "dvc.yaml").write_text("stages: {make: {cmd: echo made > made.txt, outs: [made.txt]}}\n")
    outs = "    outs:\n    - path: made.txt\n      hash: md5\n      md5: ../../../../.git/config\n      size: 8\n"
    (tmp_path / "dvc.lock").write_text(f"{HEAD}  make:\n    cmd: echo made > made.txt\n{outs}")
    before = (tmp_path / ".git/config").read_text()
    command = [sys.executable, "-m", "clinrl.runtime.dvc_command", *words]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert (tmp_path / ".git/config").read_text() == before
    assert not (tmp_path / "made.txt").exists() or (tmp_path / "made.txt").read_text() == "made\n"
    assert done.returncode
    assert "clinrl: a digest that DVC was to follow leads out of its cache" in done.stderr


@pytest.mark.long
def test_what_a_remote_sends_under_the_digest_of_something_else_is_not_put_into_its_place(
    begun: Path, tmp_path: Path
) -> None:
    project, remote, env = tmp_path / "project", tmp_path / "remote", of_its_own(tmp_path)
    shutil.copytree(begun, project)
    (project / ".dvc/config").write_text(f"[core]\n    remote = store\n['remote \"store\"']\n    url = {remote}\n")
    digest = hashlib.md5(b"made\n", usedforsecurity=False).hexdigest()
    stored = remote / "files/md5" / digest[:2] / digest[2:]
    stored.parent.mkdir(parents=True)
    (project / "dvc.yaml").write_text("stages: {make: {cmd: make, outs: [made.txt]}}\n")
    outs = f"    outs:\n    - path: made.txt\n      hash: md5\n      md5: {digest}\n      size: 5\n"
    (project / "dvc.lock").write_text(f"{HEAD}  make:\n    cmd: make\n{outs}")

    def pulled() -> int:
        command = [sys.executable, "-m", "clinrl.runtime.dvc_command", "pull", "make"]
        return subprocess.run(command, cwd=project, env=env, capture_output=True, check=False).returncode

    stored.write_bytes(b"evil\n")
    stored.chmod(0o444)  # DVC takes what is read-only for whole
    assert pulled() == 1
    assert not (project / "made.txt").exists()
    stored.unlink()
    stored.write_bytes(b"made\n")
    assert pulled() == 0
    assert (project / "made.txt").read_bytes() == b"made\n"


@pytest.mark.long
def test_a_listing_that_was_replaced_in_a_remote_is_not_followed(begun: Path, tmp_path: Path) -> None:
    """Each file that it names may have the digest that it names."""
    project, remote, env = tmp_path / "project", tmp_path / "remote", of_its_own(tmp_path)
    shutil.copytree(begun, project)
    (project / ".dvc/config").write_text(f"[core]\n    remote = store\n['remote \"store\"']\n    url = {remote}\n")

    def store(content: bytes, digest: str = "") -> str:
        digest = digest or hashlib.md5(content, usedforsecurity=False).hexdigest()
        (remote / "files/md5" / digest[:2]).mkdir(parents=True, exist_ok=True)
        (remote / "files/md5" / digest[:2] / digest[2:]).write_bytes(content)
        return digest

    good, evil = (json.dumps([{"md5": store(content), "relpath": "file"}]).encode() for content in (b"made", b"evil"))
    made = hashlib.md5(good, usedforsecurity=False).hexdigest() + ".dir"
    (project / "dvc.yaml").write_text("stages: {make: {cmd: make, outs: [made]}}\n")
    outs = f"    outs:\n    - path: made\n      hash: md5\n      md5: {made}\n      size: 4\n      nfiles: 1\n"
    (project / "dvc.lock").write_text(f"{HEAD}  make:\n    cmd: make\n{outs}")
    for content, code in ((evil, 1), (good, 0)):
        store(content, made)
        command = [sys.executable, "-m", "clinrl.runtime.dvc_command", "pull", "make"]
        done = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, check=False)
        assert min(done.returncode, 1) == code, done.stderr
        assert (project / "made/file").exists() == (not code)
    assert (project / "made/file").read_bytes() == b"made"


def test_a_file_that_came_in_part_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Cut(MemoryFileSystem):  # type: ignore[misc]
        def get_file(self, _: str, to_path: str, **named: Any) -> None:
            Path(to_path).write_bytes(b"a part")
            raise ConnectionResetError("cut")

    for module, name in ((generic, "copy"), (fetch, "transfer"), (Tree, "load")):
        monkeypatch.setattr(module, name, getattr(module, name))  # put back after the test
    check_fetched()
    failed, file = list[Any](), tmp_path / "file"
    generic.copy(Cut(), ["/from"], LocalFileSystem(), [str(file)], on_error=lambda *words: failed.append(words))
    assert [(*paths, str(error)) for *paths, error in failed] == [("/from", str(file), "cut")]
    assert [*tmp_path.iterdir()] == []
    with pytest.raises(ConnectionResetError):
        generic.copy(Cut(), ["/from"], LocalFileSystem(), [str(file)])
