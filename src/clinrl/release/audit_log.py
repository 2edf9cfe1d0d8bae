"""The audit log: every decision, approval, promotion and rollback, one JSON line each, chained by hash and signed.

Append-only: each line names the digest of the one before it, so a line that was changed, dropped or put in between
breaks the chain at a place that `read` names. Each is signed by whoever wrote it, and with it all before it, so that a
chain cannot be written anew without one of the keys that count. A key that was revoked leaves its old lines standing:
those before a line of somebody whose key counts still. That the end was cut off is found where the registry knows more
(`clinrl lineage`), and by git. Prefect's and MLflow's databases are conveniences, this is the record.
"""

import base64
import binascii
import fcntl
import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationError

from clinrl import paths
from clinrl.artifacts import canonical_json, digest
from clinrl.errors import ArtefactError, SignatureError
from clinrl.signing.keys import Key, Signer, trusted_keys
from clinrl.signing.keys import signer as our_signer
from clinrl.types import Strict
from clinrl_loader import pae

if TYPE_CHECKING:
    from clinrl.config.params import Params

Kind = Literal["decision", "approval", "refusal", "promotion", "rollback", "review"]
"""A review says that somebody read what stands before it, after the key that signed it was revoked."""
PAYLOAD_TYPE = "application/vnd.clinrl.audit+json"
"""What a signature says that it is about: one line, without digest and signature, as canonical JSON."""
START = "0" * 64
"""What the first line names as the digest of the line before it."""
_checked: "dict[frozenset[str], tuple[bytes, tuple[Entry, ...]]]" = {}
"""What this process has checked, by the keys that count: a command reads the file up to ten times."""


class Entry(Strict):
    """One line. `digest` covers everything else in it but the signature, which is over the same."""

    at: str = Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00$")
    """When it was written, UTC."""
    kind: Kind
    body: dict[str, Any]
    previous: str = Field(pattern=r"^[0-9a-f]{64}$")
    key: str = Field(pattern=r"^SHA256:[A-Za-z0-9+/]{43}$")
    """Fingerprint of the key that signed it."""
    digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    signature: str
    """DER, in Base64."""

    @property
    def content(self) -> dict[str, Any]:
        """What digest and signature are about."""
        return self.model_dump(mode="json", exclude={"digest", "signature"})


