"""Who can write where DVC keeps its pickles: only the owner, whoever made the folder."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from clinrl import cli, plan, private
from clinrl.errors import Refused

ROOT = Path(__file__).parents[1]
KEPT = private.SITE / "repo/.gitignore"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone as far as DVC sees it."""
    monkeypatch.delenv(private.VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    for file in (".dvc/config", KEPT):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    return tmp_path


def mode(folder: Path) -> int:
    return stat.S_IMODE(folder.stat().st_mode)


def test_dvc_keeps_its_pickles_in_a_folder_that_git_keeps(project: Path) -> None:
    (project / "dvc.yaml").write_text("stages:\n  a:\n    cmd: echo a > a\n    outs: [a]\n")
    words = [sys.executable, "-c", "import os; os.umask(0o022); from dvc.cli import main; main(['repro', '-q'])"]
    subprocess.run(["git", "init", "-q"], check=True)
    subprocess.run(words, check=True)
    stores = [*private.SITE.rglob("cache.db")]
    assert stores  # where they are, if DVC moves them
    assert not [folder for folder in (project / ".clinrl").rglob("*") if mode(folder) & stat.S_IWOTH]
    listed = subprocess.run(["git", "ls-files", KEPT], cwd=ROOT, check=True, capture_output=True, text=True)
    assert listed.stdout.strip() == str(KEPT)
    private.fence()
    assert (mode(private.SITE), mode(private.TMP)) == (0o700, 0o700)


@pytest.mark.parametrize("mode", [0o777, 0o775])
@pytest.mark.parametrize("folder", [Path(".clinrl"), private.SITE, private.SITE / "repo", private.TMP, Path(".dvc")])
def test_what_others_could_write_is_refused_with_what_to_do(
    project: Path, folder: Path, mode: int, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in (private.SITE, private.TMP):
        (place / "index").mkdir(parents=True)
    folder.chmod(mode)
    assert cli.main(["check"]) == 1
    said = capsys.readouterr().err
    advice = said.split("`")[1]
    assert "which can run code" in said
    subprocess.run(advice, shell=True, check=True)
    private.fence()
    assert not [place for place in (private.SITE, private.TMP) if stat.S_IMODE(place.stat().st_mode) != 0o700]
    assert not [place for place in (Path(".clinrl"), Path(".dvc")) if place.stat().st_mode & 0o022]


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o000])
def test_a_fresh_clone_is_closed_whatever_the_umask(project: Path, umask: int) -> None:
    for folder in (".clinrl", private.SITE, private.SITE / "repo", ".dvc"):
        Path(folder).chmod(0o777 & ~umask)
    before = os.umask(umask)
    try:
        private.fence()
    finally:
        os.umask(before)
    assert [mode(folder) for folder in (private.SITE, private.TMP)] == [0o700, 0o700]
    assert not [folder for folder in project.rglob("*/") if mode(folder) & 0o022]
    private.fence()


def test_a_sticky_folder_may_hold_it(project: Path) -> None:
    (private.SITE / "index").mkdir()
    Path(".clinrl").chmod(0o1777)
    private.fence()
    assert mode(private.SITE) == 0o700


def test_a_folder_elsewhere_that_others_can_replace_is_refused(
    project: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    above = tmp_path_factory.mktemp("above")
    monkeypatch.setenv(private.VARIABLE, str(above / "site"))
    private.fence()
    assert mode(above / "site") == 0o700
    above.chmod(0o775)
    with pytest.raises(Refused, match=f"set {private.VARIABLE} to a folder of your own"):
        private.fence()


def test_the_plan_asks_no_dvc_whose_pickles_others_can_write(project: Path) -> None:
    (private.SITE / "index").mkdir()
    private.SITE.chmod(0o775)
    with pytest.raises(Refused, match="others than you can write in"):
        plan.dvc_states(["train@v1"])


def test_a_folder_of_somebody_else_is_refused(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(private.SITE, 12345, -1)
    with pytest.raises(Refused, match="others than you can write in"):
        private.fence()


def test_a_link_is_refused(project: Path) -> None:
    shutil.rmtree(private.SITE)
    (project / "elsewhere").mkdir()
    private.SITE.symlink_to(project / "elsewhere")
    with pytest.raises(Refused, match="others than you can write in"):
        private.fence()


def test_another_place_is_looked_at_too(
    project: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path_factory.mktemp("elsewhere") / "other"
    other.mkdir(mode=0o700)
    other.chmod(0o777)
    monkeypatch.setenv(private.VARIABLE, str(other))
    with pytest.raises(Refused, match=f"set {private.VARIABLE} to a folder of your own"):
        private.fence()


def test_without_dvc_nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    private.fence()
    assert not [*tmp_path.iterdir()]
