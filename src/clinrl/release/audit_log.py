"""The audit log: every decision, approval, promotion and rollback, one JSON line each, chained by hash and signed.

The log is append-only. Each line names the digest of the line before it, so a line that was changed, dropped or
inserted breaks the chain at a place that `read` names. A signature covers its line and all lines before it, so nobody
can rewrite the chain without one of the keys that count. After a key is revoked, its lines stay valid if a later line
is signed with a key that still counts. A cut at the end breaks no chain: `clinrl lineage` finds it where the registry
knows more, and so does git. The audit log is the record; the databases of Prefect and MLflow are conveniences.
"""

import base64
import fcntl
import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import sha256
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from clinrl import paths
from clinrl.artifacts import canonical_json, digest, naming
from clinrl.config.params import Params
from clinrl.errors import ArtefactError, SignatureError
from clinrl.signing.keys import Key, Signer, trusted_keys
from clinrl.signing.keys import signer as our_signer
from clinrl.types import Strict
from clinrl_loader import pae

Kind = Literal["decision", "approval", "refusal", "promotion", "rollback", "review"]
"""A review says that a person read the lines before it, after the key that signed them was revoked."""
PAYLOAD_TYPE = "application/vnd.clinrl.audit+json"
"""The type of the payload that a signature covers: one line, without digest and signature, as canonical JSON."""
RESTORE = "restore the file from git (in a merge by `git checkout --ours`, and decide again)"
START = "0" * 64
"""The field `previous` of the first line, in place of a digest."""
_checked: "dict[frozenset[str], tuple[bytes, tuple[Entry, ...]]]" = {}
"""Cache of the text and entries already checked, by the keys that count: a command reads the file up to ten times."""


class Entry(Strict):
    """One line. `digest` and `signature` each cover all the other fields."""

    at: str = Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00$")
    """Time of writing, UTC."""
    kind: Kind
    body: dict[str, Any]
    previous: str = Field(pattern=r"^[0-9a-f]{64}$")
    key: str = Field(pattern=r"^SHA256:[A-Za-z0-9+/]{43}$")
    """Fingerprint of the key that signed it."""
    digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    signature: str
    """DER, in Base64."""


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
    """Add a signed line and wait until it is on the disk; return None and add nothing if `unless(entries)` is true.

    A lock makes writers take turns: no other line comes between the call of `unless` and the new line. A last line that
    a kill cut short is dropped, since its writer never got an answer. `keys` are the keys that count.

    Raises ArtefactError if the chain is broken. Raises SignatureError if the last lines were signed with a key that
    does not count, since nothing may be built on them, unless `reviewed`, for a line which says that a person read
    them; and if the signer's own key does not count: nobody could read the log any further.
    """
    known = _by_fingerprint(keys)
    if signer.key.fingerprint not in known:
        raise SignatureError(
            f"the key {signer.key.fingerprint} does not count in this checkout, so what it signs could not be read; "
            "run `clinrl keys init` to make it this checkout's"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path), path.open("a+b") as stream:
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
        signature = base64.b64encode(signer.sign(pae(PAYLOAD_TYPE, canonical_json(fields).encode()))).decode()
        entry = Entry(**fields, digest=digest(fields), signature=signature)
        # git writes a new file, perhaps while a person confirmed the signature.
        if not path.exists() or not os.path.samestat(os.fstat(stream.fileno()), path.stat()):
            raise ArtefactError(f"{path} was replaced meanwhile, and no line was added; give the command again")
        if len(whole) < len(text):
            stream.truncate(len(whole))
        stream.write((canonical_json(entry.model_dump(mode="json")) + "\n").encode())
        stream.flush()
        os.fsync(stream.fileno())
    return entry


def read(path: Path, keys: Mapping[str, Key]) -> list[Entry]:
    """All entries, oldest first, with chain and signatures checked; empty if there is no file.

    `keys` are the keys that count. Raises ArtefactError naming the first line that is not what was written, and
    SignatureError naming the first line after the last one whose key counts: what a revoked key signed is served no
    longer. A last line without a line end was cut short by a kill and is ignored.
    """
    if not path.exists():
        return []
    return _parse(_whole(path.read_bytes()), path, _by_fingerprint(keys))


def check_committed(path: Path) -> None:
    """Refuse an audit log that lacks lines which git has at HEAD: a clean cut breaks no chain. Raises ArtefactError.

    Accepts every file where there is no git, or where the file was never committed.
    """
    with suppress(OSError):
        shown = _shown(path, "HEAD")
        text = path.read_bytes() if path.exists() else b""
        if b"safe.directory" in shown.stderr:  # else a checkout of another user would pass as one without git
            advice = shown.stderr.decode(errors="replace").splitlines()[-1].strip()
            raise ArtefactError(f"git shows no lines of {path} here, as the checkout is another user's; run `{advice}`")
        if shown.returncode == 0 and not text.startswith(_whole(shown.stdout)):
            raise ArtefactError(f"{path} lacks lines that it has in git, or has others; {RESTORE}")


