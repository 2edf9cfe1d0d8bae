"""Files of labels: what does not fit the task's own rules is refused as a whole, and quotes nobody."""

import json
from pathlib import Path
from typing import Any

import pytest

from clinrl.errors import DataError
from clinrl.tasks.base import get_task
from clinrl.watching import store
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


def test_labels_are_counted_beside_the_answers() -> None:
    write(*({"id": ident, "label": 2} for ident in IDS[:3]), {"id": f"chatcmpl-{'f' * 32}", "label": 1})
    assert take_in("esi", get_task("esi"), FILE) == (3, 4)
    assert store.days("esi", "v") == [Counts({("labelled, think", "2 as 3"): 3})]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"id": IDS[0], "label": 6}, r"labels.jsonl row 2 .*column level: a value breaks ExpectColumnValuesToBeInSet"),
        ({"id": IDS[1], "label": 1}, "column id: a value breaks ExpectColumnValuesToBeUnique"),
        ({"id": "Alice", "label": 1}, "column id: a value breaks ExpectColumnValuesToMatchRegex"),
        ({"id": IDS[0]}, "labels.jsonl holds no labels"),
        ({"id": IDS[0], "label": 1, "text": "chest pain"}, "labels.jsonl holds no labels"),
    ],
)
def test_a_file_with_one_bad_line_is_refused_and_nothing_of_it_is_counted(line: Any, says: str) -> None:
    write({"id": IDS[1], "label": 2}, line)
    with pytest.raises(DataError, match=says) as refused:
        take_in("esi", get_task("esi"), FILE)
    assert "chest" not in str(refused.value)
    assert store.days("esi", "v") == []
