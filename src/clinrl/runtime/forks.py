"""Parts of one stage side by side, each in a fork of its process: nothing is imported or loaded twice."""

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import TypeVar

from clinrl.errors import Refused
from clinrl.runtime import determinism
from clinrl.runtime.forkserver import Fork, has_gpu
from clinrl.runtime.worker_process import die_with

T = TypeVar("T")


def results(programs: Sequence[Callable[[], T]]) -> list[T]:
    """What programs return, in order. Where this stage has several processors, as many run at once, each in a fork.

    A fork computes with one thread, and ends with this process. What a program raises is raised here, or Refused where
    its fork was killed.
    """
    at_once = determinism.own_processors()
    if at_once < 2 or sys.platform != "linux" or has_gpu():
        return [program() for program in programs]

    def send(program: Callable[[], T], there: Connection) -> int:
        determinism.use_one_thread()
        try:
            there.send((program(), None))
        except Exception as error:  # noqa: BLE001  raised where it was asked for
            there.send((None, error))
        return 0

    waiting, running, found = [*enumerate(programs)], dict[Connection, tuple[int, Fork]](), dict[int, T]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                place, program = waiting.pop(0)
                here, there = Pipe(duplex=False)
                running[here] = place, Fork(partial(send, program, there), partial(die_with, os.getpid()))
                there.close()
            for here in [end for end in wait([*running]) if isinstance(end, Connection)]:
                value, error = here.recv()
                if error is not None:
                    raise error
                place, fork = running.pop(here)
                found[place] = value
                fork.join()
    except EOFError:
        raise Refused("a process of this stage was killed; the same command begins the stage again") from None
    finally:
        for _, fork in running.values():
            fork.kill()
            fork.join()
    return [found[place] for place in range(len(programs))]
