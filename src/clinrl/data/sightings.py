"""Finds repeated texts among any number of texts: their digests are kept on disk, not in memory."""

import hashlib
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from clinrl.artifacts import naming


@contextmanager
def first_sightings() -> Iterator[Callable[[str, str], bool]]:
    """Yields a function of a kind and a text that returns True the first time it gets this pair, and then False."""
    with (
        tempfile.TemporaryDirectory(prefix="clinrl-") as folder,
        naming(Path(folder)),
        closing(sqlite3.connect(Path(folder) / "seen.db", isolation_level=None)) as seen,
    ):
        seen.execute("PRAGMA journal_mode = OFF")
        seen.execute("CREATE TABLE seen (digest BLOB PRIMARY KEY) WITHOUT ROWID")
        seen.execute("BEGIN")

        def is_first(kind: str, text: str) -> bool:
            digest = hashlib.sha256(f"{kind}:{text}".encode()).digest()
            return seen.execute("INSERT OR IGNORE INTO seen VALUES (?)", (digest,)).rowcount == 1

        yield is_first
