"""The next version, drafted from the errors of the champion: blocks of params.yaml that a person, or a flow, can train.

What is missed decides what is changed. The rules whose errors cost the most, surely and not by luck of the draw, get
modifiers in the reward where the task has some, and their cases come more often in data that nobody trained on. What
was tried from a champion and brought nothing is not tried again: the next draft pulls another lever.

No exam is read here. A draft is judged by its exam all the same, and the more drafts take one exam, the more its
verdict flatters the best of them: each record counts how many there were, and the gate spends an error budget.
"""

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field, ValidationError

from clinrl import paths
from clinrl.artifacts import digest, exclusive, identity, read_manifest, write_json
from clinrl.config import full
from clinrl.config.base import NAME, Name, check_known, is_name
from clinrl.config.files import read_files, write_whole
from clinrl.config.params import Params, parse
from clinrl.config.recipes import GrpoProfile
from clinrl.errors import ArtefactError, ParamsError, Refused, format_value
from clinrl.evaluation.error_analysis import MIN_CASES, MineReport, of_kind, read_report
from clinrl.tasks.base import get_task
from clinrl.types import Estimate, Strict

PARAMS = Path("params.yaml")
DRAFTS = Path("params/drafts.yaml")
"""The file that is written here; a person's own files never are."""
MAX_TARGETS = 3
"""Rules that one draft is about: the costliest ones."""
NUMBERED = re.compile(r"(?:^|-)v(\d+)")

REFINEMENT_LR = {"embedded": 5.0e-4, "full": 2.0e-7}
"""The highest learning rate of a refinement, before a lever: that of the published v49 (full), and what our own v49
learns with. A version that starts from a good one has little to gain and all to lose from large steps."""
MORE_STEPS = 1.5
"""How many steps a draft takes for each of its parent's."""


class NothingToDraft(Refused):
    """There is no champion, nothing that it surely misses, or no lever that was not pulled."""


Outcome = Literal["open", "promoted", "refused", "dropped"]
"""dropped: it brought nothing, and is in params.yaml no more. refused: it may be better, but nobody approved it."""


class Lever(NamedTuple):
    """One way to change a recipe."""

    name: str
    modifiers: bool
    """Whether the reward gets the modifiers of the missed rules."""
    emphasis: float
    """How many times as often the missed rules decide a case."""
    lr: float
    """Factor of the learning rate."""


LEVERS = (
    Lever("modifiers", modifiers=True, emphasis=3.0, lr=1.0),
    Lever("data", modifiers=False, emphasis=6.0, lr=1.0),
    Lever("lower-rate", modifiers=True, emphasis=3.0, lr=0.5),
    Lever("higher-rate", modifiers=True, emphasis=3.0, lr=2.0),
)
"""In the order in which they are tried from one champion."""


class Target(Strict):
    """A rule that the champion misses."""

    rule: str
    n: int = Field(gt=0)
    """Cases of the mine data that it decides."""
    cost: Estimate
    """Mean clinical cost of an answer to one of them."""
    worth: float
    """Clinical cost of these answers for every 100 answers."""


def _check_names(version: dict[str, Any]) -> dict[str, Any]:
    """Refuse an entry of `versions` that lacks a name which is read from it. Raises ValueError."""
    for key in ("task", "parent", "data", "exam", "profile"):
        value = version.get(key)
        if not isinstance(value, str) or not is_name(value):
            raise ValueError(f"version.{key} is no name")
    return version


Version = Annotated[dict[str, Any], AfterValidator(_check_names)]
"""An entry of `versions`, as params.yaml holds it."""


class Draft(Strict):
    """A drafted version: from what it was drafted, what is in its blocks, and what became of it.

    Its names become paths and keys of params.yaml, also when the record comes from somebody else.
    """

    name: Name
    task: Name
    parent: Name
    parent_digest: str
    mining_digest: str
    """Digest of the mining report that it follows from."""
    lever: str
    targets: tuple[Target, ...]
    drafts_on_exam: int = Field(ge=1)
    """Drafts that have been made for this exam, this one included."""
    dataset: dict[str, Any] | None
    """None if the parent's data was imported, so that there are no other cases to draw."""
    profile: dict[str, Any]
    version: Version
    outcome: Outcome = "open"
    says: str = ""
    """Why it ended so."""


