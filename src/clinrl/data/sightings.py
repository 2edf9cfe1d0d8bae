"""Finds repeated texts among any number of texts: their digests are kept on disk, not in memory."""

import errno
import hashlib
import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path


@contextmanager
def first_sightings() -> Iterator[Callable[[str, str], bool]]:
    """Yields a function of a kind and a text that returns True the first time it gets this pair, and then False."""
    with (
        tempfile.TemporaryDirectory(prefix="clinrl-") as folder,
        closing(sqlite3.connect(Path(folder) / "seen.db", isolation_level=None)) as seen,
    ):
        seen.execute("PRAGMA journal_mode = OFF")
        seen.execute("CREATE TABLE seen (digest BLOB PRIMARY KEY) WITHOUT ROWID")
        seen.execute("BEGIN")

        def is_first(kind: str, text: str) -> bool:
            digest = hashlib.sha256(f"{kind}:{text}".encode()).digest()
            try:
                return seen.execute("INSERT OR IGNORE INTO seen VALUES (?)", (digest,)).rowcount == 1
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
                    raise
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), folder) from error

        yield is_first
