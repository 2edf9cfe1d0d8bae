"""The release status of a version or a merge: whether it is registered or champion, and how its release ended."""

from collections.abc import Sequence
from typing import Any

from clinrl import artifacts, paths
from clinrl.artifacts import identity, identity_of, read_manifest
from clinrl.config.params import Params, load_params
from clinrl.config.schema import DataSpec, VersionSpec
from clinrl.errors import ArtefactError, GateError, ParamsError, RegistryError
from clinrl.evaluation.answers import load_report
from clinrl.registry import versions
from clinrl.registry.versions import Entry
from clinrl.release import audit_log
from clinrl.release.moves import check_approved, check_turn, decisions_on, holder_after, moves, recorded_champion
from clinrl.tracking.mlflow_store import connect, finished_run, run_key

REFUSED_BY_GATE = "was refused by its gate"
"""The end of the sentence on a version whose gate refused it."""


def check_unchanged(params: Params, name: str) -> None:
    """Refuse to go on if the entries of a version or a merge in params.yaml changed since. Raises ParamsError."""

    def settings(of: Params) -> dict[str, Any]:
        found: dict[str, Any] = {"scale": of.scale, "modes": of.modes, f"merges: {name}": of.merges.all.get(name)}
        for version in params.family(name):
            spec = params.versions[version]
            found[f"versions.{version}"] = _recorded(of.versions.get(version))
            found[f"profiles.{spec.profile}"] = of.profiles.get(spec.profile)
            for section in ("bases", "gates", "plans"):
                found[f"{section}.{spec.task}"] = getattr(of, section).get(spec.task)
            for data in (spec.data, spec.exam):
                found[f"data set {data}"] = _recorded(of.all_data.get(data))
        return found

    now = settings(load_params())
    for key, before in settings(params).items():
        if before != now[key]:
            raise ParamsError(
                f"params.yaml was edited while this ran: {key} has changed, so {name} is not released; "
                "the same command starts with what it says now"
            )


def _recorded(spec: VersionSpec | DataSpec | None) -> dict[str, Any] | None:
    """A block without its `why` and its file name, which change nothing: the model excludes the file name itself."""
    return None if spec is None else spec.model_dump(exclude={"why"})


def is_registered(params: Params, name: str) -> bool:
    """Whether the registry has the version or merge that is on the disk, with its registration complete."""
    try:
        model = params.model(name)
        manifest = read_manifest(model.folder)
        mine = identity(manifest)
        entry = versions.find(model.registered, name, digest=mine)
        reports = {mode: load_report(name, mode) for mode in params.modes}
        if (entry.digest, entry.tags.get(versions.EXAMINED)) != (mine, versions.reports_digest(reports)):
            return False
        with connect() as client:  # a run that is not finished belongs to a registration that was killed
            return finished_run(client, model.task.name, run_key(manifest)) is not None
    except (ArtefactError, RegistryError):
        return False


def is_champion(params: Params, name: str) -> bool:
    """Whether the version or merge that is on the disk is the champion of its registered model."""
    champion = versions.holder(params.model(name).registered, versions.CHAMPION)
    return champion is not None and champion.digest == _digest(params, name)


def check_servable(params: Params, entry: Entry, alias: str, lines: Sequence[audit_log.Entry] | None = None) -> None:
    """Refuse to serve a version as `champion` that nobody approved, or as `candidate` that was refused or had a waiver.

    Anybody who can write to the registry may move an alias. `lines`: of the audit log; None reads them. Raises
    GateError, SignatureError if no approver signed, or as `audit_log.read` and `versions.made_of`.
    """
    lines = audit_log.lines(params) if lines is None else lines
    if alias == versions.CANDIDATE:
        is_refused = any(not body["promote"] for body in decisions_on(entry.digest, lines)[-1:])
        if is_refused or entry.tags.get(versions.GATE) == versions.REFUSED or "waiver" in entry.tags:
            raise GateError(f"{entry.name} was refused by its gate, or trained on a waiver, and is no candidate")
        return
    if recorded_champion(entry.model, lines) != entry.digest:
        raise GateError(
            f"{entry.name} is the champion of {entry.model} by name only: {paths.AUDIT_LOG} knows of no approval "
            "that made it so"
        )
    check_approved(params, entry, moves(entry.model, lines)[-1], lines)
    check_turn(entry.model, lines)


def outcome(params: Params, name: str) -> str | None:
    """A sentence on how the release of a registered version or merge ended; None if it is still open.

    Only decisions against the present champion count. A refusal holds until a person starts a release; so does a day
    without an answer, or the same question would come back every week.
    """
    model = params.model(name).registered
    mine, champion = _digest(params, name), versions.holder(model, versions.CHAMPION)
    if champion is not None and champion.digest == mine:
        return f"{name} is the champion of {model}"
    lines = audit_log.lines(params)
    decisions = {
        artifacts.digest(body): body
        for body in decisions_on(mine, lines)
        if body["champion_digest"] == (champion and champion.digest)
    }
    for turn in reversed(moves(model, lines)):
        if turn.kind == "rollback" and turn.body["from"]["digest"] == mine:  # a later decision is no approval
            return f"{name} was rolled back by {turn.body['approver']}"
        if holder_after(turn) == mine:
            break
    for line in reversed(lines):
        body = line.body
        if line.kind == "promotion" and body["digest"] == mine:
            return f"{name} gave way to {champion.name}" if champion else None
        if line.kind == "refusal" and body["decision"] in decisions:
            return f"{name} was not approved ({body['reason']}); `python -m flows release {name}` asks again"
        if line.kind == "decision" and body in decisions.values():
            return None if body["promote"] else f"{name} {REFUSED_BY_GATE}"
    return None


def _digest(params: Params, name: str) -> str:
    return identity_of(params.model(name).folder)
