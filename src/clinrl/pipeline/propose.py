"""Drafts the next version from the errors of the champion, as blocks of params.yaml that a person or a flow can train.

The errors decide the change. The rules whose errors surely cost the most get modifiers in the reward, if the task has
any, and their cases become more frequent in new training data. A lever that brought nothing from a champion is not used
again: the next draft pulls another one.

No exam is read here. But a draft is evaluated on its exam, and the more drafts take the same exam, the more the result
flatters the best of them. So each record counts the drafts on its exam, and the gate spends an error budget.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field, ValidationError

from clinrl import paths
from clinrl.artifacts import digest, exclusive, identity_of, write_json
from clinrl.config import change_plan
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
"""The only file of parameters that is written here; those that people edit are not."""
MAX_TARGETS = 3
"""The largest number of rules that a draft is about: the costliest ones."""
NUMBERED = re.compile(r"(?:^|-)v(\d+)")

REFINEMENT_LR = {"embedded": 5.0e-4, "full": 2.0e-7}
"""The highest learning rate of a refinement, before a lever: that of the published v49 (full), and that of our own v49
(embedded). A version that starts from a good one has little to gain from large steps, and much to lose."""
MORE_STEPS = 1.5
"""The number of steps of a draft, as a multiple of those of the recipe that it refines; a draft's own are enough."""


class NothingToDraft(Refused):
    """There is no champion, no rule that it surely misses, or no lever left."""


Outcome = Literal["open", "promoted", "refused", "dropped"]
"""dropped: it brought nothing and was removed from params.yaml. refused: it may be better, but nobody
approved it, or it is no longer champion."""


class Lever(NamedTuple):
    """One way to change a recipe."""

    name: str
    modifiers: bool
    """Whether the reward gets the modifiers for the missed rules."""
    emphasis: float
    """The factor by which cases that the missed rules decide become more frequent."""
    lr: float
    """The factor of the learning rate."""


LEVERS = (
    Lever("modifiers", modifiers=True, emphasis=3.0, lr=1.0),
    Lever("data", modifiers=False, emphasis=6.0, lr=1.0),
    Lever("lower-rate", modifiers=True, emphasis=3.0, lr=0.5),
    Lever("higher-rate", modifiers=True, emphasis=3.0, lr=2.0),
)
"""The levers, in the order in which they are pulled from one champion."""


class Target(Strict):
    """A rule that the champion misses."""

    rule: str
    n: int = Field(gt=0)
    """The number of cases in the mine data that it decides."""
    cost: Estimate
    """Mean clinical cost of an answer to these cases."""
    worth: float
    """Clinical cost of these answers per 100 answers to the mine data."""


def _check_names(version: dict[str, Any]) -> dict[str, Any]:
    """Raise ValueError if an entry of `versions` lacks one of the names that are read from it."""
    for key in ("task", "parent", "data", "exam", "profile"):
        value = version.get(key)
        if not isinstance(value, str) or not is_name(value):
            raise ValueError(f"version.{key} is no name")
    return version


Version = Annotated[dict[str, Any], AfterValidator(_check_names)]
"""An entry of `versions` in params.yaml."""


class Draft(Strict):
    """The record of a drafted version: the error analysis behind it, its blocks of params.yaml, and its outcome.

    Its names are checked, since they become paths and keys of params.yaml, and the record may come from somebody else.
    """

    name: Name
    task: Name
    parent: Name
    parent_digest: str
    mining_digest: str
    """Digest of the error analysis that it follows from."""
    lever: str
    targets: tuple[Target, ...]
    drafts_on_exam: int = Field(ge=1)
    """The number of drafts for this exam, this one included."""
    dataset: dict[str, Any] | None
    """None if the parent's data was imported, so that no other cases can be drawn."""
    profile: dict[str, Any]
    version: Version
    outcome: Outcome = "open"
    says: str = ""
    """The reason for the outcome."""


