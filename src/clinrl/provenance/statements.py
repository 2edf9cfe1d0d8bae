"""Provenance: the inputs, parameters and outputs of a stage, in a statement signed on the machine that ran it.

Every finished stage of dvc.yaml leaves an in-toto statement with SLSA's predicate in .clinrl/provenance. The stage
itself writes it before DVC writes dvc.lock, so the statement hashes the files on the disk; dvc.lock must then have the
same digests. It holds no times and no hosts: the same stage on the same inputs gives the same statement.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from clinrl.artifacts import MANIFEST, files_of, md5, sha256_file, write_json
from clinrl.config.base import Scale
from clinrl.config.recipes import HANDLING
from clinrl.errors import ArtefactError, Refused, SignatureError, echo
from clinrl.provenance import dvc_yaml
from clinrl.provenance.dvc_yaml import ABSENT, Stage
from clinrl.provenance.stages import addresses
from clinrl.signing import dsse
from clinrl.signing.keys import keyring, signer

FOLDER = Path(".clinrl/provenance")
PREDICATE = "https://slsa.dev/provenance/v1"
BUILD = "https://clinrl.dev/stage/v1"
BUILDER = "clinrl"


def record(
    command: str, name: str, scale: Scale, source: Path = Path("params.yaml"), begun: Stage | None = None
) -> None:
    """Sign a statement of what `clinrl COMMAND NAME` has just made. An equal statement by a trusted key stays.

    `begun` is the stage as it was found before it ran: with other parameters now, nothing is signed, since nobody can
    tell which ones made the outputs. DVC records those of the end.

    Nothing is written if dvc.yaml has no such stage. If the statement cannot be signed or written, a line says so, and
    the command still succeeds: the artefact is whole, and DVC would delete what a failed command made, perhaps after
    hours. The missing provenance shows up when a command needs it.
    """
    try:
        stage = find(command, name, source)
        if stage is None:
            return
        if begun is not None and _ruling(begun.params) != _ruling(stage.params):
            raise ArtefactError(
                "its parameters were changed while it ran; "
                f"`dvc repro --single-item --force {stage.address}` makes it anew"
            )
        claim, path = statement(stage), FOLDER / f"{stage.address}.json"
        try:
            former = dsse.open_envelope(json.loads(path.read_bytes()), keyring())[1]
        except (OSError, ValueError, RecursionError, Refused):  # there is none, or its key is not trusted
            former = {}
        if former != claim:
            write_json(path, dsse.envelope(claim, signer(scale)))
    except (Refused, OSError) as error:
        echo(f"{command} {name} is done, but its provenance is not signed: {error}")


def _ruling(params: Any) -> Any:
    """Parameters without those that only say how a training is handled."""
    if isinstance(params, dict):
        return {key: _ruling(value) for key, value in params.items() if key not in HANDLING}
    return params


def of_stages(addresses: Iterable[str]) -> list[tuple[str, dict[str, Any]]]:
    """The signed statements about stages, each with its address, in the given order.

    A stage has none if it did not run here, or if its files differ from those here now. Raises SignatureError naming a
    statement that was altered, or that no trusted key signed.
    """
    ring, found = keyring(), []
    for address in addresses:
        path = FOLDER / f"{address}.json"
        if not path.exists():
            continue
        try:
            envelope = json.loads(path.read_bytes())
            _, claim = dsse.open_envelope(envelope, ring)
            stage = claim["predicate"]["buildDefinition"]["externalParameters"]["stage"]
            subjects = {subject["name"]: subject["digest"].get("sha256") for subject in claim["subject"]}
        except (SignatureError, *dsse.MALFORMED) as error:
            why = str(error) if isinstance(error, SignatureError) else "it is no provenance"
            raise SignatureError(f"{path}: {why}; remove it, and the next run of {address} writes it again") from None
        if (claim["predicateType"], stage) != (PREDICATE, address):
            raise SignatureError(f"{path} is not about {address}; remove it")
        files = {name: digest for name, digest in subjects.items() if digest}
        if all(Path(name).is_file() and sha256_file(Path(name)) == digest for name, digest in files.items()):
            found.append((address, envelope))
    return found


def statement(stage: Stage) -> dict[str, Any]:
    """The statement about a stage that has just run. Raises ArtefactError if an input or an output is missing."""
    for path in (*stage.deps, *stage.outs):
        if not Path(path).exists():
            raise ArtefactError(f"{path}, which dvc.yaml names, is not there")
    values = {key: value for file in stage.params.values() for key, value in file.items()}
    if absent := [key for key, value in values.items() if value is ABSENT]:
        raise ArtefactError(f"{dvc_yaml.PIPELINE} names {absent[0]}, which params.yaml does not have")
    params = json.loads(json.dumps(values, default=str))  # keys that are numbers in YAML are text in JSON
    subjects = {name: digests for path in stage.outs for name, digests in _subjects(Path(path))}
    used = [{"name": name, "digest": digests} for path in stage.deps for name, digests in _inputs(Path(path))]
    build = {
        "buildType": BUILD,
        "externalParameters": {"stage": stage.address, "command": stage.command, "params": params},
        "resolvedDependencies": used,
    }
    return dsse.statement(PREDICATE, subjects, {"buildDefinition": build, "runDetails": {"builder": {"id": BUILDER}}})


def find(command: str, name: str, source: Path = Path("params.yaml")) -> Stage | None:
    """The stage of dvc.yaml that runs `clinrl COMMAND NAME`; None if there is none.

    This reads dvc.yaml itself, since DVC takes as long as some stages do; a test compares the result with dvc.lock.
    Raises ArtefactError if dvc.yaml cannot be read, or names a key that params.yaml does not have.
    """
    if not dvc_yaml.PIPELINE.exists():
        return None
    stages = dvc_yaml.read(source)
    return next((stages[address] for address in addresses(command, name) if address in stages), None)


def _subjects(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """An output with the digest that dvc.lock will record, and each of its files."""
    whole = {"dvcMd5": md5(path)}
    if path.is_dir():
        yield path.as_posix(), whole
        whole = {}
    yield from ((file.as_posix(), whole | {"sha256": sha256_file(file)}) for file in files_of(path))


def _inputs(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """The files of an input: the file itself, a folder's manifest, which names all its files, or else each file."""
    for file in [path / MANIFEST] if (path / MANIFEST).exists() else files_of(path):
        yield file.as_posix(), {"sha256": sha256_file(file)}
