"""Signed statements: an in-toto statement in a DSSE envelope, as the stock tools read and write them.

What reads an envelope is `clinrl_loader`, which registered models carry with them.
"""

import base64
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from clinrl.artefacts import canonical_json
from clinrl.errors import SignatureError
from clinrl_loader import LARGEST, PAYLOAD_TYPE, STATEMENT, Untrusted, pae
from clinrl_loader import opened as read

if TYPE_CHECKING:
    from clinrl.trust.keys import Key, Signer

__all__ = ["LARGEST", "PAYLOAD_TYPE", "STATEMENT", "envelope", "opened", "pae"]


def envelope(statement: dict[str, Any], signer: "Signer") -> dict[str, Any]:
    """A statement, signed. Its payload is canonical JSON. Raises SignatureError if there is no signature."""
    payload = canonical_json(statement).encode()
    return {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": PAYLOAD_TYPE,
        "signatures": [
            {
                "keyid": signer.key.fingerprint,
                "sig": base64.b64encode(signer.sign(pae(PAYLOAD_TYPE, payload))).decode(),
            }
        ],
    }


def opened(envelope: Any, keys: Mapping[str, "Key"]) -> tuple[str, dict[str, Any]]:
    """Who signed a statement, by the name of their key, and the statement.

    Nothing of the payload is read before a signature of a listed key was found on it. Raises SignatureError if there is
    none, or if it is no envelope of an in-toto statement.
    """
    try:
        return read(envelope, {name: key.line for name, key in keys.items()})
    except Untrusted as error:
        raise SignatureError(str(error)) from None