def stage(
    params: Params, task: str, *, parent: str | None = None, name: str | None = None, lever: str | None = None,
    is_planned: bool = False,
) -> Draft:  # fmt: skip
    """Write the next version of a task into params/drafts.yaml, and the record of its draft to `paths.draft`.

    `parent` is by default the champion, `lever` the first one not yet pulled from the parent. Raises ParamsError for an
    invalid name or for parameters that were edited meanwhile, ArtefactError if the parent or its error analysis is
    missing, or the analysis is about another adapter or other cases, and NothingToDraft if the parent surely misses no
    rule or no lever is left. With `is_planned`, a lever that leads outside the change plan is passed over, since no
    gate would admit its draft. No file of parameters is changed where it raises.
    """
    with exclusive(PARAMS):
        files = read_files(PARAMS)
        if parse(files) != params:
            raise ParamsError(f"{PARAMS} was edited while the draft was made; give the command again")
        start = parent or champion(params, task)
        check_known("params.yaml", start, params.versions_of(task), "a version")
        report = read_report(params, start)
        _conclude_cut_short(params)
        outside = dict[str, str]()
        while True:
            try:
                drafted = propose(params, report, records(), name=name, lever=lever, but=outside)
            except NothingToDraft as ended:
                first = next(iter(outside.values()), "")
                raise (
                    NothingToDraft(f"no lever is left whose draft is in the plan: {first}") if first else ended
                ) from None
            written = dict(files.get(DRAFTS, {}))
            for section, entry in entries(drafted, params).items():
                written[section] = {**written.get(section, {}), **entry}
            after = parse({**files, DRAFTS: written})
            if not is_planned or not (why := change_plan.outside(after, drafted.name)):
                break
            outside[drafted.lever] = why
        write_json(paths.draft(drafted.name), drafted.model_dump(mode="json"))
        write_whole(DRAFTS, written)
    return drafted


def find_untrained(params: Params, task: str, parent: str | None = None) -> Draft | None:
    """The newest draft of a task, from a version or the champion, that is in params.yaml and was not trained yet.

    Raises ArtefactError as `champion` does.
    """
    start = parent or champion(params, task)
    waiting = [
        draft
        for draft in records()
        if (draft.task, draft.parent, draft.outcome) == (task, start, "open")
        and draft.name in params.versions
        and not paths.adapter(draft.name).exists()
    ]
    return max(waiting, key=lambda draft: draft.drafts_on_exam, default=None)


def propose(
    params: Params, report: MineReport, before: Sequence[Draft], *, name: str | None = None, lever: str | None = None,
    but: Iterable[str] = (),
) -> Draft:  # fmt: skip
    """The next draft from an error analysis, by none of the levers `but`. A pure function.

    Raises NothingToDraft for the same reasons as `stage`, and ParamsError for a name that is used or invalid.
    """
    parent, plan = params.versions[report.name], params.plans.get(report.task)
    exam = plan.changes.exam if plan else parent.exam
    targets = find_missed(report)
    if not targets:
        raise NothingToDraft(
            f"no rule is surely missed by {report.name} on {report.data}, so there is nothing to draft for"
        )
    pulled = {draft.lever for draft in before if draft.parent_digest == report.adapter_digest} | {*but}
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
    dataset, more = None, 1.0 if report.name in {draft.name for draft in before} else MORE_STEPS
    if generated is not None:
        emphasis = {target.rule: option.emphasis for target in targets}
        dataset = generated.model_dump(mode="json", exclude={"emphasis"}) | {"seed": number, "emphasis": emphasis}
    profile = {
        **recipe.model_dump(exclude={"reward", "trainer", "waiver", "placebo"}, exclude_defaults=True),
        "method": "grpo",
        "reward": reward,
        "trainer": {scale: _trainer(recipe, scale, option, more) for scale in ("embedded", "full")},
    }
    version = {
        "task": report.task,
        "parent": report.name,
        "data": f"{name}-data" if dataset else parent.data,
        "exam": exam,
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
        drafts_on_exam=1 + sum(draft.version["exam"] == exam for draft in before),
        dataset=dataset,
        profile=profile,
        version=version,
    )


def levers(recipe: GrpoProfile, report: MineReport, targets: Collection[Target], *, drawn: bool) -> list[Lever]:
    """The levers with an effect: not `modifiers` if the reward has them already, not `data` unless data is `drawn`."""
    useless = set() if drawn else {"data"}
    if _reward(recipe, report, targets) == recipe.reward:
        useless.add("modifiers")
    return [lever for lever in LEVERS if lever.name not in useless]


def find_missed(report: MineReport) -> list[Target]:
    """The rules whose errors surely cost something (the interval of their mean cost lies above 0), costliest first."""
    return [
        Target(rule=group.value, n=group.n, cost=group.cost, worth=group.total)
        for group in of_kind(report, "rule")
        if group.n >= MIN_CASES and group.cost.low > 0 and group.value in get_task(report.task).checks.deciding
    ][:MAX_TARGETS]


def champion(params: Params, task: str) -> str:
    """The champion's name. Raises NothingToDraft without one that was trained, ArtefactError if it is another here."""
    from clinrl.registry import versions as registry

    found = registry.holder(task, registry.CHAMPION)
    if found is None:
        raise NothingToDraft(f"{task} has no champion to draft from; release a version, or name one: --from VERSION")
    if found.name in params.merges.all:
        raise NothingToDraft(
            f"the champion {found.name} is a merge, which nothing trained; name a version: --from VERSION"
        )
    folder = paths.adapter(found.name)
    if not folder.exists() or identity_of(folder) != found.digest:
        raise ArtefactError(
            f"the champion {found.name} is not the adapter in {folder}; restore it with `dvc checkout {folder}`"
        )
    return found.name


