"""Prefect and MLflow as `make serve` starts them, and what somebody asks them for whom nobody let in."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from clinrl.runtime import child
from clinrl.runtime.guard import address_of, listen
from flows import credentials, servers

ROOT = Path(__file__).parents[2]
OWN = "/api/2.0/mlflow"
SETUP = {
    "experiment": (f"{OWN}/experiments/create", {"name": "esi"}),
    "model": (f"{OWN}/registered-models/create", {"name": "esi"}),
}


class Guarded(NamedTuple):
    """Where both servers are, what lets a client in, the deployment that an intruder wants, and the logs."""

    prefect: str
    mlflow: str
    kept: credentials.Credentials
    deployment: str
    logs: Path

    def ask(self, method: str, path: str, **request: Any) -> httpx.Response:
        """Ask Prefect as its owner does."""
        login = tuple(self.kept.PREFECT_API_AUTH_STRING.split(":", 1))
        with httpx.Client(base_url=f"{self.prefect}/api", auth=login, timeout=60) as client:
            token = client.get("/csrf-token", params={"client": "owner"}).raise_for_status().json()["token"]
            headers = {"Prefect-Csrf-Token": token, "Prefect-Csrf-Client": "owner"}
            return client.request(method, path, headers=headers, **request).raise_for_status()

    def registry(self, path: str, **request: Any) -> Any:
        """Ask MLflow as its owner does."""
        login = (self.kept.MLFLOW_TRACKING_USERNAME, self.kept.MLFLOW_TRACKING_PASSWORD)
        return httpx.post(f"{self.mlflow}{path}", auth=login, timeout=60, **request).raise_for_status().json()

    def everything(self) -> str:
        """All that an intruder could have changed."""
        parts = [
            self.ask("POST", f"/{kind}/filter", json={}).json() for kind in ("flow_runs", "deployments", "variables")
        ]
        parts.append(self.registry(f"{OWN}/experiments/search", json={"max_results": 100}))
        login = (self.kept.MLFLOW_TRACKING_USERNAME, self.kept.MLFLOW_TRACKING_PASSWORD)
        parts.append(httpx.get(f"{self.mlflow}{OWN}/registered-models/search", auth=login, timeout=60).json())
        return json.dumps(parts, sort_keys=True)


@contextlib.contextmanager
def guarded(folder: Path) -> Iterator[Guarded]:
    """Both servers over an empty store in a folder, until the end of the block."""
    with contextlib.chdir(folder), contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("PREFECT_HOME", str(folder / "prefect"))
        kept = credentials.load_credentials()
        sockets = [stack.enter_context(listen(servers.HOST, 0)) for _ in range(2)]
        prefect, mlflow = map(address_of, sockets)
        started = servers.prefect(sockets[0], kept.PREFECT_API_AUTH_STRING), servers.mlflow(sockets[1], kept.mlflow)
        for server in started:
            stack.callback(child.end, server)
        servers.wait("prefect", started[0], f"{prefect}/api/health")
        servers.wait("mlflow", started[1], f"{mlflow}/health", kept.mlflow)
        found = Guarded(prefect, mlflow, kept, "", folder / credentials.FOLDER)
        flow = found.ask("POST", "/flows/", json={"name": "release"}).json()["id"]
        deployment = found.ask("POST", "/deployments/", json={"name": "by-hand", "flow_id": flow}).json()["id"]
        for path, body in SETUP.values():
            found.registry(path, json=body)
        yield found._replace(deployment=deployment)


def attempts(served: Guarded) -> list[tuple[str, str, Any]]:
    """What an intruder asks for: method, URL and body."""
    api, run = f"{served.prefect}/api", {"parameters": {"name": "esi-v49", "approver": "Drive By"}}
    wanted = [
        ("POST", f"{api}/deployments/{served.deployment}/create_flow_run", run),
        ("POST", f"{api}/deployments/filter", {}),
        ("POST", f"{api}/flow_runs/{served.deployment}/resume", {"run_input": {"approve": True}}),
        ("DELETE", f"{api}/deployments/{served.deployment}", None),
        ("POST", f"{api}/variables/", {"name": "x", "value": 1}),
        ("POST", f"{api}/admin/database/clear", {"confirm": True}),
        ("GET", f"{api}/csrf-token?client=intruder", None),
    ]
    for prefix in (OWN, "/ajax-api/2.0/mlflow"):
        wanted += [
            ("POST", f"{served.mlflow}{prefix}/experiments/create", {"name": "drive-by"}),
            ("POST", f"{served.mlflow}{prefix}/registered-models/create", {"name": "drive-by"}),
            ("POST", f"{served.mlflow}{prefix}/registered-models/set-tag", {"name": "esi", "key": "k", "value": "v"}),
            ("DELETE", f"{served.mlflow}{prefix}/registered-models/delete", {"name": "esi"}),
            ("GET", f"{served.mlflow}{prefix}/registered-models/search", None),
        ]
    return wanted


STRANGERS: dict[str, dict[str, str]] = {
    "a script": {},
    "a page elsewhere": {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"},
    "a page of another port": {"Origin": "http://127.0.0.1:9", "Sec-Fetch-Site": "same-site"},
    "a page without an origin": {"Origin": "null"},
    "a form": {"Origin": "http://127.0.0.1:9", "Content-Type": "text/plain"},
    "a rebound name": {"Host": "evil.example"},
    "the usual password": {"Authorization": "Basic YWRtaW46cGFzc3dvcmQxMjM0"},  # admin:password1234
    "an invented token": {"Prefect-Csrf-Token": "x", "Prefect-Csrf-Client": "x"},
}
