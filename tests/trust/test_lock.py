"""dvc.lock after a kill: half of it is put back as it was, and nothing else is touched."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dvc.lock import make_lock
from ruamel.yaml import YAML

from clinrl.trust import lock


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose dvc.lock records three stages."""
    monkeypatch.chdir(tmp_path)
    lock.DVC_AT_WORK.parent.mkdir(parents=True)
    out = {"path": "data/x", "hash": "md5", "md5": "0" * 32, "size": 1}
    stages = {f"train@v{number}": {"cmd": "python -m clinrl stage", "outs": [out]} for number in range(3)}
    YAML(typ="safe").dump({"schema": "2.0", "stages": stages}, lock.LOCK)
    return lock.LOCK


HALF = (
    lambda text: "",
    lambda text: text[: text.rindex("md5: ")] + "m",
    lambda text: text[: text.rindex("outs:")] + "outs:\n  ",
)


@pytest.mark.parametrize("cut", HALF)
def test_half_a_lock_that_a_kill_left_is_mended(recorded: Path, cut: Callable[[str], str], capsys: Any) -> None:
    lock.keep()
    whole = lock.LOCK.read_text()
    lock.LOCK.write_text(cut(whole))
    lock.mend()
    assert lock.LOCK.read_text() == whole
    assert "was cut short by a kill" in capsys.readouterr().err


def test_a_lock_that_is_whole_stays_as_it_is(recorded: Path, capsys: Any) -> None:
    lock.mend()
    lock.keep()
    stages = YAML(typ="safe").load(lock.LOCK)
    stages["stages"].popitem()
    YAML(typ="safe").dump(stages, lock.LOCK)
    shorter = lock.LOCK.read_text()
    lock.mend()
    assert lock.LOCK.read_text() == shorter
    assert capsys.readouterr().err == ""


def test_nothing_is_mended_while_dvc_is_at_work(recorded: Path) -> None:
    lock.keep()
    lock.LOCK.write_text("")
    with make_lock(str(lock.DVC_AT_WORK), tmp_dir=str(lock.DVC_AT_WORK.parent)):
        lock.mend()
    assert lock.LOCK.read_text() == ""
