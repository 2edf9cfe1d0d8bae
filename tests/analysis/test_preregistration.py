"""The digest of a metric is that of its verdicts, and a changed plan is said by the part that changed."""

from typing import Any

import pytest

from clinrl.analysis.preregistration import Registration, changes, forecasts, metric_digest
from clinrl.tasks.base import Task, get_task
from clinrl.tasks.parts import Share
from clinrl.types import Unreadable


def plan(**other: Any) -> Registration:
    """A plan of two recipes with a training each, some of its fields changed."""
    fields = {
        "name": "c", "retrospective": False, "task": "esi", "task_version": 1, "measure": "exact", "metric": "1" * 64,
        "first": "a", "second": "b", "versions": {"a": ("a-1",), "b": ("b-1",)}, "exam": "x1",
        "data": {"x1": "1" * 64, "d1": "2" * 64}, "n": 500, "clusters": None, "scale": "embedded",
        "recipes": {"a-1": "3" * 64, "b-1": "4" * 64}, "seeds": {"a-1": 1, "b-1": 2},
        "modes": {"think": {"temperature": 0.0}}, "effect": 0.02, "alpha": 0.05, "discordant": {"think": 0.1},
        "seed_sd": 0.005, "design_effect": 1.0, "forecasts": {"think": {"power": 0.2, "detectable": 0.05}},
    }  # fmt: skip
    return Registration.model_validate(fields | other)


def with_metric(task: Task, of: Any, worse: str = "lower") -> Task:
    changed = type("Changed", (type(task),), {"metrics": {**task.metrics, "exact": Share(of=of, worse=worse)}})
    return changed()


def test_a_metric_that_judges_alike_has_the_same_digest():
    task = get_task("esi")
    again = with_metric(task, lambda truth, said: bool(truth == said))
    assert metric_digest(task, "exact", []) == metric_digest(again, "exact", [1, 2])


@pytest.mark.parametrize("pair", [(1, 2), (5, 5), (3, None)])
def test_one_verdict_that_differs_gives_another_digest(pair):
    task = get_task("esi")

    def exact(gold: int, answer: int | Unreadable) -> bool:
        here = (gold, None if isinstance(answer, Unreadable) else answer) == pair
        return (gold == answer) != here

    assert metric_digest(task, "exact", []) != metric_digest(with_metric(task, exact), "exact", [])


def test_the_worse_direction_and_the_denominator_are_part_of_a_metric():
    task = get_task("esi")
    digests = {
        metric_digest(task, "exact", []),
        metric_digest(with_metric(task, lambda gold, answer: gold == answer, worse="higher"), "exact", []),
        metric_digest(with_metric(task, lambda gold, answer: gold == answer if gold < 5 else None), "exact", []),
        *(metric_digest(task, name, []) for name in ("dangerous", "critical_under", "recall_level_1")),
    }
    assert len(digests) == 6


def test_an_episode_is_judged_by_its_decisions():
    task = get_task("audit")
    golds = [task.label(case) for case in task.cases(20, 1, pool="exam", mix=task.checks.mixes[0])]
    lenient = with_metric(task, lambda gold, answer: not isinstance(answer, Unreadable) and gold[:4] == answer[:4])
    assert metric_digest(task, "exact", golds) == metric_digest(task, "exact", golds[::-1])
    assert metric_digest(task, "exact", golds) != metric_digest(lenient, "exact", golds)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"metric": "0" * 64}, "metric (metric)"),
        ({"measure": "dangerous"}, "metric (measure exact, now dangerous)"),
        ({"task_version": 2}, "metric (task_version 1, now 2)"),
        ({"second": "base"}, "pair (second b, now base)"),
        ({"data": {"x1": "0" * 64, "d1": "2" * 64}}, "data (data of x1)"),
        ({"recipes": {"a-1": "3" * 64, "b-1": "5" * 64}}, "recipe (recipes of b-1)"),
        ({"scale": "full"}, "recipe (scale embedded, now full)"),
        ({"seeds": {"a-1": 7, "b-1": 2}}, "seeds (seeds of a-1)"),
        ({"modes": {"think": {"temperature": 1.0}}}, "decoding (modes of think)"),
        ({"effect": 0.01}, "plan (effect 0.02, now 0.01)"),
        ({"discordant": {"think": 0.2}}, "plan (discordant of think)"),
    ],
)
def test_what_differs_is_named(change, words):
    assert list(changes(plan(), plan(**change))) == [words]


def test_equal_plans_do_not_differ_and_forecasts_may():
    assert list(changes(plan(), plan())) == []
    assert list(changes(plan(), plan(forecasts={}, retrospective=True))) == []


def test_forecasts_count_clusters_modes_and_trainings():
    found = forecasts(plan())["think"]
    assert 0.05 < found.power < 0.8
    assert found.detectable > plan().effect
    both = plan(modes={"think": {}, "direct": {}}, discordant={"think": 0.1, "direct": 0.1})
    three, five = (
        forecasts(plan(versions={name: tuple(f"{name}-{k}" for k in range(count)) for name in "ab"}))["think"]
        for count in (3, 5)
    )
    assert forecasts(plan(design_effect=2.0))["think"].power < found.power
    assert forecasts(both)["think"].power < found.power
    assert five.power > three.power
    assert forecasts(plan(n=5))["think"].detectable is None
