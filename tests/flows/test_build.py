"""Many machines, of real parts: PostgreSQL, S3, Prefect, MLflow, git, and workers that share nothing but these."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import scripted

from clinrl.artifacts import write_text
from clinrl.provenance import lock
from flows import servers
from processes import eventually

ROOT = Path(__file__).parents[2]
POSTGRES = max(Path("/usr/lib/postgresql").glob("*/bin"), default=None)
MOTO = shutil.which("moto_server") or os.environ.get("CLINRL_TEST_MOTO", "")
"""An S3 server. It needs other libraries than this environment has, so it comes from one of its own."""
VERSIONS = ("v1", "v2", "v3", "v4", "v5")
"""v2 comes from v1; the others need nothing of each other."""
LOADS = """
import sys
from pathlib import Path
from mlflow import MlflowClient, artifacts

client = MlflowClient()
models = [model.name for model in client.search_registered_models()]
found = [version for name in models for version in client.search_model_versions(f"name='{name}'")]
assert sorted(client.get_run(version.run_id).info.run_name for version in found) == sys.argv[1:], found
for version in found:
    folder = Path(artifacts.download_artifacts(f"models:/{version.name}/{version.version}"))
    assert [*folder.rglob("adapter_model.safetensors")], version
"""
"""A machine that sees nothing of the servers' disks loads each version, and finds each once."""
PASSWORD = "admin:not-a-secret"
IGNORED = "\n".join(
    ["/data/cases/", "/data/adapters/*", "!/data/adapters/*-base/", "/data/graded/", "/data/docs/", "/data/merged/",
     "/data/reports/**/*.png", "/data/reports/**/predictions_*.csv", "/.clinrl/", "/mlruns/", "__pycache__/",
     "worked.jsonl", "*.partial-*", "/.dvc/cache/", "/.dvc/tmp/", "/.dvc/config.local", ""]
)  # fmt: skip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(POSTGRES is None, reason="needs PostgreSQL (apt-get install postgresql)"),
    pytest.mark.skipif(not MOTO, reason="needs an S3 server; name moto_server in CLINRL_TEST_MOTO"),
    pytest.mark.skipif(os.geteuid() != 0, reason="PostgreSQL is started as its own user"),
]


def run(*words: str, **more: Any) -> str:
    done = subprocess.run(words, check=False, capture_output=True, text=True, **more)
    assert done.returncode == 0, f"{words}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout.strip()


