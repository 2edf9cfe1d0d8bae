"""A training at full scale that runs out of memory: where, what to set, and that it goes on from its checkpoint."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

import dolls
from clinrl import paths
from clinrl.config.params import Params
from clinrl.errors import OutOfMemory, ParamsError, TrainingError
from clinrl.models import bases, step_time
from clinrl.models.generate import Prompt, Sampler
from clinrl.training import launch
from clinrl.training.loss import SharedLossTrainer
from clinrl.types import Message

TEXT = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB"


def exhausted(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError(TEXT)


@pytest.fixture
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Params:
    """The doll's project at full scale, above its own base as a checkpoint; entered."""
    shutil.copytree(dolls.built(), tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(step_time, "PROBE_S", 0.01)
    shutil.copytree(paths.base("esi"), "checkpoint")
    changed = {"exam": "x1", "embedded": dolls.PARAMS["bases"]["esi"]["embedded"]}
    changed["full"] = {"repo": str(tmp_path / "checkpoint"), "revision": "main", "quantize": "none"}
    profiles = dolls.params().model_dump()["profiles"]
    profiles["reward"]["trainer"]["full"] |= {"steps": 3, "checkpoint_every": 2}
    params = dolls.params(scale="full", bases={"esi": changed}, profiles=profiles)
    bases.stage(params, "esi")
    return params


def state() -> dict[str, Any]:
    (file,) = Path(".clinrl/checkpoints").glob("v3-*/status.json")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("target", "name", "sentence"),
    [
        (bases, "_open", r"out of memory in loading the model \(2.50 GiB more were wanted\); set gpu in machine.yaml"),
        (Qwen3ForCausalLM, "generate", r"in generation \(2.50 GiB .*; set exam_tokens in machine.yaml to \d+, and"),
    ],
)
def test_each_place_is_told_with_its_key(
    full: Params, monkeypatch: pytest.MonkeyPatch, target: Any, name: str, sentence: str
) -> None:
    monkeypatch.setattr(target, name, exhausted)
    with dolls.in_process(), pytest.raises(TrainingError, match=sentence + ".*continues from step 0 of 3"):
        launch.stage(full, "v3")
    assert state()["state"] == "failed"


@pytest.mark.long
def test_with_a_smaller_micro_batch_it_goes_on_from_its_checkpoint(
    full: Params, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    compute, rows = SharedLossTrainer._compute_loss, []

    def scripted(self: Any, model: Any, inputs: dict[str, Any]) -> Any:
        rows.append(len(inputs["advantages"]))
        if self.state.global_step == 2 and rows[-1] > 4:
            exhausted()
        return compute(self, model, inputs)

    monkeypatch.setattr(SharedLossTrainer, "_compute_loss", scripted)
    with dolls.in_process(), pytest.raises(TrainingError) as ended:
        launch.stage(full, "v3")
    assert str(ended.value) == (
        "training of v3 failed: out of memory in the loss (2.50 GiB more were wanted); set micro_batch in machine.yaml "
        "to 4, and the same command continues from step 2 of 3"
    )
    assert state() == {"state": "failed", "step": 2, "steps": 3, "reason": str(ended.value).split(": ", 1)[1]}
    assert rows == [8, 8, 8]
    with monkeypatch.context() as loading, dolls.in_process():
        loading.setattr(bases, "_open", exhausted)
        with pytest.raises(TrainingError, match=r"in loading the model.*continues from step 2 of 3"):
            launch.stage(full, "v3")
    Path("machine.yaml").write_text("micro_batch: 4\nexam_tokens: 900\n")
    with dolls.in_process():
        launch.stage(full, "v3")
    assert "v3 trains from step 2 to 3" in capfd.readouterr().err
    assert rows == [8, 8, 8, 4, 4]
    steps = (paths.adapter("v3") / "history.jsonl").read_text().splitlines()
    assert [json.loads(step)["step"] for step in steps] == [1, 2, 3]


def test_machine_yaml_holds_at_full_scale_alone(full: Params) -> None:
    Path("machine.yaml").write_text("micro_batch: 2\n")
    spec = {"scale": "full", "trainer": {"micro_batch": 8, "prompts": 2, "group": 4}}
    assert launch._on_this_machine(spec)["trainer"]["micro_batch"] == 2
    assert spec["trainer"]["micro_batch"] == 8
    embedded = spec | {"scale": "embedded"}
    assert launch._on_this_machine(embedded)["trainer"]["micro_batch"] == 8
    Path("machine.yaml").write_text("micro_batch: none\n")
    with pytest.raises(ParamsError, match="micro_batch"):  # a wrong file is refused before anything is removed
        launch._on_this_machine(embedded)


def test_an_exam_says_how_many_tokens_to_allow(full: Params, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = bases.open_base(paths.base("esi"), for_training=False)
    monkeypatch.setattr(model, "generate", exhausted)
    prompts = [Prompt("a", [Message(role="user", content="A.")], ids=[5] * 10)] * 4
    with pytest.raises(OutOfMemory, match=r"in an exam \(2.50 GiB .*; set exam_tokens in machine.yaml to 36"):
        Sampler(model, tokenizer, scale="full").sample(prompts, thinking=True, temperature=0.0, budget=8, seed=0)
