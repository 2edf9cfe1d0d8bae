"""Checkpoints of a training: one that a kill left incomplete is detected, and never resumed."""

import json
import shutil
from pathlib import Path

from clinrl.artifacts import digests, write_json

SENTINEL = "complete.json"
"""Digests of a checkpoint's files, written last."""
KEPT = 2
"""Complete checkpoints of a training that stay. Transformers would remove older ones before a new one is sealed, and
would tell their age by the clock, which may be set back."""


def seal_checkpoint(checkpoint: Path) -> None:
    """Write the digests of a checkpoint's files into it, as its last file: a checkpoint without them is not used.

    Then all but the newest two are removed.
    """
    write_json(checkpoint / SENTINEL, digests(checkpoint, without=SENTINEL))
    for old in _by_step(checkpoint.parent)[KEPT:]:
        shutil.rmtree(old)


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint below `folder`, or None. Incomplete checkpoints are removed."""
    found = _by_step(folder)
    whole = [path for path in found if _is_whole(path)]
    for path in found:
        if path not in whole:
            shutil.rmtree(path)
    return whole[0] if whole else None


def _by_step(folder: Path) -> list[Path]:
    """The checkpoints below a folder, the newest first."""
    return sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rsplit("-", 1)[1]), reverse=True)


def _is_whole(checkpoint: Path) -> bool:
    try:
        files = json.loads((checkpoint / SENTINEL).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    return bool(files) and files.items() <= digests(checkpoint).items()
