"""Rejection sampling: what is kept, that nothing is sampled twice, and the same bytes wherever a run was killed."""

import json
import os
import shutil
import signal
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dolls
from clinrl import paths
from clinrl.artifacts import verified
from clinrl.errors import ParamsError, TrainingError
from clinrl.models.judges import Judges
from clinrl.tasks.base import get_task
from clinrl.tasks.policies import write_answer
from clinrl.training import callback, launch, rejection
from clinrl.training.rows import Row
from clinrl.types import Call, Message, Score
from samplers import ScriptedSampler

pytestmark = pytest.mark.long

TASK = get_task("esi")
CASES = list(TASK.cases(6, 1, pool="train", mix="balanced"))
TRAINER = {
    "lr": 2.0e-3, "steps": 4, "batch": 4, "checkpoint_every": 2, "on_alarm": "warn", "prompts": 12, "group": 4,
    "temperature": 0.5, "max_completion": 32, "threshold": -1.25,
}  # fmt: skip


def params(**trainer: Any) -> Any:
    """The doll's, with a version v4 by rejection sampling from the base."""
    reward = dolls.params().model_dump()["profiles"]["reward"]
    own = {key: reward[key] for key in ("modes", "lora", "stream", "reward")} | {"method": "rejection"}
    own["trainer"] = dict.fromkeys(("embedded", "full"), TRAINER | trainer)
    versions = {"v4": dolls.PARAMS["versions"]["v3"] | {"profile": "own", "seed": 4}}
    return dolls.params(profiles={"own": own}, versions=versions)


def spec(**trainer: Any) -> dict[str, Any]:
    modes = {"think": {"thinking": True}, "direct": {"thinking": False}}
    own = {"keep": 4} | TRAINER | {"threshold": None} | trainer
    return {"version": "v4", "seed": 4, "reward": {}, "modes": modes, "trainer": own}


def rows(count: int) -> list[Row]:
    """Rows of the stream, in both modes in turn."""
    modes = (("think", True), ("direct", False))
    return [Row(CASES[number % len(CASES)], *modes[number % 2]) for number in range(count)]


class Numbered(ScriptedSampler):
    """Answers a different level each time, in the order in which it is asked."""

    def __init__(self) -> None:
        super().__init__(self._next)
        self.asked: list[str] = []

    def _next(self, messages: Any) -> str:
        self.asked.append(messages[-1].content)
        return f"{len(self.asked)}\n</think>\n\nANSWER: ESI {1 + len(self.asked) % 5}"


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.booleans(), st.integers(-2, 2)), max_size=12),
    st.sampled_from([None, -1, 1]),
    st.integers(1, 4),
)
def test_what_is_kept_is_distinct_ended_and_paid_best_first(written, threshold, most):
    case, fits, completions = CASES[0], {}, []
    gold = TASK.label(case)
    for right, more, ended, paid in written:
        level, stop = gold if right else gold % 5 + 1, "answered" if ended else "max_tokens"
        completions.append((write_answer(f"ANSWER: ESI {level}", "x" * more, stop), paid))
        if ended and (right if threshold is None else paid >= threshold):
            fits[completions[-1][0]] = max(paid, fits.get(completions[-1][0], paid))
    kept = rejection.keep(TASK, case, completions, threshold, most)
    assert len(set(kept)) == len(kept) == min(most, len(fits))
    assert [fits[transcript] for transcript in kept] == sorted(fits.values(), reverse=True)[:most]


def test_with_relabel_every_answer_that_stands_where_it_should_becomes_the_gold_label():
    case, gold = CASES[0], TASK.label(CASES[0])
    wrong = write_answer(f"- Step C: ESI 3\nANSWER: ESI {gold % 5 + 1}", "my own reasons")
    silent, cut = write_answer("no answer"), write_answer(f"ANSWER: ESI {gold}", "y", "max_tokens")
    (kept,) = rejection.keep(TASK, case, [(wrong, -1.0), (silent, 1.0), (cut, 1.0)], None, 4, relabel=True)
    assert TASK.parse(kept) == gold
    assert kept.messages[-1].content == f"- Step C: ESI 3\nANSWER: ESI {gold}"
    assert kept.messages[-1].thinking == "my own reasons"
    taught, logged = rejection.taught(TASK, spec(relabel=True), rows(1), [[(wrong, -1.0)] * 2])
    assert {TASK.parse(row.transcript) for row in taught} == {gold}
    assert (logged["sampled/kept"], logged["sampled/reward"]) == (1, -1.0)


