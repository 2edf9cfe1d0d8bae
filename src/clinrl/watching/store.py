"""The storage of counts, in one private SQLite file per registered model: numbers and names of buckets.

For an answer that may still get a label, version, mode and bucket are stored under a keyed hash of the response's id,
until the label comes or the answer is too old. Deleted rows are overwritten. Several processes may write at once.
"""

import errno
import hashlib
import hmac
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager

from clinrl import paths
from clinrl.artifacts import may_write, naming
from clinrl.errors import ArtefactError, Busy, format_value
from clinrl.watching.counts import LABELLED, Counts

_TABLES = """
PRAGMA secure_delete = ON;
CREATE TABLE IF NOT EXISTS secret (one INTEGER PRIMARY KEY, salt BLOB);
INSERT OR IGNORE INTO secret VALUES (1, randomblob(32));
CREATE TABLE IF NOT EXISTS counts (version, day, feature, bucket, n, PRIMARY KEY (version, day, feature, bucket));
CREATE TABLE IF NOT EXISTS answers (id PRIMARY KEY, version, mode, answer, day) WITHOUT ROWID;
"""
_ADD = "INSERT INTO counts VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET n = n + excluded.n"

RESTORE = "restore it from a backup, or move it away: counts then begin anew"


@contextmanager
def _opened(model: str) -> Iterator[sqlite3.Connection]:
    """The database of a model, open for one transaction: all of it is written, or nothing.

    A user who may only read it finds it as it is. Raises ArtefactError if it is damaged.
    """
    path = paths.watched(model)
    is_read_only = path.exists() and not may_write(path)
    if is_read_only:
        path.open("rb").close()  # else SQLite does not say why it cannot open what may not be read
    else:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
    try:
        with naming(path), closing(sqlite3.connect(path, timeout=60)) as connection:
            if not is_read_only:
                connection.executescript(_TABLES)
            (salt,) = connection.execute("SELECT salt FROM secret").fetchone()
            connection.create_function(
                "key", 1, lambda ident: hmac.new(salt, ident.encode(), hashlib.sha256).hexdigest()
            )
            with connection:
                yield connection
    except sqlite3.DatabaseError as error:
        kind = error.sqlite_errorcode & 0xFF
        if kind == sqlite3.SQLITE_READONLY:
            raise OSError(errno.EACCES, str(error), str(path)) from None
        if kind == sqlite3.SQLITE_BUSY:
            raise Busy(f"{path} is locked by another process; try again when that has ended") from None
        if kind not in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise
        raise ArtefactError(f"{path} is damaged ({error}); {RESTORE}") from None


def today() -> int:
    """The number of days since 1970."""
    return int(time.time()) // 86400


def add(model: str, version: str, counts: Counts, answers: Mapping[str, tuple[str, str]], keep_days: int) -> None:
    """Add counts about a version (its digest), and mode and bucket of answers by the ids of their responses.

    Answers that are older than `keep_days` days are deleted.
    """
    with _opened(model) as connection:
        connection.executemany(_ADD, [(version, today(), *where, n) for where, n in sorted(counts.items())])
        rows = [(ident, version, *answer, today()) for ident, answer in answers.items()]
        connection.executemany("INSERT OR IGNORE INTO answers VALUES (key(?), ?, ?, ?, ?)", rows)
        connection.execute("DELETE FROM answers WHERE day < ?", (today() - keep_days,))


def match(model: str, labels: Mapping[str, str]) -> int:
    """Count labels, by ids of responses, with their stored answers, delete these answers and return their number.

    If nothing was counted, no file is made: it would look as if something had been counted.
    """
    if not paths.watched(model).exists():
        return 0
    forget, found = "DELETE FROM answers WHERE id = key(?) RETURNING version, mode, answer", []
    with _opened(model) as connection:
        for ident, label in labels.items():
            for version, mode, answer in connection.execute(forget, (ident,)).fetchall():
                found.append((version, today(), LABELLED + mode, f"{label} as {answer}", 1))
        connection.executemany(_ADD, found)
    return len(found)


def days(model: str, version: str) -> list[Counts]:
    """The counts about a version on each day that has any, in order. No file is made, as for `match`.

    Raises ArtefactError for a row whose number is no count.
    """
    found: dict[int, Counts] = {}
    if not paths.watched(model).exists():
        return []
    with _opened(model) as connection:
        query = "SELECT day, feature, bucket, n FROM counts WHERE version = ? ORDER BY day"
        for day, feature, bucket, n in connection.execute(query, (version,)):
            if not isinstance(n, int) or n < 0:
                raise ArtefactError(
                    f"{paths.watched(model)} counts {format_value(n)} for {bucket!r} of {feature!r} on day {day}, as "
                    f"no server does; {RESTORE}"
                )
            found.setdefault(day, Counts())[feature, bucket] = n
    return [*found.values()]
