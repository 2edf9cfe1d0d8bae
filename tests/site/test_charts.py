"""Where lines and dots lie, and that a name has one colour."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clinrl.analysis.alerts import Alarm
from clinrl.config.params import load_params
from clinrl.site import charts, tree, versions

NUMBERS = st.floats(-1e6, 1e6).map(lambda value: round(value, 4))


@given(NUMBERS, st.floats(1e-3, 1e6))
def test_ticks_are_round_numbers_between_the_ends(low: float, span: float) -> None:
    found = charts.ticks(low, low + span)
    assert len(found) <= 7
    assert found == sorted(set(found))
    assert all(low - 1e-6 * span - 1e-9 <= tick <= low + span * (1 + 1e-6) + 1e-9 for tick in found)


@given(st.lists(st.tuples(st.integers(1, 500), NUMBERS), min_size=1, max_size=500))
def test_lines_stay_in_their_frame(points: list[tuple[float, float]]) -> None:
    (line,) = charts.chart("t", "x", "y", {"a": sorted(points)}, {}).lines
    places = [tuple(map(float, point.split(","))) for point in line.path.split()]
    assert 1 <= len(places) <= charts.MOST_POINTS + 1
    left, top, right, bottom = charts.chart("t", "x", "y", {"a": sorted(points)}, {}).frame
    assert all(left <= x <= right and top <= y <= bottom for x, y in places)
    assert (line.low, line.high) == (min(y for _, y in points), max(y for _, y in points))


def test_an_alarm_stands_at_its_step() -> None:
    alarm = Alarm(name="a", about="", level="stop", step=5, observed=1.0, limit=0.5, says="s", helps="h")
    history = [{"step": float(step), "reward": 0.1 * step} for step in range(1, 10)]
    (drawn,) = charts.training(history, [], [alarm], {})
    left, _, right, _ = drawn.frame
    assert drawn.alarms == (((left + right) / 2, alarm),)


def test_a_share_is_drawn_in_per_cent_and_an_interval_around_its_value() -> None:
    found = charts.intervals("t", "u", {"row": [charts.Dot(0.5, 0.4, 0.6, (0.45, 0.55), 0, "says")]})
    assert found is not None
    ((dot,),) = found.rows.values()
    assert dot.low is not None
    assert dot.high is not None
    assert dot.low < min(dot.seeds) < dot.at < max(dot.seeds) < dot.high
    assert charts.intervals("t", "u", {"row": []}) is None


@given(st.lists(st.integers(0, 40).map(str), max_size=60))
def test_a_name_has_one_style_and_few_names_have_styles_of_their_own(names: list[str]) -> None:
    found = charts.styles(names)
    assert set(found) == set(names)
    if len(found) <= len(charts.COLOURS) * len(charts.DASHES):
        assert len(set(found.values())) == len(found)
    assert all(charts.COLOURS[colour] and charts.DASHES[dash] for colour, dash in found.values())


def test_the_colours_can_be_told_from_a_white_page() -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    assert all(1.05 / (luminance(colour) + 0.05) > 2 for colour in charts.COLOURS)


@pytest.mark.parametrize("task", ["esi", "imaging", "audit"])
def test_each_version_and_merge_is_one_mark_of_the_tree(task: str) -> None:
    params = load_params()
    rows = tree.nodes(params, task)
    marks = [name for node in rows for name in node.names]
    merges = [name for name, spec in params.merges.all.items() if spec.task == task]
    assert sorted(marks) == sorted([f"{task}-base", *params.versions_of(task), *merges])
    for node in rows[1:]:
        assert node.parent is not None
        made = params.model(node.names[0])
        assert made.parent in rows[node.parent].names
        assert node.depth == rows[node.parent].depth + 1


def test_marks_do_not_lie_on_each_other() -> None:
    params = load_params()
    drawn = tree.layout("esi", tree.nodes(params, "esi"), ["exact"], lambda *_: [])
    places = [(row.x, row.y) for row in drawn.rows] + [(at, row.y) for row in drawn.rows for at, _ in row.seeds]
    assert len(set(places)) == len(places)
    assert all(x < drawn.gate < drawn.width and y < drawn.height for x, y in places)


def test_a_version_is_shown_over_the_most_seeds_that_a_comparison_has_of_it() -> None:
    params = load_params()
    for name in params.versions:
        rows = [row for spec in params.comparisons.values() for row in spec.arms.values() if name in row]
        most = max((len(row) for row in rows), default=1)
        assert len(params.seeds_of(name)) == (most if most > 1 else 0)
        first = next(iter(versions.arms(params, dict.fromkeys(params.comparisons), name)), None)
        assert (first.seeds if first else 1) == most
