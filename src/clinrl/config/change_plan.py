"""The change plan of a task: what a release may change, how it is tested, and what error its tests may make.

After the predetermined change control plan of the FDA (guidance for AI-enabled device software functions, December
2024): a description of modifications (`changes`), a modification protocol (`protocol`, with the `budget` of its tests)
and an impact assessment (`impact`). Anything that a plan does not name stays as it is until a person changes the plan.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator

from clinrl.config.base import Count, Distinct, Section, check_all, check_known, refusal
from clinrl.errors import format_value
from clinrl.tasks.base import EXACT, get_task

if TYPE_CHECKING:
    from clinrl.config.params import Params

Level = Annotated[float, Field(gt=0, lt=1)]


class Allowed(Section):
    """The values that a field of a recipe may have."""

    min: float | None = None
    """Least number that is allowed."""
    max: float | None = None
    """Greatest number that is allowed."""
    one_of: Annotated[tuple[str | float | bool, ...], Field(strict=False)] = ()
    """The values that are allowed, in place of min and max."""

    @model_validator(mode="after")
    def _one_way(self) -> "Allowed":
        is_range = self.min is not None or self.max is not None
        if is_range == bool(self.one_of):
            raise refusal("must have either min or max, or one_of")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise refusal(f"is {self.min:g}, above max ({self.max:g}), so that no value is allowed", "min")
        return self

    def holds(self, value: Any) -> bool:
        """Whether a value is allowed."""
        if self.one_of:
            return any(
                value == allowed and isinstance(value, bool) is isinstance(allowed, bool) for allowed in self.one_of
            )
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return (self.min is None or value >= self.min) and (self.max is None or value <= self.max)

    def __str__(self) -> str:
        if self.one_of:
            return f"one of {', '.join(map(str, self.one_of))}"
        bounds = (("at least", self.min), ("at most", self.max))
        return " and ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)


class Changes(Section):
    """What a release may change: the description of modifications."""

    ancestors: Distinct
    """Versions of the task, or its base: a release is one of them, or descends from one. A blend is released only if it
    is named here."""
    exam: str
    """The exam on which releases are decided. Another one, drawn afresh, has a budget of its own."""
    most_cases: Count
    """Most training cases of a version."""
    recipes: Distinct
    """Profiles that versions of the task use. The recipe of a release equals one of them, except in `fields`."""
    fields: dict[str, Allowed] = Field(default_factory=dict)
    """Path of a recipe's field, such as trainer.embedded.lr, to its allowed values; that of a mapping stands for all in
    it that no longer path names."""


class Protocol(Section):
    """How a candidate is tested against the champion: the modification protocol."""

    superior: str = EXACT
    """A share among the task's metrics in which the candidate must be better than the champion, on average over
    modes."""
    not_worse: dict[str, Level] = Field(default_factory=dict)
    """Other shares to a margin, between 0 and 1: the candidate must be worse by less than that, in every mode."""
    screen: Annotated[float, Field(gt=0, le=1)]
    """Greatest one-sided p on the mine data with which a draft goes to the gate, above 0 to 1; it spends no budget."""


class Budget(Section):
    """The error budget of one exam."""

    alpha: Annotated[float, Field(gt=0, le=0.2)]
    """Chance that any test on this exam releases a version that is no better, above 0 to 0.2."""
    spend: Level
    """Share of the remaining budget that one decision may spend, between 0 and 1."""
    looks: Count
    """Most decisions on one exam; then it is used up."""


class ChangePlan(Section):
    """The changes to a task's versions that may be released without a change of this plan."""

    changes: Changes
    """What may change."""
    protocol: Protocol
    """How a change is tested."""
    budget: Budget
    """The error that the tests may make."""
    impact: Annotated[str, Field(min_length=20)]
    """The impact assessment, 20 characters or more: what a wrong release could do, and what would find it."""


