"""Recipes over seeds: differences that are there are found, others are not, and foreign answers are refused."""

import json
import re
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import contest
from clinrl import paths
from clinrl.analysis import contrasts
from clinrl.analysis.compared import ALL, COMMONEST, Compared, Contrast, Row, Section
from clinrl.analysis.costs import Costs
from clinrl.cli import main as cli
from clinrl.config.params import Params
from clinrl.data import dataset
from clinrl.errors import ArtefactError, ParamsError
from clinrl.evaluation import compare
from clinrl.evaluation.answers import load_report
from clinrl.intervals import holm
from clinrl.reports import figures, results
from clinrl.reports.render import render
from clinrl.reports.results import ALPHA
from clinrl.tasks.audit.episodes import APPROVED
from clinrl.tasks.audit.rules import AGE
from clinrl.tasks.base import get_task

pytestmark = pytest.mark.long

PLAIN = ("plain-1", "plain-2", "plain-3")


@pytest.fixture(scope="module")
def built():
    return contest.compared()


@pytest.fixture
def project(built, tmp_path, monkeypatch) -> Iterator[Params]:
    shutil.copytree(built, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    with contest.drawn():
        yield Params.model_validate(contest.mapping())


def report(folder: Path = Path()) -> Compared:
    return Compared.model_validate_json((folder / paths.comparison_report("recipes")).read_bytes())


def page(folder: Path = Path()) -> str:
    return (folder / paths.comparison_report("recipes").with_suffix(".md")).read_text(encoding="utf-8")


def tables(folder: Path = Path()) -> str:
    return (folder / paths.comparison_pages("recipes") / "tables.md").read_text(encoding="utf-8")


def section(found: Compared, mode: str = "think", part: str = ALL) -> Section:
    return next(some for some in found.sections if (some.mode, some.part) == (mode, part))


def row(name: str, where: Section) -> Row:
    return next(some for some in where.rows if some.name == name)


def pooled(where: Section, first: str, measure: str) -> Contrast:
    return next(t for t in where.contrasts if (t.first, t.measure, t.versions) == (first, measure, None))


def test_a_difference_that_is_there_is_found_and_none_between_equal_recipes(built):
    whole = section(report(built))
    for measure in ("macro_f1", "statement_recall"):
        found, none = pooled(whole, "better", measure), pooled(whole, "same", measure)
        assert found.adjusted < ALPHA
        assert found.difference.low > 0
        assert none.adjusted >= ALPHA
        assert none.difference.low < 0 < none.difference.high
    seeds = [t for t in whole.contrasts if t.versions and t.measure == "exact"]
    assert [t.versions for t in seeds if t.first == "better" and t.second == "plain"] == [
        (f"better-{seed}", f"plain-{seed}") for seed in contest.SEEDS
    ]
    assert all(t.adjusted < ALPHA for t in seeds if (t.first, t.second) == ("better", "plain"))
    assert all(t.adjusted >= ALPHA for t in seeds if t.first == "same")
    families: dict[tuple[bool, str], list[Contrast]] = {}
    for test in whole.contrasts:
        families.setdefault((test.versions is None, test.measure), []).append(test)
    for family in families.values():
        assert [test.adjusted for test in family] == holm([test.p for test in family])
    assert any(test.adjusted > test.p for test in whole.contrasts)


def test_readers_are_among_the_baselines_of_the_page(built):
    found = report(built)
    idle = [some for some in section(found).rows if some.kind == "baseline"][:3]
    names = ("sign_reader", "flag_all", "coin")
    rows = [some.model_copy(update={"name": name}) for some, name in zip(idle, names, strict=True)]
    audit = found.model_copy(update={"task": "audit", "columns": ("exact",)})
    shown = results.lines(audit.model_copy(update={"sections": (section(found).model_copy(update={"rows": rows}),)}))
    assert "sign_reader" in shown
    assert len(shown) == 2  # and the best of the others


def test_the_table_says_what_the_tests_show_and_no_more(built):
    text = page(built)
    whole = tables(built).split("## Mode think, all cases")[1].split("## Mode")[0]
    shown = next(line for line in whole.splitlines() if line.startswith("| better | plain |"))
    _, _, _, better, worse, _, _, _ = shown.split("|")
    assert "macro_f1 (+0." in better
    assert "exact (3 of 3 seeds)" in better
    assert worse == " none "
    equal = next(line for line in whole.splitlines() if line.startswith("| same | plain |"))
    assert equal.startswith("| same | plain | none | none |")
    assert "| reading with care | better | plain | +0." in text
    assert "| evidence | better | blind (one seed) | +0." in text
    other = next(line for line in text.splitlines() if line.startswith("| another name | same | plain |"))
    assert other.count(": not significant, detectable 0.") == 2
    assert len(text.splitlines()) <= 90
    assert "comes from the same generator as the statements that it checks" in text
    assert re.search(r"Conditions: held_out \(n = \d+\) has 5 clusters: its intervals are too narrow", text)
    assert "without a spread of seeds: blind, terse. A test that uses such a row takes its seed" in text
    assert "so they are not comparable" in text
    assert "imaging" not in Path(results.__file__).read_text(encoding="utf-8")


def test_single_seeds_are_tested_as_far_as_both_rows_have_them():
    task = get_task("imaging")
    golds = [*task.labels, *task.labels]

    def tested(*counts: int) -> list[tuple[str, str]]:
        rows = [
            contrasts.Entry(name=name, kind="arm", versions=tuple(f"{name}{k}" for k in range(n)), answers=[golds] * n)
            for name, n in zip("ab", counts, strict=True)
        ]
        return list(dict.fromkeys(names for names, _ in contrasts._mcnemar(task, golds, None, *rows)))

    assert tested(3, 2) == [("a0", "b0"), ("a1", "b1")]
    assert tested(1, 3) == [("a0", "b0"), ("a0", "b1"), ("a0", "b2")]


def test_a_share_is_tested_on_a_part_that_has_a_case_of_it():
    """An audit without an error cannot be dangerous."""
    task, sound, unsound = get_task("audit"), f"A1 {APPROVED}", f"A1 {AGE}"

    def tested(*golds: str) -> list[str]:
        rows = [contrasts.Entry(name=name, kind="arm", versions=(name,), answers=[golds]) for name in "ab"]
        return [test.metric for _, test in contrasts._mcnemar(task, golds, None, *rows)]

    assert tested(sound, sound) == ["exact"]
    assert tested(sound, unsound) == ["exact", "dangerous"]


def test_a_partition_adds_up_and_shares_only_what_is_shown(built):
    found = report(built)
    whole = section(found)
    null, elicitation, reward, total = (part.value for part in whole.partition)
    assert null + elicitation + reward == pytest.approx(total, abs=1e-6)
    means = {some.name: some.metrics["macro_f1"].value for some in whole.rows}
    assert reward == pytest.approx(means["better"] - means["same"], abs=1e-6)
    lines = [line for line in page(built).splitlines() if line.startswith("| think | all cases | +")]
    assert [line.count("%") for line in lines] == [3]
    silent = whole.partition[3].model_copy(update={"low": -0.1})
    moved = whole.model_copy(update={"partition": (*whole.partition[:3], silent)})
    hidden = found.model_copy(update={"sections": (moved,)})
    assert not any("%" in cell for line in results.partition(get_task("imaging"), hidden) for cell in line)


@pytest.mark.parametrize(
    ("mine", "theirs", "words"),
    [(0.6, 0.4, "more often, nearer to its gold share"), (0.3, 0.4, "less often, farther from its gold share"),
     (0.8, 0.9, "less often, nearer to its gold share"), (0.8, 0.6, "more often")],
)  # fmt: skip
def test_a_move_past_what_is_right_is_not_called_nearer(built, mine, theirs, words):
    whole = section(report(built))
    label = whole.commonest
    shares = {"better": mine, "plain": theirs}
    rows = tuple(
        some.model_copy(update={"answered": some.answered | {label: shares.get(some.name, 0.0)}}) for some in whole.rows
    )
    moved = whole.model_copy(update={"rows": rows, "right": whole.right | {label: 0.7}})
    test = pooled(whole, "better", COMMONEST).model_copy(update={"adjusted": 0.01})
    assert results._prior(moved, test) == f"{label} answered {words}"


def test_the_simple_policies_learn_from_all_data_sets_of_a_comparison_each_case_once():
    """Those of ancestors too, and of every row: `d2` is a part of `d1`, and `d3` is that of a parent."""
    content = contest.mapping()
    d1 = content["datasets"]["d1"]
    content["datasets"] |= {"d2": d1 | {"cases": 20}, "d3": d1 | {"cases": 20, "seed": 11}}
    for seed in contest.SEEDS:
        content["versions"][f"better-{seed}"] |= {"data": "d3"}
        content["versions"][f"same-{seed}"] |= {"data": "d2", "parent": f"better-{seed}"}
    params = Params.model_validate(content)
    spec = params.comparisons["recipes"].model_copy(update={"arms": {"plain": ("plain-1",), "same": ("same-1",)}})
    found = [case.id for case in compare._training(params, spec, contest.TASK)]
    d1, d3 = ([case.id for case in dataset.draw(params.datasets[name])] for name in ("d1", "d3"))
    assert found == [*d1, *d3]


def test_every_row_is_there_and_a_number_is_the_mean_of_its_seeds(built):
    found = report(built)
    whole = section(found)
    assert [some.name for some in whole.rows][:5] == ["plain", "better", "same", "blind", "terse"]
    assert {"base", "base, without_evidence", "random", "prior-matched", "bag of words"} < {
        some.name for some in whole.rows
    }
    plain = row("plain", whole)
    figure = plain.metrics["macro_f1"]
    assert figure.value == pytest.approx(sum(figure.seeds) / 3, abs=1e-6)
    assert figure.low < min(figure.seeds) or figure.high > max(figure.seeds)
    assert sum(map(sum, plain.confusion.counts)) == 3 * whole.n
    assert sum(plain.answered.values()) == pytest.approx(1, abs=1e-5)
    assert plain.qualities["second_opinion"].low is None
    assert plain.qualities["second_opinion"].seeds == (0.7, 0.7, 0.7)
    assert {view.view for view in whole.views if view.name == "plain"} == {"given", *contest.TASK.reporting.variants}
    assert not [view for view in whole.views if view.name == "blind"]
    assert "base, without_evidence" not in {some.name for some in section(found, "direct").rows}
    assert section(found, "direct").contrasts
    assert {t.measure for t in whole.contrasts} >= {"exact", "dangerous", "macro_f1", "statement_recall", COMMONEST}


def test_a_row_of_one_version_has_the_numbers_of_its_report(built, monkeypatch):
    whole = section(report(built))
    monkeypatch.chdir(built)
    for name, version in (("base", "imaging-base"), ("blind", "blind-1")):
        theirs = load_report(version, "think").metrics
        mine = row(name, whole)
        for metric in ("macro_f1", "exact", "over_use"):
            assert mine.metrics[metric].model_dump(exclude={"seeds"}) == theirs[metric].model_dump()
        assert mine.qualities["statement_recall"].value == theirs["statement_recall"].value


def test_parts_hold_their_cases_and_published_figures(built):
    found = report(built)
    held, known, whole = (section(found, part=part) for part in ("held_out", "known", ALL))
    assert (held.n + known.n, held.clusters) == (whole.n, 5)
    text = tables(built)
    assert "macro_f1 0.335" in text
    assert "macro_f1 0.310" in text


def test_a_p_below_a_thousandth_is_said_to_be_below_it(built):
    test = pooled(section(report(built)), "better", "macro_f1")
    assert results.difference(contest.TASK, test.model_copy(update={"adjusted": 0.0085})).endswith(", p = 0.009")
    assert results.difference(contest.TASK, test.model_copy(update={"adjusted": 1e-8})).endswith(", p < 0.001")


def test_what_is_shown_to_be_worse_leads_the_page(built):
    found = report(built)
    assert not [t for s in found.sections for t in s.contrasts if t.versions is None and t.measure == "contradiction"
                and t.difference.value > 0 and t.adjusted < ALPHA]  # fmt: skip
    assert results.harm(contest.TASK, found) is None
    assert "**Worse" not in page(built)
    whole = section(found)
    bad = pooled(whole, "better", "contradiction").model_copy(update={"adjusted": 0.001, "p": 0.0005})
    bad = bad.model_copy(
        update={"difference": bad.difference.model_copy(update={"value": 0.3, "low": 0.2, "high": 0.4})}
    )
    spoilt = whole.model_copy(update={"contrasts": (*whole.contrasts, bad)})
    text = render("comparison", report=found.model_copy(update={"sections": (spoilt, *found.sections[1:])}))
    lead = text.splitlines()[2]
    assert lead.startswith("**Worse (reading with care; better against plain, mode think): contradiction, the share of")
    assert "rises from " in lead


def test_the_folder_holds_the_tables_alone(project):
    stray = paths.comparison_pages("recipes") / "better-1.md"
    stray.write_text("of an earlier report", encoding="utf-8")
    compare.write_pages(paths.comparison_report("recipes"), contest.TASK, project.modes)
    assert [path.name for path in paths.comparison_pages("recipes").iterdir()] == ["tables.md"]


@pytest.mark.slow
@pytest.mark.usefixtures("real")
def test_equal_answers_give_equal_bytes(project):
    ends = (".json", ".md", ".png")
    target = paths.comparison_report("recipes")

    def written() -> dict[Path, bytes]:
        pages = paths.comparison_pages("recipes").iterdir()
        return {path: path.read_bytes() for path in (*map(target.with_suffix, ends), *pages)}

    compare.stage(project, "recipes")  # with its real figures
    before = written()
    compare.stage(project, "recipes")
    assert written() == before


def altered(path: Path, **changes: Any) -> None:
    """Write kept answers with other fields."""
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def test_missing_altered_and_foreign_answers_are_refused(project):
    path = paths.exam_record("imaging", "plain-2")
    kept = json.loads(path.read_text(encoding="utf-8"))
    other = "Usually Appropriate"
    given = kept["given"] | {"think": kept["given"]["think"] | {"answers": [other] * contest.CASES}}
    altered(path, given=given)
    with pytest.raises(ArtefactError, match=r"answers in .*imaging/plain-2.json give another exact than .*think.json"):
        compare.stage(project, "recipes")
    altered(path, **kept | {"adapter_digest": "b" * 64})
    with pytest.raises(ArtefactError, match=r"imaging/plain-2.json are of another adapter than"):
        compare.stage(project, "recipes")
    altered(path, **kept | {"given": kept["given"] | {"think": {"answers": [other], "qualities": {}}}})
    with pytest.raises(ArtefactError, match=r"imaging/plain-2.json does not answer the 80 cases of x1"):
        compare.stage(project, "recipes")
    altered(path, **kept | {part: {"think": kept[part]["think"]} for part in ("given", "modes")})
    with pytest.raises(ArtefactError, match=r"imaging/plain-2.json has no answers in mode direct, only in think"):
        compare.stage(project, "recipes")
    path.write_text("[]", encoding="utf-8")
    with pytest.raises(ArtefactError, match=r"imaging/plain-2.json holds no answers to an exam; restore it from git"):
        compare.stage(project, "recipes")
    path.unlink()
    with pytest.raises(ArtefactError, match=r"plain-2.json does not exist: run `dvc repro evaluate@plain-2`"):
        compare.stage(project, "recipes")
    shutil.rmtree(paths.report("plain-2"))
    with pytest.raises(ArtefactError, match="dvc repro evaluate@plain-2"):
        compare.stage(project, "recipes")


def test_no_transcript_is_needed(project):
    before = paths.comparison_report("recipes").read_bytes()
    shutil.rmtree(paths.graded("plain-2").parent)
    compare.stage(project, "recipes")
    assert paths.comparison_report("recipes").read_bytes() == before


def test_seeds_that_sat_another_exam_or_decoded_otherwise_are_refused(project):
    path = paths.exam_record("imaging", "better-3")
    kept = json.loads(path.read_text(encoding="utf-8"))
    altered(path, exam_digest="c" * 64)
    with pytest.raises(ArtefactError, match="better-3 cannot be compared: their exam digest differs"):
        compare.stage(project, "recipes")
    altered(path, **kept | {"modes": {mode: spec | {"temperature": 0.7} for mode, spec in kept["modes"].items()}})
    with pytest.raises(ArtefactError, match="decoding of the mode differs"):
        compare.stage(project, "recipes")
    altered(path, **kept)
    altered(paths.report("better-3") / "think.json", mode_spec={"thinking": True, "temperature": 0.7})
    with pytest.raises(ArtefactError, match="better-3 and better-3 cannot be compared: their decoding of the mode"):
        compare.stage(project, "recipes")


def test_a_base_without_the_view_that_a_test_names_is_refused(project):
    path = paths.exam_record("imaging", "imaging-base")
    given = json.loads(path.read_text(encoding="utf-8"))["given"]
    assert len(given.pop("think.without_evidence")["answers"]) == contest.CASES
    altered(path, given=given)
    with pytest.raises(ArtefactError, match=r"'plain' cannot be tested against 'base, without_evidence'.*baseline@"):
        compare.stage(project, "recipes")


def test_an_unknown_comparison_and_an_unknown_part_are_refused(project, capsys):
    assert cli.main(["compare", "recipe"]) == 2
    assert "'recipe' is no comparison that `clinrl compare` knows; did you mean recipes?" in capsys.readouterr().err
    spec = project.comparisons["recipes"].model_copy(update={"published_parts": {"heldout": {}}})
    with pytest.raises(ParamsError, match="'heldout' is no part of x1, only all, held_out, known"):
        compare.stage(project.model_copy(update={"comparisons": {"recipes": spec}}), "recipes")


def levels(counts: list[tuple[int, ...]]) -> Costs:
    """Counts of a version on 100 cases: its own first, then at two weights."""
    measures = ("exact", "under_triage", "over_triage", "critical_under")
    return Costs(n=100, scored=99, measures=measures, own=counts[0], weights=(0.5, 2.0), chosen=tuple(counts[1:]))


def test_a_row_has_a_curve_only_if_all_its_seeds_have():
    one = levels([(80, 10, 10, 6)])
    members = {
        name: SimpleNamespace(report=SimpleNamespace(costs=costs))
        for name, costs in {"a": None, "b": one, "c": one}.items()
    }
    spec = SimpleNamespace(arms={"better": ("a", "b"), "plain": ("b", "c")})
    assert compare._costs(spec, members) == {"plain": (one, one)}


def test_a_row_has_what_only_reports_have_if_those_of_all_its_seeds_do():
    opinion, variant = "second_opinion", "without_evidence"

    def only_reported(*has: bool) -> tuple[object, object]:
        reports = [({opinion: 0.5}, {"view": {variant: {}}}) if one else ({}, {}) for one in has]
        members = {
            str(seed): SimpleNamespace(
                answers=SimpleNamespace(answers=[]),
                qualities={},
                report=SimpleNamespace(metrics=metrics, slices=slices),
            )
            for seed, (metrics, slices) in enumerate(reports)
        }
        entry = compare._entry(get_task("imaging"), "plain", "arm", members)
        return entry.reported, entry.variants

    assert only_reported(True, True) == ({opinion: [0.5, 0.5]}, {variant: [{}, {}]})
    assert only_reported(True, False) == only_reported(False, True) == ({}, {})


def test_curves_are_drawn_and_tabulated_where_all_seeds_of_a_row_have_them(built, tmp_path, real):
    esi, plain = get_task("esi"), report(built)
    assert plain.costs == {}
    assert "Thresholds" not in page(built)
    assert results.curves(esi, plain) == []
    better = (levels([(80, 10, 10, 6), (85, 12, 3, 8), (70, 4, 26, 2)]),)
    others = (
        levels([(80, 8, 12, 5), (82, 10, 8, 7), (72, 6, 22, 3)]),
        levels([(80, 8, 12, 5), (84, 8, 8, 5), (70, 6, 24, 1)]),
    )
    costs = {mode: {"better": better, "plain": others} for mode in ("think", "direct")}
    registration = SimpleNamespace(first="better")
    found = plain.model_copy(update={"costs": costs, "primary": SimpleNamespace(registration=registration)})
    rows = list(results.thresholds(esi, found))
    assert [row[:4] for row in rows[:2]] == [("think", "plain", "2", "100 (99)"), ("think", "better", "1", "100 (99)")]
    assert rows[0][4:] == ("12.0%, 12.0 to 12.0", "5.0%, 5.0 to 5.0", "6.0%, 5.0 to 7.0", "8.0%", "0.5")
    assert rows[1][6:] == ("8.0%, 8.0 to 8.0", "3.0%", "0.5")
    panels = results.curves(esi, found)
    assert [name for name, _, _ in panels] == ["mode think", "mode direct"]
    assert panels[0][2][0] == ("plain", [[0.12, 0.08, pytest.approx(0.23)], [0.08, 0.09, 0.06]])
    for name, curves in (("without", []), ("with", panels)):
        figures.arms(results.dots(plain), results.lines(plain), "title", tmp_path / f"{name}.png", curves)
    sizes = {path.stem: struct.unpack(">II", path.read_bytes()[16:24]) for path in tmp_path.glob("*.png")}
    assert sizes["with"][1] > sizes["without"][1]
