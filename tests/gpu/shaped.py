"""Checkpoints of the true shapes with random weights, made from configs: nothing is downloaded. Tiny ones for a CPU."""

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

from clinrl.models.shapes import SHAPES

ROOT = Path(__file__).resolve().parents[2]
REPOS = {
    "9B": "Qwen/Qwen3.5-9B", "8B": "meta-llama/Llama-3.1-8B-Instruct", "3B": "Qwen/Qwen2.5-3B-Instruct",
    "7B": "Qwen/Qwen2.5-7B-Instruct", "1.8B": "Qwen/Qwen1.5-1.8B-Chat",
}  # fmt: skip
SMALL = {"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
SMALL_DELTA = {"head_dim": 16, "linear_num_key_heads": 32, "linear_num_value_heads": 32, "linear_key_head_dim": 4,
               "linear_value_head_dim": 4}  # fmt: skip
LORA = {"rank": 16, "alpha": 32.0,
        "targets": ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]}  # fmt: skip
MODELS = "CLINRL_GPU_MODELS"
"""The folder in which checkpoints are kept between the scripts of one measurement."""


def options(*positional: str) -> argparse.ArgumentParser:
    """The arguments of a script. `--tiny`: small shapes and few rows, as on a CPU."""
    parser = argparse.ArgumentParser()
    for name in positional:
        parser.add_argument(name)
    parser.add_argument("--tiny", action="store_true")
    return parser


def config_of(name: str, *, tiny: bool) -> dict[str, Any]:
    """The config.json of a shape."""
    config = dict(SHAPES[REPOS[name]])
    if tiny:
        config |= SMALL | (SMALL_DELTA if "linear_num_key_heads" in config else {})
    return config | {"dtype": "bfloat16", "max_position_embeddings": 32768}


def checkpoint(name: str, *, tiny: bool) -> Path:
    """The folder of a checkpoint, written if it is not there yet: bfloat16, with a tokenizer from here."""
    kept = Path(os.environ.get(MODELS) or tempfile.mkdtemp(prefix="clinrl-gpu-"))
    folder = kept / f"{name}{'-tiny' * tiny}"
    if not (folder / "config.json").exists():
        _write(folder, config_of(name, tiny=tiny))
    return folder


def _write(folder: Path, config: dict[str, Any]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from clinrl.artifacts import MANIFEST, write_json
    from clinrl.merging import lora_delta, safetensors_io

    settings = AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        shapes.pop("lm_head.weight", None)
    folder.mkdir(parents=True, exist_ok=True)

    device = "cuda" if torch.cuda.is_available() else "cpu"

    def fill(name: str, put: safetensors_io.Put) -> None:
        source = torch.Generator(device).manual_seed(lora_delta.generator(0, name).initial_seed())
        flat = torch.zeros if name.endswith(".bias") else torch.ones
        for first in range(0, prod(shapes[name]), 1 << 25):
            count = min(1 << 25, prod(shapes[name]) - first)
            block = (
                flat(count)
                if len(shapes[name]) == 1
                else torch.randn(count, generator=source, device=device).mul_(0.02)
            )
            put(block.to(torch.bfloat16).cpu().view(torch.uint8).numpy().data)

    safetensors_io.write(folder, {name: ("BF16", shape) for name, shape in shapes.items()}, fill)
    words = ROOT / "data/bases" / ("audit" if folder.name.startswith("3B") else "esi")
    for file in (*words.glob("*token*"), words / "chat_template.jinja"):
        shutil.copyfile(file, folder / file.name)
    settings.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(written | {"dtype": "bfloat16"}), encoding="utf-8")
    # It is loaded as a merged model of full scale is; nobody checks the digests of 18 GB here.
    says = {"kind": "merged", "name": folder.name, "task": "esi", "task_version": 1, "spec": {"scale": "full"}}
    write_json(folder / MANIFEST, says | {"inputs": {}, "files": {}})


def load(folder: Path, *, nf4: bool) -> tuple[Any, Any, float]:
    """A checkpoint as a stage loads it, its tokenizer, and the seconds of it."""
    from clinrl.models import bases

    began = time.perf_counter()
    model, tokenizer = bases._open(folder, {}, folder, qlora=nf4)
    return model, tokenizer, time.perf_counter() - began


def held_gb() -> float:
    """The most memory that was in use since `forget`, in GB: of the GPU, or on the CPU of this process."""
    import torch

    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated() / 1e9)
    status = Path("/proc/self/status")
    return int(status.read_text().split("VmHWM:")[1].split()[0]) / 1e6 if status.exists() else 0.0


def forget() -> None:
    """Count the most memory in use from now on."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def seconds(work: Callable[[], Any], least_s: float = 0.2) -> float:
    """Seconds of a call, after one that does not count, as a mean over so long."""
    import torch

    wait: Callable[[], Any] = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    work()
    wait()
    began, calls = time.perf_counter(), 0
    while time.perf_counter() - began < least_s:
        work()
        wait()
        calls += 1
    return (time.perf_counter() - began) / calls


def estimate_gb(name: str, *, nf4: bool, tiny: bool) -> Any:
    """The size that the doctor's estimate has of a shape."""
    import torch

    from clinrl.models.estimate import measure

    config = {key: value for key, value in config_of(name, tiny=tiny).items() if key != "dtype"}
    return measure(config, nf4=nf4, half=torch.cuda.is_available(), rank=LORA["rank"], targets=tuple(LORA["targets"]))
