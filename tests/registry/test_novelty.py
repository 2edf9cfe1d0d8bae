"""What a text has in common with an exam: cases like the exam's are familiar, anything else is not."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clinrl.errors import ArtefactError
from clinrl.registry import novelty
from clinrl.registry.novelty import FAMILIAR, NOVEL, UNKNOWN, judge, learn, pairs, strings
from clinrl.tasks.base import get_task

EXAMS = {"esi": (800, "reporting"), "imaging": (780, "reporting")}
"""Cases and mix of exams like `esi-x3` and `imaging-x1`; the seed is 1001."""
MINES = {"esi": (800, "reporting"), "imaging": (600, "natural")}
"""Those of `esi-m2` and `imaging-m1`, whose seed is 501: no template is in both."""
STRANGERS = (Path(__file__).parents[1] / "strangers.txt").read_text(encoding="utf-8").splitlines()
"""Texts that no exam is about: other languages, lists, code, prose, letters of clinics, and no words at all."""
SMALL = ("Pain in the left arm since noon.", "Pain in the right arm since 10.", "No pain in the arm.")


def texts(task, n, seed, pool, mix):
    drawn = list(get_task(task).cases(n, seed, pool=pool, mix=mix))
    return [[*strings(case.facts.model_dump(mode="json"))] for case in drawn], [case.group for case in drawn]


@pytest.fixture(scope="module", params=EXAMS)
def examined(request):
    """A task, its exam's texts, and what is kept of them."""
    n, mix = EXAMS[request.param]
    exam, groups = texts(request.param, n, 1001, "exam", mix)
    return request.param, exam, learn(exam, groups)


@pytest.mark.long
def test_cases_like_those_of_the_exam_are_familiar(examined):
    """Measured: 9 of 800 cases of esi-m2 and 2 of 600 of imaging-m1 are taken for novel."""
    task, exam, kept = examined
    n, mix = MINES[task]
    others, _ = texts(task, n, 501, "mine", mix)
    assert all(judge(text, kept) == FAMILIAR for text in exam)
    assert sum(judge(text, kept) == NOVEL for text in others) / n <= 0.015


def test_anything_else_is_novel(examined):
    """Measured: all 59 texts, for both tasks."""
    task, _, kept = examined
    assert len(STRANGERS) == 59
    for text in STRANGERS:
        shown = [text] if task == "esi" else [text[:60], text, text[-60:]]
        assert judge(shown, kept) == NOVEL, text


def test_what_is_kept_holds_no_word(examined, tmp_path):
    *_, kept = examined
    novelty.write(tmp_path / "examined.json", kept)
    written = (tmp_path / "examined.json").read_text()
    assert novelty.read(tmp_path / "examined.json") == kept
    content = json.loads(written)
    assert content.keys() == {"pairs", "least", "most", "share"}
    assert content["pairs"] == sorted(content["pairs"])
    assert all(len(pair) == 16 and set(pair) <= set("0123456789abcdef") for pair in content["pairs"])


def test_the_same_exam_in_another_order_leaves_the_same_file(tmp_path):
    for name, order in (("a", 1), ("b", -1)):
        novelty.write(tmp_path / name, learn([[text] for text in SMALL][::order], ["x", "y", "z"][::order]))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_numbers_case_and_marks_make_no_difference():
    assert [*pairs(["Pain 8/10, BP 120"])] == [*pairs(["pain; 3 of 5".replace("of ", "") + " bp 90"])]


def test_pairs_do_not_reach_from_one_column_into_the_next():
    assert set(pairs(["left arm", "pain"])) == set(pairs(["left arm"]))


def test_what_is_shorter_or_longer_than_every_case_is_novel():
    kept = learn([[text] for text in SMALL], ["x", "y", "z"])
    assert judge(["pain in"], kept) == NOVEL
    assert judge([" ".join(SMALL) + " " + " ".join(reversed(SMALL[0].split()))], kept) == NOVEL
    assert judge(["pain in the left arm"] * 9, kept) == FAMILIAR  # the same pairs again are no more of them
    assert judge(["pain in the left arm"], None) == UNKNOWN


def test_an_exam_of_one_template_knows_its_size_alone():
    kept = learn([[text] for text in SMALL], ["x", "x", "x"])
    assert kept.share == 1.0
    assert judge(["one two three four five six"], kept) == FAMILIAR
    assert judge(["one two"], kept) == NOVEL


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"pairs": 3, "least": 1, "most": 2, "share": 0.1}', "7"])
def test_a_file_that_is_none_is_named(tmp_path, content):
    path = tmp_path / "examined.json"
    with pytest.raises(ArtefactError, match=r"examined.json is no record of an exam"):
        novelty.read(path)
    path.write_text(content)
    with pytest.raises(ArtefactError, match=r"examined.json is no record of an exam"):
        novelty.read(path)


def test_of_imported_cases_nothing_is_kept(tmp_path):
    novelty.write(tmp_path / "examined.json", None)
    assert (tmp_path / "examined.json").read_text().strip() == "null"
    assert novelty.read(tmp_path / "examined.json") is None


@given(text=st.lists(st.text(max_size=200), max_size=4))
def test_any_text_is_judged(text):
    kept = learn([[text] for text in SMALL], ["x", "y", "z"])
    assert judge(text, kept) in (FAMILIAR, NOVEL)
