"""The servers and whoever was not let in: scripts without a password, and pages of other origins in a real browser.

Nothing that they try changes anything. The servers are the real ones, over an empty store.
"""

import contextlib
import json
import shutil
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import pytest
import strangers
from starlette.responses import Response
from starlette.testclient import TestClient
from strangers import OWN, STRANGERS, Guarded, attempts
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from clinrl.errors import Refused
from clinrl.runtime import child
from clinrl.runtime.guard import address_of, listen
from flows import credentials, servers

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with strangers.guarded(tmp_path_factory.mktemp("guarded")) as found:
        yield found


FOR_A_PASSWORD = "a script", "the usual password", "an invented token"
"""Strangers whom only the password keeps out, and so, of Prefect, Prefect itself."""


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of what the servers import
@pytest.mark.parametrize("name", ["prefect", "mlflow"])
def test_a_server_starts_behind_the_fence_with_its_password(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The application that the server's process would serve, asked in this one; Prefect's own is a stand-in."""
    monkeypatch.chdir(tmp_path)
    started: dict[str, Any] = {}
    monkeypatch.setattr(child, "start", lambda command, **given: started.update(command=command, **given))
    login = "ada:long-password"
    with listen("127.0.0.1", 0) as listening:
        ours = address_of(listening)
        {"prefect": servers.prefect, "mlflow": servers.mlflow}[name](listening, login)
        assert started["pass_fds"] == [listening.fileno()]
        assert listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)  # what is accepted has it from there
    app = started["command"][started["command"].index("--factory") + 1]
    assert login not in started["command"]
    settings = started["env"]
    if name == "prefect":
        assert settings["PREFECT_SERVER_API_AUTH_STRING"] == login
        assert settings["PREFECT_SERVER_CSRF_PROTECTION_ENABLED"] == "true"
        assert settings["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"] == ours
        monkeypatch.setattr("prefect.server.api.server.create_app", lambda: Response())
    for key in (servers.MLFLOW_LOGIN, servers.MLFLOW_STORE):
        if key in settings:
            monkeypatch.setenv(key, settings[key])
    module, _, factory = app.partition(":")
    client = TestClient(getattr(import_module(module), factory)(), base_url=ours)
    wanted = [ours if own == name else "http://127.0.0.1:1" for own in ("prefect", "mlflow")]
    for who, headers in STRANGERS.items():
        if name == "prefect" and who in FOR_A_PASSWORD:
            continue
        for method, url, body in attempts(Guarded(*wanted, None, "x", tmp_path)):
            if not url.startswith(ours):
                continue
            logged_in = "ada", "long-password"
            for auth in (None, *((logged_in,) if "Origin" in headers or "Host" in headers else ())):
                answer = client.request(method, url, json=body, headers=headers, auth=auth)
                assert answer.status_code in (401, 403), (who, method, url, answer.text)
                assert not [header for header in answer.headers if header.startswith("access-control")], (who, url)


@pytest.mark.slow
@pytest.mark.parametrize("who", STRANGERS)
def test_a_stranger_changes_and_learns_nothing(guarded: Guarded, who: str) -> None:
    before = guarded.everything()
    for method, url, body in attempts(guarded):
        answer = httpx.request(method, url, json=body, headers=STRANGERS[who], timeout=60)
        assert answer.status_code in (401, 403), (who, method, url, answer.text)
        assert not [name for name in answer.headers if name.startswith("access-control")], (who, url)
    for url in (f"{guarded.prefect}/api/deployments/filter", f"{guarded.mlflow}{OWN}/experiments/create"):
        preflight = {**STRANGERS[who], "Access-Control-Request-Method": "POST"}
        answer = httpx.options(url, headers=preflight, timeout=60)
        assert not [name for name in answer.headers if name.startswith("access-control")], (who, url)
    assert guarded.everything() == before


@pytest.mark.slow
@pytest.mark.parametrize("who", ["a page elsewhere", "a page of another port", "a rebound name"])
def test_a_page_in_the_browser_of_somebody_who_is_logged_in_changes_nothing(guarded: Guarded, who: str) -> None:
    """A browser adds a password that it knows to what any page asks for."""
    before = guarded.everything()
    logins = {guarded.prefect: guarded.kept.PREFECT_API_AUTH_STRING, guarded.mlflow: guarded.kept.mlflow}
    for method, url, body in attempts(guarded):
        login = next(login for place, login in logins.items() if url.startswith(f"{place}/"))
        user, _, password = login.partition(":")
        answer = httpx.request(method, url, json=body, headers=STRANGERS[who], auth=(user, password), timeout=60)
        assert answer.status_code == 403, (who, url)
    assert guarded.everything() == before


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/api/events/in", "/api/events/out", "/api/logs/out"])
def test_a_websocket_asks_for_the_password_and_takes_no_other_page(guarded: Guarded, path: str) -> None:
    url = f"{guarded.prefect.replace('http', 'ws')}{path}"
    with pytest.raises(InvalidStatus, match="HTTP 403"):
        connect(url, additional_headers={"Origin": "http://evil.example"}, subprotocols=["prefect"])
    with connect(url, subprotocols=["prefect"]) as socket:
        socket.send(json.dumps({"type": "auth", "token": "guess"}))
        with pytest.raises(ConnectionClosed):
            socket.recv(timeout=30)


def test_an_approver_is_no_parameter_of_any_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    from flows.serve import deployments

    from clinrl.config.params import load_params

    monkeypatch.chdir(ROOT)
    for deployment in deployments(load_params()):
        assert set(deployment._parameter_openapi_schema.properties) <= {"name", "task"}
        assert not {"approver"} & set(deployment.parameters)
    assert "approver" not in (ROOT / "prefect.yaml").read_text(encoding="utf-8")


def test_a_run_that_names_an_approver_fails_before_it_does_anything(prefect: None) -> None:
    from flows.release import release
    from prefect import get_client
    from prefect.exceptions import SignatureMismatchError
    from prefect.flow_engine import run_flow

    with get_client(sync_client=True) as client:
        run = client.create_flow_run(release, parameters={"name": "v2", "approver": "Drive By"})
    state = run_flow(release, flow_run=run, parameters=run.parameters, return_type="state")
    assert isinstance(state.result(raise_on_failure=False), SignatureMismatchError)


@pytest.mark.slow
def test_the_secrets_are_in_one_file_of_their_owner_and_nowhere_else(guarded: Guarded) -> None:
    secrets = {guarded.kept.PREFECT_API_AUTH_STRING.split(":")[1], guarded.kept.MLFLOW_TRACKING_PASSWORD}
    file = guarded.logs / credentials.FILE.name
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(guarded.logs.stat().st_mode) == 0o700
    listed = subprocess.run(["ps", "-eo", "args="], capture_output=True, text=True, check=True).stdout
    assert "flows.servers:prefect_app" in listed
    texts = [path.read_text() for path in guarded.logs.iterdir() if path != file]
    assert not [secret for secret in secrets for text in (listed, *texts) if secret in text]


def test_a_file_of_credentials_that_others_can_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kept = credentials.load_credentials()
    assert credentials.load_credentials() == kept != credentials.new()
    for password in (kept.PREFECT_API_AUTH_STRING.split(":")[1], kept.MLFLOW_TRACKING_PASSWORD):
        assert len(password) >= 43
    credentials.FILE.chmod(0o640)
    with pytest.raises(Refused, match=r"credentials\.env can be read by others than you; delete it"):
        credentials.load_credentials()
    credentials.FILE.chmod(0o600)
    credentials.FILE.write_text("PREFECT_API_AUTH_STRING=\n")
    with pytest.raises(Refused, match=r"credentials\.env was edited; delete it"):
        credentials.load_credentials()


def test_a_shell_reads_the_file_of_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kept = credentials.load_credentials()
    said = subprocess.run(
        ["sh", "-c", f"set -a; . {credentials.FILE}; set +a; env"], capture_output=True, text=True, check=True
    )
    assert {f"{name}={value}" for name, value in kept._asdict().items()} <= set(said.stdout.splitlines())


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
PAGE = """<!doctype html><title>drive-by</title><body><script>
const targets = TARGETS, log = [];
const attempt = async (name, what) => {
  try { log.push([name, await Promise.race([what(), new Promise(done => setTimeout(() => done("silence"), 8000))])]) }
  catch (error) { log.push([name, "refused: " + error]) }
};
const read = async answer => answer.type + " " + answer.status + " " + (await answer.text()).slice(0, 80);
const socket = url => new Promise((done, failed) => {
  const one = new WebSocket(url); one.onopen = () => done("open"); one.onerror = () => failed("closed");
});
const form = (url, kind) => new Promise(done => {
  const frame = document.createElement("iframe"); frame.name = "f" + Math.random(); document.body.append(frame);
  const one = document.createElement("form"); one.method = "POST"; one.action = url; one.enctype = kind;
  one.target = frame.name; const field = document.createElement("input");
  field.name = '{"name": "drive-by", "x": "'; field.value = '"}'; one.append(field);
  document.body.append(one); frame.onload = () => done("sent"); one.submit();
});
(async () => {
  for (const [method, url, body] of targets.requests) {
    const text = body === null ? undefined : JSON.stringify(body), keep = { credentials: "include" };
    await attempt("json " + url, async () => read(await fetch(url, { method, body: text, ...keep,
      headers: { "Content-Type": "application/json" } })));
    if (method === "GET") continue;
    const simple = { method: "POST", mode: "no-cors", body: text, ...keep };
    await attempt("simple " + url, async () => read(await fetch(url, simple)));
    await attempt("beacon " + url, async () => String(navigator.sendBeacon(url, text)));
    await attempt("form " + url, () => form(url, "text/plain"));
  }
  for (const url of targets.sockets) await attempt("socket " + url, () => socket(url));
  await fetch("/report", { method: "POST", body: JSON.stringify(log) });
})();
</script>"""


class Intruder(ThreadingHTTPServer):
    """The server of the intruder's page, and a victim without a fence, which hears what a browser lets pages do."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.page = b""
        self.reported: list[Any] = []
        self.heard: list[tuple[str, str]] = []
        self.done = threading.Event()


class _Answer(BaseHTTPRequestHandler):
    server: Intruder

    def do_GET(self) -> None:
        self._say(self.server.page if self.path == "/" else b"")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.heard.append((self.path, body.decode(errors="replace")))
        self._say(b"")
        if self.path == "/report":
            self.server.reported = json.loads(body)
            self.server.done.set()

    def _say(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextlib.contextmanager
def intruder() -> Iterator[Intruder]:
    server = Intruder()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def environment() -> Iterator[str]:
    """The address of the served audit."""
    pytest.importorskip("openenv", reason="OpenEnv is an optional extra")
    command = [sys.executable, "-m", "clinrl", "openenv", "audit", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.terminate()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "evil.test"])
def test_a_page_of_another_origin_changes_nothing_from_a_real_browser(
    guarded: Guarded, environment: str, tmp_path: Path, name: str
) -> None:
    before = guarded.everything()
    with intruder() as page, intruder() as victim:
        requests = [
            *attempts(guarded),
            ("POST", f"{environment}/reset", {"seed": 1}),
            ("GET", f"{environment}/state", None),
        ]
        if name == "evil.test":  # its name leads to this machine, so the browser sends it as the Host of each request
            requests = [(method, url.replace("127.0.0.1", name), body) for method, url, body in requests]
        sockets = [f"{environment}/ws", f"{guarded.prefect}/api/events/in"]
        open_to_all = f"http://127.0.0.1:{victim.server_port}/drive-by"
        targets = {
            "requests": [*requests, ("POST", open_to_all, {"name": "drive-by"})],
            "sockets": [url.replace("http", "ws") for url in sockets],
        }
        page.page = PAGE.replace("TARGETS", json.dumps(targets)).encode()
        browser = [
            *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *(
                f"--user-data-dir={tmp_path}",
                "--remote-debugging-port=0",
                "--host-resolver-rules=MAP evil.test 127.0.0.1",
            ),
            f"http://{name}:{page.server_port}/",
        ]
        with (tmp_path / "browser.log").open("w") as log:
            process = child.start(browser, stdout=log, stderr=log)
            try:
                assert page.done.wait(300), (tmp_path / "browser.log").read_text()[-2000:]
            finally:
                child.end(process, grace_s=5)
    said = dict(page.reported)
    for attempt, outcome in said.items():
        if "drive-by" not in attempt:
            assert not outcome.startswith(("cors 2", "basic 2", "open")), (attempt, outcome)
    assert {"simple", "beacon", "form", "json", "socket"} == {attempt.split()[0] for attempt in said}
    assert {path for path, body in victim.heard if "drive-by" in body} == {
        "/drive-by"
    }  # a server without a fence hears
    assert guarded.everything() == before
