"""Sends a training's metrics to MLflow while it runs: `launch.stage` starts it as a module, with a folder.

The trainer adds a line a step to a file and waits for nobody; this process reads the file, sends what is new every two
seconds, and says at the end how the run ended. Nothing depends on it: what it could not send is filled in from
`history.jsonl` when the version is registered.
"""

import json
import logging
import os
import select
import signal
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clinrl import paths
from clinrl.artifacts import whole_lines
from clinrl.errors import RegistryError, echo, mask
from clinrl.runtime import determinism, starter
from clinrl.tracking import mlflow_store
from clinrl.tracking.mlflow_store import connect, known_points, log_params, log_points, points, run_of, writing

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

EVERY_S = 2.0
"""Between two batches."""
REST_S = 10.0
"""After a failure, before the server is asked again."""
LAST_S = 5
"""What this process has left once its training has ended."""
ALONE_S = 0.5
"""What it has left once its trainer is dead."""
HURRY = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "5", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
UNKNOWN_END = "KILLED"
"""How a run ended whose trainer was gone before it could say so."""


def main(arguments: list[str]) -> int:
    """Follow the training in a folder until standard input ends, which holds MLflow's word for how the run ended."""
    folder = Path(arguments[0])
    os.nice(10)  # the processors are the trainer's; at 19 it would not notice its end for long
    starter.watch(os.getppid(), _leave)
    os.environ.update(HURRY)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    follow(folder, sys.stdin.fileno())
    return 0


def follow(folder: Path, ends: int) -> None:
    """Send the lines of `folder` as they come, and the run's last status once the descriptor `ends` speaks or closes.

    A store that does not take them is named once on stderr, and tried again later.
    """
    training = json.loads((folder / paths.TRAINING_FILE).read_text(encoding="utf-8"))
    runs: tuple[Run, Run] | None = None
    known: set[tuple[str, int]] = set()
    rest_until, warned, read_bytes = 0.0, False, -1
    status: str | None = None
    size_bytes = 0
    while status is None:
        status = _read_status(ends)
        with suppress(FileNotFoundError):
            size_bytes = (folder / paths.LIVE_FILE).stat().st_size
        if status is None and (time.monotonic() < rest_until or size_bytes == read_bytes):
            continue
        try:
            with connect() as client:
                if runs is None:
                    runs = _join(client, folder.name, training)
                    known = {point for run in runs for point in known_points(client, run, run.data.metrics)}
                new = [point for point in points(whole_lines(folder / paths.LIVE_FILE)) if point[:2] not in known]
                for run, is_own in zip(runs, (True, False), strict=True):
                    mine = [point for point in new if mlflow_store.stands_in(point[0], runs[0]) == is_own]
                    log_points(client, run.info.run_id, mine)
                    if status is not None:
                        client.set_terminated(run.info.run_id, status)
                known |= {point[:2] for point in new}
                read_bytes = size_bytes
        except RegistryError as error:
            # A batch may have arrived although its answer did not: what the run holds is asked anew.
            runs, rest_until = None, time.monotonic() + REST_S
            if not warned:
                _warn(str(error))
                warned = True


def _join(client: "MlflowClient", key: str, training: dict[str, Any]) -> tuple["Run", "Run"]:
    """The run of this training, which an earlier attempt may have begun, and the one below it, as running ones."""
    with writing(client):
        run = run_of(client, training["task"], key, training["version"])
        runs = run, mlflow_store.details_of(client, run)
    for one in runs:
        if one.info.status != "RUNNING":
            client.update_run(one.info.run_id, status="RUNNING")
    log_params(client, run, training["recipe"])
    return runs


def _read_status(ends: int) -> str | None:
    """How the run ended, or None if it goes on; waits until the next batch is due."""
    ready, _, _ = select.select([ends], [], [], EVERY_S)
    if not ready:
        return None
    signal.alarm(LAST_S)  # nobody waits for this process any more
    return os.read(ends, 64).decode().strip() or UNKNOWN_END


def _leave() -> None:
    time.sleep(ALONE_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _warn(why: str) -> None:
    echo(f"no live metrics: {why}; `clinrl register` fills them in")


if __name__ == "__main__":
    sys.excepthook = lambda kind, error, _: _warn(mask(f"{kind.__name__}: {error}"))
    determinism.pin()
    sys.exit(main(sys.argv[1:]))
