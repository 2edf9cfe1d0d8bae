"""Folding an adapter into a checkpoint of the true shape: seconds and peak memory. It runs on the host."""

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

import shaped

from clinrl.runtime import determinism


def main(arguments: list[str] | None = None) -> None:
    """Write an adapter, fold it; print the rows."""
    asked = shaped.options("shape").parse_args(arguments)
    import torch
    from peft import LoraConfig
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    from clinrl.merging import merge

    base = shaped.checkpoint(asked.shape, tiny=asked.tiny)
    config = AutoConfig.for_model(**shaped.config_of(asked.shape, tiny=asked.tiny))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with tempfile.TemporaryDirectory(prefix="clinrl-gpu-fold-", dir=base.parent) as name:
        adapter, out = Path(name) / "adapter", Path(name) / "out"
        size = sum(file.stat().st_size for file in base.iterdir())
        if shutil.disk_usage(name).free < 1.2 * size:
            sys.exit(f"{name} has too little room: {1.2 * size / 1e9:.0f} GB are needed")
        adapter.mkdir()
        LoraConfig(
            r=shaped.LORA["rank"], lora_alpha=32, target_modules=shaped.LORA["targets"], task_type="CAUSAL_LM"
        ).save_pretrained(adapter)
        factors = {}
        for path, module in model.named_modules():
            if path.rpartition(".")[2] in shaped.LORA["targets"]:
                at, rank = f"base_model.model.{path}", shaped.LORA["rank"]
                factors[f"{at}.lora_A.weight"] = torch.randn(rank, module.in_features) * 0.02
                factors[f"{at}.lora_B.weight"] = torch.randn(module.out_features, rank) * 0.02
        save_file(factors, adapter / "adapter_model.safetensors")
        out.mkdir()
        began = time.perf_counter()
        merge.blend("fold", base, [(adapter, 1.0)], out)
        taken_s = time.perf_counter() - began
    status = Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]
    what = f"fold {asked.shape}"
    print(json.dumps([(what, round(taken_s, 1), "s", f"{size / 1e9:.1f} GB in bf16"),
                      (f"{what}, peak of the host", round(int(status) / 1e6, 2), "GB", "with libraries")]))  # fmt: skip


if __name__ == "__main__":
    determinism.settle(0)
    main()
