"""The manifest of a task's environment, which OpenEnv's own tools read and `openenv validate` checks."""

import math
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from clinrl import paths
from clinrl.artifacts import dump_yaml, replaced, write_text
from clinrl.config.params import Params
from clinrl.data.reward_audit import HONEST
from clinrl.models.rollout import tools
from clinrl.tasks.base import Task, get_task

CASES = 100
"""Cases of the pool mine on which policies that read no case are scored, for the floor of the reward."""


def stage(params: Params, name: str, *, out: Path | None = None) -> None:
    """Write `openenv.yaml` into a folder named after the task, and print the folder."""
    task, target = get_task(name), (out or paths.EXPORTS) / f"openenv_{name}"
    reward: Any = task.Reward()
    version = str(task.version)
    tested = {"declared_tools": list(tools(task.episodes.environment))} if task.episodes else {}
    with replaced(target, "clinrl export openenv") as folder:
        write_text(folder / "openenv.yaml", dump_yaml({
            "spec_version": 1,
            "name": name,
            "version": version,
            "type": "space",
            "runtime": "fastapi",
            "app": f"clinrl.tasks.openenv:{name}",
            "port": 8000,
            "validation": {
                "reward": {
                    "range": [reward.low, reward.high],
                    "oracle_tolerance": 0.0,
                    "floor_margin": math.floor(100 * (reward.high - _floor(task))) / 100,
                },
                "resources": {"cpu": 1.0, "memory_mb": 1024, "disk_mb": 512, "episode_timeout_s": 600.0},
                "network": {"mode": "no-network"},
                "capabilities": {"verifier": {"kind": "reward_channel"}, **tested},
                "task_distribution": {"dataset_version": version},
                "types": {"tags": [name]},
            },
        }))  # fmt: skip
    print(target)


def _floor(task: Task) -> float:
    """The mean reward of the best policy that reads no case."""
    drawn = list(task.cases(CASES, 0, pool="mine", mix=task.checks.mixes[0]))
    lazy = [policy for name, policy in task.policies().items() if name not in (HONEST, *task.checks.readers)]
    return max(
        fmean(task.score(case, policy(case, Random(number)), task.Reward()).total for number, case in enumerate(drawn))
        for policy in lazy
    )
