"""The folder of a registered model: weights, code, record and provenance, signed as a whole before it is sent."""

import os
import re
import shutil
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clinrl import paths
from clinrl.artifacts import MANIFEST, identity, read_manifest, staged, write_json, write_text
from clinrl.config.model import Model
from clinrl.data.dataset import read_cases
from clinrl.errors import ArtefactError, Refused, RegistryError, mask
from clinrl.provenance import bom
from clinrl.registry import novelty, pyfunc
from clinrl.signing.folder import check, sign
from clinrl.signing.keys import Key
from clinrl.tasks.importing import is_imported
from clinrl.tracking.mlflow_store import beside, check_host, file_of, patience, place
from clinrl.types import Manifest
from clinrl_loader import NOTED, SIGNER

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel
    from mlflow.store.artifact.artifact_repo import ArtifactRepository

    from clinrl.registry.log_run import Recorded

SEND_S, FETCH_S = 3600, 300
"""Seconds that a server may take for a file of weights. `clinrl serve` follows no rollback while it fetches one."""
PROVENANCE = "provenance"
"""Folder in a registered model with the signed provenance statements of its stages and their ancestors."""


def own_folder(client: "MlflowClient", model: "LoggedModel") -> Path | None:
    """The folder of a model in the project's own store; None on a server. Raises RegistryError if it is elsewhere."""
    if file_of(client.tracking_uri) is None:
        check_host(client.tracking_uri, model.artifact_location)
        return None
    return beside(client.tracking_uri, model.artifact_location)


def download(client: "MlflowClient", model: "LoggedModel", target: Path, file: str = "") -> Path:
    """Download the folder of a model, or only `file` of it, from a server into `target`, and return `target`."""
    with nullcontext() if file else patience(FETCH_S):
        _files(client, model).download_artifacts(file, str(target))
    return target


def _files(client: "MlflowClient", model: "LoggedModel") -> "ArtifactRepository":
    """The files of a model where its address leads: MLflow's client remembers another store's, also after a move."""
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    return get_artifact_repository(model.artifact_location, tracking_uri=client.tracking_uri)


def check_signature(folder: Path, keys: Mapping[str, Key]) -> str:
    """The name of the key that signed a registered folder. Raises Refused if a file or the record is not as signed."""
    name, _ = check(folder, keys, but=(NOTED,))
    pyfunc.read(folder)
    return name


def is_of(folder: Path, made: "Recorded") -> bool:
    """Whether a registered folder is whole, signed by a key that counts, of this model, decoding and exam, and with
    these numbers on its card. Other words on the card are no reason to replace a folder that may be served."""
    try:
        check_signature(folder, made.keys)
        examined, card = novelty.read(folder / pyfunc.EXAMINED), folder / "README.md"
        is_same = pyfunc.read(folder) == _record(made) and examined == _exam_texts(made.model)
        return is_same and _results(card.read_text(encoding="utf-8") if card.exists() else "") == _results(made.card)
    except Refused:
        return False


def decodes_otherwise(folder: Path, made: "Recorded") -> bool:
    """Whether a registered folder has a record with other modes, or with another decoding in one."""
    with suppress(Refused):
        return pyfunc.read(folder).modes != _record(made).modes
    return False


def _results(card: str) -> object:
    """The results in the front matter of a model card, as the hub reads them."""
    from huggingface_hub import ModelCard

    data: Any = ModelCard(card, ignore_metadata_errors=True).data if card else None
    return None if data is None else data.eval_results


def _record(made: "Recorded") -> pyfunc.Served:
    return pyfunc.Served(
        name=made.model.name,
        task=made.model.task.name,
        task_version=made.manifest.task_version,
        digest=made.digest,
        base_digest=identity(made.base),
        form="adapter" if made.is_adapter else "merged",
        modes={mode: pyfunc.Decoding(**report.mode_spec) for mode, report in made.reports.items()},
        default_mode="direct" if "direct" in made.reports else next(iter(made.reports)),
    )


