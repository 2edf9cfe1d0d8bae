"""The processes of one training: which of them this is, what they tell each other, and how they are started.

Each holds the whole model and computes its share of a step's rows, whose gradients DistributedDataParallel averages.
Process 0 alone writes. One process is a world of one, in which nothing here does anything.
"""

import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from clinrl.config.machine import Machine
from clinrl.errors import Refused

T = TypeVar("T")
TIMEOUT = timedelta(hours=2)
"""How long a process waits for another that lives, such as one that looks at held-out cases. A dead one ends all."""
GRACE_S = 5
"""Seconds that the others have to end once one has failed, before torchrun kills them."""


@dataclass(frozen=True)
class World:
    """The processes of a training, as torchrun numbers them from 0."""

    size: int = 1
    rank: int = 0
    """Of this process among all."""
    local: int = 0
    """Of this process among those of its machine."""

    @property
    def is_main(self) -> bool:
        """Whether this is process 0, which writes."""
        return self.rank == 0

    def gathered(self, items: Sequence[T]) -> list[T]:
        """The items of all processes, in the order of their ranks. All must call it."""
        if self.size == 1:
            return list(items)
        import torch

        found: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(found, list(items))
        return [item for some in found for item in some]

    def any(self, here: bool) -> bool:
        """Whether it is so in any process. All must call it."""
        return any(self.gathered([here]))

    @contextmanager
    def joined(self, *, on_cpu: bool) -> Iterator[None]:
        """Meet the other processes, by NCCL between GPUs and gloo between CPUs, and part from them."""
        if self.size == 1:
            yield
            return
        import torch

        torch.set_num_threads(1)  # those of several processes would wait for each other's processors
        torch.distributed.init_process_group("gloo" if on_cpu else "nccl", timeout=TIMEOUT)
        yield
        self.any(False)  # none ends before process 0 has written all: torchrun ends those that go on
        torch.distributed.destroy_process_group()


ALONE = World()


def is_on_cpu(scale: str) -> bool:
    """Whether a training computes on the CPU: at the embedded scale, where bytes can be promised, and without a GPU."""
    import torch

    return scale == "embedded" or not torch.cuda.is_available()


def world_of(environment: Mapping[str, str], machine: Mapping[str, Any]) -> World:
    """The world that a launcher's environment names. Raises Refused if it is not the one that the spec is for."""
    size, wanted = int(environment.get("WORLD_SIZE", 1)), machine["processes"] * machine["nodes"]
    if size != wanted:
        raise Refused(
            f"{size} processes were started for a training by {wanted}; set processes and nodes in machine.yaml, and "
            "give `clinrl train` again without a launcher"
        )
    return World(size, int(environment.get("RANK", 0)), int(environment.get("LOCAL_RANK", 0))) if size > 1 else ALONE


def check_alone(environment: Mapping[str, str]) -> None:
    """Refuse a launcher around a command that starts its processes itself: each of them would start them all."""
    if "LOCAL_RANK" in environment or environment.get("WORLD_SIZE", "1") != "1":
        raise Refused(
            "a launcher such as torchrun started this command, which starts the processes of a training itself; set "
            "processes in machine.yaml, and give the command without a launcher"
        )


def torchrun(machine: Machine, node: int = 0) -> list[str]:
    """The options with which torchrun starts the processes of one node."""
    options = [f"--nproc-per-node={machine.processes}"]
    if machine.address is not None:
        host, port = machine.address.rsplit(":", 1)
        options += [
            f"--nnodes={machine.nodes}",
            f"--node-rank={node}",
            f"--master-addr={host}",
            f"--master-port={port}",
        ]
    return options


def say_how_to_join(machine: Machine, worker: str, spec: Path) -> None:
    """Say on stderr by which command each other node takes part."""
    for node in range(1, machine.nodes):
        command = f"torchrun {' '.join(torchrun(machine, node))} -m {worker} {spec}"
        print(f"clinrl: another node joins by `{command}`", file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    """Run torchrun with these arguments, of which the first is the process to die with; the failed process's code.

    SIGTERM and SIGINT are passed on, and ask for an end at the next step: torchrun itself would kill the processes
    after some seconds.
    """
    import psutil
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    from clinrl.runtime.starter import die_with

    die_with(int(arguments[0]))

    def ask(number: int, _frame: object) -> None:
        for child in psutil.Process().children():
            child.send_signal(signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ask)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, with eight lines about it
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # what failed is in the status, or said already
    options = ["--signals-to-handle=SIGQUIT", f"--shutdown-timeout={GRACE_S}", *arguments[1:]]
    try:
        run(parse_args([*options, str(os.getpid())]))  # type: ignore[no-untyped-call]
    except ChildFailedError as failed:
        code: int = failed.get_first_failure()[1].exitcode
        return code if code >= 0 else 128 - code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