def is_longer_at(path: Path, commit: str) -> bool:
    """Whether the file at a commit has every line of the file that is here, and more lines after them."""
    shown = _shown(path, commit)
    text = path.read_bytes() if path.exists() else b""
    return shown.returncode == 0 and shown.stdout != text and shown.stdout.startswith(_whole(text))


def grew(path: Path, old: str, new: str) -> bool:
    """Whether the file at commit `new` has every line that it has at commit `old`."""
    return _shown(path, new).stdout.startswith(_whole(_shown(path, old).stdout))


def _shown(path: Path, commit: str) -> "subprocess.CompletedProcess[bytes]":
    command = ["git", "show", f"{commit}:./{os.path.relpath(path)}"]
    return subprocess.run(command, capture_output=True, check=False)  # here: the folder may be gone with the file


def lines(params: Params) -> list[Entry]:
    """The entries of the project's own audit log, checked with the keys that count in it. Raises as `read`."""
    return read(paths.AUDIT_LOG, trusted_keys(params))


def write(params: Params, kind: Kind, body: dict[str, Any], **how: Any) -> None:
    """Add a line to the project's audit log, signed with this machine's key. Raises, and takes `how`, as `append`."""
    ours = our_signer(params.scale)  # before `trusted_keys`: the first call makes a key, which counts from then on
    append(paths.AUDIT_LOG, kind, body, signer=ours, keys=trusted_keys(params), **how)


def uncounted_keys(path: Path, keys: Mapping[str, Key]) -> list[str]:
    """Fingerprints of the keys that signed the lines after the last one whose key counts, the latest first."""
    known = _by_fingerprint(keys)
    entries = _parse(_whole(path.read_bytes()), path, known, reviewed=True) if path.exists() else []
    return [*dict.fromkeys(entry.key for entry in takewhile(lambda entry: entry.key not in known, reversed(entries)))]


def _whole(text: bytes) -> bytes:
    """The lines that have a line end: the writer of a last line without one was killed and never got an answer."""
    return text[: text.rfind(b"\n") + 1]


def _by_fingerprint(keys: Mapping[str, Key]) -> dict[str, Key]:
    return {key.fingerprint: key for key in keys.values()}


def _parse(text: bytes, path: Path, known: Mapping[str, Key], *, reviewed: bool = False) -> list[Entry]:
    """The checked entries. Lines at the end whose key is not `known` are accepted only if `reviewed`."""
    checked, found = _checked.get(frozenset(known), (b"", ()))
    checked, entries = (checked, [*found]) if text.startswith(checked) else (b"", [])
    previous = entries[-1].digest if entries else START
    uncounted: tuple[int, str] | None = None
    for number, line in enumerate(text[len(checked) :].splitlines(), start=len(entries) + 1):
        try:
            entry = Entry.model_validate_json(line)
            texts = {name: canonical_json(value) for name, value in sorted(entry)}  # once: bodies are long
        except ValueError as error:
            reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
            raise ArtefactError(
                f"{path} line {number} is not an entry of the audit log ({reason}); {RESTORE}"
            ) from None
        is_written = line == _object(texts)  # parsers differ on duplicate keys
        content = _object({name: text for name, text in texts.items() if name not in ("digest", "signature")})
        if not is_written or entry.digest != sha256(content).hexdigest():
            raise ArtefactError(f"{path} line {number} was altered after it was written; {RESTORE}")
        if entry.previous != previous:
            raise ArtefactError(f"{path} line {number} does not follow line {number - 1}: a line is missing; {RESTORE}")
        if entry.key not in known:
            uncounted = uncounted or (number, entry.key)
        elif not known[entry.key].verifies(pae(PAYLOAD_TYPE, content), _decode(entry.signature)):
            raise ArtefactError(f"{path} line {number} has an invalid signature; {RESTORE}")
        else:
            uncounted = None  # a signature covers all lines before it
        previous = entry.digest
        entries.append(entry)
    if uncounted is not None and not reviewed:
        number, key = uncounted
        raise SignatureError(
            f"{path} is signed from line {number} on with the key {key}, which does not count here; {RESTORE}, trust "
            "that key with `clinrl keys trust` if you know whose it is, or, if it was revoked, read what it signed and "
            "run `clinrl keys vouch`"
        )
    if uncounted is None:
        _checked[frozenset(known)] = text, (*entries,)
    return entries


def _object(texts: Mapping[str, str]) -> bytes:
    """The canonical JSON of an object whose fields are given as canonical JSON, in the order of their names."""
    return b"{%s}" % ",".join(f'"{name}":{text}' for name, text in texts.items()).encode()


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        return b""
