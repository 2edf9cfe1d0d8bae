"""Who can write where DVC keeps its pickles: only the owner, whoever made the folder."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from clinrl import cli, private
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


@pytest.mark.parametrize("folder", [Path(".clinrl"), private.SITE, private.TMP, Path(".dvc")])
def test_what_everybody_can_write_is_refused_with_what_to_do(
    project: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    private.TMP.mkdir()
    folder.chmod(0o777)
    assert cli.main(["check"]) == 1
    said = capsys.readouterr().err
    advice = said.split("`")[1]
    assert "which can run code" in said
    subprocess.run(advice, shell=True, check=True)
    private.fence()
    assert not mode(folder) & 0o022


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


def test_another_place_is_looked_at_too(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    other.chmod(0o777)
    monkeypatch.setenv(private.VARIABLE, str(other))
    with pytest.raises(Refused, match=f"set {private.VARIABLE} to a folder of your own"):
        private.fence()


def test_without_dvc_nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    private.fence()
    assert not [*tmp_path.iterdir()]
