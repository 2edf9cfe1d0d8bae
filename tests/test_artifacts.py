"""Artefacts on disk: the advice for an altered one works, where DVC's own copy was altered too."""

import errno
import os
import shutil
import subprocess
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import forks
from clinrl import artifacts
from clinrl.errors import ArtefactError, Busy, ParamsError

GRAPH = """
stages:
  a:
    cmd: cp -r source out
    outs: [out]
"""


@pytest.mark.long
def test_what_is_altered_in_the_cache_too_is_found_and_built_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    dvc = partial(forks.dvc, DVC_SITE_CACHE_DIR=str(tmp_path / "site"))
    Path("source").mkdir()
    Path("source/f").write_text("good")
    artifacts.seal(Path("source"), kind="cases", name="x1", task="esi", task_version=2, spec={}, inputs={})
    Path("dvc.yaml").write_text(GRAPH)
    dvc("init", "--no-scm")
    dvc("repro")
    artifacts.verified(Path("out"))
    kept = next(path for path in Path(".dvc/cache").rglob("*") if path.is_file() and path.read_text() == "good")
    kept.chmod(0o644)
    kept.write_text("evil")
    kept.chmod(0o444)
    shutil.rmtree("out")
    dvc("checkout")
    with pytest.raises(ArtefactError, match="out/f was altered after it was built; restore it") as refused:
        artifacts.verified(Path("out"))  # DVC brought the altered one, and would bring it again
    first, _, second = str(refused.value).split("run `")[1].removesuffix("`").partition("` and `")
    assert second == "dvc repro"
    subprocess.run(first, shell=True, check=True)
    dvc("repro")
    artifacts.verified(Path("out"))


@given(st.lists(st.integers(), min_size=1), st.data())
def test_lines_are_read_once_they_are_whole(tmp_path_factory, values, data) -> None:
    path = tmp_path_factory.mktemp("lines") / "live.jsonl"
    assert not [*artifacts.whole_lines(path)]
    lines = [artifacts.canonical_json({"step": value}).encode() for value in values]
    path.write_bytes(b"\n".join(lines)[: -data.draw(st.integers(1, len(lines[-1])))])
    assert [line["step"] for line in artifacts.whole_lines(path)] == values[:-1]


def test_a_line_that_a_full_disk_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "live.jsonl"
    path.write_text('{"step":1}\n{"step":2,"lo{"step":2}\n{"step":3}\n')
    assert [*artifacts.whole_lines(path)] == [{"step": 1}, {"step": 3}]


def without_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # `write` names no file


def copies(folder: Path) -> None:
    (folder / "from").mkdir()
    (folder / "from/f").touch()
    shutil.copytree(folder / "from", folder / "to", copy_function=without_space)


def saves(_: Path, words: str = "No space left on device (os error 28)") -> None:
    raise RuntimeError(f"I/O error: {words}")  # as safetensors does


@pytest.mark.parametrize(
    "writes",
    [
        without_space, copies, saves, partial(saves, words="Disk quota exceeded (os error 122)"),
        lambda folder: artifacts.write_text(folder / "f", "new"),
    ],
)  # fmt: skip
def test_a_full_disk_is_told_with_the_folder_that_was_to_be_made(writes, tmp_path, monkeypatch) -> None:
    target = tmp_path / "made"
    with artifacts.staged(target) as folder:
        (folder / "f").write_text("old")
    monkeypatch.setattr(os, "fsync", without_space)
    with pytest.raises(OSError, match="No space left") as raised, artifacts.staged(target) as folder:
        writes(folder)
    assert raised.value.errno == errno.ENOSPC
    assert raised.value.filename in (str(target), str(target / "f"))
    assert (target / "f").read_text() == "old"
    assert [*tmp_path.iterdir()] == [target]


def test_torch_does_not_say_why_it_failed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=10, f_frsize=4096))
    with pytest.raises(OSError, match="No space left"), artifacts.staged(tmp_path / "made"):
        raise RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 320 vs 214")


def test_other_errors_stay_as_they_are(tmp_path) -> None:
    for error in (ValueError("a bug"), RuntimeError("shapes differ"), OSError(errno.EBADF, "no such stream")):
        with pytest.raises(type(error)) as raised, artifacts.staged(tmp_path / "made"):
            raise error
        assert raised.value is error


def test_an_interrupt_between_the_two_renames_brings_the_old_folder_back(tmp_path, monkeypatch) -> None:
    target, replace = tmp_path / "made", os.replace
    with artifacts.staged(target) as folder:
        (folder / "f").write_text("old")

    def interrupted(source, to) -> None:
        if Path(to) == target and ".partial-" in str(source):
            raise KeyboardInterrupt
        replace(source, to)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt), artifacts.staged(target) as folder:
        (folder / "f").write_text("new")
    assert (target / "f").read_text() == "old"
    monkeypatch.undo()
    for process in (99999999, os.getpid()):  # of a process that was killed there; in containers it had the same id
        target.rename(tmp_path / f".made.former-{process}")
        with pytest.raises(ValueError, match="a bug"), artifacts.staged(target):
            raise ValueError("a bug")
        assert [*tmp_path.iterdir()] == [target]
    shutil.copytree(target, tmp_path / f".made.former-{os.getpid()}")  # it was killed after the second renaming
    with artifacts.staged(target) as folder:
        (folder / "f").write_text("new")
    assert ([*tmp_path.iterdir()], (target / "f").read_text()) == ([target], "new")


def test_what_came_into_a_folder_while_it_was_made_anew_is_not_removed(tmp_path) -> None:
    with artifacts.replaced(tmp_path / "made", "it"):
        pass
    with pytest.raises(ParamsError, match="was changed since"), artifacts.replaced(tmp_path / "made", "it"):
        (tmp_path / "made/mine").write_text("mine")
    assert (tmp_path / "made/mine").read_text() == "mine"


def test_a_folder_is_replaced_by_one_process_at_a_time(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with artifacts.replaced(Path("made"), "it"), pytest.raises(Busy), artifacts.replaced(tmp_path / "made", "it"):
        pass


def test_the_folder_of_a_process_that_still_writes_it_is_left_alone(tmp_path) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        theirs = tmp_path / f".made.partial-{other.pid}"
        theirs.mkdir()
        with artifacts.staged(tmp_path / "made"):
            pass
        other.kill()
    assert theirs.is_dir()


def test_a_hidden_folder_of_a_person_is_left_alone(tmp_path) -> None:
    mine = tmp_path / ".made.partial-old"
    mine.mkdir()
    with artifacts.staged(tmp_path / "made"):
        pass
    assert mine.is_dir()


def test_a_pipe_in_place_of_a_manifest_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "manifest.json")
    with pytest.raises(ArtefactError, match=r"manifest\.json is a pipe"):
        artifacts.read_manifest(tmp_path)
