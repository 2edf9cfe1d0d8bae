"""Simulated lives of a model that is retrained every week on one exam: which drafts a promotion rule lets pass.

A life is kept as counts of cases. A champion answers some cases of the exam wrongly, in both modes or in one. These
stay the same while it is champion, so that all of its drafts share its luck. A draft repairs some of them at random and
breaks others that were right; after a promotion, the next drafts are compared with the new set of wrong cases. The mine
data is a second such set of cases. Limits on measures other than the share of right answers are left out, so the
simulation does not show how often a version that harms more is promoted.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy
from numpy.random import Generator
from pydantic import Field

from clinrl.intervals import LEVEL, no_better, wilson
from clinrl.types import Estimate, Strict

if TYPE_CHECKING:
    from clinrl.config.change_plan import ChangePlan

SHARED = 0.6
"""Share of a model's wrong answers that it gives in both modes, after esi-v49: it errs in 90 (think) and 79 (direct) of
800 cases, and 52 of these are the same."""
POINT = 0.01

Gains = Callable[[Generator, int, int], Any]
"""Draws the gain of the draft of each week (row) over the champion of each life (column), as a share of cases."""

Rule = Callable[["_Drafts", "_Drafts"], tuple[Any, Any]]
"""From the drafts on exam and mine data: whether each is promoted, and whether the gate looked at its exam."""


def _always(gain: float) -> Gains:
    return lambda _, weeks, lives: numpy.full((weeks, lives), gain)


def _once(gain: float) -> Gains:
    return lambda generator, weeks, lives: gain * (numpy.arange(weeks)[:, None] == generator.integers(0, weeks, lives))


def _mixed(generator: Generator, weeks: int, lives: int) -> Any:
    return generator.choice([-1.0, -0.5, 0.0, 0.5, 1.0], size=(weeks, lives)) * POINT


SCENARIOS: Mapping[str, Gains] = {
    "every draft is useless": _always(0.0),
    "every draft is a tenth of a point worse": _always(-0.1 * POINT),
    "every draft is half a point worse": _always(-0.5 * POINT),
    "one in the year is a point better, the others useless": _once(POINT),
    "one in the year is two points better, the others useless": _once(2 * POINT),
    "every draft is two points better than the champion of its week": _always(2 * POINT),
    "drafts from a point worse to a point better, at random": _mixed,
}


class World(Strict):
    """The assumptions of a simulation."""

    lives: int = Field(ge=1)
    weeks: int = Field(ge=1)
    """Drafts in a life."""
    cases: int = Field(ge=1)
    """Cases of the exam."""
    mine: int = Field(ge=1)
    """Cases of the mine data."""
    wrong: float = Field(gt=0, lt=0.5)
    """The first champion's share of wrong answers."""
    discordance: float = Field(gt=0, lt=1)
    """The share of cases that only one of champion and draft gets right, where the draft is no better."""
    lopsided: bool = False
    """Every loss is in both modes and every gain in one: the plan's test errs most there."""
    seed: int = Field(ge=0)


RuleName = Literal["without a budget", "an even share each week", "the plan"]


class Row(Strict):
    """The result of one scenario under one rule. Shares are of lives."""

    scenario: str
    rule: RuleName
    useless: Estimate
    """Share with a promoted draft that was neither better nor worse."""
    worse: Estimate
    """Share with a promoted draft that was worse."""
    better: Estimate
    """Share with a promoted draft that was better."""
    looks: float
    """Mean number of decisions on the exam in a life."""


def most_discordant(wrong: float) -> float:
    """The discordance of two models that both err with the probability `wrong`, independently of each other."""
    return 2 * wrong * (1 - wrong)


def simulate(world: World, plan: "ChangePlan") -> list[Row]:
    """Every scenario under every rule, except those with a draft that would gain as much as the first champion errs.

    Equal worlds give equal rows.
    """
    rules: Mapping[RuleName, Callable[[], Rule]] = {
        "without a budget": lambda: _unbudgeted,
        "an even share each week": lambda: partial(_even, plan.budget.alpha / world.weeks),
        "the plan": lambda: _Planned(plan, world.lives),
    }
    return [
        _live(world, number, scenario, name, make())
        for number, (scenario, gains) in enumerate(SCENARIOS.items())
        if gains(numpy.random.default_rng(0), 99, 1).max() < world.wrong  # 99 weeks show the largest gain
        for name, make in rules.items()
    ]


def _unbudgeted(exam: "_Drafts", mine: "_Drafts") -> tuple[Any, Any]:
    """Promotion without an error budget, as retraining worked before there were plans.

    A draft passes if the whole 95% interval of its gain, averaged over modes, lies above 0.
    """
    from scipy.stats import norm

    gained, squares = exam.mean_gain()
    reach = float(norm.ppf((1 + LEVEL) / 2)) * numpy.sqrt((squares - gained**2) / exam.cases)
    return gained > reach, numpy.ones(len(gained), bool)


def _even(level: float, exam: "_Drafts", mine: "_Drafts") -> tuple[Any, Any]:
    p = exam.p()
    return p <= level, numpy.ones(len(p), bool)


