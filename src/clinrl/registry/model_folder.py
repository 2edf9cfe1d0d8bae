"""The folder of a registered model: weights, code, record and provenance, signed as a whole before it is sent."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from clinrl import paths
from clinrl.artifacts import MANIFEST, identity, read_manifest, write_json, write_text
from clinrl.config.model import Model
from clinrl.data.dataset import read_cases
from clinrl.errors import ArtefactError, RegistryError, mask
from clinrl.provenance import bom
from clinrl.registry import novelty, pyfunc
from clinrl.signing.folder import check, sign, signed_files
from clinrl.signing.keys import Key
from clinrl.tasks.importing import is_imported
from clinrl.tracking.mlflow_store import beside, file_of, place
from clinrl.types import Manifest
from clinrl_loader import NOTED, SIGNER

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel

    from clinrl.registry.log_run import Recorded

PROVENANCE = "provenance"
"""Folder of a registered model: what each stage that it follows from made of what, signed by who ran it."""


def own_folder(client: "MlflowClient", model: "LoggedModel") -> Path | None:
    """The folder of a model in the project's own store; None on a server. Raises RegistryError if it is elsewhere."""
    if file_of(client.tracking_uri) is None:
        return None
    return beside(client.tracking_uri, model.artifact_location)


def download(client: "MlflowClient", model: "LoggedModel", target: Path, file: str = "") -> Path:
    """The folder of a model, brought from a server into a folder; of its files `file` alone, if that names one."""
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    artifacts = get_artifact_repository(model.artifact_location, tracking_uri=client.tracking_uri)
    artifacts.download_artifacts(file, str(target))
    return target


def check_signature(folder: Path, keys: Mapping[str, Key]) -> str:
    """Who signed a registered folder, every file of which is as it was then. Raises Refused naming what is not."""
    name = check(folder, keys, but=(NOTED,))
    pyfunc.read(folder)
    return name


def upload(client: "MlflowClient", model: "LoggedModel", made: "Recorded", run_id: str) -> None:
    """Send the folder that is registered, signed as a whole: the weights, and the rest as `served` writes it.

    What was there is replaced. Raises ArtefactError if a file changed meanwhile, SignatureError if nothing could be
    signed, and RegistryError for an address that is no model's.
    """
    record = pyfunc.Served(
        name=made.model.name,
        task=made.model.task.name,
        task_version=made.manifest.task_version,
        digest=made.digest,
        base_digest=identity(made.base),
        form="adapter" if made.is_adapter else "merged",
        modes={mode: pyfunc.Decoding(**report.mode_spec) for mode, report in made.reports.items()},
        default_mode="direct" if "direct" in made.reports else next(iter(made.reports)),
    )
    parts = (
        {pyfunc.BASE: paths.base(record.task), pyfunc.ADAPTER: made.model.folder}
        if made.is_adapter
        else {pyfunc.MERGED: made.model.folder}
    )
    folder = Path(".clinrl/registry", made.model.name)  # on the disk of the weights, which then need not be copied
    shutil.rmtree(folder, ignore_errors=True)  # of a registration that was killed; no other process has this name
    try:
        pyfunc.write(folder, record, _exam_texts(made.model), model_id=model.model_id, run_id=run_id)
        for part, source in parts.items():
            shutil.copytree(source, folder / part, copy_function=_link)
        key = made.signer()
        write_text(folder / SIGNER, f"{key.key.line}\n")
        if made.card:  # that of the adapter's own folder is part of its digest, and was written before any exam
            write_text(folder / "README.md", made.card)
        if made.bill is not None:
            write_text(folder / bom.FILE, made.bill)
        for address, envelope in made.provenance:
            write_json(folder / PROVENANCE / f"{address}.json", envelope)
        sign(folder, key)
        _check_signed(folder, key.key, {part: read_manifest(folder / part) for part in parts}, made)
        if (old := own_folder(client, model)) is not None:  # what was put there by hand must not stay beside
            shutil.rmtree(old, ignore_errors=True)
        elif model.status == "READY":  # before that, another machine may be sending the same
            _remove(client, model)
        client.log_model_artifacts(model.model_id, str(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove(client: "MlflowClient", model: "LoggedModel") -> None:
    """Remove the files of a model from a server. Raises RegistryError for an address that MLflow gives no model.

    Whoever can write to the server's store can put any there, a folder of this machine too.
    """
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    if not model.artifact_location.endswith(f"/{model.model_id}/artifacts"):
        raise RegistryError(
            f"{place(client.tracking_uri)} says that files of the model {model.model_id} lie in "
            f"{mask(model.artifact_location)}, which is not its folder: it was edited; restore it"
        )
    get_artifact_repository(model.artifact_location, tracking_uri=client.tracking_uri).delete_artifacts()


def _check_signed(folder: Path, key: Key, parts: Mapping[str, Manifest], made: "Recorded") -> None:
    """Refuse a folder in which other weights were signed than were checked: files may change while they are linked."""
    checked = {identity(made.manifest), identity(made.base)}
    signed = signed_files(folder, key)
    for part, manifest in parts.items():
        held = {name.removeprefix(f"{part}/"): digest for name, digest in signed.items() if name.startswith(f"{part}/")}
        held.pop(MANIFEST, None)
        if identity(manifest) not in checked or held != manifest.files:
            raise ArtefactError(
                f"{made.model.folder} or its base was altered while it was registered; run `dvc checkout`, then "
                "register again: nothing was sent"
            )


def _exam_texts(model: Model) -> novelty.Examined | None:
    """What is kept of the texts of an exam, as the model sees them; nothing of imported ones."""
    cases = list(read_cases(paths.cases(model.exam), model.task))
    if any(map(is_imported, cases)):
        return None
    texts = [[*novelty.strings(model.sees(case).facts.model_dump(mode="json"))] for case in cases]
    return novelty.learn(texts, [case.group for case in cases])


def _link(source: str, target: str) -> None:
    """A second name of a file, or a copy of it where the file system has no such thing."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
