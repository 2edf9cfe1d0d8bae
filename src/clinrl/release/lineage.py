"""Where a version comes from, link by link, and whether each link still holds.

The links lead from the adapter's files over its parents to the base, with the data, the exam, the gate and the approver
on the way. Everything is read from files, dvc.lock, the registry and the audit log; where two of them state the same
fact, they must agree. Nothing is rebuilt and no model is loaded.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn

from clinrl import artifacts, paths
from clinrl.config.model import Model
from clinrl.config.params import Params
from clinrl.data.dataset import is_import, read_cases
from clinrl.errors import ArtefactError, Refused, Unregistered
from clinrl.evaluation import error_analysis
from clinrl.evaluation.evaluate import check_apart
from clinrl.models import bases
from clinrl.provenance import lock, statements
from clinrl.registry import versions
from clinrl.release import audit_log
from clinrl.release.moves import against_others, check_approved, decisions_on, moves, recorded_champion
from clinrl.release.standing import check_servable
from clinrl.tracking.mlflow_store import place, store
from clinrl.types import Manifest, Strict

State = Literal["holds", "broken", "absent", "unrecorded", "open"]
"""absent: a recorded file is not here, as in a clone. unrecorded: dvc.lock has no run that made it, or nobody signed
one. open: there is nothing to check yet, such as the approver of a version that nobody promoted."""


class Unchecked(Refused):
    """The reason why a link cannot be checked, and the link's state."""

    def __init__(self, state: State, sentence: str) -> None:
        super().__init__(sentence)
        self.state = state


class Link(Strict):
    """One statement about a version that can be checked."""

    version: str
    link: str
    """The subject: files, parent (of a merge, each version that it is made of), base, data, exam, resit, mining, lock,
    provenance, registry, gate or approver."""
    state: State
    digest: str
    """The digest that the link is about; empty where there is none."""
    says: str
    """A sentence that says what holds, or what is broken and what to do."""


def walk(params: Params, name: str) -> list[Link]:
    """Every link of a version or a merge, then those of the versions that it was made from, then those of its release.

    A broken link is returned as a `Link`, never raised. Raises ParamsError for an unknown name.
    """
    before = dict.fromkeys(version for part in params.parts(name) for version in reversed(params.lineage(part)))
    links = [link for made in dict.fromkeys([name, *before]) for link in _links_of(params, made)]
    return [*links, *_release_links(params, name)]


def _links_of(params: Params, name: str) -> Iterator[Link]:
    model = params.model(name)
    files = _link(name, "files", _check_files, model)
    yield files
    if files.state != "holds":  # every other link reads these files
        return
    made, base = artifacts.read_manifest(model.folder), paths.base(model.task.name)
    if name in params.versions:
        block = params.versions[name]
        start = f"starts from the weights of {block.parent}"
        yield _link(name, "parent", _check_same, made, "parent", paths.adapter(block.parent), start)
        if block.parent == f"{model.task.name}-base":
            yield _link(name, "base", _check_base, made, base)
        else:
            yield _link(name, "base", _check_same, made, "base", base, f"was trained on {base}")
        yield _link(name, "data", _check_data, made, block.data)
    else:
        for part in params.parts(name):
            yield _link(name, "parent", _check_same, made, part, paths.adapter(part), f"is made of {part}")
        yield _link(name, "base", _check_same, made, "base", base, f"is a model on {base}")
    identity = artifacts.identity(made)
    yield _link(name, "exam", _check_exam, params, model, identity, paths.graded(name), model.stage)
    if name in params.resits:
        yield _link(name, "resit", _check_resit, params, model, identity)
    if name in params.mining:
        yield _link(name, "mining", _check_mined, params, name)
    yield _link(name, "lock", _check_lock, params, model)
    yield _link(name, "provenance", _check_provenance, model)
    yield _link(name, "registry", _check_registered, params, name, made)


def _check_files(model: Model) -> tuple[str, str]:
    folder = model.folder
    if not folder.exists():
        made = f"`dvc repro {model.stage}`, which makes it"
        raise Unchecked("absent", f"{folder} is not here; run `dvc checkout`, `dvc pull`, or {made}")
    manifest = artifacts.verified(folder)
    says = f"{len(manifest.files)} files of {folder} are what they were when it was made"
    return artifacts.identity(manifest), says


