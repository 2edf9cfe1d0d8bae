"""Release: a candidate is decided upon, approved by a person, and takes the champion's name.

A version or a merge; adapters and full models have a champion each.

What is decided is written to the audit file before anything is renamed, and what was renamed after it. A promotion
holds only for the adapter, and against the champion, that its decision was about; without a decision and a named
approver nothing moves.
"""

import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clinrl import artefacts, baselines, gate, ledger, paths, registry
from clinrl.dataset import read_cases
from clinrl.errors import ArtefactError, GateError
from clinrl.evaluate import examinee, load_sitting, unanswered
from clinrl.gate import Decision
from clinrl.recording import waiver
from clinrl.records import Case, Estimate
from clinrl.registry import CANDIDATE, CHAMPION, Entry
from clinrl.report import Sitting
from clinrl.statistics import DIGITS, bootstrap

if TYPE_CHECKING:
    from clinrl.params import Params

PREVIOUS = "previous"
APPROVER = re.compile(r"[^\x00-\x1f\x7f]{2,80}")
"""A person's name as it goes into tags and the audit file."""


def decide(params: "Params", name: str) -> Decision:
    """Hold the task's gate against the exam of a registered version or merge; say so in the audit file and its tags.

    The same question asked again adds no line to the audit file. Raises GateError if the task has no gate,
    RegistryError if the version was never registered, and ArtefactError if it and the champion did not sit the same
    exam in the same modes.
    """
    model = registry.model_of(params, name)
    entry = registry.find(model, name, digest=_answered_by(paths.graded(name)))
    decision = judge(params, name, registry.holder(model, CHAMPION))
    if entry.digest != decision.candidate_digest:
        raise GateError(
            f"the answers of {name} are not those of the {name} that is registered; run `clinrl register {name}` first"
        )
    body = decision.model_dump(mode="json")

    def is_told(lines: Sequence[ledger.Entry]) -> bool:
        told = [line.body for line in lines if line.kind == "decision"]
        return next((b for b in reversed(told) if b["candidate_digest"] == entry.digest), None) == body

    ledger.append(paths.ledger(), "decision", body, unless=is_told)
    registry.tag(entry, {"gate": "passed" if decision.promote else "refused", "decision": artefacts.digest(body)})
    if not decision.promote and CANDIDATE in entry.aliases:
        registry.point(model, CANDIDATE, None)
    return decision


def judge(params: "Params", name: str, champion: Entry | None) -> Decision:
    """The decision on a version or a merge, from graded answers. Writes nothing; raises as `decide` does.

    A full model is held against its version too, since that is what was approved. The simple policies are computed
    here, from the cases of the exam and of the training.
    """
    task = examinee(params, name).task.name
    if task not in params.gates:
        raise GateError(f"params.yaml has no gate for {task}, and without one nothing is released; add one")
    if reason := waiver(params, name):
        raise GateError(f"{name} was trained on a waiver ({reason}) and is never released")
    who, cases, blank = unanswered(params, name)

    def sittings(other: str, folder: Path) -> dict[str, Sitting]:
        return {mode: load_sitting(other, like, cases, folder) for mode, like in blank.items()}

    rivals = {}
    if champion is not None:
        rivals["the champion"] = sittings(champion.name, _champions_answers(champion))
    if name in params.merges.folds:
        version = params.merges.folds[name].version
        rivals[version] = sittings(version, paths.graded(version))
    return gate.decide(
        who.task,
        params.gates[who.task.name],
        params.scale,
        sittings(name, paths.graded(name)),
        rivals,
        baselines.answers(who.task, cases, _training(params, name)),
        model=registry.model_of(params, name),
        digest=_answered_by(paths.graded(name)),
        champion=(champion.name, champion.digest) if champion else (None, None),
    )


def _training(params: "Params", name: str) -> list[Case]:
    """The training cases of a version, or of the versions that a merge is made of: what the bag of words learns from.

    Raises ArtefactError if they are missing or altered.
    """
    data = dict.fromkeys(params.versions[part].data for part in params.parts(name))
    task = examinee(params, name).task
    return [case for one in data for case in read_cases(paths.cases(one), task)]


