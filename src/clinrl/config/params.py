"""params.yaml and the files of params/, parsed once: every value, name and cross-reference is checked on loading.

A `Params` object is therefore always sound, and a stage may look up what it names without asking again. Whatever is
wrong is said in one sentence that names the key, the value and what is allowed.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import BaseModel, Field, ValidationError, model_validator

from clinrl.config.base import RESERVED, Name, People, Scale, Section, check_known, sentence
from clinrl.config.bases import BaseSpec, EmbeddedBase, HubBase
from clinrl.config.files import Contents, check_places, merge, place_of, read_files
from clinrl.config.model import Model, resolve
from clinrl.config.schema import (
    BASE,
    Blend,
    Comparison,
    DatasetSpec,
    External,
    Fold,
    Gate,
    GrpoProfile,
    GrpoTrainer,
    ImportSpec,
    Merges,
    Mining,
    Mode,
    Protocols,
    Schedule,
    SftProfile,
    SftTrainer,
    VersionSpec,
    lengths,
)
from clinrl.errors import ParamsError
from clinrl.tasks.base import GIVEN, get_task, task_names


class Params(Section):
    """The whole of params.yaml and of the files beside it."""

    scale: Scale
    """embedded or full: which block of bases, budgets and trainers is active."""
    bases: dict[str, BaseSpec]
    """Task to its base."""
    modes: dict[Name, Mode]
    """Name to mode."""
    datasets: dict[Name, DatasetSpec]
    """Name to data set that is drawn here; `all_data` has the imported ones too."""
    profiles: dict[Name, Annotated[SftProfile | GrpoProfile, Field(discriminator="method")]]
    """Name to recipe."""
    versions: dict[Name, VersionSpec]
    """Name to version."""
    merges: Merges = Merges()
    """Folds and blends by name."""
    mining: dict[Name, Mining] = Field(default_factory=dict)
    """Version to the data on which its errors are mined."""
    imports: dict[Name, ImportSpec] = Field(default_factory=dict)
    """Name to data set that is read from somebody's records."""
    external: dict[Name, External] = Field(default_factory=dict)
    """Version to the data of its external exam."""
    protocols: Protocols = Protocols()
    """Bases and versions whose evaluation goes beyond the exam, by name."""
    comparisons: dict[Name, Comparison] = Field(default_factory=dict)
    """Name to recipes that are compared over seeds."""
    gates: dict[str, Gate] = Field(default_factory=dict)
    """Task to its release gate; a task without one releases nothing."""
    schedules: dict[str, Schedule] = Field(default_factory=dict)
    """Task to the schedule of its retraining."""
    approvers: People = Field(default_factory=dict)
    """Who may approve a release: name to public key, as one line of OpenSSH."""
    rebuilders: People = Field(default_factory=dict)
    """Whose word counts that they rebuilt a version: name to public key."""

    @model_validator(mode="after")
    def _references(self) -> "Params":
        for task, base in self.bases.items():
            check_known("bases", task, task_names(), "a task")
            self._check_use(f"bases.{task}.exam", base.exam, "exam", task)
        for name, dataset in self.datasets.items():
            check_known(f"datasets.{name}.task", dataset.task, task_names(), "a task")
            check_known(
                f"datasets.{name}.mix", dataset.mix, get_task(dataset.task).checks.mixes, f"a mix of {dataset.task}"
            )
            for rule in dataset.emphasis:
                check_known(
                    f"datasets.{name}.emphasis", rule, get_task(dataset.task).checks.rules, f"a rule of {dataset.task}"
                )
        for name, source in self.imports.items():
            check_known(f"imports.{name}.task", source.task, task_names(), "a task")
            if name in self.datasets:
                raise ParamsError(f"imports.{name} is the name of a data set too; an import needs one of its own")
        for name, profile in self.profiles.items():
            for mode in profile.modes:
                check_known(f"profiles.{name}.modes", mode, self.modes, "a mode")
        for name, version in self.versions.items():
            self._check_names(f"versions.{name}", name, version)
        for name, version in self.versions.items():
            self._check_parent(name, version)
            self._check_recipe(name, version)
        for name, fold in self.merges.folds.items():
            self._check_merge(f"merges.folds.{name}", name, fold, {"version": fold.version})
        for name, blend in self.merges.blends.items():
            self._check_merge(f"merges.blends.{name}", name, blend, {"first": blend.first, "second": blend.second})
        for name, mining in self.mining.items():
            check_known("mining", name, self.versions, "a version")
            check_known(f"mining.{name}.task", mining.task, [self.versions[name].task], "the task of the version")
            self._check_use(f"mining.{name}.data", mining.data, "mine", mining.task)
        for name, external in self.external.items():
            check_known("external", name, self.versions, "a version")
            check_known(f"external.{name}.task", external.task, [self.versions[name].task], "the task of the version")
            self._check_use(f"external.{name}.data", external.data, "exam", external.task)
        for name in self.protocols.all:
            self._check_protocol(name)
        for name, comparison in self.comparisons.items():
            self._check_comparison(f"comparisons.{name}", comparison)
        for task, gate in self.gates.items():
            self._check_gate(f"gates.{task}", task, gate)
        for task, schedule in self.schedules.items():
            self._check_schedule(f"schedules.{task}", task, schedule)
        return self

    def _check_protocol(self, name: str) -> None:
        """Refuse a protocol of a task that has none, of another exam, or beside one that cannot be compared."""
        protocols = self.protocols
        spec = protocols.all[name]
        at = f"protocols.{'versions' if name in protocols.versions else 'bases'}.{name}"
        if name in protocols.versions:
            check_known(at, name, self.versions, "a version")
            task, exam = self.versions[name].task, self.versions[name].exam
        else:
            roots = {f"{task}-base": task for task in self.bases}
            check_known(at, name, roots, "the base of a task")
            task, exam = roots[name], self.bases[roots[name]].exam
        check_known(f"{at}.task", spec.task, [task], "its task")
        published = get_task(task).benchmark
        if published is None:
            fitting = [task for task in task_names() if get_task(task).benchmark is not None]
            check_known(f"{at}.task", task, fitting, "a task with a published protocol")
            return
        check_known(f"{at}.exam", spec.exam, [exam], "the exam that it sat")
        for level in spec.levels:
            check_known(f"{at}.levels", level, published.levels, f"a level of {task}")
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

    def _check_merge(self, at: str, name: str, merge: Fold | Blend, parts: Mapping[str, str]) -> None:
        """Refuse a merge that is called like a version, or whose versions are not of its task and exam."""
        if name in self.versions or name.endswith("-base") or name in RESERVED:
            raise ParamsError(f"{at} is a name in use; a merge needs one of its own")
        if name in self.merges.folds and name in self.merges.blends:
            raise ParamsError(f"{at} names a fold and a blend; each merge needs a name of its own")
        check_known(f"{at}.task", merge.task, self.bases, "a task with a base")
        family = [version for version, spec in self.versions.items() if spec.task == merge.task]
        for key, version in parts.items():
            check_known(f"{at}.{key}", version, family, f"a version of {merge.task}")
        examined = self.versions[next(iter(parts.values()))].exam
        check_known(f"{at}.exam", merge.exam, [examined], "the exam that its version sat, with which it is compared")

    def _check_comparison(self, at: str, comparison: Comparison) -> None:
        """Refuse rows that are no recipes of one task and exam, and tests and columns of what is not there."""
        check_known(f"{at}.task", comparison.task, self.bases, "a task with a base")
        task, exam = get_task(comparison.task), self.bases[comparison.task].exam
        for column in comparison.columns:
            check_known(f"{at}.columns", column, task.metrics, f"a metric of {task.name}")
        check_known(f"{at}.quality", comparison.quality, ["", *task.reporting.qualities], f"a quality of {task.name}")
        check_known(f"{at}.parts", comparison.parts, ["", *task.reporting.slices], f"a slice of {task.name}")
        bases = [BASE, *(f"{BASE}, {view}" for view in task.reporting.variants)]
        family = [version for version, spec in self.versions.items() if spec.task == task.name]
        for row, versions in comparison.rows.items():
            if row in bases or (row in comparison.arms and row in comparison.controls):
                raise ParamsError(f"{at}: {row!r} is the name of another row; each arm and control needs its own")
            for version in versions:
                check_known(f"{at}, {row!r}", version, family, f"a version of {task.name}")
                spec, first = self.versions[version], self.versions[versions[0]]
                check_known(f"{at}, {row!r}: the exam of {version}", spec.exam, [exam], "the exam that the base sits")
                if (spec.profile, spec.data) != (first.profile, first.data):
                    raise ParamsError(
                        f"{at}, {row!r}: {versions[0]} and {version} differ in profile or data; the versions of a row "
                        "are one recipe with other seeds"
                    )
        for place, pair in enumerate(comparison.tests):
            sides = [comparison.rows.get(row, ()) for row in (pair.first, pair.second)]
            for key, row in (("first", pair.first), ("second", pair.second)):
                check_known(f"{at}.tests.{place}.{key}", row, [*comparison.rows, *bases], "a row of the comparison")
            if min(map(len, sides)) > 1 and len(sides[0]) != len(sides[1]):
                raise ParamsError(
                    f"{at}.tests.{place} pairs {len(sides[0])} versions with {len(sides[1])}; seed by seed, both have "
                    "as many, or one has a single version"
                )
        for printed in (comparison.published, *comparison.published_parts.values()):
            for row, figures in printed.items():
                check_known(f"{at}.published", row, comparison.rows, "an arm or a control")
                for metric in figures:
                    check_known(f"{at}.published.{row}", metric, comparison.columns, "one of the columns")

    def _check_gate(self, at: str, task: str, gate: Gate) -> None:
        check_known("gates", task, self.bases, "a task with a base")
        metrics = [*get_task(task).metrics, "no_parse", "mode_agreement"]
        for metric in gate.limits:
            check_known(f"{at}.limits", metric, metrics, f"a metric of {task}")
        if (safety := get_task(task).safety.metric) not in gate.limits:
            raise ParamsError(f"{at}.limits has no limit on `{safety}`; a release without one is not allowed")
        if gate.rebuilt and gate.rebuilt.least > len(self.rebuilders):
            raise ParamsError(
                f"{at}.rebuilt.least is {gate.rebuilt.least}, but rebuilders lists {len(self.rebuilders)}; list more, "
                "or ask for fewer"
            )

    def _check_schedule(self, at: str, task: str, schedule: Schedule) -> None:
        check_known("schedules", task, self.gates, "a task with a gate")
        if len(schedule.cron.split()) != 5:
            raise ParamsError(f"{at}.cron is {schedule.cron!r}; it needs five fields, as in '0 3 * * 1'")
        try:
            ZoneInfo(schedule.timezone)
        except (ZoneInfoNotFoundError, ValueError):
            raise ParamsError(
                f"{at}.timezone is {schedule.timezone!r}, which is not in the time zone database; try 'UTC'"
            ) from None

    def _check_names(self, at: str, name: str, version: VersionSpec) -> None:
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
        """Refuse a data set of another task or another pool: an exam is never training data."""
        fitting = [name for name, spec in self.all_data.items() if (spec.use, spec.task) == (use, task)]
        spec = self.all_data.get(dataset)
        instead = f" but {spec.use} data of {spec.task}" if spec else ""
        check_known(at, dataset, fitting, f"{use} data of {task}{instead}")

    def _check_parent(self, name: str, version: VersionSpec) -> None:
        root = f"{version.task}-base"
        parent = self.versions.get(version.parent)
        if version.parent != root and (version.parent == name or parent is None or parent.task != version.task):
            family = [other for other, spec in self.versions.items() if spec.task == version.task and other != name]
            allowed = [root, *family]
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
        if (profile.method, before.method) == ("sft", "grpo"):
            raise ParamsError(
                f"{at}, an sft recipe after the grpo version {version.parent}, and imitation would undo what the "
                "reward taught; allowed: a grpo profile, or an sft parent"
            )

    def _check_recipe(self, name: str, version: VersionSpec) -> None:
        """Refuse a profile that does not fit the task of a version that uses it."""
        at, profile, task = f"profiles.{version.profile}", self.profiles[version.profile], get_task(version.task)
        for key, labels in (("repeat", profile.stream.repeat), ("cap", profile.stream.cap)):
            for label in labels:
                check_known(f"{at}.stream.{key}", label, task.labels, f"a label of {task.name}")
        for place, phase in enumerate(profile.stream.phases):
            check_known(
                f"{at}.stream.phases.{place}.slice", phase.slice, task.reporting.slices, f"a slice of {task.name}"
            )
        for scale, trainer in profile.trainer.items():
            if short := [
                place for place, steps in enumerate(lengths(profile.stream.phases, trainer.steps)) if not steps
            ]:
                raise ParamsError(
                    f"{at}.stream.phases.{short[0]}.share is {profile.stream.phases[short[0]].share:g}, less than half "
                    f"a step of the {trainer.steps} at {scale} scale; raise it, or leave the phase out"
                )
        check_known(f"{at}.view", profile.view, [GIVEN, *task.reporting.variants], f"a view of {task.name}")
        caps = profile.stream.cap.values()
        if len(caps) == len(task.labels) and sum(caps) < 1:
            raise ParamsError(f"{at}.stream.cap caps every label and sums to {sum(caps):g}; it must reach 1")
        if isinstance(profile, SftProfile):
            for rule in profile.omit:
                check_known(f"{at}.omit", rule, task.checks.rules, f"a rule of {task.name}")
            return
        self.reward(name)
        if task.episodes is not None:
            self._check_episodes(at, profile, task.name)
        quantize = self.bases[version.task].full.quantize
        if profile.trainer["full"].vllm and quantize != "none":
            raise ParamsError(
                f"{at}.trainer.full.vllm is true, but bases.{version.task}.full.quantize is {quantize!r} and vLLM must "
                "serve the weights that are trained; allowed: quantize none, or vllm false"
            )

    def _check_episodes(self, at: str, profile: GrpoProfile, task: str) -> None:
        """Refuse what a training on episodes cannot have."""
        for scale, trainer in profile.trainer.items():
            if trainer.held_out is not None:
                raise ParamsError(
                    f"{at}.trainer.{scale}.held_out is set, but a look at held-out cases is one turn and a case of "
                    f"{task} is an episode; allowed: leave it out"
                )

    @property
    def all_data(self) -> dict[str, DatasetSpec | ImportSpec]:
        """Every data set by name, drawn or imported."""
        return {**self.datasets, **self.imports}

    def data_spec(self, name: str) -> DatasetSpec | ImportSpec:
        """The block of a data set, drawn or imported. Raises ParamsError for an unknown name."""
        check_known("params.yaml", name, self.all_data, "a data set")
        return self.all_data[name]

    def data_stages(self, name: str) -> tuple[str, str]:
        """The DVC addresses that make and validate a data set, in this order. Raises ParamsError for another name."""
        self.data_spec(name)
        return (
            (f"import@{name}", f"validate-import@{name}")
            if name in self.imports
            else (f"dataset@{name}", f"validate@{name}")
        )

    def base(self, task: str) -> EmbeddedBase | HubBase:
        """The base of a task at the active scale. Raises ParamsError for a task without one."""
        check_known("params.yaml", task, self.bases, "a task with a base")
        return self.bases[task].embedded if self.scale == "embedded" else self.bases[task].full

    def trainer(self, profile: str) -> SftTrainer | GrpoTrainer:
        """The trainer of a profile at the active scale. Raises ParamsError for an unknown profile."""
        check_known("params.yaml", profile, self.profiles, "a profile")
        return self.profiles[profile].trainer[self.scale]

    def budget(self, mode: str, task: str) -> int:
        """Tokens that an answer to a task may use in a mode, at the active scale: those of the mode, or of the task's
        base, if it has its own. Raises ParamsError for an unknown mode."""
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

    def parts(self, name: str) -> tuple[str, ...]:
        """The versions that a merge is made of; of a version, itself. Raises ParamsError for an unknown name."""
        folds, blends = self.merges.folds, self.merges.blends
        check_known("params.yaml", name, [*self.versions, *folds, *blends], "a version or a merge")
        if name in folds:
            return (folds[name].version,)
        return (blends[name].first, blends[name].second) if name in blends else (name,)

    def model(self, name: str) -> Model:
        """The version, merge or base of this name. Raises ParamsError for a name that is not here."""
        return resolve(self, name)

    def reward(self, version: str) -> BaseModel:
        """The task's Reward that a version trains on. Raises ParamsError for an unknown version, or one without."""
        check_known("params.yaml", version, self.versions, "a version")
        spec = self.versions[version]
        profile, model = self.profiles[spec.profile], get_task(spec.task).Reward
        if isinstance(profile, SftProfile):
            raise ParamsError(f"versions.{version}.profile is {spec.profile!r}, an sft recipe: it has no reward")
        try:
            return model.model_validate(profile.reward, strict=True)
        except ValidationError as error:
            raise ParamsError(sentence(error, model, f"profiles.{spec.profile}.reward")) from None


def load_params(path: Path = Path("params.yaml")) -> Params:
    """Read params.yaml and the files of params/ beside it as one mapping, and check it.

    Raises ParamsError with one sentence about the first thing that is wrong, and the file in which it stands.
    """
    return parse(read_files(path))


def parse(contents: Contents) -> Params:
    """The same for files that were read already, the first of which is params.yaml. Raises ParamsError as above."""
    whole, places = merge(contents)
    try:
        check_places(params := Params.model_validate(whole), places)
    except (ValidationError, ParamsError) as error:
        text = sentence(error, Params) if isinstance(error, ValidationError) else str(error)
        raise ParamsError(f"{place_of(text, places, next(iter(contents)))}: {text}") from None
    return params
