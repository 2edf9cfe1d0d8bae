"""A checkpoint that a kill tore is seen, and never gone on with."""

import os
from pathlib import Path

from clinrl.artifacts import digests, write_json
from clinrl.models.checkpoints import SENTINEL, latest_checkpoint, seal_checkpoint


def test_only_whole_checkpoints_are_continued_from(tmp_path: Path) -> None:
    for step in (2, 10, 4):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "weights").write_text(str(step))
        write_json(folder / SENTINEL, digests(folder))
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
    (tmp_path / "checkpoint-10" / "weights").write_text("1")
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-4"
    (tmp_path / "checkpoint-4" / SENTINEL).unlink()
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2"]


def test_a_sealed_checkpoint_replaces_the_oldest_by_step_and_an_empty_one_is_not_whole(tmp_path: Path) -> None:
    for step, seconds in ((5, 300), (10, 200), (15, 100)):  # the clock runs backwards
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "weights").write_text(str(step))
        os.utime(folder, (seconds, seconds))
        seal_checkpoint(folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-15"]
    seal_checkpoint(tmp_path / "checkpoint-20")
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-15"
