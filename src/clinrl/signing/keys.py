"""Keys: this machine's signing key, and the keys whose signatures count.

One kind of key everywhere, ECDSA on P-256, because OpenSSF Model Signing, DSSE, OpenSSH, agents and hardware tokens all
speak it. A public key is written as OpenSSH does, on one line. A private key stays where it is: in a file that only its
owner reads, in the environment, or in an agent. Messages never quote a private key.
"""

import base64
import os
import stat
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import clinrl_loader
from clinrl.artifacts import locked, write_text
from clinrl.errors import Refused, SignatureError, echo
from clinrl.types import Strict
from clinrl_loader import KIND

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey

    from clinrl.config.base import Scale
    from clinrl.config.params import Params

T = TypeVar("T")

FOLDER = Path(".clinrl/keys")
PRIVATE = FOLDER / "signing.pem"
PUBLIC = FOLDER / "signing.pub"
TRUSTED = FOLDER / "trusted"
OURS = "this checkout"
"""The name of this checkout's own key in the keyring."""

MAX_LINE = 1000
MAX_FILE_BYTES = 16384
"""The most bytes of a key file that are read."""
AGENT = "agent"
"""The value of CLINRL_SIGNING_KEY if the private key is in the agent of SSH_AUTH_SOCK."""


class Key(Strict):
    """A public key. Made by `parse_key`, so that its line is one that OpenSSH would write."""

    line: str
    """`ecdsa-sha2-nistp256 AAAA...`, without a comment."""

    @property
    def fingerprint(self) -> str:
        """`SHA256:...`, as `ssh-keygen -l` prints it."""
        return clinrl_loader.fingerprint(self.line)

    def verifies(self, data: bytes, signature: bytes) -> bool:
        """Whether a DER signature is this key's, by ECDSA with SHA-256, over the data."""
        return clinrl_loader.verifies(self.line, data, signature)


def parse_key(line: str) -> Key:
    """A public key from its OpenSSH line, whose comment is dropped. Raises SignatureError if it is no P-256 key."""
    words = line.split() if len(line) <= MAX_LINE else []
    if words[:1] != [KIND] or "\n" in line.strip():
        raise SignatureError(
            f"this is no public key of the kind {KIND} on one line; `ssh-keygen -t ecdsa -b 256` makes one, and the "
            "line is in its file .pub"
        )
    try:
        return _key(clinrl_loader.public_key(" ".join(words[:2])))
    except ValueError:  # bad base64, another curve, or no point on it
        raise SignatureError(f"this {KIND} line holds no P-256 key; copy it whole from the file .pub") from None


@dataclass(frozen=True)
class Signer:
    """A usable private key: its public half, and the function that signs."""

    key: Key
    _sign: Callable[[bytes], bytes]

    def sign(self, data: bytes) -> bytes:
        """The DER signature of the data, by ECDSA with SHA-256. Raises SignatureError if signing failed."""
        signature = self._sign(data)
        if not self.key.verifies(data, signature):
            raise SignatureError(f"the signature that was made is not one of the key {self.key.fingerprint}")
        return signature


def signer(scale: "Scale") -> Signer:
    """This machine's signing key, from CLINRL_SIGNING_KEY, CLINRL_SIGNING_KEY_FILE or else .clinrl/keys/signing.pem.

    CLINRL_SIGNING_KEY is the key as PEM text, or `agent`: then it is the P-256 key of the agent of SSH_AUTH_SOCK, or of
    several the one with the fingerprint CLINRL_SIGNING_FINGERPRINT. CLINRL_SIGNING_PASSWORD decrypts an encrypted key.
    Without a key, scale `embedded` makes one and prints that once; `full` refuses. Raises SignatureError.
    """
    found = _elsewhere() or (_of_file(PRIVATE) if PRIVATE.exists() else None)
    if found is None:
        if scale != "embedded":
            raise SignatureError(
                "there is no signing key; set CLINRL_SIGNING_KEY or CLINRL_SIGNING_KEY_FILE, or run `clinrl keys init`"
            )
        found = make_key()
        if found is None:  # another process was quicker
            return signer(scale)
        echo(f"made the signing key {found.key.fingerprint} in {PRIVATE}; `clinrl keys show` prints it")
    elif scale == "embedded" and not PUBLIC.exists():
        publish(found.key)
    return found


