"""Write a version to MLflow from its files: its run (recipe, exam, history, reports) and its model.

Existing entries stay and missing ones are added, so that the same call completes what a kill left half done.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from clinrl import artifacts, paths
from clinrl.analysis.alerts import stored as raised_in
from clinrl.analysis.exam import EvalReport
from clinrl.artifacts import MANIFEST, canonical_json, digest, files_of, identity, read_manifest, sha256_file, verified
from clinrl.config.model import Model
from clinrl.config.params import Params
from clinrl.config.recipes import SftProfile
from clinrl.data.dataset import is_import
from clinrl.errors import ArtefactError, RegistryError, echo
from clinrl.evaluation import recount
from clinrl.evaluation.answers import ALARMS, BETWEEN_MODES, HISTORY
from clinrl.provenance import bom, lock, pins
from clinrl.provenance import statements as provenance
from clinrl.provenance.stages import addresses_of
from clinrl.registry.model_folder import decodes_otherwise, download, is_of, own_folder, upload
from clinrl.reports import model_card
from clinrl.reports.figures import read_history
from clinrl.signing.keys import Key, Signer, signer, trusted_keys
from clinrl.tracking import mlflow_store
from clinrl.tracking.mlflow_store import NOTE, Point, belongs_in, log_points
from clinrl.types import Estimate, Manifest

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel, Run


SENT = "clinrl.sent"
"""Run tag: digest of each group of files that the run holds."""
DIGEST = "digest"
"""Version tag: identity of the adapter, or of the full model."""
DATASET_DIGEST = 36
"""Characters of a data set's digest that MLflow has room for."""
BELOW = "Intervals and all other metrics are in the run below this one, reports and plots among the artefacts."


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A version or a merge with its exam: everything that is registered about it."""

    model: Model
    manifest: Manifest
    base: Manifest
    reports: Mapping[str, EvalReport]
    """By mode."""
    metrics: Mapping[str, float]
    """Every number of the exam, by its name in MLflow."""
    card: str
    """The model card with the results of the exam; empty if the model has no card."""
    why: str
    training: tuple[model_card.Trained, ...]
    """The training data of each version in its lineage."""
    tags: Mapping[str, str]
    """Version tags about how it was made, without empty ones. `waiver` is the reason for training despite the probe or
    an alert, `placebo` the reward in place of the task's score, and `alarms` lists the alerts of the training."""
    provenance: list[tuple[str, dict[str, Any]]]
    """The signed statements of its stages and their ancestors, as far as they ran here, each with its address."""
    bill: str | None
    """The bill of materials; None if no constraints.txt pins the libraries."""
    keys: Mapping[str, Key]
    """The trusted keys, by name."""
    signer: Callable[[], Signer]
    """Returns the signing key, which is not loaded before there is something to sign."""

    @property
    def digest(self) -> str:
        return identity(self.manifest)

    @property
    def is_adapter(self) -> bool:
        return "adapter_config.json" in self.manifest.files

    @property
    def headline(self) -> frozenset[str]:
        """The metrics that its run shows first: the reward and the task's row metrics, in each mode."""
        named = ("reward", *self.model.task.reporting.row_metrics)
        return mlflow_store.SHOWN | {f"{mode}/{name}" for mode in self.reports for name in named}