def gain(params: "Params", name: str) -> Estimate | None:
    """By how much the mean clinical cost of an answer to the exam is below the champion's; None without a champion.

    Both answered the same cases; a case's answers in all modes are averaged, and cases are drawn with replacement for
    the interval. Raises as `decide` does.
    """
    champion = registry.holder(registry.model_of(params, name), CHAMPION)
    if champion is None:
        return None
    who, cases, blank = unanswered(params, name)
    mine, theirs = (
        [load_sitting(other, like, cases, folder) for like in blank.values()]
        for other, folder in ((name, paths.graded(name)), (champion.name, _champions_answers(champion)))
    )

    def cost(sittings: Sequence[Sitting], i: int) -> float:
        gold = who.task.label(cases[i])
        return math.fsum(who.task.cost(gold, sitting.answers[i]) for sitting in sittings) / len(sittings)

    saved = [round(cost(theirs, i) - cost(mine, i), DIGITS) for i in range(len(cases))]
    return bootstrap(lambda _golds, answers: math.fsum(answers) / len(answers), [0] * len(saved), saved)


def promote(params: "Params", name: str, *, approver: str, decision: Decision) -> Entry:
    """Make a version or a merge the champion of its registered model, and the champion before it `previous`.

    Promoting the champion again changes nothing. Raises GateError if the decision is negative, is about another
    adapter, or was made against another champion than there now is, if `approver` is no name, or if the audit file
    does not know how the champion became what it is; Busy if another promotion is under way. The champion is then
    what it was.
    """
    model = registry.model_of(params, name)
    who = named(approver)
    with artefacts.exclusive(_lock(model)):
        entry = registry.find(model, name, digest=decision.candidate_digest)
        if not decision.promote:
            raise GateError(f"{name} may not be promoted: {decision.reasons[0]}")
        if (decision.candidate, decision.candidate_digest) != (name, entry.digest):
            raise GateError(f"the decision is about another adapter than the {name} that is registered; decide again")
        before = registry.holder(model, CHAMPION)
        if before is not None and before.digest == entry.digest:
            return _completed(before)
        if (before.digest if before else None) != decision.champion_digest:
            now = before.name if before else "nobody"
            raise GateError(f"{now} became the champion of {model} after the decision on {name}; decide again")
        digest = artefacts.digest(decision.model_dump(mode="json"))
        body = {"model": model, **_name(entry), "decision": digest, "approver": who}
        ledger.append(paths.ledger(), "approval", body, unless=lambda lines: _last_about(model, lines) == body)
        registry.tag(entry, {"approver": who, "decision": digest, "gate": "passed"})
        _keep_answers(name, entry.digest)
        if before is not None:
            registry.point(model, PREVIOUS, before)
        registry.point(model, CHAMPION, entry)
        return _completed(entry)


def settle(params: "Params", name: str) -> None:
    """Complete the promotion of a champion, if a kill came between its new name and the audit file.

    Raises GateError if nobody approved of this champion: then somebody moved the name by hand.
    """
    model = registry.model_of(params, name)
    with artefacts.exclusive(_lock(model)):
        if (champion := registry.holder(model, CHAMPION)) is not None and champion.name == name:
            _completed(champion)


def _completed(entry: Entry) -> Entry:
    """The champion, after what a kill may have left out: its line in the audit file, and that it is no candidate."""
    model, lines = entry.model, ledger.read(paths.ledger())
    if champion_told(model, lines) != entry.digest:
        approvals = [line.body for line in lines if line.kind == "approval"]
        mine = [body for body in approvals if (body["model"], body["digest"]) == (model, entry.digest)]
        if not mine:
            raise GateError(
                f"{entry.name} is the champion of {model}, but {paths.ledger()} knows of no approval: somebody moved "
                "the name by hand; move it back in MLflow, or give it to nobody, and promote with `clinrl promote`"
            )
        ledger.append(
            paths.ledger(), "promotion", mine[-1], unless=lambda now: champion_told(model, now) == entry.digest
        )
    if (candidate := registry.holder(model, CANDIDATE)) is not None and candidate.digest == entry.digest:
        registry.point(model, CANDIDATE, None)
    return registry.holder(model, CHAMPION) or entry


def refuse(decision: Decision, reason: str) -> None:
    """Write down that a version or a merge was not approved: a no, or no answer in time. The champion stays."""
    digest = artefacts.digest(decision.model_dump(mode="json"))
    body = {"model": decision.model, "version": decision.candidate, "decision": digest, "reason": reason}
    ledger.append(paths.ledger(), "refusal", body)