def init() -> Key:
    """Make this checkout's key and keep it in .clinrl/keys. If the environment names a key that is elsewhere, only its
    public half is kept. Raises SignatureError if there is one already: nothing is overwritten."""
    if (elsewhere := _elsewhere()) is not None:
        if PUBLIC.exists() and _read_public(PUBLIC) != elsewhere.key:
            raise SignatureError(f"this checkout has another key in {PUBLIC}; move that file away to use the new one")
        publish(elsewhere.key)
        return elsewhere.key
    found = make_key()
    if found is None and not PUBLIC.exists():  # a kill came between the two files
        found = _of_file(PRIVATE)
        publish(found.key)
    if found is None:
        raise SignatureError(f"{PRIVATE} exists and is not overwritten; what it signed would count no longer")
    return found.key


def make_key() -> Signer | None:
    """A new key in .clinrl/keys, or None if there is one already, which stays.

    Raises SignatureError if this checkout's key is elsewhere: signatures of another one would not count.
    """
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    with _lock_folder():
        if PRIVATE.exists():
            return None
        if PUBLIC.exists():
            raise SignatureError(
                f"the private key of {PUBLIC} is not here; name it in CLINRL_SIGNING_KEY or CLINRL_SIGNING_KEY_FILE, "
                "or move that file away for a new key"
            )
        private = generate_private_key(SECP256R1())
        text = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        found = _signer_of(private)
        write_text(PRIVATE, text.decode(), 0o600)
        write_text(PUBLIC, f"{found.key.line}\n", 0o644)  # after a kill before this, `init` does it
        return found


def publish(key: Key) -> None:
    """Keep the public half of a key that is elsewhere (environment, agent, another file) as this checkout's own."""
    with _lock_folder():
        write_text(PUBLIC, f"{key.line}\n", 0o644)


def trust(name: str, key: Key) -> None:
    """Trust the signatures of a key, under a name. Raises SignatureError for a name that is in use or not allowed."""
    if name == OURS or name.startswith(".") or "/" in name or not name.isprintable() or not 2 <= len(name) <= 80:
        raise SignatureError(
            f"{name[:80]!r} cannot name a key: 2 to 80 printable characters, no / and no . in front, not {OURS!r}"
        )
    path = TRUSTED / f"{name}.pub"
    with _lock_folder():
        TRUSTED.mkdir(mode=0o700, exist_ok=True)
        if path.exists() and _read_public(path) != key:
            raise SignatureError(f"{path} is another key; remove the file if {name} has a new one")
        write_text(path, f"{key.line}\n", 0o644)


def keyring() -> dict[str, Key]:
    """The trusted keys by name: .clinrl/keys/trusted/NAME.pub, and .clinrl/keys/signing.pub as "this checkout".

    Raises SignatureError naming a file that is no key, or a file or folder into which others may write.
    """
    for folder in (FOLDER, TRUSTED):
        if folder.is_dir() and folder.stat().st_mode & 0o022:
            raise SignatureError(f"others may write into {folder}, so no key in it counts; run `chmod 700 {folder}`")
    files = sorted(TRUSTED.glob("*.pub"))
    for file in (*files, PUBLIC):
        if file.is_file() and file.stat().st_mode & 0o022:
            raise SignatureError(f"others may write into {file}, so it does not count; run `chmod go-w {file}`")
    for file in files:
        if not file.stem.isprintable():
            raise SignatureError(f"{str(file)!r} has a name that cannot be printed; rename the file")
    found = {file.stem: _read_public(file) for file in files}
    if OURS in found:
        raise SignatureError(f"{TRUSTED / OURS}.pub has the name of this checkout's own key; rename the file")
    return found | ({OURS: _read_public(PUBLIC)} if PUBLIC.exists() else {})


def trusted_keys(params: "Params") -> dict[str, Key]:
    """The keys that the project trusts for registered folders, audit lines and approvals, by name.

    These are this checkout's keyring and the approvers of params.yaml; one name may stand for a key of each.
    """
    listed = params.approvers
    ours = {name if listed.get(name, key) == key else f"{name}, trusted here": key for name, key in keyring().items()}
    return {**ours, **listed}


def _elsewhere() -> Signer | None:
    text, named = os.environ.get("CLINRL_SIGNING_KEY", ""), os.environ.get("CLINRL_SIGNING_KEY_FILE", "")
    if text.strip() == AGENT:
        return _of_agent()
    if text.strip():
        return _load_key(text.encode(errors="replace"), "CLINRL_SIGNING_KEY")
    return _of_file(Path(named)) if named else None


def _of_file(path: Path) -> Signer:
    """The key of a file that nobody else may read. Raises SignatureError."""
    try:
        with path.open("rb") as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077:
                raise SignatureError(f"others may read the private key {path}; run `chmod 600 {path}`")
            return _load_key(stream.read(MAX_FILE_BYTES), str(path))
    except OSError as error:
        raise SignatureError(f"the private key {path} cannot be read ({error.strerror}); check its path") from None