def collect(params: Params, model: Model) -> Recorded:
    """Collect everything that is registered about a name, each part checked against dvc.lock and the other parts.

    Raises ArtefactError naming a part that was altered or that dvc.lock does not record, or a number of a report that
    does not follow from its answers.
    """
    lock.demand(params, model.name)
    manifest, base = _checked_manifest(model.folder), _checked_manifest(paths.base(model.task.name))
    if manifest.inputs.get("base") != identity(base):
        raise ArtefactError(f"{model.folder} was made from another base than {paths.base(model.task.name)} now holds")
    reports = recount.reports(params, model.name)
    for report in reports.values():
        if report.adapter_digest != identity(manifest):
            raise ArtefactError(
                f"{paths.report(model.name)} is about another model than {model.folder} now holds; run "
                f"`dvc repro {model.stage}`"
            )
    between = json.loads((paths.report(model.name) / BETWEEN_MODES).read_text(encoding="utf-8"))
    agreement = Estimate(**between["mode_agreement"]) if between else None
    stages, written = addresses_of(params, model.name), model.folder / "README.md"
    training, card = tuple(_training(params, model.name)), ""
    tags = {
        "dvc_stage": stages.get("train") or stages["merge"],
        "scale": manifest.spec.get("scale", params.scale),
        "waiver": stated(params, model.name, "waiver"),
        "placebo": stated(params, model.name, "placebo"),
        "alarms": _alarms(model.name),
    }
    if written.exists():
        card = model_card.with_results(
            written.read_text(encoding="utf-8"),
            list(reports.values()),
            {"mode_agreement": agreement} if agreement else {},
            training=training,
            missing=_missing(params, model.name),
            licence=bom.licence_of(paths.base(model.task.name)),
            waiver=tags["waiver"],
            alarms=tags["alarms"],
        )
    return Recorded(
        model=model,
        manifest=manifest,
        base=base,
        reports=reports,
        metrics=mlflow_store.exam_metrics(reports.values(), agreement),
        card=card,
        why=params.versions[model.name].why if model.name in params.versions else "",
        training=training,
        tags={tag: value for tag, value in tags.items() if value},
        signer=partial(signer, params.scale),
        provenance=provenance.of_stages(lock.ancestors(lock.read(), stages["evaluate"])),
        bill=bom.text(bom.of_version(params, model.name)) if (pins.ROOT / pins.MAIN).exists() else None,
        keys=trusted_keys(params),
    )


def _training(params: Params, name: str) -> Iterator[model_card.Trained]:
    for version in params.family(name):
        spec, folder = params.versions[version], paths.adapter(version)
        used = read_manifest(folder).spec.get("data", spec.data) if folder.exists() else spec.data
        if used != spec.data:
            raise ArtefactError(
                f"{version} was trained on {used} and params.yaml says {spec.data}; put it back, or run `dvc repro "
                f"train@{version}`"
            )
        profile = params.profiles[spec.profile]
        omitted = profile.omit if isinstance(profile, SftProfile) else {}
        yield model_card.Trained(version, spec.data, spec.data in params.imports, omitted)


def _missing(params: Params, name: str) -> list[str]:
    seeds = params.seeds_of(name)
    done = {
        "Training with other seeds": bool(seeds) and all(paths.report(seed).exists() for seed in seeds),
        "Error analysis on other cases": paths.mine_report(name).exists(),
        "Exam on cases from elsewhere": paths.external_report(name).exists(),
        "Language of real patients, and judgement of clinicians": False,
    }
    return [f"{what}: not done" for what, is_done in done.items() if not is_done]


def _alarms(name: str) -> str:
    """The alerts of a training, such as "stop clipped think at 12"; "none" without any, empty if it was not trained."""
    raised = raised_in(paths.report(name) / ALARMS)
    if raised is None:
        return ""
    words = ((alarm.level, alarm.name, alarm.about, f"at {alarm.step}") for alarm in raised)
    return "; ".join(" ".join(filter(None, of)) for of in words) or "none"


def stated(params: Params, name: str, key: str) -> str:
    """The values of a key in the recipes of a version or of a merge's versions, and of their ancestors; empty if there
    is none. A recipe is that of the manifest, or of params.yaml, where an adapter is not here."""
    found = []
    for version in params.family(name):
        folder, profile = paths.adapter(version), params.profiles[params.versions[version].profile]
        own = read_manifest(folder).spec.get(key, "") if (folder / MANIFEST).exists() else ""
        found.append(own or getattr(profile, key, ""))
    return "; ".join(dict.fromkeys(filter(None, found)))


def _checked_manifest(folder: Path) -> Manifest:
    """The manifest of a folder. Raises ArtefactError if the folder does not hold exactly the files that it names."""
    manifest = verified(folder)
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and name not in (MANIFEST, *manifest.files):
            raise ArtefactError(f"{path} is not named in the folder's {MANIFEST}; remove it")
        if path.suffix in artifacts.PICKLES:
            raise ArtefactError(f"{path} could run code when it is loaded; only safetensors are registered")
    return manifest


