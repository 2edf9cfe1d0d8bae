"""What DVC believes: only the owner writes where it keeps pickles, and half a dvc.lock is put back as it was."""

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dvc.lock import make_lock
from ruamel.yaml import YAML

from clinrl.artifacts import locked
from clinrl.cli import main as cli
from clinrl.errors import Refused
from clinrl.pipeline import plan
from clinrl.runtime import dvc_state

ROOT = Path(__file__).parents[2]
KEPT = dvc_state.SITE / "repo/.gitignore"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone as far as DVC sees it."""
    monkeypatch.delenv(dvc_state.VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    for file in (".dvc/config", KEPT):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    return tmp_path


def mode(folder: Path) -> int:
    return stat.S_IMODE(folder.stat().st_mode)


@pytest.mark.long
def test_dvc_keeps_its_pickles_in_a_folder_that_git_keeps(project: Path) -> None:
    (project / "dvc.yaml").write_text("stages:\n  a:\n    cmd: echo a > a\n    outs: [a]\n")
    words = [sys.executable, "-c", "import os; os.umask(0o022); from dvc.cli import main; main(['repro', '-q'])"]
    subprocess.run(["git", "init", "-q"], check=True)
    subprocess.run(words, check=True)
    stores = [*dvc_state.SITE.rglob("cache.db")]
    assert stores  # where they are, if DVC moves them
    assert not [folder for folder in (project / ".clinrl").rglob("*") if mode(folder) & stat.S_IWOTH]
    listed = subprocess.run(["git", "ls-files", KEPT], cwd=ROOT, check=True, capture_output=True, text=True)
    assert listed.stdout.strip() == str(KEPT)
    dvc_state.fence()
    assert (mode(dvc_state.SITE), mode(dvc_state.TMP)) == (0o700, 0o700)


@pytest.mark.parametrize("mode", [0o777, 0o775])
@pytest.mark.parametrize(
    "folder", [Path(".clinrl"), dvc_state.SITE, dvc_state.SITE / "repo", dvc_state.TMP, Path(".dvc")]
)
def test_what_others_could_write_is_refused_with_what_to_do(
    project: Path, folder: Path, mode: int, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in (dvc_state.SITE, dvc_state.TMP):
        (place / "index").mkdir(parents=True)
    folder.chmod(mode)
    assert cli.main(["check"]) == 1
    said = capsys.readouterr().err
    advice = said.split("`")[1]
    assert "which can run code" in said
    subprocess.run(advice, shell=True, check=True)
    dvc_state.fence()
    assert not [place for place in (dvc_state.SITE, dvc_state.TMP) if stat.S_IMODE(place.stat().st_mode) != 0o700]
    assert not [place for place in (Path(".clinrl"), Path(".dvc")) if place.stat().st_mode & 0o022]


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o000])
def test_a_fresh_clone_is_closed_whatever_the_umask(project: Path, umask: int) -> None:
    for folder in (".clinrl", dvc_state.SITE, dvc_state.SITE / "repo", ".dvc"):
        Path(folder).chmod(0o777 & ~umask)
    before = os.umask(umask)
    try:
        dvc_state.fence()
    finally:
        os.umask(before)
    assert [mode(folder) for folder in (dvc_state.SITE, dvc_state.TMP)] == [0o700, 0o700]
    assert not [folder for folder in project.rglob("*/") if mode(folder) & 0o022]
    dvc_state.fence()


def test_what_the_run_cache_says_that_stages_made_is_dropped(project: Path) -> None:
    (dvc_state.RUNS / "ab").mkdir(parents=True)
    dvc_state.fence()
    assert not dvc_state.RUNS.exists()


def test_the_run_cache_stays_while_dvc_may_be_writing_in_it(project: Path) -> None:
    (dvc_state.RUNS / "ab").mkdir(parents=True)
    with locked(dvc_state.AT_WORK):
        dvc_state.fence()
        assert dvc_state.RUNS.exists()
    dvc_state.fence()
    assert not dvc_state.RUNS.exists()


def test_a_sticky_folder_may_hold_it(project: Path) -> None:
    (dvc_state.SITE / "index").mkdir()
    Path(".clinrl").chmod(0o1777)
    dvc_state.fence()
    assert mode(dvc_state.SITE) == 0o700


def test_a_folder_elsewhere_that_others_can_replace_is_refused(
    project: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    above = tmp_path_factory.mktemp("above")
    monkeypatch.setenv(dvc_state.VARIABLE, str(above / "site"))
    dvc_state.fence()
    assert mode(above / "site") == 0o700
    above.chmod(0o775)
    with pytest.raises(Refused, match=f"set {dvc_state.VARIABLE} to a folder of your own"):
        dvc_state.fence()


def test_the_plan_asks_no_dvc_whose_pickles_others_can_write(project: Path) -> None:
    (dvc_state.SITE / "index").mkdir()
    dvc_state.SITE.chmod(0o775)
    with pytest.raises(Refused, match="other users can write in"):
        plan.dvc_states(["train@v1"])


def test_a_folder_of_somebody_else_is_refused(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(dvc_state.SITE, 12345, -1)
    with pytest.raises(Refused, match="other users can write in"):
        dvc_state.fence()


def test_a_link_is_refused(project: Path) -> None:
    shutil.rmtree(dvc_state.SITE)
    (project / "elsewhere").mkdir()
    dvc_state.SITE.symlink_to(project / "elsewhere")
    with pytest.raises(Refused, match="other users can write in"):
        dvc_state.fence()


def test_another_place_is_looked_at_too(
    project: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path_factory.mktemp("elsewhere") / "other"
    other.mkdir(mode=0o700)
    other.chmod(0o777)
    monkeypatch.setenv(dvc_state.VARIABLE, str(other))
    with pytest.raises(Refused, match=f"set {dvc_state.VARIABLE} to a folder of your own"):
        dvc_state.fence()


def test_without_dvc_nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dvc_state.fence()
    assert not [*tmp_path.iterdir()]


# Half a dvc.lock


@pytest.fixture
def recorded(project: Path) -> Path:
    """A project whose dvc.lock records three stages."""
    out = {"path": "data/x", "hash": "md5", "md5": "0" * 32, "size": 1}
    stages = {f"train@v{number}": {"cmd": "python -m clinrl stage", "outs": [out]} for number in range(3)}
    YAML(typ="safe").dump({"schema": "2.0", "stages": stages}, dvc_state.LOCK)
    return dvc_state.LOCK


HALF = (
    lambda text: "",
    lambda text: text[: text.rindex("md5: ")] + "m",
    lambda text: text[: text.rindex("outs:")] + "outs:\n  ",
    lambda text: text + "  train@v9:\n    c",  # longer than the copy
)


@pytest.mark.parametrize("cut", HALF)
def test_half_a_lock_that_a_kill_left_is_mended(recorded: Path, cut: Callable[[str], str], capsys: Any) -> None:
    dvc_state.keep()
    whole = dvc_state.LOCK.read_text()
    dvc_state.LOCK.write_text(cut(whole))
    dvc_state.fence()
    assert dvc_state.LOCK.read_text() == whole
    assert "was cut short by a kill" in capsys.readouterr().err
    assert dvc_state.CUT.read_text() == cut(whole)


def test_a_lock_that_is_whole_stays_as_it_is(recorded: Path, capsys: Any) -> None:
    dvc_state.fence()
    dvc_state.keep()
    stages = YAML(typ="safe").load(dvc_state.LOCK)
    stages["stages"].popitem()
    YAML(typ="safe").dump(stages, dvc_state.LOCK)
    shorter = dvc_state.LOCK.read_text()
    dvc_state.fence()
    assert dvc_state.LOCK.read_text() == shorter
    assert capsys.readouterr().err == ""


def test_nothing_is_mended_while_dvc_is_at_work(recorded: Path) -> None:
    dvc_state.keep()
    dvc_state.LOCK.write_text("")
    with make_lock(str(dvc_state.AT_WORK), tmp_dir=str(dvc_state.AT_WORK.parent)):
        dvc_state.fence()
    assert dvc_state.LOCK.read_text() == ""


def test_a_merge_that_is_not_finished_is_left_to_the_person(recorded: Path) -> None:
    dvc_state.keep()
    conflict = "<<<<<<< HEAD\nschema: '2.0'\n=======\n"
    dvc_state.LOCK.write_text(conflict)
    dvc_state.fence()
    assert dvc_state.LOCK.read_text() == conflict


def test_a_lock_that_is_a_folder_is_left_to_the_person(recorded: Path) -> None:
    dvc_state.keep()
    dvc_state.LOCK.unlink()
    dvc_state.LOCK.mkdir()
    dvc_state.keep()
    dvc_state.fence()
    assert dvc_state.LOCK.is_dir()
    assert dvc_state.COPY.is_file()


def test_no_copy_is_taken_of_what_dvc_is_writing(recorded: Path) -> None:
    dvc_state.keep()
    whole = dvc_state.COPY.read_text()
    dvc_state.LOCK.write_text("")
    with make_lock(str(dvc_state.AT_WORK), tmp_dir=str(dvc_state.AT_WORK.parent)):
        dvc_state.keep()
    assert dvc_state.COPY.read_text() == whole
