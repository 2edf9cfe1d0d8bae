"""Signed statements: an in-toto statement in a DSSE envelope, as the stock tools read and write them.

`clinrl_loader`, which registered models carry with them, reads the envelopes.
"""

import base64
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from clinrl.artifacts import canonical_json
from clinrl.errors import SignatureError
from clinrl.signing.keys import Key, Signer
from clinrl_loader import PAYLOAD_TYPE, STATEMENT, Untrusted, opened, pae

MALFORMED = (ValueError, RecursionError, LookupError, TypeError, AttributeError)
"""The exceptions of reading a malformed envelope from a file, or a key of its statement."""


def statement(kind: str, digests: Mapping[str, Mapping[str, str]], predicate: Mapping[str, Any]) -> dict[str, Any]:
    """An in-toto statement: a predicate of a kind about subjects, each with its digests, in the given order."""
    subjects = [{"name": name, "digest": {**found}} for name, found in digests.items()]
    return {"_type": STATEMENT, "subject": subjects, "predicateType": kind, "predicate": {**predicate}}


def signed_bytes(statement: Mapping[str, Any]) -> bytes:
    """The bytes that the signature of a statement covers. The payload is canonical JSON."""
    return pae(PAYLOAD_TYPE, canonical_json(statement).encode())


def envelope(statement: Mapping[str, Any], signer: Signer) -> dict[str, Any]:
    """The signed envelope of a statement. Raises SignatureError if signing failed."""
    return make_envelope(statement, signer.key, signer.sign(signed_bytes(statement)))


def make_envelope(statement: Mapping[str, Any], key: Key, signature: bytes) -> dict[str, Any]:
    """The envelope of a statement and a signature that a key made over it."""
    return {
        "payload": base64.b64encode(canonical_json(statement).encode()).decode(),
        "payloadType": PAYLOAD_TYPE,
        "signatures": [{"keyid": key.fingerprint, "sig": base64.b64encode(signature).decode()}],
    }


def open_envelope(envelope: Any, keys: Mapping[str, Key]) -> tuple[str, dict[str, Any]]:
    """The name of the key that signed a statement, and the statement.

    The payload is not read before a signature of a listed key has been verified. Raises SignatureError if there is no
    such signature, or if it is no envelope of an in-toto statement.
    """
    with signature_errors():
        return opened(envelope, {name: key.line for name, key in keys.items()})


@contextmanager
def signature_errors() -> Iterator[None]:
    """Raise the loader's errors in this block as SignatureError."""
    try:
        yield
    except Untrusted as error:
        raise SignatureError(str(error)) from None
