"""A rival learns from the base's corpus and the data sets, answers its exam, and is a row of the comparison."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import contest
import dolls
from clinrl import paths
from clinrl.analysis.compared import ALL, Compared
from clinrl.artifacts import md5
from clinrl.config.params import Params
from clinrl.errors import ArtefactError, ParamsError
from clinrl.evaluation import compare, evaluate
from clinrl.evaluation.record import Record
from clinrl.evaluation.rival import training_cases
from clinrl.models.pretrain import corpus
from clinrl.tasks.base import get_task

pytestmark = pytest.mark.long

RECORD = Path("data/reports/exams/imaging/trees.json")


@pytest.fixture(scope="module")
def built() -> Path:
    return contest.compared()


@pytest.fixture
def project(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Params]:
    shutil.copytree(built, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    with contest.drawn():
        yield Params.model_validate(contest.mapping())


def test_it_learned_from_the_base_and_the_data_and_left_a_record(project: Params) -> None:
    record = Record.model_validate_json(RECORD.read_bytes())
    assert record.learned == {"base corpus": 300, "d1": 60}
    assert record.given["think"] == record.given["direct"]
    answers = record.given["think"].answers
    assert len(answers) == contest.CASES
    assert set(answers) <= set(contest.TASK.labels)
    assert (record.name, record.md5) == ("trees", {str(paths.cases("x1")): md5(paths.cases("x1"))})
    before = RECORD.read_bytes()
    evaluate.stage(project, "trees")
    assert RECORD.read_bytes() == before


def test_it_is_a_row_that_a_test_may_name(built: Path) -> None:
    report = Compared.model_validate_json((built / paths.comparison_report("recipes")).read_bytes())
    for section in report.sections:
        (row,) = (row for row in section.rows if row.name == "boosted trees")
        assert row.kind == "rival"
        assert row.metrics["exact"].n == section.n
        tests = [t for t in section.contrasts if (t.first, t.second) == ("better", "boosted trees")]
        assert {t.measure for t in tests} >= {"exact", "macro_f1"}
    whole = [section for section in report.sections if section.part == ALL]
    assert len({str(row.metrics) for section in whole for row in section.rows if row.kind == "rival"}) == 1


def test_answers_to_other_cases_are_refused(project: Params) -> None:
    record = json.loads(RECORD.read_text())
    RECORD.write_text(json.dumps(record | {"exam_digest": "c" * 64}))
    with pytest.raises(ArtefactError, match="imaging-base and trees cannot be compared: their exam digest differs"):
        compare.stage(project, "recipes")
    RECORD.write_text(json.dumps(record | {"given": {"think": {"answers": [], "qualities": {}}}}))
    with pytest.raises(ArtefactError, match=r"trees.json does not answer the 80 cases of x1"):
        compare.stage(project, "recipes")
    RECORD.unlink()
    with pytest.raises(ArtefactError, match=r"trees.json does not exist: run `dvc repro rival@trees`"):
        compare.stage(project, "recipes")


def test_the_corpus_of_a_base_that_read_two_editions_is_labelled_by_that_of_the_exam() -> None:
    rival = {"trees": {"task": "esi", "data": ["d1"], "exam": "x1"}}
    found = training_cases(dolls.params(rivals=rival), "trees")
    assert {source: len(cases) for source, cases in found.items()} == {"base corpus v5": 300, "d1": 30}
    assert {case.key.edition for case in found["base corpus v5"]} == {"v5"}
    read = list(corpus(get_task("esi"), dolls.params().bases["esi"].embedded))
    assert [case.facts for case in read] == [case.facts for case in found["base corpus v5"]]
    assert {case.key.edition for case in read} == {"v4", "v5"}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"task": "audit"}, "is not a task of one turn with a base"),
        ({"exam": "x2"}, "is not the exam that the base takes"),
        ({"data": ["x1"]}, "is not drawn train data of imaging"),
    ],
)
def test_a_rival_that_cannot_be_is_refused(change: dict[str, object], sentence: str) -> None:
    content = contest.mapping()
    content["rivals"] = {"trees": content["rivals"]["trees"] | change}
    with pytest.raises(ParamsError, match=sentence):
        Params.model_validate(content)


@pytest.mark.parametrize("name", ["plain-1", "imaging-base", "exams"])
def test_a_name_in_use_is_refused(name: str) -> None:
    content = contest.mapping()
    content["rivals"][name] = content["rivals"]["trees"]
    with pytest.raises(ParamsError, match=f"rivals.{name} is a name in use"):
        Params.model_validate(content)


@pytest.mark.parametrize(
    ("rivals", "sentence"),
    [({"plain": "trees"}, "'plain' is the name of another row"), ({"t": "tree"}, "'tree' is not a rival of imaging")],
)
def test_a_row_that_is_taken_or_unknown_is_refused(rivals: dict[str, str], sentence: str) -> None:
    content = contest.mapping()
    content["comparisons"] = {"recipes": contest.COMPARISON | {"rivals": rivals}}
    with pytest.raises(ParamsError, match=sentence):
        Params.model_validate(content)
