"""Envelopes, against securesystemslib, and against whoever alters them."""

import base64
import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from securesystemslib.dsse import Envelope
from securesystemslib.signer import SSlibKey

from clinrl.errors import SignatureError
from clinrl.signing import dsse, keys
from clinrl_loader import LARGEST, PAYLOAD_TYPE, pae, pem
from clinrl_loader import STATEMENT as TYPE

STATEMENT = {
    "_type": TYPE,
    "predicateType": "https://example.org/x",
    "predicate": {"ü": 1},
    "subject": [],
}


def key_of_stock_tool(key: keys.Key) -> SSlibKey:
    scheme = "ecdsa-sha2-nistp256"
    return SSlibKey(key.fingerprint, "ecdsa", scheme, {"public": pem(key.line)})


def test_the_stock_tool_verifies_our_envelope(checkout: Path) -> None:
    signer = keys.signer("embedded")
    ours = dsse.envelope(STATEMENT, signer)
    assert dsse.open_envelope(ours, keys.keyring()) == (keys.OURS, STATEMENT)
    assert dsse.envelope(STATEMENT, signer) == ours
    stock = Envelope.from_dict(copy.deepcopy(ours))
    assert stock.pae() == pae(PAYLOAD_TYPE, stock.payload)
    assert stock.verify([key_of_stock_tool(signer.key)], 1).keys() == {signer.key.fingerprint}


def test_nobody_who_is_listed(checkout: Path) -> None:
    envelope = dsse.envelope(STATEMENT, keys.signer("embedded"))
    with pytest.raises(SignatureError, match="nobody whose key counts here signed this"):
        dsse.open_envelope(envelope, {})
    for path in (keys.PRIVATE, keys.PUBLIC):
        path.unlink()
    keys.signer("embedded")
    with pytest.raises(SignatureError, match="nobody whose key counts here signed this"):
        dsse.open_envelope(envelope, keys.keyring())


def envelope_with(payload: bytes, signer: keys.Signer, kind: str = PAYLOAD_TYPE) -> dict[str, Any]:
    signature = base64.b64encode(signer.sign(pae(kind, payload))).decode()
    return {"payload": base64.b64encode(payload).decode(), "payloadType": kind, "signatures": [{"sig": signature}]}


@pytest.mark.parametrize(
    "payload",
    [b"", b"[]", b"{}", b"\xff", b"[" * 100_000, b"1" * 5000, b'{"_type": "https://in-toto.io/Statement/v0.1"}'],
)
def test_what_is_signed_must_be_a_statement(checkout: Path, payload: bytes) -> None:
    signer = keys.signer("embedded")
    with pytest.raises(SignatureError):
        dsse.open_envelope(envelope_with(payload, signer), keys.keyring())


def test_another_type_is_refused_though_it_is_signed(checkout: Path) -> None:
    signer = keys.signer("embedded")
    payload = json.dumps(STATEMENT).encode()
    assert dsse.open_envelope(envelope_with(payload, signer), keys.keyring())[0] == keys.OURS
    with pytest.raises(SignatureError, match="no signed in-toto statement"):
        dsse.open_envelope(envelope_with(payload, signer, "text/plain"), keys.keyring())


def test_another_spelling_of_the_same_bytes_is_refused(checkout: Path) -> None:
    """Base64 has several where it is padded; only one was written."""
    payload = json.dumps(STATEMENT).encode()
    envelope = envelope_with(payload + b" " * ((1 - len(payload)) % 3), keys.signer("embedded"))
    spelt = envelope["payload"]
    assert spelt.endswith("==")
    assert dsse.open_envelope(envelope, keys.keyring())[1] == STATEMENT
    last = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    other = spelt[:-3] + last[last.index(spelt[-3]) + 1] + "=="
    assert base64.b64decode(other) == base64.b64decode(spelt)
    with pytest.raises(SignatureError, match="not as Base64 writes it"):
        dsse.open_envelope(envelope | {"payload": other}, keys.keyring())


def test_every_change_of_an_envelope_is_found(checkout: Path) -> None:
    """Each character replaced, each field dropped, replaced, or one added."""
    envelope = dsse.envelope(STATEMENT, keys.signer("embedded"))
    ring = keys.keyring()
    signature = envelope["signatures"][0]
    for at, field in [(envelope, "payload"), (envelope, "payloadType"), (signature, "sig"), (signature, "keyid")]:
        for place in range(0, len(at[field]), 3):
            before = at[field]
            at[field] = before[:place] + ("A" if before[place] != "A" else "B") + before[place + 1 :]
            with pytest.raises(SignatureError):
                dsse.open_envelope(envelope, ring)
            at[field] = before
        for other in (None, 1, [], {}, "x" * (LARGEST + 1)):
            if (field, other) != ("keyid", None):  # the name of a key is only a hint; without it all are tried
                with pytest.raises(SignatureError):
                    dsse.open_envelope(
                        {**envelope, "signatures": [{**signature}]} | _put(envelope, at, field, other), ring
                    )
    with pytest.raises(SignatureError):
        dsse.open_envelope(envelope | {"more": 1}, ring)
    for signatures in ([], [signature] * 17, [{**signature, "cert": ""}], [[]], {}, None):
        with pytest.raises(SignatureError):
            dsse.open_envelope(envelope | {"signatures": signatures}, ring)
    assert dsse.open_envelope(envelope, ring) == (keys.OURS, STATEMENT)


def _put(envelope: dict[str, Any], at: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
    return {field: value} if at is envelope else {"signatures": [at | {field: value}]}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["payload", "payloadType", "signatures", "sig", "keyid"]), inner, max_size=5)
    ),
    max_leaves=12,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(anything=JSON)
def test_anything_else_is_refused_in_a_sentence(anything: Any) -> None:
    with pytest.raises(SignatureError):
        dsse.open_envelope(anything, {})
