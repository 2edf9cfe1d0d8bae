"""The module that MLflow imports to load a registered model. It checks the whole folder before it imports its code.

A registered folder is signed: `model.sig` names each of its files by SHA-256 (OpenSSF Model Signing). This module reads
that signature with the standard library and `cryptography` alone. It is installed with clinrl, and every registered
folder holds a copy for users without clinrl. That copy is the one file that nothing checks before it runs. Users who
import clinrl first, or who run the stock `model_signing`, do not depend on it.

Signatures count if they were made with the keys of CLINRL_TRUSTED_KEYS (files or folders of `*.pub`, separated as in
PATH), or else with those of `.clinrl/keys` in the working directory. Without either, the key in the folder is trusted,
with a warning: that detects damage and careless changes, but not an attacker who signs the folder anew.

`load` is for users who have this module installed: it checks a copy before MLflow reads it. `mlflow.pyfunc.load_model`
alone follows the folder's `MLmodel` before this module runs, and that file may name other code to import.
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
"""The file of a registered folder that holds the signer's public key."""
NOTED = "registered_model_meta"
"""The file that MLflow writes into a folder when it loads a registered model: a name and a number, not read here."""
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
"""Most characters of a field of the envelope, and most bytes of a signature file; longer ones are refused."""
MOST_SIGNATURES = 16

_copies: dict[Path, Mapping[str, str]] = {}
"""The folders that `load` made and checked, with the SHA-256 of their files. No other user can write into them."""


class Untrusted(ValueError):
    """A signature does not hold. The message says why, in one sentence."""


def pae(kind: str, payload: bytes) -> bytes:
    """The bytes that a DSSE signature covers: the payload, with its type and both lengths in front."""
    return b"DSSEv1 %d %s %d %s" % (len(kind.encode()), kind.encode(), len(payload), payload)


@lru_cache
def public_key(line: str) -> Any:
    """The P-256 key of an OpenSSH line. Raises ValueError for any other line."""
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
    """The fingerprint of an OpenSSH line: `SHA256:...`, as `ssh-keygen -l` prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(base64.b64decode(line.split()[1])).digest()).decode().rstrip("=")


def pem(line: str) -> str:
    """The key of an OpenSSH line as SubjectPublicKeyInfo in PEM, which `openssl` and `model_signing` read."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return str(public_key(line).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode())


def verifies(line: str, data: bytes, signature: bytes) -> bool:
    """Whether a DER signature over the data was made with the key, by ECDSA with SHA-256."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
    from cryptography.hazmat.primitives.hashes import SHA256

    try:
        public_key(line).verify(signature, data, ECDSA(SHA256()))
    except InvalidSignature:
        return False
    return True


def opened(envelope: Any, keys: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """The name of the key that signed an in-toto statement in a DSSE envelope, and the statement.

    `keys` are OpenSSH lines by name. The payload is not parsed before a signature with one of these keys was found.
    Raises Untrusted if there is no such signature, or if the envelope or the statement is malformed.
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
    """The name of the key that made one of the signatures. A signature with a key id counts for that key alone.

    Raises Untrusted if there is no such key.
    """
    for signature in signatures:
        if not isinstance(signature, dict) or not {"sig"} <= signature.keys() <= {"sig", "keyid"}:
            raise Untrusted("a signature of this envelope is malformed; it needs sig, and may have keyid")
        made = _decode(signature["sig"])
        for name, line in keys.items():
            if signature.get("keyid") in (None, "", fingerprint(line)) and verifies(line, data, made):
                return name
    raise Untrusted(
        "nobody whose key counts here signed this; `clinrl keys show` lists the keys and what each counts for"
    )


def _decode(text: Any) -> bytes:
    """Bytes from Base64 in its one canonical spelling. Raises Untrusted for any other text."""
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
    """The name of the key that signed a folder, and the SHA-256 of each of its files.

    `but` names unsigned files that may lie at the folder's top. Raises Untrusted naming a file that was altered, is
    missing or was added; if there is no signature; and if no listed key made it.
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
    """Path to SHA-256 of every file of a folder, except its signature and the files in `but`.

    Raises Untrusted for a link, or any other entry that is no regular file: its content may change unnoticed. Raises it
    as `shallow` does too.
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
    walk(shallow(folder), "")
    return found


