"""Prefect and MLflow servers on loopback. They ask for a password, and end with the process that started them.

A flow that is started on its own gets a private Prefect server over the project's database: the one that Prefect would
start by itself outlives a killed flow, and forgets the holders of concurrency slots.
"""

import os
import socket
import subprocess
import sys
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from clinrl import paths
from clinrl.artifacts import locked
from clinrl.errors import Refused
from clinrl.runtime import child
from flows import credentials

if TYPE_CHECKING:
    from clinrl.runtime.guard import Fence

HOST = "127.0.0.1"
PREFECT_HOME = Path(".clinrl/prefect")
"""Prefect's database and settings. The project's own, so that another project's runs hold no slot of this one."""
STARTUP_S = 120.0
"""Seconds that a server may take until it answers. A new database costs ten on an idle machine."""
GRACE_S = 4.0
"""Seconds that a server has to finish its writes after the process that started it is gone."""
LOGS_S = 7 * 86400.0
"""Seconds that the log of a server is kept after its last line."""
PRIVATE = "CLINRL_PRIVATE_PREFECT"
"""The variable that is set if the Prefect server is private to this process, so that nobody can answer through it."""
MLFLOW_LOGIN = "CLINRL_MLFLOW_LOGIN"
"""The variable with the user and the password that the MLflow server asks for."""
MLFLOW_STORE = "CLINRL_MLFLOW_STORE"
"""The variable with the SQLite file that the MLflow server serves."""

_SETTINGS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
    # A watch runs every few minutes. Runs older than 90 days are deleted; the audit log is the record.
    "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
}


def configure() -> None:
    """Set Prefect's environment variables before Prefect is imported. Values that the user has set stay."""
    os.environ.setdefault("PREFECT_HOME", str(PREFECT_HOME.resolve()))
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", str(int(STARTUP_S)))
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)


def is_configured() -> bool:
    """Whether the environment names a Prefect server."""
    return bool(os.environ.get("PREFECT_API_URL"))


def begin_private() -> "subprocess.Popen[str] | None":
    """Start a private Prefect server and point this process to it; None if a server is configured.

    The server answers only once `wait` has returned.
    """
    if is_configured():
        return None
    from clinrl.runtime.guard import address_of, listen

    password = credentials.new().PREFECT_API_AUTH_STRING
    with listen(HOST, 0) as listening:
        url = f"{address_of(listening)}/api"
        os.environ |= {"PREFECT_API_URL": url, "PREFECT_API_AUTH_STRING": password, PRIVATE: "1"}
        return prefect(listening, password, ui=False)


def health() -> str:
    """The health URL of the configured Prefect server."""
    return f"{os.environ['PREFECT_API_URL']}/health"


def prefect(listening: socket.socket, password: str, *, ui: bool = True) -> "subprocess.Popen[str]":
    """Start a Prefect server behind a socket that listens on loopback, with its authentication string."""
    from clinrl.runtime.guard import address_of

    own = address_of(listening)
    settings = {
        "PREFECT_UI_ENABLED": str(int(ui)),
        "PREFECT_UI_API_URL": f"{own}/api",
        "PREFECT_SERVER_API_AUTH_STRING": password,
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": own,
        "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true",
    }
    return _start("prefect", listening, settings)


def mlflow(listening: socket.socket, login: str) -> "subprocess.Popen[str]":
    """Start an MLflow server behind a socket that listens on loopback, over the project's own store, with a user and a
    password.

    Clients on this machine read and write files by their own paths, so that a run is the same through the server and
    through the file.
    """
    from clinrl.tracking import mlflow_store

    store = mlflow_store.STORE.absolute()
    mlflow_store.prepare(store)
    settings = {MLFLOW_LOGIN: login, MLFLOW_STORE: str(store)}
    return _start("mlflow", listening, settings | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"})


def prefect_app() -> "Fence":
    """Prefect behind the fence. Prefect checks its authentication string, which no browser sends by itself."""
    from prefect.server.api.server import create_app

    from clinrl.runtime.guard import Fence

    return Fence(create_app())


def mlflow_app() -> "Fence":
    """MLflow behind the fence, which checks the password: MLflow would need a second database of users to do so."""
    from clinrl.runtime.guard import Fence
    from clinrl.tracking import mlflow_store

    return Fence(mlflow_store.application(Path(os.environ[MLFLOW_STORE])), login=os.environ.pop(MLFLOW_LOGIN))


def starting() -> AbstractContextManager[object]:
    """Wait until no other process of this project starts a server: two cannot create one database at once."""
    return locked(paths.LOCKS / "servers.lock")


def wait(name: str, server: "subprocess.Popen[str]", health: str, login: str = "") -> None:
    """Wait until a server answers at a URL. Raises Refused if it ends, or is ended since it did not answer in time.

    A caller with a `login` must keep the server's socket open meanwhile: else another process could take the port of a
    server that ended, and receive the login.
    """
    deadline = time.monotonic() + STARTUP_S
    while True:
        check_runs(name, server)
        if time.monotonic() > deadline:
            child.end(server)
            raise Refused(f"the {name} server did not answer within {STARTUP_S:.0f} s; {_log(name)} says why")
        if _answers(health, login) and server.poll() is None:  # as long as it runs, nobody else has its port
            return
        time.sleep(0.05)


def check_runs(name: str, server: "subprocess.Popen[str]") -> None:
    """Raise Refused if a server ended."""
    if server.poll() is not None:
        child.end(server)
        raise Refused(f"the {name} server ended with code {server.returncode}; {_log(name)} says why")


def _start(name: str, listening: socket.socket, settings: dict[str, str]) -> "subprocess.Popen[str]":
    app = ["--factory", f"flows.servers:{name}_app", "--app-dir", str(Path(__file__).parents[1])]
    says = ["--lifespan", "on", "--log-level", "error"]
    ends = ["--timeout-graceful-shutdown", "2"]  # seconds; an open page elsewhere would keep it for ever
    command = [sys.executable, "-m", "uvicorn", *app, *says, *ends, "--fd", str(listening.fileno())]
    # uvicorn takes the socket for a Unix one and does not set this: an answer in parts would take 40 ms more.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    credentials.private_folder()
    for old in credentials.FOLDER.glob("*.log"):
        with suppress(FileNotFoundError):  # another process deletes logs too
            is_written = Path(f"/proc/{old.stem.rpartition('-')[2]}").exists()  # named after the process that began it
            if time.time() - old.stat().st_mtime > LOGS_S and not is_written:
                old.unlink()
    with _log(name).open("w") as log:
        about = {"stdout": log, "stderr": log, "env": os.environ | settings, "pass_fds": [listening.fileno()]}
        return child.start(command, grace_s=GRACE_S, **about)


def _log(name: str) -> Path:
    return credentials.FOLDER / f"{name}-{os.getpid()}.log"  # each process that starts servers has logs of its own


def _answers(url: str, login: str) -> bool:
    import httpx

    user, _, password = login.partition(":")
    try:  # without the environment: its proxy cannot reach this loopback
        return httpx.get(url, auth=(user, password), timeout=5, trust_env=False).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False
