"""Acceptance of the full scale on a GPU: every command of this folder in a process of its own, each under ten minutes.

Rows go to data/reports/bench_gpu.json, with the GPU, its driver and the versions. Weights are random, of the true
shapes; nothing is downloaded, and 80 GB of disk are needed. `acceptance.py training` repeats the commands of one
script.
"""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import shaped

from clinrl.artifacts import write_json
from clinrl.runtime import determinism, gpus

HERE = Path(__file__).resolve().parent
REPORT = shaped.ROOT / "data/reports/bench_gpu.json"
LIMIT_S = 600
ROOM = 80e9
"""Bytes on disk: five checkpoints in bfloat16, and one that is folded."""
ROW = ("what", "value", "unit", "note", "low", "high")
"""The last two where a value has an interval, of 95%."""
COMMANDS = (
    *(("load.py", shape, kind) for shape in ("9B", "8B", "3B") for kind in ("nf4", "bf16")),
    ("operations.py",),
    *(("training.py", "sft", shape, "nf4") for shape in ("9B", "8B", "3B")),
    *(("training.py", "grpo", shape, "nf4") for shape in ("9B", "8B", "3B")),
    ("training.py", "grpo", "8B", "nf4", "--paths", "shared"),
    ("training.py", "grpo", "3B", "bf16"),
    ("resume.py", "3B", "nf4"),
    ("commands.py",),
    ("exam.py", "exam", "9B", "nf4"),
    ("exam.py", "audit", "3B", "nf4"),
    ("judges.py",),
    ("fold.py", "8B"),
)
VERSIONS = ("torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "kernels", "flash-linear-attention")


def main(names: list[str]) -> int:
    """Run the commands of the named scripts, or all. 1 without a GPU, or if one of them failed; the rest runs on."""
    determinism.pin()
    scripts = {command[0].removesuffix(".py") for command in COMMANDS}
    if "--help" in names or "-h" in names:
        print(f"usage: acceptance.py [{'|'.join(sorted(scripts))} ...]\n\n{__doc__}")
        return 0
    if unknown := [name for name in names if name not in scripts]:
        print(f"no measurement {unknown[0]!r}; there are {', '.join(sorted(scripts))}", file=sys.stderr)
        return 2
    cards = gpus.visible()
    if not cards:
        print(
            "make gpu: no GPU is visible here, so nothing was measured; start it where nvidia-smi lists one",
            file=sys.stderr,
        )
        return 1
    wanted = [command for command in COMMANDS if not names or command[0].removesuffix(".py") in names]
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if free < ROOM:
        print(
            f"make gpu: {tempfile.gettempdir()} has {free / 1e9:.0f} GB free, and {ROOM / 1e9:.0f} are needed for "
            "random weights; set TMPDIR to a folder with more",
            file=sys.stderr,
        )
        return 1
    with tempfile.TemporaryDirectory(prefix="clinrl-gpu-") as models:
        return measure(wanted, REPORT, machine(cards[0]), Path(models))


def measure(commands: Any, report: Path, machine: dict[str, Any], models: Path, more: tuple[str, ...] = ()) -> int:
    """Run commands, and renew their rows in the report; those of others stay. 1 if one of them failed."""
    kept: dict[str, Any] = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    failed = False
    for script, *arguments in commands:
        name = " ".join([script.removesuffix(".py"), *arguments])
        print(f"{name} ...", file=sys.stderr, flush=True)
        command = [sys.executable, str(HERE / script), *arguments, *more]
        try:
            done = subprocess.run(
                command, cwd=shaped.ROOT, env=os.environ | {shaped.MODELS: str(models)}, capture_output=True, text=True,
                timeout=LIMIT_S, check=True,
            )  # fmt: skip
            rows = [dict(zip(ROW, row, strict=False)) for row in json.loads(done.stdout.splitlines()[-1])]
            kept[name] = {"machine": machine, "rows": rows}
        except (subprocess.SubprocessError, ValueError, IndexError) as error:
            failed = True
            said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
            kept[name] = {"machine": machine, "failed": f"{type(error).__name__}: {' '.join(said)[:300]}"}
            print(f"{name} failed: {kept[name]['failed']}", file=sys.stderr)
        write_json(report, kept)
        for row in kept[name].get("rows", ()):
            print(f"{row['what']:<60}{row['value']:>14g} {row['unit']:<12}{row['note']}")
    return int(failed)


def machine(card: gpus.Gpu) -> dict[str, Any]:
    """What a measurement ran on."""
    import torch

    query = ["nvidia-smi", f"--id={card.number}", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    held = {str(package.metadata["Name"]).lower(): package.version for package in importlib.metadata.distributions()}
    versions = {name: held.get(name, "none") for name in VERSIONS}
    return {"gpu": card.name, "memory_bytes": card.total, "driver": driver, "cuda": torch.version.cuda, **versions}


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    sys.exit(main(sys.argv[1:]))
