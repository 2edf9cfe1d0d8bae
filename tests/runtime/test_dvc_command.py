import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dvc.dvcfile import Lockfile
from dvc.repo import Repo
from dvc.utils.serialize import modify_yaml
from dvc.utils.strictyaml import YAMLValidationError

from clinrl.runtime.dvc_command import HEAD, Recorded, Stages, load, modify

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


def test_what_is_wrong_with_a_stage_is_told_as_dvc_tells_it(tmp_path: Path) -> None:
    path = tmp_path / "dvc.lock"
    path.write_text(HEAD + "  good:\n    cmd: echo\n  bad:\n    outs: []\n")
    theirs = Lockfile(Repo.init(tmp_path, no_scm=True), str(path))
    stages = load(theirs)["stages"]
    assert stages.get("good") == {"cmd": "echo"}
    with pytest.raises(YAMLValidationError) as expected:
        theirs.load()
    with pytest.raises(YAMLValidationError, match=r"dvc\.lock") as found:
        stages.get("bad")
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("text", ["", HEAD + "  a:\n    cmd: a\ndatasets: []\n", "schema: '3.0'\nstages: {}\n"])
def test_other_files_are_changed_in_dvcs_own_way(text: str, tmp_path: Path) -> None:
    path = tmp_path / "dvc.lock"
    path.write_text(text)
    with modify(str(path)) as data:
        assert not isinstance(data.get("stages"), Stages)


def test_a_pipeline_ends_in_the_same_lock(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("DVC_")}
    env |= {"PYTHONPATH": str(ROOT / "src"), "DVC_NO_ANALYTICS": "1", "DVC_SITE_CACHE_DIR": str(tmp_path / "site")}
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
