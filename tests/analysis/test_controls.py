"""A version beside the controls: every control is a row of every page, with the numbers of its own report."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import contest
from clinrl import paths
from clinrl.analysis import controls
from clinrl.analysis.controls import Beside, Mode
from clinrl.analysis.paired import compare
from clinrl.artifacts import write_json
from clinrl.config.params import Params
from clinrl.errors import ArtefactError
from clinrl.evaluation import compare as comparison
from clinrl.evaluation.answers import load_answers, load_report, open_run
from clinrl.reports.render import render

VERSIONS = [f"{recipe}-{seed}" for recipe in contest.RECIPES for seed in contest.SEEDS] + ["blind-1", "terse-1"]
CONTROLS = {"blind-1": "blind", "terse-1": "terse"}
TRIVIAL = [*(f"always {label}" for label in contest.TASK.labels), "random", "prior-matched", "bag of words"]
PAGES = paths.comparison_pages("recipes")


@pytest.fixture(scope="module")
def built():
    return contest.compared()


@pytest.fixture
def project(built, tmp_path, monkeypatch) -> Iterator[Params]:
    shutil.copytree(built, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    with contest.drawn():
        yield Params.model_validate(contest.mapping())


def report(name: str, folder: Path = Path()) -> Beside:
    return Beside.model_validate_json((folder / PAGES / f"{name}.json").read_bytes())


def text(name: str, folder: Path = Path()) -> str:
    return (folder / PAGES / f"{name}.md").read_text(encoding="utf-8")


def named(mode: Mode, *kinds: controls.Kind) -> list[str]:
    return [line.name for line in mode.lines if line.kind in kinds]


def test_every_version_has_a_page_on_which_every_control_is_a_row_in_every_mode(built):
    assert {path.name for path in (built / PAGES).iterdir()} == {
        f"{version}.{end}" for version in VERSIONS for end in ("json", "md")
    }
    for version in VERSIONS:
        found = report(version, built)
        assert [mode.mode for mode in found.modes] == ["think", "direct"]
        for mode in found.modes:
            first, *rest = mode.lines
            assert (first.name, first.kind) == (version, "version")
            assert named(mode, "control") == [name for name in CONTROLS if name != version]
            assert named(mode, "trivial") == TRIVIAL
            assert named(mode, "base")[0] == "imaging-base"
            assert not any(line.name == version for line in rest)
        assert set(named(found.modes[0], "base")[1:]) == {
            f"imaging-base, {view}" for view in contest.TASK.reporting.variants
        }
        page = text(version, built)
        for name, recipe in CONTROLS.items():
            assert page.count(f"\n| {recipe} ({name}) | ") == 2
        assert page.count("\n| bag of words | trivial | ") == 2


def test_the_version_comes_first_then_its_seeds_controls_the_untrained_and_the_trivial(built):
    for mode in report("plain-2", built).modes:
        assert named(mode, "version", "seed") == ["plain-2", "plain-1", "plain-3"]
        kinds = [line.kind for line in mode.lines]
        assert kinds == sorted(kinds, key=list(controls.WHAT).index)
    assert report("blind-1", built).modes[0].lines[0].recipe == "blind"


def test_rows_are_those_of_the_versions_own_reports_to_the_digit(built, monkeypatch):
    monkeypatch.chdir(built)
    for version in VERSIONS:
        for mode in report(version).modes:
            lines = {line.name: line for line in mode.lines}
            for row in load_report(version, mode.mode).rows:
                assert lines[row.name].metrics == row.metrics
            for name in ("imaging-base", *CONTROLS):
                theirs = load_report(name, mode.mode)
                assert lines[name].metrics == theirs.rows[0].metrics
                assert lines[name].metrics | lines[name].others == theirs.metrics
    whole = text("better-1")
    assert "| statement_recall | " in whole.split("## Mode direct")[0]
    assert "| statement_recall | " not in whole.split("## Mode direct")[1]
    assert "| recall_mba | " in whole


def test_the_tests_are_those_between_two_models(built, monkeypatch):
    monkeypatch.chdir(built)
    params = Params.model_validate(contest.mapping())
    run = open_run(params, params.model("imaging-base"))
    for version in ("better-2", "blind-1"):
        for mode in report(version).modes:
            mine = load_answers(run, mode.mode, version)
            wanted = [
                test
                for other in CONTROLS
                if other != version
                for test in compare(mine, load_answers(run, mode.mode, other), contest.TASK.compared)
            ]
            assert list(mode.paired) == wanted
            assert {test.metric for test in wanted} == set(contest.TASK.compared)


def test_the_words_say_better_or_that_nothing_is_shown(built):
    better, plain = text("better-1", built), text("terse-1", built)
    for mode in ("think", "direct"):
        for control in CONTROLS:
            if control != "terse-1":
                assert re.search(rf"\n\| {mode} \| {control} \| exact \|.* \| better \|\n", better)
    assert re.search(r"\n\| think \| terse-1 \| exact \|.* \| better \|\n", better)
    assert re.search(r"\n\| (think|direct) \| blind-1 \| exact \|.* \| not significant \|\n", plain)
    assert "Research only, synthetic data. Not for clinical use." in better
    assert "treats cases of one cluster as independent" in better
    assert "(../../better-1/report.md)" in better
    assert "(../recipes.md)" in better
    assert (built / PAGES / "../../better-1/report.md").resolve().is_file()
    assert (built / PAGES / "../recipes.md").resolve().is_file()


def test_a_control_has_a_page_without_itself_among_the_controls(built):
    for mode in report("blind-1", built).modes:
        assert named(mode, "version", "control") == ["blind-1", "terse-1"]
        assert {test.other for test in mode.paired} == {"terse-1"}
    alone = report("blind-1", built)
    mode = alone.modes[0]
    without = mode.model_copy(update={"lines": tuple(x for x in mode.lines if x.kind != "control"), "paired": ()})
    page = render("controls", kinds=controls.WHAT, report=alone.model_copy(update={"modes": (without,)}))
    assert "The comparison has no other trained control." in page
    assert "| compared with |" not in page


def test_the_page_of_a_version_that_was_dropped_disappears(project):
    spec = project.comparisons["recipes"]
    fewer = spec.model_copy(update={"arms": {name: spec.arms[name] for name in ("plain", "better")}, "tests": ()})
    comparison.stage(project.model_copy(update={"comparisons": {"recipes": fewer}}), "recipes")
    assert {path.stem for path in PAGES.iterdir()} == {name for name in VERSIONS if not name.startswith("same")}


def test_a_missing_report_is_named_with_advice_and_the_pages_stay(project):
    before = text("plain-1")
    (paths.report("terse-1") / "direct.json").unlink()
    with pytest.raises(
        ArtefactError, match=r"reports/terse-1/direct.json does not exist: run `dvc repro evaluate@ters"
    ):
        comparison.stage(project, "recipes")
    assert text("plain-1") == before


@pytest.mark.parametrize(
    ("row", "other"), [("random", "plain-1"), ("imaging-base", "plain-1"), ("bag of words", "plain-1")]
)
def test_reports_that_contradict_each_other_are_refused(project, row, other):
    path = paths.report("same-2") / "direct.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    next(some for some in content["rows"] if some["name"] == row)["metrics"]["exact"]["value"] = 0.123456
    write_json(path, content)
    with pytest.raises(
        ArtefactError, match=rf"same-2 and {other} differ in the row '{row}', mode direct.*evaluate anew"
    ):
        comparison.stage(project, "recipes")


def test_a_base_examined_since_is_refused(project):
    path = paths.report("imaging-base") / "think.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["rows"][0]["metrics"]["exact"]["value"] = 0.123456
    write_json(path, content)
    with pytest.raises(ArtefactError, match="reports of plain-1 and imaging-base differ in the row 'imaging-base'"):
        comparison.stage(project, "recipes")


def test_who_descends_from_another_version_stands_beside_it_and_beside_the_base(built, monkeypatch):
    monkeypatch.chdir(built)
    members = {}
    params = Params.model_validate(contest.mapping())
    run = open_run(params, params.model("imaging-base"))
    for name in ("imaging-base", "plain-1", "better-1", "blind-1"):
        members[name] = controls.Member(
            recipe="" if name == "imaging-base" else name[:-2],
            control=name == "blind-1",
            parent=None if name == "imaging-base" else "imaging-base",
            data="d1",
            answers=load_answers(run, "think", name),
            report=load_report(name, "think"),
        )
    child = members["better-1"].report
    rows = [row for row in child.rows if not row.name.startswith("imaging-base")]
    parent = child.rows[1].model_copy(update={"name": "other-1, without_evidence"})
    moved = child.model_copy(update={"rows": (rows[0], parent, *rows[1:])})
    members["better-1"] = controls.Member(**{**vars(members["better-1"]), "parent": "other-1", "report": moved})
    mode = controls.besides("some", contest.TASK, "imaging-base", {"think": members}, None)["better-1"].modes[0]
    assert named(mode, "parent") == ["other-1, without_evidence"]
    assert named(mode, "base") == named(report("plain-1").modes[0], "base")
    assert named(mode, "trivial") == TRIVIAL
