"""Signed folders, against the stock command of OpenSSF Model Signing."""

import base64
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clinrl.errors import SignatureError
from clinrl.signing import dsse, folder, keys
from clinrl_loader import SIGNATURE, Untrusted, hashes, pem, shallow


@pytest.fixture
def model(checkout: Path) -> Path:
    """A folder like a registered model's, unsigned."""
    at = checkout / "model"
    (at / "code/clinrl").mkdir(parents=True)
    (at / "code/clinrl/__init__.py").write_text("x = 1\n")
    (at / "MLmodel").write_text("flavors: {}\n")
    (at / "weights").write_bytes(os.urandom(1000))
    return at


def stock(*arguments: object) -> "subprocess.CompletedProcess[str]":
    """`python -m model_signing`, as its users call it."""
    command = [sys.executable, "-m", "model_signing", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def public(key: keys.Key) -> Path:
    Path("public.pem").write_text(pem(key.line))
    return Path("public.pem")


@pytest.mark.long
def test_the_stock_command_accepts_ours_and_refuses_a_change(model: Path) -> None:
    signer = keys.signer("embedded")
    folder.sign(model, signer)
    assert folder.check(model, keys.keyring())[0] == keys.OURS
    verify = [
        "verify",
        "key",
        model,
        "--signature",
        model / SIGNATURE,
        "--public_key",
        public(signer.key),
    ]
    accepted = stock(*verify)
    assert accepted.returncode == 0, accepted.stderr
    (model / "weights").write_bytes(b"other")
    refused = stock(*verify)
    assert refused.returncode != 0
    assert "Hash mismatch" in refused.stderr
    with pytest.raises(SignatureError, match=r"'weights' of .*model was altered after this checkout signed it"):
        folder.check(model, keys.keyring())


@pytest.mark.long
def test_we_accept_what_the_stock_command_signed(model: Path) -> None:
    key = keys.signer("embedded").key
    done = stock("sign", "key", model, "--signature", model / SIGNATURE, "--private_key", keys.PRIVATE)
    assert done.returncode == 0, done.stderr
    assert folder.check(model, {"Ada Lovelace": key})[0] == "Ada Lovelace"
    with pytest.raises(SignatureError, match="nobody whose key counts here signed this"):
        folder.check(model, {})
    (model / ".git").mkdir()
    folder.check(model, {"Ada Lovelace": key})
    (model / ".git/config").write_text("[core]")
    with pytest.raises(SignatureError, match=r"'\.git/config' was added"):  # the stock command does not look there
        folder.check(model, {"Ada Lovelace": key})


def test_folders_nested_without_end_are_refused(model: Path) -> None:
    (model / "/".join("a" * 32)).mkdir(parents=True)
    assert hashes(shallow(model))
    (model / "/".join("a" * 33)).mkdir()
    for read in (hashes, shallow):
        with pytest.raises(Untrusted, match="more than 32 levels"):
            read(model)


CHANGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a byte": (lambda at: (at / "code/clinrl/__init__.py").write_text("x = 2\n"), r"__init__\.py' of .* was altered"),
    "a file less": (lambda at: (at / "MLmodel").unlink(), "'MLmodel' of .* is missing"),
    "a file more": (lambda at: (at / "code/evil.py").write_text(""), r"'code/evil\.py' was added"),
    "a hidden file more": (lambda at: (at / ".env").write_text(""), r"'\.env' was added"),
    "a second signature": (lambda at: (at / "code/model.sig").write_text(""), r"'code/model\.sig' was added"),
    "a name that is no text": (lambda at: Path(os.fsdecode(bytes(at) + b"/\xff")).write_text(""), "was added"),
    "a link to a file": (lambda at: (at / "link").symlink_to("MLmodel"), "'link' of .* is a link"),
    "a link to a folder": (lambda at: (at / "code/link").symlink_to("/etc"), "'code/link' of .* is a link"),
    "a file as a link": (
        lambda at: ((at / "weights").rename(at.parent / "w"), (at / "weights").symlink_to(at.parent / "w")),
        "'weights' of .* is a link",
    ),
    "a pipe": (lambda at: os.mkfifo(at / "pipe"), "'pipe' of .* is a link, or no file"),
    "a pipe as signature": (
        lambda at: ((at / SIGNATURE).unlink(), os.mkfifo(at / SIGNATURE)), "it is a link, no file, or too large"
    ),
    "no signature": (lambda at: (at / SIGNATURE).unlink(), "is not signed: it has no model.sig"),
    "a signature elsewhere": (
        lambda at: (
            (at / SIGNATURE).rename(at.parent / "s"), (at / SIGNATURE).symlink_to(at.parent / "s")
        ),
        "is a link",
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_refused_by_name(model: Path, change: str) -> None:
    folder.sign(model, keys.signer("embedded"))
    alter, message = CHANGES[change]
    alter(model)
    with pytest.raises(SignatureError, match=message):
        folder.check(model, keys.keyring())


def test_a_folder_may_be_moved_and_signed_again(model: Path) -> None:
    signer = keys.signer("embedded")
    folder.sign(model, signer)
    moved = model.rename(model.with_name("moved"))
    assert folder.check(moved, keys.keyring())[0] == keys.OURS
    (moved / "weights").write_bytes(b"new")
    folder.sign(moved, signer)
    assert folder.check(moved, keys.keyring())[0] == keys.OURS
    assert [path.name for path in moved.parent.iterdir() if "partial" in path.name] == []
    moved.with_name("by link").symlink_to(moved)
    with pytest.raises(SignatureError, match="is no folder"):
        folder.check(moved.with_name("by link"), keys.keyring())


def test_links_and_nothing_are_not_signed(model: Path) -> None:
    signer = keys.signer("embedded")
    (model / "link").symlink_to("/etc/passwd")
    with pytest.raises(SignatureError, match="is a link"):
        folder.sign(model, signer)
    (model.parent / "empty").mkdir()
    with pytest.raises(SignatureError, match="holds no file to sign"):
        folder.sign(model.parent / "empty", signer)


def test_every_change_of_the_signature_is_refused(model: Path) -> None:
    """Every third character of the file replaced, then the whole of it."""
    folder.sign(model, keys.signer("embedded"))
    path, ring = model / SIGNATURE, keys.keyring()
    text = path.read_text()
    for place in range(0, len(text), 3):
        path.write_text(text[:place] + ("A" if text[place] != "A" else "B") + text[place + 1 :])
        with pytest.raises(SignatureError):
            folder.check(model, ring)
    for other in ("", "null", "[]", "{}", "[" * 100_000, text[:-1], text + "}", '{"mediaType": NaN}', "1" * 5000):
        path.write_text(other)
        with pytest.raises(SignatureError):
            folder.check(model, ring)


NOT_WHOLE = "it is not about whole files by their SHA-256, without links"
TWICE = "it names a file twice, or by another digest than SHA-256"
NONE = "is no signature of a folder"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda signed: signed["serialization"].update(method="shards"), NOT_WHOLE),
        (lambda signed: signed["serialization"].update(hash_type="blake2b"), NOT_WHOLE),
        (lambda signed: signed["serialization"].update(allow_symlinks=True), NOT_WHOLE),
        (lambda signed: signed["resources"].append(signed["resources"][0]), TWICE),
        (lambda signed: signed["resources"].append(signed["resources"][0] | {"digest": "0" * 64}), TWICE),
        (lambda signed: signed["resources"].append({"name": "x", "algorithm": "blake2b", "digest": ""}), TWICE),
        (lambda signed: signed["resources"].clear(), "'MLmodel' was added to .*model after this checkout signed it"),
        (lambda signed: signed["resources"][0].update(name=["weights"]), NONE),
        (lambda signed: signed.update(serialization=None), NONE),
        (lambda signed: signed.update(resources=1), NONE),
    ],
)
def test_a_listed_signer_cannot_sign_what_is_not_understood(
    model: Path, change: Callable[[dict[str, Any]], object], says: str
) -> None:
    """What is not changed of the statement is as it was signed, and would be accepted."""
    signer = keys.signer("embedded")
    folder.sign(model, signer)
    path = model / SIGNATURE
    bundle = json.loads(path.read_text())
    statement = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    change(statement["predicate"])
    path.write_text(json.dumps(bundle | {"dsseEnvelope": dsse.envelope(statement, signer)}))
    with pytest.raises(SignatureError, match=says):
        folder.check(model, keys.keyring())


@pytest.mark.bench
def test_checking_ten_megabytes_is_quick(model: Path) -> None:
    (model / "large").write_bytes(os.urandom(10_000_000))
    folder.sign(model, keys.signer("embedded"))
    ring = keys.keyring()
    took = []
    for _ in range(5):
        start = time.perf_counter()
        folder.check(model, ring)
        took.append(time.perf_counter() - start)
    assert min(took) < 0.1