def stage(
    params: Params, task: str, *, parent: str | None = None, name: str | None = None, lever: str | None = None
) -> Draft:
    """Write the next version of a task into params/drafts.yaml, and the record of its draft into `paths.draft`.

    `parent` is the champion unless another version is named; `lever` the first that was not pulled from it yet.
    Raises ParamsError for a name that does not fit or parameters that were edited meanwhile, ArtefactError if the
    parent is gone, was never mined, or its mining report is about another adapter or other cases, and NothingToDraft
    if it misses no rule surely or every lever was pulled. No file is changed then.
    """
    with exclusive(PARAMS):
        files = read_files(PARAMS)
        if parse(files) != params:
            raise ParamsError(f"{PARAMS} was edited while the draft was made; give the command again")
        start = parent or champion(task)
        check_known("params.yaml", start, params.versions_of(task), "a version")
        report = read_report(params, start)
        _conclude_cut_short(params)
        drafted = propose(params, report, records(), name=name, lever=lever)
        written = dict(files.get(DRAFTS, {}))
        for section, entry in entries(drafted, params).items():
            written[section] = {**written.get(section, {}), **entry}
        parse({**files, DRAFTS: written})
        write_json(paths.draft(drafted.name), drafted.model_dump(mode="json"))
        write_whole(DRAFTS, written)
    return drafted


def find_untrained(params: Params, task: str, parent: str | None = None) -> Draft | None:
    """The draft of a task, from a version or from the champion, that is in params.yaml and was not trained yet.

    Raises ArtefactError as `champion` does.
    """
    start = parent or champion(task)
    waiting = (d for d in reversed(records()) if (d.task, d.parent, d.outcome) == (task, start, "open"))
    return next((d for d in waiting if d.name in params.versions and not paths.adapter(d.name).exists()), None)


def propose(
    params: Params, report: MineReport, before: Sequence[Draft], *, name: str | None = None, lever: str | None = None
) -> Draft:
    """The next draft from a mining report. Pure. Raises NothingToDraft as `stage` does; ParamsError for a used name."""
    parent = params.versions[report.name]
    targets = find_missed(report)
    if not targets:
        raise NothingToDraft(
            f"no rule is surely missed by {report.name} on {report.data}, so there is nothing to draft for"
        )
    pulled = {draft.lever for draft in before if draft.parent_digest == report.adapter_digest}
    recipe, generated = _recipe(params, report.name), params.datasets.get(parent.data)
    option = _next_lever(levers(recipe, report, targets, drawn=generated is not None), pulled, lever, report.name)
    reward = _reward(recipe, report, targets) if option.modifiers else recipe.reward
    number = _next_number(params, before, report.task)
    name = name or f"{report.task}-v{number}"
    for named in (name, f"{name}-data") if generated else (name,):
        if not is_name(named):
            raise ParamsError(f"versions.{format_value(named)} is not a name; a name must match {NAME.pattern}")
    if name in params.versions or name in {draft.name for draft in before}:
        raise ParamsError(f"versions.{name} was drafted or trained already; a draft needs a name of its own")
    dataset = None
    if generated is not None:
        emphasis = {target.rule: option.emphasis for target in targets}
        dataset = generated.model_dump(mode="json", exclude={"emphasis"}) | {"seed": number, "emphasis": emphasis}
    profile = {
        **recipe.model_dump(exclude={"reward", "trainer", "waiver", "placebo"}, exclude_defaults=True),
        "method": "grpo",
        "reward": reward,
        "trainer": {scale: _trainer(recipe, scale, option) for scale in ("embedded", "full")},
    }
    version = {
        "task": report.task,
        "parent": report.name,
        "data": f"{name}-data" if dataset else parent.data,
        "exam": parent.exam,
        "profile": name,
        "seed": number,
        "why": f"Drafted from the errors of {report.name} on {report.data}: "
        + ", ".join(f"{target.rule} ({target.worth:.2f})" for target in targets)
        + f"; lever: {option.name}.",
    }
    return Draft(
        name=name,
        task=report.task,
        parent=report.name,
        parent_digest=report.adapter_digest,
        mining_digest=digest(report.model_dump(mode="json")),
        lever=option.name,
        targets=tuple(targets),
        drafts_on_exam=1 + sum(draft.version["exam"] == parent.exam for draft in before),
        dataset=dataset,
        profile=profile,
        version=version,
    )


