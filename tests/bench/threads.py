"""Loss and gradient of a training step on a machine that others use: beside one busy process per processor, with
OpenMP's own waiting, and beside another training.

The step is forward and backward of the GRPO loss on the committed base, with the threads of a training. Each way is a
process of its own, since OpenMP reads its settings when torch is imported; ways take turns.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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
OURS, OPENMP, ASLEEP = "clinrl", "OpenMP's default", "threads that sleep"


def steps(way: str, count: int) -> list[float]:
    """Seconds of each step in this process, which must not have imported torch yet."""
    determinism.pin()
    if way == OPENMP:
        del os.environ[SPINS]
    if way == ASLEEP:
        os.environ |= determinism._SLEEPING
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


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many busy processes beside the block."""
    command = [sys.executable, "-c", BUSY]
    others = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(processes)]
    try:
        for other in others:
            assert other.stdout is not None
            other.stdout.readline()
        yield
    finally:
        for other in others:
            other.kill()
            other.communicate()


def in_pairs(way: str, count: int) -> float:
    """Mean seconds of a step of two processes that take so many steps side by side."""
    with ThreadPoolExecutor(2) as pool:
        return sum(pool.map(lambda _: taken(way, count), range(2))) / 2


def rows(alone: dict[str, float], crowded: dict[str, float], paired: dict[str, float]) -> list[tuple[Any, ...]]:
    """The rows of the report."""
    what = "loss and gradient alone"
    per_core = "loss and gradient beside one busy process per processor against alone"
    slower = {way: round(crowded[way] / alone[way], 2) for way in (OURS, OPENMP)}
    note = f"means of {ROUNDS} x {STEPS} steps, by turns"
    return [
        (what, round(alone[OURS], 3), "s", "GRPO, by TRL, of 32 rows"),
        (
            "loss and gradient alone against OpenMP's default waiting",
            round(alone[OURS] / alone[OPENMP], 3),
            "ratio",
            note,
        ),
        (per_core, slower[OURS], "ratio", "bounded spinning"),
        (f"{per_core}, OpenMP's default waiting", slower[OPENMP], "ratio", "what the bound is for"),
        (
            "loss and gradient of two trainings side by side, threads that sleep against spinning ones",
            round(paired[ASLEEP] / paired[OURS], 2),
            "ratio",
            "two threads each",
        ),
    ]


def measured(rounds: int, count: int) -> list[tuple[Any, ...]]:
    """The rows of so many rounds of so many steps."""
    alone, crowded, paired = [dict.fromkeys(ways, 0.0) for ways in ((OURS, OPENMP), (OURS, OPENMP), (OURS, ASLEEP))]
    for _ in range(rounds):
        for where, others in ((alone, 0), (crowded, determinism.processors())):
            with busy(others):
                for way in where:
                    where[way] += taken(way, count) / rounds
        for way in paired:
            paired[way] += in_pairs(way, count) / rounds
    return rows(alone, crowded, paired)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(steps(sys.argv[1], int(sys.argv[2]))))
    else:
        print(json.dumps(measured(ROUNDS, STEPS)))
