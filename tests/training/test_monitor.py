"""What a look at held-out cases measures, by hand."""

import math
import shutil
from pathlib import Path

import pytest
import torch

import dolls
from clinrl import paths
from clinrl.models import bases
from clinrl.models.chat import Completion, encode
from clinrl.runtime import determinism
from clinrl.tasks.base import get_task
from clinrl.training.monitor import HeldOut

TASK = get_task("esi")
CASES = 3


@pytest.fixture
def held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HeldOut:
    shutil.copytree(dolls.built(), tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    spec = {
        "scale": "embedded", "task": "esi", "method": "sft",
        "modes": {"think": {"thinking": True}, "direct": {"thinking": False}},
        "trainer": {"held_out": {"cases": CASES, "every": 1}, "max_completion": 12},
    }  # fmt: skip
    model, tokenizer = bases.open_base(paths.base("esi"), for_training=False)
    found = HeldOut(model, tokenizer, TASK, spec)
    found.model = model  # type: ignore[attr-defined]
    return found


def test_beside_another_stage_it_begins_with_one_thread(
    held_out: HeldOut, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "running").write_text("2", encoding="ascii")
    monkeypatch.setenv(determinism.RUNNING, str(tmp_path / "running"))
    monkeypatch.setattr(determinism, "processors", lambda: 2)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(HeldOut, "_sample", lambda *_: [Completion("", "answered", ())] * torch.get_num_threads())
    spec = {"scale": "embedded", "task": "esi", "method": "sft", "modes": {"direct": {"thinking": False}}}
    spec["trainer"] = {"held_out": {"cases": 1, "every": 1}, "max_completion": 12}
    try:
        HeldOut(held_out.model, held_out.tokenizer, TASK, spec)  # type: ignore[attr-defined]
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)


def test_each_token_has_its_probability_after_those_before_it(held_out: HeldOut) -> None:
    model, expected = held_out.model, []  # type: ignore[attr-defined]
    for prompt, text in held_out.texts:
        before, written = (encode(held_out.tokenizer, [part])[0] for part in (prompt, text))
        with torch.inference_mode():
            scores = model(input_ids=torch.tensor([before + written])).logits[0].float().log_softmax(-1)
        expected += [float(scores[len(before) + place - 1, token]) for place, token in enumerate(written)]
    assert len(held_out.texts) == 2 * CASES
    # They come in the order of batches.
    assert sorted(held_out.before.tolist()) == pytest.approx(sorted(expected), abs=1e-4)


def test_a_finished_completion_is_scored_with_its_end(held_out: HeldOut, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, cut = (Completion(text="ANSWER: ESI 3", stop=stop, ids=()) for stop in ("answered", "max_tokens"))
    monkeypatch.setattr(HeldOut, "_sample", lambda *_: [ended, cut, cut])
    spec = {"scale": "embedded", "task": "esi", "method": "sft", "modes": {"direct": {"thinking": False}}}
    spec["trainer"] = {"held_out": {"cases": CASES, "every": 1}, "max_completion": 12}
    again = HeldOut(held_out.model, held_out.tokenizer, TASK, spec)  # type: ignore[attr-defined]
    assert [text.endswith(dolls.EOS) for _, text in again.texts] == [True, False, False]


def test_it_counts_right_answers_and_those_given_too_often(held_out: HeldOut, monkeypatch: pytest.MonkeyPatch) -> None:
    golds = [TASK.label(case) for case in held_out.cases]
    answers = [golds[0], golds[0] % 5 + 1, None]
    written = [
        Completion(text=f"x\n</think>\n\nANSWER: ESI {answer}" if answer else "x", stop="answered", ids=())
        for answer in answers
    ]
    monkeypatch.setattr(HeldOut, "_sample", lambda self, model, thinking, temperature: written)
    found = held_out.look(held_out.model)  # type: ignore[attr-defined]
    right = sum(answer == gold for answer, gold in zip(answers, golds, strict=True))
    assert found.pop("exact") == pytest.approx(right / CASES)
    assert found.pop("kl") == pytest.approx(0, abs=1e-6)
    assert found == {
        f"excess/{level}": pytest.approx((answers.count(level) - golds.count(level)) / CASES) for level in range(1, 6)
    }


@pytest.mark.parametrize("moved", [-0.5, 0.5])
def test_its_divergence_is_of_the_parents_tokens(held_out: HeldOut, moved: float) -> None:
    held_out.before = held_out.before - moved
    found = held_out.look(held_out.model)["kl"]  # type: ignore[attr-defined]
    assert found == pytest.approx(math.exp(moved) - 1 - moved, abs=1e-5)