def levers(recipe: GrpoProfile, report: MineReport, targets: Collection[Target], *, drawn: bool) -> list[Lever]:
    """The levers that change something: no modifiers where the reward has them, no other cases of imported data."""
    useless = set() if drawn else {"data"}
    if _reward(recipe, report, targets) == recipe.reward:
        useless.add("modifiers")
    return [lever for lever in LEVERS if lever.name not in useless]


def find_missed(report: MineReport) -> list[Target]:
    """The rules whose errors surely cost something: the interval of their mean cost lies above 0. Costliest first."""
    return [
        Target(rule=group.value, n=group.n, cost=group.cost, worth=group.total)
        for group in of_kind(report, "rule")
        if group.n >= MIN_CASES and group.cost.low > 0 and group.value in get_task(report.task).checks.rules
    ][:MAX_TARGETS]


def champion(task: str) -> str:
    """The champion's name. Raises NothingToDraft if there is none, ArtefactError if it is not what is on the disk."""
    from clinrl.registry import versions as registry

    held = registry.holder(task, registry.CHAMPION)
    if held is None:
        raise NothingToDraft(f"{task} has no champion to draft from; release a version, or name one: --from VERSION")
    folder = paths.adapter(held.name)
    if not folder.exists() or identity(read_manifest(folder)) != held.digest:
        raise ArtefactError(
            f"the champion {held.name} is not the adapter in {folder}; restore it with `dvc checkout {folder}`"
        )
    return held.name


def entries(draft: Draft, params: Params) -> dict[str, dict[str, Any]]:
    """A draft's blocks by section of params.yaml; its own errors are mined like its parent's."""
    file = {"file": DRAFTS.stem}
    return {
        **({"datasets": {draft.version["data"]: file | draft.dataset}} if draft.dataset else {}),
        "profiles": {draft.name: draft.profile},
        "versions": {draft.name: file | draft.version},
        "mining": {draft.name: params.mining[draft.parent].model_dump(mode="json")},
    }


def drop(draft: Draft, reason: str) -> Draft:
    """Take a draft out of params/drafts.yaml again and keep its record, with the reason. Its reports stay.

    Raises ParamsError if something else needs the version by now, or if a person moved its blocks to a file of theirs;
    nothing is changed then.
    """
    with exclusive(PARAMS):
        files = read_files(PARAMS)
        names = {draft.name} | ({draft.version["data"]} if draft.dataset else set())
        drafted = files.get(DRAFTS, {}).items()
        kept = {section: {name: held[name] for name in held if name not in names} for section, held in drafted}
        left = {section: held for section, held in kept.items() if held}
        if draft.name in parse({**files, DRAFTS: left}).versions:
            raise ParamsError(f"versions.{draft.name} is not in {DRAFTS}, so no command takes it out; do so by hand")
        write_whole(DRAFTS, left)
    return conclude(draft, "dropped", reason)


def conclude(draft: Draft, outcome: Outcome, reason: str) -> Draft:
    """Write down what became of a draft."""
    done = draft.model_copy(update={"outcome": outcome, "says": reason})
    write_json(paths.draft(draft.name), done.model_dump(mode="json"))
    return done


