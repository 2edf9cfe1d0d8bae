"""Keys, against OpenSSH itself: fingerprints, files, the environment, a real agent."""

import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from hypothesis import given
from hypothesis import strategies as st

import clinrl_loader
from clinrl.config.params import Params
from clinrl.errors import SignatureError
from clinrl.signing import keys
from processes import eventually
from valid_params import VALID

DATA = b"what is signed"
NONE = serialization.NoEncryption()


def pem(curve: ec.EllipticCurve, password: bytes | None = None) -> bytes:
    lock = serialization.BestAvailableEncryption(password) if password else NONE
    key = ec.generate_private_key(curve)
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, lock)


def keygen(path: Path, *options: str) -> str:
    """A key pair made by OpenSSH; the line of its public half."""
    subprocess.run(["ssh-keygen", "-q", "-N", "", "-f", path, *options], check=True)
    return path.with_suffix(".pub").read_text()


ssh = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs OpenSSH")


def test_a_missing_key_is_made_once_at_scale_embedded(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = keys.signer("embedded")
    assert f"made the signing key {first.key.fingerprint}" in capsys.readouterr().err
    assert keys.signer("embedded").key == first.key
    assert capsys.readouterr().err == ""
    assert stat.S_IMODE(keys.PRIVATE.stat().st_mode) == 0o600
    assert stat.S_IMODE(keys.FOLDER.stat().st_mode) == 0o700
    assert keys.keyring() == {keys.OURS: first.key}
    assert first.key.verifies(DATA, first.sign(DATA))
    assert first.sign(DATA) == first.sign(DATA), "the same statement, the same bytes"
    assert not first.key.verifies(DATA + b".", first.sign(DATA))
    assert not first.key.verifies(DATA, b"no signature")


def test_a_kill_between_the_halves_of_a_key_is_mended(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = keys.write_text

    def killed(path: Path, *how: Any) -> None:
        write(path, *how)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(keys, "write_text", killed)
        with pytest.raises(KeyboardInterrupt):
            keys.make_key()
    key = keys.init()
    assert keys.signer("full").key == key
    keys.PUBLIC.unlink()
    assert keys.signer("embedded").key == key
    assert keys.keyring() == {keys.OURS: key}
    with pytest.raises(SignatureError, match="exists and is not overwritten"):
        keys.init()
    keys.PRIVATE.unlink()
    with pytest.raises(SignatureError, match=r"the private key of .*signing\.pub is not here"):
        keys.signer("embedded")


def test_what_signs_with_another_key_is_found(checkout: Path) -> None:
    key = keys.signer("embedded").key
    for made in (b"", keys._load_key(pem(ec.SECP256R1()), "test").sign(DATA)):
        with pytest.raises(SignatureError, match="is not one of the key SHA256:"):
            keys.Signer(key, lambda _, made=made: made).sign(DATA)


def test_where_no_key_can_be_kept_it_is_said(checkout: Path) -> None:
    Path(".clinrl").write_text("in the way")
    with pytest.raises(SignatureError, match=r"no key can be kept in \.clinrl/keys"):
        keys.signer("embedded")


def test_full_scale_makes_no_key_by_itself(checkout: Path) -> None:
    with pytest.raises(SignatureError, match="no signing key; set CLINRL_SIGNING_KEY"):
        keys.signer("full")
    assert not keys.FOLDER.exists()


def test_many_at_once_make_one_key(checkout: Path) -> None:
    found = []
    threads = [threading.Thread(target=lambda: found.append(keys.signer("embedded").key)) for _ in range(8)]
    with keys._lock_folder():  # as another process does that makes one
        for thread in threads:
            thread.start()
        threads[0].join(0.5)
        assert not found
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert set(found) == {keys.keyring()[keys.OURS]}


def test_a_key_from_the_environment_and_from_a_file(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLINRL_SIGNING_KEY", pem(ec.SECP256R1()).decode())
    of_environment = keys.signer("full")
    assert not keys.FOLDER.exists()
    assert keys.signer("embedded").key == of_environment.key
    assert keys.keyring() == {keys.OURS: of_environment.key}, "what a first run signs, it also accepts"
    monkeypatch.delenv("CLINRL_SIGNING_KEY")
    Path("ci.pem").write_bytes(pem(ec.SECP256R1(), b"open sesame"))
    Path("ci.pem").chmod(0o600)
    monkeypatch.setenv("CLINRL_SIGNING_KEY_FILE", "ci.pem")
    with pytest.raises(SignatureError, match=r"ci\.pem holds no P-256 private key, or CLINRL_SIGNING_PASSWORD"):
        keys.signer("full")
    monkeypatch.setenv("CLINRL_SIGNING_PASSWORD", "open sesame")
    assert keys.signer("embedded").key != of_environment.key
    assert keys.keyring() == {keys.OURS: of_environment.key}, "what the first key signed counts on"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_private_key_that_others_may_read_is_refused(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    keys.signer("embedded")
    keys.PRIVATE.chmod(mode)
    with pytest.raises(SignatureError, match="others may read the private key"):
        keys.signer("embedded")
    monkeypatch.setenv("CLINRL_SIGNING_KEY_FILE", str(keys.PRIVATE))
    with pytest.raises(SignatureError, match="others may read the private key"):
        keys.signer("full")


def test_no_message_quotes_a_private_key(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = pem(ec.SECP256R1()).decode()
    other = rsa.generate_private_key(65537, 2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, NONE
    )
    for text in (
        whole[:-60],
        pem(ec.SECP384R1()).decode(),
        other.decode(),
        "secret",
        "\udcff",
    ):
        monkeypatch.setenv("CLINRL_SIGNING_KEY", text)
        with pytest.raises(SignatureError) as refused:
            keys.signer("full")
        assert "CLINRL_SIGNING_KEY holds no P-256 private key" in str(refused.value)
        assert not any(line in str(refused.value) for line in text.split() if len(line) > 5)
    monkeypatch.delenv("CLINRL_SIGNING_KEY")
    for where in ("nowhere.pem", "."):
        monkeypatch.setenv("CLINRL_SIGNING_KEY_FILE", where)
        with pytest.raises(SignatureError, match="cannot be read"):
            keys.signer("full")


def test_whose_signatures_count(checkout: Path) -> None:
    ours = keys.signer("embedded").key
    theirs = keys._load_key(pem(ec.SECP256R1()), "test").key
    keys.trust("Ada Lovelace", theirs)
    keys.trust("Ada Lovelace", theirs)
    assert keys.keyring() == {"Ada Lovelace": theirs, keys.OURS: ours}
    with pytest.raises(SignatureError, match="is another key"):
        keys.trust("Ada Lovelace", ours)
    for name in ("", "x", "../up", "a/../../signing", ".hidden", keys.OURS, "a\nb", "n" * 81):
        with pytest.raises(SignatureError, match="cannot name a key"):
            keys.trust(name, theirs)
    (keys.TRUSTED / "broken.pub").write_bytes(b"\xff" * 100_000)
    with pytest.raises(SignatureError, match=r"trusted/broken\.pub: this is no public key"):
        keys.keyring()
    (keys.TRUSTED / "broken.pub").unlink()
    odd = Path(os.fsdecode(bytes(keys.TRUSTED) + b"/\xff.pub"))
    odd.write_text(theirs.line)
    with pytest.raises(SignatureError, match="cannot be printed") as refused:
        keys.keyring()
    str(refused.value).encode()
    odd.unlink()
    for file in (*keys.TRUSTED.glob("*.pub"), keys.PUBLIC):
        file.chmod(0o664)
        with pytest.raises(SignatureError, match=f"others may write into {file}, so it does not count"):
            keys.keyring()
        file.chmod(0o644)
    for folder, mode in [(keys.TRUSTED, 0o720), (keys.TRUSTED, 0o702), (keys.FOLDER, 0o720), (keys.FOLDER, 0o702)]:
        folder.chmod(mode)
        with pytest.raises(SignatureError, match=f"others may write into {folder},"):
            keys.keyring()
        folder.chmod(0o700)


def test_who_is_listed_in_params_keeps_the_name(checkout: Path) -> None:
    ada, eve = (keys._load_key(pem(ec.SECP256R1()), "test").key for _ in range(2))
    params = Params.model_validate({**VALID, "approvers": {"Ada": ada.line}, "rebuilders": {"Bob": ada.line}})
    keys.trust("Ada", eve)
    keys.trust("Eve", eve)
    assert keys.trusted_keys(params) == {"Ada": ada, "Ada, trusted here": eve, "Eve": eve}


@ssh
def test_openssh_prints_the_same_fingerprint(checkout: Path) -> None:
    key = keys.signer("embedded").key
    said = subprocess.run(["ssh-keygen", "-l", "-f", keys.PUBLIC], check=True, capture_output=True, text=True).stdout
    assert said.split()[1] == key.fingerprint


@ssh
def test_lines_and_private_keys_of_openssh_are_read(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = keygen(Path("p256"), "-t", "ecdsa", "-b", "256", "-C", "ada@example.org")
    key = keys.parse_key(line)
    assert "ada" not in key.line
    assert keys.parse_key(line.replace("ada", "Zoë")) == key
    assert keys.parse_key(key.line) == key
    monkeypatch.setenv("CLINRL_SIGNING_KEY_FILE", "p256")
    assert keys.signer("full").key == key
    signature = keys.signer("full").sign(DATA)
    Path("key.pem").write_text(clinrl_loader.pem(key.line))
    Path("data").write_bytes(DATA)
    Path("sig").write_bytes(signature)
    subprocess.run(["openssl", "dgst", "-sha256", "-verify", "key.pem", "-signature", "sig", "data"], check=True)
    for name, options in {"ed": ["-t", "ed25519"], "p384": ["-t", "ecdsa", "-b", "384"]}.items():
        with pytest.raises(SignatureError):
            keys.parse_key(keygen(Path(name), *options))


@given(st.one_of(st.text(), st.text(alphabet="AEmo2VzdHAyNTY=").map(lambda text: f"{keys.KIND} {text}")))
def test_any_other_line_is_refused_in_a_sentence(line: str) -> None:
    with pytest.raises(SignatureError):
        keys.parse_key(line)


def test_a_file_laid_by_hand_takes_no_place_of_this_checkout_s_own_key(checkout: Path) -> None:
    """`trust` refuses the name, and so does whoever reads the folder."""
    keys.signer("embedded")
    other = keys._load_key(pem(ec.SECP256R1()), "test").key
    with pytest.raises(SignatureError, match="cannot name a key"):
        keys.trust(keys.OURS, other)
    keys.trust("Ada Lovelace", other)
    (keys.TRUSTED / "Ada Lovelace.pub").rename(keys.TRUSTED / f"{keys.OURS}.pub")
    for _ in range(2):
        with pytest.raises(SignatureError, match=r"this checkout\.pub has the name of this checkout's own key; rename"):
            keys.keyring()
        keys.PUBLIC.unlink(missing_ok=True)  # nor does it become that key where there is none


def test_a_line_that_is_nearly_a_key_is_refused(checkout: Path) -> None:
    line = keys.signer("embedded").key.line
    kind, blob = line.split()
    middle = len(blob) // 2
    changed = blob[:middle] + ("A" if blob[middle] != "A" else "B") + blob[middle + 1 :]  # no point of the curve
    for near in (f"{kind} {changed}", f"{kind} {blob[:-4]}", f"ssh-rsa {blob}", f"{line}\n{line}", line + " c" * 1000):
        with pytest.raises(SignatureError):
            keys.parse_key(near)


@pytest.fixture
def agent(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A real ssh-agent of this test alone."""
    if shutil.which("ssh-agent") is None:
        pytest.skip("needs ssh-agent")
    monkeypatch.setenv("SSH_AUTH_SOCK", str(checkout / "agent"))
    with subprocess.Popen(["ssh-agent", "-D", "-a", checkout / "agent"], stdout=subprocess.DEVNULL) as process:
        eventually((checkout / "agent").exists)
        yield
        process.terminate()


def add(path: Path) -> None:
    subprocess.run(["ssh-add", "-q", path], check=True)


@pytest.mark.long
@ssh
def test_an_agent_signs(checkout: Path, agent: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLINRL_SIGNING_KEY", "agent")
    keygen(Path("other"), "-t", "ed25519")
    add(Path("other"))
    with pytest.raises(SignatureError, match="holds 0 P-256 keys"):
        keys.signer("full")
    first = keys.parse_key(keygen(Path("first"), "-t", "ecdsa", "-b", "256"))
    add(Path("first"))
    signer = keys.signer("full")
    assert signer.key == first
    assert first.verifies(DATA, signer.sign(DATA))
    second = keys.parse_key(keygen(Path("second"), "-t", "ecdsa", "-b", "256"))
    add(Path("second"))
    with pytest.raises(SignatureError, match="holds 2 P-256 keys that could be meant"):
        keys.signer("full")
    monkeypatch.setenv("CLINRL_SIGNING_FINGERPRINT", second.fingerprint)
    assert keys.signer("full").key == second
    subprocess.run(["ssh-add", "-q", "-D"], check=True)
    with pytest.raises(SignatureError, match="the agent did not sign"):
        signer.sign(DATA)


def test_an_agent_that_is_not_there_is_said(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLINRL_SIGNING_KEY", "agent")
    with pytest.raises(SignatureError, match="SSH_AUTH_SOCK names none"):
        keys.signer("full")
    monkeypatch.setenv("SSH_AUTH_SOCK", str(checkout / "nobody"))
    with pytest.raises(SignatureError, match="does not answer"):
        keys.signer("full")


def test_reading_a_signature_imports_no_signing_library() -> None:
    code = (
        "import sys; from clinrl.signing import dsse, folder, keys; "
        "sys.exit(any(name in sys.modules for name in ('model_signing', 'asyncssh', 'cryptography')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ})


def test_the_keys_of_another_user_in_the_working_directory_do_not_count(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys.signer("embedded")
    assert clinrl_loader.trusted()
    real, other = Path.stat, os.geteuid() + 1

    def theirs(path: Path, **how: Any) -> os.stat_result:
        found = real(path, **how)
        return os.stat_result([*found[:4], other, *found[5:10]]) if path == keys.PUBLIC else found

    monkeypatch.setattr(Path, "stat", theirs)
    with pytest.raises(clinrl_loader.Untrusted, match=r"signing\.pub is somebody else's, so no key in it counts"):
        clinrl_loader.trusted()


def test_a_named_key_may_lie_in_a_sticky_folder_and_in_no_other_that_others_write(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = checkout / "shared"
    shared.mkdir()
    (shared / "ada.pub").write_text(f"{keys.signer('embedded').key.line}\n")
    monkeypatch.setenv("CLINRL_TRUSTED_KEYS", str(shared / "ada.pub"))
    shared.chmod(0o1777)
    assert list(clinrl_loader.trusted()) == [str(shared / "ada.pub")]
    shared.chmod(0o777)
    with pytest.raises(clinrl_loader.Untrusted, match=r"others may replace a key in .*shared"):
        clinrl_loader.trusted()
