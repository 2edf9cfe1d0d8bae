"""The servers that a team shares, of real parts: PostgreSQL, S3, Prefect over the first, MLflow over both."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from processes import eventually, free_port, is_free

T = TypeVar("T")

ROOT = Path(__file__).parents[1]
POSTGRES = max(Path("/usr/lib/postgresql").glob("*/bin"), default=None)
MOTO = shutil.which("moto_server") or os.environ.get("CLINRL_TEST_MOTO", "")
"""An S3 server. It needs other libraries than this environment has, so it comes from one of its own."""
AS_POSTGRES = ("setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups")
PASSWORD = "admin:not-a-secret"
OLD = Path("/sys/fs/cgroup/cpu")
GROUPS = OLD if OLD.is_dir() else OLD.parent
"""Linux's control groups for processors: version 1 has a folder for each controller, version 2 one for all."""
PERIOD_US = 20_000
"""A group that has used up its share waits for the next period."""
BUCKET = "s3://clinrl/mlflow"
"""Where MLflow keeps artefacts."""
NEEDS = [
    pytest.mark.slow,
    pytest.mark.skipif(POSTGRES is None, reason="needs PostgreSQL (apt-get install postgresql)"),
    pytest.mark.skipif(not MOTO, reason="needs an S3 server; name moto_server in CLINRL_TEST_MOTO"),
    pytest.mark.skipif(os.geteuid() != 0, reason="PostgreSQL is started as its own user"),
]
"""Marks of a test that starts one."""


def needed(test: T) -> T:
    """Put them on one test of a module."""
    for mark in NEEDS:
        test = mark(test)
    return test


def run(*words: str, **more: Any) -> str:
    done = subprocess.run(words, check=False, capture_output=True, text=True, **more)
    assert done.returncode == 0, f"{words}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout.strip()


