"""The blocks of params.yaml for comparisons of recipes and rivals over seeds, and their checks."""

from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, model_validator

from clinrl.config.base import RESERVED, Distinct, Section, Share, Text, check_all, check_known, refusal
from clinrl.errors import ParamsError
from clinrl.tasks.base import EXACT, get_task
from clinrl.tasks.policies import SIMPLE

if TYPE_CHECKING:
    from clinrl.config.params import Params


class Rival(Section):
    """A classifier with all labels of a lineage: LightGBM on words, pairs of words and the numbers of a case."""

    task: str
    """The task, one of a single turn."""
    data: Distinct
    """Data sets that it learns from, drawn and for training: those of the versions that it is compared with."""
    exam: str
    """The exam of these versions. Its edition labels the cases of the embedded base, from which the rival learns
    too."""


BASE = "base"
"""The row of the untrained base in a comparison; under an input variant it is `base, <variant>`."""


class Pair(Section):
    """Two rows of a comparison that are tested against each other."""

    first: str
    """An arm, a rival, `base`, or `base, <variant>`."""
    second: str
    """Another; differences are the first less the second."""
    says: Text
    """What the first has and the second has not: what a difference between them is about."""

    @model_validator(mode="after")
    def _two(self) -> "Pair":
        if self.first == self.second:
            raise refusal(f"is {self.second!r}, as is first; a test takes two rows", "second")
        return self


class Primary(Section):
    """The primary test of a comparison, and its assumptions. `clinrl preregister` writes them down before the runs."""

    measure: str
    """A share among the metrics of the task."""
    modes: Distinct
    """Modes in which it is tested; p is adjusted for their number."""
    first: str
    """An arm or `base`."""
    second: str
    """Another; the difference is the first less the second."""
    effect: Annotated[float, Field(gt=0, le=100)]
    """Smallest effect of interest, in percentage points, above 0 to 100."""
    alpha: Annotated[float, Field(ge=0.001, le=0.2)] = 0.05
    """Two-sided level of the test, 0.001 to 0.2."""
    discordant: Share | None = None
    """Expected share of cases that count for one row and not for the other, 0 to 1. Null, for `exact` alone: reckoned
    as if both rows erred independently, as often as their parent in its error analysis."""
    seed_sd: Annotated[float, Field(ge=0, le=50)]
    """Expected standard deviation of the measure between seeds of one recipe, in percentage points, 0 to 50."""
    design_effect: Annotated[float, Field(ge=1)] | None = None
    """How many cases say as much as one by itself, 1 or more; needed where cases come in clusters."""

    @model_validator(mode="after")
    def _sound(self) -> "Primary":
        if self.first == self.second:
            raise refusal(f"is {self.second!r}, as is first; a test takes two rows", "second")
        if self.discordant is not None and self.discordant < self.effect / 100:
            raise refusal(
                f"is {self.discordant:g}, too few for an effect of {self.effect:g} points, since only discordant cases "
                "make a difference; raise it, or lower the effect",
                "discordant",
            )
        return self


class Partition(Section):
    """Rows of a comparison that split the effect of a reward into three shares (Gao 2026, arXiv:2606.05932)."""

    parent: str
    """The row from which the other three start."""
    random: str
    """The row rewarded by a coin. Less `parent` it is the null share: the effect of steps without information."""
    majority: str
    """The row rewarded for its own most frequent answer. Less `random` it is elicitation: what the parent knew."""
    labels: str
    """The row rewarded by labels. Less `majority` it is the share of the reward."""

    @property
    def rows(self) -> tuple[str, str, str, str]:
        """The four rows: parent, random, majority, labels."""
        return self.parent, self.random, self.majority, self.labels


