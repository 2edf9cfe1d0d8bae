"""Release: a candidate is decided upon, approved by a person, and takes the champion's name.

A version or a merge; adapters and full models have a champion each.

What is decided is written to the audit file before anything is renamed, and what was renamed after it. A promotion
holds only for the adapter, and against the champion, that its decision was about; without a decision and a named
approver nothing moves.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clinrl import artefacts, gate, ledger, paths, registry
from clinrl.dataset import read_cases
from clinrl.errors import ArtefactError, GateError
from clinrl.evaluate import examinee, load_sitting, sitting_of
from clinrl.gate import Decision
from clinrl.probe import proven
from clinrl.records import Case
from clinrl.registry import CANDIDATE, CHAMPION, Entry
from clinrl.report import Sitting

if TYPE_CHECKING:
    from clinrl.params import Params

PREVIOUS = "previous"
APPROVER = re.compile(r"[^\x00-\x1f\x7f]{2,80}")
"""A person's name as it goes into tags and the audit file."""


def decide(params: "Params", name: str) -> Decision:
    """Hold the task's gate against the exam of a registered version or merge; say so in the audit file and its tags.

    The same question has one line in the audit file, however often it is asked. Raises GateError if the task has no
    gate, RegistryError if the version was never registered, and ArtefactError if it and the champion did not sit the
    same exam in the same modes.
    """
    model = registry.model_of(params, name)
    entry = registry.find(model, name)
    decision = judge(params, name, registry.holder(model, CHAMPION))
    if entry.digest != decision.candidate_digest:
        raise GateError(
            f"the answers of {name} are not those of the {name} that is registered; run `clinrl register {name}` first"
        )
    body = decision.model_dump(mode="json")
    ledger.append(paths.ledger(), "decision", body, unless=lambda lines: any(line.body == body for line in lines))
    registry.tag(entry, {"gate": "passed" if decision.promote else "refused", "decision": artefacts.digest(body)})
    if not decision.promote and CANDIDATE in entry.aliases:
        registry.point(model, CANDIDATE, None)
    return decision


def judge(params: "Params", name: str, champion: Entry | None) -> Decision:
    """The decision on a version or a merge, from graded answers. Writes nothing; raises as `decide` does."""
    who = examinee(params, name)
    if who.task.name not in params.gates:
        raise GateError(f"params.yaml has no gate for {who.task.name}, and without one nothing is released; add one")
    cases = list(read_cases(paths.cases(who.exam), who.task))
    exam = proven(who.exam, who.task)
    blank = {mode: sitting_of(who, mode, params, exam, cases) for mode in params.modes}
    mine = {mode: load_sitting(name, like, cases) for mode, like in blank.items()}
    theirs = {mode: _champions(champion, like, cases) for mode, like in blank.items()} if champion else None
    return gate.decide(
        who.task,
        params.gates[who.task.name],
        params.scale,
        mine,
        theirs,
        model=registry.model_of(params, name),
        digests=(_answered_by(name), champion.digest if champion else None),
    )


def promote(params: "Params", name: str, *, approver: str, decision: Decision) -> Entry:
    """Make a version or a merge the champion of its registered model, and the champion before it `previous`.

    Promoting the champion again changes nothing. Raises GateError if the decision is negative, is about another
    adapter, or was made against another champion than there now is, or if `approver` is no name; Busy if another
    promotion is under way. The champion is then what it was.
    """
    model = registry.model_of(params, name)
    who = named(approver)
    with artefacts.exclusive(_lock(model)):
        entry = registry.find(model, name)
        if not decision.promote:
            raise GateError(f"{name} may not be promoted: {decision.reasons[0]}")
        if (decision.candidate, decision.candidate_digest) != (name, entry.digest):
            raise GateError(f"the decision is about another adapter than the {name} that is registered; decide again")
        before = registry.holder(model, CHAMPION)
        if before is not None and before.digest == entry.digest:
            _record("promotion", entry, decision, who)  # a kill may have come before the line was written
            return entry
        if (before.digest if before else None) != decision.champion_digest:
            now = before.name if before else "nobody"
            raise GateError(f"{now} became the champion of {model} after the decision on {name}; decide again")
        _record("approval", entry, decision, who)
        digest = artefacts.digest(decision.model_dump(mode="json"))
        registry.tag(entry, {"approver": who, "decision": digest, "gate": "passed"})
        if before is not None:
            registry.point(model, PREVIOUS, before)
        registry.point(model, CHAMPION, entry)
        if (candidate := registry.holder(model, CANDIDATE)) is not None and candidate.digest == entry.digest:
            registry.point(model, CANDIDATE, None)
        _record("promotion", entry, decision, who)
        return registry.find(model, name)


