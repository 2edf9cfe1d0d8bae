"""Loads params.yaml and the files of params/, and checks every value, name and cross-reference.

A `Params` object is therefore always valid, and stages look up names in it without further checks. An error names the
key, the value and the allowed values.
"""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError
from pydantic import BaseModel, Field, ValidationError, model_validator

from clinrl.config import change_plan, full, schema
from clinrl.config.base import RESERVED, RESERVED_MODES, Name, People, Scale, Section, check_all, check_known, sentence
from clinrl.config.bases import BaseSpec, EmbeddedBase, HubBase
from clinrl.config.comparisons import Comparison, Rival, check_comparisons
from clinrl.config.files import Contents, check_places, merge_files, place_of, read_files
from clinrl.config.model import Model, resolve
from clinrl.config.recipes import GrpoProfile, GrpoTrainer, Lora, RejectionProfile, SftProfile, SftTrainer, lengths
from clinrl.errors import ParamsError, format_value
from clinrl.tasks.base import GIVEN, get_task, task_names


class Params(Section):
    """All parameters, from params.yaml and the files of params/."""

    scale: Scale
    """embedded or full: which block of bases, budgets and trainers is active."""
    bases: dict[str, BaseSpec]
    """Task to its base."""
    modes: dict[Name, schema.Mode]
    """Modes by name: the ways in which every model is evaluated."""
    datasets: dict[Name, schema.DatasetSpec]
    """Data sets by name that are drawn from a task's rules; those read from records stand under `imports`."""
    profiles: dict[Name, Annotated[SftProfile | RejectionProfile | GrpoProfile, Field(discriminator="method")]]
    """Recipes by name."""
    versions: dict[Name, schema.VersionSpec]
    """Versions by name."""
    merges: schema.Merges = schema.Merges()
    """Folds and blends by name."""
    mining: dict[Name, schema.FurtherData] = Field(default_factory=dict)
    """Version to the data set of its error analysis."""
    imports: dict[Name, schema.ImportSpec] = Field(default_factory=dict)
    """Data sets by name that are read from somebody's records."""
    external: dict[Name, schema.FurtherData] = Field(default_factory=dict)
    """Version to the data set of its external exam."""
    protocols: schema.Protocols = schema.Protocols()
    """Bases and versions that are also evaluated by a published protocol, by name."""
    rivals: dict[Name, Rival] = Field(default_factory=dict)
    """Classifiers by name that recipes are compared with."""
    comparisons: dict[Name, Comparison] = Field(default_factory=dict)
    """Comparisons of recipes over seeds, by name."""
    gates: dict[str, schema.Gate] = Field(default_factory=dict)
    """Task to its release gate; a task without one releases nothing."""
    plans: dict[str, change_plan.ChangePlan] = Field(default_factory=dict)
    """Task to its change plan: what its releases may change, and the error budget of their tests."""
    schedules: dict[str, schema.Schedule] = Field(default_factory=dict)
    """Task to the schedule of its retraining."""
    watches: dict[str, schema.Watch] = Field(default_factory=dict)
    """Task to how its served models are watched. Without a block requests are counted, and no flow acts on the
    counts."""
    approvers: People = Field(default_factory=dict)
    """Who may approve a release: name to public key, as one line of OpenSSH."""
    rebuilders: People = Field(default_factory=dict)
    """Whose signature counts that they rebuilt a version: name to public key, as one line of OpenSSH."""

    @model_validator(mode="after")
    def _references(self) -> "Params":
        if reserved := sorted(self.modes.keys() & RESERVED_MODES):
            names = " or ".join(RESERVED_MODES)
            raise ParamsError(f"modes.{reserved[0]} is a reserved name: a mode is not called {names}")
        for task, base in self.bases.items():
            check_known("bases", task, task_names(), "a task")
            _check_turns(f"bases.{task}.embedded", task, base.embedded)
            _check_turns(f"bases.{task}.full", task, base.full)
            self._check_use(f"bases.{task}.exam", base.exam, "exam", task)
        for name, dataset in self.datasets.items():
            at, task = f"datasets.{name}", dataset.task
            check_known(f"{at}.task", task, task_names(), "a task")
            check_known(f"{at}.mix", dataset.mix, get_task(task).checks.mixes, f"a mix of {task}")
            check_all(f"{at}.emphasis", dataset.emphasis, get_task(task).checks.rules, f"a rule of {task}")
            if dataset.edition:
                check_known(f"{at}.edition", dataset.edition, get_task(task).checks.editions, f"an edition of {task}")
        for name, source in self.imports.items():
            check_known(f"imports.{name}.task", source.task, task_names(), "a task")
            if name in self.datasets:
                raise ParamsError(f"imports.{name} is the name of a data set too; an import needs one of its own")
        for name, profile in self.profiles.items():
            check_all(f"profiles.{name}.modes", profile.modes, self.modes, "a mode")
        full.check(self)
        for name, version in self.versions.items():
            self._check_names(f"versions.{name}", name, version)
        for name, version in self.versions.items():
            self._check_parent(name, version)
            self._check_recipe(name, version)
        for name, merge in self.merges.all.items():
            self._check_merge(name, merge)
        for section, use, blocks in (("mining", "mine", self.mining), ("external", "exam", self.external)):
            for name, block in blocks.items():
                check_known(section, name, self.versions, "a version")
                check_known(f"{section}.{name}.task", block.task, [self.versions[name].task], "the task of the version")
                self._check_use(f"{section}.{name}.data", block.data, use, block.task)
        for name in self.protocols.all:
            self._check_protocol(name)
        check_comparisons(self)
        for task, gate in self.gates.items():
            self._check_gate(f"gates.{task}", task, gate)
        for task, schedule in self.schedules.items():
            self._check_schedule(f"schedules.{task}", task, schedule)
        for task, watch in self.watches.items():
            check_known("watches", task, self.gates, "a task with a gate")
            _check_cron(f"watches.{task}", watch.cron)
            if watch.approver and not (watch.limit or self.allowed_harm(task)):
                raise ParamsError(
                    f"watches.{task}.approver is {watch.approver!r}, but the gate allows no harmful error, so that one "
                    f"mistyped label would roll back; set watches.{task}.limit to a share above 0"
                )
        for task in self.plans:
            change_plan.check(self, task)
        return self

    def _check_protocol(self, name: str) -> None:
        """Refuse a protocol for a task without one, for another exam, or not comparable with that of `against`."""
        protocols = self.protocols
        spec = protocols.all[name]
        at = f"protocols.{'versions' if name in protocols.versions else 'bases'}.{name}"
        if name in protocols.versions:
            check_known(at, name, self.versions, "a version")
            task, exam = self.versions[name].task, self.versions[name].exam
        else:
            check_known(at, name, self.roots, "the base of a task")
            task, exam = self.roots[name], self.bases[self.roots[name]].exam
        check_known(f"{at}.task", spec.task, [task], "its task")
        published = get_task(task).benchmark
        if published is None:
            fitting = [task for task in task_names() if get_task(task).benchmark is not None]
            check_known(f"{at}.task", task, fitting, "a task with a published protocol")
            return
        check_known(f"{at}.exam", spec.exam, [exam], "the exam that it took")
        check_all(f"{at}.levels", spec.levels, published.levels, f"a level of {task}")
        if name in protocols.versions:
            against = protocols.versions[name].against
            before = [*self.lineage(name)[:-1], f"{task}-base"]
            check_known(f"{at}.against", against, before, "an ancestor or the base")
            check_known(f"{at}.against", against, protocols.all, "one with a protocol, which it needs")
            other = protocols.all[against]
            for key in type(other).model_fields.keys() - {"against"}:
                if getattr(spec, key) != getattr(other, key):
                    raise ParamsError(
                        f"{at}.{key} is not that of {against}, with which it is compared; both need the same"
                    )

    def _check_merge(self, name: str, merge: schema.Fold | schema.Blend) -> None:
        """Refuse a merge whose name is in use, or whose versions are not of its task and exam."""
        at = f"merges.{'folds' if name in self.merges.folds else 'blends'}.{name}"
        if name in self.versions or name.endswith("-base") or name in RESERVED:
            raise ParamsError(f"{at} is a name in use; a merge needs one of its own")
        if name in self.merges.folds and name in self.merges.blends:
            raise ParamsError(f"{at} names a fold and a blend; each merge needs a name of its own")
        check_known(f"{at}.task", merge.task, self.bases, "a task with a base")
        for key, version in merge.parts.items():
            check_known(f"{at}.{key}", version, self.versions_of(merge.task), f"a version of {merge.task}")
        exam = self.versions[next(iter(merge.parts.values()))].exam
        check_known(f"{at}.exam", merge.exam, [exam], "the exam that its version took, with which it is compared")

    def _check_gate(self, at: str, task: str, gate: schema.Gate) -> None:
        check_known("gates", task, self.bases, "a task with a base")
        metrics = [*get_task(task).all_metrics, "mode_agreement"]
        check_all(f"{at}.limits", gate.limits, metrics, f"a metric of {task}")
        if (safety := get_task(task).safety.metric) not in gate.limits:
            raise ParamsError(f"{at}.limits has no limit on `{safety}`; a release without one is not allowed")
        is_max = get_task(task).metrics[safety].worse == "higher"
        side, limit = ("max", gate.limits[safety].max) if is_max else ("min", gate.limits[safety].min)
        if limit is None or not all(0 <= value < 1 if is_max else 0 < value <= 1 for value in limit.values()):
            raise ParamsError(
                f"{at}.limits.{safety}.{side} is {format_value(limit)}; a release needs a share there that a model can "
                f"break: {'0 or more, and below 1' if is_max else 'above 0, and at most 1'}"
            )
        if gate.rebuilt and gate.rebuilt.least > len(self.rebuilders):
            raise ParamsError(
                f"{at}.rebuilt.least is {gate.rebuilt.least}, but rebuilders lists {len(self.rebuilders)}; list more, "
                "or ask for fewer"
            )

    def _check_schedule(self, at: str, task: str, schedule: schema.Schedule) -> None:
        check_known("schedules", task, self.gates, "a task with a gate")
        if schedule.draft and task not in self.plans:
            raise ParamsError(f"{at}.draft is true, but plans has no {task}; say there what a draft may change")
        _check_cron(at, schedule.cron)
        try:
            ZoneInfo(schedule.timezone)
        except (ZoneInfoNotFoundError, ValueError):
            raise ParamsError(
                f"{at}.timezone is {schedule.timezone!r}, which is not in the time zone database; try 'UTC'"
            ) from None

    def _check_names(self, at: str, name: str, version: schema.VersionSpec) -> None:
        if name.endswith("-base") or name in RESERVED:
            raise ParamsError(
                f"{at} is a reserved name: a version is not called {', '.join(RESERVED)} or anything-base"
            )
        check_known(f"{at}.task", version.task, self.bases, "a task with a base")
        self._check_use(f"{at}.data", version.data, "train", version.task)
        self._check_use(f"{at}.exam", version.exam, "exam", version.task)
        if version.profile not in self.profiles:
            others = tuple(f"{task}-" for task in self.bases if task != version.task)
            used = {spec.profile for spec in self.versions.values() if spec.task != version.task}
            own = [name for name in self.profiles if name not in used and not name.startswith(others)]
            check_known(f"{at}.profile", version.profile, own, "a profile")

    def _check_use(self, at: str, dataset: str, use: str, task: str) -> None:
        """Refuse a data set of another task or pool, so that an exam is never training data."""
        fitting = [name for name, spec in self.all_data.items() if (spec.use, spec.task) == (use, task)]
        spec = self.all_data.get(dataset)
        instead = f" but {spec.use} data of {spec.task}" if spec else ""
        check_known(at, dataset, fitting, f"{use} data of {task}{instead}")

    def _check_parent(self, name: str, version: schema.VersionSpec) -> None:
        root = f"{version.task}-base"
        parent = self.versions.get(version.parent)
        if version.parent != root and (version.parent == name or parent is None or parent.task != version.task):
            allowed = [root, *(other for other in self.versions_of(version.task) if other != name)]
            check_known(
                f"versions.{name}.parent", version.parent, allowed, f"another version of {version.task} or its base"
            )
        self.lineage(name)
        if version.parent == root:
            return
        profile, before = self.profiles[version.profile], self.profiles[self.versions[version.parent].profile]
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

    def _check_recipe(self, name: str, version: schema.VersionSpec) -> None:
        """Refuse a profile that does not fit the task of its version."""
        at, profile, task = f"profiles.{version.profile}", full.recipe(self, version.profile), get_task(version.task)
        for key, labels in (("repeat", profile.stream.repeat), ("cap", profile.stream.cap)):
            check_all(f"{at}.stream.{key}", labels, task.labels, f"a label of {task.name}")
        for place, phase in enumerate(profile.stream.phases):
            check_known(
                f"{at}.stream.phases.{place}.slice", phase.slice, task.reporting.slices, f"a slice of {task.name}"
            )
        for scale, trainer in profile.trainer.items():
            phases = profile.stream.phases
            for place, (phase, steps) in enumerate(zip(phases, lengths(phases, trainer.steps), strict=True)):
                if not steps:
                    raise ParamsError(
                        f"{at}.stream.phases.{place}.share is {phase.share:g}, less than half a step of the "
                        f"{trainer.steps} at {scale} scale; raise it, or leave the phase out"
                    )
        check_known(f"{at}.view", profile.view, [GIVEN, *task.reporting.variants], f"an input variant of {task.name}")
        caps = profile.stream.cap.values()
        if len(caps) == len(task.labels) and sum(caps) < 1:
            raise ParamsError(f"{at}.stream.cap caps every label and sums to {sum(caps):g}; it must reach 1")
        if isinstance(profile, SftProfile):
            check_all(f"{at}.omit", profile.omit, task.checks.rules, f"a rule of {task.name}")
            if profile.labels_only and task.episodes is not None:
                raise ParamsError(
                    f"{at}.labels_only is true, but a case of {task.name} is an episode, whose answer is all of its "
                    "calls; allowed: leave it out"
                )
            return
        reward: Any = self.reward(name)
        if isinstance(profile, RejectionProfile):
            for scale, rejection in profile.trainer.items():
                if rejection.relabel and (task.ordered is None or rejection.threshold is not None):
                    raise ParamsError(
                        f"{at}.trainer.{scale}.relabel is true, which keeps every completion of a task with ordered "
                        "answers; allowed: leave it out, or give such a task and no threshold"
                    )
                if rejection.threshold is not None and rejection.threshold > reward.high:
                    raise ParamsError(
                        f"{at}.trainer.{scale}.threshold is {rejection.threshold:g}, but no completion earns more than "
                        f"{reward.high:g}; lower it, or leave it out to keep right answers"
                    )
            return
        for scale, trainer in profile.trainer.items():
            _check_turns(f"{at}.trainer.{scale}", task.name, trainer)
            if task.episodes is not None and trainer.held_out is not None:
                raise ParamsError(
                    f"{at}.trainer.{scale}.held_out is set, but a look at held-out cases is one turn and a case of "
                    f"{task.name} is an episode; allowed: leave it out"
                )

    @property
    def roots(self) -> dict[str, str]:
        """The task of each base, by the base's name, `<task>-base`."""
        return {f"{task}-base": task for task in self.bases}

    def versions_of(self, task: str) -> list[str]:
        """The versions of a task, in the order of the file."""
        return [name for name, spec in self.versions.items() if spec.task == task]

    def newest_of(self, task: str) -> str:
        """The last version of a task that is no parent. Raises IndexError for a task without versions."""
        named = self.versions_of(task)
        parents = {self.versions[name].parent for name in named}
        return [name for name in named if name not in parents][-1]

    @property
    def all_data(self) -> dict[str, schema.DatasetSpec | schema.ImportSpec]:
        """Every data set by name, drawn or imported."""
        return {**self.datasets, **self.imports}

    def data_spec(self, name: str) -> schema.DatasetSpec | schema.ImportSpec:
        """The block of a data set, drawn or imported. Raises ParamsError for an unknown name."""
        check_known("params.yaml", name, self.all_data, "a data set")
        return self.all_data[name]

    def data_stages(self, name: str) -> tuple[str, str]:
        """The DVC addresses that make and validate a data set, in this order. Raises ParamsError for another name."""
        self.data_spec(name)
        make, check = ("import", "validate-import") if name in self.imports else ("dataset", "validate")
        return f"{make}@{name}", f"{check}@{name}"

    def base(self, task: str) -> EmbeddedBase | HubBase:
        """The base of a task at the active scale. Raises ParamsError for a task without one."""
        check_known("params.yaml", task, self.bases, "a task with a base")
        return self.bases[task].embedded if self.scale == "embedded" else self.bases[task].full

    def trainer(self, profile: str) -> SftTrainer | GrpoTrainer:
        """The trainer of a profile at the active scale; for rejection sampling it is an `SftTrainer` with more keys.

        Raises ParamsError for an unknown profile."""
        check_known("params.yaml", profile, self.profiles, "a profile")
        found: SftTrainer | GrpoTrainer = full.recipe(self, profile).trainer[self.scale]
        return found

    def lora(self, version: str) -> Lora:
        """The shape of a version's adapter at the active scale. Raises ParamsError for an unknown version."""
        check_known("params.yaml", version, self.versions, "a version")
        spec = self.versions[version]
        shape = self.bases[spec.task].full.lora if self.scale == "full" else None
        return shape or self.profiles[spec.profile].lora

    def mode(self, name: str, task: str) -> schema.Mode:
        """The settings of a mode for a task at the active scale, except the budget of an answer (see `budget`). Raises
        ParamsError for an unknown mode."""
        check_known("params.yaml", name, self.modes, "a mode")
        if task not in self.bases:
            return self.modes[name]
        own: dict[str, Any] = {"turn_tokens": self.base(task).turn_tokens}
        if self.scale == "full":
            base = self.bases[task].full
            own |= {"temperature": base.temperature, "top_p": base.top_p}
        return self.modes[name].model_copy(update={key: value for key, value in own.items() if value is not None})

    def budget(self, mode: str, task: str) -> int:
        """The most tokens of an answer at the active scale, as set by the task's base or else by the mode. Raises
        ParamsError for an unknown mode."""
        check_known("params.yaml", mode, self.modes, "a mode")
        base = self.bases.get(task)
        own = base and (base.embedded if self.scale == "embedded" else base.full).max_new_tokens
        return own or self.modes[mode].max_new_tokens[self.scale]

    def lineage(self, version: str) -> tuple[str, ...]:
        """A version and its ancestors, root first, without <task>-base. Raises ParamsError for an unknown version."""
        check_known("params.yaml", version, self.versions, "a version")
        chain = dict.fromkeys([version])
        while (version := self.versions[version].parent) in self.versions:
            if version in chain:
                circle = " -> ".join([*chain, version])
                raise ParamsError(f"versions.{version}.parent closes a circle ({circle}); a lineage must end at a base")
            chain[version] = None
        return tuple(reversed(chain))

    def seeds_of(self, version: str) -> tuple[str, ...]:
        """The largest row of seeds of one recipe in a comparison that includes this version; empty if none has two."""
        rows = [row for comparison in self.comparisons.values() for row in comparison.arms.values()]
        return max((row for row in rows if version in row and len(row) > 1), key=len, default=())

    def allowed_harm(self, task: str) -> float | None:
        """The share of harmful errors that the gate of a task allows at the active scale; None without a gate."""
        name, gate = get_task(task).safety.metric, self.gates.get(task)
        is_max = get_task(task).metrics[name].worse == "higher"
        bound = gate and (gate.limits[name].max if is_max else gate.limits[name].min)
        return None if not bound else bound[self.scale] if is_max else 1 - bound[self.scale]

    def parts(self, name: str) -> tuple[str, ...]:
        """The versions that a merge is made of, or a version itself. Raises ParamsError for an unknown name."""
        merges = self.merges.all
        check_known("params.yaml", name, [*self.versions, *merges], "a version or a merge")
        return tuple(merges[name].parts.values()) if name in merges else (name,)

    def model(self, name: str) -> Model:
        """The version, merge or base with this name. Raises ParamsError for an unknown name."""
        return resolve(self, name)

    def reward(self, version: str) -> BaseModel:
        """The reward that a version trains on. Raises ParamsError for an unknown version, or one without a reward."""
        check_known("params.yaml", version, self.versions, "a version")
        spec = self.versions[version]
        profile, model = self.profiles[spec.profile], get_task(spec.task).Reward
        if isinstance(profile, SftProfile):
            raise ParamsError(f"versions.{version}.profile is {spec.profile!r}, an sft recipe: it has no reward")
        try:
            return model.model_validate(profile.reward, strict=True)
        except ValidationError as error:
            raise ParamsError(sentence(error, model, f"profiles.{spec.profile}.reward")) from None


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


def load_params(path: Path = Path("params.yaml")) -> Params:
    """Read params.yaml and the files of params/ beside it as one mapping, and check it.

    Raises ParamsError with one sentence about the first error and its file.
    """
    return parse(read_files(path))


def parse(contents: Contents) -> Params:
    """The parameters in files that were read already, params.yaml first. Raises ParamsError as `load_params` does."""
    whole, places = merge_files(contents)
    try:
        check_places(params := Params.model_validate(whole), places)
    except (ValidationError, ParamsError) as error:
        text = sentence(error, Params) if isinstance(error, ValidationError) else str(error)
        raise ParamsError(f"{place_of(text, places, next(iter(contents)))}: {text}") from None
    return params
