"""A plan is written before the runs and never again, and the report of a comparison holds to it or is not made."""

import copy
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm

import contest
from clinrl import intervals, paths
from clinrl.analysis.compared import ALL, Compared
from clinrl.analysis.preregistration import forecasts, rule_digest
from clinrl.artifacts import dump_yaml, write_json
from clinrl.cli import main as cli
from clinrl.config.params import Params
from clinrl.data.dataset import read_cases
from clinrl.errors import ArtefactError, ParamsError
from clinrl.evaluation import compare
from clinrl.pipeline import preregister
from clinrl.reports import results
from clinrl.tasks.base import get_task
from clinrl.tasks.imaging.metrics import MBA, METRICS
from clinrl.tasks.parts import Share

pytestmark = pytest.mark.long

FILE = paths.preregistration("recipes")
ROWS = ("better", "plain")


def planned(**changes: Any) -> Params:
    """The project with a primary measure; `changes` are of that block."""
    return Params.model_validate(content(**changes))


def content(**changes: Any) -> dict[str, Any]:
    mapping = copy.deepcopy(contest.mapping())  # of which other projects share parts
    return mapping | {"comparisons": {"recipes": contest.COMPARISON | {"primary": contest.PRIMARY | changes}}}


@pytest.fixture
def examined(tmp_path, monkeypatch) -> Iterator[Path]:
    """The project after its runs, without a registration."""
    shutil.copytree(contest.compared(), tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    with contest.drawn():
        yield tmp_path


@pytest.fixture
def before(examined) -> Path:
    """The project as it was before the runs of the two recipes: what they left lies in `later`."""
    for row in ROWS:
        for seed in contest.SEEDS:
            for place in (paths.graded(f"{row}-{seed}"), paths.report(f"{row}-{seed}")):
                (examined / "later" / place.parent).mkdir(parents=True, exist_ok=True)
                place.rename(examined / "later" / place)
    return examined


def run(folder: Path) -> None:
    """Let the recipes run: bring back what they left."""
    shutil.copytree(folder / "later", folder, dirs_exist_ok=True)


def report() -> Compared:
    return Compared.model_validate_json(paths.comparison_report("recipes").read_bytes())


def page() -> str:
    return paths.comparison_report("recipes").with_suffix(".md").read_text(encoding="utf-8")


def tables() -> str:
    return (paths.comparison_pages("recipes") / "tables.md").read_text(encoding="utf-8")


def test_a_plan_that_was_registered_before_the_runs_leads_the_report(before):
    preregister.stage(planned(), "recipes")
    written = FILE.read_bytes()
    run(before)
    compare.stage(planned(), "recipes")
    primary = report().primary
    assert [test.mode for test in primary.tests] == ["think", "direct"]
    assert not primary.registration.retrospective
    assert primary.registration.forecasts == forecasts(primary.registration)
    (section,) = (one for one in report().sections if (one.mode, one.part) == ("think", ALL))
    rows = {row.name: row.metrics["exact"].value for row in section.rows}
    test = primary.tests[0]
    assert (test.first.value, test.second.value) == (rows["better"], rows["plain"])
    assert test.difference.value == pytest.approx(rows["better"] - rows["plain"], abs=1e-5)
    assert test.p < test.adjusted < 0.05  # two modes
    text = page()
    assert text.index("## Primary measure: exact, better against plain") < text.index("## Answers")
    assert "| better | 10 points, not excluded |" in text
    assert "RETROSPECTIVE" not in text
    assert FILE.read_bytes() == written


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [(-0.09, 0.09, "excluded"), (-0.3, -0.2, "not excluded"), (0.2, 0.3, "not excluded"), (-0.2, 0.05, "not excluded")],
)
def test_an_effect_is_excluded_by_an_interval_within_it_on_both_sides(before, low, high, word):
    preregister.stage(planned(), "recipes")
    run(before)
    compare.stage(planned(), "recipes")
    found = report().primary
    tests = [
        test.model_copy(update={"difference": test.difference.model_copy(update={"low": low, "high": high})})
        for test in found.tests
    ]
    rows = results.primary(get_task("imaging"), found.model_copy(update={"tests": tuple(tests)}))
    assert {row[6] for row in rows} == {f"10 points, {word}"}


