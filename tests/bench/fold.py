"""Folding an adapter into a model of Qwen2.5-3B's shape: time, peak memory and rounding, beside PEFT's own way.

The weights are random and written once a size, in bfloat16; the adapter has rank 16 on all linear layers. Each way runs
in a process of its own on files that the page cache holds, with nothing left to be written from before. Peak memory is
the resident set, which counts the pages that PEFT maps from files. Needs about 15 GB of disk while it runs.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from clinrl.runtime import determinism

LAYERS = (12, 36)
"""Two sizes, so that growth shows; the second is the whole model."""
HIDDEN, MLP, HEADS, KV_HEADS, VOCAB = 2048, 11008, 16, 2, 151936
RANK, ALPHA = 16, 32
ROWS = 128
"""Rows of each sampled tensor that are compared with float64."""

KV = HIDDEN // HEADS * KV_HEADS
LINEAR = {
    "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (KV, HIDDEN), "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (MLP, HIDDEN), "mlp.up_proj": (MLP, HIDDEN),
    "mlp.down_proj": (HIDDEN, MLP),
}  # fmt: skip
"""Linear layers of a decoder layer: [out, in]."""


def model_shapes(layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of the base; the output layer is tied to the embeddings."""
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    yield "model.norm.weight", (HIDDEN,)
    for layer in range(layers):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", (HIDDEN,)
        yield f"{at}.post_attention_layernorm.weight", (HIDDEN,)
        for name, shape in LINEAR.items():
            yield f"{at}.{name}.weight", shape
            if name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
                yield f"{at}.{name}.bias", shape[:1]


def adapter_shapes(layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Both factors of every linear layer."""
    for layer in range(layers):
        for name, (out, into) in LINEAR.items():
            at = f"base_model.model.model.layers.{layer}.{name}"
            yield f"{at}.lora_A.weight", (RANK, into)
            yield f"{at}.lora_B.weight", (out, RANK)


def write_random(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Normal weights of deviation 0.02, made and written a few megabytes at a time, in bfloat16."""
    import torch

    from clinrl.merging import lora_delta, safetensors_io

    def fill(name: str, put: safetensors_io.Put) -> None:
        source = lora_delta.generator(0, name)
        for first in range(0, prod(shapes[name]), 1 << 21):
            count = min(1 << 21, prod(shapes[name]) - first)
            block = torch.randn(count, generator=source).mul_(0.02).to(torch.bfloat16)
            put(block.view(torch.uint8).numpy().data)

    safetensors_io.write(folder, {name: ("BF16", shape) for name, shape in shapes.items()}, fill)


def prepare(folder: Path, layers: int) -> None:
    """Write base and adapter into `folder`."""
    import torch
    from peft import LoraConfig
    from safetensors.torch import save_file
    from transformers import Qwen2Config

    from clinrl.merging import lora_delta

    for name in ("base", "adapter"):
        (folder / name).mkdir()
    Qwen2Config(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=MLP, num_hidden_layers=layers,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, tie_word_embeddings=True, dtype="bfloat16",
        architectures=["Qwen2ForCausalLM"],
    ).save_pretrained(folder / "base")  # fmt: skip
    LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=[name.split(".")[1] for name in LINEAR], task_type="CAUSAL_LM"
    ).save_pretrained(folder / "adapter")
    write_random(folder / "base", dict(model_shapes(layers)))
    factors = {
        name: torch.randn(shape, generator=lora_delta.generator(0, name)).mul_(0.02)
        for name, shape in adapter_shapes(layers)
    }
    save_file(factors, folder / "adapter/adapter_model.safetensors")


def fold_ours(base: Path, adapter: Path, out: Path) -> float:
    """Seconds of `merge.blend`, without imports."""
    determinism.settle(0)
    from clinrl.merging import merge

    started = time.perf_counter()
    merge.blend("fold", base, [(adapter, 1.0)], out)
    return time.perf_counter() - started


def fold_peft(base: Path, adapter: Path, out: Path) -> float:
    """Seconds of loading, merging and saving with transformers and PEFT, without imports."""
    determinism.settle(0)
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, Qwen2ForCausalLM  # noqa: F401 (imported before the clock starts)
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    started = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    merged = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    merged.save_pretrained(out, max_shard_size="5GB")
    return time.perf_counter() - started


