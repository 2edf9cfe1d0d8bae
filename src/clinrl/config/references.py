"""Checks what a block of params.yaml says of other blocks and of its task."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from clinrl.config import change_plan, schema
from clinrl.config.base import RESERVED, RESERVED_MODES, check_all, check_known
from clinrl.config.comparisons import check_comparisons
from clinrl.config.recipes import GrpoTrainer, RejectionProfile, RejectionTrainer, SftProfile, lengths
from clinrl.errors import ParamsError, format_value
from clinrl.signing import approval
from clinrl.tasks.base import GIVEN, Task, get_task, task_names
from clinrl.tasks.parts import Share

if TYPE_CHECKING:
    from clinrl.config.params import Params


def check(params: "Params") -> None:
    """Raise ParamsError for the first block that does not fit the others or its task."""
    if reserved := sorted(params.modes.keys() & RESERVED_MODES):
        names = " or ".join(RESERVED_MODES)
        raise ParamsError(f"modes.{reserved[0]} is a reserved name: a mode is not called {names}")
    _check_bases(params)
    _check_data(params)
    for name, profile in params.profiles.items():
        check_all(f"profiles.{name}.modes", profile.modes, params.modes, "a mode")
    _check_checkpoints(params)
    for name, version in params.versions.items():
        _check_names(params, f"versions.{name}", name, version)
    for name, version in params.versions.items():
        _check_parent(params, name, version)
        _check_recipe(params, name, version)
    for name, merge in params.merges.all.items():
        _check_merge(params, name, merge)
    _check_further_data(params)
    for name in params.protocols.all:
        _check_protocol(params, name)
    check_comparisons(params)
    for task, gate in params.gates.items():
        _check_gate(params, f"gates.{task}", task, gate)
    for task, schedule in params.schedules.items():
        _check_schedule(params, f"schedules.{task}", task, schedule)
    for task, watch in params.watches.items():
        _check_watch(params, f"watches.{task}", task, watch)
    for task in params.plans:
        change_plan.check(params, task)


def _check_bases(params: "Params") -> None:
    for task, base in params.bases.items():
        check_known("bases", task, task_names(), "a task")
        _check_turns(f"bases.{task}.embedded", task, base.embedded)
        _check_turns(f"bases.{task}.full", task, base.full)
        _check_use(params, f"bases.{task}.exam", base.exam, "exam", task)
        for name, quality in get_task(task).reporting.qualities.items():
            _check_judges(params, task, quality.asks, f"the measure {name} of every exam")


def _check_judges(params: "Params", task: str, asked: Iterable[str], by: str) -> None:
    """Refuse a base at the active scale without a judge that a measure or a reward asks."""
    for judge in asked:
        if judge != "encoder" and judge not in params.base(task).judges:
            raise ParamsError(f"bases.{task}.{params.scale}.judges has no {judge}, which {by} asks; add it there")


def _check_data(params: "Params") -> None:
    for name, dataset in params.datasets.items():
        at, task = f"datasets.{name}", dataset.task
        check_known(f"{at}.task", task, task_names(), "a task")
        checks = get_task(task).checks
        check_known(f"{at}.mix", dataset.mix, checks.mixes, f"a mix of {task}")
        check_all(f"{at}.emphasis", dataset.emphasis, checks.deciding, f"a rule of {task}")
        if dataset.edition:
            check_known(f"{at}.edition", dataset.edition, checks.editions, f"an edition of {task}")
    for name, source in params.imports.items():
        check_known(f"imports.{name}.task", source.task, task_names(), "a task")
        if name in params.datasets:
            raise ParamsError(f"imports.{name} is the name of a data set too; an import needs one of its own")


def _check_checkpoints(params: "Params") -> None:
    """Refuse settings of a recipe that is missing or another task's, or that do not fit the recipe."""
    for task, base in params.bases.items():
        others = {spec.profile for spec in params.versions.values() if spec.task != task}
        others |= {name for other in params.bases if other != task for name in params.bases[other].full.recipes}
        own = [name for name in params.profiles if name not in others]
        for name in base.full.recipes:
            check_known(f"bases.{task}.full.recipes", name, own, f"a recipe of {task}")
            params.recipe(name)


def _check_names(params: "Params", at: str, name: str, version: schema.VersionSpec) -> None:
    if name.endswith("-base") or name in RESERVED:
        raise ParamsError(f"{at} is a reserved name: a version is not called {', '.join(RESERVED)} or anything-base")
    check_known(f"{at}.task", version.task, params.bases, "a task with a base")
    _check_use(params, f"{at}.data", version.data, "train", version.task)
    _check_use(params, f"{at}.exam", version.exam, "exam", version.task)
    if version.profile not in params.profiles:
        others = tuple(f"{task}-" for task in params.bases if task != version.task)
        used = {spec.profile for spec in params.versions.values() if spec.task != version.task}
        own = [name for name in params.profiles if name not in used and not name.startswith(others)]
        check_known(f"{at}.profile", version.profile, own, "a profile")


