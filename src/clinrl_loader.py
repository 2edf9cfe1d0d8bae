"""What MLflow imports to load a registered model: it checks the whole folder before any of its code is imported.

A registered folder is signed: `model.sig` names each of its files by SHA-256 (OpenSSF Model Signing). This module reads
that signature with the standard library and `cryptography` alone. It is installed with clinrl, and a copy lies in every
registered folder for those who have no clinrl. That copy is the one file that nothing checks before it runs: who
imports clinrl first, or asks the stock `model_signing`, does not depend on it.

Whose signatures count: the keys of CLINRL_TRUSTED_KEYS (files or folders of `*.pub`, separated as in PATH), or else
those of `.clinrl/keys` in the working directory. Without either, the key in the folder is believed, with a warning:
that finds damage and careless changes, but nobody who signs anew.

`load` is for whoever has this module installed: it checks a copy before MLflow sees it. `mlflow.pyfunc.load_model`
alone obeys the folder's `MLmodel` before anything here is asked, and that file may name other code to import.
"""

import atexit
import base64
import binascii
import hashlib
import importlib
import json
import os
import stat
import sys
import warnings
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, SourceFileLoader
from pathlib import Path
from typing import Any

SIGNATURE = "model.sig"
"""The file of a folder that holds its signature."""
SIGNER = "signer.pub"
"""The file of a registered folder that holds the key of who signed it."""
NOTED = "registered_model_meta"
"""What MLflow writes into a folder when it loads a registered model: a name and a number that nothing here reads."""
CODE, PACKAGE = "code", "clinrl"
RECORD = "served.json"
"""The file of a registered folder that says which model it is."""
TRUSTED = "CLINRL_TRUSTED_KEYS"
KEYS = Path(".clinrl/keys")

KIND = "ecdsa-sha2-nistp256"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://model_signing/signature/v1.0"
BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
LARGEST = 64 * 2**20
"""Characters of a payload, and bytes of a signature; more is not read."""
MOST_SIGNATURES = 16

_copies: dict[Path, Mapping[str, str]] = {}
"""The folders that `load` made and checked, with the SHA-256 of their files. Nobody else can write into them."""


class Untrusted(ValueError):
    """A signature that does not hold, and why, in one sentence."""


def pae(kind: str, payload: bytes) -> bytes:
    """What a DSSE signature is over: the payload, with its type and both lengths in front."""
    return b"DSSEv1 %d %s %d %s" % (len(kind.encode()), kind.encode(), len(payload), payload)


@lru_cache
def public_key(line: str) -> Any:
    """The P-256 key of an OpenSSH line. Raises ValueError for anything else."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    try:
        key = load_ssh_public_key(line.encode())
    except UnsupportedAlgorithm:
        raise ValueError("another kind of key") from None
    if not isinstance(key, EllipticCurvePublicKey) or key.curve.name != "secp256r1":
        raise ValueError("another kind of key")
    return key


def fingerprint(line: str) -> str:
    """`SHA256:...`, as `ssh-keygen -l` prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(base64.b64decode(line.split()[1])).digest()).decode().rstrip("=")


def pem(line: str) -> str:
    """The key of an OpenSSH line as SubjectPublicKeyInfo in PEM, which `openssl` and `model_signing` read."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return str(public_key(line).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode())


def verifies(line: str, data: bytes, signature: bytes) -> bool:
    """Whether a DER signature over the data is that of a key, by ECDSA with SHA-256."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
    from cryptography.hazmat.primitives.hashes import SHA256

    try:
        public_key(line).verify(signature, data, ECDSA(SHA256()))
    except InvalidSignature:
        return False
    return True


