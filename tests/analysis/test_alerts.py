"""Alarms: each failure raises its own, a healthy run raises none, and a run reads the same live and afterwards."""

import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clinrl.analysis import alerts
from clinrl.analysis.alerts import Monitor, alarms
from clinrl.errors import ArtefactError

GOLD = {1: 0.3, 2: 0.25, 3: 0.3, 4: 0.1, 5: 0.05}


def line(step, **changes):
    """A step of a run that goes well."""
    healthy = {
        "step": step, "loss": 0.01, "grad_norm": 0.2, "reward": 0.6, "entropy": 0.02, "frac_reward_zero_std": 0.6,
        "groups/all_right": 0.6, "groups/all_wrong": 0.05,
        **{f"{what}/{mode}": 0.0 for what in ("clipped", "parse_fail") for mode in ("think", "direct")},
        **{f"gold/{level}": share for level, share in GOLD.items()},
        **{f"answer/{level}": share for level, share in GOLD.items()},
    }  # fmt: skip
    return healthy | changes


def run(steps=30, **changes):
    """A run whose step n has changes[name](n) in the place of what is healthy."""
    return [line(step, **{name: value(step) for name, value in changes.items()}) for step in range(1, steps + 1)]


def raised(history):
    return [(alarm.name, alarm.about, alarm.level) for alarm in alarms(history)]


def test_a_healthy_run_raises_nothing():
    assert raised(run(200)) == []


