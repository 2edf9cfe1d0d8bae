"""The exam: grading, reports, comparisons and the page, on hand-made answers, then once with a doll model."""

import csv
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import dolls
from clinrl import paths
from clinrl.analysis import baselines, exam
from clinrl.analysis.paired import Answers, between_modes, comparable, compare, patients
from clinrl.analysis.run import Run
from clinrl.artifacts import identity, read_manifest, seal, staged, write_json, write_text
from clinrl.config.model import Model
from clinrl.data import dataset
from clinrl.errors import ArtefactError, ParamsError
from clinrl.evaluation import answers, evaluate, notebook
from clinrl.evaluation.evaluate import grade, reports_of, write_reports
from clinrl.intervals import paired
from clinrl.models import bases
from clinrl.models.judges import Judges
from clinrl.reports import results
from clinrl.runtime import determinism
from clinrl.tasks.base import get_task
from clinrl.types import Message, Transcript, Unreadable

ESI = get_task("esi")
EXAM = list(ESI.cases(24, 1, pool="exam", mix="reporting"))
TRAINING = list(ESI.cases(80, 2, pool="train", mix="reporting"))
GOLDS = [ESI.label(case) for case in EXAM]
NOTHING = Unreadable(reason="empty")
DECODING = {"thinking": False, "temperature": 0.0, "max_new_tokens": 64}


def says(answer, stop="answered"):
    text = "" if isinstance(answer, Unreadable) else f"ANSWER: ESI {answer}"
    return Transcript(messages=(Message(role="assistant", content=text),), stop=stop)


def answered(answers, name="v2", mode="direct"):
    return Answers(
        name=name, task="esi", task_version=ESI.version, mode=mode, mode_spec=DECODING, exam_digest="e" * 64,
        golds=GOLDS, answers=answers,
    )  # fmt: skip


def model(**changes):
    fields = {
        "name": "v2", "task": ESI, "folder": paths.adapter(changes.get("name", "v2")), "exam": "x1", "parent": "v1",
        "compared": "v1", "data": "d1", "reward": ESI.Reward(), "kind": "version", "parts": ("v2",),
        "registered": "esi",
    }  # fmt: skip
    return Model(**(fields | changes))


def graded(answers, mode="direct"):
    transcripts = [says(answer, "max_tokens" if answer == NOTHING else "answered") for answer in answers]
    return grade(ESI, mode, EXAM, transcripts, ESI.Reward())


def run_of(model, answers):
    """A run whose model answered so, by mode."""
    return Run(
        model=model, cases=EXAM, exam_digest="e" * 64, adapter_digest="a" * 64, modes=dict.fromkeys(answers, DECODING),
        graded={mode: graded(given, mode) for mode, given in answers.items()},
    )  # fmt: skip


MINE = [NOTHING, NOTHING, *GOLDS[2:]]
THEIRS = [NOTHING, *[1] * 23]


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder):
    """The reports of v2, which fell silent twice in direct mode and is perfect in think mode."""
    folder.mkdir(parents=True)
    run = run_of(model(), {"direct": MINE, "think": GOLDS})
    parent = {mode: answered(THEIRS, "v1", mode) for mode in run.modes}
    write_reports(folder, run, reports_of(run, TRAINING, parent))
    return folder


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    root = tmp_path_factory.mktemp("reports")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        write(paths.report("v2"))
    return root


@pytest.fixture
def reports(written, monkeypatch):
    """The folder of the reports of v2, in the working directory. Only read it."""
    monkeypatch.chdir(written)
    return paths.report("v2")


def test_grading_keeps_order_answer_score_and_stop():
    lines = graded(MINE)
    assert [line.case_id for line in lines] == [case.id for case in EXAM]
    assert [line.answer for line in lines] == MINE
    assert lines[0].score.total == ESI.Reward().unreadable
    assert lines[2].score.total == 1.0
    assert [line.transcript.stop for line in lines[1:3]] == ["max_tokens", "answered"]


