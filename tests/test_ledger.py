"""The audit file: a chain that only grows, and that says where it was broken."""

import json
from datetime import UTC, datetime
from multiprocessing import get_context

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clinrl import ledger
from clinrl.errors import ArtefactError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "reports" / "decisions.jsonl"


def three(path):
    for number in range(3):
        ledger.append(path, "decision", {"number": number})
    return path.read_text().splitlines(keepends=True)


def test_no_file_is_an_empty_chain(path):
    assert ledger.read(path) == []


def test_lines_follow_each_other_and_say_when(path):
    at = datetime(2031, 5, 6, 7, 8, 9, 123, tzinfo=UTC)
    first = ledger.append(path, "decision", {"b": 1, "a": [2]}, at=at)
    second = ledger.append(path, "approval", {})

    assert ledger.read(path) == [first, second]
    assert first.at == "2031-05-06T07:08:09+00:00"
    assert first.previous == ledger.START
    assert second.previous == first.digest


@given(bodies=st.lists(st.dictionaries(st.text(max_size=8), JSON, max_size=3), max_size=5))
def test_what_is_written_is_read(bodies, tmp_path_factory):
    path = tmp_path_factory.mktemp("chain") / "decisions.jsonl"
    for body in bodies:
        ledger.append(path, "decision", body)
    assert [entry.body for entry in ledger.read(path)] == bodies


def test_a_line_is_not_written_twice_if_the_caller_says_so(path):
    body = {"number": 1}
    for _ in range(2):
        ledger.append(path, "decision", body, unless=lambda lines: any(line.body == body for line in lines))
    assert [entry.body for entry in ledger.read(path)] == [body]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda lines: [lines[0], lines[1].replace('"number":1', '"number":7'), lines[2]], "line 2 was altered"),
        (lambda lines: [lines[0], lines[2]], "line 2 does not follow line 1"),
        (lambda lines: lines[1:], "line 1 does not follow line 0"),
        (lambda lines: [lines[0], lines[2], lines[1]], "line 2 does not follow"),
        (lambda lines: [lines[0], "{}\n", *lines[1:]], "line 2 is not an entry"),
        (lambda lines: [lines[0], "\n", *lines[1:]], "line 2 is not an entry"),
    ],
)
def test_damage_is_named_by_its_line(path, damage, says):
    path.write_text("".join(damage(three(path))))
    with pytest.raises(ArtefactError, match=says):
        ledger.read(path)
    before = path.read_bytes()
    with pytest.raises(ArtefactError, match=says):
        ledger.append(path, "decision", {})
    assert path.read_bytes() == before


def test_a_line_that_was_cut_short_does_not_count_and_is_replaced(path):
    lines = three(path)
    path.write_text("".join(lines[:2]) + lines[2][:40])
    assert len(ledger.read(path)) == 2

    ledger.append(path, "refusal", {"after": "a kill"})

    assert [entry.kind for entry in ledger.read(path)] == ["decision", "decision", "refusal"]


def write(path, number):
    for step in range(10):
        ledger.append(path, "decision", {"writer": number, "step": step})


def test_writers_take_turns(path):
    context = get_context("fork")
    writers = [context.Process(target=write, args=(path, number)) for number in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    entries = ledger.read(path)
    assert sorted((entry.body["writer"], entry.body["step"]) for entry in entries) == [
        (writer, step) for writer in range(4) for step in range(10)
    ]
    assert all(json.loads(line) for line in path.read_text().splitlines())