def fill(client: "MlflowClient", run: "Run", made: Recorded) -> None:
    """Log the recipe, metrics, history, data sets and files that a run and the run below it lack.

    The headline is in the run itself, all other metrics are in the one below: MLflow's pages show every metric of a
    run.
    """
    mlflow_store.log_params(client, run, made.manifest.spec)
    log = made.model.folder / HISTORY
    history = mlflow_store.points(read_history(log)) if log.exists() else []
    exam = [(name, 0, value) for name, value in made.metrics.items()]
    about = made.why
    for is_own in (True, False):
        mine = [
            [point for point in part if belongs_in(point[0], run, made.headline) == is_own] for part in (exam, history)
        ]
        if not any(mine):
            continue
        place = run if is_own else mlflow_store.details_of(client, run)
        _log_metrics(client, place, *mine)
        if not is_own:
            about = f"{made.why}\n\n{BELOW}".strip()
            if place.info.status != "FINISHED":
                client.set_terminated(place.info.run_id, "FINISHED")
    if NOTE not in run.data.tags:
        client.set_tag(run.info.run_id, NOTE, about)
    _log_data(client, run, made)
    _log_files(client, run, made)


def _log_metrics(client: "MlflowClient", run: "Run", exam: Sequence[Point], history: Sequence[Point]) -> None:
    run_id, held, began = run.info.run_id, run.data.metrics, int(run.info.start_time)
    # First values, and points missed during training, are dated like the run: two machines at once add them once.
    log_points(client, run_id, [point for point in exam if point[0] not in held], at=began)
    log_points(client, run_id, [(name, 0, value) for name, _, value in exam if held.get(name, value) != value])
    known = mlflow_store.known_points(client, run, {name for name, _, _ in history})
    log_points(client, run_id, [point for point in history if point[:2] not in known], at=began)


def _log_data(client: "MlflowClient", run: "Run", made: Recorded) -> None:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    exam = next(iter(made.reports.values()))
    data = [("exam", exam.exam, exam.exam_digest)]
    if made.model.data:
        data.append(("training", made.model.data, made.manifest.inputs["data"]))
    held = {(held.dataset.name, held.dataset.digest) for held in run.inputs.dataset_inputs}
    new = [
        DatasetInput(
            Dataset(
                name=name,
                digest=whole[:DATASET_DIGEST],
                source_type="local",
                source=canonical_json({"uri": str(paths.cases(name))}),
                profile=canonical_json({"digest": whole}),
            ),
            [InputTag("mlflow.data.context", context)],
        )
        for context, name, whole in data
        if (name, whole[:DATASET_DIGEST]) not in held
    ]
    if new:
        client.log_inputs(run.info.run_id, datasets=new)


def _log_files(client: "MlflowClient", run: "Run", made: Recorded) -> None:
    name, sets = made.model.name, [data for data in (made.model.data, made.model.exam) if data]
    groups = {
        "reports": [paths.report(name)],
        "training": [made.model.folder / "README.md", made.model.folder / MANIFEST, made.model.folder / HISTORY],
        "proofs": [paths.probe_proof(name), *(paths.data_proof(data) for data in sets)],
        # The pages of an import hold no values, but they are about rows of somebody's records and stay here.
        **{f"data_docs/{data}": [paths.data_docs(data)] for data in sets if not is_import(paths.cases(data))},
    }
    if mlflow_store.file_of(client.tracking_uri) is None:
        mlflow_store.check_host(client.tracking_uri, run.info.artifact_uri)
    else:
        folder = mlflow_store.beside(client.tracking_uri, run.info.artifact_uri)
        if link := next(filter(Path.is_symlink, folder.rglob("*")), None):
            raise RegistryError(f"{link} is a link, and files of the run would be written where it leads; remove it")
    sent: dict[str, Any] = {}
    with suppress(ValueError, TypeError):  # of a tag that somebody edited: all is sent again
        sent = dict(json.loads(run.data.tags.get(SENT, "{}")))
    current = dict(sent)
    for group, sources in groups.items():
        files = {str(file): sha256_file(file) for source in sources for file in files_of(source)}
        if not files or sent.get(group) == digest(files)[:16]:
            continue
        for source in sources:
            if source.is_dir():
                client.log_artifacts(run.info.run_id, str(source), group)
            elif source.is_file():
                client.log_artifact(run.info.run_id, str(source), group)
        current[group] = digest(files)[:16]
    if made.card and sent.get("card") != digest(made.card)[:16]:
        client.log_text(run.info.run_id, made.card, "README.md")
        current["card"] = digest(made.card)[:16]
    if current != sent:
        client.set_tag(run.info.run_id, SENT, canonical_json(current))