def test_a_parent_that_was_shown_the_cases_in_other_ways_has_a_row_for_each(project):
    parent = replace(answered(THEIRS, "v1"), under={"without_evidence": GOLDS})
    folder = paths.report("v2")
    folder.mkdir(parents=True)
    run = run_of(model(), {"direct": MINE})
    write_reports(folder, run, reports_of(run, [], {"direct": parent}))
    rows = {row.name: row.metrics["exact"].value for row in answers.load_report("v2", "direct").rows}
    assert list(rows)[:3] == ["v2", "v1", "v1, without_evidence"]
    assert rows["v1, without_evidence"] == 1.0


def test_a_transcript_without_a_turn_is_unreadable():
    assert isinstance(answers.answer(ESI, Transcript(messages=(), stop="tool_error")), Unreadable)


def test_report_counts_unreadable_answers_in_every_denominator(reports):
    report = answers.load_report("v2", "direct")
    assert (report.n, report.exam, report.exam_digest, report.adapter_digest) == (24, "x1", "e" * 64, "a" * 64)
    assert report.metrics["exact"].value == pytest.approx(22 / 24, abs=1e-6)
    assert report.metrics["exact"].n == report.metrics["no_parse"].n == 24
    assert report.metrics["no_parse"].value == report.metrics["clipped"].value == pytest.approx(2 / 24, abs=1e-6)
    assert report.metrics["kappa"].n == 22
    assert report.stops == {"answered": 22, "max_tokens": 2}
    assert report.unreadable == {"empty": 2}
    assert report.predicted["unreadable"] == 2
    assert sum(report.predicted.values()) == 24


def test_confusion_has_gold_rows_and_an_unreadable_column(reports):
    confusion = answers.load_report("v2", "direct").confusion
    assert confusion.columns == ("1", "2", "3", "4", "5", "unreadable")
    assert [sum(row) for row in confusion.counts] == [GOLDS.count(level) for level in range(1, 6)]
    with pytest.raises(TypeError, match="esi gave labels that are none of its `labels`"):
        exam.confusion(get_task("esi"), [2, 3], [2, "3x"])
    assert sum(row[-1] for row in confusion.counts) == 2
    assert sum(confusion.counts[i][i] for i in range(5)) == 22


def test_slices_cover_every_case_once_and_terms_sum_to_the_reward(reports):
    report = answers.load_report("v2", "direct")
    assert set(report.slices) == set(ESI.reporting.slices)
    for values in report.slices.values():
        assert sum(found["exact"].n for found in values.values()) == 24
        assert all(set(found) == {"exact", "critical_under"} for found in values.values())
    assert sum(report.terms.values()) == pytest.approx(report.reward, abs=1e-5)


def test_rows_hold_everybody_who_sat_the_exam(reports):
    rows = {row.name: row.metrics for row in answers.load_report("v2", "direct").rows}
    constants = [f"always {level}" for level in range(1, 6)]
    assert list(rows) == ["v2", "v1", *constants, "random", "prior-matched", "bag of words"]
    assert all(set(found) == {"exact", "critical_under", "adjacent", "dangerous"} for found in rows.values())
    assert rows["always 1"]["exact"].value == pytest.approx(GOLDS.count(1) / 24, abs=1e-6)
    assert rows["always 1"]["dangerous"].value == 0.0


def test_paired_tests_are_against_parent_and_bag_of_words(reports):
    tests = answers.load_report("v2", "direct").paired
    assert [(test.other, test.metric) for test in tests] == [
        ("v1", "exact"), ("v1", "critical_under"), ("bag of words", "exact"), ("bag of words", "critical_under"),
    ]  # fmt: skip
    against = tests[0]
    right = [a == gold for a, gold in zip(MINE, GOLDS, strict=True)]
    before = [a == gold for a, gold in zip(THEIRS, GOLDS, strict=True)]
    assert against == paired("exact", "v1", right, before)
    assert against.b > against.c


