"""A training step on a machine that others use: beside one busy process per processor, and with OpenMP's own waiting.

The step is forward and backward of the GRPO loss on the committed base, with the threads of a training. Each way is a
process of its own, since OpenMP reads its settings when torch is imported; ways take turns.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import grpo_loss
from clinrl import paths
from clinrl.runtime import determinism

STEPS = 8
ROUNDS = 2
SPINS = "GOMP_SPINCOUNT"
BUSY = "print(flush=True)\nwhile True: pass"
OURS, OPENMP = "clinrl", "OpenMP's default"


def steps(way: str, count: int) -> list[float]:
    """Seconds of each step in this process, which must not have imported torch yet."""
    determinism.pin()
    if way == OPENMP:
        del os.environ[SPINS]
    from clinrl.models import bases

    model, tokenizer = bases.open_base(paths.base("esi"), for_training=True)
    determinism.settle(0)
    found = grpo_loss.ways(model, tokenizer, groups=4, live=4, size=8, prompt=71, completion=35)
    return [grpo_loss.seconds({way: found["stock"]}, 1)[way] for _ in range(count)]


def taken(way: str, count: int) -> float:
    """Mean seconds of a step in a process of its own."""
    inherited = {name: value for name, value in os.environ.items() if name not in (SPINS, "OMP_WAIT_POLICY")}
    command = [sys.executable, __file__, way, str(count)]
    done = subprocess.run(command, env=inherited, stdout=subprocess.PIPE, check=True)
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return sum(found) / len(found)


def beside(processes: int, way: str, count: int) -> float:
    """The same beside so many busy processes."""
    command = [sys.executable, "-c", BUSY]
    others = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(processes)]
    try:
        for other in others:
            assert other.stdout is not None
            other.stdout.readline()
        return taken(way, count)
    finally:
        for other in others:
            other.kill()
            other.communicate()


def rows(alone: dict[str, float], busy: dict[str, float]) -> list[tuple[Any, ...]]:
    """The rows of the report."""
    per_core = "step beside one busy process per processor against alone"
    slower = {way: round(busy[way] / alone[way], 2) for way in (OURS, OPENMP)}
    note = f"means of {ROUNDS} x {STEPS} steps, by turns"
    return [
        ("step alone", round(alone[OURS], 3), "s", "GRPO loss and gradient of 32 rows"),
        ("step alone against OpenMP's default waiting", round(alone[OURS] / alone[OPENMP], 3), "ratio", note),
        (per_core, slower[OURS], "ratio", "bounded spinning"),
        (f"{per_core}, OpenMP's default waiting", slower[OPENMP], "ratio", "what the bound is for"),
    ]


def measured(rounds: int, count: int) -> list[tuple[Any, ...]]:
    """The rows of so many rounds of so many steps."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found: list[dict[str, float]] = [dict.fromkeys((OURS, OPENMP), 0.0) for _ in range(2)]
    for _ in range(rounds):
        for where, others in zip(found, (0, cores), strict=True):
            for way in where:
                where[way] += beside(others, way, count) / rounds
    return rows(*found)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(steps(sys.argv[1], int(sys.argv[2]))))
    else:
        print(json.dumps(measured(ROUNDS, STEPS)))
