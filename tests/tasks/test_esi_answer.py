"""The strict parser: what is an answer, what is not, and why."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clinrl.tasks.esi.answer import CONTRADICTORY, EMPTY, HEDGED, NO_ANSWER_LINE, OUT_OF_RANGE, REASONS, parse
from clinrl.types import Unreadable

LEVELS = st.integers(1, 5)
RATIONALE = (
    "EXTRACTION:\n- Chief complaint: chest pain, 8/10\n- Vital signs: HR 120\n- Red flags: none\n"
    "ESI ALGORITHM:\n- Step A (lifesaving): no, not ESI 1\n- Step B (high-risk): yes, ESI 2\n"
)

ANSWER_LIKE = st.lists(
    st.one_of(
        st.sampled_from(
            ["ANSWER", ":", " ESI ", "esi", "ANSWER: ESI 2", "0", "3", "7", " or ", "-", "/", "*", ".", "\n", "\t"]
        ),
        st.text(max_size=5),
    ),
    max_size=30,
).map("".join)
"""Text that comes close to the contract, from its own pieces."""


@pytest.mark.parametrize("level", range(1, 6))
@pytest.mark.parametrize(
    "line",
    [
        "ANSWER: ESI {}",
        "answer: esi {}",
        "Answer : ESI  {}",
        "  ANSWER: ESI {}  ",
        "\tANSWER:\tESI {}",
        "ANSWER:ESI {}",
        "ANSWER: ESI {}.",
        "**ANSWER: ESI {}**",
        "**ANSWER:** ESI **{}**.",
        "*ANSWER: ESI {}*",
        "ANSWER: ESI {}\r",
        "\u00a0ANSWER: ESI {}\u2003.\u3000",
    ],
)
def test_reads_the_contract(line: str, level: int) -> None:
    said = line.format(level)
    assert parse(said) == level
    assert parse(f"{RATIONALE}{said}\n\n") == level


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", EMPTY),
        (" \n\t\u00a0\n", EMPTY),
        (RATIONALE, NO_ANSWER_LINE),
        ("ESI 2", NO_ANSWER_LINE),
        ("The patient is level 2.", NO_ANSWER_LINE),
        ("ANSWER:", NO_ANSWER_LINE),
        ("ANSWER: ESI", NO_ANSWER_LINE),
        ("ANSWER: ESI\nANSWER: ESI 2", NO_ANSWER_LINE),
        ("Answers vary.\nThe answer is 2.\nAnswer to the family: soon.", NO_ANSWER_LINE),
        ("ANSWER: ESI n", HEDGED),
        ("ANSWER: ESI ٣", NO_ANSWER_LINE),
        ("So the ANSWER: ESI 2", NO_ANSWER_LINE),
        ("ANSWER: ESI\n2", NO_ANSWER_LINE),
        ("ANSWER: ESI 0", OUT_OF_RANGE),
        ("ANSWER: ESI 6", OUT_OF_RANGE),
        ("ANSWER: ESI 22", OUT_OF_RANGE),
        ("ANSWER: ESI -1", OUT_OF_RANGE),
        ("ANSWER: ESI 02", OUT_OF_RANGE),
        ("ANSWER: ESI 6\nANSWER: ESI 2", OUT_OF_RANGE),
        ("ANSWER: ESI " + "9" * 10_000, OUT_OF_RANGE),
        ("ANSWER: ESI 2 or 3", HEDGED),
        ("ANSWER: ESI 2-3", HEDGED),
        ("ANSWER: ESI 2\u20133", HEDGED),
        ("ANSWER: ESI 2/3", HEDGED),
        ("ANSWER: ESI 2, 3", HEDGED),
        ("ANSWER: ESI 2.5", HEDGED),
        ("ANSWER: ESI 2?", HEDGED),
        ("ANSWER: ESI 2 probably", HEDGED),
        ("ANSWER: ESI 2 ANSWER: ESI 3", HEDGED),
        ("ANSWER: 2", HEDGED),
        ("ANSWER: ESI-2", HEDGED),
        ("ANSWER: ESI 1 or 2\nANSWER: ESI 2", HEDGED),
        ("ANSWER: ESI 2\nANSWER: ESI 1 or 2", HEDGED),
        ("ANSWER: ESI 1\nANSWER: ESI 2", CONTRADICTORY),
        ("ANSWER: ESI 1\nOn reflection:\n**ANSWER: ESI 2**", CONTRADICTORY),
    ],
)
def test_refuses_anything_else(content: str, reason: str) -> None:
    assert parse(content) == Unreadable(reason=reason)


NOT_COMMITTED = [
    "ANSWER: between ESI 2 and 3", "ANSWER: either ESI 2 or ESI 3", "ANSWER: ESI two", "ANSWER: two", "ANSWER: ESI II",
    "ANSWER: ESI \u2161", "ANSWER: level 2", "ANSWER: ESI level 2", "ANSWER: ESI-2", "ANSWER: ESI:2",
    "ANSWER: ESI\u20132",
    "ANSWER: ESI 2 / 3", "ANSWER: ESI 2 to 3", "ANSWER: ESI 2\u20143", "ANSWER: ESI 2 \u2212 3", "ANSWER: ESI \uff12",
    "ANSWER: ESI\u00a02", "ANSWER: n/a", "ANSWER: unknown", "ANSWER: none", "ANSWER: ?", "ANSWER:", "ANSWER: ESI",
    "ANSWER: not ESI 2", "ANSWER: ESI 2 (or 3)", "ANSWER: ESI 2 if stable", "ANSWER: ESI \u0663",
    "ANSWER: I would say 2",
    "ANSWER\uff1a ESI 2 or 3", "\uff21\uff2e\uff33\uff37\uff25\uff32: ESI 2 or 3", "AN\u200bSWER: ESI 2 or 3",
    "- ANSWER: ESI 2 or 3", "## Answer: ESI 2 or 3", "> ANSWER: ESI 2 or 3", "2. ANSWER: ESI 2 or 3",
    "`ANSWER: ESI 2 or 3`", "__ANSWER__: ESI 2 or 3", "**ANSWER: ESI 2 or 3**", "\u2022 **ANSWER:** ESI 2 or 3",
    "ANSWER: ESI 6", "ANSWER: ESI 0", "ANSWER: the nurse decides",
]  # fmt: skip
"""Answer lines that commit to no level."""


@pytest.mark.parametrize("line", NOT_COMMITTED)
def test_no_other_line_heals_an_answer_that_does_not_commit(line: str) -> None:
    for level in range(1, 6):
        clean = f"ANSWER: ESI {level}"
        for content in (line, f"{line}\n{clean}", f"{clean}\n{line}", f"{clean}\n{line}\n{clean}"):
            assert isinstance(parse(content), Unreadable), content


@given(
    st.sampled_from(["ANSWER:", "answer :", " **Answer:**", "- ANSWER:", "\u200bANSWER\uff1a"]),
    st.sampled_from(["", " ", " ESI ", " esi\t", " ESI level ", " either "]),
    st.text(max_size=12)
    | st.lists(st.sampled_from([*"12345", " ", "or", "and", "-", "/", "two", "II", "?", "."]), min_size=2).map("".join),
    st.lists(st.sampled_from([*(f"ANSWER: ESI {level}" for level in range(1, 6)), "So be it.", ""]), max_size=3),
    st.lists(st.sampled_from([*(f"ANSWER: ESI {level}" for level in range(1, 6)), "So be it.", ""]), max_size=3),
)
def test_whatever_follows_an_answer_that_is_not_the_contract_the_turn_is_unreadable(start, esi, said, before, after):
    (line, *_) = f"{start}{esi}{said}".splitlines()
    if isinstance(parse(line), Unreadable):
        assert isinstance(parse("\n".join([*before, line, *after])), Unreadable)


@pytest.mark.parametrize(
    "prose",
    [
        "The answer is unclear.",
        "Answers differ here.",
        "So the answer: see below.",
        "Answer follows",
        "answer-wise: no",
    ],
)
def test_prose_about_an_answer_claims_nothing(prose: str) -> None:
    assert parse(f"{prose}\nANSWER: ESI 2") == 2


@given(LEVELS, st.integers(2, 4))
def test_the_same_answer_twice_is_one_answer(level: int, times: int) -> None:
    assert parse("\n".join([f"ANSWER: ESI {level}"] * times)) == level


@given(LEVELS, LEVELS)
def test_two_answers_are_read_only_if_they_agree(first: int, second: int) -> None:
    outcome = parse(f"ANSWER: ESI {first}\nwait\nANSWER: ESI {second}")
    assert outcome == (first if first == second else Unreadable(reason=CONTRADICTORY))


@given(LEVELS, st.sampled_from([" or ", "-", "/", " to ", ", ", " and "]), LEVELS)
def test_a_hedge_is_no_answer_whichever_levels(first: int, between: str, second: int) -> None:
    assert parse(f"ANSWER: ESI {first}{between}{second}") == Unreadable(reason=HEDGED)


@given(st.text() | ANSWER_LIKE)
def test_any_text_gives_a_level_or_a_known_reason(content: str) -> None:
    outcome = parse(content)
    assert outcome in range(1, 6) if isinstance(outcome, int) else outcome.reason in REASONS


@given(ANSWER_LIKE, LEVELS)
def test_appending_an_answer_never_changes_what_was_committed(content: str, level: int) -> None:
    """Shouting another level afterwards can lose an answer but never replace it."""
    before, after = parse(content), parse(f"{content}\nANSWER: ESI {level}")
    if isinstance(before, int):
        assert after == (level if before == level else Unreadable(reason=CONTRADICTORY))


@pytest.mark.usefixtures("seconds")
@pytest.mark.parametrize(
    "filler",
    ["word ", "ANSWER: ", "ANSWER: ESI 2\n", "ANSWER:" + " " * 5, "*", " ", "\n", "esi 2 ", "ANSWER ", "2 or "],
)
def test_a_hundred_thousand_characters_are_read(filler: str) -> None:
    long = filler * (100_000 // len(filler))
    assert parse(f"{long}\nANSWER: ESI 2") in (2, Unreadable(reason=HEDGED))
    parse("ANSWER: ESI " + long)