WAYS = {"ours": fold_ours, "peft": fold_peft}


def measure(way: str, folder: Path) -> None:
    """Fold once and print seconds and this process's peak memory (MiB)."""
    print(json.dumps([WAYS[way](folder / "base", folder / "adapter", folder / way), peak()]))


def peak() -> float:
    """The most memory this process ever had resident, in MiB.

    Where the kernel says so, of this program alone: `getrusage` also counts what the parent had when it forked.
    """
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().split("VmHWM:")[1].split()[0]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2  # macOS counts in bytes


def run(way: str, folder: Path) -> tuple[float, float]:
    """`measure` in a process of its own, with the inputs in the page cache and nothing waiting to be written."""
    os.sync()
    for path in [*(folder / "base").iterdir(), *(folder / "adapter").iterdir()]:
        with path.open("rb", buffering=0) as stream:
            while stream.read(1 << 24):
                pass
    command = [sys.executable, __file__, way, str(folder)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    taken, peak = json.loads(done.stdout.splitlines()[-1])
    return taken, peak


def sample(folder: Path, way: str, layers: int) -> tuple[Any, Any]:
    """Some rows of every linear layer of the first and the last decoder layer, flat: as folded, and in float64."""
    import torch
    from safetensors import safe_open

    from clinrl.merging import safetensors_io

    def rows(path: Path, name: str, last: int | None = None) -> Any:
        with safe_open(path, framework="pt") as file:
            return file.get_slice(name)[:last].double()

    before, after = (safetensors_io.read_index(folder / where) for where in ("base", way))
    adapter = folder / "adapter/adapter_model.safetensors"

    found, exact = [], []
    for module in (f"model.layers.{layer}.{name}" for layer in (0, layers - 1) for name in LINEAR):
        at = f"base_model.model.{module}"
        down = rows(adapter, f"{at}.lora_A.weight")
        up = rows(adapter, f"{at}.lora_B.weight", ROWS)
        name = f"{module}.weight"
        exact.append(rows(before[name].file, name, ROWS) + ALPHA / RANK * (up @ down))
        found.append(rows(after[name].file, name, ROWS))
    return torch.cat([part.flatten() for part in found]), torch.cat([part.flatten() for part in exact])


def main() -> None:
    """Measure both ways at both sizes; print the rows."""
    rows = []
    for layers in LAYERS:
        size = 2 * sum(prod(shape) for _, shape in model_shapes(layers))
        results, folded = {}, {}
        with tempfile.TemporaryDirectory(prefix="clinrl-bench-") as name:
            folder = Path(name)
            if shutil.disk_usage(folder).free < 2.5 * size:
                sys.exit(f"{folder.parent} has too little room: {2.5 * size / 1e9:.0f} GB are needed")
            prepare(folder, layers)
            for way in WAYS:
                results[way] = run(way, folder)
                folded[way], exact = sample(folder, way, layers)
                shutil.rmtree(folder / way)
        ratio = results["peft"][0] / results["ours"][0]
        for way, what in (("ours", "fold"), ("peft", "PEFT load, merge, save")):
            taken, peak = results[way]
            what = f"{what}, {layers} layers of 3B"
            note = f"{size / 1e9:.1f} GB in bf16" + (f"; {ratio:.1f} times as fast as PEFT" if way == "ours" else "")
            rows.append((what, round(taken, 1), "s", note))
            rows.append((f"{what}, peak memory", round(peak), "MiB", "with libraries"))
        errors = {way: float((folded[way] - exact).abs().mean()) for way in WAYS}
        note = f"of {len(exact):,}; mean distance from float64 {errors['ours']:.3g}, PEFT's {errors['peft']:.3g}"
        different = int((folded["ours"] != folded["peft"]).sum())
        what = f"fold, {layers} layers of 3B, weights unlike PEFT's"
        rows.append((what, different, "weights", note))
    print(json.dumps(rows))


if __name__ == "__main__":
    determinism.pin()
    if len(sys.argv) > 1:
        measure(sys.argv[1], Path(sys.argv[2]))
    else:
        main()
