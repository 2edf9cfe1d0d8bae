"""Names in MLflow: a run a version, a registered model a task, and the aliases under which people load one.

Nothing in MLflow is the only copy of anything. A run is filled from the manifest, the reports and `history.jsonl`, and
may be filled again at any time and from any machine: what is there stays, what is missing is added. A version is known
by the digest of what was trained, so that one adapter is one version however often it is registered.
"""

import json
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from clinrl import model_card, paths, served
from clinrl.artefacts import MANIFEST, canonical_json, digest, exclusive, identity, sha256_file, verified
from clinrl.errors import ArtefactError, RegistryError
from clinrl.evaluate import BETWEEN_MODES, HISTORY, Examinee, examinee, load_report
from clinrl.figures import read_history
from clinrl.records import Estimate, Manifest, Strict
from clinrl.report import EvalReport
from clinrl.section import NAME, did_you_mean, shown
from clinrl.tracking import (
    Clash,
    Point,
    asked,
    exam_metrics,
    file_of,
    known_points,
    log_params,
    log_points,
    place,
    points,
    run_key,
    run_of,
    store,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel, Run
    from mlflow.entities.model_registry import ModelVersion

    from clinrl.params import Params

CANDIDATE, CHAMPION = "candidate", "champion"
MERGED = "-merged"
"""What follows a task's name in the name of the registered model of its full models."""
SENT = "clinrl.sent"
"""Run tag: digest of each group of files that the run holds."""
DIGEST = "digest"
"""Version tag: identity of the adapter, or of the full model."""
GATE, REFUSED = "gate", "refused"
RENEWED = ("exam_digest",)
"""Version tags that a second examination changes; the others say how the version was made and stay."""
PICKLES = {".bin", ".ckpt", ".joblib", ".pickle", ".pkl", ".pt", ".pth"}
"""Kinds of files that can run code when they are loaded."""
ATTEMPTS = 3
"""At a registration that another machine is making too."""
DATASET_DIGEST = 36
"""Characters of a data set's digest that MLflow has room for."""


class Entry(Strict):
    """One version of a registered model."""

    model: str
    number: int
    """MLflow's, from 1."""
    name: str
    """The version or merge of params.yaml."""
    digest: str
    """Identity of its manifest."""
    aliases: tuple[str, ...]
    tags: dict[str, str]
    run_id: str


@dataclass(frozen=True, kw_only=True)
class _Examined:
    """A version or a merge that sat its exam: all that is registered of it."""

    who: Examinee
    manifest: Manifest
    base: Manifest
    reports: Mapping[str, EvalReport]
    """By mode."""
    agreement: Estimate | None
    scale: str
    dvc_stage: str
    why: str

    @property
    def digest(self) -> str:
        return identity(self.manifest)

    @property
    def is_adapter(self) -> bool:
        return "adapter_config.json" in self.manifest.files

    @property
    def model(self) -> str:
        return self.who.task.name if self.is_adapter else self.who.task.name + MERGED


def register(params: "Params", name: str) -> Entry:
    """Register a version or a merge of params.yaml that was examined, or fill in what its entry lacks.

    Its run gets the recipe, every metric of every mode with its interval, the training history by step, the data sets,
    reports, plots, card and Data Docs; its model version the adapter with its base (or the full model) and all that
    loading needs. It becomes the `candidate` unless it was refused or is the champion.

    Raises ParamsError for an unknown name, ArtefactError if it was not examined or a file was altered, Busy if the
    same name is being registered, and RegistryError if MLflow did not do its part; the same call then completes it.
    """
    _check(name, "a version or a merge")
    who = examinee(params, name)
    if who.parent is None:
        raise RegistryError(f"{name} is a base; versions and merges are registered")
    with exclusive(Path("registry") / name):
        made = _examined(params, who)
        for _ in range(ATTEMPTS - 1):
            with suppress(Clash):
                return _registered(made)
        return _registered(made)


def _registered(made: _Examined) -> Entry:
    """Complete what MLflow holds of a name, from wherever it stands."""
    with asked() as client:
        run = run_of(client, made.who.task.name, run_key(made.manifest), made.who.name)
        _fill(client, run, made)
        version = _version(client, run, _logged_model(client, run, made), made)
        if run.info.status != "FINISHED":
            client.set_terminated(run.info.run_id, "FINISHED")
        aliases = _aliases(client, made.model) or {}
        entry = _entry(version, aliases)
        if entry.tags.get(GATE) != REFUSED and not {CHAMPION, CANDIDATE} & set(entry.aliases):
            client.set_registered_model_alias(made.model, CANDIDATE, str(entry.number))
            entry = _entry(version, aliases | {CANDIDATE: str(entry.number)})
    return entry


def entries(model: str) -> list[Entry]:
    """Every version of a registered model, oldest first; none if there is no such model. Raises RegistryError."""
    _check(model, "a registered model")
    with asked() as client:
        aliases = _aliases(client, model)
        if aliases is None:
            return []
        return [_entry(version, aliases) for version in _versions(client, f"name='{model}'")]


def find(model: str, which: str) -> Entry:
    """The version that an alias, a name of params.yaml (the newest that has it) or a number stands for.

    Raises RegistryError saying what there is instead.
    """
    if not which.isdecimal():
        _check(which, "an alias, a version or a number")
        if (held := holder(model, which)) is not None:
            return held
    known = entries(model)
    fitting = [entry for entry in known if which in (entry.name, str(entry.number))]
    if fitting:
        return fitting[-1]
    if not known:
        raise RegistryError(f"no model {model} is registered in {place(store())}; run `clinrl register` first")
    allowed = {word for entry in known for word in (*entry.aliases, entry.name, str(entry.number))}
    raise RegistryError(f"the registered model {model} has no {shown(which)}; {did_you_mean(which, allowed)}")


def holder(model: str, alias: str) -> Entry | None:
    """The version that holds an alias, or None. Raises RegistryError."""
    _check(model, "a registered model")
    _check(alias, "an alias")
    with asked() as client:
        aliases = _aliases(client, model) or {}
        if alias not in aliases:
            return None
        version = client.get_model_version(model, aliases[alias])
        return _entry(version, aliases) if _counts(version) else None


def tag(entry: Entry, tags: Mapping[str, str]) -> None:
    """Set tags of a version; those not named stay. Raises RegistryError, if the version is gone for one."""
    with asked() as client:
        for key, value in tags.items():
            client.set_model_version_tag(entry.model, str(entry.number), key, value)


def point(model: str, alias: str, entry: Entry | None) -> None:
    """Let an alias stand for a version, or for nothing (None). Raises RegistryError; the alias then stays."""
    _check(model, "a registered model")
    _check(alias, "an alias")
    with asked() as client:
        if entry is None:
            client.delete_registered_model_alias(model, alias)
        else:
            client.set_registered_model_alias(model, alias, str(entry.number))


def _check(name: str, what: str) -> None:
    if not NAME.fullmatch(name):
        raise RegistryError(f"{shown(name)} is not {what}: names match {NAME.pattern}")


def _examined(params: "Params", who: Examinee) -> _Examined:
    """All that is registered of a name, each part checked against the others. Raises ArtefactError."""
    manifest, base = _sound(who.folder), _sound(paths.base(who.task.name))
    if manifest.inputs.get("base") != identity(base):
        raise ArtefactError(f"{who.folder} was made from another base than {paths.base(who.task.name)} now holds")
    reports = {mode: load_report(who.name, mode) for mode in params.modes}
    for report in reports.values():
        if report.adapter_digest != identity(manifest):
            raise ArtefactError(
                f"{paths.report(who.name)} is about another model than {who.folder} now holds; run "
                f"`dvc repro evaluate@{who.name}`"
            )
    agreement = json.loads((paths.report(who.name) / BETWEEN_MODES).read_text(encoding="utf-8"))
    group = "train" if who.name in params.versions else "fold" if who.name in params.merges.folds else "blend"
    return _Examined(
        who=who,
        manifest=manifest,
        base=base,
        reports=reports,
        agreement=Estimate(**agreement["mode_agreement"]) if agreement else None,
        scale=manifest.spec.get("scale", params.scale),
        dvc_stage=f"{group}@{who.name}",
        why=params.versions[who.name].why if who.name in params.versions else "",
    )


def _sound(folder: Path) -> Manifest:
    """The manifest of a folder that holds what it names, unaltered, and nothing else. Raises ArtefactError."""
    manifest = verified(folder)
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and name not in (MANIFEST, *manifest.files):
            raise ArtefactError(f"{path} is not named in the folder's {MANIFEST}; remove it")
        if path.suffix in PICKLES:
            raise ArtefactError(f"{path} could run code when it is loaded; only safetensors are registered")
    return manifest


def _fill(client: "MlflowClient", run: "Run", made: _Examined) -> None:
    """Log whatever of recipe, metrics, history, data sets and files a run lacks."""
    log_params(client, run, made.manifest.spec)
    run_id, held = run.info.run_id, run.data.metrics
    exam = exam_metrics(made.reports.values(), made.agreement).items()
    # What comes first is dated like the run itself, so that two machines at once add it once.
    missing = [(name, 0, value) for name, value in exam if name not in held]
    log_points(client, run_id, missing, at=lambda _: int(run.info.start_time))
    log_points(client, run_id, [(name, 0, value) for name, value in exam if held.get(name, value) != value])
    log = made.who.folder / HISTORY
    if log.exists():
        history = points(read_history(log))
        known = known_points(client, run, {name for name, _, _ in history})
        missing = [point for point in history if point[:2] not in known]
        log_points(client, run_id, missing, at=_dates(missing, known, int(run.info.start_time)).__getitem__)
    _log_data(client, run, made)
    _log_files(client, run, made)


def _dates(missing: Iterable[Point], known: Mapping[tuple[str, int], int], began: int) -> dict[int, int]:
    """When each missing step may have been: at the last step before it that was logged live, else when its run began.

    The same for whoever asks, and never before an earlier step.
    """
    live: dict[int, int] = {}
    for (_, step), date in known.items():
        live[step] = max(date, live.get(step, began))
    dates: dict[int, int] = {}
    date = began
    for step in sorted({step for _, step, _ in missing} | live.keys()):
        date = dates[step] = max(date, live.get(step, began))
    return dates


def _log_data(client: "MlflowClient", run: "Run", made: _Examined) -> None:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    exam = next(iter(made.reports.values()))
    data = [("exam", exam.exam, exam.exam_digest)]
    if made.who.data:
        data.append(("training", made.who.data, made.manifest.inputs["data"]))
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


def _log_files(client: "MlflowClient", run: "Run", made: _Examined) -> None:
    """Reports, plots, history, proofs, Data Docs and the card: each group that the run does not hold as it is now."""
    name, sets = made.who.name, [data for data in (made.who.data, made.who.exam) if data]
    groups = {
        "reports": [paths.report(name)],
        "training": [made.who.folder / "README.md", made.who.folder / MANIFEST, made.who.folder / HISTORY],
        "proofs": [paths.probe_proof(name), *(paths.data_proof(data) for data in sets)],
        **{f"data_docs/{data}": [paths.data_docs(data)] for data in sets},
    }
    sent = json.loads(run.data.tags.get(SENT, "{}"))
    current = dict(sent)
    for group, sources in groups.items():
        files = {str(file): sha256_file(file) for source in sources for file in _files(source)}
        if not files or sent.get(group) == digest(files)[:16]:
            continue
        for source in sources:
            if source.is_dir():
                client.log_artifacts(run.info.run_id, str(source), group)
            elif source.is_file():
                client.log_artifact(run.info.run_id, str(source), group)
        current[group] = digest(files)[:16]
    card = _card(made)
    if card and sent.get("card") != digest(card)[:16]:
        client.log_text(run.info.run_id, card, "README.md")
        current["card"] = digest(card)[:16]
    if current != sent:
        client.set_tag(run.info.run_id, SENT, canonical_json(current))


def _card(made: _Examined) -> str:
    """The card of what was made, with its exam; empty where none was written."""
    written = made.who.folder / "README.md"
    if not written.exists():
        return ""
    agreement = {"mode_agreement": made.agreement} if made.agreement else {}
    return model_card.examined(written.read_text(encoding="utf-8"), list(made.reports.values()), agreement)


def _files(source: Path) -> list[Path]:
    return [path for path in (sorted(source.rglob("*")) if source.is_dir() else [source]) if path.is_file()]


def _logged_model(client: "MlflowClient", run: "Run", made: _Examined) -> "LoggedModel":
    """The finished model with this digest in the experiment of the run: found, completed, restored or created.

    Two machines that create it at once end with the older one.
    """
    from mlflow.entities import LoggedModelOutput

    experiment, run_id = run.info.experiment_id, run.info.run_id
    found = _logged_models(client, experiment, made.digest)
    if not found:
        mine = client.create_logged_model(
            experiment,
            name=made.who.name,
            source_run_id=run_id,
            tags={DIGEST: made.digest},
            model_type="adapter" if made.is_adapter else "merged",
        )
        found = _logged_models(client, experiment, made.digest)
        if found[0].model_id != mine.model_id:
            client.delete_logged_model(mine.model_id)
    model = found[0]
    ready = model.status == "READY"
    if not ready or not _intact(client, model):
        _upload(client, model.model_id, made, run_id)
    if not ready:
        if model.model_id not in {held.model_id for held in (run.outputs.model_outputs if run.outputs else ())}:
            client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step=0)])
        client.finalize_logged_model(model.model_id, "READY")
    return model