def _check_lock(params: Params, model: Model) -> tuple[str, str]:
    """Check that the outputs of a version that are here are what dvc.lock records, made of what it records.

    Outputs of other versions belong to the links of those versions.
    """
    facts = _recorded(params, model.name, model.stage)
    digest = artifacts.digest({fact.path: fact.md5 for fact in facts})
    return digest, f"{len(facts)} outputs are what dvc.lock records, each made of what it records"


def _recorded(params: Params, name: str, target: str) -> list[lock.Fact]:
    """The facts of all that a stage of `name` follows from, without the stages of other versions and merges.

    Raises Refused for a fact that fails.
    """
    others = {*params.versions, *params.merges.all} - {name}
    try:
        recorded = lock.read()
    except ArtefactError as error:
        raise Unchecked("unrecorded", str(error)) from None
    facts = [fact for fact in lock.facts(recorded, target) if fact.stage.partition("@")[2] not in others]
    found = {fact.state: fact for fact in reversed(facts)}  # the first of each state
    if "altered" in found:
        raise Refused(found["altered"].sentence)
    for state in ("unrecorded", "absent"):
        if state in found:
            raise Unchecked(state, found[state].sentence)
    return facts


def _check_provenance(model: Model) -> tuple[str, str]:
    """Check that each stage of a version has a signed statement of its inputs and outputs; cached ones may lack it."""
    stages: list[str] = []
    with suppress(ArtefactError):  # which `_check_lock` reports
        stages = lock.ancestors(lock.read(), model.stage)
    own = [stage for stage in stages if stage.partition("@")[2] == model.name]
    found = {address for address, _ in statements.of_stages(stages)}  # raises for a statement that was altered
    missing = [stage for stage in own if stage not in found]
    if missing or not own:
        made = missing or [model.stage]
        mend = f"`dvc repro --force --single-item {' '.join(made)}` would"
        if artifacts.read_manifest(model.folder).spec.get("scale") == "full":  # which may not be trained again alike
            mend = f"who ran them has what they signed in {statements.FOLDER}"
        raise Unchecked("unrecorded", f"nobody here signed what {', '.join(made)} made; {mend}")
    return artifacts.digest(own), f"{len(own)} stages were signed by who ran them"


def _check_same(manifest: Manifest, what: str, folder: Path, sentence: str) -> tuple[str, str]:
    """The digest of an input in a manifest, and `sentence`. Raises Refused if the folder has another digest."""
    if not folder.exists():
        raise Unchecked("absent", f"{folder} is not here; run `dvc checkout`, `dvc pull` or `dvc repro`")
    named, found = manifest.inputs[what], artifacts.identity(artifacts.verified(folder))
    if named != found:
        raise Refused(
            f"{manifest.name} was made from another {what} ({named[:12]}) than {folder} now holds ({found[:12]}); "
            "run `dvc checkout`, or `dvc repro` for a new one"
        )
    return found, sentence


def _check_base(manifest: Manifest, base: Path) -> tuple[str, str]:
    found, _ = _check_same(manifest, "base", base, "")
    if named := bases.reference(base):
        return found, f"was trained on {named['repo']} at commit {named['commit']}"
    rebuilds = f"`clinrl verify base@{base.name}` rebuilds it"
    return found, f"was trained on {base}, which is built here; {rebuilds}"


def _check_data(manifest: Manifest, data: str) -> tuple[str, str]:
    found, _ = _check_same(manifest, "data", paths.cases(data), "")
    proof = paths.data_proof(data)
    stage = "validate-import" if is_import(paths.cases(data)) else "validate"
    if not proof.exists() or json.loads(proof.read_text(encoding="utf-8"))["data"]["identity"] != found:
        raise Refused(f"{proof} is not the proof of {data} as it is now; run `dvc repro {stage}@{data}`")
    pool = artifacts.read_manifest(paths.cases(data)).spec["use"]
    if pool != "train":
        raise Refused(f"{data} is drawn from the {pool} pool, but {manifest.name} trained on it; it must be train data")
    how = "imported for" if is_import(paths.cases(data)) else "drawn from"
    return found, f"was trained on {data}, {how} the {pool} pool and validated"


