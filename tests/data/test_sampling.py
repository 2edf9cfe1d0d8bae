"""The training stream: its shares, its order, and the omissions of its labels."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import auditors
import laid
from clinrl.config.params import Params, load_params
from clinrl.config.recipes import GrpoTrainer, Phase, Profile, RejectionTrainer, Stream, lengths
from clinrl.data import sampling
from clinrl.errors import DataError
from clinrl.tasks.base import get_task
from clinrl.training.step_metrics import phase_metrics

ROOT = Path(__file__).parents[2]
TASK = get_task("esi")
CASES = list(TASK.cases(150, 11, pool="train", mix="reporting"))
LABELS = Counter(TASK.label(case) for case in CASES)


def draw(rows: int, **changes: Any) -> list[sampling.Row]:
    stream = Stream(**{key: changes.pop(key) for key in Stream.model_fields if key in changes})
    given = {"task": TASK, "modes": ("think", "direct"), "stream": stream, "rows": rows, "seed": 1}
    return sampling.draw(CASES, **given | changes)


def shares_of(rows: list[sampling.Row]) -> dict[int, float]:
    return sampling.shares([TASK.label(row.case) for row in rows], TASK.labels)


levels = st.sampled_from(TASK.labels)


@given(
    rows=st.integers(1, 400),
    repeat=st.dictionaries(levels, st.integers(1, 20)),
    cap=st.dictionaries(levels, st.floats(0.2, 1.0), max_size=3),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_cap_holds_over_the_whole_stream(rows: int, repeat: dict[int, int], cap: dict[int, float], seed: int) -> None:
    drawn = draw(rows, repeat=repeat, cap=cap, seed=seed)
    assert len(drawn) == rows
    found = shares_of(drawn)
    for label, limit in cap.items():
        assert found[label] <= limit + 1 / rows + 1e-9
    assert drawn == draw(rows, repeat=repeat, cap=cap, seed=seed)


def test_a_pass_holds_every_case_as_often_as_its_label_is_repeated() -> None:
    size = len(CASES) + 4 * LABELS[1]
    times = Counter(row.case.id for row in draw(3 * size, repeat={1: 5}))
    assert times == {case.id: 15 if TASK.label(case) == 1 else 3 for case in CASES}


def test_a_pass_of_more_rows_than_any_training_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "MAX_ROWS", 1000)
    with pytest.raises(DataError, match=r"one pass over the data has [\d,]+ rows, above 1,000; lower stream.repeat"):
        draw(5, repeat={1: 1000})


def test_a_cap_drops_repeats_before_cases_and_no_more_than_it_must() -> None:
    size = round((len(CASES) - LABELS[1]) / 0.5)
    drawn = draw(size, repeat={1: 5}, cap={1: 0.5})
    assert shares_of(drawn)[1] == pytest.approx(0.5, abs=1 / size)
    times = Counter(row.case.id for row in drawn)
    assert set(times) == {case.id for case in CASES}
    ones = {times[case.id] for case in CASES if TASK.label(case) == 1}
    assert max(ones) - min(ones) <= 1


def test_modes_take_turns() -> None:
    assert [row.mode for row in draw(5)] == ["think", "direct", "think", "direct", "think"]
    assert [row.mode for row in draw(5, turn=2)] == ["think", "think", "direct", "direct", "think"]


def test_a_mode_that_is_named_twice_has_two_turns() -> None:
    modes = ("think", "direct", "direct")
    assert [row.mode for row in draw(5, modes=modes)] == ["think", "direct", "direct", "think", "direct"]
    recipe = Profile.model_validate({"modes": modes, "lora": {"rank": 4, "alpha": 8.0, "targets": "all-linear"}})
    assert recipe.modes == modes


@pytest.mark.parametrize(("recipe", "each"), [("audit-sft", 1), ("audit-curriculum", 6)])
def test_episodes_that_are_played_together_are_played_in_one_mode(recipe: str, each: int) -> None:
    cases = list(get_task("audit").cases(60, 1, pool="train", mix="natural"))
    profiles = {"imitate": load_params(ROOT / "params.yaml").model_dump(mode="json", by_alias=True)["profiles"][recipe]}
    rows = sampling.training_stream(auditors.params(profiles=profiles), "v1", cases)
    assert [row.mode for row in rows[: 4 * each]] == [
        mode for mode in ("think", "direct", "think", "direct") for _ in range(each)
    ]


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
        sampling.draw([], task=TASK, modes=["think"], stream=Stream(), rows=5, seed=1)
    ones = [case for case in CASES if TASK.label(case) == 1]
    with pytest.raises(DataError, match=r"the caps \{1: 0.33\} leave no row"):
        sampling.draw(ones, task=TASK, modes=["think"], stream=Stream(cap={1: 0.33}), rows=5, seed=1)


def test_shares_of_nothing_are_zero() -> None:
    assert shares_of([]) == dict.fromkeys(TASK.labels, 0.0)


def test_omissions_have_the_declared_share_and_never_change() -> None:
    omit = {"severe_pain": 0.65, "open_injury": 0.0, "done_intervention": 1.0}
    missed = [sampling.omitted(case, omit, 43) for case in CASES]
    assert missed == [sampling.omitted(case, dict(reversed(omit.items())), 43) for case in CASES]
    times = Counter(rule for rules in missed for rule in rules)
    assert times["severe_pain"] / len(CASES) == pytest.approx(0.65, abs=0.1)
    assert times["done_intervention"] == len(CASES)
    assert not times["open_injury"]
    assert missed != [sampling.omitted(case, omit, 44) for case in CASES]


def test_rules_are_omitted_independently() -> None:
    both = [sampling.omitted(case, {"severe_pain": 0.5, "open_injury": 0.5}, 1) for case in CASES]
    assert sum(len(rules) == 2 for rules in both) / len(CASES) == pytest.approx(0.25, abs=0.1)


def test_another_process_draws_the_same_stream() -> None:
    code = (
        "import sys, json; sys.path.insert(0, sys.argv[1])\n"
        "from clinrl.config.recipes import Stream\n"
        "from clinrl.data import sampling; from clinrl.tasks import base as task\n"
        "esi = task.get_task('esi')\n"
        "cases = list(esi.cases(150, 11, pool='train', mix='reporting'))\n"
        "stream = Stream(repeat={1: 5}, cap={1: 0.33})\n"
        "rows = sampling.draw(cases, task=esi, modes=['think'], stream=stream, rows=90, seed=1)\n"
        "print(json.dumps([row.case.id for row in rows]))"
    )
    command = [sys.executable, "-c", code, str(ROOT / "src")]
    found = subprocess.run(command, check=True, env={"PYTHONHASHSEED": "5"}, capture_output=True, text=True).stdout
    assert json.loads(found) == [row.case.id for row in draw(90, repeat={1: 5}, cap={1: 0.33})]


def phase(share: float, *values: str, of: str = "level") -> Phase:
    return Phase(share=share, slice=of, values=values)


ALL = tuple(f"level_{label}" for label in TASK.labels)
LEVEL = TASK.reporting.slices["level"]


def test_the_steps_of_phases_are_whole_and_all_there_are() -> None:
    assert lengths((phase(0.5, "1"), phase(0.3, "2"), phase(0.2, "3")), 10) == [5, 3, 2]
    assert lengths((phase(1 / 3, "1"), phase(1 / 3, "2"), phase(1 / 3, "3")), 10) == [3, 4, 3]
    assert lengths((), 10) == []


@given(
    parts=st.lists(st.tuples(st.integers(1, 5), st.sets(st.sampled_from(ALL), min_size=1)), min_size=1, max_size=4),
    steps=st.integers(1, 60),
    each=st.integers(1, 8),
    seed=st.integers(0, 2**32 - 1),
)
def test_phases_follow_one_another_at_whole_steps(
    parts: list[tuple[int, set[str]]], steps: int, each: int, seed: int
) -> None:
    whole = sum(weight for weight, _ in parts)
    phases = tuple(phase(weight / whole, *sorted(values)) for weight, values in parts)
    drawn = draw(steps * each, phases=phases, each=each, seed=seed)
    assert len(drawn) == steps * each
    counts = lengths(phases, steps)
    assert sum(counts) == steps
    assert all(abs(count - steps * one.share) <= 1 for count, one in zip(counts, phases, strict=True))
    start = 0
    for number, (count, one) in enumerate(zip(counts, phases, strict=True), start=1):
        part = drawn[start : start + count * each]
        assert {LEVEL(row.case) for row in part} <= set(one.values)
        places = range(start, start + count * each)
        assert {sampling.phase_of(place, phases, steps=steps, each=each) for place in places} <= {number}
        start += count * each
    assert drawn == draw(steps * each, phases=phases, each=each, seed=seed)
    assert [row.mode for row in drawn] == [row.mode for row in draw(steps * each)]


def test_one_phase_of_everything_is_the_stream_without_phases() -> None:
    how: dict[str, Any] = {"repeat": {1: 5}, "cap": {1: 0.33}}
    assert draw(200, phases=(phase(1.0, *ALL),), each=4, **how) == draw(200, **how)


def test_a_phase_serves_each_of_its_cases_before_one_again_and_obeys_the_caps() -> None:
    ones = LABELS[1]
    drawn = draw(
        ones + 40, phases=(phase(ones / (ones + 40), "level_1"), phase(40 / (ones + 40), "level_1", "level_2")), cap={}
    )
    assert len({row.case.id for row in drawn[:ones]}) == ones
    capped = draw(80, phases=(phase(0.5, "level_2", "level_3"), phase(0.5, "level_1", "level_2")), cap={1: 0.25})
    assert shares_of(capped[40:])[1] <= 0.25 + 1 / 40


def test_a_phase_of_values_that_no_case_has_is_refused() -> None:
    with pytest.raises(DataError, match=r"serves level 'level_6', but no case .* has it; "):
        draw(10, phases=(phase(0.5, "level_1"), phase(0.5, "level_2", "level_6")))


def test_what_was_served_is_told_for_every_value_of_the_phases() -> None:
    phases = (phase(0.5, "1"), phase(0.5, "2", "1"))
    found = phase_metrics(["1", "1", "2", "3"], [1, 1, 2, 2], phases)
    assert found == {"served/1": 0.5, "served/2": 0.25, "phase": 1.5}


def test_phases_are_in_no_record_that_does_not_use_them() -> None:
    assert "phases" not in Stream().model_dump(mode="json")
    whole = Stream(phases=(phase(1.0, "1"),))
    assert Stream.model_validate(whole.model_dump(mode="json")) == whole


def test_a_version_draws_its_steps_times_its_batch() -> None:
    params = Params.model_validate(laid.content(ROOT))
    for version, block in params.versions.items():
        if block.task == TASK.name:
            trainer = params.trainer(block.profile)
            drawn = sampling.training_stream(params, version, CASES)
            if isinstance(trainer, RejectionTrainer):  # what is sampled, in all
                assert len(drawn) == trainer.prompts
            else:
                each = trainer.prompts if isinstance(trainer, GrpoTrainer) else trainer.batch
                assert len(drawn) == trainer.steps * each
            assert drawn == sampling.training_stream(params, version, CASES)
