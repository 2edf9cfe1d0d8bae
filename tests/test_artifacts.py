"""Artefacts on disk: the advice for an altered one works, where DVC's own copy was altered too."""

import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest

import forks
from clinrl import artifacts
from clinrl.errors import ArtefactError

GRAPH = """
stages:
  a:
    cmd: cp -r source out
    outs: [out]
"""


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