def _logged_models(client: "MlflowClient", experiment: str, digest: str) -> list["LoggedModel"]:
    """The logged models with a digest, finished ones first, then the older ones."""
    found = client.search_logged_models([experiment], filter_string=f"tags.{DIGEST} = '{digest}'")
    return sorted(found, key=lambda model: (model.status != "READY", model.creation_timestamp, model.model_id))


def _intact(client: "MlflowClient", model: "LoggedModel") -> bool:
    """Whether a model in the project's own store is as it was registered. A server's files are checked on loading."""
    if file_of(client.tracking_uri) is None:
        return True
    try:
        served.check(Path(unquote(urlsplit(model.artifact_location).path)))
    except ArtefactError:
        return False
    return True


def _upload(client: "MlflowClient", model_id: str, made: _Examined, run_id: str) -> None:
    """Send the folder that is registered: the weights from where they are, the rest as `served` writes it."""
    record = served.Served(
        name=made.who.name,
        task=made.who.task.name,
        task_version=made.manifest.task_version,
        digest=made.digest,
        base_digest=identity(made.base),
        form="adapter" if made.is_adapter else "merged",
        modes={mode: served.Decoding(**report.mode_spec) for mode, report in made.reports.items()},
        default_mode="direct" if "direct" in made.reports else next(iter(made.reports)),
    )
    with TemporaryDirectory(prefix="clinrl-") as folder:
        served.write(Path(folder), record, model_id=model_id, run_id=run_id)
        client.log_model_artifacts(model_id, folder)
    parts = (
        {served.BASE: paths.base(record.task), served.ADAPTER: made.who.folder}
        if made.is_adapter
        else {served.MERGED: made.who.folder}
    )
    for part, folder_ in parts.items():
        client.log_model_artifacts(model_id, str(folder_), part)