def _check_exam(params: Params, model: Model, adapter: str, answers: Path, stage: str) -> tuple[str, str]:
    name, exam = model.name, model.exam
    for folder in (answers, paths.cases(exam)):
        if not folder.exists():
            raise Unchecked("absent", f"{folder} is not here; run `dvc checkout`, or `dvc repro {stage}`")
    graded = artifacts.verified(answers)
    found = artifacts.identity_of(paths.cases(exam))
    if graded.inputs["adapter"] != adapter:
        raise Refused(f"{answers} was answered by another model; run `dvc repro {stage}`")
    if graded.inputs["exam"] != found:
        raise Refused(f"{answers} answers another exam than {exam} now is; run `dvc repro {stage}`")
    pool = artifacts.read_manifest(paths.cases(exam)).spec["use"]
    if pool != "exam":
        raise Refused(f"{exam} is drawn from the {pool} pool, so it is no exam of {name}")
    if exam not in params.imports:
        return found, f"took {exam}, drawn from the exam pool, with these very weights"
    check_apart(params, model, list(read_cases(paths.cases(exam), model.task)))
    says = "imported, with these very weights, and shares no known patient and no text with their training data"
    return found, f"took {exam}, {says}"


def _check_resit(params: Params, model: Model, adapter: str) -> tuple[str, str]:
    """Check the champion's answers to the exam that it takes besides its own, with which the gate compares."""
    stage, fresh = f"resit@{model.name}", replace(model, exam=params.resits[model.name].data)
    _recorded(params, model.name, stage)
    return _check_exam(params, fresh, adapter, paths.resit(model.name), stage)


def _check_mined(params: Params, name: str) -> tuple[str, str]:
    data = params.mining[name].data
    if not paths.mine_report(name).exists():
        raise Unchecked("open", "has no mined errors yet")
    if not paths.cases(data).exists():
        raise Unchecked("absent", f"{paths.cases(data)} is not here; run `dvc repro dataset@{data}`, which draws it")
    found = error_analysis.read_report(params, name).data_digest
    how = "imported for" if data in params.imports else "drawn from"
    return found, f"had its errors mined on {data}, {how} the mine pool and no exam"


def _check_registered(params: Params, name: str, manifest: Manifest) -> tuple[str, str]:
    """Check that the registry holds a version as it was signed. The link of a version never registered is open."""
    model, digest = params.model(name).registered, artifacts.identity(manifest)
    try:
        entry = versions.find(model, name, digest=digest)
    except Unregistered:
        lines, register = audit_log.lines(params), f"`clinrl register {name}`"
        if not decisions_on(digest, lines):
            raise Unchecked("open", f"is not registered in {place(store())}; {register} does it") from None
        if recorded_champion(model, lines) == digest:
            register += f", then `clinrl promote {name} --approver NAME`, since the audit log says that it is champion"
        raise Refused(f"the registry has lost {name}, but {paths.AUDIT_LOG} has it; run {register}") from None
    if entry.digest != digest:
        raise Refused(
            f"the {name} in the registry is another model ({entry.digest[:12]}); run `clinrl register {name}`"
        )
    for tag, expected in versions.origin(manifest).items():
        if entry.tags.get(tag) != expected:
            raise Refused(f"the registry's tag {tag} of {name} is not what its manifest says; register it again")
    versions.check_intact(params, entry)
    names = f", {', '.join(entry.aliases)}" if entry.aliases else ""
    return digest, f"is version {entry.number} of the registered model {entry.model}{names}"


def _release_links(params: Params, name: str) -> Iterator[Link]:
    model, folder = params.model(name).registered, params.model(name).folder
    state: State = "broken"
    try:
        lines = audit_log.lines(params)
        audit_log.check_committed(paths.AUDIT_LOG)
        state = "broken" if (folder / artifacts.MANIFEST).exists() else "absent"
        digest = artifacts.identity_of(folder)
    except Refused as refused:
        yield Link(version=name, link="gate", state=state, digest="", says=str(refused))
        return
    decisions = decisions_on(digest, lines)
    if not decisions:
        yield _link(name, "gate", _check_undecided, model, name, digest)
        return
    yield _link(name, "gate", _check_decided, model, name, digest, decisions)
    yield _link(name, "approver", _check_approved, params, name, digest, lines)


