"""A training that is killed and goes on from its checkpoint: is its adapter that of one that was never killed?"""

import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import shaped

from clinrl.artifacts import sha256_file
from clinrl.runtime import determinism

HERE = Path(__file__).resolve().parent
STEPS, KILLED = 4, 4


def main(arguments: list[str] | None = None) -> None:
    """Train four steps in one process; again, killed in the fourth and continued from the second. Print the rows."""
    asked = shaped.options("shape", "kind").parse_args(arguments)
    from safetensors.torch import load_file

    shaped.checkpoint(asked.shape, tiny=asked.tiny)
    with tempfile.TemporaryDirectory(prefix="clinrl-gpu-resume-") as name:
        folder = Path(name)
        command = [
            sys.executable, str(HERE / "training.py"), "grpo", asked.shape, asked.kind, "--steps", str(STEPS),
            "--prompts", "2", "--completion", "16", *(["--tiny"] if asked.tiny else []),
        ]  # fmt: skip
        whole, again = folder / "whole.safetensors", folder / "again.safetensors"
        quiet = {"stdout": subprocess.DEVNULL, "check": False}
        straight = subprocess.run([*command, "--output", str(folder / "a"), "--keep", str(whole)], **quiet)
        killed = subprocess.run([*command, "--output", str(folder / "b"), "--kill", str(KILLED)], **quiet)
        checkpoint = folder / "b/checkpoint-2"
        if straight.returncode or killed.returncode != -signal.SIGKILL or not checkpoint.is_dir():
            sys.exit(f"the trainings ended with {straight.returncode} and {killed.returncode}")
        subprocess.run([*command, "--output", str(folder / "b"), "--resume", str(checkpoint), "--keep", str(again)],
                       stdout=subprocess.DEVNULL, check=True)  # fmt: skip
        is_equal = sha256_file(whole) == sha256_file(again)
        first, second = load_file(whole), load_file(again)
        gap = max(float((first[name] - second[name]).abs().max()) for name in first)
        scale = max(float(tensor.abs().max()) for tensor in first.values())
    note = "equal hashes" if is_equal else f"hashes differ; the largest number is {scale:.3g}"
    print(json.dumps([(f"resumed after a kill, {asked.shape} in {asked.kind}, largest difference", gap, "", note)]))


if __name__ == "__main__":
    determinism.pin()
    main()