class Comparison(Section):
    """A comparison of recipes over seeds on one exam."""

    task: str
    """The task of all versions."""
    columns: Distinct
    """Metrics of the task that the tables show; the pooled tests are about the first."""
    quality: str = ""
    """The measure of reasoning (a quality of the task) in figure and text; empty: none."""
    parts: str = ""
    """A slice of the task whose values are reported one by one too; empty: all cases together only."""
    arms: Annotated[dict[Text, Distinct], Field(min_length=1)]
    """Name of a recipe to its versions, one a seed; a control is an arm too."""
    rivals: dict[Text, str] = Field(default_factory=dict)
    """Name of a row to the rival whose answers it shows; a test may name it."""
    tests: Annotated[tuple[Pair, ...], Field(strict=False)] = ()
    """Which rows are tested against each other, in the order of the text."""
    published: dict[str, dict[str, float]] = Field(default_factory=dict)
    """Arm to published figures of that recipe on other data, by metric."""
    published_parts: dict[str, dict[str, dict[str, float]]] = Field(default_factory=dict)
    """The same for values of the slice `parts`."""
    partition: Partition | None = None
    """Rows that split the effect of a reward; null: none."""
    primary: Primary | None = None
    """The primary test; its pre-registration must exist before the report. Null: the comparison explores."""

    @property
    def versions(self) -> tuple[str, ...]:
        """The versions of all arms, each once."""
        return tuple(dict.fromkeys(version for versions in self.arms.values() for version in versions))

    @property
    def primary_rows(self) -> dict[str, tuple[str, ...]]:
        """The versions of the two rows of `primary`, the first row first; the base has none."""
        names = (self.primary.first, self.primary.second) if self.primary else ()
        return {row: self.arms.get(row, ()) for row in names}

    @model_validator(mode="after")
    def _seeds(self) -> "Comparison":
        for row, versions in self.primary_rows.items():
            if len(versions) == 1:
                raise refusal(
                    f"names {row!r}, which has one version; two or more show a spread of seeds, and a test without one "
                    "takes a lucky seed for a better recipe",
                    "primary",
                )
        return self


def check_comparisons(params: "Params") -> None:
    """Raise ParamsError for rivals and comparisons with names that are not in `params`, or that do not fit."""
    for name, rival in params.rivals.items():
        _check_rival(params, f"rivals.{name}", name, rival)
    for name, comparison in params.comparisons.items():
        _check_comparison(params, f"comparisons.{name}", comparison)


def _check_rival(params: "Params", at: str, name: str, rival: Rival) -> None:
    """Refuse a name in use, a task of several turns, an exam other than the base's, and data not drawn for training."""
    if name in (*params.versions, *params.merges.all, *params.roots, *RESERVED):
        raise ParamsError(f"{at} is a name in use; a rival needs one of its own")
    single = [task for task in params.bases if get_task(task).episodes is None]
    check_known(f"{at}.task", rival.task, single, "a task of one turn with a base")
    check_known(f"{at}.exam", rival.exam, [params.bases[rival.task].exam], "the exam that the base takes")
    drawn = [data for data, spec in params.datasets.items() if (spec.use, spec.task) == ("train", rival.task)]
    check_all(f"{at}.data", rival.data, drawn, f"drawn train data of {rival.task}")


def _check_comparison(params: "Params", at: str, comparison: Comparison) -> None:
    """Refuse rows that are not recipes of one task and exam, and unknown rows and metrics in tests and columns."""
    check_known(f"{at}.task", comparison.task, params.bases, "a task with a base")
    task = get_task(comparison.task)
    check_all(f"{at}.columns", comparison.columns, task.metrics, f"a metric of {task.name}")
    check_known(f"{at}.quality", comparison.quality, ["", *task.reporting.qualities], f"a quality of {task.name}")
    check_known(f"{at}.parts", comparison.parts, ["", *task.reporting.slices], f"a slice of {task.name}")
    bases = [BASE, *(f"{BASE}, {variant}" for variant in task.reporting.variants)]
    simple = [*task.policies()] if task.episodes else [*SIMPLE, *(f"always {label}" for label in task.labels)]
    _check_arms(params, at, comparison, [*bases, *simple])
    fitting = [name for name, rival in params.rivals.items() if rival.task == task.name]
    check_all(f"{at}.rivals", comparison.rivals.values(), fitting, f"a rival of {task.name}")
    if taken := comparison.rivals.keys() & {*bases, *simple, *comparison.arms}:
        raise ParamsError(f"{at}.rivals: {min(taken)!r} is the name of another row; each rival needs its own")
    known = [*comparison.arms, *comparison.rivals, *bases]
    for place, pair in enumerate(comparison.tests):
        for key, row in (("first", pair.first), ("second", pair.second)):
            check_known(f"{at}.tests.{place}.{key}", row, known, "a row of the comparison")
    if len({frozenset((pair.first, pair.second)) for pair in comparison.tests}) < len(comparison.tests):
        raise ParamsError(f"{at}.tests names a pair of rows twice, and each adjusts the p of all; leave one out")
    for key, row in comparison.partition.model_dump().items() if comparison.partition else ():
        check_known(f"{at}.partition.{key}", row, known, "a row of the comparison")
    if comparison.partition and len({*comparison.partition.rows}) < 4:
        raise ParamsError(f"{at}.partition has one row in two places, between which nothing differs; name four rows")
    for printed in (comparison.published, *comparison.published_parts.values()):
        for row, figures in printed.items():
            check_known(f"{at}.published", row, comparison.arms, "an arm")
            check_all(f"{at}.published.{row}", figures, comparison.columns, "one of the columns")
    if comparison.primary:
        _check_primary(params, f"{at}.primary", comparison, comparison.primary)


