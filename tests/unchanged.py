"""What no change of the code may alter: built outputs by their digests in dvc.lock; bases, golden files and
registered plans by theirs.

`python tests/unchanged.py` adds what is new to tests/unchanged.json, and alters nothing that is pinned already. Whoever
means to change such a thing deletes its line by hand, and says why in the commit.
"""

import hashlib
import json
import sys
from functools import cache
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
PINNED = ROOT / "tests/unchanged.json"
BUILT = ("bases", "adapters", "cases", "graded", "mined", "merged")
"""Folders below data whose outputs are pinned. Reports are not: `clinrl render` vouches for them."""


@cache
def present() -> dict[str, dict[str, str]]:
    """What stands in this checkout: `outputs`, by path with the MD5 of DVC; `files`, by path with their SHA-256."""
    quick = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # both read the same
    lock = yaml.load((ROOT / "dvc.lock").read_text(encoding="utf-8"), quick)
    outputs = {out["path"]: out["md5"] for stage in lock["stages"].values() for out in stage.get("outs", ())}
    folders = ("data/bases", "data/preregistrations")
    files = [*(ROOT / "tests/tasks/golden").iterdir(), *(file for at in folders for file in (ROOT / at).rglob("*"))]
    return {
        "outputs": {path: outputs[path] for path in sorted(outputs) if path.split("/")[1] in BUILT},
        "files": {
            str(path.relative_to(ROOT)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(files)
            if path.is_file()
        },
    }


def pinned() -> dict[str, dict[str, str]]:
    """What is pinned, in the same form."""
    found: dict[str, dict[str, str]] = json.loads(PINNED.read_text(encoding="utf-8"))
    return found


def main() -> None:
    """Pin what is new."""
    held = pinned() if PINNED.exists() else {}
    both = {part: dict(sorted({**found, **held.get(part, {})}.items())) for part, found in present().items()}
    PINNED.write_text(json.dumps(both, indent=1) + "\n", encoding="utf-8")
    added = sum(len(both[part]) - len(held.get(part, {})) for part in both)
    print(f"{added} pinned in {PINNED.relative_to(ROOT)}", file=sys.stderr)


if __name__ == "__main__":
    main()