def test_summary_is_plain_numbers_by_mode_and_the_agreement(reports):
    summary = json.loads((reports / "summary.json").read_text())
    assert set(summary) == {"direct", "think", "mode_agreement"}
    assert summary["think"] == {
        "critical_under": 0.0, "exact": 1.0, "adjacent": 1.0, "dangerous": 0.0, "high_risk_sensitivity": 1.0,
        "kappa": 1.0, "no_parse": 0.0, "clipped": 0.0,
    }  # fmt: skip
    assert summary["mode_agreement"] == pytest.approx(22 / 24, abs=1e-6)
    between = json.loads((reports / "between_modes.json").read_text())
    assert between["mode_agreement"]["n"] == 24
    exact = between["between_modes"]["direct_think"]["exact"]
    assert (exact["b"], exact["c"], exact["p"]) == (0, 2, 0.5)


def test_tables_for_plots(reports):
    with (reports / "predictions_direct.csv").open() as stream:
        lines = list(csv.reader(stream))
    assert lines[0] == ["gold", "predicted"]
    assert lines[1] == [str(GOLDS[0]), "unreadable"]
    assert len(lines) == 25
    assert (reports / "confusion_think.png").exists()
    assert not (reports / "curves.png").exists()


def test_equal_answers_give_equal_bytes(reports, tmp_path):
    assert dolls.files(write(tmp_path / "again")) == dolls.files(reports)


def test_the_base_has_no_parent_no_tests_and_no_row_that_learned(project):
    folder = paths.report("esi-base")
    folder.mkdir(parents=True)
    base = model(name="esi-base", kind="base", parts=(), parent=None, compared=None, data=None)
    run = run_of(base, {"direct": MINE})
    write_reports(folder, run, reports_of(run, [], {}))
    report = answers.load_report("esi-base", "direct")
    assert report.paired == ()
    assert [row.name for row in report.rows] == ["esi-base", *(f"always {level}" for level in range(1, 6)), "random"]
    assert set(json.loads((folder / "summary.json").read_text())) == {"direct"}
    assert "the base has no parent" in (folder / "report.md").read_text()


def test_with_a_parent_that_took_another_exam_nothing_is_compared_and_the_page_says_so(project):
    folder = paths.report("v2")
    folder.mkdir(parents=True)
    run = run_of(model(compared=None), {"direct": MINE})
    assert answers.load_parent(run, "direct") is None
    write_reports(folder, run, reports_of(run, [], {}))
    assert "- Parent: v1; it took another exam, so nothing is compared with it.\n" in (folder / "report.md").read_text()


def test_a_placebo_reward_stands_at_the_head_of_the_page(reports, tmp_path):
    shutil.copytree(reports, tmp_path, dirs_exist_ok=True)
    evaluate.write_pages(tmp_path, model(placebo="shuffled"), ["direct", "think"])
    line = "- Placebo reward: shuffled. Training paid it in place of the task's score.\n"
    page = (tmp_path / "report.md").read_text()
    assert page.count(line) == 1
    assert page.replace(line, "") == (reports / "report.md").read_text()


def test_the_page_says_what_the_test_says_and_no_more(reports):
    page = (reports / "report.md").read_text()
    assert "Research only, synthetic data." in page
    assert "Parent: v1." in page
    assert "not adjusted" in page
    assert page.count("\n| bag of words | all |") == 1
    assert re.search(r"\n\| v2 \| direct \|.*\n\| v2 \| think \|", page)
    assert results.paired(ESI, paired("exact", "v1", [True] * 6, [False] * 6)) == "better"
    assert results.paired(ESI, paired("exact", "v1", [False] * 6, [True] * 6)) == "worse"
    assert results.paired(ESI, paired("exact", "v1", [True] * 5, [False] * 5)) == "not significant"
    assert results.paired(ESI, paired("dangerous", "v1", [False] * 6, [True] * 6)) == "better"
    assert results.paired(ESI, paired("dangerous", "v1", [True] * 6, [False] * 6)) == "worse"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"exam_digest": "f" * 64}, "exam digest"),
        ({"mode": "think"}, "mode differs"),
        ({"task_version": 3}, "task version"),
        ({"mode_spec": DECODING | {"max_new_tokens": 65}}, "decoding"),
    ],
)
def test_compare_refuses_answers_to_different_questions(change, sentence):
    mine, other = answered(MINE), replace(answered(THEIRS, "v1"), **change)
    with pytest.raises(ArtefactError, match=f"v2 and v1 cannot be compared.*{sentence}"):
        compare(mine, other)


