"""Imaging requests: how they are drawn, what their words say, and that evidence knows nothing of the label."""

from collections import Counter
from functools import cache

import pytest
from scipy.stats import chi2_contingency

from clinrl.tasks.base import get_task
from clinrl.tasks.imaging import evidence
from clinrl.tasks.imaging.answer import LABELS
from clinrl.tasks.imaging.cases import (
    ELSEWHERE_MIX,
    HELD_OUT_SHARE,
    NATURAL,
    cases,
    is_held_out,
    statements,
    variant_of,
)
from clinrl.tasks.imaging.guideline import BY_ID, HELD_OUT, true_yield
from clinrl.tasks.imaging.rules import decide
from clinrl.tasks.imaging.statements import CITES, WORDINGS, Statement, read, slots, to_sentence

TASK = get_task("imaging")


@cache
def drawn(pool="train", mix="natural", n=2200):
    return tuple(cases(n, 17, pool=pool, mix=mix))


@pytest.mark.long
def test_labels_have_the_published_mix():
    for chosen, mix in (
        (drawn(), NATURAL),
        ([case for case in drawn("exam", "reporting", 1000) if not is_held_out(case)], NATURAL),
        ([case for case in drawn("exam", "reporting", 1000) if is_held_out(case)], ELSEWHERE_MIX),
    ):
        counts = Counter(case.key.label for case in chosen)
        assert all(counts[label] / len(chosen) == pytest.approx(mix[label], abs=0.05) for label in LABELS)


@pytest.mark.long
def test_there_are_more_triplets_than_the_published_study_had():
    triplets = {(case.group, case.facts.procedure) for case in drawn()}
    assert len(triplets) >= 1736


def test_held_out_conditions_are_in_the_exam_alone():
    exam = drawn("exam", "reporting", 1000)
    apart = [case for case in exam if is_held_out(case)]
    assert {case.key.scenario.condition for case in apart} == {condition.id for condition in HELD_OUT}
    assert {TASK.pool_of(f"{condition.id}/{n}") for condition in HELD_OUT for n in range(20)} == {"exam"}
    assert len(apart) / len(exam) == pytest.approx(HELD_OUT_SHARE, abs=0.04)
    for pool in ("base", "train", "mine"):
        seen = drawn(pool, "reporting", 100)
        assert not any(map(is_held_out, seen))
        texts = " ".join(case.facts.narrative for case in seen).lower()
        assert not [condition.says for condition in HELD_OUT if condition.says.lower() in texts]


@pytest.mark.long
def test_all_procedures_of_a_variant_lie_in_one_pool():
    variants = {
        pool: {variant_of(case.key.scenario) for case in drawn(pool, n=150)}
        for pool in ("base", "train", "mine", "exam")
    }
    assert sum(map(len, variants.values())) == len(set().union(*variants.values()))
    procedures = Counter(case.group for case in drawn())
    assert max(procedures.values()) > 3


def test_evidence_says_nothing_about_the_label():
    """Independence of the label and the number of studies, of those that bear on it, and of those that contradict."""
    for count in (
        lambda case: len(case.key.studies),
        lambda case: sum(stance != "elsewhere" for stance in stances(case)),
        lambda case: stances(case).count("disagrees"),
    ):
        cells = Counter((case.key.label, count(case)) for case in drawn())
        columns = sorted({column for _, column in cells})
        table = [[cells[label, column] for column in columns] for label in LABELS]
        assert chi2_contingency(table).pvalue > 0.01


def test_a_classifier_that_sees_only_whether_there_is_evidence_learns_the_prior_and_no_more():
    train, exam = drawn(), drawn("exam", n=400)
    best = {
        has: Counter(case.key.label for case in train if bool(case.facts.evidence) == has).most_common(1)[0][0]
        for has in (True, False)
    }
    right = sum(best[bool(case.facts.evidence)] == case.key.label for case in exam) / len(exam)
    assert set(best.values()) == {LABELS[0]}
    assert right == sum(case.key.label == LABELS[0] for case in exam) / len(exam)


def stances(case):
    s = case.key.scenario
    shown = true_yield(BY_ID[s.condition], s.target, s.modality)
    return [evidence.stance(study, s, shown) for study in case.key.studies]


def test_most_studies_that_bear_on_a_request_are_right_about_it():
    counts = Counter(stance for case in drawn() for stance in stances(case))
    total = sum(counts.values())
    assert counts["agrees"] / total == pytest.approx(0.6, abs=0.05)
    assert counts["disagrees"] / total == pytest.approx(0.15, abs=0.04)


def test_gold_sentences_read_back_as_the_statements_they_were_worded_from():
    for case in drawn():
        s = case.key.scenario
        assert tuple(map(read, case.key.reasoning)) == statements(s, case.key.studies, decide(s))


@pytest.mark.parametrize("kind", WORDINGS)
def test_every_wording_of_a_statement_reads_as_it_and_as_no_other(kind):
    values = {"modality": "PET/CT", "target": "an obstruction", "region": "lower back", "number": "12",
              "stance": "says otherwise", "rating": "7"}  # fmt: skip
    statement = Statement(kind, tuple(values[slot] for slot in slots(kind)))
    sentences = [to_sentence(statement, wording) for wording in range(3)]
    assert len(set(sentences)) == 3
    assert [read(sentence) for sentence in sentences] == [statement] * 3
    assert read(sentences[0].upper().replace(" ", "  ")) == statement
    assert read(f"It is not so that {sentences[0]}") is None


def test_each_prompt_holds_its_facts_and_nothing_of_the_key():
    for case in drawn()[:300]:
        text = TASK.prompt(case.facts)[1].content
        assert all(part in text for part in (case.facts.condition, case.facts.variant, case.facts.procedure))
        assert ("Abstracts:" in text) == bool(case.facts.evidence)
        assert not any(sentence in text for sentence in case.key.reasoning)


def test_views_change_the_evidence_and_nothing_else():
    for case in drawn()[:500]:
        s = case.key.scenario
        without, swapped, against = (
            TASK.reporting.variants[f"{view}_evidence"](case) for view in ("without", "swapped", "contradicted")
        )
        assert (without is None) == (swapped is None) == (not case.key.studies)
        if without is not None:
            assert without.facts.evidence == ()
            assert not any(read(sentence).kind == CITES for sentence in without.key.reasoning)
        if swapped is not None:
            assert len(swapped.key.studies) == len(case.key.studies)
            assert all(study.condition != s.condition for study in swapped.key.studies)
        assert (against is None) == all(stance == "elsewhere" for stance in stances(case))
        if against is not None:
            shown = true_yield(BY_ID[s.condition], s.target, s.modality)
            assert "agrees" not in [evidence.stance(study, s, shown) for study in against.key.studies]
        for shown_case in filter(None, (without, swapped, against)):
            same = {"condition", "variant", "procedure"}
            assert shown_case.facts.model_dump(include=same) == case.facts.model_dump(include=same)
            plain = [x for x in shown_case.key.reasoning if read(x).kind != CITES]
            assert [read(x) for x in plain] == [read(x) for x in case.key.reasoning if read(x).kind != CITES]
