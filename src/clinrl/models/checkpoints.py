"""Checkpoints of a training: one that a kill left incomplete is detected, and never resumed."""

import json
import shutil
from pathlib import Path

from clinrl.artifacts import digests, write_json

SENTINEL = "complete.json"
"""Digests of a checkpoint's files, written last."""


def seal_checkpoint(checkpoint: Path) -> None:
    """Write the digests of a checkpoint's files into it, as its last file: a checkpoint without them is not used."""
    write_json(checkpoint / SENTINEL, digests(checkpoint, without=SENTINEL))


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint below `folder`, or None. Incomplete checkpoints are removed."""
    found = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rsplit("-", 1)[1]), reverse=True)
    whole = [path for path in found if _is_whole(path)]
    for path in found:
        if path not in whole:
            shutil.rmtree(path)
    return whole[0] if whole else None


def _is_whole(checkpoint: Path) -> bool:
    try:
        files = json.loads((checkpoint / SENTINEL).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    return bool(files.items() <= digests(checkpoint).items())
