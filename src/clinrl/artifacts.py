"""Artefacts on disk: canonical JSON, digests, and outputs that appear whole or not at all.

A stage writes into a private directory next to its target; only a finished directory takes the target's name. A
killed stage therefore leaves nothing where the next stage would look.
"""

import errno
import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.util import register_after_fork
from pathlib import Path
from typing import Any, TextIO, TypeVar

from pydantic import BaseModel, ValidationError

from clinrl import paths
from clinrl.errors import ArtefactError, Busy, ParamsError, Refused, disk_is_full, file_of, number_of
from clinrl.types import Manifest

MANIFEST = "manifest.json"
PUBLISHED = "published"
"""The file that marks a finished training whose adapter was published, and perhaps not recorded by DVC."""
MADE = ".made-by-clinrl"
"""The file that marks a folder as made by a command, which may replace it."""
PICKLES = (".bin", ".ckpt", ".joblib", ".pickle", ".pkl", ".pt", ".pth")
"""Kinds of files that can run code when they are loaded."""
AGAIN = "rebuild it; if a checkout brings the same file back, run `chmod -R u+w .dvc/cache` and `dvc repro`"
"""How to mend an altered output. DVC never checks read-only objects of its cache, not even altered ones; it checks
writable objects again."""


Record = TypeVar("Record", bound=BaseModel)

_STAGE, _PART = re.compile(r"  (\S+):\n"), re.compile(r"    (\w+):.*\n")


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: the text that is hashed. NaN is refused (ValueError)."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(value: Any) -> str:
    """SHA-256 of the canonical JSON of a value, in hexadecimal."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal, read in blocks."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def md5(path: Path) -> str:
    """DVC's digest of a path: the MD5 of a file's bytes, or the MD5 of a folder's list of files with `.dir` appended.

    Raises OSError if the path cannot be read.
    """
    if not path.is_dir():
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    files = sorted((file.relative_to(path).as_posix(), file) for file in files_of(path))
    listing = [{"md5": md5(file), "relpath": name} for name, file in files]
    return hashlib.md5(json.dumps(listing, sort_keys=True).encode(), usedforsecurity=False).hexdigest() + ".dir"


def whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file to which lines are appended, without incomplete lines.

    A line is incomplete while it is being written, or if a kill or a full disk cut it short. A missing file has none.
    """
    with suppress(FileNotFoundError), path.open("rb") as stream:
        for line in stream:
            with suppress(ValueError):
                if isinstance(found := json.loads(line), dict):
                    yield found


def files_of(path: Path) -> list[Path]:
    """The files in a folder and its subfolders, sorted; the file itself for a file; none for a missing path."""
    return [file for file in ([path] if path.is_file() else sorted(path.rglob("*"))) if file.is_file()]


def digests(folder: Path, without: str = "") -> dict[str, str]:
    """SHA-256 of each file in a folder, by relative path; files named `without` are left out."""
    return {str(file.relative_to(folder)): sha256_file(file) for file in files_of(folder) if file.name != without}