def shallow(folder: Path) -> Path:
    """The folder itself. Raises Untrusted for more than 32 levels: Python cannot walk, copy or remove a thousand."""
    if any(len(Path(at).parts) - len(folder.parts) > 32 for at, _, _ in os.walk(folder)):
        raise Untrusted(f"{folder} holds more than 32 levels of folders; a signed folder has fewer")
    return folder


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _read_signature(path: Path, keys: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """The name of the key that made a folder's signature, and the digests of the files that it covers.

    Raises Untrusted.
    """
    try:
        if not stat.S_ISREG(path.lstat().st_mode) or path.stat().st_size > LARGEST:
            raise Untrusted("it is a link, no file, or too large for a signature")
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
    """The OpenSSH lines of the keys whose signatures count, by name; empty if no place for keys is set or exists.

    Raises Untrusted for a file that is no key, for a key or a folder of keys that others can write into, if
    CLINRL_TRUSTED_KEYS names a path that does not exist, and if CLINRL_TRUSTED_KEYS is set, or `.clinrl/keys` exists,
    without any key.
    """
    named = os.environ.get(TRUSTED, "")
    if named:
        places = [Path(part) for part in named.split(os.pathsep) if part]
        for place in places:
            if not place.exists():
                raise Untrusted(f"{TRUSTED} names {place}, which is not there")
    else:
        places = [place for place in (KEYS / "trusted", KEYS / "signing.pub") if os.path.exists(place)]
    files = [file for place in places for file in (sorted(place.glob("*.pub")) if place.is_dir() else [place])]
    for place in filter(Path.exists, dict.fromkeys([*(places if named else (KEYS, *places)), *files])):
        if place.stat().st_mode & 0o022:
            raise Untrusted(f"others may write into {place}, so no key in it counts; run `chmod go-w {place}`")
        if not named and place.stat().st_uid not in (os.geteuid(), 0):
            raise Untrusted(f"{place} is somebody else's, so no key in it counts; name your keys in {TRUSTED}")
    for place in {file.parent for file in files if named}:  # of a sticky folder nobody else replaces a file
        if place.stat().st_mode & 0o022 and not place.stat().st_mode & stat.S_ISVTX:
            raise Untrusted(
                f"others may replace a key in {place}, so none in it counts; keep it in a folder of your own"
            )
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
    """Load a registered model as `mlflow.pyfunc.load_model` does, from a copy that is checked before MLflow reads it.

    The model is copied into a folder that only this user can enter, and that exists until the process ends. The checked
    files are the loaded files, whatever happens to the store meanwhile. Every file of the copy must be as it was
    signed, including `MLmodel`, which names the code that MLflow imports.

    A signature proves that a model was registered here. It does not prove that the model is the champion: anyone who
    can write to the registry can give the name to another signed model, such as an older one. `digest` says which model
    to load: pass the value that `clinrl lookup MODEL champion --json` prints under "digest", kept outside the registry.
    Without `digest` any signed model is loaded.

    Raises Untrusted if a file is not as it was signed, if no key that counts signed the model, or if the model has
    another digest than `digest`; no code of the model has run then. Errors of MLflow's download are passed on.
    """
    import shutil
    from tempfile import mkdtemp

    from mlflow import artifacts, get_registry_uri, pyfunc
    from mlflow.store.artifact.models_artifact_repo import ModelsArtifactRepository as Models

    place = mkdtemp(prefix="clinrl-")
    try:
        if get_registry_uri().startswith("sqlite:"):  # MLflow names the folder itself, and would copy it slowly
            copy, at, names = Path(place) / "model", uri, set[str]()
            while Models.is_models_uri(at):  # by such a name MLflow writes a note into the store, even through a link
                if at in names:
                    raise Untrusted(f"{uri} is a name of itself in the registry, and leads to no model")
                names.add(at)
                at = Models.get_underlying_uri(at)
            shutil.copytree(shallow(Path(artifacts.download_artifacts(artifact_uri=at))), copy, symlinks=True)
        else:
            copy = Path(artifacts.download_artifacts(artifact_uri=uri, dst_path=place))
        try:
            signed = _check_copy(copy)
            if digest and (found := _digest(copy)) != digest:
                raise Untrusted(f"it is the model {found!r} and not {digest!r}; nothing was loaded")
        except Untrusted as error:
            raise Untrusted(f"{uri}, of which {copy} was a copy: {error}") from None
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
    maker = os.getpid()

    def sweep() -> None:
        if os.getpid() == maker:  # a fork must leave the folder to this process
            shutil.rmtree(place, ignore_errors=True)

    atexit.register(sweep)
    _copies[copy] = signed
    return pyfunc.load_model(str(copy))


def _digest(folder: Path) -> str:
    """The registry's digest of the model in a checked folder. Raises Untrusted if the folder names none."""
    try:
        return str(json.loads((folder / RECORD).read_bytes())["digest"])
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        raise Untrusted(f"{folder / RECORD} names no digest; nothing was loaded") from None


def _load_pyfunc(path: str) -> Any:
    """MLflow's entry point: load the model of a registered folder after a check of every file. Raises Untrusted.

    MLflow has put the folder's code in front of `sys.path`. It is removed for the check, which imports modules, and put
    back only if clinrl itself has to be imported from there.
    """
    folder = Path(path)
    within = os.path.abspath(folder)
    sys.path[:] = [entry for entry in sys.path if not Path(os.path.abspath(entry)).is_relative_to(within)]
    signed = _copies.get(folder) or _check_copy(folder)
    if PACKAGE not in sys.modules:
        _import_as_signed(folder / CODE, signed)
        sys.path.insert(0, str(folder / CODE))
    return importlib.import_module(f"{PACKAGE}.served").load(path)


def _check_copy(folder: Path) -> Mapping[str, str]:
    """Check a registered folder, and return the SHA-256 of each of its files. Raises Untrusted.

    Warns, as the caller of its caller, if the only key is the one that came with the folder.
    """
    keys = trusted()
    if not keys:
        warnings.warn(
            f"{folder} is checked with the key that came with it, which does not say whose it is; set {TRUSTED} to a "
            "file with the key of whom you trust",
            stacklevel=3,
        )
    try:
        return check(folder, keys or {"its own key": _line(folder / SIGNER)}, but=(NOTED,))[1]
    except Untrusted as error:
        raise Untrusted(f"{error}; register it again, or download it again: nothing was loaded") from None


def _import_as_signed(code: Path, signed: Mapping[str, str]) -> None:
    """Make Python import only signed files from a folder of code, now and later, and write nothing into the folder."""

    class Signed(SourceFileLoader):
        def get_data(self, path: str) -> bytes:
            if code not in Path(path).parents:
                raise OSError(f"{path} was not signed")  # compiled code, where PYTHONPYCACHEPREFIX names another folder
            data: bytes = super().get_data(path)
            name = f"{CODE}/{Path(path).relative_to(code).as_posix()}"
            if signed.get(name) != hashlib.sha256(data).hexdigest():
                raise OSError(f"{name} is not what was signed")  # for compiled code, Python then reads the source
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
