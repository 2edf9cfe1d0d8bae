"""A checkpoint that a kill tore is seen, and never gone on with."""

from pathlib import Path

from clinrl.models.checkpoints import SENTINEL, latest_checkpoint, seal_checkpoint


def test_only_whole_checkpoints_are_continued_from(tmp_path: Path) -> None:
    for step in (2, 10, 4):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "weights").write_text(str(step))
        seal_checkpoint(folder)
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
    (tmp_path / "checkpoint-10" / "weights").write_text("1")
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-4"
    (tmp_path / "checkpoint-4" / SENTINEL).unlink()
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2"]
