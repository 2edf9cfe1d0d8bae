"""The training stream: its shares, its order, and the omissions of its labels."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clinrl import stream
from clinrl.blocks import GrpoTrainer
from clinrl.errors import DataError
from clinrl.params import Params
from clinrl.section import read_yaml
from clinrl.task import get_task

ROOT = Path(__file__).parent.parent
TASK = get_task("esi")
CASES = list(TASK.cases(150, 11, pool="train", mix="reporting"))
LABELS = Counter(TASK.label(case) for case in CASES)


def draw(rows: int, **changes: Any) -> list[stream.Row]:
    given = {"task": TASK, "modes": ("think", "direct"), "repeat": {}, "cap": {}, "rows": rows, "seed": 1}
    return stream.draw(CASES, **given | changes)


levels = st.sampled_from(TASK.labels)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 400),
    repeat=st.dictionaries(levels, st.integers(1, 20)),
    cap=st.dictionaries(levels, st.floats(0.2, 1.0), max_size=3),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_cap_holds_over_the_whole_stream(rows: int, repeat: dict[int, int], cap: dict[int, float], seed: int) -> None:
    drawn = draw(rows, repeat=repeat, cap=cap, seed=seed)
    assert len(drawn) == rows
    found = stream.shares(drawn, TASK)
    for label, limit in cap.items():
        assert found[label] <= limit + 1 / rows + 1e-9
    assert drawn == draw(rows, repeat=repeat, cap=cap, seed=seed)


def test_a_pass_holds_every_case_as_often_as_its_label_is_repeated() -> None:
    size = len(CASES) + 4 * LABELS[1]
    times = Counter(row.case.id for row in draw(3 * size, repeat={1: 5}))
    assert times == {case.id: 15 if TASK.label(case) == 1 else 3 for case in CASES}


def test_a_cap_drops_repeats_before_cases_and_no_more_than_it_must() -> None:
    size = round((len(CASES) - LABELS[1]) / 0.5)
    drawn = draw(size, repeat={1: 5}, cap={1: 0.5})
    assert stream.shares(drawn, TASK)[1] == pytest.approx(0.5, abs=1 / size)
    times = Counter(row.case.id for row in drawn)
    assert set(times) == {case.id for case in CASES}
    ones = {times[case.id] for case in CASES if TASK.label(case) == 1}
    assert max(ones) - min(ones) <= 1


def test_modes_take_turns() -> None:
    assert [row.mode for row in draw(5)] == ["think", "direct", "think", "direct", "think"]


def test_every_pass_is_shuffled_anew() -> None:
    rows = [row.case.id for row in draw(2 * len(CASES))]
    first, second = rows[: len(CASES)], rows[len(CASES) :]
    assert sorted(first) == sorted(second)
    assert first != second
    assert first != [case.id for case in CASES]


def test_seeds_give_different_streams() -> None:
    assert draw(50, seed=1) != draw(50, seed=2)


def test_no_cases_and_impossible_caps_are_refused() -> None:
    with pytest.raises(DataError, match="at least one case"):
        stream.draw([], task=TASK, modes=["think"], repeat={}, cap={}, rows=5, seed=1)
    ones = [case for case in CASES if TASK.label(case) == 1]
    with pytest.raises(DataError, match=r"the caps \{1: 0.33\} leave no row"):
        stream.draw(ones, task=TASK, modes=["think"], repeat={}, cap={1: 0.33}, rows=5, seed=1)


def test_shares_of_nothing_are_zero() -> None:
    assert stream.shares([], TASK) == dict.fromkeys(TASK.labels, 0.0)


def test_omissions_have_the_declared_share_and_never_change() -> None:
    omit = {"severe_pain": 0.65, "open_injury": 0.0, "done_intervention": 1.0}
    missed = [stream.omitted(case, omit, 43) for case in CASES]
    assert missed == [stream.omitted(case, dict(reversed(omit.items())), 43) for case in CASES]
    times = Counter(rule for rules in missed for rule in rules)
    assert times["severe_pain"] / len(CASES) == pytest.approx(0.65, abs=0.1)
    assert times["done_intervention"] == len(CASES)
    assert not times["open_injury"]
    assert missed != [stream.omitted(case, omit, 44) for case in CASES]


def test_rules_are_omitted_independently() -> None:
    both = [stream.omitted(case, {"severe_pain": 0.5, "open_injury": 0.5}, 1) for case in CASES]
    assert sum(len(rules) == 2 for rules in both) / len(CASES) == pytest.approx(0.25, abs=0.1)


def test_another_process_draws_the_same_stream() -> None:
    code = (
        "import sys, json; sys.path.insert(0, sys.argv[1])\n"
        "from clinrl import stream, task\n"
        "esi = task.get_task('esi')\n"
        "cases = list(esi.cases(150, 11, pool='train', mix='reporting'))\n"
        "rows = stream.draw(cases, task=esi, modes=['think'], repeat={1: 5}, cap={1: 0.33}, rows=90, seed=1)\n"
        "print(json.dumps([row.case.id for row in rows]))"
    )
    command = [sys.executable, "-c", code, str(ROOT / "src")]
    found = subprocess.run(command, check=True, env={"PYTHONHASHSEED": "5"}, capture_output=True, text=True).stdout
    assert json.loads(found) == [row.case.id for row in draw(90, repeat={1: 5}, cap={1: 0.33})]


def test_a_version_draws_its_steps_times_its_batch() -> None:
    params = Params.model_validate(read_yaml(ROOT / "params.yaml"))
    for version, block in params.versions.items():
        if block.task == TASK.name:
            trainer = params.trainer(block.profile)
            each = trainer.prompts if isinstance(trainer, GrpoTrainer) else trainer.batch
            drawn = stream.training_stream(params, version, CASES)
            assert len(drawn) == trainer.steps * each
            assert drawn == stream.training_stream(params, version, CASES)