def _check_arms(params: "Params", at: str, comparison: Comparison, others: Collection[str]) -> None:
    """Refuse an arm with the name of another row, and versions that are not one recipe on the exam of the base."""
    task, exam = comparison.task, params.bases[comparison.task].exam
    for row, versions in comparison.arms.items():
        if row in others:
            raise ParamsError(f"{at}: {row!r} is the name of another row; each arm needs its own")
        drawn: dict[tuple[str, int], str] = {}
        for version in versions:
            check_known(f"{at}, {row!r}", version, params.versions_of(task), f"a version of {task}")
            spec = params.versions[version]
            check_known(f"{at}, {row!r}: the exam of {version}", spec.exam, [exam], "the exam that the base takes")
            if _recipes(params, version) != _recipes(params, versions[0]):
                raise ParamsError(
                    f"{at}, {row!r}: {versions[0]} and {version}, or their parents, differ in profile or data; the "
                    "versions of a row are one recipe with other seeds"
                )
            if same := drawn.get((spec.parent, spec.seed)):
                raise ParamsError(
                    f"{at}, {row!r}: {same} and {version} have one parent and one seed, so they are one model; the "
                    "versions of a row are one recipe with other seeds"
                )
            drawn[spec.parent, spec.seed] = version


def _recipes(params: "Params", version: str) -> list[tuple[str, str]]:
    """Profile and data of each version of a lineage."""
    return [(params.versions[name].profile, params.versions[name].data) for name in params.lineage(version)]


def check_design_effect(at: str, primary: Primary, of: str) -> None:
    """Raise ParamsError if the design effect, which clustered cases need, is missing."""
    if primary.design_effect is None:
        raise ParamsError(
            f"{at}.design_effect is missing, but cases of {of} come in clusters; say how many of them count "
            "as one by itself: 1 + (mean cluster size - 1) x intraclass correlation"
        )


def _check_primary(params: "Params", at: str, comparison: Comparison, primary: Primary) -> None:
    """Refuse a measure that is no share, unknown rows and modes, and missing assumptions."""
    task = get_task(comparison.task)
    check_known(f"{at}.measure", primary.measure, task.shares, f"a share among the metrics of {task.name}")
    check_all(f"{at}.modes", primary.modes, params.modes, "a mode")
    for key, row in (("first", primary.first), ("second", primary.second)):
        check_known(f"{at}.{key}", row, [*comparison.arms, BASE], "an arm or the base")
    if task.reporting.cluster is not None:
        check_design_effect(at, primary, task.name)
    parents = {params.versions[name].parent for row in comparison.primary_rows.values() for name in row}
    is_known = primary.measure == EXACT and len(parents) == 1 and parents <= params.mining.keys()
    if primary.discordant is None and not is_known:
        raise ParamsError(
            f"{at}.discordant is missing; give it, or, for {EXACT}, let `mining` have the one parent of both rows"
        )
