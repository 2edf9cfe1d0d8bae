"""Signed statements: an in-toto statement in a DSSE envelope, as the stock tools read and write them.

What reads an envelope needs the standard library and keys alone, since registered models carry it with them.
"""

import base64
import binascii
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from clinrl.errors import SignatureError

if TYPE_CHECKING:
    from clinrl.trust.keys import Key, Signer

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT = "https://in-toto.io/Statement/v1"
LARGEST = 64 * 2**20
"""Characters of a payload; more is not read."""
MOST_SIGNATURES = 16


def pae(kind: str, payload: bytes) -> bytes:
    """What a DSSE signature is over: the payload, with its type and both lengths in front."""
    return b"DSSEv1 %d %s %d %s" % (len(kind.encode()), kind.encode(), len(payload), payload)


def covered(statement: Mapping[str, Any]) -> bytes:
    """The bytes that the signature of a statement is over. Its payload is canonical JSON."""
    return pae(PAYLOAD_TYPE, _payload(statement))


def envelope(statement: Mapping[str, Any], signer: "Signer") -> dict[str, Any]:
    """A statement, signed. Raises SignatureError if there is no signature."""
    return sealed(statement, signer.key, signer.sign(covered(statement)))


def sealed(statement: Mapping[str, Any], key: "Key", signature: bytes) -> dict[str, Any]:
    """The envelope of a statement and a signature that a key made over it."""
    return {
        "payload": base64.b64encode(_payload(statement)).decode(),
        "payloadType": PAYLOAD_TYPE,
        "signatures": [{"keyid": key.fingerprint, "sig": base64.b64encode(signature).decode()}],
    }


def _payload(statement: Mapping[str, Any]) -> bytes:
    from clinrl.artefacts import canonical_json

    return canonical_json(statement).encode()


def opened(envelope: Any, keys: Mapping[str, "Key"]) -> tuple[str, dict[str, Any]]:
    """Who signed a statement, by the name of their key, and the statement.

    Nothing of the payload is read before a signature of a listed key was found on it. Raises SignatureError if there is
    none, or if it is no envelope of an in-toto statement.
    """
    if not isinstance(envelope, dict) or envelope.keys() != {"payload", "payloadType", "signatures"}:
        raise SignatureError("this is no DSSE envelope; it needs payload, payloadType and signatures")
    listed = envelope["signatures"]
    if envelope["payloadType"] != PAYLOAD_TYPE or not isinstance(listed, list) or len(listed) > MOST_SIGNATURES:
        raise SignatureError(f"this is no signed in-toto statement: its type must be {PAYLOAD_TYPE}, with signatures")
    payload = _decoded(envelope["payload"])
    who = _who(pae(PAYLOAD_TYPE, payload), listed, keys)
    try:
        statement = json.loads(payload)
    except (ValueError, RecursionError):
        raise SignatureError("the signed text is no JSON") from None
    if not isinstance(statement, dict) or statement.get("_type") != STATEMENT:
        raise SignatureError(f"the signed text is no in-toto statement: its _type must be {STATEMENT}")
    return who, statement


def _who(data: bytes, signatures: list[Any], keys: Mapping[str, "Key"]) -> str:
    """The name of the key that made one of the signatures; a key that a signature names must be that key."""
    for signature in signatures:
        if not isinstance(signature, dict) or not {"sig"} <= signature.keys() <= {"sig", "keyid"}:
            raise SignatureError("a signature of this envelope is malformed; it needs sig, and may have keyid")
        made = _decoded(signature["sig"])
        for name, key in keys.items():
            if signature.get("keyid") in (None, "", key.fingerprint) and key.verifies(data, made):
                return name
    raise SignatureError(
        "nobody who is listed signed this; `clinrl keys show` lists whose signatures count, `clinrl keys trust` adds "
        "one"
    )


def _decoded(text: Any) -> bytes:
    """Bytes from Base64 in its one canonical spelling. Raises SignatureError."""
    if not isinstance(text, str) or len(text) > LARGEST:
        raise SignatureError("a field of this envelope is no Base64, or too long")
    try:
        found = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise SignatureError("a field of this envelope is no Base64") from None
    if base64.b64encode(found).decode() != text:
        raise SignatureError("a field of this envelope is not as Base64 writes it")
    return found