def _check_use(params: "Params", at: str, dataset: str, use: str, task: str) -> None:
    """Refuse a data set of another task or pool, so that an exam is never training data."""
    fitting = [name for name, spec in params.all_data.items() if (spec.use, spec.task) == (use, task)]
    spec = params.all_data.get(dataset)
    instead = f" but {spec.use} data of {spec.task}" if spec else ""
    check_known(at, dataset, fitting, f"{use} data of {task}{instead}")


def _check_parent(params: "Params", name: str, version: schema.VersionSpec) -> None:
    """Refuse a parent of another task, a circle, and a recipe that does not continue that of its parent."""
    root = f"{version.task}-base"
    allowed = [root, *(other for other in params.versions_of(version.task) if other != name)]
    check_known(f"versions.{name}.parent", version.parent, allowed, f"another version of {version.task} or its base")
    params.lineage(name)
    if version.parent == root:
        return
    profile, before = params.profiles[version.profile], params.profiles[params.versions[version.parent].profile]
    at = f"versions.{name}.profile is {version.profile!r}"
    if profile.lora != before.lora:
        raise ParamsError(
            f"{at}, whose lora ({profile.lora}) is not that of its parent {version.parent} "
            f"({before.lora}); only a child of {root} may choose another"
        )
    if profile.qlora != before.qlora:
        raise ParamsError(
            f"{at}, whose qlora ({str(profile.qlora).lower()}) is not that of its parent {version.parent}, whose "
            f"adapter is another model above a base of other numbers; only a child of {root} may choose another"
        )
    if profile.method == "sft" and before.method != "sft":
        raise ParamsError(
            f"{at}, an sft recipe after the {before.method} version {version.parent}, and imitation would undo "
            "what the reward taught; allowed: a grpo or rejection profile, or an sft parent"
        )


def _check_recipe(params: "Params", name: str, version: schema.VersionSpec) -> None:
    """Refuse a profile that does not fit the task of its version."""
    at, profile, task = f"profiles.{version.profile}", params.recipe(version.profile), get_task(version.task)
    _check_stream(f"{at}.stream", profile, task)
    check_known(f"{at}.view", profile.view, [GIVEN, *task.reporting.variants], f"an input variant of {task.name}")
    caps = profile.stream.cap.values()
    if len(caps) == len(task.labels) and sum(caps) < 1:
        raise ParamsError(f"{at}.stream.cap caps every label and sums to {sum(caps):g}; it must reach 1")
    if (optimizer := profile.trainer["embedded"].optimizer).endswith("8bit"):
        raise ParamsError(
            f"{at}.trainer.embedded.optimizer is {optimizer!r}, which needs CUDA, and the embedded scale trains on the "
            "CPU; allowed: leave it out"
        )
    if isinstance(profile, SftProfile):
        _check_sft(at, profile, task)
        return
    reward: Any = params.reward(name)
    _check_judges(params, version.task, task.asks.models(reward), f"{at}.reward")
    for scale, trainer in profile.trainer.items():
        if isinstance(profile, RejectionProfile):
            _check_rejection(f"{at}.trainer.{scale}", trainer, task, reward.high)
        else:
            _check_grpo(f"{at}.trainer.{scale}", trainer, task)


def _check_stream(at: str, profile: Any, task: Task) -> None:
    """Refuse labels and slices that the task does not have, and a phase that would get no step."""
    stream = profile.stream
    for key, labels in (("repeat", stream.repeat), ("cap", stream.cap)):
        check_all(f"{at}.{key}", labels, task.labels, f"a label of {task.name}")
    for place, phase in enumerate(stream.phases):
        check_known(f"{at}.phases.{place}.slice", phase.slice, task.reporting.slices, f"a slice of {task.name}")
    for scale, trainer in profile.trainer.items():
        for place, steps in enumerate(lengths(stream.phases, trainer.steps)):
            if not steps:
                raise ParamsError(
                    f"{at}.phases.{place}.share is {stream.phases[place].share:g}, less than half a step of the "
                    f"{trainer.steps} at {scale} scale; raise it, or leave the phase out"
                )