def check(params: "Params", task: str) -> None:
    """Raise ParamsError for a plan with an unknown version, data set, recipe, field or metric, naming the key."""
    at, plan = f"plans.{task}", params.plans[task]
    check_known("plans", task, params.gates, "a task with a gate")
    changes, protocol = plan.changes, plan.protocol
    blends = [name for name, blend in params.merges.blends.items() if blend.task == task]
    known = [f"{task}-base", *params.versions_of(task), *blends]
    check_all(f"{at}.changes.ancestors", changes.ancestors, known, f"a version or a blend of {task}, or its base")
    exams = [name for name, data in params.all_data.items() if (data.use, data.task) == ("exam", task)]
    check_known(f"{at}.changes.exam", changes.exam, exams, f"exam data of {task}")
    used = dict.fromkeys(params.versions[version].profile for version in params.versions_of(task))
    check_all(f"{at}.changes.recipes", changes.recipes, used, f"a profile of a version of {task}")
    leaves = {path for recipe in changes.recipes for path in _recipe(params, task, recipe)}
    paths = {".".join(path.split(".")[:depth]) for path in leaves for depth in range(1, path.count(".") + 2)}
    check_all(f"{at}.changes.fields", changes.fields, paths, "a field of one of the recipes")
    shares = get_task(task).shares
    check_known(f"{at}.protocol.superior", protocol.superior, shares, f"a share of {task}")
    others = [name for name in shares if name != protocol.superior]
    check_all(f"{at}.protocol.not_worse", protocol.not_worse, others, f"another share of {task}")


def outside(params: "Params", version: str, count: Callable[[str], int] = lambda data: 0) -> str | None:
    """The field in which a version is outside its task's plan, as a sentence; None if it is inside, or without a plan.

    Each version after the last ancestor that the plan names must be inside. `count` returns the number of cases that a
    data set has; by default they are not counted, and those of a drawn one are as many as params.yaml asks for.
    """
    spec = params.versions[version]
    if spec.task not in params.plans:
        return None
    changes, chain = params.plans[spec.task].changes, [f"{spec.task}-base", *params.lineage(version)]
    planned = [place for place, name in enumerate(chain) if name in changes.ancestors]
    says = f"versions.{version}.parent is {spec.parent!r}, which leads to none of {', '.join(changes.ancestors)}"
    found = [] if planned else [says]
    if spec.exam != changes.exam:  # those before it were decided on the exam of their time
        found.append(f"versions.{version}.exam is {spec.exam!r}, and releases are decided on {changes.exam}")
    for name in chain[max(planned) + 1 :] if planned else ():
        data = params.versions[name].data
        cases = params.datasets[data].cases if data in params.datasets else count(data)
        if name == version:  # params.yaml may ask for another number than it was trained on
            cases = max(cases, count(data))
        found += filter(None, [_outside(params, name, changes, cases)])
    if found:
        return f"{version} is outside plans.{spec.task}.changes: {found[0]}; change the plan, or the version"
    return None


def _outside(params: "Params", version: str, changes: Changes, cases: int) -> str | None:
    """The same of one version of a lineage, without its name."""
    spec = params.versions[version]
    if cases > changes.most_cases:
        return f"versions.{version}.data is {spec.data!r} with {cases} cases, and most_cases is {changes.most_cases}"
    own = _recipe(params, spec.task, spec.profile)
    beyond = [
        _differences(f"profiles.{spec.profile}", own, recipe, _recipe(params, spec.task, recipe), changes.fields)
        for recipe in changes.recipes
    ]
    nearest = min(beyond, key=len)
    return nearest[0] if nearest else None


def _differences(
    at: str, own: Mapping[str, Any], recipe: str, planned: Mapping[str, Any], fields: Mapping[str, Allowed]
) -> list[str]:
    """The differences of a version's recipe, `own`, from a recipe of the plan that the plan does not allow: a sentence
    for each field."""
    found = []
    for path in dict.fromkeys([*own, *planned]):
        if (path in own) == (path in planned) and own[path] == planned[path]:
            continue
        covering = [key for key in fields if path == key or path.startswith(f"{key}.")]
        allowed = fields[max(covering, key=len)] if covering else None
        value = format_value(own.get(path))
        if allowed is None:
            other = format_value(planned.get(path))
            found.append(f"{at}.{path} is {value}, not {other} as in {recipe}, and is none of the plan's fields")
        elif path in own and not allowed.holds(own[path]):
            found.append(f"{at}.{path} is {value}, and must be {allowed}")
    return found


def _recipe(params: "Params", task: str, profile: str) -> dict[str, Any]:
    """The values of a recipe by path, including the defaults of its reward."""
    recipe = params.recipe(profile)
    fields = recipe.model_dump(mode="json")
    if "reward" in fields:
        fields["reward"] = get_task(task).Reward.model_validate(recipe.reward).model_dump(mode="json")
    return dict(_leaves(fields))


def _leaves(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of nested mappings, with its path."""
    if not isinstance(value, Mapping):
        yield at, value
        return
    for key, part in value.items():
        yield from _leaves(part, f"{at}.{key}" if at else str(key))