class _Planned:
    """The screen, the test and the error budget of a change plan, as in `clinrl.release`, for many lives at once."""

    def __init__(self, plan: "ChangePlan", lives: int) -> None:
        self.plan = plan
        self.left, self.looks = numpy.full(lives, plan.budget.alpha), numpy.zeros(lives, int)

    def __call__(self, exam: "_Drafts", mine: "_Drafts") -> tuple[Any, Any]:
        looked = (mine.p() <= self.plan.protocol.screen) & (self.looks < self.plan.budget.looks)
        level = self.plan.budget.spend * self.left
        passed = looked & (exam.p() <= level)
        self.left = numpy.where(looked, numpy.where(passed, level, self.left - level), self.left)
        self.looks = self.looks + looked
        return passed, looked


@dataclass
class _Drafts:
    """A draft of each life on one set of cases: how many of the champion's answers it repaired, and how many it broke.

    Rows of the arrays: cases that changed in both modes, in the first alone, in the second alone.
    """

    cases: int
    repaired: Any
    broken: Any

    def p(self) -> Any:
        """The one-sided p of no gain on average over modes, as in the test of a change plan."""
        r, b = self.repaired, self.broken
        twice, once = r[0] + b[0], (r[1:] + b[1:]).sum(axis=0)
        total = 2 * (r[0] - b[0]) + (r[1:] - b[1:]).sum(axis=0)
        counts = zip(total.tolist(), once.tolist(), twice.tolist(), strict=True)
        return numpy.array([no_better(gained, sizes) for gained, *sizes in counts])

    def mean_gain(self) -> tuple[Any, Any]:
        """The mean over cases of a case's gain, averaged over modes, and the mean of its square."""
        weights = (1.0, 0.5, 0.5)
        gained = sum(w * (r - b) for w, r, b in zip(weights, self.repaired, self.broken, strict=True))
        squares = sum(w * w * (r + b) for w, r, b in zip(weights, self.repaired, self.broken, strict=True))
        return gained / self.cases, squares / self.cases


class _Cases:
    """One set of cases in every life: how many the champion gets wrong, with rows as in `_Drafts`."""

    def __init__(self, world: World, cases: int, generator: Generator) -> None:
        once, both = world.wrong * (1 - SHARED), world.wrong * SHARED
        shares = [both, once, once, 1 - both - 2 * once]
        self.generator, self.cases, self.lopsided = generator, cases, world.lopsided
        self.wrong = generator.multinomial(cases, shares, size=world.lives).T[:3]

    def drafts(self, repairs: Any, breaks: Any) -> _Drafts:
        """Drafts that repair a share of the wrong cases, and in each mode break a share of those right in both modes.

        Lopsided drafts repair and break as many answers in all, but repair cases in one mode and break them in both.
        """
        right, shares = self.cases - self.wrong.sum(axis=0), (SHARED, 1 - SHARED, 1 - SHARED)
        if self.lopsided:
            once, shares = self.wrong[1:].sum(axis=0), (1.0, 0.0, 0.0)
            repairs = numpy.minimum(repairs * (2 * self.wrong[0] + once) / numpy.maximum(once, 1), 1.0)
            repairs = numpy.array([0 * repairs, repairs, repairs])
        broken: list[Any] = []
        for share in shares:  # of few cases, three draws may break more than there are
            broken.append(numpy.minimum(self.generator.binomial(right, breaks * share), right - sum(broken)))
        return _Drafts(self.cases, self.generator.binomial(self.wrong, repairs), numpy.array(broken))

    def promote(self, passed: Any, drafts: _Drafts) -> None:
        """Make each draft that passed the champion of its life."""
        self.wrong = numpy.where(passed, self.wrong - drafts.repaired + drafts.broken, self.wrong)


def _live(world: World, number: int, scenario: str, name: RuleName, rule: Rule) -> Row:
    # Separate random streams, so that all rules see the same drafts as long as they promote the same ones.
    planned, exam_draws, mine_draws = (numpy.random.default_rng([world.seed, number, stream]) for stream in range(3))
    gains = SCENARIOS[scenario](planned, world.weeks, world.lives)
    exam, mine = _Cases(world, world.cases, exam_draws), _Cases(world, world.mine, mine_draws)
    wrong = numpy.full(world.lives, world.wrong)
    promoted = {kind: numpy.zeros(world.lives, bool) for kind in ("useless", "worse", "better")}
    looks = 0
    for planned_gain in gains:
        gain = numpy.where(planned_gain >= wrong, 0.0, planned_gain)  # no draft is better than right everywhere
        breaks = world.discordance / 2 * (wrong - gain) / world.wrong  # in proportion to what the draft gets wrong
        breaks = numpy.maximum(breaks, -gain)
        rates = (breaks + gain) / wrong, breaks / (1 - wrong * (2 - SHARED))
        drafts, screened = exam.drafts(*rates), mine.drafts(*rates)
        passed, looked = rule(drafts, screened)
        for kind, is_kind in (("useless", gain == 0), ("worse", gain < 0), ("better", gain > 0)):
            promoted[kind] |= passed & is_kind
        exam.promote(passed, drafts)
        mine.promote(passed, screened)
        wrong = numpy.where(passed, wrong - gain, wrong)
        looks += int(looked.sum())
    shares = {kind: wilson(int(lives.sum()), world.lives) for kind, lives in promoted.items()}
    return Row(scenario=scenario, rule=name, looks=round(looks / world.lives, 2), **shares)
