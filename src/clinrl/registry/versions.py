"""Names in MLflow: a run per version, a registered model per task, and the aliases under which people load a version.

Nothing in MLflow is the only copy of anything. A run is filled from the manifest, the reports and `history.jsonl`, and
may be filled again at any time and from any machine: existing entries stay, missing ones are added. A version is
identified by the digest of its adapter, so that one adapter is one version however often it is registered.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import clinrl_loader
from clinrl.artifacts import MANIFEST, digest, exclusive, identity, read_manifest
from clinrl.config.base import NAME, is_name
from clinrl.config.model import MERGED as FULL_MODEL
from clinrl.config.params import Params
from clinrl.data import validate
from clinrl.errors import RegistryError, SignatureError, Unregistered, did_you_mean, format_value
from clinrl.registry.log_run import DIGEST, Recorded, collect, fill, logged_model, logged_models
from clinrl.registry.model_folder import check_signature, download, own_folder
from clinrl.registry.pyfunc import MERGED, read
from clinrl.signing.dsse import signature_errors
from clinrl.signing.keys import trusted_keys
from clinrl.tasks.base import task_names
from clinrl.tracking.mlflow_store import Clash, beside, connect, file_of, place, run_key, run_of, store, writing
from clinrl.types import Manifest, Strict

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel, Run
    from mlflow.entities.model_registry import ModelVersion

    from clinrl.analysis.exam import EvalReport

CANDIDATE, CHAMPION = "candidate", "champion"
GATE, REFUSED = "gate", "refused"
EXAMINED = "examined"
RENEWED = ("exam_digest", "version", "base_digest", "data_digest", "parent_digest")
"""Version tags that are set anew: a second exam changes the first; the others follow from the manifest, so that another
value was written by hand."""
ATTEMPTS = 3
"""The number of attempts at a registration that another machine makes at the same time."""


class Entry(Strict):
    """One version of a registered model."""

    model: str
    number: int
    """MLflow's version number, from 1."""
    name: str
    """The version or merge of params.yaml."""
    digest: str
    """Identity of its manifest."""
    aliases: tuple[str, ...]
    tags: dict[str, str]
    run_id: str


def register(params: Params, name: str) -> Entry:
    """Register a version or a merge of params.yaml that has taken its exam, or complete its entry.

    Its run gets the recipe, every metric of every mode with its interval, the training history by step, the data sets,
    reports, plots, card and pages of proofs. Its model version gets the adapter with its base (or the full model) and
    all files that loading needs. A registered model that would be refused is uploaded again; to check this, a server's
    model is downloaded as a whole. The version becomes the `candidate` unless it was refused, was champion, was trained
    on a waiver, or a newer version is the candidate.

    Raises ParamsError for an unknown name, ArtefactError if there is no exam or a file was altered, Busy if the same
    name is being registered, and RegistryError if MLflow failed; the same call then completes the entry.
    """
    _check(name, "a version or a merge")
    model = params.model(name)
    if model.parent is None:
        raise RegistryError(f"{name} is a base; versions and merges are registered")
    with exclusive(Path("registry") / name):
        with connect():  # report an unreachable store before minutes of counting
            pass
        made = collect(params, model)
        for data in filter(None, (model.data, model.exam)):
            validate.complete_page(data)
        for _ in range(ATTEMPTS - 1):
            with suppress(Clash):
                return _complete_entry(made)
        return _complete_entry(made)


def _complete_entry(made: Recorded) -> Entry:
    with connect() as client, writing(client):
        run = run_of(client, made.model.task.name, run_key(made.manifest), made.model.name)
        fill(client, run, made)
        same, number = _versions(client, _where(made)), (_aliases(client, made.model.registered) or {}).get(CHAMPION)
        is_champion = number in {str(version.version) for version in same}
        model = logged_model(client, run, made, [str(version.source) for version in same], is_champion=is_champion)
        version = _version(client, run, model, made)
        if run.info.status != "FINISHED":
            client.set_terminated(run.info.run_id, "FINISHED")
        aliases = _aliases(client, made.model.registered) or {}
        entry = _entry(version, aliases)
        if "waiver" not in made.tags and _is_next(client, entry, aliases):
            client.set_registered_model_alias(entry.model, CANDIDATE, str(entry.number))
            # A decision meanwhile has set its tag before it looked who is the candidate, so one of the two sees both.
            is_decided = _is_decided(client.get_model_version(entry.model, version.version).tags)
            before, aliases = aliases.get(CANDIDATE), _aliases(client, entry.model) or {}
            if is_decided and aliases.get(CANDIDATE) == str(entry.number):  # as it was before, if nobody else was since
                if before is None:
                    client.delete_registered_model_alias(entry.model, CANDIDATE)
                else:
                    client.set_registered_model_alias(entry.model, CANDIDATE, before)
                aliases = _aliases(client, entry.model) or {}
        # Last: readers of this tag may rely on the entry of this exam being complete.
        if entry.tags.get(EXAMINED) != reports_digest(made.reports):
            client.set_model_version_tag(made.model.registered, version.version, EXAMINED, reports_digest(made.reports))
            version = client.get_model_version(made.model.registered, version.version)
    return _entry(version, aliases)


