"""A real MLflow server for tests, which keeps the files of runs and models itself."""

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from processes import eventually

PATIENCE_S = 90
"""For what takes seconds on an idle machine."""


@contextmanager
def serving(folder: Path, port: int) -> Iterator[Callable[[], None]]:
    """A tracking server on loopback whose files are in a folder; yields a function that kills it."""
    command = [
        sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder / "artifacts"),
    ]  # fmt: skip
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    environment.pop("MLFLOW_TRACKING_URI", None)
    with (folder / "server.log").open("ab") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True, cwd=folder)

    def kill() -> None:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()

    try:
        eventually(lambda: _answers(f"http://127.0.0.1:{port}/health"), PATIENCE_S)
        yield kill
    finally:
        kill()


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False
