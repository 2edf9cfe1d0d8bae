"""What a training takes is reckoned from rates: each part follows the rate that bounds it."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clinrl.config.machine import Machine
from clinrl.config.params import Params, load_params
from clinrl.models import needs, step_time
from clinrl.models.estimate import measure
from clinrl.models.shapes import SHAPES
from clinrl.models.step_time import Rates, estimate_times
from clinrl.runtime.gpus import Gpu

ROOT = Path(__file__).resolve().parents[2]
RATES = Rates(device="a card", operations_per_s=1e14, bytes_per_s=1e12, kernel_start_s=1e-6, source="stated")
TINY = {
    "model_type": "qwen2", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def read() -> Params:
    return load_params(ROOT / "params.yaml").model_copy(update={"scale": "full"})


@pytest.fixture
def params(read: Params, monkeypatch: pytest.MonkeyPatch) -> Params:
    """The project at full scale, above a tiny checkpoint."""
    monkeypatch.setattr(needs, "config_of", lambda *_: TINY)
    return read


def times(params: Params, version: str, rates: Rates = RATES, machine: Machine | None = None, **how: Any) -> Any:
    return estimate_times(params, version, machine or Machine(), rates, is_gpu=True, **how)


def test_each_part_follows_what_bounds_it(params: Params) -> None:
    usual = times(params, "esi-v49", replace(RATES, kernel_start_s=0.0))
    read_faster = times(params, "esi-v49", replace(RATES, kernel_start_s=0.0, bytes_per_s=1e15))
    started_slower = times(params, "esi-v49", replace(RATES, kernel_start_s=1e-3))
    assert read_faster.generation_s < usual.generation_s
    assert read_faster.loss_s == usual.loss_s
    assert started_slower.generation_s > 1024 * 2 * step_time.KERNELS * 1e-3
    assert usual.step_s == usual.generation_s + usual.loss_s
    assert usual.all_s == 300 * usual.step_s


def test_a_loss_is_three_passes_of_two_operations_a_number(params: Params) -> None:
    load = needs.workload(params, "esi-v49", Machine(), is_gpu=True)
    found = times(params, "esi-v49", replace(RATES, kernel_start_s=0.0)).loss_s
    assert found == pytest.approx(6 * load.policy.multiplied * 64 * (load.prompt + 1024) / 1e14 / step_time.REACHED)


def test_completions_are_reckoned_near_what_a_gpu_took() -> None:
    found = json.loads((ROOT / "data/reports/bench_gpu.json").read_text())
    stated = {row["what"]: row["value"] for command in found.values() for row in command["rows"]}
    rates = Rates(
        device="NVIDIA H200",
        operations_per_s=1e12 * stated["products of matrices"],
        bytes_per_s=1e9 * stated["copies in memory"],
        kernel_start_s=1e-6 * stated["start of a kernel"],
    )
    targets = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    policy = measure(dict(SHAPES["meta-llama/Llama-3.1-8B-Instruct"]), nf4=True, half=True, rank=16, targets=targets)
    step: Any = SimpleNamespace(together=64, sampled=64, written=64, reads=1)
    load: Any = SimpleNamespace(policy=policy, prompt=147)
    took_s = stated["GRPO 8B in nf4, paths shared, generation"]
    assert 0.9 < step_time._writing(load, step, rates) / took_s < 1.1


def test_an_imitation_writes_nothing_and_rejection_sampling_before_its_steps(params: Params) -> None:
    assert (times(params, "esi-v43").generation_s, times(params, "esi-v43").sampling_s) == (0.0, 0.0)
    sampled = times(params, "esi-rejection")
    assert sampled.generation_s == 0.0
    assert sampled.all_s == sampled.sampling_s + sampled.steps * sampled.loss_s > sampled.sampling_s > 0


def test_smaller_parts_and_fewer_gpus_take_longer(params: Params) -> None:
    assert (
        times(params, "esi-v49", machine=Machine(exam_tokens=4096)).generation_s > times(params, "esi-v49").generation_s
    )
    assert times(params, "esi-v49", gpus=8).loss_s == pytest.approx(times(params, "esi-v49").loss_s / 8)


def test_an_episode_that_keeps_nothing_reads_its_turns_again(params: Params) -> None:
    kept = needs.workload(params, "audit-v2", Machine(), is_gpu=True).training
    assert kept is not None
    assert kept.reads == 1
    assert kept.together == kept.sequences
    block = params.bases["audit"].full
    stock = block.model_copy(update={"recipes": {}})
    changed = params.bases["audit"].model_copy(update={"full": stock})
    other = params.model_copy(update={"bases": {**params.bases, "audit": changed}})
    anew = needs.workload(other, "audit-v2", Machine(), is_gpu=True).training
    assert anew is not None
    assert anew.reads == 15
    assert times(other, "audit-v2").generation_s > times(params, "audit-v2").generation_s


def test_it_is_said_before_a_training_and_only_at_full_scale(
    params: Params, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(needs, "visible", list)
    monkeypatch.setattr(step_time, "measured", lambda _: RATES)
    step_time.announce(params.model_copy(update={"scale": "embedded"}), "esi-v49", Machine())
    assert not capsys.readouterr().err
    served = Machine.model_validate({"sampler": "vllm"})
    step_time.announce(params, "esi-v49", served)
    said = capsys.readouterr().err
    assert "(generation 0 s, loss " in said
    assert " in all; what vLLM writes is not counted; rates " in said
    assert times(params, "esi-rejection", machine=served).sampling_s == 0.0
    assert times(params, "esi-v49", machine=served).loss_s == pytest.approx(4 / 3 * times(params, "esi-v49").loss_s)
    assert times(params, "esi-rejection", machine=served).loss_s == times(params, "esi-rejection").loss_s
    step_time.announce(params, "esi-v49", Machine())
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("clinrl: esi-v49: reckoned, not measured: at most ")
    assert "rates stated on a card: 100 T operations/s, 1,000 GB/s, 1 us a kernel" in said
    monkeypatch.setattr(step_time, "measured", lambda _: None)
    step_time.announce(params, "esi-v49", Machine())
    assert "cannot be reckoned here; the training starts all the same" in capsys.readouterr().err


@pytest.mark.parametrize(("seconds", "said"), [(0.1234, "0.123 s"), (99, "99 s"), (600, "10 min"), (360000, "100.0 h")])
def test_a_time_is_said_as_a_person_would(seconds: float, said: str) -> None:
    assert step_time.seconds(seconds) == said


@pytest.mark.long
def test_this_cpu_is_measured_by_a_process_that_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without nvidia-smi torch may have one all the same, whose memory this process would keep."""
    run, shown = subprocess.run, []

    def recorded(command: list[str], **how: Any) -> Any:
        shown.append(how["env"]["CUDA_VISIBLE_DEVICES"])
        return run(command, **how)

    monkeypatch.setattr(step_time.subprocess, "run", recorded)
    found = step_time.measured(None)
    assert found is not None
    assert found.operations_per_s > 1e6
    assert found.bytes_per_s > 1e6
    assert 0 < found.kernel_start_s < 1
    assert found.device == step_time.CPU
    assert shown == [""]


@pytest.mark.parametrize("output", ["", "not json", "{}"])
def test_a_gpu_that_cannot_be_measured_stops_nothing(monkeypatch: pytest.MonkeyPatch, output: str) -> None:
    done = subprocess.CompletedProcess([], 0, output, "")
    monkeypatch.setattr(step_time.subprocess, "run", lambda *_, **__: done)
    assert step_time.measured(Gpu(0, "A", 1, 1)) is None


def test_looks_at_held_out_cases_are_counted(params: Params) -> None:
    tokens = {name: needs.workload(params, name, Machine(), is_gpu=True).training for name in ("esi-v43", "esi-v49")}
    assert all(training is not None and training.held_out == 0 for training in tokens.values())
    embedded = params.model_copy(update={"scale": "embedded"})
    training = needs.workload(embedded, "esi-v49", Machine(), is_gpu=False).training
    assert training is not None
    assert training.held_out == 8192
    places = [need.place for need in needs.needs(embedded, "esi-v49", Machine(), needs.FreeMemory(None, 1 << 40))]
    assert places == ["loading", "training", "generation", "held-out", "exam"]
