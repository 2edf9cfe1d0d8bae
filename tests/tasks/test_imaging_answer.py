"""The strict reader of a label, and the lenient published ones that it is compared with."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clinrl.tasks.imaging.answer import LABELS, REASONS, UNKNOWN, full_text, parse, published_format, published_label
from clinrl.tasks.imaging.sentences import _STOP, citations, drop_citations, plain_words, published_split, split
from clinrl.types import Message, Unreadable

UNA, MBA, UA = LABELS
THOUGHT = "The study shows a stone well."

PIECES = st.lists(
    st.one_of(
        st.sampled_from(
            ["<think>", "</think>", "<answer>", "</answer>", "<ANSWER>", "< answer>", *LABELS, " or ", ".", "\n", "[2]"]
        ),
        st.text(max_size=6),
    ),
    max_size=20,
).map("".join)
"""Text that comes close to the contract, from its own pieces."""


def turn(content: str, thinking: str | None = None) -> Message:
    return Message(role="assistant", content=content, thinking=thinking)


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("thinking", [None, THOUGHT])
@pytest.mark.parametrize(
    "content",
    [
        "<answer>{}</answer>",
        "\n<answer>{}</answer>\n",
        "<ANSWER>{}</Answer>",
        "<answer>\n  {}.\n</answer>",
        "<answer>{} .</answer>",
    ],
)
def test_reads_the_contract(content, thinking, label):
    assert parse(turn(content.format(label), thinking)) == label
    assert parse(turn(content.format(label.upper().replace(" ", "\n\u00a0")), thinking)) == label


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "empty"),
        (" \n", "empty"),
        (MBA, "no_answer"),
        ("answer: May Be Appropriate", "no_answer"),
        (f"<answer>{MBA}", "unclosed"),
        (f"<answer>{MBA}<answer>", "unclosed"),
        (f"{MBA}</answer>", "stray_tag"),
        (f"</answer><answer>{MBA}", "stray_tag"),
        (f"<answer>{MBA}</answer></answer>", "stray_tag"),
        (f"</think><answer>{MBA}</answer>", "stray_tag"),
        (f"<answer><think>x</think>{MBA}</answer>", "stray_tag"),
        (f"<answer><answer>{MBA}</answer></answer>", "nested"),
        (f"<answer>{MBA}</answer><answer>{MBA}</answer>", "duplicate"),
        (f"<answer>{MBA}</answer>\n<answer>{UA}</answer>", "duplicate"),
        (f"So: <answer>{MBA}</answer>", "preamble"),
        (f"<answer>{MBA}</answer> I hope", "trailing"),
        (f"<answer>{MBA}</answer><|im_end|>", "trailing"),
        ("<answer></answer>", "empty_answer"),
        ("<answer> . </answer>", "empty_answer"),
        (f"<answer>{MBA} or {UA}</answer>", "hedged"),
        (f"<answer>{UNA}, {MBA}, {UA}</answer>", "hedged"),
        (f"<answer>{MBA}, if contrast is given</answer>", "hedged"),
        (f"<answer>The procedure is {UNA}</answer>", "hedged"),
        (f"<answer>{MBA}..</answer>", "hedged"),
        ("<answer>appropriate</answer>", "unknown_label"),
        ("<answer>Appropriate</answer>", "unknown_label"),
        ("<answer>Not Appropriate</answer>", "unknown_label"),
        ("<answer>5</answer>", "unknown_label"),
    ],
)
def test_refuses_anything_else(content, reason):
    assert parse(turn(content, THOUGHT)) == Unreadable(reason=reason)
    assert reason in REASONS


@pytest.mark.parametrize("thinking", ["", " ", ".", "a b c", "1 2 3 4", "\u2713 \u2713 \u2713", "So be", "--- ..."])
def test_a_think_block_without_thought_is_no_turn(thinking):
    assert parse(turn(f"<answer>{UA}</answer>", thinking)) == Unreadable(reason="empty_think")


@pytest.mark.parametrize("tag", ["<think>", "</think>", "<answer>", "</answer>", "<Answer>", f"<answer>{UA}</answer>"])
def test_a_tag_within_the_thought_makes_the_turn_unreadable(tag):
    assert parse(turn(f"<answer>{UA}</answer>", f"{THOUGHT} {tag}")) == Unreadable(reason="stray_tag")


@given(PIECES, st.sampled_from(LABELS), PIECES)
def test_a_clean_block_heals_nothing_that_stands_beside_it(before, label, after):
    beside = bool(before.strip() or after.strip())
    outcome = parse(turn(f"{before}<answer>{label}</answer>{after}"))
    assert isinstance(outcome, Unreadable) if beside else outcome == label


@given(PIECES | st.text(), st.none() | PIECES | st.text())
def test_any_turn_gives_a_label_or_a_known_reason(content, thinking):
    outcome = parse(turn(content, thinking))
    assert outcome in LABELS if isinstance(outcome, str) else outcome.reason in REASONS
    assert published_label(full_text(turn(content, thinking))) in (*LABELS, UNKNOWN)
    assert published_format(full_text(turn(content, thinking))) in (True, False)


@given(PIECES, st.none() | PIECES)
def test_what_the_strict_reader_reads_the_lenient_one_reads_alike(content, thinking):
    outcome = parse(turn(content, thinking))
    if isinstance(outcome, str):
        assert published_label(full_text(turn(content, thinking))) == outcome
        assert published_format(full_text(turn(content, thinking))) == (thinking is not None)


@pytest.mark.parametrize(
    ("text", "label"),
    [
        (f"<answer>{MBA}</answer>", MBA),
        (f"<ANSWER> {MBA.upper()} </ANSWER>", MBA),
        (f"<answer>{MBA}, with caveats</answer>", MBA),
        (f"<answer>{MBA} or {UA}</answer>", MBA),
        (f"<answer>{MBA}", MBA),
        (f"<answer>{MBA}<b>", MBA),
        (f"<answer>The procedure is {MBA}</answer>", UNKNOWN),
        (f"<think>so <answer>{UA}</answer></think><answer>{MBA}</answer>", UA),
        (f"<think>so <answer>{UA}</think><answer>{MBA}</answer>", UA),
        (f"<answer>{MBA}</answer><think>x</think>", MBA),
        (f"</answer><answer>{MBA}</answer>", MBA),
        (MBA, UNKNOWN),
        ("<answer></answer>", UNKNOWN),
        ("", UNKNOWN),
    ],
)
def test_published_label(text, label):
    assert published_label(text) == label


@pytest.mark.parametrize(
    ("text", "paid"),
    [
        ("<think>x</think><answer>y</answer>", True),
        ("\n<think>x\ny</think>\n\n<answer>y</answer> ", True),
        ("<THINK>x</think><answer>y</ANSWER>", True),
        ("<think></think><answer></answer>", True),
        ("<think>a<think>b</think><answer>y</answer>", True),
        ("<answer>y</answer>", False),
        ("<think>x</think>", False),
        ("<answer>y</answer><think>x</think>", False),
        ("Well: <think>x</think><answer>y</answer>", False),
        ("<think>x</think> so <answer>y</answer>", False),
        ("<think>x</think><answer>y</answer><|eot_id|>", False),
        ("<think>x</think><think>x</think><answer>y</answer>", False),
        ("<think>x</think><answer>y</answer><answer>y</answer>", False),
        ("<think>x<answer>y</answer>", False),
        ("<think>x</think><answer>y", False),
        ("", False),
    ],
)
def test_published_format(text, paid):
    assert published_format(text) is paid


@pytest.mark.usefixtures("seconds")
@pytest.mark.parametrize("filler", ["<answer>", "</answer>", "<", "<think>", "<answer>x</answer>", " ", "word "])
def test_a_hundred_thousand_characters_are_read(filler):
    many = filler * (100_000 // len(filler))
    long = turn(f"{many}<answer>{MBA}</answer>", many)
    assert isinstance(parse(long), str | Unreadable)
    published_label(full_text(long))
    published_format(full_text(long))


# Sentences


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("CT helps. MRI does not.", ["CT helps.", "MRI does not."]),
        ("Seen in 87.6% of them. Good.", ["Seen in 87.6% of them.", "Good."]),
        ("Smith et al. found it. So be it.", ["Smith et al. found it.", "So be it."]),
        ("Smith et al. [2] found it. Dr. J. Doe, too.", ["Smith et al. [2] found it.", "Dr. J. Doe, too."]),
        ("It is rare, e.g. here. See Fig. 2 vs. Fig. 3.", ["It is rare, e.g. here.", "See Fig. 2 vs. Fig. 3."]),
        ("The answer is no. CT it is.", ["The answer is no.", "CT it is."]),
        ("It is useful.[2] And safe. [1, 3] End", ["It is useful.[2]", "And safe. [1, 3]", "End"]),
        ("Useful? Yes! It is...", ["Useful?", "Yes!", "It is..."]),
        ("1. CT helps.\n2) MRI, too\n- and this\n\n...", ["CT helps.", "MRI, too", "and this"]),
        ('He said "no." Then left.', ['He said "no."', "Then left."]),
        ("", []),
        (". . . [2].", []),
    ],
)
def test_splits_into_sentences(text, sentences):
    assert list(split(text)) == sentences


@given(st.text(alphabet="aB .!?-\"')\n\t[]12"))
def test_runs_of_stops_end_where_each_stop_looked_at_alone_would(text):
    """The pattern that tries each one anew: quadratic, and plain."""
    plain = re.compile(r"[.!?]+" + _STOP.pattern.partition("++")[2])
    for start in (0, len(text) // 2):
        found = [match.span() for match in _STOP.finditer(text, start)]
        cut_a_run = start and text[start - 1] in ".!?"
        assert cut_a_run or found == [match.span() for match in plain.finditer(text, start)]


def test_a_long_run_of_stops_that_ends_no_sentence_is_split_at_once():
    began = time.process_time()
    assert split(f"{'.' * 200_000}x") == (f"{'.' * 200_000}x",)
    assert time.process_time() - began < 20  # it took hours


@given(st.text(alphabet="aB .!?-\"'\n\t"))
def test_splitting_loses_no_word(text):
    assert [word for sentence in split(text) for word in plain_words(sentence).split()] == plain_words(text).split()


@given(st.text() | PIECES)
def test_any_text_has_sentences_and_citations(text):
    assert all(plain_words(sentence) for sentence in split(text))
    assert all(number >= 0 for number in citations(text))
    assert citations(drop_citations(text)) == () or "[" in text
    assert all(published_split(text))


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("a [2]", (2,)),
        ("a [2], b [1, 3] and [2]", (2, 1, 3)),
        ("a [2-4] and [6\u20138; 10]", (2, 3, 4, 6, 7, 8, 10)),
        ("a [1-999999999999]", (1, 999999999999)),
        ("a [4-2]", (4, 2)),
        ("a [b] [ 2 ] 3 (4) [-1]", ()),
    ],
)
def test_reads_citations(text, numbers):
    assert citations(text) == numbers


def test_published_split_cuts_decimals():
    assert published_split("Seen in 87.6% here. Good.") == ("Seen in 87", "6% here", "Good")
    assert drop_citations("Seen [2] here. [1-3]") == "Seen here."


@pytest.mark.parametrize("filler", [". ", "[1", "[2].", "a.", "No. ", "...", "\n1. ", "[1-9] "])
def test_a_hundred_thousand_characters_are_split(filler):
    many = filler * (100_000 // len(filler))
    split(many)
    citations(many)