def entries(draft: Draft, params: Params) -> dict[str, dict[str, Any]]:
    """A draft's blocks by section of params.yaml. Its error analysis has the same settings as its parent's."""
    file = {"file": DRAFTS.stem}
    return {
        **({"datasets": {draft.version["data"]: file | draft.dataset}} if draft.dataset else {}),
        "profiles": {draft.name: draft.profile},
        "versions": {draft.name: file | draft.version},
        "mining": {draft.name: params.mining[draft.parent].model_dump(mode="json")},
    }


def drop(draft: Draft, reason: str) -> Draft:
    """Remove a draft from params/drafts.yaml, and keep its reports and its record, with the reason.

    Raises ParamsError if other parameters need the version, or if somebody moved its blocks to another file; nothing is
    changed then.
    """
    with exclusive(PARAMS):
        files = read_files(PARAMS)
        names = {draft.name} | ({draft.version["data"]} if draft.dataset else set())
        drafted = files.get(DRAFTS, {}).items()
        kept = {section: {name: some[name] for name in some if name not in names} for section, some in drafted}
        left = {section: some for section, some in kept.items() if some}
        if draft.name in parse({**files, DRAFTS: left}).versions:
            raise ParamsError(f"versions.{draft.name} is not in {DRAFTS}, so no command takes it out; do so by hand")
        write_whole(DRAFTS, left)
    return conclude(draft, "dropped", reason)


def conclude(draft: Draft, outcome: Outcome, reason: str) -> Draft:
    """Write the outcome of a draft into its record."""
    done = draft.model_copy(update={"outcome": outcome, "says": reason})
    write_json(paths.draft(draft.name), done.model_dump(mode="json"))
    return done


def records() -> list[Draft]:
    """The records of all drafts ever made in this project, sorted by name.

    Raises ArtefactError for a file that is no record, or whose name is not that of its draft: a record is written and
    removed by the draft's name.
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
    """Conclude drafts that a kill left half done: their records are open, but params.yaml does not have them.

    A draft that was probed, whether it passed or not, was being dropped. Any other was being made; its record goes.
    """
    for draft in records():
        if draft.outcome == "open" and draft.name not in params.versions:
            proof = paths.probe_proof(draft.name)
            if proof.exists() or proof.with_suffix(".failed.json").exists():
                conclude(draft, "dropped", "it was taken out of params.yaml")
            else:
                paths.draft(draft.name).unlink()


def find(name: str) -> Draft | None:
    """The record of an open draft by its name; None if there is no such draft."""
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
    """The recipe that a draft refines: the version's own, or if that has no reward, the task's first one with a reward
    and the same `lora` and `qlora`, as a child must have, and without a waiver."""
    task, own = params.versions[version].task, params.recipe(params.versions[version].profile)
    if isinstance(own, GrpoProfile):
        return own
    for spec in params.versions.values():
        profile = params.recipe(spec.profile)
        fits = (spec.task, profile.lora, profile.qlora) == (task, own.lora, own.qlora)
        if fits and isinstance(profile, GrpoProfile) and not profile.waiver:
            return profile
    raise Refused(
        f"{task} has no recipe with a reward and the lora and qlora of {version} yet, so there is nothing to refine; "
        "write the first by hand"
    )


def _reward(recipe: GrpoProfile, report: MineReport, targets: Collection[Target]) -> dict[str, Any]:
    """The recipe's reward with the task's modifiers for the missed rules, as in params.yaml."""
    task = get_task(report.task)
    reward = task.Reward.model_validate(recipe.reward)
    refined = task.improvement.refine(reward, [target.rule for target in targets])
    if refined == reward:
        return recipe.reward
    changed, whole = refined.model_dump(mode="json", exclude_defaults=True), refined.model_dump(mode="json")
    return {key: changed.get(key, whole[key]) for key in dict.fromkeys([*recipe.reward, *changed])}


def _trainer(recipe: GrpoProfile, scale: Any, lever: Lever, more: float) -> dict[str, Any]:
    """The recipe's settings at a scale, with the learning rate of a refinement and `more` times the steps."""
    trainer = recipe.trainer[scale]
    found: dict[str, Any] = trainer.model_dump(mode="json", exclude_unset=True)
    lr = min(trainer.lr, REFINEMENT_LR[scale]) * lever.lr
    return found | {"lr": float(f"{lr:.3g}"), "steps": round(trainer.steps * more)}


def _next_number(params: Params, before: Sequence[Draft], task: str) -> int:
    """One more than the highest number of all versions and drafts of the task."""
    names = [*params.versions_of(task), *(draft.name for draft in before if draft.task == task)]
    numbers = [int(found[1]) for name in names for found in NUMBERED.finditer(name)]
    return max(numbers, default=0) + 1
