"""Credentials for the servers of `make serve`: made once, and readable by their owner alone.

They are never on a command line, which every user of a machine can list, and never in a log.
"""

import os
import secrets
import stat
from pathlib import Path
from typing import NamedTuple

from clinrl.artifacts import write_text
from clinrl.errors import Refused

FOLDER = Path(".clinrl/servers")
FILE = FOLDER / "credentials.env"
"""Lines of NAME=value that a shell can read, with the variables that Prefect's and MLflow's clients read."""
USER = "clinrl"
BYTES = 32
"""Random bytes in each password."""


class Credentials(NamedTuple):
    """The variables with a client's credentials, in the order of the file."""

    PREFECT_API_AUTH_STRING: str
    MLFLOW_TRACKING_USERNAME: str
    MLFLOW_TRACKING_PASSWORD: str

    @property
    def mlflow(self) -> str:
        """MLflow's user and password in one."""
        return f"{self.MLFLOW_TRACKING_USERNAME}:{self.MLFLOW_TRACKING_PASSWORD}"


def new() -> Credentials:
    """New random credentials."""
    return Credentials(f"{USER}:{secrets.token_urlsafe(BYTES)}", USER, secrets.token_urlsafe(BYTES))


def load_credentials() -> Credentials:
    """The credentials of this project, made if there are none. Call this inside of `servers.starting`.

    Raises Refused if others than the owner can read the file, or if it is malformed.
    """
    private_folder()
    if not FILE.exists():
        lines = (f"{name}={value}\n" for name, value in new()._asdict().items())
        write_text(FILE, "".join(lines), 0o600)
    found = FILE.stat()
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise Refused(f"{FILE} can be read by others than you; delete it, and the next `make serve` makes another")
    values = dict(line.split("=", 1) for line in FILE.read_text(encoding="utf-8").splitlines() if "=" in line)
    if values.keys() != set(Credentials._fields) or not all(values.values()):
        raise Refused(f"{FILE} was edited; delete it, and the next `make serve` makes another")
    return Credentials(**values)


def private_folder() -> None:
    """Make the folder of credentials and logs, which only its owner can read."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    FOLDER.chmod(0o700)