def _version(client: "MlflowClient", run: "Run", model: "LoggedModel", made: _Examined) -> "ModelVersion":
    """The model version with this digest, created if there is none, with every tag.

    Two machines that create it at once end with the older one.
    """
    where = f"name='{made.model}' and tags.{DIGEST}='{made.digest}'"
    tags = _tags(made)
    if not (found := _versions(client, where)):
        if _aliases(client, made.model) is None:
            _create_model(client, made)
        own = file_of(client.tracking_uri) is not None
        mine = client.create_model_version(
            made.model,
            # Resolving the model's own URI would ask MLflow's global store, which need not be this one.
            source=model.artifact_location if own else f"models:/{model.model_id}",
            run_id=run.info.run_id,
            model_id=model.model_id,
            tags=tags,
            description=made.why,
        )
        found = _versions(client, where)
        if int(found[0].version) != int(mine.version):
            client.delete_model_version(made.model, mine.version)
        if own:
            named = [{"name": made.model, "version": int(found[0].version)}]
            client.set_logged_model_tags(model.model_id, {"mlflow.modelVersions": json.dumps(named)})
    version = found[0]
    for key, value in tags.items():
        if key not in version.tags or (key in RENEWED and version.tags[key] != value):
            client.set_model_version_tag(made.model, version.version, key, value)
    return client.get_model_version(made.model, version.version)


