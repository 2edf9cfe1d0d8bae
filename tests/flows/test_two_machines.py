"""Ten runs of one retraining that are due at once, over two machines with a worker and a checkout each."""

import contextlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import scripted

import laid
from clinrl.artifacts import write_text
from clinrl.registry import versions
from plant import NEEDS, PASSWORD, Plant, run
from processes import eventually

ROOT = Path(__file__).parents[2]
RUNS = 10
MACHINE = 'mount --bind "$0" "$1" && cd "$1" && exec prefect worker start --pool clinrl-checkout --name "$2" --limit 10'
"""What is at the path of the checkout is this machine's own."""
pytestmark = NEEDS


@pytest.fixture
def machines(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Two disks with the same checkout, of one origin, one DVC remote and one registry. A worker runs on each.

    Prefect is over PostgreSQL: two workers that ask every two seconds find SQLite locked.
    """

    def change(content: Any) -> None:
        content["versions"]["v3"] = {**content["versions"]["v2"], "parent": "v2", "seed": 9}
        content["schedules"]["esi"]["answer_within_s"] = 1

    disks = [tmp_path / name for name in ("north", "south")]
    with contextlib.ExitStack() as stack:
        plant = Plant(tmp_path, stack)
        here = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/registry/mlflow.db", "PREFECT_WORKER_QUERY_SECONDS": "2"}
        for name, value in {**plant.client, **here, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT}/src"}.items():
            monkeypatch.setenv(name, value)
        shutil.copytree(project / "mlruns", tmp_path / "registry")
        laid.edit(project, change)
        write_text(scripted.SLOW, "5")
        shutil.copytree(ROOT / "flows", project / "flows", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "prefect.yaml", project)
        run("dvc", "remote", "add", "--default", "store", str(tmp_path / "store"))
        run("dvc", "push", "--quiet")
        scripted.commit()
        run("git", "clone", "-q", "--bare", ".", str(tmp_path / "origin"))
        run("git", "remote", "add", "origin", str(tmp_path / "origin"))
        run("prefect", "--no-prompt", "work-pool", "create", "clinrl-checkout", "--type", "process")
        run("prefect", "--no-prompt", "deploy", "--name", "scheduled/esi")
        for disk in disks:
            shutil.copytree(project, disk, symlinks=True)
            command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", MACHINE]
            own = {**os.environ, "PREFECT_HOME": str(disk / ".clinrl/prefect")}
            plant.start([*command, str(disk), str(project), disk.name], disk.name, env=own)
        yield disks


def test_of_ten_at_once_one_trains_and_nine_say_that_nothing_is_left_to_do(machines: list[Path]) -> None:
    from prefect import get_client
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    known = {PREFECT_API_URL: os.environ["PREFECT_API_URL"], PREFECT_API_AUTH_STRING: PASSWORD}
    with temporary_settings(known), get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name("retrain/esi")
        due = [client.create_flow_run_from_deployment(deployment.id).id for _ in range(RUNS)]

        def ended() -> Any:
            runs = [client.read_flow_run(one) for one in due]
            return runs if all(run.state.is_final() for run in runs) else None

        runs = eventually(ended, 3000)
    said = Counter(run.state.name for run in runs)
    assert said.pop("Not approved") == 1, [run.state.message for run in runs]
    assert said.keys() <= {"Nothing to do", "Overtaken"}, [run.state.message for run in runs]
    clones = {path.name for disk in machines for path in (disk / ".clinrl/clones").glob("*-[0-9]")}
    assert clones == {"retrain-esi-1"}  # two at once on one machine would need one more
    worked = [disk / ".clinrl/clones/retrain-esi-1/worked.jsonl" for disk in machines]
    words = [json.loads(line)["words"] for log in worked if log.exists() for line in log.read_text().splitlines()]
    assert words.count(["train", "v3"]) == 1
    assert [entry.name for entry in versions.entries("esi")].count("v3") == 1
    lines = scripted.git("ls-remote", "origin", "refs/heads/built/retrain-esi").splitlines()
    assert len(lines) == 1