def logged_model(
    client: "MlflowClient", run: "Run", made: Recorded, sources: Sequence[str] = (), *, is_champion: bool = False
) -> "LoggedModel":
    """The finished model with this digest in the experiment of the run: found, completed, restored or created.

    Two machines that create it at once both end up with the older one, or with that which the version names by now;
    `sources` are the addresses of the versions with this digest. Raises RegistryError if `is_champion` and the exam was
    taken with another decoding than the folder serves: nobody has approved that.
    """
    from mlflow.entities import LoggedModelOutput

    experiment, run_id = run.info.experiment_id, run.info.run_id
    found = logged_models(client, experiment, made.digest)
    found.sort(key=lambda model: not any(model.model_id in source for source in sources))
    if not found:
        mine = client.create_logged_model(
            experiment,
            name=made.model.name,
            source_run_id=run_id,
            tags={DIGEST: made.digest},
            model_type="adapter" if made.is_adapter else "merged",
        )
        found = logged_models(client, experiment, made.digest)
        if found[0].model_id != mine.model_id:
            client.delete_logged_model(mine.model_id)
    model = found[0]
    ready = model.status == "READY"
    has_files = not ready and own_folder(client, model) is None and client.list_logged_model_artifacts(model.model_id)
    if not ready or not _is_intact(client, model, made, is_champion=is_champion):
        upload(client, model, made, run_id, replaces=ready)
    # A killed upload may have left other files. Of two machines that send at once, a later registration notices.
    if has_files and not _is_intact(client, model, made):
        upload(client, model, made, run_id, replaces=True)
    if model.model_id not in {held.model_id for held in (run.outputs.model_outputs if run.outputs else ())}:
        client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step=0)])
    if not ready:
        client.finalize_logged_model(model.model_id, "READY")
    _log_model(client, run, model, made)
    return model


def _log_model(client: "MlflowClient", run: "Run", model: "LoggedModel", made: Recorded) -> None:
    """Log the parts of recipe and headline that a model lacks; MLflow's pages compare models by them."""
    from mlflow.entities import Metric

    if params := {
        name: value for name, value in mlflow_store.flat(made.manifest.spec).items() if name not in model.params
    }:
        client.log_model_params(model.model_id, params)
    logged = sorted(model.metrics or (), key=lambda metric: metric.timestamp)
    held = {metric.key: (metric.value, metric.dataset_digest) for metric in logged}
    at = int(time.time() * 1000) if held else int(run.info.start_time)
    exam = next(iter(made.reports.values()))
    about = {"model_id": model.model_id, "dataset_name": exam.exam, "dataset_digest": exam.exam_digest[:DATASET_DIGEST]}
    new = [
        Metric(name, value, at, 0, **about)
        for name, value in made.metrics.items()
        if name in made.headline and held.get(name) != (value, about["dataset_digest"])
    ]
    if new:
        client.log_batch(run.info.run_id, metrics=new)


def logged_models(client: "MlflowClient", experiment: str, digest: str) -> list["LoggedModel"]:
    """The logged models with a digest, finished ones first, then the older ones."""
    found = client.search_logged_models([experiment], filter_string=f"tags.{DIGEST} = '{digest}'")
    return sorted(found, key=lambda model: (model.status != "READY", model.creation_timestamp, model.model_id))


def _is_intact(client: "MlflowClient", model: "LoggedModel", made: Recorded, *, is_champion: bool = False) -> bool:
    """Whether a model's folder is what would be uploaded. From a server, all of its files are downloaded for this."""
    with TemporaryDirectory(prefix="clinrl-") as scratch:
        folder = own_folder(client, model)
        if folder is None:
            if not client.list_logged_model_artifacts(model.model_id):  # MLflow would request a file without a name
                return False
            folder = download(client, model, Path(scratch))
        if is_champion and decodes_otherwise(folder, made):
            raise RegistryError(
                f"{made.model.name} is the champion of {made.model.registered}, and this exam decodes in another way "
                "than the approved one; put `modes` back, or train it under another name (`clinrl draft`)"
            )
        intact = is_of(folder, made)
        if is_champion and not intact:
            echo(
                f"{made.model.name} is the champion of {made.model.registered}, and its registered files have another "
                f"content or signer than here; they are replaced and signed with {made.signer().key.fingerprint}, and "
                "a server that does not trust this key will not serve them after its next start"
            )
        return intact