def test_the_test_is_a_part_of_the_plan(before):
    preregister.stage(planned(), "recipes")
    written = json.loads(FILE.read_bytes())
    run(before)
    write_json(FILE, written | {"test": "0" * 64})
    with pytest.raises(ArtefactError, match=r"differs in test \(test\)"):
        compare.stage(planned(), "recipes")
    write_json(FILE, {key: value for key, value in written.items() if key != "test"})
    compare.stage(planned(), "recipes")
    assert "The plan does not name the test" in page()
    write_json(FILE, written)
    compare.stage(planned(), "recipes")
    assert "recipes, test and seeds are those that were registered" in page()


def test_another_rule_has_another_digest(monkeypatch):
    before = rule_digest()
    assert rule_digest() == before
    with monkeypatch.context() as patch:
        patch.setattr(intervals, "students", lambda level, freedom: norm.isf(level / 2) + 0 * np.asarray(freedom))
        assert rule_digest() != before
    monkeypatch.setattr("clinrl.analysis.preregistration.holm", list)
    assert rule_digest() != before, "p is adjusted over modes"


def test_beside_what_is_not_shown_stands_what_could_have_been(before):
    plan = planned(first="plain", second="base", discordant=0.7)
    preregister.stage(plan, "recipes")
    run(before)
    compare.stage(plan, "recipes")
    primary, text = report().primary, page()
    assert primary.registration.versions["base"] == ()
    for test in primary.tests:
        word = "better" if test.adjusted < 0.05 else "not significant"
        least = primary.registration.forecasts[test.mode].detectable
        line = next(line for line in text.splitlines() if line.startswith(f"| {test.mode} |"))
        beside = f"{100 * least:.1f} points | {100 * test.detectable:.1f} points |"
        assert line.endswith(f"| {word} | 10 points, not excluded | {beside}")
    assert "3 and no seeds" in text
    same = next(line for line in tables().splitlines() if line.startswith("| same | plain | none | none |"))
    silent = same.split(" | ")[4]
    assert "macro_f1 (0." in silent
    assert "statement_recall (" in silent
    assert " of 3 seeds, " in silent
    assert all(re.search(r"[0-9]\.[0-9]|unknown", part) for part in silent.split("; "))


def test_equal_plans_give_equal_bytes_without_a_time(before):
    preregister.stage(planned(), "recipes")
    written = FILE.read_bytes()
    FILE.unlink()
    preregister.stage(planned(), "recipes")
    assert FILE.read_bytes() == written
    assert not {"time", "date", "created"} & set(json.loads(written))


def test_cases_outside_of_the_measure_do_not_count(before):
    preregister.stage(planned(measure="recall_mba"), "recipes")
    written = json.loads(FILE.read_bytes())
    held = [case for case in read_cases(paths.cases("x1"), contest.TASK) if contest.TASK.label(case) == MBA]
    assert 0 < written["n"] == len(held) < contest.CASES
    assert written["clusters"] == len({contest.TASK.reporting.cluster(case) for case in held})


def test_after_the_runs_only_a_retrospective_plan_is_written_and_the_report_says_so(examined):
    with pytest.raises(ArtefactError, match=r"better-1 took its exam already, by data/reports/better-1, and what is"):
        preregister.stage(planned(), "recipes")
    assert not FILE.exists()
    preregister.stage(planned(), "recipes", retrospective=True)
    compare.stage(planned(), "recipes")
    assert report().primary.registration.retrospective
    assert "**RETROSPECTIVE. This plan was written after the exams were taken." in page()


@pytest.mark.parametrize("witness", ["graded", "lock"])
def test_answers_and_dvc_lock_are_witnesses_of_a_run_too(before, witness):
    if witness == "graded":
        paths.graded("plain-3").mkdir()
    else:
        lock = {"schema": "2.0", "stages": {"evaluate@plain-3": {"cmd": "x", "outs": [{"path": "p", "md5": "1"}]}}}
        Path("dvc.lock").write_text(dump_yaml(lock), encoding="utf-8")
    with pytest.raises(ArtefactError, match=r"plain-3 took its exam already, by (data/graded/plain-3|dvc.lock)"):
        preregister.stage(planned(), "recipes")


