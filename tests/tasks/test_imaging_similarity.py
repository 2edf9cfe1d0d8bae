"""The published similarity, and the matching that contradicts, counts once and can lose."""

import hashlib
import time
from itertools import islice

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clinrl.tasks.imaging import cues, statements
from clinrl.tasks.imaging.cases import cases
from clinrl.tasks.imaging.sentences import drop_citations
from clinrl.tasks.imaging.similarity import matched_similarity, mean_similarity, valid_citations

GOLD = ("CT shows a stone well here.", "Study [1] supports this.", "The rating is 8 of 9.")
EVIDENCE = [(1, "CT in 227 patients with flank pain. Results: a stone was seen in 97%."), (2, "MRI of the brain.")]

sentences = st.lists(
    st.one_of(st.sampled_from([*GOLD, "It is not so.", "Cited [7] and [1].", "A stone was seen in 97%."]), st.text()),
    max_size=8,
)


def vector(text: str) -> numpy.ndarray:
    """A unit vector of its words: equal texts have equal ones, texts that share words are close."""
    seen = numpy.zeros(64, dtype=numpy.float32)
    for word in drop_citations(text).lower().split():
        seen[hashlib.sha256(word.encode()).digest()[0] % 64] += 1
    norm = float(numpy.linalg.norm(seen))
    return seen / norm if norm else seen


def vectors(texts) -> numpy.ndarray:
    return numpy.asarray([vector(text) for text in texts], dtype=numpy.float32).reshape(len(texts), 64)


def similar(said, gold=GOLD, slack=1, floor=0.4) -> float:
    return matched_similarity(gold, said, vectors(gold), vectors(said), EVIDENCE, floor=floor, slack=slack)


def test_published_is_the_mean_of_best_cosines_in_both_scalings():
    gold = numpy.eye(4, dtype=numpy.float32)[:2]
    said = numpy.asarray([[1, 0, 0, 0], [0.6, 0.0, 0.8, 0], [0, 0, -1, 0]], dtype=numpy.float32)
    assert mean_similarity(gold, said, halved=False) == pytest.approx((1 + 0) / 2)
    assert mean_similarity(gold, said, halved=True) == pytest.approx(0.75)
    assert mean_similarity(gold, said[1:2], halved=False) == pytest.approx(0.3)
    assert mean_similarity(gold, -gold[:1], halved=False) == pytest.approx(-0.5)
    assert mean_similarity(gold, said[:0], halved=True) == mean_similarity(gold[:0], said, halved=True) == 0.0


def test_published_never_minds_more_sentences():
    few, many = vectors(GOLD[:1]), vectors([*GOLD[:1], "Padding.", "More of it.", *GOLD[1:]])
    assert mean_similarity(vectors(GOLD), many, halved=False) >= mean_similarity(vectors(GOLD), few, halved=False)


@given(sentences, sentences, st.integers(0, 3), st.floats(0, 0.9))
def test_any_text_has_a_similarity_of_zero_to_one(gold, said, slack, floor):
    assert 0.0 <= similar(said, gold, slack, floor) <= 1.0


def test_gold_is_one_in_any_order_and_nothing_is_zero():
    assert similar(GOLD) == pytest.approx(1.0)
    assert similar(GOLD[::-1]) == pytest.approx(1.0)
    assert similar([]) == similar(GOLD, gold=[]) == 0.0


@given(st.floats(-1, 1), st.floats(0, 0.9))
def test_a_pair_is_worth_its_cosine_above_the_floor(cosine, floor):
    gold, said = numpy.asarray([[1.0, 0.0]]), numpy.asarray([[cosine, (1 - cosine**2) ** 0.5]])
    found = matched_similarity(["A stone."], ["A pebble."], gold, said, [], floor=floor, slack=1)
    assert found == pytest.approx(max(0.0, (cosine - floor) / (1 - floor)), abs=1e-9)


def test_leaving_out_and_adding_both_cost():
    two = similar(GOLD[:2])
    assert two == pytest.approx(2 * (2 / 3) / (1 + 2 / 3))
    one_more, many_more = similar([*GOLD, "Well then."]), similar([*GOLD, *(f"Point {i} counts." for i in range(9))])
    assert one_more == pytest.approx(1.0)
    assert similar([*GOLD, "Well then."], slack=0) < 1.0
    assert many_more < 0.5


def test_a_repeated_sentence_counts_once():
    assert similar([GOLD[0]] * 3) <= similar([GOLD[0]])
    assert similar(["Study [1] supports this.", "Study [2] supports this."], gold=["Study [1] supports this."]) <= 1.0


def test_two_studies_may_be_cited_in_the_same_words():
    gold = ["Study [1] supports this.", "Study [2] supports this."]
    assert similar(gold, gold) == pytest.approx(1.0)
    assert similar(["Study [2] supports this."], ["Study [1] supports this."]) == 0.0