def _check_sft(at: str, profile: SftProfile, task: Task) -> None:
    check_all(f"{at}.omit", profile.omit, task.checks.rules, f"a rule of {task.name}")
    if profile.labels_only and task.episodes is not None:
        raise ParamsError(
            f"{at}.labels_only is true, but a case of {task.name} is an episode, whose answer is all of its calls; "
            "allowed: leave it out"
        )


def _check_rejection(at: str, trainer: RejectionTrainer, task: Task, highest: float) -> None:
    """Refuse to relabel answers without an order, and a threshold that no completion reaches."""
    if trainer.relabel and (task.ordered is None or trainer.threshold is not None):
        raise ParamsError(
            f"{at}.relabel is true, which keeps every completion of a task with ordered answers; allowed: leave it "
            "out, or give such a task and no threshold"
        )
    if trainer.threshold is not None and trainer.threshold > highest:
        raise ParamsError(
            f"{at}.threshold is {trainer.threshold:g}, but no completion earns more than {highest:g}; lower it, or "
            "leave it out to keep right answers"
        )


def _check_grpo(at: str, trainer: GrpoTrainer, task: Task) -> None:
    _check_turns(at, task.name, trainer)
    if task.episodes is not None and trainer.held_out is not None:
        raise ParamsError(
            f"{at}.held_out is set, but a held-out check is one turn and a case of {task.name} is an episode; "
            "allowed: leave it out"
        )


def _check_merge(params: "Params", name: str, merge: schema.Fold | schema.Blend) -> None:
    """Refuse a merge whose name is in use, or whose versions are not of its task and exam."""
    at = f"merges.{'folds' if name in params.merges.folds else 'blends'}.{name}"
    if name in params.versions or name.endswith("-base") or name in RESERVED:
        raise ParamsError(f"{at} is a name in use; a merge needs one of its own")
    if name in params.merges.folds and name in params.merges.blends:
        raise ParamsError(f"{at} names a fold and a blend; each merge needs a name of its own")
    check_known(f"{at}.task", merge.task, params.bases, "a task with a base")
    for key, version in merge.parts.items():
        check_known(f"{at}.{key}", version, params.versions_of(merge.task), f"a version of {merge.task}")
    if len({params.profiles[params.versions[version].profile].qlora for version in merge.parts.values()}) > 1:
        raise ParamsError(
            f"{at} merges a version with qlora and one without, which are adapters of different weights; allowed: two "
            "of one kind"
        )
    exam = params.versions[next(iter(merge.parts.values()))].exam
    check_known(f"{at}.exam", merge.exam, [exam], "the exam that its version took, with which it is compared")


def _check_further_data(params: "Params") -> None:
    made = [*params.versions, *params.merges.all]
    for section, use, blocks, known, noun in (
        ("mining", "mine", params.mining, params.versions, "a version"),
        ("external", "exam", params.external, params.versions, "a version"),
        ("resits", "exam", params.resits, made, "a version or a merge"),
    ):
        for name, block in blocks.items():
            check_known(section, name, known, noun)
            model = params.model(name)
            check_known(f"{section}.{name}.task", block.task, [model.task.name], f"the task of {name}")
            _check_use(params, f"{section}.{name}.data", block.data, use, block.task)
            if section == "resits" and block.data == model.exam:
                raise ParamsError(
                    f"{section}.{name}.data is {block.data}, which {name} takes as its exam; leave it out"
                )


def _check_protocol(params: "Params", name: str) -> None:
    """Refuse a protocol for a task without one, for another exam, or not comparable with that of `against`."""
    protocols, is_version = params.protocols, name in params.protocols.versions
    spec, at = protocols.all[name], f"protocols.{'versions' if is_version else 'bases'}.{name}"
    known, noun = (params.versions, "a version") if is_version else (params.roots, "the base of a task")
    check_known(at, name, known, noun)
    model = params.model(name)
    task, published = model.task.name, model.task.benchmark
    check_known(f"{at}.task", spec.task, [task], "its task")
    if published is None:
        fitting = [other for other in task_names() if get_task(other).benchmark is not None]
        check_known(f"{at}.task", task, fitting, "a task with a published protocol")
        return
    check_known(f"{at}.exam", spec.exam, [model.exam], "the exam that it took")
    check_all(f"{at}.levels", spec.levels, published.levels, f"a level of {task}")
    if is_version:
        against = protocols.versions[name].against
        before = [*params.lineage(name)[:-1], f"{task}-base"]
        check_known(f"{at}.against", against, before, "an ancestor or the base")
        fitting = [other for other in before if other in protocols.all]
        check_known(f"{at}.against", against, fitting, "one with a protocol, which it needs")
        other = protocols.all[against]
        for key in schema.BaseProtocol.model_fields:
            if getattr(spec, key) != getattr(other, key):
                raise ParamsError(f"{at}.{key} is not that of {against}, with which it is compared; both need the same")