def test_two_reports_are_comparable_or_refused_like_two_sets_of_answers(reports):
    direct, think = answers.load_report("v2", "direct"), answers.load_report("v2", "think")
    comparable(direct, direct.model_copy(update={"name": "v1"}))
    with pytest.raises(ArtefactError, match="their mode differs"):
        comparable(direct, think)


def test_two_silences_do_not_agree():
    found = between_modes(ESI, [1, 2, 3, 4], {"a": [1, NOTHING, 3, 4], "b": [1, NOTHING, 2, NOTHING]})
    assert found["mode_agreement"].value == 0.25
    assert between_modes(ESI, [1], {"a": [1]}) == {}


def test_tests_count_the_visits_of_an_imported_patient_together():
    visits = [case % 2 for case in range(len(MINE))]
    mine, other = (
        replace(answered(of, name), clusters=[*map(str, visits)]) for of, name in ((MINE, "v2"), (THEIRS, "v1"))
    )
    found = {test.metric: test for test in compare(mine, other)}
    alone = {test.metric: test for test in compare(answered(MINE), answered(THEIRS, "v1"))}
    assert (found["exact"].b, found["exact"].c) == (alone["exact"].b, alone["exact"].c)
    assert found["exact"].difference != alone["exact"].difference
    modes = between_modes(ESI, GOLDS, {"a": MINE, "b": THEIRS}, mine.clusters)
    assert modes["between_modes"]["a_b"]["exact"] == found["exact"].model_copy(update={"other": "b"})


def test_tests_of_a_task_with_clusters_of_its_own_count_cases_as_its_reports_in_git_do():
    assert patients(get_task("imaging"), ["a", "a"]) is None
    assert patients(ESI, ["a", "a"]) == ["a", "a"]


def write_graded(name, answers, *, exam="e" * 64):
    with staged(paths.graded(name)) as out:
        write_text(out / "direct.jsonl", "".join(line.model_dump_json() + "\n" for line in graded(answers)))
        spec = {"modes": {"direct": DECODING}}
        seal(out, kind="graded", name=name, task="esi", task_version=2, spec=spec, inputs={"exam": exam})


def test_answers_are_read_back_from_the_graded_folder(project):
    write_graded("v1", MINE)
    assert answers.load_answers(run_of(model(), {"direct": MINE}), "direct", "v1") == answered(MINE, "v1")


def test_graded_answers_to_another_question_are_refused(project):
    run = run_of(model(), {"direct": MINE})
    write_graded("v1", MINE, exam="f" * 64)
    with pytest.raises(ArtefactError, match="exam digest differs"):
        answers.load_answers(run, "direct", "v1")
    write_graded("v1", MINE)
    with pytest.raises(ArtefactError, match="no answers in mode think, only in direct"):
        answers.load_answers(run_of(model(), {"think": MINE}), "think", "v1")
    with pytest.raises(ArtefactError, match="does not answer the cases"):
        answers.load_answers(replace(run, cases=EXAM[::-1]), "direct", "v1")
    with (paths.graded("v1") / "direct.jsonl").open("a") as stream:
        stream.write("\n")
    with pytest.raises(ArtefactError, match="was altered"):
        answers.load_answers(run, "direct", "v1")


