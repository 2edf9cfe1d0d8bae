"""The audit file: every decision, approval, promotion and rollback, one JSON line each, chained by hash.

Append-only: each line names the digest of the one before it, so a line that was changed, dropped or put in between
breaks the chain at a place that `read` names. That its end was cut off, only git can tell, where it is kept beside the
reports. Prefect's and MLflow's databases are conveniences, this is the record.
"""

import fcntl
import json
import os
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from clinrl.artefacts import canonical_json, digest
from clinrl.errors import ArtefactError
from clinrl.records import Strict

Kind = Literal["decision", "approval", "refusal", "promotion", "rollback"]
START = "0" * 64
"""What the first line names as the digest of the line before it."""


class Entry(Strict):
    """One line. `digest` covers everything else in it."""

    at: str = Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00$")
    """When it was written, UTC."""
    kind: Kind
    body: dict[str, Any]
    previous: str = Field(pattern=r"^[0-9a-f]{64}$")
    digest: str = Field(pattern=r"^[0-9a-f]{64}$")


def append(
    path: Path,
    kind: Kind,
    body: dict[str, Any],
    *,
    unless: Callable[[Sequence[Entry]], bool] = lambda _: False,
    at: datetime | None = None,
) -> Entry | None:
    """Add a line and wait until it is on the disk; nothing is added if `unless` is true of the lines that are there.

    Writers take turns, and nobody writes between that question and the new line. A last line that a kill cut short is
    dropped: whoever wrote it never got an answer. Raises ArtefactError if the chain is broken, since nothing may be
    built on it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        stream.seek(0)
        text = stream.read()
        whole = text[: text.rfind(b"\n") + 1]
        entries = _parse(whole, path)
        if unless(entries):
            return None
        moment = (at or datetime.now(UTC)).astimezone(UTC).replace(microsecond=0)
        fields = {
            "at": moment.isoformat(),
            "kind": kind,
            "body": json.loads(canonical_json(body)),
            "previous": entries[-1].digest if entries else START,
        }
        entry = Entry(**fields, digest=digest(fields))
        if len(whole) < len(text):
            stream.truncate(len(whole))
        stream.write((canonical_json(entry.model_dump(mode="json")) + "\n").encode())
        stream.flush()
        os.fsync(stream.fileno())
    return entry


def read(path: Path) -> list[Entry]:
    """All entries, oldest first, with their chain checked; none if there is no file.

    Raises ArtefactError naming the first line that is not what was written. A last line without its line end was cut
    short by a kill and does not count.
    """
    if not path.exists():
        return []
    text = path.read_bytes()
    return _parse(text[: text.rfind(b"\n") + 1], path)


def _parse(text: bytes, path: Path) -> list[Entry]:
    entries: list[Entry] = []
    previous = START
    for number, line in enumerate(text.splitlines(), start=1):
        advice = "restore the file from git"
        try:
            entry = Entry.model_validate_json(line)
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise ArtefactError(
                f"{path} line {number} is not an entry of the audit file ({reason}); {advice}"
            ) from None
        if entry.digest != digest(entry.model_dump(mode="json", exclude={"digest"})):
            raise ArtefactError(f"{path} line {number} was altered after it was written; {advice}")
        if entry.previous != previous:
            raise ArtefactError(f"{path} line {number} does not follow line {number - 1}: a line is missing; {advice}")
        previous = entry.digest
        entries.append(entry)
    return entries