def refuse(params: "Params", name: str, decision: Decision, reason: str) -> None:
    """Write down that a version or a merge was not approved: a no, or no answer in time. The champion stays."""
    digest = artefacts.digest(decision.model_dump(mode="json"))
    body = {"model": decision.model, "version": name, "decision": digest, "reason": reason}
    ledger.append(paths.ledger(), "refusal", body)


def rollback(model: str, *, approver: str) -> Entry:
    """Make the previous champion the champion again, and the champion `previous`, so that a second call undoes it.

    Raises GateError if there is no previous champion or `approver` is no name, and Busy as `promote` does.
    """
    who = named(approver)
    with artefacts.exclusive(_lock(model)):
        now, before = registry.holder(model, CHAMPION), registry.holder(model, PREVIOUS)
        if now is None or before is None:
            raise GateError(f"{model} has no {CHAMPION if now is None else PREVIOUS} to roll back from or to")
        if now.digest == before.digest:
            raise GateError(f"{model} has {now.name} as champion and as previous; there is nothing to roll back to")
        registry.point(model, CHAMPION, before)
        registry.point(model, PREVIOUS, now)
        registry.tag(before, {"approver": who})
        body = {"model": model, "from": _name(now), "to": _name(before), "approver": who}
        ledger.append(paths.ledger(), "rollback", body)
        return registry.find(model, before.name)


def named(approver: str) -> str:
    """A person's name, trimmed. Raises GateError for an empty one or one with control characters: silence is no."""
    name = approver.strip()
    if not APPROVER.fullmatch(name):
        raise GateError("a promotion needs the name of the person who approves it, 2 to 80 characters; nothing moved")
    return name


def _record(kind: ledger.Kind, entry: Entry, decision: Decision, approver: str) -> None:
    """Write an approval or a promotion; a promotion that the audit file tells of already is not told again."""
    digest = artefacts.digest(decision.model_dump(mode="json"))
    body: dict[str, Any] = {"model": decision.model, **_name(entry), "decision": digest, "approver": approver}

    def told(lines: Sequence[ledger.Entry]) -> bool:
        return kind == "promotion" and _holder_told(decision.model, lines) == entry.digest

    ledger.append(paths.ledger(), kind, body, unless=told)


def _holder_told(model: str, lines: Sequence[ledger.Entry]) -> str | None:
    """Whose adapter the champion is by the audit file: the last promotion, or where a rollback went to."""
    for line in reversed(lines):
        if line.body.get("model") == model and line.kind in ("promotion", "rollback"):
            held = line.body if line.kind == "promotion" else line.body["to"]
            return str(held["digest"])
    return None


def _name(entry: Entry) -> dict[str, Any]:
    return {"version": entry.name, "number": entry.number, "digest": entry.digest}


def _champions(champion: Entry, like: Sitting, cases: Sequence[Case]) -> Sitting:
    """The champion's answers, which must be those of the adapter that holds the name. Raises ArtefactError if not."""
    if _answered_by(champion.name) != champion.digest:
        raise ArtefactError(
            f"{paths.graded(champion.name)} was answered by another adapter than the champion; run "
            f"`dvc repro evaluate@{champion.name}` with the champion's own parameters"
        )
    return replace(load_sitting(champion.name, like, cases), name=champion.name)


def _answered_by(name: str) -> str:
    """Identity of the model whose answers are kept under a name."""
    return artefacts.read_manifest(paths.graded(name)).inputs["adapter"]


def _lock(model: str) -> Path:
    return Path("registry") / "champion" / model
