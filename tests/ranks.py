"""Several processes of one training, forked from this one instead of started by torchrun: their libraries are loaded."""

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from clinrl.runtime import forkserver
from clinrl.training import launch, worker


def run(spec: Path, size: int) -> list[int]:
    """Run the worker's processes; the exit code of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def one(rank: int) -> int:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        if size > 1:
            os.environ.update({name: str(value) for name, value in place.items()})
        return worker.main([str(spec)])

    forks = [forkserver.Fork(lambda rank=rank: one(rank)) for rank in range(size)]
    return [fork.wait() for fork in forks]


@contextmanager
def forked() -> Iterator[None]:
    """Train in forks, as many as machine.yaml says."""

    def worked(spec: Path, torchrun: Sequence[str] = ()) -> int:
        size = int(torchrun[0].rpartition("=")[2]) if torchrun else 1
        return max(run(spec, size), key=abs)

    with mock.patch.object(launch, "run_worker", worked):
        yield