def test_a_plan_is_never_written_twice(before):
    preregister.stage(planned(), "recipes")
    written = FILE.read_bytes()
    with pytest.raises(ArtefactError, match=r"recipes.json exists: a plan is registered once; to change it, give the"):
        preregister.stage(planned(effect=20.0), "recipes", retrospective=True)
    assert FILE.read_bytes() == written


def test_a_comparison_without_a_primary_measure_has_nothing_to_register(before):
    with pytest.raises(ParamsError, match=r"comparisons.recipes.primary is missing, so there is nothing to register"):
        preregister.stage(Params.model_validate(contest.mapping()), "recipes")


def test_imported_cases_of_a_patient_need_a_design_effect_too(before):
    """Of a task that names no clusters, the cases alone tell."""
    params = planned()
    spec = params.comparisons["recipes"]
    given = spec.model_copy(update={"primary": spec.primary.model_copy(update={"design_effect": None})})
    with pytest.raises(ParamsError, match=r"comparisons\.recipes\.primary\.design_effect is missing, but cases of x1 "):
        preregister.stage(params.model_copy(update={"comparisons": {"recipes": given}}), "recipes")
    assert not FILE.exists()


def test_data_without_a_proof_is_not_registered(before):
    paths.data_proof("d1").unlink()
    with pytest.raises(ArtefactError, match=r"data/reports/data/d1.json does not exist"):
        preregister.stage(planned(), "recipes")
    assert not FILE.exists()


def test_no_report_is_made_of_a_primary_measure_that_nobody_registered(examined):
    kept = paths.comparison_report("recipes").read_bytes()
    with pytest.raises(ArtefactError, match=r"was not registered; run `clinrl preregister recipes` before the runs"):
        compare.stage(planned(), "recipes")
    FILE.parent.mkdir()
    FILE.write_text("{}", encoding="utf-8")
    with pytest.raises(ArtefactError, match=r"is no registration: Field required; restore it with `git checkout"):
        compare.stage(planned(), "recipes")
    assert paths.comparison_report("recipes").read_bytes() == kept


def altered(**sections: Any) -> dict[str, Any]:
    whole = content()
    for section, entries in sections.items():
        for name, change in entries.items():
            whole[section][name] = whole[section][name] | change
    return whole


OTHER = {"trainer": {scale: {"lr": 2.0e-3, "steps": 2, "batch": 2} for scale in ("embedded", "full")}}
DIFFERENCES: list[tuple[dict[str, Any], str]] = [
    (content(measure="dangerous"), r"it differs in metric \(measure exact, now dangerous, metric\);"),
    (content(second="same"), r"it differs in pair \(second plain, now same, .*\); recipe \(.*\); seeds \(.*\);"),
    (altered(versions={"better-2": {"seed": 22}}), r"it differs in seeds \(seeds of better-2\);"),
    (altered(profiles={"plain": OTHER}), r"in recipe \(recipes of plain-1, recipes of plain-2, recipes of plain-3\);"),
    (altered(modes={"think": {"temperature": 0.5}}), r"it differs in decoding \(modes of think\);"),
    (content(modes=["think"]), r"it differs in decoding \(modes of direct\); plan \(discordant of direct\);"),
    (content(effect=5.0), r"it differs in plan \(effect 0.1, now 0.05\);"),
    (content(effect=60.0, discordant=0.7), r"in plan \(effect 0.1, now 0.6, discordant of think, discordant of direct"),
    (content(alpha=0.1), r"it differs in plan \(alpha 0.05, now 0.1\);"),
    (content() | {"scale": "full"}, r"it differs in recipe \(scale embedded, now full, .*imaging-base"),
]


@pytest.mark.parametrize(("mapping", "words"), DIFFERENCES, ids=[words[:40] for _, words in DIFFERENCES])
def test_a_plan_that_changed_stops_the_report_with_what_differs(before, mapping, words):
    preregister.stage(planned(), "recipes")
    run(before)
    with pytest.raises(ArtefactError, match=rf"comparisons.recipes is not what {FILE} registered: .*{words}"):
        compare.stage(Params.model_validate(mapping), "recipes")


