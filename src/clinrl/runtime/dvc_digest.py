"""DVC's own digests: the MD5 of a file's bytes, and of a folder that of the list of its files."""

import hashlib
import json
from pathlib import Path

FOLDER = ".dir"
"""What follows the digest of a folder in dvc.lock."""


def md5(path: Path) -> str:
    """DVC's digest of a file, or of a folder with all its files. Raises OSError if it cannot be read."""
    if not path.is_dir():
        return _md5(path)
    files = sorted((file.relative_to(path).as_posix(), file) for file in path.rglob("*") if file.is_file())
    listing = [{"md5": _md5(file), "relpath": name} for name, file in files]
    return hashlib.md5(json.dumps(listing, sort_keys=True).encode(), usedforsecurity=False).hexdigest() + FOLDER


def _md5(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