def test_answers_under_a_variant_are_to_each_case_that_has_it_once_and_in_order(project):
    variant = min(ESI.reporting.variants)
    run = run_of(model(), {"direct": MINE})
    shown = {case.id for case in EXAM if ESI.reporting.variants[variant](case) is not None}
    lines = [line for line in graded(MINE) if line.case_id in shown]
    assert len(lines) > 1
    for given, fits in ((lines, True), ([*lines, lines[0]], False), (lines[::-1], False), (lines[1:], False)):
        write_text(Path(f"direct.{variant}.jsonl"), "".join(line.model_dump_json() + "\n" for line in given))
        if fits:
            assert answers.load_variants(run, "direct", Path(), [variant, "plain"]) == {variant: lines}
            continue
        with pytest.raises(ArtefactError, match=f"not answer the cases of this exam that have the variant {variant}"):
            answers.load_variants(run, "direct", Path(), [variant])
    other = 1 if lines[0].answer != 1 else 2
    forged = [lines[0].model_copy(update={"answer": other}), *lines[1:]]
    write_text(Path(f"direct.{variant}.jsonl"), "".join(line.model_dump_json() + "\n" for line in forged))
    with pytest.raises(ArtefactError, match=r"jsonl line 1 gives another answer to .* than its transcript does"):
        answers.load_variants(run, "direct", Path(), [variant])


def test_who_took_a_turn_among_others_has_answered_and_who_took_none_has_not():
    asked = Message(role="user", content="ANSWER: ESI 1")
    assert answers.answer(ESI, Transcript(messages=(asked, *says(2).messages), stop="answered")) == 2
    silent = answers.answer(ESI, Transcript(messages=(asked,), stop="answered"))
    assert silent == Unreadable(reason="no assistant turn")


def test_a_missing_report_says_how_to_make_it(project):
    with pytest.raises(ArtefactError, match="dvc repro evaluate@v9"):
        answers.load_report("v9", "think")


def test_guesses_follow_their_weights_and_are_the_same_twice():
    drawn = baselines.guesses([1, 2, 3], [0, 1, 3], 4000)
    assert drawn == baselines.guesses([1, 2, 3], [0, 1, 3], 4000)
    assert drawn.count(1) == 0
    assert 0.72 < drawn.count(3) / 4000 < 0.78


def test_the_bag_of_words_learns_words_and_guesses_a_sole_label():
    texts = tuple(f"{word} patient number {i}" for i in range(30) for word in ("bleeding", "sneezing"))
    labels, groups = (1, 5) * 30, tuple(str(i) for i in range(30) for _ in range(2))
    assert baselines.bag_of_words(texts, labels, groups, ("a bleeding man", "sneezing")) == (1, 5)
    assert baselines.bag_of_words(("a a", "b b"), (2, 2), ("x", "y"), ("c",)) == (2,)


def test_the_bag_of_words_gives_a_rare_label_the_weight_of_a_common_one():
    texts, labels = ("pain", "pain") * 3 + ("pain",) * 54, (1, 1) * 3 + (5,) * 54
    texts = tuple(
        f"{text} shock" if label == 1 or row % 6 == 0 else text
        for row, (text, label) in enumerate(zip(texts, labels, strict=True))
    )
    assert baselines.bag_of_words(texts, labels, tuple(map(str, range(60))), ("pain shock", "pain")) == (1, 5)


def test_a_model_is_a_version_with_its_reward_or_a_base():
    doll = dolls.params()
    assert doll.model("v2").reward == doll.reward("v2")
    assert doll.model("v1").reward == ESI.Reward()
    base = doll.model("esi-base")
    assert (base.parent, base.data, base.exam) == (None, None, "x1")
    with pytest.raises(ParamsError, match="did you mean v1"):
        doll.model("v11")