def append(
    path: Path,
    kind: Kind,
    body: dict[str, Any],
    *,
    signer: Signer,
    keys: Mapping[str, Key],
    unless: Callable[[Sequence[Entry]], bool] = lambda _: False,
    reviewed: bool = False,
) -> Entry | None:
    """Add a signed line and wait until it is on the disk; nothing is added if `unless` is true of those that are there.

    Writers take turns, and nobody writes between that question and the new line. A last line that a kill cut short is
    dropped: whoever wrote it never got an answer. `keys` are those that count.

    Raises ArtefactError if the chain is broken, or if the last lines were signed with a key that does not count, since
    nothing may be built on them: unless the new line is there to say that they were `reviewed`. Raises SignatureError
    if the signer's own key does not count: nobody could read on.
    """
    known = _by_fingerprint(keys)
    if signer.key.fingerprint not in known:
        raise SignatureError(
            f"the key {signer.key.fingerprint} does not count in this checkout, so what it signs could not be read; "
            "run `clinrl keys init` to make it this checkout's"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        stream.seek(0)
        text = stream.read()
        whole = _whole(text)
        entries = _parse(whole, path, known, reviewed=reviewed)
        if unless(entries):
            return None
        fields = {
            "at": datetime.now(UTC).replace(microsecond=0).isoformat(),
            "kind": kind,
            "body": json.loads(canonical_json(body)),
            "previous": entries[-1].digest if entries else START,
            "key": signer.key.fingerprint,
        }
        signature = base64.b64encode(signer.sign(_signed_bytes(fields))).decode()
        entry = Entry(**fields, digest=digest(fields), signature=signature)
        if len(whole) < len(text):
            stream.truncate(len(whole))
        stream.write((canonical_json(entry.model_dump(mode="json")) + "\n").encode())
        stream.flush()
        os.fsync(stream.fileno())
    return entry


def read(path: Path, keys: Mapping[str, Key]) -> list[Entry]:
    """All entries, oldest first, with their chain and their signatures checked; none if there is no file.

    `keys` are those that count. Raises ArtefactError naming the first line that is not
    what was written, or the first of those at the end that nobody signed whose key counts. A last line without its line
    end was cut short by a kill and does not count.
    """
    if not path.exists():
        return []
    return _parse(_whole(path.read_bytes()), path, _by_fingerprint(keys))


def check_committed(path: Path) -> None:
    """Refuse an audit log that lacks lines which git has at HEAD: a clean cut breaks no chain. Raises ArtefactError.

    Says nothing where there is no git, or where the file was never committed.
    """
    with suppress(OSError):
        command = ["git", "show", f"HEAD:./{path.name}"]
        shown = subprocess.run(command, cwd=path.parent, capture_output=True, check=False)
        held = path.read_bytes() if path.exists() else b""
        if shown.returncode == 0 and not held.startswith(_whole(shown.stdout)):
            raise ArtefactError(f"{path} lacks lines that it has in git, or has others; restore the file from git")


def is_longer_at(path: Path, commit: str) -> bool:
    """Whether git has the file at a commit with every line that is here, and with more."""
    shown = subprocess.run(["git", "show", f"{commit}:./{os.path.relpath(path)}"], capture_output=True, check=False)
    held = path.read_bytes() if path.exists() else b""
    return shown.returncode == 0 and shown.stdout != held and shown.stdout.startswith(_whole(held))


def lines(params: "Params") -> list[Entry]:
    """The entries of the project's own file, with the keys that count in it. Raises as `read`."""
    return read(paths.audit_log(), trusted_keys(params))


def write(params: "Params", kind: Kind, body: dict[str, Any], **how: Any) -> None:
    """Add a line to the project's own file, signed with this machine's key. Raises, and takes `how`, as `append`."""
    ours = our_signer(params.scale)  # the first one makes a key, which counts then
    append(paths.audit_log(), kind, body, signer=ours, keys=trusted_keys(params), **how)


def uncounted_keys(path: Path, keys: Mapping[str, Key]) -> list[str]:
    """Fingerprints of the keys that signed the last lines of the audit log, down to one whose key counts."""
    known = _by_fingerprint(keys)
    entries = _parse(_whole(path.read_bytes()), path, known, reviewed=True) if path.exists() else []
    return [*dict.fromkeys(entry.key for entry in takewhile(lambda entry: entry.key not in known, reversed(entries)))]


def _whole(text: bytes) -> bytes:
    """The lines that have their end: whoever was killed while writing the last one never got an answer."""
    return text[: text.rfind(b"\n") + 1]


def _by_fingerprint(keys: Mapping[str, Key]) -> dict[str, Key]:
    return {key.fingerprint: key for key in keys.values()}


def _parse(text: bytes, path: Path, known: Mapping[str, Key], *, reviewed: bool = False) -> list[Entry]:
    """The lines, checked; those at the end whose key is not `known` are let through if somebody `reviewed` them."""
    checked, found = _checked.get(frozenset(known), (b"", ()))
    checked, entries = (checked, [*found]) if text.startswith(checked) else (b"", [])
    previous = entries[-1].digest if entries else START
    advice = "restore the file from git"
    unsure: tuple[int, str] | None = None
    for number, line in enumerate(text[len(checked) :].splitlines(), start=len(entries) + 1):
        try:
            entry = Entry.model_validate_json(line)
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise ArtefactError(f"{path} line {number} is not an entry of the audit log ({reason}); {advice}") from None
        is_written = line == canonical_json(entry.model_dump(mode="json")).encode()  # readers differ on a key twice
        content = entry.content
        if not is_written or entry.digest != digest(content):
            raise ArtefactError(f"{path} line {number} was altered after it was written; {advice}")
        if entry.previous != previous:
            raise ArtefactError(f"{path} line {number} does not follow line {number - 1}: a line is missing; {advice}")
        if entry.key not in known:
            unsure = unsure or (number, entry.key)
        elif not known[entry.key].verifies(_signed_bytes(content), _decode(entry.signature)):
            raise ArtefactError(f"{path} line {number} has an invalid signature; {advice}")
        else:
            unsure = None  # whoever signs a line signs all before it
        previous = entry.digest
        entries.append(entry)
    if unsure is not None and not reviewed:
        number, key = unsure
        raise ArtefactError(
            f"{path} is signed from line {number} on with the key {key}, which does not count here; {advice}, trust "
            "that key with `clinrl keys trust` if you know whose it is, or, if it was revoked, read what it signed and "
            "run `clinrl keys vouch`"
        )
    if unsure is None:
        _checked[frozenset(known)] = text, (*entries,)
    return entries


def _signed_bytes(content: Mapping[str, Any]) -> bytes:
    return pae(PAYLOAD_TYPE, canonical_json(content).encode())


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""
