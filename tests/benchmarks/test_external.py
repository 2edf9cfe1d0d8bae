"""The external exam: figures beside published ones, and what is said when they are not about the same exam."""

import json
import shutil
from collections import Counter
from dataclasses import replace

import pytest

import dolls
import esi_sources as synthetic
from clinrl import paths
from clinrl.analysis.run import clusters_of
from clinrl.artifacts import identity, read_manifest, write_json
from clinrl.benchmarks import external
from clinrl.benchmarks.external import ExternalReport
from clinrl.data import dataset
from clinrl.errors import ArtefactError, DataError, ParamsError
from clinrl.evaluation import evaluate
from clinrl.evaluation.evaluate import grade
from clinrl.intervals import quadratic_kappa, rate, wilson
from clinrl.reports.render import render
from clinrl.tasks.base import get_task
from clinrl.tasks.esi.published import PUBLISHED
from clinrl.types import Message, Transcript

TASK = get_task("esi")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The doll with a version whose external exam is a synthetic validation file."""
    shutil.copytree(dolls.built(), tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    (made,) = synthetic.mietic_validation(tmp_path / "source", 50, 1)
    entry = {"task": "esi", "task_version": 2, "use": "exam", "source": str(made)}
    params = dolls.params(imports={"mietic-36": entry}, external={"v1": {"task": "esi", "data": "mietic-36"}})
    dataset.stage(params, "mietic-36")
    prove("mietic-36")
    shutil.copytree(paths.adapter("esi-base"), paths.adapter("v1"))
    return params


def prove(name):
    named = {"data": {"name": name, "identity": identity(read_manifest(paths.cases(name)))}}
    write_json(paths.data_proof(name), named)


def answering(answer):
    """A stand-in for the model."""

    def answer_exam(_params, run, *_):
        said = [Message(role="assistant", content=f"ANSWER: ESI {answer(case)}") for case in run.cases]
        transcripts = [Transcript(messages=(turn,), stop="answered") for turn in said]
        graded = {mode: grade(run.task, mode, run.cases, transcripts, run.model.reward) for mode in run.modes}
        return replace(run, graded=graded)

    return answer_exam


def report() -> ExternalReport:
    return ExternalReport.model_validate_json(paths.external_report("v1").read_bytes())


def page() -> str:
    return paths.external_report("v1").with_suffix(".md").read_text(encoding="utf-8")


def test_a_version_stands_beside_what_was_published(project, monkeypatch):
    monkeypatch.setattr(external, "answer_exam", answering(TASK.label))
    external.stage(project, "v1")
    found = report()
    assert found.same_make
    assert found.gold == {"1": 14, "2": 11, "3": 5, "4": 4, "5": 2}
    mine = {line.name: line for line in found.lines}
    assert mine["v1, mode think"].metrics["exact"].value == 1
    assert mine["v1, mode direct"].metrics["kappa"].value == 1
    assert mine["always 1"].metrics["exact"].value == pytest.approx(14 / 36, abs=1e-6)
    assert {row.name for row in PUBLISHED.rows} <= set(mine)
    v49 = mine["Qwen3.5-9B v49, both modes"].metrics["exact"]
    assert (round(v49.value, 3), v49.n) == (0.778, 36)
    assert v49.low < 0.65 < 0.85 < v49.high
    assert "Only if they are the very same cases, which is not known here, can the rows be compared" in page()
    assert "Research only, imported cases." in page()
    assert "| v1, mode think | 36 | 100.0% [90.4, 100.0] |" in page()
    assert "0.948" in page()


def test_the_page_says_how_intervals_were_made(project, monkeypatch):
    monkeypatch.setattr(external, "answer_exam", answering(TASK.label))
    external.stage(project, "v1")
    assert "95% intervals: a bootstrap over cases, and Wilson's for shares. Kappa has quadratic weights. " in page()
    found = report()
    alike = {mode: one.model_copy(update={"task": "imaging"}) for mode, one in found.reports.items()}
    text = render("external", report=found.model_copy(update={"reports": alike}), columns=("exact",))
    assert "95% intervals: a bootstrap over clusters of cases, and Wilson's for shares that are published" in text
    assert "appa" not in text.split("Numbers without brackets")[0]


@pytest.mark.long
def test_visits_of_one_patient_are_no_independent_cases(project, tmp_path, monkeypatch):
    """A reader who knows half of the patients: as many answers are wrong, and less is known of how many."""
    synthetic.mimic_iv_ed(tmp_path / "mimic", 1500, 1)
    entry = {"task": "esi", "task_version": 2, "use": "exam", "source": str(tmp_path / "mimic")}
    params = dolls.params(imports={"visits": entry}, external={"v1": {"task": "esi", "data": "visits"}})
    dataset.stage(params, "visits")
    prove("visits")
    cases = list(dataset.read_cases(paths.cases("visits"), TASK))
    patients = [case.group for case in cases]
    known = set(sorted(set(patients))[::2])
    monkeypatch.setattr(
        external, "answer_exam",
        answering(lambda case: TASK.label(case) if case.group in known else 1 + TASK.label(case) % 5),
    )  # fmt: skip
    external.stage(params, "v1")
    found, verdicts = report().reports["think"], [patient in known for patient in patients]
    exact, apart = found.metrics["exact"], wilson(sum(verdicts), len(verdicts))
    assert exact == rate(verdicts, patients)
    assert exact.high - exact.low > 1.2 * (apart.high - apart.low)
    assert f"{len(cases)} cases from elsewhere in {len(set(patients))} clusters, each" in page()
    assert "a bootstrap over clusters of cases" in page()
    single = [case for case in cases if patients.count(case.group) == 1]
    assert clusters_of(TASK, single) is None


def test_another_exam_is_not_compared(project, monkeypatch):
    dataset.stage(project, "x1")
    prove("x1")
    monkeypatch.setattr(external, "answer_exam", answering(lambda _case: 3))
    external.stage(project.model_copy(update={"external": {"v1": project.external["v1"].model_copy(
        update={"data": "x1"})}}), "v1")  # fmt: skip
    assert not report().same_make
    assert "The published rows are not comparable with the others: they are about 36 cases with gold labels" in page()
    assert "and here are 10 with" in page()


@pytest.mark.long
def test_equal_answers_give_equal_bytes_and_no_answer_is_kept(project, monkeypatch):
    monkeypatch.setattr(external, "answer_exam", answering(lambda _case: 2))
    kept = []
    for _ in range(2):
        external.stage(project, "v1")
        kept.append([paths.external_report("v1").read_bytes(), page()])
    assert kept[0] == kept[1]
    narratives = [case.facts.narrative for case in dataset.read_cases(paths.cases("mietic-36"), TASK)]
    assert not [text for text in narratives if text in page() or json.dumps(text)[1:-1] in kept[0][0].decode()]


def test_other_pools_and_other_versions_are_refused(project, monkeypatch):
    with pytest.raises(ParamsError, match=r"names no external exam of 'v2'"):
        external.stage(project, "v2")
    shutil.rmtree(paths.cases("mietic-36"))
    shutil.copytree(paths.cases("d1"), paths.cases("mietic-36"))
    with pytest.raises(ArtefactError, match="is drawn from the train pool; an external exam is exam data"):
        external.stage(project, "v1")


def test_no_proof_no_external_exam(project):
    paths.data_proof("mietic-36").unlink()
    with pytest.raises(ArtefactError, match="dvc repro validate-import@mietic-36"):
        external.stage(project, "v1")


def test_published_counts_are_those_of_the_printed_shares():
    n = sum(PUBLISHED.labels.values())
    assert n == 36
    rows = {row.name: row for row in PUBLISHED.rows}
    shares = {name: {key: round(100 * hits / n, 1) for key, hits in row.hits.items()} for name, row in rows.items()}
    assert shares["Qwen3.5-9B v43, SFT"] == {"exact": 75.0, "adjacent": 97.2}
    assert shares["Qwen3.5-9B v46"] == {"exact": 77.8, "adjacent": 94.4}
    assert shares["MedGemma-4B GRPO"] == {"exact": 83.3, "adjacent": 97.2}
    engine = "BiomedBERT v42 with engine, experts' labels"
    assert shares[engine] == {"exact": 86.1, "adjacent": 97.2, "under_triage": 8.3, "over_triage": 5.6}
    assert rows[engine].hits["exact"] + 3 + 2 == n
    assert shares["GPT-5, prompt and structured fields"]["exact"] == 88.9
    preprint = rows["BiomedBERT, preprint"]
    assert shares[preprint.name] == {"exact": 88.9, "adjacent": 97.2}
    assert not {88.9, 97.2} & {round(100 * hits / 50, 1) for hits in range(51)}
    assert "the preprint says 50" in preprint.source
    assert "about 65% exact" in rows["Qwen3.5-9B v43, SFT"].source
    assert [shares[f"keyword engine, {stage} stage"]["exact"] for stage in ("first", "second", "last")] == [
        41.7, 69.4, 97.2,
    ]  # fmt: skip
    assert all(
        set(row.hits) <= set(TASK.metrics) and set(row.statistics) <= set(TASK.metrics) for row in PUBLISHED.rows
    )


def test_the_published_kappa_follows_from_the_published_confusion():
    golds = [1] * 14 + [2] * 11 + [3] * 5 + [4] * 4 + [5] * 2
    answers = [1] * 12 + [2] * 2 + [2] * 11 + [2] * 2 + [3] * 3 + [4] * 4 + [4, 5]
    row = next(row for row in PUBLISHED.rows if row.name.startswith("GPT-4.1"))
    for name in row.hits:
        of = TASK.metrics[name].of
        assert sum(of(gold, answer) for gold, answer in zip(golds, answers, strict=True)) == row.hits[name]
    kappa = quadratic_kappa(Counter(zip(golds, answers, strict=True)))
    assert kappa == pytest.approx(row.statistics["kappa"], abs=0.005)


def test_whether_the_version_knows_the_exam_is_asked_before_it_answers(project, monkeypatch):
    def refuse(*_):
        raise DataError("they share patients")

    monkeypatch.setattr(evaluate, "check_apart", refuse)
    monkeypatch.setattr(external, "answer_exam", lambda *_: pytest.fail("a model was asked"))
    with pytest.raises(DataError, match="they share patients"):
        external.stage(project, "v1")