def _create_model(client: "MlflowClient", made: _Examined) -> None:
    from mlflow.exceptions import MlflowException

    what = "LoRA adapters" if made.is_adapter else "Full models"
    note = f"{what} of the clinrl task {made.who.task.name}. Research only, synthetic data."
    try:
        client.create_registered_model(made.model, description=note)
    except MlflowException:  # somebody else may have been quicker
        if _aliases(client, made.model) is None:
            raise


def _tags(made: _Examined) -> dict[str, str]:
    """What a model version says of its origin."""
    inputs = made.manifest.inputs
    parents = (
        {made.who.parent: inputs["parent"]}
        if "parent" in inputs
        else {name: value for name, value in inputs.items() if name != "base"}
    )
    tags = {
        "version": made.who.name,
        "parent": ", ".join(str(name) for name in parents),
        DIGEST: made.digest,
        "parent_digest": ", ".join(parents.values()),
        "base_digest": identity(made.base),
        "exam_digest": next(iter(made.reports.values())).exam_digest,
        "git_revision": _revision(),
        "dvc_stage": made.dvc_stage,
        "task_version": str(made.manifest.task_version),
        "scale": made.scale,
    }
    return tags | ({"data_digest": inputs["data"]} if "data" in inputs else {})


def _revision() -> str:
    """The commit of the working directory, with -dirty if a tracked file differs; unknown without git."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _aliases(client: "MlflowClient", model: str) -> dict[str, str] | None:
    """Alias to version number of a registered model; None if there is no such model."""
    from mlflow.exceptions import MlflowException

    try:
        held: dict[str, Any] = client.get_registered_model(model).aliases
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None
    return {alias: str(number) for alias, number in held.items()}


def _versions(client: "MlflowClient", where: str) -> list["ModelVersion"]:
    """The finished versions that fit, oldest first. Those that nobody registered from here do not count."""
    found: list[ModelVersion] = []
    token: str | None = None
    while not found or token:
        page = client.search_model_versions(where, max_results=1000, page_token=token)
        found += page
        token = page.token
        if not token:
            break
    return sorted((version for version in found if _counts(version)), key=lambda version: int(version.version))


def _counts(version: "ModelVersion") -> bool:
    return bool(version.status == "READY" and {DIGEST, "version"} <= version.tags.keys())


def _entry(version: "ModelVersion", aliases: Mapping[str, str]) -> Entry:
    return Entry(
        model=version.name,
        number=int(version.version),
        name=version.tags["version"],
        digest=version.tags[DIGEST],
        aliases=tuple(sorted(alias for alias, number in aliases.items() if number == str(version.version))),
        tags=dict(version.tags),
        run_id=version.run_id or "",
    )