def records() -> list[Draft]:
    """Every draft that was ever made here, by name.

    Raises ArtefactError for a file that is none, or that holds the record of another draft than the one it is named
    after: what becomes of a draft is written to, or removed from, where its name says.
    """
    found = []
    for path in sorted(paths.draft("_").parent.glob("*.json")):
        try:
            draft = Draft.model_validate_json(path.read_bytes())
        except ValidationError:
            raise ArtefactError(f"{path} is no record of a draft; {_again(path)}") from None
        if draft.name != path.stem:
            raise ArtefactError(f"{path} is the record of {draft.name}, not of {path.stem}; {_again(path)}")
        found.append(draft)
    return found


def _again(path: Path) -> str:
    return f"restore it with `git checkout {path}`, or remove it if git does not have it"


def _conclude_cut_short(params: Params) -> None:
    """Conclude what a kill left half done: a draft that is open in its record and not in params.yaml.

    One that was probed, passed or not, was being dropped; any other was being made, and is as if it had never been.
    """
    for draft in records():
        if draft.outcome == "open" and draft.name not in params.versions:
            proof = paths.probe_proof(draft.name)
            if proof.exists() or proof.with_suffix(".failed.json").exists():
                conclude(draft, "dropped", "it was taken out of params.yaml")
            else:
                paths.draft(draft.name).unlink()


def find(name: str) -> Draft | None:
    """The record of a version that was drafted and not concluded; None for any other."""
    return next((draft for draft in records() if draft.name == name and draft.outcome == "open"), None)


def _next_lever(some: Sequence[Lever], pulled: Collection[str], wanted: str | None, version: str) -> Lever:
    if wanted is not None:
        check_known("lever", wanted, [lever.name for lever in some], f"a lever that changes anything for {version}")
        if wanted in pulled:
            raise NothingToDraft(f"the lever {wanted} was pulled from {version} already; name another, or none")
    free = [lever for lever in some if lever.name not in pulled and wanted in (None, lever.name)]
    if not free:
        raise NothingToDraft(
            f"every lever was pulled from {version} already ({', '.join(sorted(pulled))}); "
            "mine it on other data, or write the next version by hand"
        )
    return free[0]


def _recipe(params: Params, version: str) -> GrpoProfile:
    """The recipe that a draft refines: the version's own, or after an imitation the first of the task with a reward."""
    task, own = params.versions[version].task, full.recipe(params, params.versions[version].profile)
    if isinstance(own, GrpoProfile):
        return own
    for spec in params.versions.values():
        profile = full.recipe(params, spec.profile)
        if spec.task == task and isinstance(profile, GrpoProfile) and not profile.waiver and profile.lora == own.lora:
            return profile
    raise Refused(f"{task} has no recipe with a reward yet, so there is nothing to refine; write the first by hand")


def _reward(recipe: GrpoProfile, report: MineReport, targets: Collection[Target]) -> dict[str, Any]:
    """The recipe's reward with a term more for the missed rules, as params.yaml holds it."""
    task = get_task(report.task)
    reward = task.Reward.model_validate(recipe.reward)
    refined = task.improvement.refine(reward, [target.rule for target in targets])
    if refined == reward:
        return recipe.reward
    changed, whole = refined.model_dump(mode="json", exclude_defaults=True), refined.model_dump(mode="json")
    return {key: changed.get(key, whole[key]) for key in dict.fromkeys([*recipe.reward, *changed])}


def _trainer(recipe: GrpoProfile, scale: Any, lever: Lever) -> dict[str, Any]:
    """The parent's settings at a scale, with the refinement's learning rate and more steps."""
    trainer = recipe.trainer[scale]
    found: dict[str, Any] = trainer.model_dump(mode="json", exclude_unset=True)
    lr = min(trainer.lr, REFINEMENT_LR[scale]) * lever.lr
    return found | {"lr": float(f"{lr:.3g}"), "steps": round(trainer.steps * MORE_STEPS)}


def _next_number(params: Params, before: Sequence[Draft], task: str) -> int:
    """One more than the highest number that a version of the task, or a draft of one, ever had."""
    names = [*params.versions_of(task), *(draft.name for draft in before if draft.task == task)]
    numbers = [int(found[1]) for name in names for found in NUMBERED.finditer(name)]
    return max(numbers, default=0) + 1
