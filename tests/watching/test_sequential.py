"""The sequential test: how often it errs when it is looked at all the time, and how soon it sees what there is."""

import itertools
import math
import re
from pathlib import Path

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clinrl.watching import sequential
from clinrl.watching.sequential import evidence, least

ALPHA = 0.05


def streams(share: float, count: int, length: int, seed: int) -> numpy.ndarray:
    return (numpy.random.default_rng(seed).random((count, length)) < share).astype(int)


@pytest.mark.long
@pytest.mark.parametrize("limit", [0.05, 0.3, 0.9])
def test_a_share_at_its_limit_raises_an_alarm_at_any_look_in_at_most_alpha_of_all_streams(limit: float) -> None:
    drawn = streams(limit, 600, 200, 1).cumsum(axis=1)
    ever = numpy.zeros(len(drawn), bool)
    for look in range(1, drawn.shape[1] + 1):
        hits = drawn[:, look - 1 : look]
        ever |= evidence(hits, numpy.full_like(hits, look), numpy.full(len(drawn), limit)) >= -math.log(ALPHA)
    assert ever.mean() <= ALPHA + 3 * math.sqrt(ALPHA * (1 - ALPHA) / len(drawn))
    assert ever.any()  # it is no test that cannot say yes


def test_so_it_is_over_many_days() -> None:
    days = streams(0.1, 600, 400, 2).reshape(600, 20, 20).sum(axis=2)
    ever = numpy.zeros(600, bool)
    for day in range(1, 21):
        looked = evidence(days[:, :day], numpy.full((600, day), 20), numpy.full(600, 0.1))
        ever |= looked >= -math.log(ALPHA)
    assert ever.mean() <= ALPHA + 3 * math.sqrt(ALPHA * (1 - ALPHA) / 600)


def test_a_share_of_twice_its_limit_is_seen() -> None:
    hits = streams(0.1, 500, 600, 3).sum(axis=1)[:, None]
    seen = evidence(hits, numpy.full_like(hits, 600), numpy.full(500, 0.05)) >= -math.log(ALPHA)
    assert seen.mean() > 0.95


def test_a_bad_week_is_seen_after_a_long_good_past() -> None:
    good, bad = [20] * 90, [20] * 7
    hits, n = [0] * 90 + [6] * 7, good + bad
    assert evidence([hits], [n], [0.05])[0] > -math.log(ALPHA)
    assert evidence([[sum(hits)]], [[sum(n)]], [0.05])[0] < 0  # all days as one


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), min_size=1, max_size=5), st.floats(0.01, 0.95))
def test_the_lower_end_is_where_the_evidence_is(days: list[tuple[int, int]], limit: float) -> None:
    hits, n = [a for a, _ in days], [a + b for a, b in days]
    low = float(least([hits], [n], ALPHA)[0])
    assert 0 <= low <= sum(hits) / max(1, sum(n)) + 1e-9
    if abs(low - limit) > 1e-4 and limit < sum(hits) / max(1, sum(n)):
        assert (low > limit) == (evidence([hits], [n], [limit])[0] >= -math.log(ALPHA))


def test_a_lower_end_is_sought_no_longer_than_its_digits_change(monkeypatch: pytest.MonkeyPatch) -> None:
    n = streams(0.5, 40, 30, 4) * 20
    hits, asked = n // 4 * streams(0.5, 40, 30, 5), list[int]()
    low = numpy.zeros(40)
    high = hits.sum(axis=1) / n.sum(axis=1)
    for _ in range(30):
        middle = (low + high) / 2
        is_refuted = evidence(hits, n, middle) >= -math.log(ALPHA)
        low, high = numpy.where(is_refuted, middle, low), numpy.where(is_refuted, high, middle)
    monkeypatch.setattr(sequential, "evidence", lambda *of: asked.append(len(of[0])) or evidence(*of))
    assert [f"{end:.4g}" for end in least(hits, n, ALPHA)] == [f"{end:.4g}" for end in low]
    assert sum(asked) < 20 * 40


@pytest.mark.parametrize(("hits", "n", "limit", "seen"), [(1, 9, 0.0, True), (0, 9, 0.0, False), (9, 9, 1.0, False)])
def test_limits_at_the_ends(hits: int, n: int, limit: float, seen: bool) -> None:
    assert (evidence([[hits]], [[n]], [limit])[0] >= -math.log(ALPHA)) == seen


@pytest.mark.long
@pytest.mark.parametrize("share", [0.05, 0.075, 0.1, 0.15])
def test_the_documentation_says_how_often_and_how_soon_harm_is_seen(share: float) -> None:
    """500 series of 1,000 labels, looked at after each ten, against a limit of 5%."""
    drawn = streams(share, 500, 1000, 1).reshape(500, 100, 10).sum(axis=2).cumsum(axis=1)
    first = numpy.full(500, numpy.inf)
    for look in range(1, 101):
        hits = drawn[:, look - 1 : look]
        seen = evidence(hits, numpy.full_like(hits, 10 * look), numpy.full(500, 0.05)) >= -math.log(ALPHA)
        first = numpy.where(seen & numpy.isinf(first), 10 * look, first)
    half = f"{numpy.median(first):.0f}" if numpy.isfinite(numpy.median(first)) else ""
    row = f"| {100 * numpy.isfinite(first).mean():.1f}% | {half} |".replace("|  |", "| |")
    page = (Path(__file__).parents[2] / "docs/watching.md").read_text(encoding="utf-8")
    assert re.search(rf"^\| {100 * share:g}%[^|]*{re.escape(row)}$", page, re.MULTILINE), row


@pytest.mark.long
def test_the_documentation_says_how_much_later_a_change_after_a_year_is_seen() -> None:
    """500 series of 20 labels a day, against a limit of 5%, where the share was 4% before."""
    halves = []
    for share, days in itertools.product((0.15, 0.10), (365, 0)):
        rng, first = numpy.random.default_rng(7), numpy.full(500, numpy.inf)
        hits = numpy.hstack([rng.binomial(20, 0.04, (500, days)), rng.binomial(20, share, (500, 60))])
        for look in range(1, 61):
            sofar = hits[:, : days + look]
            seen = evidence(sofar, numpy.full_like(sofar, 20), numpy.full(500, 0.05)) >= -math.log(ALPHA)
            first = numpy.where(seen & numpy.isinf(first), 20 * look, first)
            if numpy.isfinite(first).sum() > 250:  # the median does not change any more
                break
        halves.append(f"{numpy.median(first):.0f}")
    page = " ".join((Path(__file__).parents[2] / "docs/watching.md").read_text(encoding="utf-8").split())
    late, early, *other = halves
    says = f"alarm {late} labels after a change from 4% to 15% that began after a year, and {early} labels after one on"
    assert says in page
    assert "of a change to 10%, {} and {}.".format(*other) in page


def test_the_evidence_is_worth_one_on_average_whatever_the_days() -> None:
    """Over all outcomes of ten days with one request at the limit, each with its probability: a bet, not a gift."""
    limit, days = 0.3, 10
    drawn = numpy.array(list(itertools.product((0, 1), repeat=days)))
    chance = limit ** drawn.sum(1) * (1 - limit) ** (days - drawn.sum(1))
    logs = evidence(drawn, numpy.ones_like(drawn), numpy.full(len(drawn), limit))
    assert 0.5 < (chance * numpy.exp(logs)).sum() <= 1 + 1e-9