@pytest.fixture
def doll(project):
    """A base that knows the form of an answer, data sets without the exam's proof, and an adapter of random weights."""
    from peft import LoraConfig, get_peft_model

    shutil.copytree(dolls.built(), project, dirs_exist_ok=True)
    doll = dolls.params()
    dataset.stage(doll, "x1")
    model, _ = bases.load(doll, "esi", for_training=False)
    shape = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    with staged(paths.adapter("v1")) as out:
        get_peft_model(model, shape).save_pretrained(out)
        write_text(out / answers.HISTORY, '{"loss":2.0,"step":1}\n{"loss":1.5,"step":2}\n')
        inputs = {"base": identity(read_manifest(paths.base("esi")))}
        seal(out, kind="adapter", name="v1", task="esi", task_version=2, spec={}, inputs=inputs)
    return doll


@pytest.mark.long
def test_a_doll_sits_the_exam_from_base_to_report(doll):
    with pytest.raises(ArtefactError, match="did not pass validation"):
        evaluate.stage(doll, "esi-base")
    exam = {"data": {"name": "x1", "identity": identity(read_manifest(paths.cases("x1")))}}
    write_json(paths.data_proof("x1"), exam)
    with pytest.raises(ArtefactError, match="data/graded/esi-base"):
        evaluate.stage(doll, "v1")
    evaluate.stage(doll, "esi-base")
    evaluate.stage(doll, "v1")
    first = dolls.files(paths.graded("v1")), dolls.files(paths.report("v1"))
    manifest = read_manifest(paths.graded("v1"))
    told = {f"think.{words}.jsonl" for words in ESI.reporting.variants}
    assert set(manifest.files) == {"direct.jsonl", "think.jsonl", *told}
    assert set(manifest.inputs) == {"adapter", "base", "exam"}
    assert set(first[1]) == {
        "think.json", "direct.json", "summary.json", "report.md", "curves.png", "history.csv", "confusion_think.png",
            "alarms.json",
        "confusion_direct.png", "predictions_think.csv", "predictions_direct.csv", "between_modes.json",
    }  # fmt: skip
    report = answers.load_report("v1", "think")
    assert report.n == 10
    assert sum(report.stops.values()) == 10
    assert answers.load_report("esi-base", "direct").stops == {"answered": 10}
    assert [test.other for test in report.paired] == ["esi-base", "esi-base", "bag of words", "bag of words"]
    base = (paths.graded("esi-base") / "direct.jsonl").read_text()
    assert base != (paths.graded("v1") / "direct.jsonl").read_text()
    evaluate.stage(doll, "v1")
    assert (dolls.files(paths.graded("v1")), dolls.files(paths.report("v1"))) == first

    given = notebook.evaluate(doll, "v1", get_task("esi").cases(2, 7, pool="mine", mix="reporting"))
    assert {mode: one.n for mode, one in given.items()} == {"direct": 2, "think": 2}
    for strange in ([], get_task("imaging").cases(2, 7, pool="mine", mix="reporting")):
        with pytest.raises(ParamsError, match="v1 answers cases of esi, and other ones or none were given"):
            notebook.evaluate(doll, "v1", strange)

    seal(paths.base("esi"), kind="base", name="esi", task="esi", task_version=2, spec={"seed": 2}, inputs={})
    with pytest.raises(ArtefactError, match="made from another base"):
        evaluate.stage(doll, "v1")


@pytest.mark.long
def test_modes_that_are_asked_side_by_side_have_the_same_answers(doll, monkeypatch):
    exam = {"data": {"name": "x1", "identity": identity(read_manifest(paths.cases("x1")))}}
    write_json(paths.data_proof("x1"), exam)
    run, judges = answers.open_run(doll, doll.model("v1")), Judges(paths.base("esi"))
    one_by_one = evaluate.answer_exam(doll, run, judges)
    write_text(Path("running"), "1")
    monkeypatch.setenv(determinism.RUNNING, str(Path("running").absolute()))
    monkeypatch.setattr(determinism, "processors", lambda: 2)
    at_once = evaluate.answer_exam(doll, run, judges)
    assert at_once.graded == one_by_one.graded
    assert at_once.probabilities == one_by_one.probabilities
    assert at_once.probabilities.keys() == run.modes.keys(), "input variants have none"
    assert len(at_once.graded) > len(run.modes)