def opened(envelope: Any, keys: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """Who signed an in-toto statement in a DSSE envelope, by the name of their key, and the statement.

    `keys` are OpenSSH lines by name. Nothing of the payload is read before a signature of a listed key was found on it.
    Raises Untrusted if there is none, or if it is no such envelope.
    """
    if not isinstance(envelope, dict) or envelope.keys() != {"payload", "payloadType", "signatures"}:
        raise Untrusted("this is no DSSE envelope; it needs payload, payloadType and signatures")
    listed = envelope["signatures"]
    if envelope["payloadType"] != PAYLOAD_TYPE or not isinstance(listed, list) or len(listed) > MOST_SIGNATURES:
        raise Untrusted(f"this is no signed in-toto statement: its type must be {PAYLOAD_TYPE}, with signatures")
    payload = _decode(envelope["payload"])
    signer = _signer_of(pae(PAYLOAD_TYPE, payload), listed, keys)
    try:
        statement = json.loads(payload)
    except (ValueError, RecursionError):
        raise Untrusted("the signed text is no JSON") from None
    if not isinstance(statement, dict) or statement.get("_type") != STATEMENT:
        raise Untrusted(f"the signed text is no in-toto statement: its _type must be {STATEMENT}")
    return signer, statement


def _signer_of(data: bytes, signatures: list[Any], keys: Mapping[str, str]) -> str:
    """The name of the key that made one of the signatures; a key that a signature names must be that key."""
    for signature in signatures:
        if not isinstance(signature, dict) or not {"sig"} <= signature.keys() <= {"sig", "keyid"}:
            raise Untrusted("a signature of this envelope is malformed; it needs sig, and may have keyid")
        made = _decode(signature["sig"])
        for name, line in keys.items():
            if signature.get("keyid") in (None, "", fingerprint(line)) and verifies(line, data, made):
                return name
    raise Untrusted(
        "nobody whose key counts here signed this; `clinrl keys show` lists the keys that count, `clinrl keys trust` "
        "adds one"
    )


def _decode(text: Any) -> bytes:
    """Bytes from Base64 in its one canonical spelling. Raises Untrusted."""
    if not isinstance(text, str) or len(text) > LARGEST:
        raise Untrusted("a field of this envelope is no Base64, or too long")
    try:
        found = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise Untrusted("a field of this envelope is no Base64") from None
    if base64.b64encode(found).decode() != text:
        raise Untrusted("a field of this envelope is not as Base64 writes it")
    return found


def check(folder: Path, keys: Mapping[str, str], *, but: Iterable[str] = ()) -> tuple[str, dict[str, str]]:
    """Who signed a folder, by the name of their key, and the SHA-256 of each of its files.

    `but` are names of files at its top that may be there besides. Raises Untrusted naming a file that was altered, is
    missing or was added, if there is no signature, or if nobody who is listed made it.
    """
    signer, signed = _read_signature(folder / SIGNATURE, keys)
    found = hashes(folder, but=but)
    for name in sorted(signed.keys() | found.keys()):
        if name not in found:
            raise Untrusted(f"{name!r} of {folder} is missing; it was there when {signer} signed the folder")
        if name not in signed:
            raise Untrusted(f"{name!r} was added to {folder} after {signer} signed it")
        if signed[name] != found[name]:
            raise Untrusted(f"{name!r} of {folder} was altered after {signer} signed it")
    return signer, signed


def hashes(folder: Path, *, but: Iterable[str] = ()) -> dict[str, str]:
    """SHA-256 of every file of a folder but its signature, by its path in it.

    Raises Untrusted for a link, or for anything else that is no file: what it holds may change unseen.
    """
    found: dict[str, str] = {}
    left_out = {SIGNATURE, *but}

    def walk(at: Path, before: str) -> None:
        for entry in sorted(os.scandir(at), key=lambda entry: entry.name):
            name = before + entry.name
            if entry.is_dir(follow_symlinks=False):
                walk(at / entry.name, f"{name}/")
            elif not stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode):
                raise Untrusted(f"{name!r} of {folder} is a link, or no file; a signed folder holds files alone")
            elif name not in left_out:
                found[name] = _sha256(at / entry.name)

    if folder.is_symlink() or not folder.is_dir():
        raise Untrusted(f"{folder} is no folder; a link to one cannot be signed either")
    walk(folder, "")
    return found


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _read_signature(path: Path, keys: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Who made a signature, and the digests of the files that it is about. Raises Untrusted."""
    try:
        if path.is_symlink() or path.stat().st_size > LARGEST:
            raise Untrusted("it is a link, or too large for a signature")
        bundle = json.loads(path.read_bytes())
        envelope = bundle["dsseEnvelope"]
        signer, statement = opened(envelope, keys)
        material = {"publicKey": {"hint": hashlib.sha256(pem(keys[signer]).encode()).hexdigest()}, "tlogEntries": []}
        if bundle != {"mediaType": BUNDLE, "verificationMaterial": material, "dsseEnvelope": envelope}:
            raise Untrusted(f"this is no {BUNDLE} of that key alone")
        how, listed = statement["predicate"]["serialization"], statement["predicate"]["resources"]
        expected = (PREDICATE, "files", "sha256", False)
        if (statement["predicateType"], how["method"], how["hash_type"], how["allow_symlinks"]) != expected:
            raise Untrusted("it is not about whole files by their SHA-256, without links")
        signed = {file["name"]: file["digest"] for file in listed if file["algorithm"] == "sha256"}
        if len(signed) != len(listed):
            raise Untrusted("it names a file twice, or by another digest than SHA-256")
    except FileNotFoundError:
        raise Untrusted(f"{path.parent} is not signed: it has no {path.name}") from None
    except Untrusted as error:
        raise Untrusted(f"{path}: {error}") from None
    except (ValueError, RecursionError, KeyError, TypeError, IndexError):
        raise Untrusted(f"{path} is no signature of a folder") from None
    return signer, signed


def trusted() -> dict[str, str]:
    """The OpenSSH lines of the keys whose signatures count, by name; none if nothing says whose do.

    Raises Untrusted for a file that is no key, for a folder of keys into which others may write, if CLINRL_TRUSTED_KEYS
    names a place that is not there, or if it is set, or `.clinrl/keys` is there, without a key at all.
    """
    named = os.environ.get(TRUSTED, "")
    if named:
        places = [Path(part) for part in named.split(os.pathsep) if part]
        for place in places:
            if not place.exists():
                raise Untrusted(f"{TRUSTED} names {place}, which is not there")
    else:
        places = [place for place in (KEYS / "trusted", KEYS / "signing.pub") if place.exists()]
    for folder in places if named else (KEYS, *places):
        if folder.is_dir() and folder.stat().st_mode & 0o022:
            raise Untrusted(f"others may write into {folder}, so no key in it counts; run `chmod go-w {folder}`")
    files = [file for place in places for file in (sorted(place.glob("*.pub")) if place.is_dir() else [place])]
    if named and not files:
        raise Untrusted(f"{TRUSTED} names no file .pub, so nobody's signature counts")
    if not files and os.path.lexists(KEYS):
        raise Untrusted(f"{KEYS} holds no public key, so nobody's signature counts; `clinrl keys trust` adds one")
    return {str(file): _line(file) for file in files}


def _line(file: Path) -> str:
    """The key of a file `.pub`, without its comment. Raises Untrusted."""
    try:
        line = " ".join(file.read_text(encoding="ascii").split()[:2])
        public_key(line)
    except (OSError, ValueError):
        raise Untrusted(f"{file} holds no public key of the kind {KIND}") from None
    return line


def load(uri: str, *, digest: str = "") -> Any:
    """A registered model as `mlflow.pyfunc.load_model` returns it, of a copy that was checked before MLflow read it.

    The model is copied into a folder that only this user can enter, and that stays until the process ends: what is
    checked is what is loaded, whatever happens to the store meanwhile. Every file of the copy must be as it was signed,
    `MLmodel` too, which names the code that MLflow imports.

    A signature says that a model was registered here. It does not say that it is the champion: whoever can write to the
    registry can let a name stand for another model that was signed, such as an older one. `digest` says which model is
    meant: it is what `clinrl lookup MODEL champion --json` prints under "digest", noted down elsewhere than in the
    registry. Without it any signed model is loaded.

    Raises Untrusted if a file is not as it was signed, if nobody whose key counts signed it, or if it is another model
    than `digest` says; then no code of it was run. What MLflow raises if it cannot bring the model is passed on.
    """
    import shutil
    from tempfile import mkdtemp

    from mlflow import artifacts, get_registry_uri, pyfunc

    place = mkdtemp(prefix="clinrl-")
    try:
        if get_registry_uri().startswith("sqlite:"):  # MLflow names the folder itself, and would copy it slowly
            copy = Path(place) / "model"
            shutil.copytree(artifacts.download_artifacts(artifact_uri=uri), copy, symlinks=True)
        else:
            copy = Path(artifacts.download_artifacts(artifact_uri=uri, dst_path=place))
        try:
            signed = _check_copy(copy, stacklevel=3)
            if digest and (found := _digest(copy)) != digest:
                raise Untrusted(f"it is the model {found!r} and not {digest!r}; nothing was loaded")
        except Untrusted as error:
            raise Untrusted(f"{uri}, of which {copy} was a copy: {error}") from None
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
    maker = os.getpid()

    def sweep() -> None:
        if os.getpid() == maker:  # a fork that ends leaves the folder to the others
            shutil.rmtree(place, ignore_errors=True)

    atexit.register(sweep)
    _copies[copy] = signed
    return pyfunc.load_model(str(copy))


def _digest(folder: Path) -> str:
    """The digest by which the registry knows the model of a folder that was checked. Raises Untrusted."""
    try:
        return str(json.loads((folder / RECORD).read_bytes())["digest"])
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        raise Untrusted(f"{folder / RECORD} names no digest; nothing was loaded") from None


def _load_pyfunc(path: str) -> Any:
    """MLflow's entry: the model of a registered folder, after every file of it was checked. Raises Untrusted.

    MLflow has put a folder of code of it in front of `sys.path`. It is off until the check is done, since checking
    imports, and comes back only if clinrl itself has to be imported from there.
    """
    folder = Path(path)
    within = os.path.abspath(folder)
    sys.path[:] = [entry for entry in sys.path if not Path(os.path.abspath(entry)).is_relative_to(within)]
    signed = _copies.get(folder) or _check_copy(folder, stacklevel=3)
    if PACKAGE not in sys.modules:
        _import_as_signed(folder / CODE, signed)
        sys.path.insert(0, str(folder / CODE))
    return importlib.import_module(f"{PACKAGE}.served").load(path)


def _check_copy(folder: Path, *, stacklevel: int) -> Mapping[str, str]:
    """The SHA-256 of each file of a registered folder, which are those that were signed. Raises Untrusted.

    Warns, in the name of the caller so many levels up, if only the folder itself says who signed it.
    """
    keys = trusted()
    if not keys:
        warnings.warn(
            f"{folder} is checked with the key that came with it, which does not say whose it is; set {TRUSTED} to a "
            "file with the key of whom you trust",
            stacklevel=stacklevel,
        )
    try:
        return check(folder, keys or {"its own key": _line(folder / SIGNER)}, but=(NOTED,))[1]
    except Untrusted as error:
        raise Untrusted(f"{error}; register it again, or download it again: nothing was loaded") from None


def _import_as_signed(code: Path, signed: Mapping[str, str]) -> None:
    """Let Python import from a folder of code only what was signed, now and later, and write nothing into it."""

    class Signed(SourceFileLoader):
        def get_data(self, path: str) -> bytes:
            if code not in Path(path).parents:
                raise OSError(f"{path} was not signed")  # compiled code, where PYTHONPYCACHEPREFIX names another folder
            data: bytes = super().get_data(path)
            name = f"{CODE}/{Path(path).relative_to(code).as_posix()}"
            if signed.get(name) != hashlib.sha256(data).hexdigest():
                raise OSError(f"{name} is not what was signed")  # of compiled code: Python turns to the source
            return data

        def set_data(self, path: str, data: Any, *, _mode: int = 0o666) -> None:
            return

    def finder(path: str) -> FileFinder:
        if Path(path) != code and code not in Path(path).parents:
            raise ImportError(path)
        return FileFinder(path, (Signed, SOURCE_SUFFIXES))

    sys.path_hooks.insert(0, finder)
    for known in [known for known in sys.path_importer_cache if Path(known) == code or code in Path(known).parents]:
        del sys.path_importer_cache[known]