def upload(client: "MlflowClient", model: "LoggedModel", made: "Recorded", run_id: str, *, replaces: bool) -> None:
    """Upload the folder of a model, signed as a whole: the weights, and the rest as `pyfunc.write` writes it.

    In the project's store, and on a server with `replaces`, this replaces the model's former files. Raises
    ArtefactError if a file changed meanwhile, SignatureError if signing failed, and RegistryError for an address
    that MLflow gives no model.
    """
    record = _record(made)
    parts = (
        {pyfunc.BASE: paths.base(record.task), pyfunc.ADAPTER: made.model.folder}
        if made.is_adapter
        else {pyfunc.MERGED: made.model.folder}
    )
    folder = Path(".clinrl/registry", made.model.name)  # on the disk of the weights, which then need not be copied
    shutil.rmtree(folder, ignore_errors=True)  # of a killed registration; no other process registers this name
    try:
        pyfunc.write(folder, record, _exam_texts(made.model), model_id=model.model_id, run_id=run_id)
        for part, source in parts.items():
            shutil.copytree(source, folder / part, copy_function=_link)
        key = made.signer()
        write_text(folder / SIGNER, f"{key.key.line}\n")
        if made.card:  # the README.md in the adapter's folder is part of its digest, and older than any exam
            write_text(folder / "README.md", made.card)
        if made.bill is not None:
            write_text(folder / bom.FILE, made.bill)
        for address, envelope in made.provenance:
            write_json(folder / PROVENANCE / f"{address}.json", envelope)
        sign(folder, key)
        _check_signed(folder, key.key, {part: read_manifest(folder / part) for part in parts}, made)
        if (old := own_folder(client, model)) is not None:  # files that were put there by hand must not stay
            with staged(old) as out:  # a champion keeps its former files if the disk is full
                shutil.copytree(folder, out, copy_function=shutil.copyfile, dirs_exist_ok=True)
            return
        if replaces:
            _remove(client, model)
        with patience(SEND_S):
            _files(client, model).log_artifacts(str(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove(client: "MlflowClient", model: "LoggedModel") -> None:
    """Remove the files of a model from a server. Raises RegistryError for an address that MLflow gives no model.

    Anybody who can write to the server's store could put any address there, even a folder of this machine.
    """
    is_id = re.fullmatch(r"m-[0-9a-f]{32}", model.model_id)  # the store may also name an experiment's folder as one
    if not is_id or not model.artifact_location.endswith(f"/{model.model_id}/artifacts"):
        raise RegistryError(
            f"{place(client.tracking_uri)} says that files of the model {model.model_id} lie in "
            f"{mask(model.artifact_location)}, which is not its folder: it was edited; restore it"
        )
    _files(client, model).delete_artifacts()


def _check_signed(folder: Path, key: Key, parts: Mapping[str, Manifest], made: "Recorded") -> None:
    """Refuse a folder if the signed weights are not the checked ones: files may change while they are linked."""
    checked = {identity(made.manifest), identity(made.base)}
    _, signed = check(folder, {"": key})
    for part, manifest in parts.items():
        held = {name.removeprefix(f"{part}/"): digest for name, digest in signed.items() if name.startswith(f"{part}/")}
        held.pop(MANIFEST, None)
        if identity(manifest) not in checked or held != manifest.files:
            raise ArtefactError(
                f"{made.model.folder} or its base was altered while it was registered; run `dvc checkout`, then "
                "register again: nothing was sent"
            )


def _exam_texts(model: Model) -> novelty.Examined | None:
    """The novelty record of an exam's texts, as the model sees them; None if a case is imported."""
    cases = list(read_cases(paths.cases(model.exam), model.task))
    if any(map(is_imported, cases)):
        return None
    texts = [[*novelty.strings(model.sees(case).facts.model_dump(mode="json"))] for case in cases]
    return novelty.learn(texts, [case.group for case in cases])


def _link(source: str, target: str) -> None:
    """Make a hard link to a file, or a copy if the file system has no hard links."""
    try:
        os.link(os.path.realpath(source), target)  # DVC's cache may be linked
    except OSError:
        shutil.copyfile(source, target)
