"""Files of labels: what does not fit the task's own rules is refused as a whole, and quotes nobody."""

import json
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clinrl.errors import DataError
from clinrl.tasks.base import get_task
from clinrl.tasks.parts import expect
from clinrl.watching import labels, store
from clinrl.watching.counts import Counts
from clinrl.watching.labels import take_in

IDS = [f"chatcmpl-{number:032x}" for number in range(4)]
FILE = Path("labels.jsonl")


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    store.add("esi", "v", Counts(), dict.fromkeys(IDS, ("think", "3")), 90)


def write(*lines: Any) -> None:
    FILE.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.long
def test_labels_are_counted_beside_the_answers() -> None:
    write(*({"id": ident, "label": 2} for ident in IDS[:3]), {"id": f"chatcmpl-{'f' * 32}", "label": 1})
    FILE.write_bytes(b"\xef\xbb\xbf\r\n" + FILE.read_bytes().replace(b"\n", b"\n\n"))  # as some editors leave it
    assert take_in("esi", get_task("esi"), FILE) == (3, 4)
    assert store.days("esi", "v") == [Counts({("labelled, think", "2 as 3"): 3})]


def test_a_rule_about_some_cases_alone_is_none_about_labels() -> None:
    task = copy(get_task("esi"))
    rule = expect("ExpectColumnValuesToBeInSet", task.safety.answer, of="train", value_set=[1])
    task.checks = replace(task.checks, expectations=(*task.checks.expectations, rule))
    write({"id": IDS[0], "label": 2})
    assert take_in("esi", task, FILE) == (1, 1)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"id": IDS[0], "label": 6}, r"labels.jsonl row 2 .*column level: a value breaks ExpectColumnValuesToBeInSet"),
        ({"id": IDS[1], "label": 1}, "column response: a value breaks ExpectColumnValuesToBeUnique"),
        ({"id": "Alice", "label": 1}, "labels.jsonl line 2 is no label.*; its id is missing or wrong$"),
        ({"id": IDS[0]}, "labels.jsonl line 2 is no label.*; its label is missing or wrong$"),
        ({"id": IDS[0], "label": True}, "labels.jsonl line 2 is no label"),
        ({"id": IDS[0], "label": 2.0}, "labels.jsonl line 2 is no label.*; its label is missing or wrong$"),
        ({"id": IDS[0], "label": 1, "chest pain": "x"}, "labels.jsonl line 2 is no label.* text}$"),
    ],
)
def test_a_file_with_one_bad_line_is_refused_and_nothing_of_it_is_counted(line: Any, says: str) -> None:
    write({"id": IDS[1], "label": 2}, line)
    with pytest.raises(DataError, match=says) as refused:
        take_in("esi", get_task("esi"), FILE)
    written = [path.read_bytes() for path in Path().rglob("*") if path.is_file() and path != FILE]
    for word in ("chest", "Alice", *IDS):
        assert word not in str(refused.value)
        assert not any(word.encode() in held for held in written)
    assert store.days("esi", "v") == []


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (f'{{"id": "{IDS[0]}", "label": 2, "label": 3}}', "line 1 names a key twice"),
        (f'{{"id": "{IDS[1]}", "id": "{IDS[0]}", "label": 2}}', "line 1 names a key twice"),
        (f'{{"id": "{IDS[0]}", "label": {{"a": 1, "a": 2}}}}', "line 1 is no label"),
        ("[" * 100_000, "line 1 is no label"),
        (b"\xff", "line 1 is no label"),
    ],
)
def test_a_line_with_a_key_twice_and_one_that_is_no_object_are_refused(line: Any, says: str) -> None:
    FILE.write_bytes(line if isinstance(line, bytes) else line.encode())
    with pytest.raises(DataError, match=f"labels.jsonl {says}"):
        take_in("esi", get_task("esi"), FILE)
    assert store.days("esi", "v") == []


def test_a_file_that_is_not_there_or_too_large_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"labels.jsonl cannot be read: No such file"):
        take_in("esi", get_task("esi"), FILE)
    write({"id": IDS[0], "label": 2})
    monkeypatch.setattr(labels, "MOST_BYTES", 10)
    with pytest.raises(DataError, match=r"labels.jsonl has more than 0 MiB; give it in parts"):
        take_in("esi", get_task("esi"), FILE)