def write_json(path: Path, value: Any) -> None:
    """Write readable, sorted, newline-terminated JSON atomically: a reader sees the old file or the new one."""
    write_text(path, json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def dump_yaml(content: Mapping[str, Any]) -> str:
    """A mapping as YAML text, each key on a line of its own."""
    from ruamel.yaml import YAML

    writer, text = YAML(typ="safe", pure=True), io.StringIO()
    writer.default_flow_style, writer.width = False, 1 << 16  # in flow style some unquoted words cannot be read back
    writer.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # ruamel.yaml declares it as None
    writer.dump(content, text)
    return text.getvalue()


def write_text(path: Path, text: str, mode: int = 0o666) -> None:
    """Replace a file's text atomically, creating its folder. The bytes are on disk before the file has its name.

    The file is created with `mode`, less the umask, so that a private file is private from the start.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    partial.unlink(missing_ok=True)  # of a killed process with the same id
    try:
        with (
            naming(path, partial),
            open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as stream,
        ):
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def naming(path: Path, partial: Path | None = None) -> Iterator[None]:
    """Name the path in the error of a full disk: writing names no file, and libraries raise errors of their own.

    `partial` is what the path is called while it is written.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, Refused) or not disk_is_full(error, path.parent):
            raise
        file = (file_of(error) or str(path)).replace(str(partial or path), str(path))
        number = number_of(error) or errno.ENOSPC
        raise OSError(number, os.strerror(number), file) from error


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A private directory that becomes `target` when the block ends without an exception; otherwise it is removed.

    The old `target` is renamed first and deleted last, so that a kill cannot leave half of it under that name.
    Leftovers of killed runs (same target, dead process, or one with this process id, as in containers) are removed on
    entry.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for kind in ("partial", "former"):
        for leftover in target.parent.glob(f".{target.name}.{kind}-*"):
            process = leftover.name.rsplit("-", 1)[1]
            if process.isdecimal() and not _another_lives(int(process)):  # a person's folder may have such a name too
                if kind == "former" and not target.exists():  # the kill came between the two renames
                    os.replace(leftover, target)
                _remove(leftover)
    partial, former = (target.with_name(f".{target.name}.{kind}-{os.getpid()}") for kind in ("partial", "former"))
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        with naming(target, partial):
            yield partial
        if target.exists():
            os.replace(target, former)
        os.replace(partial, target)
    finally:
        if former.exists() and not target.exists():
            os.replace(former, target)
        _remove(partial)
        _remove(former)


