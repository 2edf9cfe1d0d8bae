"""`dvc repro` with stages side by side: each begins as soon as the stages that it depends on have ended.

DVC runs one stage after another. Here each stage has a thread. Only one thread at a time, which holds the project's
lock, does DVC's own work (compare, hash, commit, write `dvc.lock`): only the commands of stages run at once. The first
failure, or an interrupt, ends the other commands; the same `dvc repro`, given again, continues them.

A small model gains little from a second thread, so a stage beside others computes with fewer threads
(`determinism.share`), and a stage alone with all. A stage whose sums depend on the number of threads keeps them all,
and they sleep while they wait (`determinism.settle`).
"""

import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from dvc.env import DVC_STAGE
from dvc.repo import reproduce
from dvc.stage import run
from dvc.stage.exceptions import StageCmdFailedError
from dvc.utils.serialize import load_yaml

from clinrl.artifacts import write_text
from clinrl.runtime import determinism
from clinrl.runtime.child import signal_group

AT_ONCE = 2
"""The most stages at once: a lineage seldom has more that are ready, and a training takes gigabytes of memory."""


def install() -> None:
    """Make this process's `dvc repro` run stages side by side, if there are two processors or more.

    Not at the full scale, whose stages share a GPU.
    """
    at_once = min(AT_ONCE, determinism.processors())
    if at_once > 1:
        reproduce._reproduce = partial(_reproduce, at_once, reproduce._reproduce)


def _reproduce(at_once: int, in_turn: Callable[..., Any], stages: list[Any], graph: Any = None, **options: Any) -> Any:
    """In place of DVC's `_reproduce`, which is `in_turn`: same arguments, same result, which is the stages that ran."""
    usual = {"on_error": "fail", "force_downstream": False, "dry": False, "interactive": False}
    is_usual = graph is not None and {name: options.get(name) for name in usual} == usual
    if not is_usual or load_yaml(Path(stages[0].repo.root_dir) / "params.yaml").get("scale") == "full":
        return in_turn(stages, graph=graph, **options)
    given = {name: value for name, value in options.items() if name not in ("on_error", "force_downstream")}
    repo = stages[0].repo
    with tempfile.TemporaryDirectory(prefix="clinrl-") as folder:
        commands = Commands(Path(folder) / "running")
        run._run = commands.run

        def bring_up_to_date(stage: Any) -> Any:
            with commands.turn, repo.lock:  # DVC itself releases the lock while a command runs
                return reproduce._reproduce_stage(stage, upstream=[*graph.successors(stage)], **given)

        repo.lock.unlock()  # the caller's: each thread takes it for its turn
        try:
            with ThreadPoolExecutor(at_once) as pool:
                try:
                    return [*_in_order(stages, graph, at_once, lambda stage: pool.submit(bring_up_to_date, stage))]
                except BaseException:  # an interrupt among them; the pool waits for its threads
                    commands.end()
                    raise
        finally:
            repo.lock.lock()


def _in_order(stages: list[Any], graph: Any, at_once: int, begin: Callable[[Any], Future[Any]]) -> Iterator[Any]:
    """Run each stage after those that it depends on, else in DVC's order; yield the stages that ran.

    Raises DVC's error, which names the stage, at the first that fails.
    """
    place = {stage: number for number, stage in enumerate(stages)}
    sorter = TopologicalSorter({stage: place.keys() & {*graph.successors(stage)} for stage in stages})
    sorter.prepare()
    ready, running = list[Any](), dict[Future[Any], Any]()
    while sorter.is_active():
        ready = sorted([*ready, *sorter.get_ready()], key=place.__getitem__)
        free = at_once - len(running)
        running |= {begin(stage): stage for stage in ready[:free]}
        ready = ready[free:]
        for ended in wait(running, return_when=FIRST_COMPLETED).done:
            stage = running.pop(ended)
            if error := ended.exception():
                reproduce._raise_error(error, stage)
            sorter.done(stage)
            if ended.result():
                yield stage


class Commands:
    """The commands of stages that run now. Their number is in the file `count`, which `determinism.RUNNING` names."""

    def __init__(self, count: Path) -> None:
        self.count = count
        self.turn = threading.Lock()
        """Held by the thread that does DVC's own work."""
        self.changing = threading.Lock()
        self.running: set[subprocess.Popen[str]] = set()
        self.is_over = False

    def run(self, executable: str | None, command: str, *, env: dict[str, str], **popen: Any) -> None:
        """In place of DVC's `_run`: run a stage's command, while other threads do DVC's own work.

        Its lines are printed after the stage's name. The caller holds `turn`, and the project's lock is free. Raises
        StageCmdFailedError as DVC does.
        """
        name, began_s = env[DVC_STAGE], time.monotonic()
        env |= {"PYTHONUNBUFFERED": "1", determinism.RUNNING: str(self.count)}
        self.turn.release()
        try:
            with self._start_process(run._make_cmd(executable, command), env=env, **popen) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    _say(f"{name} | {line.rstrip()}")
            with self.changing:
                self.running.remove(process)
                write_text(self.count, str(len(self.running)))
        finally:
            self.turn.acquire()
        if process.returncode:
            if self.is_over:
                _say(f"{name} was ended; the same command goes on with it")
            raise StageCmdFailedError(command, process.returncode)
        _say(f"{name} took {time.monotonic() - began_s:.1f} s")

    def _start_process(self, words: Any, **popen: Any) -> "subprocess.Popen[str]":
        """Start a process in a group of its own, so that `end` reaches all its children; not after `end`."""
        with self.changing:
            if self.is_over:
                raise KeyboardInterrupt
            write_text(self.count, str(len(self.running) + 1))  # before the process begins, since it reads the file
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                errors="replace", process_group=0, **popen,
            )  # fmt: skip
            self.running.add(process)
        return process

    def end(self) -> None:
        """Ask the commands that run to end, and start no more. SIGINT would be ignored below `make demo &`."""
        with self.changing:
            self.is_over = True
            for process in self.running:
                signal_group(process.pid, signal.SIGTERM)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
