"""The estimate counts what the model itself has: weights, adapter, keys and values."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from clinrl.errors import Refused
from clinrl.models.estimate import GIB, NF4, TILE_TOKENS, TILE_WORDS, measure
from clinrl.models.shapes import SHAPES

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False,
}  # fmt: skip
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
CONFIGS = [{"model_type": kind, **SMALL} for kind in ("llama", "qwen2", "qwen3")]
CONFIGS.append({"model_type": "qwen3_5_text", **SMALL, **LINEAR})


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config["model_type"])
@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "v_proj")])
def test_it_is_what_the_real_model_has(config, targets):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    size = measure(config, nf4=False, half=False, rank=4, targets=targets)
    assert size.weights == sum(parameter.nbytes for parameter in model.parameters())
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.ones(1, 80, dtype=torch.long), past_key_values=cache, use_cache=True)
    layers = [vars(layer).values() for layer in cache.layers]
    held = sum(_bytes(value) for layer in layers for value in layer)
    assert 80 * size.token + size.row == held
    names = list(targets) if isinstance(targets, tuple) else targets
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=names, task_type="CAUSAL_LM"))
    assert size.adapter == adapted.get_nb_trainable_parameters()[0]


def _bytes(value):
    if isinstance(value, dict):
        return sum(map(_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_bytes, value))
    return value.nbytes if isinstance(value, torch.Tensor) else 0


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config["model_type"])
def test_what_a_layer_keeps_is_what_autograd_saves_in_the_real_layer(config):
    """Of matrices that are trained, as with an adapter on each; rounded to a token."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32).train()
    own = {parameter.data_ptr() for parameter in model.parameters()}
    saved = {}

    def keep(tensor):
        if tensor.data_ptr() not in own:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model(torch.ones(1, 128, dtype=torch.long), use_cache=False)
    real = sum(storage.nbytes() for storage in saved.values()) / 128
    size = measure(config, nf4=False, half=False)
    assert 0.9 * real <= size.layers <= 2 * real


@pytest.mark.long
@pytest.mark.parametrize(
    ("repo", "billions"),
    [
        ("Qwen/Qwen3.5-9B", 8.95),
        ("meta-llama/Llama-3.1-8B-Instruct", 8.03),
        ("Qwen/Qwen2.5-3B-Instruct", 3.09),
        ("Qwen/Qwen2.5-7B-Instruct", 7.62),
        ("Qwen/Qwen1.5-1.8B-Chat", 1.84),
    ],
)
def test_the_copies_have_the_published_number_of_parameters(repo, billions):
    whole, packed = (measure(dict(SHAPES[repo]), nf4=nf4, half=True) for nf4 in (False, True))
    assert whole.weights / 2e9 == pytest.approx(billions, abs=0.006)
    assert NF4 / 2 < packed.weights / whole.weights < 0.55


def test_less_at_once_needs_less():
    size = measure(dict(SHAPES["Qwen/Qwen2.5-3B-Instruct"]), nf4=True, half=True, rank=16, targets="all-linear")
    steps = [size.training(1500 * rows, rows * 1000, checkpointed=True) for rows in (1, 2, 8)]
    assert steps == sorted(steps)
    assert size.training(1500, 1000, checkpointed=False) > steps[0]
    assert size.writing(500, 1500, 4) < size.writing(500, 1500, 8)


@pytest.mark.parametrize(
    ("command", "repo", "prompt"),
    [
        ("training grpo 9B nf4", "Qwen/Qwen3.5-9B", 147),
        ("training grpo 3B nf4", "Qwen/Qwen2.5-3B-Instruct", 606),
    ],
)
def test_the_estimate_of_64_completions_of_64_tokens_is_near_what_a_gpu_took(command, repo, prompt):
    rows = json.loads((ROOT / "data/reports/bench_gpu.json").read_text())[command]["rows"]
    measured_gb = next(row["value"] for row in rows if row["what"].endswith("peak"))
    targets = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    size = measure(dict(SHAPES[repo]), nf4=True, half=True, rank=16, targets=targets)
    assert 1.0 < (size.weights + size.writing(prompt, prompt + 64, 64)) / 1e9 / measured_gb < 1.05


def test_a_gpu_holds_a_tile_of_the_logits_and_a_cpu_all_of_them():
    """TRL's head projects 4,096 tokens on 32,768 words at once where it has Triton."""
    from trl.kernels import chunked_logprob
    from trl.trainer import utils

    assert (TILE_TOKENS, TILE_WORDS) == (chunked_logprob.TOKEN_CHUNK_SIZE, utils._CHUNKED_LOGPROB_CHUNK_SIZE)
    for half, at_most in ((True, 2.0), (False, 40.0)):
        size = measure(dict(SHAPES["Qwen/Qwen3.5-9B"]), nf4=True, half=half)
        few, many = (size.training(8000, scored, checkpointed=True) for scored in (8, 8192))
        assert at_most / 2 < (many - few) / GIB < at_most
    tiled = measure(dict(SHAPES["Qwen/Qwen3.5-9B"]), nf4=True, half=True)
    more = [tiled.training(8000, scored, checkpointed=True) for scored in (2 * TILE_TOKENS, 3 * TILE_TOKENS)]
    assert (more[1] - more[0]) / TILE_TOKENS == pytest.approx(tiled.slack * tiled.state * 8, rel=0.01)


def test_what_is_no_decoder_is_a_sentence():
    with pytest.raises(Refused, match="a decoder nothing-known cannot be measured"):
        measure({"model_type": "nothing-known"}, nf4=False, half=False)


NINE = """
import json, time
from clinrl.models.estimate import measure
from clinrl.models.shapes import SHAPES
measure(dict(SHAPES["Qwen/Qwen3.5-9B"]), nf4=True, half=True, rank=32, targets="all-linear")
peak = int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
print(json.dumps([time.process_time(), peak * 1024]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nine_billion_are_measured_in_a_minute_and_two_gigabytes():
    """With Python and its libraries, on one processor. The copies of all shapes are measured above."""
    done = subprocess.run([sys.executable, "-c", NINE], capture_output=True, text=True, check=True)
    taken_s, peak = json.loads(done.stdout.splitlines()[-1])
    assert taken_s < 60
    assert peak < 2e9
