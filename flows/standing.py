"""How a version stands: whether the registry has it, whether it is the champion, and whether that is settled."""

from typing import TYPE_CHECKING

from clinrl import artefacts, ledger, paths
from clinrl.artefacts import identity, read_manifest
from clinrl.errors import ArtefactError, RegistryError
from clinrl.evaluate import load_report

if TYPE_CHECKING:
    from clinrl.params import Params


def is_registered(params: "Params", name: str) -> bool:
    """Whether the version or full model that is on the disk is in the registry, with nothing left to be filled in."""
    from clinrl import registry
    from clinrl.recording import MERGED
    from clinrl.tracking import asked

    folds = params.merges.folds
    model = folds[name].task + MERGED if name in folds else params.versions[name].task
    folder = paths.merged(name) if name in folds else paths.adapter(name)
    try:
        entry, report = registry.find(model, name), load_report(name, next(iter(params.modes)))
        about = entry.digest, entry.tags.get("exam_digest")
        if about != (identity(read_manifest(folder)), report.exam_digest):
            return False
        with asked() as client:  # a run that is not finished belongs to a registration that was killed
            return bool(client.get_run(entry.run_id).info.status == "FINISHED")
    except (ArtefactError, RegistryError):
        return False


def is_champion(params: "Params", version: str) -> bool:
    """Whether the registered version of this name holds the champion's alias."""
    from clinrl import registry

    champion = registry.holder(params.versions[version].task, registry.CHAMPION)
    return champion is not None and champion.digest == identity(read_manifest(paths.adapter(version)))


def settled(params: "Params", version: str) -> str | None:
    """What became of a registered version, in words; None if it is not the champion and nobody has decided yet.

    A decision counts against the champion that there is now. A no holds until a person starts a release; so does the
    silence of a day, or the same question would come back every week.
    """
    from clinrl import registry

    task = params.versions[version].task
    mine, champion = registry.find(task, version).digest, registry.holder(task, registry.CHAMPION)
    if champion is not None and champion.digest == mine:
        return f"{version} is the champion"
    lines = ledger.read(paths.ledger())
    asked = {
        artefacts.digest(line.body): line.body
        for line in lines
        if line.kind == "decision"
        and (line.body["candidate_digest"], line.body["champion_digest"]) == (mine, champion and champion.digest)
    }
    for line in reversed(lines):
        body = line.body
        if line.kind == "rollback" and body["from"]["digest"] == mine:
            return f"{version} was rolled back by {body['approver']}"
        if line.kind == "promotion" and body["digest"] == mine:
            return f"{version} gave way to {champion.name}" if champion else None
        if line.kind == "refusal" and body["decision"] in asked:
            return f"{version} was not approved ({body['reason']}); `python -m flows.release {version}` asks again"
        if line.kind == "decision" and body in asked.values():
            return None if body["promote"] else f"{version} was refused by its gate"
    return None
