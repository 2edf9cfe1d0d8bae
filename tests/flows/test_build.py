"""Many machines, of real parts: PostgreSQL, S3, Prefect, MLflow, git, and workers that share nothing but these."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import scripted

from clinrl.artifacts import write_text
from clinrl.provenance import lock
from plant import NEEDS, Plant, end, run
from processes import eventually

ROOT = Path(__file__).parents[2]
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
KILLS = int(os.environ.get("CLINRL_TEST_KILLS", "4"))
SEED = 26
PARTS = ("worker", "worker", "prefect", "postgres", "s3")
"""What is killed, workers twice as often."""
pytestmark = NEEDS


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
    write_text(scripted.SLOW, str(6 + KILLS))
    write_text(Path(".gitignore"), scripted.IGNORED)
    plant.publish(folder, tmp_path / "origin")
    return folder


def test_two_workers_build_what_one_machine_would_though_one_is_killed_and_the_server_restarted(
    checkout: Path, plant: Plant, tmp_path: Path
) -> None:
    plant.deploy(tmp_path / "origin")
    lost = plant.worker("north")
    plant.worker("south")
    building = plant.build("esi", checkout)
    eventually(lambda: working(tmp_path / "north"), 600)
    end(lost, signal.SIGKILL)
    lose(tmp_path / "north")
    end(plant.prefect)
    plant.prefect = plant.serve_prefect()
    plant.worker("east")
    code = building.wait(1800)
    assert code == 0, (tmp_path / "build.log").read_text()[-4000:]
    check_built(plant, tmp_path)
    # The base's exam: by the one that began first, by one in a lost one's place, by one that was trained before it.
    made = [log.read_text().count("Running stage 'baseline@esi'") for log in tmp_path.glob("*.log")]
    assert 1 <= sum(made) <= 3 < len(VERSIONS), made


def test_killed_again_and_again_nothing_is_lost_doubled_or_different(
    checkout: Path, plant: Plant, tmp_path: Path
) -> None:
    """Workers, Prefect and the database die at random moments and come back; S3, which is memory here, stops answering.

    CLINRL_TEST_KILLS says how often. The person gives the command again whenever it has ended with an error.
    """
    plant.deploy(tmp_path / "origin")
    draw, done = random.Random(SEED), Counter[str]()
    workers = {name: plant.worker(name) for name in ("north", "south")}
    building, tries = plant.build("esi", checkout), 1

    def kill(what: str) -> None:
        if what == "worker":
            name = draw.choice(sorted(workers))
            end(workers[name], signal.SIGKILL)
            lose(tmp_path / name)
            workers[name] = plant.worker(name)
        elif what == "s3":
            os.killpg(plant.s3.pid, signal.SIGSTOP)
            time.sleep(draw.uniform(1, 15))
            os.killpg(plant.s3.pid, signal.SIGCONT)
        else:
            end(getattr(plant, what), signal.SIGKILL)
            setattr(plant, what, getattr(plant, f"serve_{what}")())

    while (code := building.poll()) != 0:
        if code is not None:
            building, tries = plant.build("esi", checkout), tries + 1
            assert tries <= KILLS + 1, (tmp_path / "build.log").read_text()[-4000:]
        if done.total() < KILLS and [*working(tmp_path / "north"), *working(tmp_path / "south")]:
            kill(what := draw.choice(PARTS))
            done[what] += 1
        with contextlib.suppress(subprocess.TimeoutExpired):
            building.wait(draw.uniform(2, 20))
    print(f"{done.total()} kills ({dict(done)}), the command was given {tries} times")
    assert done.total()
    check_built(plant, tmp_path)


def check_built(plant: Plant, tmp_path: Path) -> None:
    """Each version is there, once, with the bytes that one machine makes; and the checkout is as it was."""
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


def lose(home: Path) -> None:
    """The machine is gone, and all its processes."""
    for pid in working(home):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def working(home: Path) -> list[int]:
    """The processes that work below a folder."""
    found = []
    for place in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if place.name.isdigit() and home in Path(os.readlink(place / "cwd")).parents:
                found.append(int(place.name))
    return found