def test_other_data_stop_the_report(before):
    preregister.stage(planned(), "recipes")
    run(before)
    write_json(paths.data_proof("d1"), {"data": {"name": "d1", "identity": "0" * 64}})
    with pytest.raises(ArtefactError, match=r"it differs in data \(data of d1\);"):
        compare.stage(planned(), "recipes")


def test_a_metric_that_judges_otherwise_stops_the_report(before, monkeypatch):
    preregister.stage(planned(), "recipes")
    run(before)
    lenient = Share(of=lambda gold, answer: answer == gold or gold == contest.TASK.labels[0], worse="lower")
    monkeypatch.setattr(type(contest.TASK), "metrics", {**METRICS, "exact": lenient})
    with pytest.raises(ArtefactError, match=r"it differs in metric \(metric\);"):
        compare.stage(planned(), "recipes")


def test_free_text_and_how_a_run_is_handled_may_change(before):
    preregister.stage(planned(), "recipes")
    run(before)
    mapping = altered(versions={"better-2": {"why": "to see"}})
    trainer = {scale: dict(block) | {"checkpoint_every": 1} for scale, block in
               mapping["profiles"]["plain"]["trainer"].items()}  # fmt: skip
    mapping["profiles"]["plain"] = mapping["profiles"]["plain"] | {"trainer": trainer}
    compare.stage(Params.model_validate(mapping), "recipes")
    assert report().primary is not None


def test_the_discordant_share_follows_from_the_errors_of_the_parent(before):
    mapping = content(discordant=None)
    mapping["datasets"]["m1"] = mapping["datasets"]["x1"] | {"use": "mine"}
    mapping["mining"] = {"same-1": {"task": "imaging", "data": "m1"}}
    for row in ROWS:
        for seed in contest.SEEDS:
            mapping["versions"][f"{row}-{seed}"] = mapping["versions"][f"{row}-{seed}"] | {"parent": "same-1"}
    params, wrong = Params.model_validate(mapping), {}
    with pytest.raises(ArtefactError, match=r"mine/same-1.json does not say how often same-1 errs .* mine@same-1`, or"):
        preregister.stage(params, "recipes")
    for mode, share in (("think", 0.2), ("direct", 0.01)):
        wrong[mode] = {"value": share, "low": 0.0, "high": 1.0, "n": 80}
    mined = {
        "name": "same-1", "task": "imaging", "task_version": 1, "adapter_digest": "a", "data": "m1", "data_digest": "b",
        "pool": "mine", "modes": {}, "n": 80, "wrong": wrong, "cost": wrong["think"], "groups": [], "worst": [],
    }  # fmt: skip
    write_json(paths.mine_report("same-1"), mined)
    preregister.stage(params, "recipes")
    assert json.loads(FILE.read_bytes())["discordant"] == {"think": 0.32, "direct": 0.1}  # at least the effect
    write_json(paths.mine_report("same-1"), mined | {"wrong": {}})  # mined again since
    run(before)
    compare.stage(params, "recipes")
    assert report().primary.registration.discordant == {"think": 0.32, "direct": 0.1}


def test_the_command_prints_the_power_and_what_to_do(before, capsys):
    Path("params.yaml").write_text(dump_yaml(content()), encoding="utf-8")
    assert cli.main(["preregister", "recipe"]) == 2
    assert "'recipe' is no comparison that `clinrl preregister` knows; did you mean recipes?" in capsys.readouterr().err
    assert cli.main(["preregister", "recipes"]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[0].split("\t") == list(preregister.COLUMNS)
    assert printed.out.splitlines()[1].split("\t")[:5] == ["think", "80", "3 and 3", "10", "40.0%"]
    assert f"commit {FILE} before the runs" in printed.err
    assert cli.main(["preregister", "recipes"]) == 1
    assert "a plan is registered once" in capsys.readouterr().err
    FILE.unlink()
    assert cli.main(["preregister", "recipes", "--retrospective", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(FILE.read_bytes())