def _is_next(client: "MlflowClient", entry: Entry, aliases: Mapping[str, str]) -> bool:
    """Whether a version becomes the candidate: not if it was refused or champion already, nor in place of a newer one.

    Registering also restores lost entries, such as the run of an old version. Of several versions with one name, the
    one with the files that are here now becomes the candidate.
    """
    if _is_decided(entry.tags) or {CHAMPION, CANDIDATE} & set(entry.aliases):
        return False
    held = aliases.get(CANDIDATE, "0")
    return int(held) < entry.number or client.get_model_version(entry.model, held).tags.get("version") == entry.name


def _is_decided(tags: Mapping[str, str]) -> bool:
    """Whether a version was refused or approved, by its tags."""
    return tags.get(GATE) == REFUSED or "approver" in tags


def reports_digest(reports: Mapping[str, "EvalReport"]) -> str:
    """One digest of the reports of every mode: the version tag EXAMINED, once all of them are in the run."""
    return digest({mode: report.model_dump(mode="json") for mode, report in reports.items()})


def entries(model: str) -> list[Entry]:
    """Every version of a registered model, oldest first; none if there is no such model. Raises RegistryError."""
    _check(model, "a registered model")
    with connect() as client:
        aliases = _aliases(client, model)
        if aliases is None:
            return []
        return [_entry(version, aliases) for version in _versions(client, f"name='{model}'")]


def find(model: str, which: str, *, digest: str | None = None) -> Entry:
    """The version that an alias, a name of params.yaml or a number stands for.

    A name that was trained more than once stands for the version with this digest, or else for its newest. Raises
    RegistryError saying what there is instead.
    """
    if not which.isdecimal():
        _check(which, "an alias, a version or a number")
    known = entries(model)
    held = [entry for entry in known if which in entry.aliases]
    if held and not which.isdecimal():
        return held[0]
    if fitting := [entry for entry in known if which in (entry.name, str(entry.number))]:
        return next((entry for entry in fitting if entry.digest == digest), fitting[-1])
    if not known:
        raise Unregistered(f"no model {model} is registered in {place(store())}; run `clinrl register` first")
    allowed = {word for entry in known for word in (*entry.aliases, entry.name, str(entry.number))}
    raise Unregistered(f"the registered model {model} has no {format_value(which)}; {did_you_mean(which, allowed)}")


def by_digest(model: str, digest: str | None) -> Entry | None:
    """The version with a digest, None if there is none. Raises RegistryError."""
    return next((entry for entry in entries(model) if entry.digest == digest), None)


def holder(model: str, alias: str) -> Entry | None:
    """The version that holds an alias, or None. Raises RegistryError."""
    _check(model, "a registered model")
    _check(alias, "an alias")
    with connect() as client:
        aliases = _aliases(client, model) or {}
        if alias not in aliases:
            return None
        version = client.get_model_version(model, aliases[alias])
        return _entry(version, aliases) if _is_complete(version) else None


@dataclass(frozen=True, kw_only=True)
class Champion:
    """The champion of a registered model, loaded."""

    name: str
    """The version or merge of params.yaml."""
    number: int
    """MLflow's version number, from 1."""
    digest: str
    """Identity of its adapter, or of the full model."""
    model: Any
    """The model as `mlflow.pyfunc.load_model` returns it; all of its files were checked against its signature."""

    def predict(self, table: Any) -> Any:
        """The answers to a table of facts, a row each, as a pandas DataFrame."""
        return self.model.predict(table)