FAILURES = {
    "clipped": ({"clipped/think": lambda n: 0.9}, ("clipped", "think", "stop")),
    "unreadable": ({"parse_fail/direct": lambda n: 0.15}, ("no_parse", "direct", "warn")),
    "collapse": (
        dict.fromkeys(("answer/1", "gold/1"), lambda n: min(1.0, 0.05 * n)), ("level_share", "1", "stop"),
    ),
    "hedging": (
        {"answer/2": lambda n: 0.25 + 0.01 * n, "answer/1": lambda n: 0.3 - 0.01 * n}, ("over_called", "2", "stop"),
    ),
    "no signal": ({"groups/all_wrong": lambda n: 0.8}, ("no_signal", "", "stop")),
    "converged": ({"groups/all_right": lambda n: 0.99}, ("converged", "", "warn")),
    "unmoved": ({"grad_norm": lambda n: 0.0}, ("unmoved", "", "stop")),
    "far from the parent": ({"kl": lambda n: 0.02 * (n - 1)}, ("kl", "", "stop")),
    "another adapter served": (
        {"sampling/sampling_logp_difference/mean": lambda n: 0.02 if n < 9 else 0.8}, ("sampler_gap", "", "stop"),
    ),
    "another number format": (
        {"sampling/sampling_logp_difference/mean": lambda n: 0.15}, ("sampler_gap", "", "warn"),
    ),
    "another reference": ({"kl": lambda n: 0.02}, ("first_kl", "", "stop")),
    "over-called on held-out cases": (
        {"held_out/excess/2": lambda n: 0.01 * n - 0.05}, ("over_called", "2", "stop"),
    ),
    "entropy falls": ({"entropy": lambda n: 0.02 if n < 8 else 0.0005}, ("entropy", "", "stop")),
    "entropy rises": ({"entropy": lambda n: 0.02 * 1.3**n}, ("entropy", "", "stop")),
    "not a number": ({"loss": lambda n: None if n == 4 else 0.1}, ("not_finite", "loss", "stop")),
    "diverged": (
        {"reward": lambda n: 0.5 + 0.01 * n, "held_out/exact": lambda n: 0.8 - 0.01 * n},
        ("diverged", "", "stop"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "expected"), FAILURES.values(), ids=FAILURES)
def test_a_failure_raises_its_own_alarm_and_no_other(changes, expected):
    found = raised(run(**changes))
    assert expected in found
    assert {name for name, _, _ in found} == {expected[0]}


EPISODES = {"malformed/direct": lambda n: 0.01, "tools/failure_frequency": lambda n: 0.02}
"""What a run on episodes logs beside the rest."""


def test_a_healthy_run_on_episodes_raises_nothing():
    assert raised(run(200, **EPISODES, **{"not_submitted/direct": lambda n: 0.35 * 0.8**n})) == []


@pytest.mark.parametrize(
    ("name", "alarm", "about", "warn", "stop"),
    [
        ("tools/failure_frequency", "tool_failures", "", 0.15, 0.4),
        ("malformed/direct", "malformed_calls", "direct", 0.15, 0.4),
        ("not_submitted/direct", "not_submitted", "direct", 0.3, 0.7),
    ],
)
def test_episodes_have_alarms_of_their_own(name, alarm, about, warn, stop):
    for level, value in (("warn", warn), ("stop", stop)):
        (found,) = alarms(run(**EPISODES | {name: lambda n, value=value: value}))
        assert (found.name, found.about, found.level, found.step) == (alarm, about, level, 3)
        assert f"{value:.0%} of the " in found.says
        assert found.helps
    worse = raised(run(**EPISODES | {name: lambda n: min(1.0, 0.03 * n)}))
    assert worse == [(alarm, about, "warn"), (alarm, about, "stop")]


@pytest.mark.parametrize(("every", "expected"), [(2, [("not_submitted", "direct", "warn")]), (3, [])])
def test_modes_that_are_played_in_turn_have_alarms_too(every, expected):
    lines = run(20, **EPISODES, **{"not_submitted/direct": lambda n: 0.3})
    for number, step in enumerate(lines):
        if number % every:
            del step["not_submitted/direct"]
    assert raised(lines) == expected  # one step of three is too few to say


def test_an_episode_that_is_not_submitted_is_not_called_unreadable():
    (found,) = alarms(run(**EPISODES, **{"not_submitted/direct": lambda n: 0.3}))
    assert found.says == "30% of the episodes in mode direct were not submitted over 3 steps"


def test_each_alarm_is_raised_once_at_each_level_and_a_stop_is_not_warned_of():
    found = raised(run(40, **{"answer/1": lambda n: min(1.0, 0.3 + 0.03 * n)}))
    assert found.count(("level_share", "1", "warn")) == 1
    assert found.count(("level_share", "1", "stop")) == 1
    assert raised(run(**{"clipped/think": lambda n: 0.9})) == [("clipped", "think", "stop")]
    assert raised(run(**{"clipped/think": lambda n: 0.55})) == [("clipped", "think", "stop")]


def test_an_alarm_says_when_what_and_what_helps():
    (alarm,) = alarms(run(**{"clipped/think": lambda n: 0.0 if n < 11 else 0.33}))
    assert (alarm.step, alarm.observed, alarm.limit) == (12, 0.22, 0.2)
    assert alarm.says == "22% of the completions in mode think ran out of tokens over 3 steps"
    assert alarm.helps.startswith("raise trainer.max_completion")
    for way, helps in (("falls", "explore more"), ("rises", "lower trainer.lr")):
        for alarm in alarms(run(**FAILURES[f"entropy {way}"][0])):
            assert alarm.helps.startswith(helps)
            assert alarm.step >= alerts.BASELINE + alerts.ENTROPY_WINDOW  # the two share no step


def test_one_bad_step_is_no_alarm():
    assert raised(run(**{"clipped/think": lambda n: 0.5 if n == 7 else 0.0})) == []
    assert raised(run(**{"held_out/exact": lambda n: 0.5 if n == 7 else 0.8, "reward": lambda n: 0.5 + n / 100})) == []
    falls = {"held_out/exact": lambda n: 0.9 - n / 100}
    assert raised(run(**falls)) == [], "nor is an exam that falls while the reward does not rise"


def test_an_imitation_s_falling_entropy_is_no_alarm():
    assert raised([{"step": n, "loss": 1 / n, "grad_norm": 1.0, "entropy": 2.0 / n**2} for n in range(1, 60)]) == []


def test_alarms_that_are_cut_short_are_refused_by_their_file(tmp_path):
    path = tmp_path / "alarms.json"
    path.write_text('[{"name": "kl", ')
    with pytest.raises(ArtefactError, match=r"alarms\.json holds no alarms; restore it with `git checkout"):
        alerts.stored(path)


def test_a_finished_run_is_read_from_its_file(tmp_path):
    path = tmp_path / "history.jsonl"
    history = run(loss=lambda n: None if n == 4 else 0.1)
    path.write_text("".join(json.dumps(line) + "\n" for line in history))
    assert list(alerts.read(path)) == history
    assert alarms(alerts.read(path)) == alarms(history)


def test_a_history_that_is_missing_or_has_a_line_that_is_no_step_is_refused(tmp_path):
    path = tmp_path / "history.jsonl"
    with pytest.raises(ArtefactError, match=r"history.jsonl does not exist; train the version first, or restore it"):
        list(alerts.read(path))
    for bad in ("{", "[1]", "1", "{}", '{"step": null}', '{"step": "one"}', '{"step": Infinity}', "\xff"):
        path.write_bytes(f'{{"step": 1}}\n{bad}\n'.encode("latin-1"))
        with pytest.raises(ArtefactError, match=r"history.jsonl line 2 is no step of a history; restore it with"):
            list(alerts.read(path))


def test_a_long_history_is_never_in_memory_as_a_whole(tmp_path):
    path = tmp_path / "history.jsonl"
    path.write_text("".join(json.dumps({"step": step, "kl": 0.1, "reward": 0.5}) + "\n" for step in range(1, 20_001)))
    tracemalloc.start()
    alarms(alerts.read(path))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < path.stat().st_size


SHARES = st.floats(0, 1, allow_nan=False)


@given(st.lists(st.fixed_dictionaries({"clipped/think": SHARES, "answer/2": SHARES, "kl": SHARES}), max_size=30))
def test_a_run_that_is_continued_raises_what_it_would_have_raised(changes):
    history = [line(step, **change) for step, change in enumerate(changes, start=1)]
    whole = alarms(history)
    for cut in (0, len(history) // 2, len(history)):
        monitor = Monitor()
        for old in history[:cut]:
            monitor.add(old)
        after = [alarm for new in history[cut:] for alarm in monitor.add(new)]
        assert after == [alarm for alarm in whole if alarm.step > cut]
