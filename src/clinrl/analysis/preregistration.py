"""The plan of a comparison, registered before its runs, and its result in the report. Pure functions of records."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import Field

from clinrl.analysis.exam import column
from clinrl.analysis.power import Design, detectable, power
from clinrl.artifacts import digest
from clinrl.intervals import average_difference, holm, runs_of_means
from clinrl.tasks.base import Task
from clinrl.types import Estimate, Strict, Unreadable

DECIMALS = 4
"""Decimals of a power or an effect: further ones would differ with the arithmetic of machines."""
PARTS = {
    "metric": ("task", "task_version", "measure", "metric"),
    "pair": ("first", "second", "versions"),
    "data": ("exam", "data", "n", "clusters"),
    "recipe": ("scale", "recipes"),
    "seeds": ("seeds",),
    "decoding": ("modes",),
    "test": ("test",),
    "plan": ("effect", "alpha", "discordant", "seed_sd", "design_effect"),
}
"""The fields of a registration that a comparison must still match, under the names that sentences give them.

Forecasts are left out. They follow from the other fields, and stay as they were made even if later code makes better
ones.
"""


class Forecast(Strict):
    """The power of the exam in one mode, if the plan's assumptions hold."""

    power: float
    """Probability that the smallest effect of interest is shown."""
    detectable: float | None
    """Smallest effect that is shown with a probability of 80%, as a share; None if no possible one is."""


class Registration(Strict):
    """A plan with the digests of its inputs. It holds no time: git's history says when it was written."""

    name: str
    """Name of the comparison."""
    retrospective: bool
    """True if the plan was written after exams that it is about, so that it is no pre-registration."""
    task: str
    task_version: int
    measure: str
    metric: str
    """Digest of the measure's verdicts on every pair of gold label and answer."""
    test: str = Field(default="", exclude_if=lambda test: not test)
    """Digest of the test's results on made-up answers; empty in plans that are older than this field."""
    first: str
    second: str
    versions: dict[str, tuple[str, ...]]
    """Versions of each of the two rows; none for the base, which is not trained here."""
    exam: str
    data: dict[str, str]
    """Data set to digest: the exam, and what the versions and their ancestors train on."""
    n: int
    """Cases in the measure's denominator."""
    clusters: int | None
    """Number of clusters of these cases; None where cases are independent."""
    scale: str
    recipes: dict[str, str]
    """Version, ancestor and base to the digest of its recipe at this scale."""
    seeds: dict[str, int]
    """Seeds of the versions and their ancestors."""
    modes: dict[str, dict[str, Any]]
    """Decoding of each mode that is tested; the tests are adjusted for their number (Holm)."""
    effect: float
    """Smallest effect of interest, as a share."""
    alpha: float
    discordant: dict[str, float]
    """By mode: expected share of cases that count for one of the two and not for the other."""
    seed_sd: float
    """Expected standard deviation between seeds of a recipe, as a share."""
    design_effect: float
    """Number of clustered cases that are worth one independent case."""
    forecasts: dict[str, Forecast]
    """By mode, with alpha divided by the number of modes."""


class PrimaryTest(Strict):
    """The test of the primary measure in one mode, over cases and seeds."""

    mode: str
    first: Estimate
    second: Estimate
    difference: Estimate
    """The first minus the second."""
    p: float
    adjusted: float
    """p after Holm over the modes."""
    detectable: float | None
    """Smallest effect that such a test shows with a probability of 80%, as a share; None if nothing varies."""


class Primary(Strict):
    """The registration of a comparison, and the results of its tests."""

    registration: Registration
    digest: str
    """SHA-256 of the file of the registration."""
    tests: tuple[PrimaryTest, ...]


def forecasts(plan: Registration) -> dict[str, Forecast]:
    """The forecasts under a plan's assumptions, by mode."""
    first, second = (len(plan.versions[row]) for row in (plan.first, plan.second))
    found = {}
    for mode in plan.modes:
        design = Design(
            n=plan.n / plan.design_effect, clusters=plan.clusters, discordant=plan.discordant[mode],
            seeds=(first, second), seed_sd=plan.seed_sd, alpha=plan.alpha / len(plan.modes),
        )  # fmt: skip
        least = detectable(design)
        found[mode] = Forecast(
            power=round(power(design, plan.effect), DECIMALS),
            detectable=None if least is None else round(least, DECIMALS),
        )
    return found


def metric_digest(task: Task, measure: str, golds: Sequence[Any]) -> str:
    """Digest of a share's verdicts on every pair of gold label and given answer, including the unreadable answer.

    The label of an episode holds several decisions, so there are too many labels: there the pairs are made of the
    exam's gold labels, `golds`. A renamed function does not change the digest; a different verdict does.
    """
    share = task.shares[measure]
    labels = sorted(set(golds), key=str) if task.episodes else task.labels
    given = [*labels, Unreadable(reason="")]
    table = [(str(gold), column(answer), share.of(gold, answer)) for gold in labels for answer in given]
    return digest({"worse": share.worse, "table": table})


def rule_digest() -> str:
    """Digest of the results of a primary measure's test on made-up answers: another test would give other results."""
    results = [[f"{p:.3f}" for p in holm([0.04, 0.01, 0.02])]]
    for mine, theirs in ((2, 1), (3, 2), (5, 5)):
        rows: list[list[float | None]] = [
            [None if case % 50 == 3 else float((7 * case + run * case**2) % 23 < 9 + run % 3) for case in range(200)]
            for run in range(mine + theirs)
        ]
        alike, apart = rows[:1] * mine, [[0.0] * 200] * theirs
        for clusters in (None, [str(case // 20) for case in range(200)]):
            for some, others in ((rows[:mine], rows[mine:]), (alike, apart)):
                sides = (runs_of_means(some, clusters), runs_of_means(others, clusters))
                first, second = (side for side in sides if side is not None)  # each run has a number for every case
                test = average_difference(first, second, is_share=True)
                results.append([f"{test.estimate.low:.3f}", f"{test.estimate.high:.3f}", f"{test.p:.1e}"])
    return digest(results)


def changes(registered: Registration, planned: Registration) -> Iterator[str]:
    """The parts that differ, each with the names of the entries that differ."""
    for part, fields in PARTS.items():
        found = [name for field in fields for name in _changed(registered, planned, field)]
        if found:
            yield f"{part} ({', '.join(dict.fromkeys(found))})"


def _changed(registered: Registration, planned: Registration, field: str) -> list[str]:
    mine, theirs = getattr(planned, field), getattr(registered, field)
    if isinstance(mine, Mapping):
        return [f"{field} of {key}" for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
    return [] if mine == theirs else [f"{field} {theirs}, now {mine}" if len(f"{mine}") <= 24 else field]
