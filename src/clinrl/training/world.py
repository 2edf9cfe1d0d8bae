"""The processes of one training: which of them this is, how they communicate, and how they are started.

Each process holds the whole model and computes its share of a step's rows; DistributedDataParallel averages the
gradients. Only process 0 writes. A single process needs none of this.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from clinrl.errors import Refused
from clinrl.tasks.base import get_task

T = TypeVar("T")
STATUS = "status.json"
OTHERS = "status-{}.json"
"""The file in which a process other than 0 writes that it failed, by its rank."""
TIMEOUT = timedelta(hours=2)
"""How long a process waits for another one that is alive but busy, for example with a held-out evaluation."""
STOPPED = 6
"""The exit code of a process that stopped on request and can be continued: none of a refusal, an alarm, a full disk."""
GRACE_S = 5
"""Seconds that the other processes have to end once one has failed, before they are killed."""
MEETING = "CLINRL_MEETING"
"""The environment variable with the file by which the processes of one machine find each other. Torch's TCP store, as
its launcher uses it, would listen on every address, and the processes' messages are pickled."""


@dataclass(frozen=True)
class World:
    """The processes of a training, numbered from 0."""

    size: int = 1
    rank: int = 0
    """The number of this process, and of its GPU."""

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
        """Whether `here` is true in any process. All must call it."""
        return any(self.gathered([here]))

    @contextmanager
    def joined(self, *, on_cpu: bool) -> Iterator[None]:
        """Connect to the other processes, by NCCL between GPUs and gloo between CPUs, and disconnect at the end."""
        if self.size == 1:
            yield
            return
        import torch

        torch.set_num_threads(1)  # threads of several processes would wait for each other
        store = torch.distributed.FileStore(os.environ[MEETING], self.size)  # type: ignore[attr-defined]
        store.set_timeout(TIMEOUT)  # torch does so only for a store of its own
        torch.distributed.init_process_group(
            "gloo" if on_cpu else "nccl", store=store, rank=self.rank, world_size=self.size, timeout=TIMEOUT
        )
        yield
        self.any(False)  # a barrier: no process ends before process 0 has written everything
        torch.distributed.destroy_process_group()


ALONE = World()


def shares_threads(spec: Mapping[str, Any]) -> bool:
    """Whether a training has the same bytes with fewer threads; not for episodes (`Task.shares_threads`).

    Nor with labels alone. There a row is cut to its answer. If a part of a batch is one row, MKL multiplies its 4 to 15
    tokens by a LoRA factor of rank 16, and has other kernels for that with one thread.
    """
    return get_task(spec["task"]).shares_threads and not spec.get("labels_only")


def is_on_cpu(scale: str) -> bool:
    """Whether a training runs on the CPU: at the embedded scale, for reproducible bytes, and where there is no GPU."""
    import torch

    return scale == "embedded" or not torch.cuda.is_available()


def world_of(environment: Mapping[str, str], machine: Mapping[str, Any]) -> World:
    """The world that a launcher's environment variables name. Raises Refused if its size is not the spec's."""
    size, wanted = int(environment.get("WORLD_SIZE", 1)), machine["processes"]
    if size != wanted:
        raise Refused(
            f"{size} processes were started for a training by {wanted}; set processes in machine.yaml, and give "
            "`clinrl train` again without a launcher"
        )
    return World(size, int(environment.get("RANK", 0))) if size > 1 else ALONE


def check_alone(environment: Mapping[str, str]) -> None:
    """Raise Refused if a launcher started this command, since each copy of it would start all processes."""
    if "LOCAL_RANK" in environment or environment.get("WORLD_SIZE", "1") != "1":
        raise Refused(
            "a launcher such as torchrun started this command, which starts the processes of a training itself; set "
            "processes in machine.yaml, and give the command without a launcher"
        )


def main(arguments: list[str]) -> int:
    """Start the processes of a training, and end them all once one has failed. Returns the exit code of the failed one,
    or 128 plus the number of the signal that ended it.

    Arguments: the spec, and the id of a process to die with. The first SIGTERM or SIGINT is passed on and asks the
    processes to stop after their step; the second kills them.
    """
    from clinrl.runtime.starter import die_with
    from clinrl.runtime.worker_process import WORKER

    spec, parent = arguments
    die_with(int(parent))
    size = json.loads(Path(spec).read_text(encoding="utf-8"))["machine"]["processes"]
    received = list[int]()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: received.append(number))
    with tempfile.TemporaryDirectory(prefix="clinrl-world-") as folder:
        command = [sys.executable, "-m", WORKER, spec, str(os.getpid())]
        children = [subprocess.Popen(command, env=os.environ | place(size, rank, folder)) for rank in range(size)]
        code = _first_failure(children, received)
        _end(children)
        deadline = time.monotonic() + GRACE_S
        for child in children:
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline - time.monotonic()))
            child.kill()
            child.wait()
    return code if code >= 0 else 128 - code


def _first_failure(children: Sequence["subprocess.Popen[bytes]"], received: Sequence[int]) -> int:
    """Wait until one process fails or all end, and pass on signals that are received. Returns the exit code, or 0."""
    passed_on = 0
    while None in (codes := [child.poll() for child in children]) and not any(codes):
        time.sleep(0.1)
        if len(received) > passed_on:
            passed_on = len(received)
            _end(children, kill=passed_on > 1)
    # A signal, being negative, precedes its effects; 1 is also how a process ends that has lost another.
    return min((code for code in codes if code), key=lambda code: (code == 1, code), default=0)


def _end(children: Sequence["subprocess.Popen[bytes]"], *, kill: bool = False) -> None:
    for child in children:
        child.send_signal(signal.SIGKILL if kill else signal.SIGTERM)


def place(size: int, rank: int, folder: str) -> dict[str, str]:
    """The environment variables by which a process knows its number, named as torchrun does, and finds the others."""
    sizes = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    numbers = {"RANK": rank, "LOCAL_RANK": rank, **sizes, "OMP_NUM_THREADS": 1}
    named = {name: str(number) for name, number in numbers.items()}
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    return named | {MEETING: f"{folder}/store", "GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