def _check_undecided(model: str, name: str, digest: str) -> NoReturn:
    champion = versions.holder(model, versions.CHAMPION)
    if champion is not None and champion.digest == digest:
        raise Refused(
            f"{name} is the champion of {model}, and {paths.AUDIT_LOG} knows of no decision on it; restore it from git"
        )
    entry = versions.by_digest(model, digest)
    if entry is not None and "decision" in entry.tags:
        raise Refused(
            f"the registry knows of a decision on {name}, and {paths.AUDIT_LOG} does not; merge the branch of the "
            f"retraining that decided, restore the file from git, or run `clinrl decide {name}`"
        )
    raise Unchecked("open", "was never decided upon")


def _check_decided(model: str, name: str, adapter: str, decisions: Sequence[dict[str, Any]]) -> tuple[str, str]:
    known = {artifacts.digest(body): body for body in decisions}
    digest = versions.find(model, name, digest=adapter).tags.get("decision", "")
    if digest not in known:
        raise Refused(f"the registry's tag decision of {name} is none of the audit log's; run `clinrl decide {name}`")
    body = known[digest] if known[digest]["champion_digest"] != adapter else against_others(decisions)[-1]
    measured = [finding for finding in body["findings"] if finding["observed"] is not None]
    named = [
        finding
        for finding in measured
        if not finding["passed"] or (body["promote"] and not finding["limit"].startswith("above "))
    ]
    numbers = [
        f"{finding['metric']} ({finding['mode']}) {finding['observed']:.4g} for {finding['limit']}" for finding in named
    ]
    if body["promote"] and (beaten := len(measured) - len(named)):
        numbers.append(f"{beaten} comparisons with simple policies")
    return artifacts.digest(body), f"{'passed' if body['promote'] else 'was refused by'} the gate: {', '.join(numbers)}"


def _check_approved(params: Params, name: str, digest: str, lines: Sequence[audit_log.Entry]) -> tuple[str, str]:
    """Check that an approver signed the champion's last move, or else a version's last promotion, and that registry and
    audit log name one champion."""
    model = params.model(name).registered
    entry = versions.find(model, name, digest=digest)
    promotions = [line for line in lines if line.kind == "promotion" and line.body.get("digest") == digest]
    promotion = promotions[-1] if promotions else None
    is_named, is_recorded = versions.CHAMPION in entry.aliases, recorded_champion(model, lines) == digest
    if is_named != is_recorded:
        raise Refused(
            f"{name} is {'' if is_named else 'not '}the champion of {model} in the registry, but {paths.AUDIT_LOG} "
            "says otherwise: the name was moved by hand, or a release was cut short; give its command again"
        )
    if is_recorded:
        check_servable(params, entry, versions.CHAMPION, lines)  # a rollback may have made it champion
    elif promotion is not None:
        check_approved(params, entry, promotion, lines)
    if promotion is None:
        raise Unchecked("open", "was never promoted")
    tagged, approver = entry.tags.get("approver"), promotion.body["approver"]
    if tagged != approver:
        raise Refused(
            f"the registry names {tagged!r} as approver of {name}, the audit log {approver!r}"
            + f"; `clinrl promote {name} --approver {approver!r}` writes it again" * is_recorded
        )
    move = moves(model, lines)[-1] if is_recorded else promotion
    return move.digest, f"was approved by {move.body['approver']} at {move.at}"


def _link(version: str, link: str, check: Callable[..., tuple[str, str]], *about: Any) -> Link:
    """The link that a check returns as a digest and a sentence, or the reason why it does not hold."""
    state: State = "broken"
    digest = ""
    try:
        digest, sentence = check(*about)
        state = "holds"
    except Unchecked as unchecked:
        state, sentence = unchecked.state, str(unchecked)
    except Refused as refused:
        sentence = str(refused)
    except (LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
        sentence = f"the record is malformed: {error!r}"
    return Link(version=version, link=link, state=state, digest=digest, says=sentence)