def load_champion(model: str) -> Champion:
    """The champion of a task, or of `<task>-merged`, loaded from the registry.

    Raises RegistryError if there is no champion or the registry does not answer, clinrl_loader.Untrusted if one of its
    files is not as it was signed, and ArtefactError if this code does not answer as that of the model did.
    """
    entry = holder(model, CHAMPION)
    if entry is None:
        known = {task + ending for task in task_names() for ending in ("", FULL_MODEL)}
        mend = "`clinrl promote` makes one" if model in known else did_you_mean(model, known)
        raise RegistryError(f"the registered model {format_value(model)} has no champion; {mend}")
    with TemporaryDirectory(prefix="clinrl-") as scratch:
        with connect() as client:
            folder = _folder(client, entry, Path(scratch))
        loaded = clinrl_loader.load(str(folder), digest=entry.digest)
    return Champion(name=entry.name, number=entry.number, digest=entry.digest, model=loaded)


def check_intact(params: Params, entry: Entry) -> None:
    """Refuse a registered model that is not as a trusted key signed it, or that holds another adapter.

    The whole folder is read, also from a server. Raises SignatureError or ArtefactError naming the file, RegistryError
    if there is no folder.
    """
    with connect() as client, TemporaryDirectory(prefix="clinrl-") as scratch:
        _check_folder(params, entry, _folder(client, entry, Path(scratch)))


def checked_copy(params: Params, entry: Entry, to: Path) -> Path:
    """Copy a registered model's folder below the private folder `to`, check the copy, and return its path.

    The checked files are thus the loaded ones, whatever happens to the store. Raises as `check_intact` does.
    """
    with connect() as client:
        folder = _folder(client, entry, to)
    if not folder.is_relative_to(to):
        with signature_errors():
            # Whoever can write to the registry chooses the name of a version, and may not choose the place.
            place = to / (entry.name if is_name(entry.name) else "model")
            folder = Path(shutil.copytree(clinrl_loader.shallow(folder), place, symlinks=True))
    _check_folder(params, entry, folder)
    return folder


def _check_folder(params: Params, entry: Entry, folder: Path) -> None:
    try:
        check_signature(folder, trusted_keys(params))
    except SignatureError as error:
        raise SignatureError(
            f"{error}; `clinrl register {entry.name}` puts the files that are here in their place"
        ) from None
    held = read(folder)
    model = held.task + (FULL_MODEL if held.form == "merged" else "")
    if (model, held.digest) != (entry.model, entry.digest):
        raise RegistryError(
            f"{folder} holds {held.digest[:12]} of {model} and not {entry.digest[:12]} of {entry.model}, which "
            f"{entry.name} is in the registry; run `clinrl register {entry.name}`"
        )


def made_of(entry: Entry) -> Mapping[str, str]:
    """The digests of the inputs of a registered full model, by name.

    They are in its manifest, which the entry's digest covers: somebody who can write to the registry cannot name other
    inputs. Raises ArtefactError if the manifest is missing or malformed, RegistryError if it is another model's.
    """
    with connect() as client, TemporaryDirectory(prefix="clinrl-") as scratch:
        folder = _folder(client, entry, Path(scratch), f"{MERGED}/{MANIFEST}")
        manifest = read_manifest(folder / MERGED)
    if identity(manifest) != entry.digest:
        raise RegistryError(f"{folder} holds another model than {entry.name}; run `clinrl register {entry.name}`")
    return manifest.inputs


def _folder(client: "MlflowClient", entry: Entry, scratch: Path, file: str = "") -> Path:
    """The folder of a registered model: its own in the project's store, or a copy from a server in `scratch`, with
    `file` alone if that names one."""
    source = str(client.get_model_version(entry.model, str(entry.number)).source)
    if file_of(client.tracking_uri) is not None and not source.startswith("models:"):
        folder = beside(client.tracking_uri, source)
    elif (named := re.search(r"m-[0-9a-f]{32}", source)) is None:
        raise RegistryError(f"the files of {entry.name} are said to lie in {source}, which is no logged model")
    else:  # of a server, or registered through one
        model = client.get_logged_model(named[0])
        folder = own_folder(client, model) or download(client, model, scratch, file)
    if not folder.is_dir():
        raise RegistryError(
            f"the files of {entry.name} are not in {folder}; run `clinrl register {entry.name}`, to put them back"
        )
    return folder


def tag(entry: Entry, tags: Mapping[str, str]) -> None:
    """Set tags of a version; other tags stay. Raises RegistryError, for example if the version is gone."""
    with connect() as client:
        for key, value in tags.items():
            client.set_model_version_tag(entry.model, str(entry.number), key, value)


