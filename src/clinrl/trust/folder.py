"""A folder, signed: OpenSSF Model Signing, so that `python -m model_signing verify key` accepts it as well.

The signature is a file in the folder. It names every other file by its SHA-256; a file more or less, a link or a
changed byte is refused. Signing uses the library; checking needs the standard library and keys alone, in milliseconds.
"""

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clinrl.errors import SignatureError
from clinrl.trust import dsse

if TYPE_CHECKING:
    from clinrl.trust.keys import Key, Signer

SIGNATURE = "model.sig"
"""The file of a folder that holds its signature."""
PREDICATE = "https://model_signing/signature/v1.0"
BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"


def sign(folder: Path, signer: "Signer") -> None:
    """Write the signature of a folder into it, over every file but itself.

    Raises SignatureError if the folder holds a link or what is no file, or if nothing could be signed.
    """
    from cryptography.hazmat.primitives.serialization import load_pem_public_key
    from model_signing import hashing, signing
    from model_signing._signing.sign_ec_key import Signer as Library

    class Lent:
        """What the library asks of a private key, answered by one that may be in an agent."""

        def sign(self, data: bytes, _method: object) -> bytes:
            return signer.sign(data)

        def public_key(self) -> Any:
            return load_pem_public_key(signer.key.pem.encode())

    class ByUs(Library):  # type: ignore[misc]  # the library is not typed
        def __init__(self) -> None:
            self._private_key = Lent()

    if not hashes(folder):
        raise SignatureError(f"{folder} holds no file to sign")
    partial = folder.parent / f".{folder.name}.{SIGNATURE}.partial-{os.getpid()}"
    config = signing.Config().set_hashing_config(
        hashing.Config().set_ignored_paths(paths=[SIGNATURE], ignore_git_paths=False)
    )
    config._signer = ByUs()  # its public methods take a key from a file only
    try:
        config.sign(folder, partial)
        os.replace(partial, folder / SIGNATURE)
    finally:
        partial.unlink(missing_ok=True)


def check(folder: Path, keys: Mapping[str, "Key"]) -> str:
    """Who signed a folder, by the name of their key.

    Raises SignatureError naming a file that was altered, is missing or was added, if there is no signature, or if
    nobody who is listed made it.
    """
    who, signed = _signed(folder / SIGNATURE, keys)
    found = hashes(folder)
    for name in sorted(signed.keys() | found.keys()):
        if name not in found:
            raise SignatureError(f"{name!r} of {folder} is missing; it was there when {who} signed the folder")
        if name not in signed:
            raise SignatureError(f"{name!r} was added to {folder} after {who} signed it")
        if signed[name] != found[name]:
            raise SignatureError(f"{name!r} of {folder} was altered after {who} signed it")
    return who


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a folder but its signature, by its path in it.

    Raises SignatureError for a link, or for anything else that is no file: what it holds may change unseen.
    """
    found: dict[str, str] = {}

    def walk(at: Path, before: str) -> None:
        for entry in sorted(os.scandir(at), key=lambda entry: entry.name):
            name = before + entry.name
            if entry.is_dir(follow_symlinks=False):
                walk(at / entry.name, f"{name}/")
            elif not stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode):
                raise SignatureError(f"{name!r} of {folder} is a link, or no file; a signed folder holds files alone")
            elif name != SIGNATURE:
                with (at / entry.name).open("rb") as stream:
                    found[name] = hashlib.file_digest(stream, "sha256").hexdigest()

    if folder.is_symlink() or not folder.is_dir():
        raise SignatureError(f"{folder} is no folder; a link to one cannot be signed either")
    walk(folder, "")
    return found


def _signed(path: Path, keys: Mapping[str, "Key"]) -> tuple[str, dict[str, str]]:
    """Who made a signature, and the digests of the files that it is about. Raises SignatureError."""
    try:
        if path.is_symlink() or path.stat().st_size > dsse.LARGEST:
            raise SignatureError(f"{path} is a link, or too large for a signature")
        bundle = json.loads(path.read_bytes())
        envelope = bundle["dsseEnvelope"]
        who, statement = dsse.opened(envelope, keys)
        material = {"publicKey": {"hint": hashlib.sha256(keys[who].pem.encode()).hexdigest()}, "tlogEntries": []}
        if bundle != {"mediaType": BUNDLE, "verificationMaterial": material, "dsseEnvelope": envelope}:
            raise SignatureError(f"this is no {BUNDLE} of that key alone")
        how, listed = statement["predicate"]["serialization"], statement["predicate"]["resources"]
        expected = (PREDICATE, "files", "sha256", False)
        if (statement["predicateType"], how["method"], how["hash_type"], how["allow_symlinks"]) != expected:
            raise SignatureError("it is not about whole files by their SHA-256, without links")
        signed = {file["name"]: file["digest"] for file in listed if file["algorithm"] == "sha256"}
        if len(signed) != len(listed):
            raise SignatureError("it names a file twice, or by another digest than SHA-256")
    except FileNotFoundError:
        raise SignatureError(f"{path.parent} is not signed: it has no {path.name}") from None
    except (ValueError, RecursionError, KeyError, TypeError, IndexError):
        raise SignatureError(f"{path} is no signature of a folder") from None
    except SignatureError as error:
        raise SignatureError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
    return who, signed
