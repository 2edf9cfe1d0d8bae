"""A report is what its answers give, number by number: what was edited is found wherever it stands."""

from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clinrl.evaluation import recount

LEAVES = st.booleans() | st.integers(-8, 8).map(lambda n: n / 4) | st.sampled_from(["", "x1"])
KEYS = st.sampled_from("abc")
RECORDS = st.recursive(
    LEAVES, lambda some: st.lists(some, max_size=3) | st.dictionaries(KEYS, some, max_size=3), max_leaves=6
)
ROW = {"name": "v1", "metrics": {"exact": {"value": 0.5}}}
TEST = {"metric": "exact", "other": "v0", "p": 0.25}
REPORT = {"metrics": {"exact": {"value": 0.5}}, "confusion": [[9, 1], [0, 8]], "rows": [ROW], "paired": [TEST]}


def places(written, counted=REPORT):
    return [place for place, _, _ in recount._differences(counted, written)]


@given(st.dictionaries(KEYS, RECORDS, max_size=3), KEYS, RECORDS)
def test_what_differs_is_found_and_nothing_else(counted, key, value):
    written = {**counted, key: value}
    found = places(written, counted)
    assert bool(found) == (counted.get(key) != value)
    assert {place.partition(".")[0] for place in found} <= {key}


@pytest.mark.parametrize(("by", "is_same"), [(1e-7, True), (-1e-7, True), (1e-5, False), (-1e-5, False)])
def test_last_digits_are_those_of_another_machine(by, is_same):
    written = deepcopy(REPORT)
    written["metrics"]["exact"]["value"] += by
    assert places(written) == ([] if is_same else ["metrics.exact.value"])


def test_what_was_not_computed_is_passed_over_and_what_was_is_not():
    """Judges' measures, and rows of simple policies and tests against them, stand in the written report alone."""
    more = {
        "metrics": REPORT["metrics"] | {"judged": {"value": 0.9}},
        "rows": [{"name": "always 2", "metrics": {}}, ROW],
        "paired": [TEST | {"other": "always 2"}, TEST],
    }
    assert places(REPORT | more) == []
    assert places(REPORT | {"more": 1}) == ["more"]
    assert places(REPORT | {"metrics": {}}) == ["metrics.exact"]
    assert places(REPORT | {"rows": [], "paired": [TEST | {"other": "v2"}]}) == ["paired.exact/v0", "rows.v1"]
    assert places(REPORT | {"paired": [TEST | {"p": 0.01}]}) == ["paired.exact/v0.p"]
    assert places(REPORT | {"confusion": [[9, 1], [8, 0]]}) == ["confusion.1.0", "confusion.1.1"]
    assert places({key: value for key, value in REPORT.items() if key != "confusion"}) == ["confusion"]
    assert places({"metrics": 1, "rows": 1}, {}) == ["metrics", "rows"], "in a summary, which has neither"


@pytest.mark.parametrize("order", [("think", "direct"), ("direct", "think")])
def test_modes_are_compared_in_the_order_of_the_report(order):
    written = {"mode_agreement": {}, "between_modes": {"_".join(order): {}}}
    assert recount._order(["direct", "think"], written) == order


@pytest.mark.parametrize("written", [{}, [], {"between_modes": None}, {"between_modes": {"a_b": {}}}])
def test_a_report_that_compares_other_modes_is_counted_in_the_order_of_params(written):
    assert recount._order(["direct", "think"], written) == ("direct", "think")
