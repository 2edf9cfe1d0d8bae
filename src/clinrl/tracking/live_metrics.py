"""Sends the metrics of a training to MLflow while it runs, in a process that `launch.stage` starts with a folder.

The trainer adds a line per step to a file and never waits. This process reads the file, sends new lines every two
seconds, and at the end the status of the run. Nothing depends on it: when the version is registered, missing metrics
are added from `history.jsonl`.
"""

import json
import logging
import os
import platform
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
from clinrl.runtime import determinism, gpus, starter
from clinrl.tracking import mlflow_store
from clinrl.tracking.mlflow_store import connect, known_points, log_params, log_points, points, run_of, writing

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

EVERY_S = 2.0
"""Seconds between two batches."""
REST_S = 10.0
"""Seconds after a failure before the next attempt."""
LAST_S = 5
"""Seconds after the end of the training until this process is killed."""
ALONE_S = 0.5
"""Seconds after the death of the parent process until this process kills itself."""
HURRY = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "5", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
UNKNOWN_END = "KILLED"
"""The status of a run if the parent process died before it could send one."""


def main(arguments: list[str]) -> int:
    """Follow the training in a folder until standard input, from which it reads MLflow's status of the run, ends."""
    folder = Path(arguments[0])
    sys.excepthook = lambda kind, error, _: _warn(mask(f"{kind.__name__}: {error}"))
    os.nice(10)  # leaves the processors to the trainer; at 19 this process would notice the end too late
    starter.watch(os.getppid(), _leave)
    os.environ.update(HURRY)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    follow(folder, 0)
    return 0


def follow(folder: Path, ends: int) -> None:
    """Send the lines of `folder` as they are written, and the run's final status when the descriptor `ends` has it.

    If `ends` closes without a status, `UNKNOWN_END` is sent. If a store refuses the lines, a warning on stderr names it
    once, and it is tried again later.
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
                    chosen = [point for point in new if mlflow_store.belongs_in(point[0], runs[0]) == is_own]
                    log_points(client, run.info.run_id, chosen)
                    if status is not None:
                        client.set_terminated(run.info.run_id, status)
                known |= {point[:2] for point in new}
                read_bytes = size_bytes
        except RegistryError as error:
            # A batch may have arrived although its response did not, so the run's points are fetched again.
            runs, rest_until = None, time.monotonic() + REST_S
            if not warned:
                _warn(str(error))
                warned = True


def _join(client: "MlflowClient", key: str, training: dict[str, Any]) -> tuple["Run", "Run"]:
    """The run of this training, which may be one of an earlier attempt, and the run below it, both set to RUNNING."""
    with writing(client):
        run = run_of(client, training["task"], key, training["version"])
        runs = run, mlflow_store.details_of(client, run)
    for one in runs:
        if one.info.status != "RUNNING":
            client.update_run(one.info.run_id, status="RUNNING")
    client.set_tag(run.info.run_id, "machine", ", ".join((platform.node(), *(gpu.name for gpu in gpus.visible()))))
    log_params(client, run, training["recipe"])
    return runs


def _read_status(ends: int) -> str | None:
    """The final status of the run, or None if the run continues. Waits until the next batch is due."""
    ready, _, _ = select.select([ends], [], [], EVERY_S)
    if not ready:
        return None
    signal.alarm(LAST_S)  # no process waits for this one from now on
    return os.read(ends, 64).decode().strip() or UNKNOWN_END


def _leave() -> None:
    time.sleep(ALONE_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _warn(why: str) -> None:
    echo(f"no live metrics: {why}; `clinrl register` fills them in")


if __name__ == "__main__":
    determinism.pin()
    sys.exit(main(sys.argv[1:]))