def point(model: str, alias: str, entry: Entry | None) -> None:
    """Move an alias to a version, or remove it (None). Raises RegistryError; the alias then stays."""
    _check(model, "a registered model")
    _check(alias, "an alias")
    with connect() as client:
        if entry is None:
            client.delete_registered_model_alias(model, alias)
        else:
            client.set_registered_model_alias(model, alias, str(entry.number))


def _check(name: str, what: str) -> None:
    if not NAME.fullmatch(name):
        raise RegistryError(f"{format_value(name)} is not {what}: names match {NAME.pattern}")


def _where(made: Recorded) -> str:
    """The search for the versions with a digest."""
    return f"name='{made.model.registered}' and tags.{DIGEST}='{made.digest}'"


def _version(client: "MlflowClient", run: "Run", model: "LoggedModel", made: Recorded) -> "ModelVersion":
    """The model version with this digest, created if there is none, with every tag.

    Two machines that create it at once both end up with the older one. Raises RegistryError if the version has the
    files of a logged model that is not there: MLflow cannot change that.
    """
    where, tags = _where(made), _tags(made)
    if not (found := _versions(client, where)):
        if _aliases(client, made.model.registered) is None:
            _create_model(client, made)
        own = file_of(client.tracking_uri) is not None
        mine = client.create_model_version(
            made.model.registered,
            # Resolving the model's own URI would ask MLflow's global store, which need not be this one.
            source=model.artifact_location if own else f"models:/{model.model_id}",
            run_id=run.info.run_id,
            model_id=model.model_id,
            tags=tags,
            description=made.why,
        )
        found = _versions(client, where)
        if int(found[0].version) != int(mine.version):
            client.delete_model_version(made.model.registered, mine.version)
        if own:
            named = [{"name": made.model.registered, "version": int(found[0].version)}]
            client.set_logged_model_tags(model.model_id, {"mlflow.modelVersions": json.dumps(named)})
    version = found[0]
    # Of two machines that registered at once, each may have named its own.
    if not any(one.model_id in str(version.source) for one in logged_models(client, model.experiment_id, made.digest)):
        raise RegistryError(
            f"version {version.version} of {version.name} has the files of another logged model than "
            f"{model.model_id}, perhaps of one that was deleted in MLflow; delete that version there and give "
            f"`clinrl register {made.model.name}` again"
        )
    for key, value in tags.items():
        if key not in version.tags or (key in RENEWED and version.tags[key] != value):
            client.set_model_version_tag(made.model.registered, version.version, key, value)
    return client.get_model_version(made.model.registered, version.version)


def _create_model(client: "MlflowClient", made: Recorded) -> None:
    from mlflow.exceptions import MlflowException

    what = "LoRA adapters" if made.is_adapter else "Full models"
    note = f"{what} of the clinrl task {made.model.task.name}. Research only, synthetic data."
    try:
        client.create_registered_model(made.model.registered, description=note)
    except MlflowException:  # somebody else may have been quicker
        if _aliases(client, made.model.registered) is None:
            raise


def _tags(made: Recorded) -> dict[str, str]:
    merged = [part for part in made.manifest.inputs if part != "base"]
    return {
        "version": made.model.name,
        "parent": str(made.model.parent) if "parent" in made.manifest.inputs else ", ".join(merged),
        DIGEST: made.digest,
        **origin(made.manifest),
        "exam_digest": next(iter(made.reports.values())).exam_digest,
        "git_revision": _revision(),
        "task_version": str(made.manifest.task_version),
        **made.tags,
    }


def origin(manifest: Manifest) -> dict[str, str]:
    """The tags that follow from a manifest: digests of the base, of data if any, and of the parent or merged parts."""
    inputs = dict(manifest.inputs)
    tags = {f"{what}_digest": inputs.pop(what) for what in ("base", "data") if what in inputs}
    return tags | {"parent_digest": ", ".join(inputs.values())}


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
    """The complete versions that match `where`, oldest first."""
    found = list(page := client.search_model_versions(where, max_results=1000))
    while page.token:
        found += (page := client.search_model_versions(where, max_results=1000, page_token=page.token))
    return sorted((version for version in found if _is_complete(version)), key=lambda version: int(version.version))


def _is_complete(version: "ModelVersion") -> bool:
    """Whether a version is finished, and was registered by clinrl: others in MLflow lack its tags or a name there."""
    is_ours = {DIGEST, "version"} <= version.tags.keys() and is_name(version.tags["version"])
    return bool(version.status == "READY" and is_ours)


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
