"""The gain that a promotion asks for: of a case with all its modes, at the level of its test."""

from collections.abc import Sequence

import pytest

from clinrl.analysis.paired import Answers
from clinrl.release.form import gain, paired_change
from clinrl.tasks.base import get_task
from clinrl.tasks.parts import Share

TASK = get_task("esi")
GOLDS = [1, 2, 3, 4, 5] * 8


def share(name: str) -> Share:
    kind = TASK.metrics[name]
    assert isinstance(kind, Share)
    return kind


def answered(mode: str, answers: Sequence[int], golds: Sequence[int], clusters: Sequence[str] | None) -> Answers:
    return Answers(
        name="v2", task="esi", task_version=2, mode=mode, mode_spec={"thinking": mode == "think"},
        exam_digest="e" * 64, golds=golds, answers=answers, clusters=clusters,
    )  # fmt: skip


def by_mode(
    think: Sequence[int], direct: Sequence[int], golds: Sequence[int] = GOLDS, clusters: Sequence[str] | None = None
) -> dict[str, Answers]:
    return {mode: answered(mode, some, golds, clusters) for mode, some in (("think", think), ("direct", direct))}


def wrong(places: Sequence[int]) -> list[int]:
    return [6 - gold if i in places else gold for i, gold in enumerate(GOLDS)]


def test_a_case_gained_in_both_modes_counts_once():
    """One pair of signs for each case: four cases give 1/16, as four in one mode do; eight answers would give 1/256."""
    places = [0, 1, 3, 4]
    change, p = gain(share("exact"), by_mode(GOLDS, GOLDS), by_mode(wrong(places), wrong(places)))
    assert (change.value, change.n, p) == (0.1, 40, 1 / 16)
    change, p = gain(share("exact"), by_mode(GOLDS, GOLDS), by_mode(wrong(places), GOLDS))
    assert (change.value, p) == (0.05, 1 / 16)


def test_a_case_gained_in_one_mode_and_lost_in_the_other_says_nothing():
    change, p = gain(share("exact"), by_mode(GOLDS, wrong([0, 5])), by_mode(wrong([0, 5]), GOLDS))
    assert (change.value, p) == (0.0, 1.0)


def test_a_cluster_counts_once():
    """Four clusters that gain give 1/16, however many of their cases do; the bootstrap of so few would give less."""
    clusters = [str(i // 5) for i in range(len(GOLDS))]
    worse = wrong([0, 1, 5, 6, 10, 11, 15])
    change, p = gain(share("exact"), by_mode(GOLDS, GOLDS, clusters=clusters), by_mode(worse, worse, clusters=clusters))
    assert (change.value, p) == (0.175, 1 / 16)


def test_where_cases_are_alike_a_change_is_bounded_at_any_level():
    """Below the level of a single draw a bootstrap says the same of all levels."""
    mine, theirs = (
        answered("think", some, GOLDS, [str(i // 5) for i in range(len(GOLDS))])
        for some in (wrong([0, 6]), wrong([1, 10, 11]))
    )
    levels = [0.95, 1 - 2e-3, 1 - 2e-4, 1 - 2e-5, 1 - 2e-6]
    found = [paired_change(share("exact"), "exact", mine, theirs, level) for level in levels]
    lows = [one.low for one in found if one is not None]
    assert len(lows) == len(set(lows)) == len(levels)
    assert lows == sorted(lows, reverse=True)
    assert {one.value for one in found if one is not None} == {0.025}


def test_only_cases_count_for_which_the_share_is_defined():
    change, p = gain(share("recall_level_1"), by_mode(GOLDS, GOLDS), by_mode(wrong([0, 1, 3]), wrong([0, 5])))
    assert (change.value, change.n, p) == (0.1875, 8, 0.25)  # level 1: the first case in both modes, the sixth in one
    none = [3] * 4
    assert gain(share("recall_level_1"), *[by_mode(none, none, golds=none)] * 2) is None


@pytest.mark.parametrize("clusters", [None, [str(i // 4) for i in range(len(GOLDS))]])
def test_of_errors_fewer_are_better(clusters: list[str] | None):
    late = [5 if gold == 1 else gold for gold in GOLDS]
    good, bad = (by_mode(some, some, clusters=clusters) for some in (GOLDS, late))
    change, p = gain(share("critical_under"), good, bad)
    assert change.value == -0.2
    assert p < 0.01
    change, p = gain(share("critical_under"), bad, good)
    assert change.value == 0.2
    assert p > 0.99
