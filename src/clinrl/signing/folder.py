"""Signed folders, by OpenSSF Model Signing, so that `python -m model_signing verify key` accepts them as well.

The signature is a file in the folder. It names every other file by its SHA-256; an added or missing file, a link or a
changed byte is refused. Signing uses the library; `clinrl_loader` checks signatures, which takes milliseconds.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import clinrl_loader
from clinrl.errors import SignatureError
from clinrl.signing.dsse import signature_errors
from clinrl.signing.keys import Key, Signer
from clinrl_loader import SIGNATURE


def sign(folder: Path, signer: Signer) -> None:
    """Sign all files of a folder, and write the signature into it.

    Raises SignatureError if the folder is empty, if it holds a link or anything but plain files, or if signing failed.
    """
    from model_signing import hashing, signing
    from model_signing._signing.sign_ec_key import Signer as Library

    class PrivateKey:
        """A private key as the library uses it; the real one may be in an agent."""

        def sign(self, data: bytes, _method: object) -> bytes:
            return signer.sign(data)

        def public_key(self) -> Any:
            return clinrl_loader.public_key(signer.key.line)

    class WithPrivateKey(Library):  # type: ignore[misc]  # the library is not typed
        def __init__(self) -> None:
            self._private_key = PrivateKey()

    with signature_errors():
        if not clinrl_loader.hashes(folder):
            raise SignatureError(f"{folder} holds no file to sign")
    partial = folder.parent / f".{folder.name}.{SIGNATURE}.partial-{os.getpid()}"
    config = signing.Config().set_hashing_config(
        hashing.Config().set_ignored_paths(paths=[SIGNATURE], ignore_git_paths=False)
    )
    config._signer = WithPrivateKey()  # its public methods take a key from a file only
    try:
        config.sign(folder, partial)
        os.replace(partial, folder / SIGNATURE)
    finally:
        partial.unlink(missing_ok=True)


def check(folder: Path, keys: Mapping[str, Key], *, but: Iterable[str] = ()) -> tuple[str, dict[str, str]]:
    """The name of the key that signed a folder, and the SHA-256 of each signed file, by its path in the folder.

    `but` are files at its top that may be there unsigned. Raises SignatureError naming a file that was altered, is
    missing or was added, or if there is no signature of a listed key.
    """
    with signature_errors():
        return clinrl_loader.check(folder, {name: key.line for name, key in keys.items()}, but=but)
