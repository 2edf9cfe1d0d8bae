"""Prefect and MLflow servers on loopback, which end with the process that started them.

A flow that is started on its own gets a private Prefect server over the project's database: the one that Prefect would
start by itself outlives a killed flow, and forgets who held a concurrency slot.
"""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from clinrl import child
from clinrl.errors import Refused

HOST = "127.0.0.1"
LOGS = Path(".clinrl/servers")
PREFECT_HOME = Path(".clinrl/prefect")
"""Prefect's database and settings. The project's own, so that another project's runs hold no slot of this one."""
STARTUP_S = 120.0
"""Seconds that a server may take until it answers. A new database costs ten on an idle machine."""
GRACE_S = 4.0
"""Seconds that a server has to write down what it knows when the process that started it is gone."""
PRIVATE = "CLINRL_PRIVATE_PREFECT"
"""Set where the Prefect server is private to this process, so that nobody can be asked anything through it."""

_SETTINGS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
    # In memory, a lease is forgotten with the server and its slot stays taken for good.
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
}


def configure() -> None:
    """Settle Prefect's environment before it is imported. What the user has set stays."""
    os.environ.setdefault("PREFECT_HOME", str(PREFECT_HOME.resolve()))
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", str(int(STARTUP_S)))
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)


def begin_private() -> "subprocess.Popen[str] | None":
    """Begin to start a private Prefect server and point this process to it; None where a server is configured.

    It answers only once `wait` has returned.
    """
    if os.environ.get("PREFECT_API_URL"):
        return None
    port = free_port()
    os.environ["PREFECT_API_URL"] = f"http://{HOST}:{port}/api"
    os.environ[PRIVATE] = "1"
    return prefect(port, ui=False)


def health() -> str:
    """The URL at which the configured Prefect server says that it is well."""
    return f"{os.environ['PREFECT_API_URL']}/health"


def prefect(port: int, *, ui: bool = True) -> "subprocess.Popen[str]":
    """Start a Prefect server on a port of loopback."""
    app = ["--factory", "prefect.server.api.server:create_app", "--lifespan", "on", "--log-level", "error"]
    command = [sys.executable, "-m", "uvicorn", *app, "--host", HOST, "--port", str(port)]
    url = f"http://{HOST}:{port}/api"
    return _start("prefect", command, {"PREFECT_UI_ENABLED": str(int(ui)), "PREFECT_UI_API_URL": url})


def mlflow(port: int) -> "subprocess.Popen[str]":
    """Start an MLflow server on a port of loopback, over the project's own store."""
    from clinrl import tracking

    store = tracking.STORE.absolute()
    tracking.prepared(store)
    command = [
        *(sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"),
        # Clients on this machine read and write files by their own paths, so that a run is the same through the server
        # and through the file.
        *("--backend-store-uri", f"{tracking.SQLITE}{store}", "--no-serve-artifacts"),
        *("--default-artifact-root", (store.parent / tracking.BESIDE).as_uri()),
    ]
    return _start("mlflow", command, {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"})


def wait(name: str, server: "subprocess.Popen[str]", health: str) -> None:
    """Wait until a server answers at a URL. Raises Refused if it ends or does not answer in time; it is ended then."""
    deadline = time.monotonic() + STARTUP_S
    while not _answers(health):
        if server.poll() is not None or time.monotonic() > deadline:
            ended = server.poll() is not None
            child.end(server)
            what = f"ended with code {server.returncode}" if ended else f"did not answer within {STARTUP_S:.0f} s"
            raise Refused(f"the {name} server {what}; {_log(name)} says why")
        time.sleep(0.05)


def is_free(port: int) -> bool:
    """Whether nobody listens on a port of loopback."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do; a closed one's port is free
        return probe.connect_ex((HOST, port)) != 0


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _start(name: str, command: list[str], settings: dict[str, str]) -> "subprocess.Popen[str]":
    _log(name).parent.mkdir(parents=True, exist_ok=True)
    with _log(name).open("w") as log:
        return child.start(command, grace_s=GRACE_S, stdout=log, stderr=log, env=os.environ | settings)


def _log(name: str) -> Path:
    return LOGS / f"{name}.log"


def _answers(url: str) -> bool:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy knows nothing of this loopback
    try:
        with direct.open(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