def test_what_cannot_be_read_with_the_gold_label_in_it_is_not_taught():
    twice = write_answer("ANSWER: ESI 3\nANSWER: ESI 3", "my own reasons")
    case = next(case for case in CASES if TASK.label(case) != 3)
    assert rejection.keep(TASK, case, [(twice, 0.0)], None, 4, relabel=True) == []


def test_relabel_needs_ordered_answers_and_no_threshold():
    with pytest.raises(ParamsError, match=r"relabel is true, which keeps every completion of a task with ordered"):
        params(relabel=True)
    assert params(relabel=True, threshold=None).profiles["own"].trainer["embedded"].relabel


def test_each_row_gets_its_own_completions_and_no_gold_reason_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(type(TASK), "gold", None)
    settings = spec(group=3, threshold=-2.0)
    sampler = Numbered()
    found = rejection.sample(tmp_path, sampler, TASK, settings, rows(5), Judges(tmp_path))
    assert [len(completions) for completions in found] == [3] * 5
    for row, completions in zip(rows(5), found, strict=True):
        for transcript, paid in completions:
            assert TASK.score(row.case, transcript, TASK.Reward()).total == paid
            assert (transcript.messages[-1].thinking is not None) == row.thinking
    wanted = [row.case for mode in ("think", "direct") for row in rows(5) if row.mode == mode for _ in range(3)]
    assert sampler.asked == [TASK.prompt(case.facts)[-1].content for case in wanted]
    taught, logged = rejection.taught(TASK, settings, rows(5), found)
    assert len(taught) == 16  # 4 steps of 4 rows
    assert {row.case.id for row in taught} == {row.case.id for row in rows(5)}
    assert logged == {
        "sampled/completions": 15,
        "sampled/kept": 15,
        "sampled/kept_prompts": 1.0,
        "sampled/reward": pytest.approx(sum(paid for completions in found for _, paid in completions) / 15),
    }


def test_nothing_is_sampled_twice_and_a_stop_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(rejection, "TOGETHER", 2)
    arguments = (TASK, spec(), rows(6), Judges(tmp_path))
    whole, sampler = rejection.sample(tmp_path / "whole", Numbered(), *arguments), Numbered()
    answers = iter([False, True])
    assert rejection.sample(tmp_path / "cut", sampler, *arguments, lambda: next(answers)) is None
    assert len(sampler.asked) == 8  # the first two prompts, four completions each
    assert rejection.sample(tmp_path / "cut", sampler, *arguments) == whole
    assert rejection.sample(tmp_path / "cut", sampler, *arguments) == whole
    assert len(sampler.asked) == 24


def test_a_tool_call_is_taught_as_it_was_written(tmp_path, monkeypatch):
    arguments = {"proposal_id": 2, "error_type": "dose", "and": "why"}
    turn = Message(role="assistant", content="", calls=(Call(name="flag_error", arguments=arguments),))
    written = write_answer("ANSWER: ESI 3").model_copy(update={"messages": (turn,)})
    monkeypatch.setattr(rejection, "run", lambda *_: [written])
    monkeypatch.setattr(rejection, "scores", lambda *_: [Score(terms={}, total=0.0)])
    (((found, _),),) = rejection.sample(tmp_path, Numbered(), TASK, spec(group=1), rows(1), Judges(tmp_path))
    assert list(found.messages[0].calls[0].arguments.items()) == list(arguments.items())


def test_an_empty_harvest_is_refused_with_what_helps():
    wrong = write_answer(f"ANSWER: ESI {TASK.label(CASES[0]) % 5 + 1}")
    with pytest.raises(TrainingError, match=r"none of 2 sampled completions is kept \(the best earned -0.25\).*raise"):
        rejection.taught(TASK, spec(), rows(1), [[(wrong, -1.0), (wrong, -0.25)]])