def test_a_copy_of_the_evidence_is_worth_nothing():
    copy = "Results: a stone was seen in 97%."
    assert similar([copy], [copy]) == 0.0
    assert similar([copy.replace("97%", "97% there")], [copy]) > 0.0
    assert similar(["Stone was seen in 97%."], [copy]) == 0.0
    assert similar(["Was seen in 97%."], [copy]) > 0.0  # four words may be a coincidence


def test_a_study_that_does_not_exist_takes_its_share():
    assert valid_citations(["a [1]", "b [2], [7]"], [1, 2]) == pytest.approx(2 / 3)
    assert valid_citations(["nothing"], []) == 1.0
    assert similar([GOLD[0], "Study [1] supports this [9].", GOLD[2]]) < 0.6


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("CT shows a stone well here.", "CT shows a stone badly here."),
        ("CT shows a stone well here.", "CT does not show a stone well here."),
        ("CT rarely misses a stone.", "CT mostly misses a stone."),
        ("Study [1] supports this.", "Study [1] says otherwise."),
        ("Study [1] supports this.", "Study [1] does not support this."),
        ("Study [1] supports this.", "Study [1] asks another question."),
        ("Study [1] supports this.", "Study [2] supports this."),
        ("Contrast is safe here.", "Contrast is unsafe here."),
        ("Contrast is unsafe here.", "Contrast is not unsafe here."),
        ("Contrast adds something.", "Contrast adds nothing."),
        ("A clot needs contrast.", "A clot needs no contrast."),
        ("There is a red flag.", "There is no red flag."),
        ("MRI should not wait.", "MRI can wait."),
        ("The rating is 2 of 9.", "The rating is 8 of 9."),
        ("CT shows a stone.", "Ultrasound shows a stone."),
        ("The chest is in the image.", "The chest is not in the image."),
        ("The chest is in the image.", "It is not true that the chest is in the image."),
        ("It does answer.", "It never answers."),
    ],
)
def test_contradictions_are_seen_in_both_directions(a, b):
    assert not cues.agree(cues.of(a), cues.of(b))
    assert not cues.agree(cues.of(b), cues.of(a))
    assert cues.agree(cues.of(a), cues.of(a))


@pytest.mark.parametrize(
    ("sentence", "axis", "side"),
    [
        ("CT does not show a stone well here.", "yield", "poor"),
        ("CT does not show a stone badly here.", "yield", "good"),
        ("Study [1] does not support this.", "stance", "against"),
    ],
)
def test_a_negation_turns_a_side_into_its_opposite(sentence, axis, side):
    assert cues.of(sentence).sides == {axis: {side}}


@given(st.text(), st.text())
def test_agreement_is_symmetric_and_everything_agrees_with_itself(a, b):
    assert cues.agree(cues.of(a), cues.of(b)) == cues.agree(cues.of(b), cues.of(a))
    assert cues.agree(cues.of(a), cues.of(a))


def test_wordings_of_one_statement_do_not_contradict_each_other():
    said = {sentence for case in cases(200, 3, pool="train", mix="natural") for sentence in case.key.reasoning}
    wrong = []
    for sentence in sorted(said):
        statement = statements.read(sentence)
        assert statement is not None
        others = [statements.to_sentence(statement, wording) for wording in range(3)]
        wrong += [(sentence, o) for o in others if not cues.agree(cues.of(sentence), cues.of(o))]
    assert len(wrong) <= 0.02 * len(said), wrong[:5]


@pytest.mark.usefixtures("seconds")
@pytest.mark.parametrize("filler", ["not ", "[1] ", "1 ", "well ", "no red ", "it is ", ", ", "a"])
def test_a_hundred_thousand_characters_have_cues(filler):
    cues.of.__wrapped__(filler * (100_000 // len(filler)))


@pytest.mark.bench
def test_a_batch_takes_less_than_fifty_milliseconds():
    batch = [case.key.reasoning for case in islice(cases(64, 3, pool="train", mix="natural"), 64)]
    said = [(*gold[::-1], *(f"Point {i} counts." for i in range(6 - len(gold)))) for gold in batch]
    ready = [(gold, mine, vectors(gold), vectors(mine)) for gold, mine in zip(batch, said, strict=True)]
    matched_similarity(*ready[0], EVIDENCE, floor=0.4, slack=1)
    cues.of.cache_clear()
    start = time.perf_counter()
    for row in ready:
        matched_similarity(*row, EVIDENCE, floor=0.4, slack=1)
    took = time.perf_counter() - start
    print(f"64 completions: {1e3 * took:.1f} ms")
    assert took < 0.05