def _remove(folder: Path) -> None:
    """Remove a folder under a name that is never brought back: a kill may leave half of it."""
    doomed = folder.with_name(folder.name.replace(".former-", ".partial-"))
    if folder.exists() and folder != doomed:
        shutil.rmtree(doomed, ignore_errors=True)
        os.replace(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


@contextmanager
def replaced(target: Path, command: str) -> Iterator[Path]:
    """`staged` for a folder that a person named: replaces only a folder that the same command made.

    Raises ParamsError if the folder holds anything else, or a file that was changed since, and Busy while another
    process replaces it.
    """
    _check_made(target, command)
    with exclusive(target.absolute()), staged(target) as folder:
        yield folder
        write_json(folder / MADE, {"command": command, "files": digests(folder, without=MADE)})
        _check_made(target, command)  # the block may have taken minutes


def _check_made(target: Path, command: str) -> None:
    if target.is_symlink() or (target.exists() and not _is_as_made(target, command)):
        raise ParamsError(
            f"{target} was not made by `{command}`, or was changed since, and would be replaced; name another folder "
            "with --out, or remove it"
        )


def _is_as_made(target: Path, command: str) -> bool:
    """Whether a folder is empty, or holds exactly the files that the command wrote."""
    try:
        made = json.loads((target / MADE).read_bytes())
        return bool(made == {"command": command, "files": digests(target, without=MADE)})
    except (OSError, ValueError):
        return target.is_dir() and not any(target.iterdir())


@contextmanager
def exclusive(target: Path, folder: Path | None = None, *, waits: bool = False) -> Iterator[None]:
    """Hold the right to write `target` until the block ends, or raise Busy at once if another process holds it.
    With `waits`, wait for that process instead.

    The lock file lies in `folder`, by default with the other locks of this checkout. The kernel releases the lock when
    the process ends, so a killed run blocks nobody.
    """
    with locked((folder or paths.LOCKS) / (str(target).replace("/", "-") + ".lock"), waits=waits) as stream:
        if stream is None:
            raise Busy(f"another command is writing {target}; wait for it to end and start this one again")
        yield


@contextmanager
def locked(file: Path, *, waits: bool = True) -> Iterator[TextIO | None]:
    """Hold a file's lock until the block ends. Without `waits`, yield None at once if another process holds the lock.

    The kernel releases the lock when the process ends, so a killed process blocks nobody.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as stream:
        register_after_fork(stream, io.TextIOWrapper.close)  # a fork that outlives this process would go on to hold it
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            yield None
        else:
            yield stream


def may_write(file: Path) -> bool:
    """Whether this user may write to an SQLite file: it needs its folder too, for the journal."""
    return os.access(file, os.W_OK) and os.access(file.parent, os.W_OK)


def _another_lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it lives, and is somebody else's
        pass
    return pid != os.getpid()


def seal(folder: Path, **fields: Any) -> Manifest:
    """Write the manifest of a finished folder: the given fields plus the digest of every file in it."""
    manifest = Manifest(files=digests(folder, without=MANIFEST), **fields)
    write_json(folder / MANIFEST, manifest.model_dump(mode="json"))
    return manifest


def read_record(path: Path, record: type[Record], missing: Callable[[], str], broken: Callable[[str], str]) -> Record:
    """The record in a JSON file. Raises ArtefactError for a missing file and for one without such a record.

    `missing` and `broken` give the message, `broken` from the first fault that pydantic finds.
    """
    try:
        if path.is_fifo():  # it would be waited for
            raise ArtefactError(f"{path} is a pipe; see who put it there")
        return record.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise ArtefactError(missing()) from None
    except ValidationError as error:
        raise ArtefactError(broken(error.errors()[0]["msg"])) from None


def read_manifest(folder: Path) -> Manifest:
    """The manifest of an artefact folder, whose files are not read. Raises ArtefactError if absent or malformed."""

    def missing() -> str:
        name, stage = folder.name, _maker(folder)
        if folder.parent.name == "bases" and not stage:
            stage = f"base@{name}"
        if folder.parent.name == "cases" and not stage:
            stage = f"dataset@{name}`, or `dvc repro import@{name}` if it is under `imports"
        makes = f"`dvc repro {stage}`, which makes it" if stage else "`clinrl plan`, which says what is missing"
        return f"{folder} has no {MANIFEST}; run {makes}"

    path = folder / MANIFEST
    return read_record(path, Manifest, missing, lambda why: f"{path} is not a manifest: {why}; rebuild it")


def remake(path: Path, stage: str) -> str:
    """The advice to make a path anew: by the stage that made it, or by `stage` if dvc.lock has none."""
    return f"run `dvc repro {_maker(path) or stage}`"


def _maker(folder: Path) -> str:
    """The stage that made a folder by dvc.lock, in the layout that DVC writes; empty if dvc.lock names none."""
    stage = part = ""
    with suppress(OSError), Path("dvc.lock").open(encoding="utf-8") as lines:
        for line in lines:
            if found := _STAGE.fullmatch(line):
                stage = found[1]
            elif found := _PART.fullmatch(line):
                part = found[1]
            elif part == "outs" and line == f"    - path: {folder}\n":
                return stage
    return ""


def verified(folder: Path) -> Manifest:
    """The manifest of a folder whose files all have the digests it names. Raises ArtefactError naming the bad file."""
    manifest = read_manifest(folder)
    for name, expected in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise ArtefactError(f"{path} is missing; restore the folder with `dvc checkout` or rebuild it")
        if sha256_file(path) != expected:
            raise ArtefactError(f"{path} was altered after it was built; restore it with `dvc checkout` or {AGAIN}")
    return manifest


def remove_published(version: str, but: Path | None = None) -> None:
    """Remove the finished trainings of a version that were kept for a DVC that might not record them, `but` for one."""
    folders, own = Path(".clinrl/checkpoints"), f"{version}-{'[0-9a-f]' * 16}"
    for mark in [*folders.glob(f"{own}/{PUBLISHED}")]:
        if mark.parent != but:  # it goes at once, or half of it would pass for the whole
            mark.parent.rename(tempfile.mkdtemp(prefix=f"{mark.parent.name}.old-", dir=folders))
    for gone in folders.glob(f"{own}.old-*"):
        shutil.rmtree(gone)


def identity(manifest: Manifest) -> str:
    """The digest by which other artefacts refer to this one."""
    return digest(manifest.model_dump(mode="json"))


def identity_of(folder: Path) -> str:
    """The identity of a folder by its manifest, whose files are not read. Raises as `read_manifest`."""
    return identity(read_manifest(folder))
