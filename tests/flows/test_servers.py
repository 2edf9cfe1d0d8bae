"""Both servers for real: a scheduled retraining is triggered, approved by a person, and seen by a colleague."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar, NamedTuple

import psutil
import pytest
import scripted
from flows.__main__ import main
from ruamel.yaml import YAML

import laid
from clinrl import artifacts, paths
from clinrl.config.params import load_params
from clinrl.errors import Refused
from clinrl.release import audit_log
from clinrl.runtime import child
from clinrl.signing import approval
from clinrl.signing.keys import keyring, signer
from flows import credentials, servers
from flows import serve as serving
from processes import eventually, free_port, is_free

ROOT = Path(__file__).parents[2]


class Served(NamedTuple):
    """Where `python -m flows serve --servers` says that its servers are, the process, and what lets a client in."""

    prefect: str
    mlflow: str
    process: "subprocess.Popen[str]"
    kept: credentials.Credentials


def serve(*words: str) -> "subprocess.Popen[str]":
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_TRACKING"))}
    env |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT}/src", "PREFECT_RUNNER_POLL_FREQUENCY": "2"}
    return subprocess.Popen(
        [sys.executable, "-m", "flows", "serve", *words], env=env, stderr=subprocess.PIPE, text=True
    )


def members(group: int) -> list[str]:
    """The processes of a session or of a group, by what they were started as."""
    listed = subprocess.run(["ps", "-eo", "sess=,pgid=,stat=,args="], capture_output=True, text=True, check=True)
    rows = [line.split(None, 3) for line in listed.stdout.splitlines()]
    return [row[3] for row in rows if str(group) in row[:2] and not row[2].startswith("Z")]


def test_waiting_runs_keep_no_rollback_from_starting_and_old_ones_are_forgotten(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Runner:
        def __init__(self, **given: Any) -> None:
            assert given == {"pause_on_shutdown": False, "limit": None}

        async def aadd_deployment(self, deployment: Any) -> None:
            served.append(deployment.name)

        async def __aenter__(self) -> None:
            raise InterruptedError("started")

        async def __aexit__(self, *_: object) -> None: ...

    served: list[str] = []
    for name in servers._SETTINGS:
        monkeypatch.delenv(name, raising=False)
    servers.configure()
    from prefect.settings.models.server.services import ServerServicesDBVacuumSettings

    from flows import runner

    monkeypatch.setattr(runner, "Runner", Runner)
    with pytest.raises(InterruptedError, match="started"):
        asyncio.run(runner.poll(serving.deployments(load_params())))
    assert served == ["esi", "by-hand", "by-hand"]
    assert ServerServicesDBVacuumSettings().enabled_vacuum_types >= {"events", "flow_runs"}


@pytest.fixture
def served(project: Path) -> Iterator[Served]:
    def add(content: Any) -> None:
        content["versions"]["v3"] = {**content["versions"]["v2"], "parent": "v2", "seed": 9}
        content["schedules"]["esi"]["answer_within_s"] = 600

    laid.edit(project, add)
    scripted.commit()
    ports = [free_port() for _ in range(2)]
    process = serve("--servers", "--prefect-port", str(ports[0]), "--mlflow-port", str(ports[1]))
    assert process.stderr is not None
    said = [process.stderr.readline() for _ in range(3)]
    prefect, mlflow = (f"http://127.0.0.1:{port}" for port in ports)
    assert "".join(said) == serving.ADDRESSES.format(prefect=prefect, mlflow=mlflow, file=credentials.FILE) + "\n"
    yield Served(prefect, mlflow, process, credentials.load_credentials())
    process.kill()
    process.communicate()


@pytest.mark.slow
def test_a_scheduled_retraining_is_approved_and_its_champion_is_found(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient
    from prefect import get_client
    from prefect.client.schemas import filters
    from prefect.flow_runs import resume_flow_run
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    for name, value in served.kept._asdict().items():
        monkeypatch.setenv(name, value)
    known = {PREFECT_API_URL: f"{served.prefect}/api", PREFECT_API_AUTH_STRING: served.kept.PREFECT_API_AUTH_STRING}
    with temporary_settings(known), get_client(sync_client=True) as client:

        def deployment() -> Any:
            return next((found for found in client.read_deployments() if found.name == "esi"), None)

        retraining: Any = eventually(deployment, 300)
        assert [(schedule.schedule.cron, schedule.active) for schedule in retraining.schedules] == [("0 3 * * 1", True)]
        run = client.create_flow_run_from_deployment(retraining.id)

        def state(name: str) -> bool:
            now = client.read_flow_run(run.id).state
            assert now is not None
            assert not (now.is_final() and now.name != name), now
            return now.name == name

        eventually(lambda: state("Paused"), 300)
        asked: Any = client.read_flow_run(run.id).state
        form = asked.state_details.run_input_keyset["schema"]
        schema = eventually(lambda: client.read_flow_run_input(run.id, form), 300)
        assert {"approve", "approver", "token", "note"} <= set(str(schema).replace("'", '"').split('"'))
        log = Path(".clinrl/clones/retrain-esi-1") / paths.AUDIT_LOG
        decision = next(line.body for line in reversed(audit_log.read(log, keyring())) if line.kind == "decision")
        token = approval.token(artifacts.digest(decision), "Ada Lovelace", signer("embedded"))
        second = client.create_flow_run_from_deployment(retraining.id)
        time.sleep(10)  # nobody answers at once, and the place among the runs of the task is kept
        assert state("Paused")
        holds = filters.FlowRunFilter.model_validate({"tags": {"all_": ["slot-retrain-esi:"]}})
        assert [one.id for one in client.read_flow_runs(flow_run_filter=holds)] == [run.id]
        said = {"approve": True, "approver": "Ada Lovelace", "token": token, "note": "fine"}
        resume_flow_run(run.id, run_input=said)
        eventually(lambda: state("Completed"), 300)
        eventually(lambda: client.read_flow_run(second.id).state.is_final(), 300)
        assert client.read_flow_run(second.id).state.name == "Nothing to do"
        keys = {artifact.key for artifact in client.read_artifacts()}
        assert {"comparison-v3", "curves-v3", "decision-v3"} <= keys
    champion = MlflowClient(served.mlflow).get_model_version_by_alias("esi", "champion")
    assert (champion.tags["version"], champion.tags["approver"]) == ("v3", "Ada Lovelace")
    assert not paths.AUDIT_LOG.exists()
    subprocess.run(["git", "merge", "-q", "--ff-only", "built/retrain-esi"], check=True)
    assert [line.kind for line in audit_log.read(paths.AUDIT_LOG, keyring())] == ["decision", "approval", "promotion"]
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(60) == 0
    for url in (served.prefect, served.mlflow):
        assert is_free(int(url.rsplit(":", 1)[1]))


@pytest.mark.slow
def test_what_is_due_begins_by_itself(project: Path) -> None:
    from prefect import get_client
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    laid.edit(project, lambda content: content.update(watches={"esi": {"cron": "* * * * *"}}))
    scripted.commit()
    ports = [free_port() for _ in range(2)]
    process = serve("--servers", "--prefect-port", str(ports[0]), "--mlflow-port", str(ports[1]))
    assert process.stderr is not None
    eventually(lambda: process.stderr.readline().startswith("serving"), 120)
    login = credentials.load_credentials().PREFECT_API_AUTH_STRING
    known = {PREFECT_API_URL: f"http://127.0.0.1:{ports[0]}/api", PREFECT_API_AUTH_STRING: login}
    with temporary_settings(known), get_client(sync_client=True) as client:

        def ended() -> bool:
            return any(run.auto_scheduled and run.state_name == "Completed" for run in client.read_flow_runs())

        eventually(ended, 240)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 0


@pytest.mark.slow
def test_the_servers_end_with_whoever_started_them(project: Path) -> None:
    ports = [free_port() for _ in range(2)]
    process = serve("--servers", "--prefect-port", str(ports[0]), "--mlflow-port", str(ports[1]))
    assert process.stderr is not None
    assert process.stderr.readline().startswith("Prefect")
    taken = serve("--servers", "--prefect-port", str(ports[0]))
    assert taken.communicate(timeout=60)[1].splitlines() == [
        f"clinrl: 127.0.0.1 port {ports[0]} is taken; choose another with --prefect-port, or stop what listens there"
    ]
    assert taken.returncode == 1
    process.kill()
    process.communicate()
    eventually(lambda: all(is_free(port) for port in ports), 30)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prefect", "mlflow"])
def test_a_server_that_ends_ends_all_and_is_named(project: Path, name: str) -> None:
    """Its port stays open, so clients would wait, and nothing due would run."""
    ports = [free_port() for _ in range(2)]
    process = serve("--servers", "--prefect-port", str(ports[0]), "--mlflow-port", str(ports[1]))
    assert process.stderr is not None
    eventually(lambda: process.stderr.readline().startswith("serving"), 120)
    supervisors = psutil.Process(process.pid).children()
    server = next(one for one in supervisors if f"flows.servers:{name}_app" in one.cmdline()).children()[0]
    server.kill()
    says = f"clinrl: the {name} server ended with code 137; .clinrl/servers/{name}-"
    assert says in process.communicate(timeout=60)[1]
    assert process.returncode == 1
    eventually(lambda: all(is_free(port) for port in ports), 30)


def test_no_server_to_serve_is_said(project: Path) -> None:
    process = serve()
    assert process.communicate(timeout=60)[1].splitlines() == [
        "clinrl: no Prefect server is configured: set PREFECT_API_URL, or give --servers to start one"
    ]
    assert process.returncode == 1


def test_a_server_that_does_not_start_is_said(project: Path) -> None:
    server = child.start(["sh", "-c", "exit 3"])
    with pytest.raises(
        Refused, match=r"the mlflow server ended with code 3; \.clinrl/servers/mlflow-\d+\.log says why"
    ):
        servers.wait("mlflow", server, f"http://127.0.0.1:{free_port()}/health")


class Stranger(BaseHTTPRequestHandler):
    """Whoever else runs something on this machine: says yes to all, and notes what it is told."""

    heard: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        self.heard.append(self.headers["Authorization"])
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_a_stranger_who_takes_a_port_before_its_server_does_hears_no_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """He tries each time that a server is about to start, and again once it has ended without a word."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Stranger, "heard", [])
    for name in ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING"):
        monkeypatch.setenv(name, "")  # to be set back
    start, ports, refused = child.start, [free_port() for _ in range(2)], []
    with ExitStack() as stack:

        def take() -> None:
            for port in ports:
                try:
                    server = stack.enter_context(HTTPServer(("127.0.0.1", port), Stranger))
                except OSError as error:
                    refused.append(error.errno)
                else:
                    Thread(target=server.serve_forever, daemon=True).start()
                    stack.callback(server.shutdown)

        def begin(_command: list[str], **about: Any) -> "subprocess.Popen[str]":
            take()
            server = start(["sh", "-c", "exit 3"], **about)
            server.wait()
            take()
            return server

        monkeypatch.setattr(child, "start", begin)
        with pytest.raises(Refused, match="the prefect server ended with code 3"), ExitStack() as ours:
            serving._start_servers(ours, *ports)
        assert refused == [errno.EADDRINUSE] * 8
        assert Stranger.heard == []