def _check_gate(params: "Params", at: str, task: str, gate: schema.Gate) -> None:
    check_known("gates", task, params.bases, "a task with a base")
    of = get_task(task).all_metrics
    check_all(f"{at}.limits", gate.limits, [*of, "mode_agreement"], f"a metric of {task}")
    if paired := [name for name, limit in gate.limits.items() if limit.paired and not isinstance(of.get(name), Share)]:
        raise ParamsError(
            f"{at}.limits.{paired[0]}.paired is true, but {paired[0]} is no share of cases, and only the change of one "
            "has an interval; leave it out"
        )
    if (safety := get_task(task).safety.metric) not in gate.limits:
        raise ParamsError(f"{at}.limits has no limit on `{safety}`; a release without one is not allowed")
    is_max = get_task(task).metrics[safety].worse == "higher"
    side, limit = ("max", gate.limits[safety].max) if is_max else ("min", gate.limits[safety].min)
    if limit is None or not all(0 <= value < 1 if is_max else 0 < value <= 1 for value in limit.values()):
        raise ParamsError(
            f"{at}.limits.{safety}.{side} is {format_value(limit)}; a release needs a share there that a model can "
            f"break: {'0 or more, and below 1' if is_max else 'above 0, and at most 1'}"
        )
    if gate.rebuilt and gate.rebuilt.least > len(params.rebuilders):
        raise ParamsError(
            f"{at}.rebuilt.least is {gate.rebuilt.least}, but rebuilders lists {len(params.rebuilders)}; list more, "
            "or ask for fewer"
        )


def _check_schedule(params: "Params", at: str, task: str, schedule: schema.Schedule) -> None:
    check_known("schedules", task, params.gates, "a task with a gate")
    for key, names in (("versions", params.versions), ("comparisons", params.comparisons)):
        if (own := f"retrain-{task}") in names:  # `python -m flows build` would write over the branch of that name
            raise ParamsError(f"{key}.{own} is a reserved name: schedules.{task} hands over built/{own}; take another")
    if schedule.draft and task not in params.plans:
        raise ParamsError(f"{at}.draft is true, but plans has no {task}; say there what a draft may change")
    if schedule.draft and params.gates[task].rebuilt:
        raise ParamsError(
            f"{at}.draft is true, but gates.{task}.rebuilt asks for signatures that nobody can give before a draft is "
            "decided; take one of the two away"
        )
    _check_cron(at, schedule.cron)
    try:
        ZoneInfo(schedule.timezone)
    except (ZoneInfoNotFoundError, ValueError, OSError):  # of a folder of the database, such as Etc, OSError
        raise ParamsError(
            f"{at}.timezone is {schedule.timezone!r}, which is not in the time zone database; try 'UTC'"
        ) from None


def _check_watch(params: "Params", at: str, task: str, watch: schema.Watch) -> None:
    check_known("watches", task, params.gates, "a task with a gate")
    _check_cron(at, watch.cron)
    _check_approver(params, f"{at}.approver", watch.approver)
    if watch.approver and not (watch.limit or params.allowed_harm(task)):
        raise ParamsError(
            f"{at}.approver is {watch.approver!r}, but the gate allows no harmful error, so that one mistyped label "
            f"would roll back; set {at}.limit to a share above 0"
        )


def _check_approver(params: "Params", at: str, approver: str) -> None:
    """Refuse an approver of whom no approval would count on the day when one is needed."""
    if approver and approval.is_by_list(params):
        check_known(at, approver, params.approvers, "a name that approvers lists")
    elif approver and not approval.NAME.fullmatch(approver.strip()):
        raise ParamsError(f"{at} is {format_value(approver)}; a name has 2 to 80 characters")


def _check_cron(at: str, cron: str) -> None:
    if len(cron.split()) != 5:  # CronSim also takes a field of seconds, and Prefect @daily and such
        raise ParamsError(f"{at}.cron is {cron!r}; it needs five fields, as in '0 3 * * 1'")
    try:
        CronSim(cron, datetime(2000, 1, 1, tzinfo=UTC))
    except CronSimError as error:
        raise ParamsError(f"{at}.cron is {cron!r}: {str(error).lower()}; write it as in '0 3 * * 1'") from None


def _check_turns(at: str, task: str, block: Any) -> None:
    if block.turn_tokens is not None and get_task(task).episodes is None:
        raise ParamsError(f"{at}.turn_tokens is set, but a case of {task} is one turn; allowed: leave it out")
