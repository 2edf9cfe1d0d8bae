"""The contents of a version's page, from the reports of this repository."""

from pathlib import Path

import pytest
from markupsafe import Markup

from clinrl import paths
from clinrl.config.params import load_params
from clinrl.site import build, charts, versions
from clinrl.tasks.base import get_task

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_a_share_of_fewer_cases_than_its_row_has_says_of_how_many() -> None:
    task, exam = get_task("audit"), versions.examined(load_params(), "audit-v3")
    tables = {what: (columns, rows) for what, columns, rows in versions.slices(task, exam)}
    columns, rows = tables["level"]
    for value, n, cells in rows:
        found = exam.reports["think"].slices["level"][value]
        assert n == found["exact"].n
        assert cells[columns.index("dangerous, think")].endswith(f", n {found['dangerous'].n}")
        assert ", n " not in cells[columns.index("exact, think")]


@pytest.mark.parametrize(
    ("task", "values"),
    [
        ("esi", ["under 1", "1-4", "5-11", "12-17", "18-64", "65 and over"]),
        ("esi", ["level_1", "level_2", "level_10"]),
        ("esi", ["1|2", "2|3", "none"]),
        ("esi", ["given", "words_of_training", "1", "2", "10"]),
        ("audit", ["easy", "medium", "hard"]),
        ("audit", ["easy 2-5", "easy 6-12", "hard 2-5"]),
    ],
)
def test_the_values_of_a_slice_are_in_their_order_and_not_in_that_of_letters(task: str, values: list[str]) -> None:
    assert versions.arranged(get_task(task), sorted(values)) == values


@pytest.mark.long
def test_the_thresholds_of_all_modes_are_drawn_over_the_same_axes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[charts.Chart] = []
    monkeypatch.setattr(build.Site, "figure", lambda _, **about: drawn.extend(about["charts"]) or Markup(""))
    path = paths.comparison_report("esi-series").with_suffix(".md")
    build._read(build.Site(load_params(), tmp_path, 1), path, "reports/comparisons/esi-series.html")
    first, second = drawn
    assert first.title != second.title
    assert (first.x, first.y) == (second.x, second.y)