class Plant:
    """A PostgreSQL, an S3 server, Prefect over the first, MLflow over both, and a git repository that all can reach."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack, *, flows: bool = True) -> None:
        """`flows`: whether Prefect is started too."""
        self.folder, self.stack, self.started = folder, stack, dict[str, subprocess.Popen[bytes]]()
        self.ports = {name: free_port() for name in ("postgres", "s3", "prefect", "mlflow")}
        for name in ("prefect", "mlflow", "s3"):
            (folder / name).mkdir()
        self.database = f"postgres@127.0.0.1:{self.ports['postgres']}"
        keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "canary-secret", "AWS_DEFAULT_REGION": "us-east-1"}
        s3 = f"http://127.0.0.1:{self.ports['s3']}"
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_"))}
        self.env = clean | keys | {
            "AWS_ENDPOINT_URL": s3,
            "MLFLOW_S3_ENDPOINT_URL": s3,
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # seven processes, which nothing here needs
            "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"postgresql+asyncpg://{self.database}/prefect",
            "PREFECT_SERVER_API_AUTH_STRING": PASSWORD,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_HOME": str(folder / "prefect"),
            "GIT_CONFIG_GLOBAL": str(folder / "none"),
        }  # fmt: skip
        self._postgres()
        self.s3 = self.answers("s3", self.start([MOTO, "-H", "127.0.0.1", "-p", str(self.ports["s3"])], "s3"))
        bucket = "import boto3; boto3.client('s3').create_bucket(Bucket='clinrl')"
        run(sys.executable, "-c", bucket, env=self.env)
        if flows:
            self.prefect = self.serve_prefect()
        self.mlflow = self.serve_mlflow()

    def _postgres(self) -> None:
        assert POSTGRES is not None
        self.data = Path(tempfile.mkdtemp(prefix="clinrl-postgres-"))  # pytest's own folders are closed to other users
        self.stack.callback(shutil.rmtree, self.data, ignore_errors=True)
        shutil.chown(self.data, "postgres", "postgres")
        initdb = [*AS_POSTGRES, str(POSTGRES / "initdb"), "-D", str(self.data / "db")]
        run(*initdb, "-U", "postgres", "--auth=trust", cwd=self.data)
        self.postgres = self.serve_postgres()
        for name in ("prefect", "mlflow"):
            self.make_database(name)

    def serve_postgres(self) -> "subprocess.Popen[bytes]":
        """Over the databases that are there: one that was killed recovers them."""
        command = [*AS_POSTGRES, f"{POSTGRES}/postgres", "-D", str(self.data / "db"), "-h", "127.0.0.1"]
        where = ["-p", str(self.ports["postgres"]), "-c", "unix_socket_directories="]
        process = self.start([*command, *where], "postgres", cwd=self.data)
        psql = ["psql", f"postgresql://{self.database}/postgres", "-tAc", "select 1"]
        eventually(lambda: subprocess.run(psql, capture_output=True, check=False).returncode == 0, 120)
        return process

    def make_database(self, name: str) -> None:
        """An empty database, in the place of one that is there."""
        for command in (f"drop database if exists {name} with (force)", f"create database {name}"):
            run("psql", f"postgresql://{self.database}/postgres", "-tAc", command)

    def start(self, command: list[str], name: str, **more: Any) -> "subprocess.Popen[bytes]":
        """A process of its own session, with a log. It ends with the test."""
        log = self.stack.enter_context((self.folder / f"{name}.log").open("ab"))
        path = f"{Path(sys.executable).parent}{os.pathsep}{self.env['PATH']}"
        env = self.env | {"PATH": path} | more.pop("env", {})
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=env, **more)
        self.stack.callback(end, process)
        self.started[name] = process
        return process

    def processor_s(self) -> dict[str, float]:
        """Seconds of processor time of each process that was started last under its name, with all that it started."""
        return {name: sum(map(_processor_s, _family(process.pid))) for name, process in self.started.items()}

    def answers(self, name: str, process: "subprocess.Popen[bytes]") -> "subprocess.Popen[bytes]":
        """Wait until something listens on the port of a process that was started."""

        def listens() -> bool:
            assert process.poll() is None, (self.folder / f"{name}.log").read_text()[-3000:]
            return not is_free(self.ports[name])

        eventually(listens, 600)
        return process

    def serve_prefect(self) -> "subprocess.Popen[bytes]":
        command = ["prefect", "server", "start", "--host", "127.0.0.1", "--port", str(self.ports["prefect"]), "--no-ui"]
        return self.answers("prefect", self.start(command, "prefect"))

    def serve_mlflow(self) -> "subprocess.Popen[bytes]":
        command = ["mlflow", "server", "--host", "127.0.0.1", "--port", str(self.ports["mlflow"]), "--workers", "1"]
        stores = ["--backend-store-uri", f"postgresql://{self.database}/mlflow", "--artifacts-destination", BUCKET]
        return self.answers("mlflow", self.start([*command, *stores], "mlflow"))

    @property
    def client(self) -> Mapping[str, str]:
        """What a client's environment holds: addresses and credentials, and no path of the servers' disks."""
        kept = {key: value for key, value in self.env.items() if not key.startswith("PREFECT_SERVER")}
        return {
            **kept,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}",
            "PREFECT_API_URL": f"http://127.0.0.1:{self.ports['prefect']}/api",
            "PREFECT_API_AUTH_STRING": PASSWORD,
            "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{self.ports['mlflow']}",
        }

    def publish(self, checkout: Path, origin: Path) -> None:
        """Make a person's checkout of a project, with a DVC remote here, and the repository that workers clone."""
        git, dvc = ("git", "-c", "user.name=a", "-c", "user.email=a@b"), (sys.executable, "-m", "dvc")
        for words in (
            [*dvc, "remote", "add", "--default", "store", "s3://clinrl/dvc"],
            [*dvc, "remote", "modify", "store", "endpointurl", self.env["AWS_ENDPOINT_URL"]],
            [*git, "init", "-q", "-b", "main"], [*git, "add", "--all"], [*git, "commit", "-qm", "begun"],
            [*git, "clone", "-q", "--bare", ".", str(origin)], [*git, "remote", "add", "origin", str(origin)],
        ):  # fmt: skip
            run(*words, cwd=checkout, env=self.client)

    def deploy(self, origin: Path) -> None:
        """What whoever runs the servers does once: a pool, and what its workers run."""
        prefect, deploying = ("prefect", "--no-prompt"), {**self.client, "CLINRL_REPOSITORY": str(origin)}
        run(*prefect, "work-pool", "create", "clinrl", "--type", "process", env=self.client)
        run(*prefect, "deploy", "--name", "elsewhere", cwd=ROOT, env=deploying)

    def build(self, what: str, checkout: Path) -> "subprocess.Popen[bytes]":
        """The person's command."""
        env = {**self.client, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT}/src"}
        return self.start([sys.executable, "-m", "flows", "build", what], "build", cwd=checkout, env=env)

    def worker(self, name: str, processor: int | None = None, share: float = 1.0) -> "subprocess.Popen[bytes]":
        """A machine of its own: its folder, its clones, its slot, its Prefect home; its processor, if one is named.

        `share` of the processor's time at most goes to the worker and to what it starts, below 1 by a control group.
        """
        home = self.folder / name
        home.mkdir(exist_ok=True)
        own = {"PREFECT_HOME": str(home), "CLINRL_CLONES": str(home / "clones"), "CLINRL_SLOT": f"cpu-of-{name}"}
        alone = self._group(name, share) if share < 1 else []
        alone += [] if processor is None else ["taskset", "-c", str(processor)]
        return self.start(
            [*alone, "prefect", "worker", "start", "--pool", "clinrl", "--name", name, "--limit", "1"],
            name, cwd=home, env={**self.client, **own, "PREFECT_WORKER_QUERY_SECONDS": "2"},
        )  # fmt: skip

    def _group(self, name: str, share: float) -> list[str]:
        """Words before a command that put it into a new control group, which has this share of a processor's time."""
        group, quota = GROUPS / f"clinrl-{os.getpid()}-{name}", str(round(share * PERIOD_US))
        group.mkdir()
        self.stack.callback(_gone, group)
        if GROUPS == OLD:
            limits = {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": quota}
        else:
            limits = {"cpu.max": f"{quota} {PERIOD_US}"}
        for key, value in limits.items():
            (group / key).write_text(value)
        return ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]


def _gone(group: Path) -> None:
    """Take a control group away, once nothing runs in it."""
    eventually(lambda: not (group / "cgroup.procs").read_text(), 60)
    group.rmdir()


def _family(pid: int) -> Iterator[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        first = psutil.Process(pid)
        yield from (first, *first.children(recursive=True))


def _processor_s(process: psutil.Process) -> float:
    """With that of its children who have ended and were waited for."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return sum(process.cpu_times()[:4])
    return 0.0


def end(process: "subprocess.Popen[bytes]", number: int = signal.SIGTERM) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