def test_all_that_is_kept_is_taught_equally_often():
    thoughts = ("a", "b", "c", "d")
    completions = [(write_answer(f"ANSWER: ESI {TASK.label(CASES[0])}", thought), 1.0) for thought in thoughts]
    taught, _ = rejection.taught(TASK, spec(steps=3), rows(1), [completions])
    texts = [row.transcript.messages[-1].thinking for row in taught]
    assert [tuple(sorted(texts[first : first + 4])) for first in (0, 4, 8)] == [thoughts] * 3
    assert texts[:4] != texts[4:8]  # shuffled anew


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A project in which v4 was trained without a disturbance."""
    root = tmp_path_factory.mktemp("rejection")
    shutil.copytree(dolls.built(), root, dirs_exist_ok=True)
    with chdir(root), dolls.in_process(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(rejection, "TOGETHER", 4)
        dolls.prove(params())
        launch.stage(params(), "v4")
    return root


@pytest.fixture
def project(trained, tmp_path, monkeypatch):
    """A copy of it without v4, entered."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    shutil.rmtree(paths.adapter("v4"))
    return tmp_path


def test_a_version_says_what_was_sampled_and_trained(trained, monkeypatch):
    monkeypatch.chdir(trained)
    folder = paths.adapter("v4")
    manifest = verified(folder)
    assert (manifest.spec["method"], manifest.spec["trainer"]["prompts"]) == ("rejection", 12)
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert lines[0]["sampled/completions"] == 48
    assert 0 < lines[0]["sampled/kept_prompts"] <= 1
    assert lines[0]["sampled/kept"] >= 12 * lines[0]["sampled/kept_prompts"]
    assert not [name for line in lines[1:] for name in line if name.startswith("sampled")]
    assert [line["num_tokens"] for line in lines] == sorted({line["num_tokens"] for line in lines})
    assert "completions of its parent that the task's reward kept" in (folder / "README.md").read_text()


class Killed(BaseException):
    """An end that nothing in a run catches or prepares for."""


@pytest.mark.parametrize("where", ["nowhere", "sampling", "steps"])
def test_runs_give_the_same_bytes_wherever_they_were_killed(trained, project, monkeypatch, where):
    at = {"sampling": (rejection, "scores", 4), "steps": (callback.RunCallback, "on_log", 3)}.get(where)
    monkeypatch.setattr(rejection, "TOGETHER", 4)  # two parts in each of two modes
    with dolls.in_process():
        if at:
            calls, real = [], getattr(*at[:2])

            def cut(*arguments: Any, **named: Any) -> Any:
                calls.append(arguments)
                if len(calls) == at[2]:
                    raise Killed
                return real(*arguments, **named)

            with monkeypatch.context() as patch:
                patch.setattr(*at[:2], cut)
                with pytest.raises(Killed):
                    launch.stage(params(), "v4")
            assert not paths.adapter("v4").exists()
            (folder,) = Path(".clinrl/checkpoints").iterdir()
            assert len(list((folder / "sampled").glob("*.json"))) == {"sampling": 3, "steps": 4}[where]
        launch.stage(params(), "v4")
    assert dolls.files(paths.adapter("v4")) == dolls.files(trained / paths.adapter("v4"))


def test_a_run_that_is_stopped_while_it_samples_goes_on_from_there(trained, project, monkeypatch):
    monkeypatch.setattr(rejection, "TOGETHER", 4)
    calls, score = [], rejection.scores

    def stopped(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return score(*arguments)

    monkeypatch.setattr(rejection, "scores", stopped)
    with dolls.in_process():
        with pytest.raises(TrainingError, match="v4 was stopped; the same command continues from step 0 of 4"):
            launch.stage(params(), "v4")
        assert len(calls) == 2
        launch.stage(params(), "v4")
    assert len(calls) == 4
    assert dolls.files(paths.adapter("v4")) == dolls.files(trained / paths.adapter("v4"))


def test_a_training_that_keeps_nothing_ends_with_a_sentence(project):
    given = params(prompts=2, group=1, threshold=1.0)
    with dolls.in_process(), pytest.raises(TrainingError, match="training of v4 failed: none of 2 sampled completions"):
        launch.stage(given, "v4")
    assert not paths.adapter("v4").exists()
