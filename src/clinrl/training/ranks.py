"""Several processes of one training, one a GPU: their shares of a step, what they agree on, and how they are started.

The first process, of rank 0, decides and writes; the others compute their share of each step and write nothing.
`main` is torch's launcher for one machine: it dies with the stage that started it, and ends with the code of the
process that failed first, where torch's own ends with 1 and a traceback.
"""

import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar, cast

from clinrl.config.machine import Machine, sequences_of
from clinrl.errors import ParamsError, Refused, TrainingError
from clinrl.runtime import gpus
from clinrl.runtime.worker_process import WORKER, die_with

T = TypeVar("T")
LOOKS_S = 0.2
"""Seconds between two looks at whether a process has failed."""
CLOSES_S = 5
"""Seconds that the others then have to end, before they are killed."""


class Followed(TrainingError):
    """Another process of this training refused, and says why."""


def share(rows: int, micro_batch: int | None, world: int, *, lowers: bool = True) -> tuple[int, int]:
    """Rows that each of `world` processes computes at once, and how often, so that a step keeps its `rows`.

    `micro_batch` bounds the first number (None: no bound), and is it where it may not be lowered, as for a loss that
    depends on it. Raises ParamsError where no share of whole rows has that size.
    """
    if rows % world:
        raise ParamsError(
            f"machine.yaml: processes is {world}, which does not divide the {rows} rows of a step; set it to a divisor"
        )
    each = rows // world
    most = min(micro_batch or each, each)
    micro = max(size for size in range(1, most + 1) if each % size == 0)
    if not lowers and micro != (micro_batch or rows):
        raise ParamsError(
            f"machine.yaml: processes is {world}, but the loss of this recipe depends on its micro_batch of "
            f"{micro_batch or rows}, which does not divide the {each} rows of each process; leave processes out"
        )
    return micro, each // micro


def processes_of(machine: Machine, spec: Mapping[str, Any]) -> int:
    """How many processes train a resolved spec here: the embedded scale, whose bytes are promised, has one."""
    return machine.processes if spec["scale"] == "full" else 1


def check(machine: Machine, spec: Mapping[str, Any], *, plays: bool) -> None:
    """Refuse what several processes cannot train. `plays`: the task is played in episodes. Raises ParamsError."""
    if processes_of(machine, spec) == 1:
        return
    there = len(gpus.visible())
    if there and machine.launcher is None and machine.processes > there:
        raise ParamsError(f"machine.yaml: processes is {machine.processes}, but {there} GPUs are visible; lower it")
    what = "rejection sampling" if spec["method"] == "rejection" else "GRPO in episodes"
    if spec["method"] == "rejection" or (plays and spec["method"] == "grpo"):
        raise ParamsError(
            f"machine.yaml: processes is {machine.processes}, but {what} runs in one; leave processes out to train "
            f"{spec['version']}"
        )


def micro_batch(machine: Machine, spec: Mapping[str, Any]) -> int | None:
    """Rows of a step that one process computes at once; None: all of them. Raises ParamsError as `share`."""
    trainer = spec["trainer"]
    rows, world = sequences_of(trainer), processes_of(machine, spec)
    most = machine.rows_at_once(trainer, rows, spec["scale"])
    return most if world == 1 else share(rows, most, world, lowers=trainer.get("loss_type") != "bnpo")[0]


def refuse_launcher() -> None:
    """Raise Refused under torchrun and its like, which would start the whole command once a process."""
    if is_launched():
        raise Refused(
            "clinrl starts the processes of a training itself; run the command without a launcher, and set processes "
            f"in machine.yaml to {os.environ.get('WORLD_SIZE', 'their number')}"
        )


def command(machine: Machine, spec: Mapping[str, Any], file: str, parent: int) -> list[str] | None:
    """How several processes are started; None for one without a launcher."""
    count = processes_of(machine, spec)
    if spec["scale"] == "full" and machine.launcher:
        return [*machine.launcher, "-m", WORKER, file]
    if count == 1:
        return None
    torchrun = ["--nproc_per_node", str(count), "--standalone", "-m", WORKER, file]
    return [sys.executable, "-m", __name__, str(parent), *torchrun]


def check_started(spec: Mapping[str, Any]) -> None:
    """Raise ParamsError unless as many processes were started as share the steps of a spec."""
    if not is_launched() or world() == spec["machine"]["processes"]:
        return
    if not leads():
        raise Followed
    raise ParamsError(
        f"{world()} processes of a training were started, but machine.yaml says {spec['machine']['processes']}; set "
        "processes to what the launcher starts, on all machines together"
    )


def is_launched() -> bool:
    """Whether a launcher started this process."""
    return "LOCAL_RANK" in os.environ


def world() -> int:
    """The number of processes of this training."""
    return int(os.environ["WORLD_SIZE"]) if is_launched() else 1


def rank() -> int:
    """The number of this process among those of the training, from 0."""
    return int(os.environ["RANK"]) if is_launched() else 0


def leads() -> bool:
    """Whether this process is the one that decides and writes."""
    return rank() == 0


def gathered(rows: list[T]) -> list[T]:
    """The rows of all processes, in the order of their ranks."""
    if world() == 1:
        return rows
    import torch

    found: list[list[T]] = [[] for _ in range(world())]
    torch.distributed.all_gather_object(found, rows)
    return [row for some in found for row in some]


def agreed(decide: Callable[[], T]) -> T:
    """What the first process decides, in all of them. All wait for it, and where it refuses, the others do too.

    Raises in the first process what `decide` raises, and Followed in the others if that is a refusal. Another error
    ends the first process, and the launcher ends the others.
    """
    if world() == 1:
        return decide()
    decision: T | None = None
    refusal: Refused | None = None
    if leads():
        try:
            decision = decide()
        except Refused as error:
            refusal = error
    found, is_refused = gathered([(decision, refusal is not None)])[0]
    if refusal is not None:
        raise refusal
    if is_refused:
        raise Followed("the first process of this training says why")
    return cast("T", found)


def main(arguments: list[str]) -> int:
    """Run torchrun with the arguments after the first, which is the process to die with. Returns an exit code.

    A request to stop is passed on to the processes as SIGINT: they stop at the end of a step. What torchrun itself
    sends where one has failed is SIGTERM, which ends them at once.
    """
    die_with(int(arguments[0]))
    import psutil
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    def stop(_number: int, _frame: object) -> None:
        for child in psutil.Process().children():
            child.send_signal(signal.SIGINT)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    logging.disable(logging.CRITICAL)  # of each process that fails torch says what `launch` says in one sentence
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # else torch warns that it sets it; `settle` sets torch's own
    own = ["--signals-to-handle", "SIGQUIT", "--shutdown-timeout", str(CLOSES_S), "--monitor-interval", str(LOOKS_S)]
    try:
        run(parse_args([*own, *arguments[1:]]))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        # A killed process makes the others fail, so it comes first; of the others the first process tells most.
        first = min(error.failures.values(), key=lambda failure: (failure.exitcode >= 0, failure.local_rank))
        if first.local_rank:
            print(f"clinrl: process {first.local_rank} of the training failed first", file=sys.stderr, flush=True)
        return first.exitcode if first.exitcode >= 0 else _die(-first.exitcode)
    return 0


def _die(number: int) -> NoReturn:
    """End by the signal that ended a process, so that who waits for this one learns of it."""
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