def test_who_answers_on_the_port_of_a_server_that_ended_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    server = child.start(["sh", "-c", "exit 3"])
    server.wait()
    with HTTPServer(("127.0.0.1", 0), Stranger) as stranger:
        Thread(target=stranger.serve_forever, daemon=True).start()
        with pytest.raises(Refused, match="the prefect server ended with code 3"):
            servers.wait("prefect", server, f"http://127.0.0.1:{stranger.server_port}/api/health")
        stranger.shutdown()


def test_the_work_pool_serves_what_this_process_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    from flows.serve import deployments
    from prefect.cli.deploy._triggers import _initialize_deployment_triggers

    monkeypatch.chdir(ROOT)
    params = load_params()
    written = YAML(typ="safe").load(ROOT / "prefect.yaml")["deployments"]
    pooled = {
        (entry["entrypoint"].replace("/", ".").replace(".py:", "."), entry["name"]): (
            entry.get("parameters", {}),
            [(schedule["cron"], schedule["timezone"]) for schedule in entry.get("schedules", [])],
            entry.get("concurrency_limit"),
            entry["tags"],
            _initialize_deployment_triggers(entry["name"], entry.get("triggers", [])),
        )
        for entry in written
        if entry["name"] != "elsewhere"  # which only workers run, with code of their own
    }
    served = {
        (deployment.entrypoint, deployment.name): (
            deployment.parameters,
            [(one.schedule.cron, one.schedule.timezone) for one in deployment.schedules or []],
            deployment.concurrency_limit,
            deployment.tags,
            deployment.triggers,
        )
        for deployment in deployments(params)
    }
    assert pooled == served
    assert {name for _, name in served} == {*params.schedules, *params.watches, "by-hand"}
    assert sum(bool(triggers) for *_, triggers in served.values()) == 2 * len(params.watches)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--prefect-port", "70000"], "'70000' is not a whole number from 1 to 65535"),
        (["--mlflow-port", "0"], "'0' is not a whole number from 1 to 65535"),
        (["--prefect-port", "9" * 5000], "is not a whole number from 1 to 65535"),
        (["--mlflow-port", "4200"], "--prefect-port and --mlflow-port are both 4200; each needs its own"),
    ],
)
def test_a_port_that_cannot_be_is_a_usage_error(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["serve", "--servers", *words])
    assert left.value.code == 2
    assert sentence in capsys.readouterr().err


def test_a_full_disk_is_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", ".clinrl/prefect")

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(servers, "configure", full)
    try:
        assert main(["serve", "--servers"]) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    said = "clinrl: disk is full at .clinrl/prefect: free some space and give the same command again\n"
    assert capsys.readouterr().err == said