def rollback(model: str, *, approver: str) -> Entry:
    """Make the previous champion the champion again, and the champion `previous`, so that a second call undoes it.

    The same call completes one that was killed half way. Raises GateError if there is no previous champion, if the
    audit file does not know that it ever was one, or if `approver` is no name; Busy as `promote` does.
    """
    who = named(approver)
    with artefacts.exclusive(_lock(model)):
        now, before = registry.holder(model, CHAMPION), registry.holder(model, PREVIOUS)
        if now is None or before is None:
            raise GateError(f"{model} has no {CHAMPION if now is None else PREVIOUS} to roll back from or to")
        lines = ledger.read(paths.ledger())
        if (_last_about(model, lines) or {}).get("digest") == now.digest:  # a promotion, perhaps cut short at its end
            now = _completed(now)
            lines = ledger.read(paths.ledger())
        told = champion_told(model, lines)
        if told not in (None, now.digest):  # the names moved, wholly or in part, and the audit file was not told
            former = next((entry for entry in registry.entries(model) if entry.digest == told), None)
            if former is None:
                raise GateError(
                    f"{model} has lost the version that was champion by {paths.ledger()}; register it again"
                )
            now, before = former, now
        if now.digest == before.digest:
            raise GateError(f"{model} has {now.name} as champion and as previous; there is nothing to roll back to")
        if before.digest not in _champions_told(model, lines):
            raise GateError(f"{before.name} is the previous champion of {model} by name only: nobody ever approved it")
        registry.point(model, CHAMPION, before)
        registry.point(model, PREVIOUS, now)
        body = {"model": model, "from": _name(now), "to": _name(before), "approver": who}
        ledger.append(paths.ledger(), "rollback", body)
        return registry.holder(model, CHAMPION) or before


def named(approver: str) -> str:
    """A person's name, trimmed. Raises GateError for an empty one or one with control characters: silence is no."""
    name = approver.strip()
    if not APPROVER.fullmatch(name):
        raise GateError("a promotion needs the name of the person who approves it, 2 to 80 characters; nothing moved")
    return name


def champion_told(model: str, lines: Sequence[ledger.Entry]) -> str | None:
    """Whose digest the champion has by the audit file: the last promotion, or where a rollback went to."""
    return next(reversed(_champions_told(model, lines)), None)


def _champions_told(model: str, lines: Sequence[ledger.Entry]) -> list[str]:
    """The digests of all that were champion by the audit file, oldest first."""
    held = [
        line.body if line.kind == "promotion" else line.body["to"]
        for line in lines
        if line.kind in ("promotion", "rollback") and line.body.get("model") == model
    ]
    return [str(body["digest"]) for body in held]


def _last_about(model: str, lines: Sequence[ledger.Entry]) -> dict[str, Any] | None:
    """The last line that moved, or was to move, the champion's name of a model."""
    kinds = ("approval", "promotion", "rollback")
    return next((line.body for line in reversed(lines) if line.kind in kinds and line.body["model"] == model), None)


def _name(entry: Entry) -> dict[str, Any]:
    return {"version": entry.name, "number": entry.number, "digest": entry.digest}


def _champions_answers(champion: Entry) -> Path:
    """The folder of the champion's answers: the graded ones, or those kept when it was promoted.

    Raises ArtefactError if its name stands for another adapter by now and nothing was kept here.
    """
    for folder in (paths.graded(champion.name), paths.champions_answers(champion.digest)):
        if folder.exists() and _answered_by(folder) == champion.digest:
            return folder
    raise ArtefactError(
        f"{paths.graded(champion.name)} was answered by another adapter than the champion {champion.name}; bring the "
        f"champion's parameters back, run `dvc repro evaluate@{champion.name}`, and give what is new a name of its own"
    )


def _keep_answers(name: str, digest: str) -> None:
    """Keep a champion's answers, since its name may come to stand for another adapter: new data, or a new base."""
    if not paths.champions_answers(digest).exists():
        with artefacts.staged(paths.champions_answers(digest)) as out:
            shutil.copytree(paths.graded(name), out, dirs_exist_ok=True)


def _answered_by(folder: Path) -> str:
    """Identity of the model whose graded answers a folder holds."""
    return artefacts.read_manifest(folder).inputs["adapter"]


def _lock(model: str) -> Path:
    return Path("registry") / "champion" / model