class Plant:
    """A PostgreSQL, an S3 server, Prefect over the first, MLflow over both, and a git repository that all can reach."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder, self.stack = folder, stack
        self.ports = {name: servers.free_port() for name in ("postgres", "s3", "prefect", "mlflow")}
        for name in ("prefect", "mlflow", "s3"):
            (folder / name).mkdir()
        database = f"postgres@127.0.0.1:{self.ports['postgres']}"
        keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "canary-secret", "AWS_DEFAULT_REGION": "us-east-1"}
        s3 = f"http://127.0.0.1:{self.ports['s3']}"
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_"))}
        self.env = clean | keys | {
            "AWS_ENDPOINT_URL": s3,
            "MLFLOW_S3_ENDPOINT_URL": s3,
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # seven processes, which nothing here needs
            "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"postgresql+asyncpg://{database}/prefect",
            "PREFECT_SERVER_API_AUTH_STRING": PASSWORD,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
            "PREFECT_HOME": str(folder / "prefect"),
            "GIT_CONFIG_GLOBAL": str(folder / "none"),
        }  # fmt: skip
        self._postgres(database)
        self.answers("s3", self.start([MOTO, "-H", "127.0.0.1", "-p", str(self.ports["s3"])], "s3"))
        bucket = "import boto3; boto3.client('s3').create_bucket(Bucket='clinrl')"
        run(sys.executable, "-c", bucket, env=self.env)
        mlflow = self.start(
            ["mlflow", "server", "--host", "127.0.0.1", "--port", str(self.ports["mlflow"]), "--workers", "1",
             "--backend-store-uri", f"postgresql://{database}/mlflow", "--artifacts-destination", "s3://clinrl/mlflow"],
            "mlflow",
        )  # fmt: skip
        self.prefect = self.serve_prefect()
        self.answers("mlflow", mlflow)

    def _postgres(self, database: str) -> None:
        assert POSTGRES is not None
        data = Path(tempfile.mkdtemp(prefix="clinrl-postgres-"))  # pytest's own folders are closed to other users
        self.stack.callback(shutil.rmtree, data, ignore_errors=True)
        shutil.chown(data, "postgres", "postgres")
        command = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
        run(*command, str(POSTGRES / "initdb"), "-D", str(data / "db"), "-U", "postgres", "--auth=trust", cwd=data)
        self.start(
            [*command, str(POSTGRES / "postgres"), "-D", str(data / "db"), "-h", "127.0.0.1",
             "-p", str(self.ports["postgres"]), "-c", "unix_socket_directories="],
            "postgres", cwd=data,
        )  # fmt: skip
        psql = ["psql", f"postgresql://{database}/postgres", "-tAc"]
        eventually(lambda: subprocess.run([*psql, "select 1"], capture_output=True, check=False).returncode == 0, 120)
        for name in ("prefect", "mlflow"):
            run(*psql, f"create database {name}")

    def start(self, command: list[str], name: str, **more: Any) -> "subprocess.Popen[bytes]":
        """A process of its own session, with a log. It ends with the test."""
        log = self.stack.enter_context((self.folder / f"{name}.log").open("ab"))
        path = f"{Path(sys.executable).parent}{os.pathsep}{self.env['PATH']}"
        env = self.env | {"PATH": path} | more.pop("env", {})
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=env, **more)
        self.stack.callback(end, process)
        return process

    def answers(self, name: str, process: "subprocess.Popen[bytes]") -> "subprocess.Popen[bytes]":
        """Wait until something listens on the port of a process that was started."""

        def listens() -> bool:
            assert process.poll() is None, (self.folder / f"{name}.log").read_text()[-3000:]
            return not servers.is_free(self.ports[name])

        eventually(listens, 600)
        return process

    def serve_prefect(self) -> "subprocess.Popen[bytes]":
        command = ["prefect", "server", "start", "--host", "127.0.0.1", "--port", str(self.ports["prefect"]), "--no-ui"]
        return self.answers("prefect", self.start(command, "prefect"))

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

    def worker(self, name: str) -> "subprocess.Popen[bytes]":
        """A machine of its own: its folder, its clones, its slot, its Prefect home."""
        home = self.folder / name
        home.mkdir(exist_ok=True)
        own = {"PREFECT_HOME": str(home), "CLINRL_CLONES": str(home / "clones"), "CLINRL_SLOT": f"cpu-of-{name}"}
        return self.start(
            ["prefect", "worker", "start", "--pool", "clinrl", "--name", name, "--limit", "1"],
            name, cwd=home, env={**self.client, **own, "PREFECT_WORKER_QUERY_SECONDS": "2"},
        )  # fmt: skip


def end(process: "subprocess.Popen[bytes]", number: int = signal.SIGTERM) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture
def plant(tmp_path: Path) -> Iterator[Plant]:
    with contextlib.ExitStack() as stack:
        yield Plant(tmp_path, stack)


@pytest.fixture
def checkout(bare: Path, plant: Plant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A person's checkout of a scripted project with five versions, pushed to an origin that the workers reach."""
    folder = tmp_path / "checkout"
    shutil.copytree(bare, folder)
    shutil.copytree(ROOT / "flows", folder / "flows", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "prefect.yaml", folder)
    content = scripted.sections()
    first = content["versions"]["v1"]
    content["versions"] |= {name: {**first, "seed": 10 + i} for i, name in enumerate(VERSIONS[2:])}
    monkeypatch.chdir(folder)
    Path("params.yaml").unlink()
    shutil.rmtree("params")
    scripted.write_project(folder, {**content, **scripted.PARAMS})
    write_text(scripted.SLOW, "6")
    write_text(Path(".gitignore"), IGNORED)
    run(sys.executable, "-m", "dvc", "remote", "add", "--default", "store", "s3://clinrl/dvc", env=plant.client)
    run(sys.executable, "-m", "dvc", "remote", "modify", "store", "endpointurl", plant.env["AWS_ENDPOINT_URL"])
    run("git", "init", "-q", "-b", "main", env=plant.env)
    run("git", "add", "--all", env=plant.env)
    run("git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "begun", env=plant.env)
    run("git", "clone", "-q", "--bare", ".", str(tmp_path / "origin"), env=plant.env)
    run("git", "remote", "add", "origin", str(tmp_path / "origin"), env=plant.env)
    return folder


def test_two_workers_build_what_one_machine_would_though_one_is_killed_and_the_server_restarted(
    checkout: Path, plant: Plant, tmp_path: Path
) -> None:
    run("prefect", "--no-prompt", "work-pool", "create", "clinrl", "--type", "process", env=plant.client)
    deploying = {**plant.client, "CLINRL_REPOSITORY": str(tmp_path / "origin")}
    run("prefect", "--no-prompt", "deploy", "--name", "elsewhere", env=deploying)
    lost = plant.worker("north")
    plant.worker("south")
    building = plant.start(
        [sys.executable, "-m", "flows", "build", "esi"], "build", cwd=checkout,
        env={**plant.client, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT}/src"},
    )  # fmt: skip
    eventually(lambda: working(tmp_path / "north"), 600)
    end(lost, signal.SIGKILL)
    for pid in working(tmp_path / "north"):  # the machine is gone, and all its processes
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    end(plant.prefect)
    plant.prefect = plant.serve_prefect()
    plant.worker("east")
    code = building.wait(1800)
    assert code == 0, (tmp_path / "build.log").read_text()[-4000:]

    assert run("git", "status", "--porcelain", env=plant.env) == ""  # the person's checkout is untouched
    run("git", "fetch", "-q", "origin", "built/esi", env=plant.env)
    run("git", "merge", "-q", "--ff-only", "FETCH_HEAD", env=plant.env)
    made = lock.read()
    assert {f"evaluate@{name}" for name in VERSIONS} <= made.keys()
    run(sys.executable, "-m", "dvc", "pull", "--quiet", *(f"evaluate@{name}" for name in VERSIONS), env=plant.client)
    assert not [fact for name in VERSIONS for fact in lock.facts(made, f"evaluate@{name}") if fact.state == "altered"]

    alone = tmp_path / "alone"
    run("git", "clone", "-q", str(tmp_path / "origin"), str(alone), env=plant.env)
    env = {key: value for key, value in plant.env.items() if not key.startswith("PREFECT_")}
    env |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT}/src", "PATH": plant.client["PATH"]}
    for name in VERSIONS:
        run(sys.executable, "-m", "clinrl.runtime.dvc_command", "repro", f"evaluate@{name}", cwd=alone, env=env)
    with contextlib.chdir(alone):
        assert lock.outputs(lock.read()) == lock.outputs(made)

    run(sys.executable, "-c", LOADS, *VERSIONS, env=dict(plant.client), cwd=tmp_path)
    for log in tmp_path.glob("*.log"):
        assert "canary-secret" not in log.read_text(errors="replace"), log


def working(home: Path) -> list[int]:
    """The processes that work below a folder."""
    found = []
    for place in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if place.name.isdigit() and home in Path(os.readlink(place / "cwd")).parents:
                found.append(int(place.name))
    return found