def _load_key(text: bytes, where: str) -> Signer:
    """A private key from PEM, or from OpenSSH's form of it. Raises SignatureError, which quotes none of the text."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    password = os.environ.get("CLINRL_SIGNING_PASSWORD", "").encode() or None
    is_openssh = b"BEGIN OPENSSH PRIVATE KEY" in text
    load = serialization.load_ssh_private_key if is_openssh else serialization.load_pem_private_key
    try:
        return _signer_of(load(text, password))
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise SignatureError(
            f"{where} holds no P-256 private key, or CLINRL_SIGNING_PASSWORD does not open it; give the whole PEM "
            "text, and a password exactly if it has one"
        ) from None


def _signer_of(private: Any) -> Signer:
    """A signer for a loaded private key. Raises ValueError if it is not on P-256."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256

    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise ValueError("no elliptic curve")
    held: EllipticCurvePrivateKey = private
    # Deterministic (RFC 6979): the same statement has the same signature, so writing it again changes no file.
    method = ec.ECDSA(SHA256(), deterministic_signing=True)
    return Signer(_key(held.public_key()), lambda data: held.sign(data, method))


def _of_agent() -> Signer:
    """The P-256 key of the SSH agent. Raises SignatureError without an agent, or unless exactly one key is meant."""
    import asyncio

    import asyncssh
    from asyncssh.packet import SSHPacket
    from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

    socket, named = os.environ.get("SSH_AUTH_SOCK", ""), os.environ.get("CLINRL_SIGNING_FINGERPRINT", "")

    def query(question: Callable[[asyncssh.SSHAgentClient], Awaitable[T]]) -> T:
        async def answer() -> T:
            agent = await asyncssh.connect_agent(socket)
            try:
                return await question(agent)
            finally:
                agent.close()

        return asyncio.run(answer())

    if not socket:
        raise SignatureError("CLINRL_SIGNING_KEY is agent, but SSH_AUTH_SOCK names none; start one with `ssh-agent`")
    try:
        pairs = query(lambda agent: agent.get_keys())
    except (OSError, ValueError, asyncssh.Error):
        raise SignatureError("the agent of SSH_AUTH_SOCK does not answer; `ssh-add -l` shows what it holds") from None
    blobs = [pair.public_data for pair in pairs if pair.algorithm == KIND.encode()]
    held = {parse_key(f"{KIND} {base64.b64encode(blob).decode()}"): blob for blob in blobs}
    keys = [key for key in held if named in ("", key.fingerprint)]
    if len(keys) != 1:
        which = f"with the fingerprint {named[:80]!r}" if named else "that could be meant"
        raise SignatureError(
            f"the agent of SSH_AUTH_SOCK holds {len(keys)} P-256 keys {which}; `ssh-add` adds one, and "
            "CLINRL_SIGNING_FINGERPRINT picks one of several"
        )

    def sign(data: bytes) -> bytes:
        try:
            packet = SSHPacket(query(lambda agent: agent.sign(held[keys[0]], data)))
            packet.get_string()  # the kind of key, again
            numbers = SSHPacket(packet.get_string())
            return encode_dss_signature(numbers.get_mpint(), numbers.get_mpint())
        except (OSError, ValueError, asyncssh.Error):
            raise SignatureError(f"the agent did not sign with {keys[0].fingerprint}; unlock it, or confirm") from None

    return Signer(keys[0], sign)


def _key(public: "EllipticCurvePublicKey") -> Key:
    """A public key as OpenSSH writes it. Raises ValueError if it is not on P-256."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    if public.curve.name != "secp256r1":
        raise ValueError("another curve")
    return Key(line=public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode())


def _read_public(path: Path) -> Key:
    try:
        with path.open("rb") as stream:
            return parse_key(stream.read(MAX_FILE_BYTES).decode(errors="replace").strip())
    except SignatureError as error:
        raise SignatureError(f"{path}: {error}") from None
    except OSError as error:  # says nothing about the key, which may count as before
        raise Refused(f"{path} cannot be read ({error.strerror})") from None


@contextmanager
def _lock_folder() -> Iterator[None]:
    """One process at a time changes .clinrl/keys; the others wait."""
    try:
        FOLDER.mkdir(mode=0o700, parents=True, exist_ok=True)
        (FOLDER / ".lock").touch()
    except (PermissionError, FileExistsError, NotADirectoryError) as error:
        raise SignatureError(
            f"no key can be kept in {FOLDER} ({error.strerror}); name one in CLINRL_SIGNING_KEY or "
            "CLINRL_SIGNING_KEY_FILE, or let this user write there"
        ) from None
    with locked(FOLDER / ".lock"):
        yield
