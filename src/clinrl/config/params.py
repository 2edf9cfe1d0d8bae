"""Loads params.yaml and the files of params/, and looks up what they say.

A `Params` object is always valid: `references` has checked what its blocks say of each other. An error names the key,
the value and the allowed values.
"""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator

from clinrl import paths
from clinrl.config import change_plan, references, schema
from clinrl.config.base import Name, People, Scale, Section, check_known, sentence
from clinrl.config.bases import BaseSpec, EmbeddedBase, HubBase
from clinrl.config.comparisons import Comparison, Rival
from clinrl.config.files import Contents, check_places, merge_files, place_of, read_files
from clinrl.config.model import MERGED, Model
from clinrl.config.recipes import GrpoProfile, GrpoTrainer, Lora, RejectionProfile, SftProfile, SftTrainer
from clinrl.errors import ParamsError, did_you_mean
from clinrl.tasks.base import GIVEN, get_task


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
    resits: dict[Name, schema.FurtherData] = Field(default_factory=dict)
    """Version or merge to the exam that it takes besides its own: a champion, once releases are decided on a fresh
    one."""
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
        references.check(self)
        return self

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

    def records_of(self, *versions: str) -> Literal["none", "exam", "training"]:
        """Where imported records are: in the training data of versions or ancestors, else in exams, else nowhere.

        Raises as `lineage`.
        """
        if any(self.versions[name].data in self.imports for version in versions for name in self.lineage(version)):
            return "training"
        return "exam" if any(self.versions[version].exam in self.imports for version in versions) else "none"

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
        found: SftTrainer | GrpoTrainer = self.recipe(profile).trainer[self.scale]
        return found

    def recipe(self, name: str) -> Any:
        """A recipe by name. Settings in the checkpoint's block replace those of its trainer at the full scale.

        A publication states its settings for one checkpoint. So they are in the block of that checkpoint, below
        `bases`, which DVC tracks only at the full scale. Raises ParamsError for a setting that the trainer does not
        have, or that does not fit.
        """
        profile = self.profiles[name]
        instead = {task: base.full.recipes[name] for task, base in self.bases.items() if name in base.full.recipes}
        if not instead:
            return profile
        ((task, settings),) = instead.items()
        own = profile.trainer["full"]
        try:
            whole = type(own).model_validate({**own.model_dump(exclude_unset=True), **settings})
        except ValidationError as error:
            raise ParamsError(sentence(error, type(own), f"bases.{task}.full.recipes.{name}")) from None
        return profile.model_copy(update={"trainer": {**profile.trainer, "full": whole}})

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
        own = self.base(task).max_new_tokens if task in self.bases else None
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

    def family(self, *names: str) -> tuple[str, ...]:
        """The versions that versions and merges are made of, with their ancestors, each after its parent."""
        parts = [part for name in names for part in self.parts(name)]
        return tuple(dict.fromkeys(before for part in parts for before in self.lineage(part)))

    def model(self, name: str) -> Model:
        """The version, merge or base with this name. Raises ParamsError for an unknown name."""
        if name in self.roots:
            task = get_task(self.roots[name])
            return Model(
                name=name, kind="base", task=task, parts=(), parent=None, compared=None, data=None,
                exam=self.bases[task.name].exam, reward=task.Reward(), folder=paths.adapter(name), registered=task.name,
                variants=tuple(task.reporting.variants),
            )  # fmt: skip
        merge = self.merges.all.get(name)
        if merge is None and name not in self.versions:
            allowed = did_you_mean(name, [*self.versions, *self.merges.all, *self.roots])
            raise ParamsError(f"{name!r} is neither a version, a merge nor the base of a task; {allowed}")
        parts = self.parts(name)
        spec = self.versions[parts[0]]
        task, profile = get_task(spec.task), self.profiles[spec.profile]
        parent = parts[0] if merge else spec.parent
        theirs = self.bases[spec.task].exam if parent in self.roots else self.versions[parent].exam
        is_full = isinstance(merge, schema.Fold) or (isinstance(merge, schema.Blend) and not merge.is_adapter)
        return Model(
            name=name,
            kind="merge" if merge else "version",
            task=task,
            parts=parts,
            parent=parent,
            compared=parent if theirs == spec.exam else None,
            data=None if merge else spec.data,
            exam=spec.exam,
            reward=task.Reward() if isinstance(profile, SftProfile) else self.reward(parts[0]),
            folder=paths.merged(name) if merge else paths.adapter(name),
            registered=task.name + MERGED if is_full else task.name,
            variant=profile.view,
            variants=tuple(task.reporting.variants) if profile.view == GIVEN else (),
            placebo=profile.placebo if isinstance(profile, GrpoProfile) else "",
        )

    def reward(self, version: str) -> BaseModel:
        """The reward that a version trains on. Raises ParamsError for an unknown version, or one without a reward."""
        check_known("params.yaml", version, self.versions, "a version")
        spec = self.versions[version]
        profile, model = self.profiles[spec.profile], get_task(spec.task).Reward
        if isinstance(profile, SftProfile):
            raise ParamsError(f"versions.{version}.profile is {spec.profile!r}, an sft recipe: it has no reward")
        try:
            # As JSON, since YAML has no tuples; dates are none of a reward's values.
            return model.model_validate_json(json.dumps(profile.reward, default=str), strict=True)
        except ValidationError as error:
            raise ParamsError(sentence(error, model, f"profiles.{spec.profile}.reward")) from None


def load_params(path: Path | str = "params.yaml") -> Params:
    """Read params.yaml and the files of params/ beside it as one mapping, and check it.

    Raises ParamsError with one sentence about the first error and its file.
    """
    return parse(read_files(Path(path)))


def parse(contents: Contents) -> Params:
    """The parameters in files that were read already, params.yaml first. Raises ParamsError as `load_params` does."""
    whole, places = merge_files(contents)
    try:
        check_places(params := Params.model_validate(whole), places)
    except (ValidationError, ParamsError) as error:
        text = sentence(error, Params) if isinstance(error, ValidationError) else str(error)
        raise ParamsError(f"{place_of(text, places, next(iter(contents)))}: {text}") from None
    return params
