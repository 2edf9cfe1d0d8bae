"""Ten kills over the real series: whatever happens on the way, the adapters are the same, byte for byte.

Slow: it trains the whole committed series on the committed base. `make faults` runs it.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest

from clinrl import artifacts, paths
from clinrl.config.params import load_params
from clinrl.training.launch import STATUS

pytestmark = [pytest.mark.faults, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
KILLS = {"esi-v43": 3, "esi-v46": 3, "esi-v49": 4}
"""How often the training of each version is killed, in the order of the lineage."""
SOONEST_S, LATEST_S = 2.0, 45.0
"""Seconds after a start: while libraries load, between checkpoints, in the middle of writing one."""
SEED = 10
CLINRL = [sys.executable, "-m", "clinrl"]


class Kill(NamedTuple):
    """One SIGKILL: whose training, when after its start, and the step that the run's status named then."""

    version: str
    moment_s: float
    saved_step: int


def clinrl(project: Path, *arguments: str) -> None:
    """Run a command to its end. Its words go to the test's own output."""
    done = subprocess.run([*CLINRL, *arguments], cwd=project, check=False, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, f"clinrl {' '.join(arguments)} ended with {done.returncode}: {done.stderr}"


def killed(project: Path, version: str, moment_s: float) -> float | None:
    """Start the training of a version and kill its parent process at a moment.

    Returns None once it is dead, with its worker, and nothing unfinished stands where the next stage would look; or
    the seconds that the training took if it ended well before the moment.
    """
    started = time.monotonic()
    process = subprocess.Popen([*CLINRL, "train", version], cwd=project, stderr=subprocess.PIPE, text=True)
    try:
        _, errors = process.communicate(timeout=moment_s)
    except subprocess.TimeoutExpired:
        workers = children(process.pid)
        process.kill()
        process.communicate()
        for worker in workers:
            wait_until_gone(worker)
        if (project / paths.adapter(version)).exists():  # the kill came after it was published
            artifacts.verified(project / paths.adapter(version))
        return None
    assert process.returncode == 0, f"{process.returncode}: {errors}"
    return time.monotonic() - started


def children(process: int) -> list[int]:
    """The processes that a process started."""
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def wait_until_gone(process: int) -> None:
    """Wait until a process is dead. Fails if it lives on for half a minute."""
    deadline = time.monotonic() + 30
    stat = Path(f"/proc/{process}/stat")
    while True:
        try:
            if stat.read_text().rsplit(")", 1)[1].split()[0] in "ZX":
                return
        except (FileNotFoundError, ProcessLookupError):
            return
        assert time.monotonic() < deadline, f"the worker {process} outlived its parent"
        time.sleep(0.01)


def saved_step(project: Path, version: str) -> int:
    """The step from which the version's training would go on; 0 before its first checkpoint or after its end."""
    found = [*(project / ".clinrl/checkpoints").glob(f"{version}-*/{STATUS}")]
    return int(json.loads(found[0].read_text())["step"]) if found else 0


def train_with_kills(project: Path, version: str, kills: int, random: Random) -> Iterator[Kill]:
    """Train a version while killing it so many times at random moments, each time continued by the same command.

    A run that ended before its moment does not count: its adapter is thrown away, and it is killed sooner next time.
    """
    latest_s = LATEST_S
    left = kills
    while left:
        moment_s = random.uniform(min(SOONEST_S, latest_s / 2), latest_s)
        took_s = killed(project, version, moment_s)
        if took_s is None:
            left -= 1
            yield Kill(version, round(moment_s, 2), saved_step(project, version))
        else:
            latest_s = min(latest_s, took_s)
            shutil.rmtree(project / paths.adapter(version))
    clinrl(project, "train", version)


def prepared(project: Path) -> Path:
    """A project with params.yaml and base as they are committed, and the series' data sets and proofs built anew."""
    project.mkdir()
    shutil.copyfile(ROOT / "params.yaml", project / "params.yaml")
    shutil.copytree(ROOT / "params", project / "params")
    for folder in (paths.base("esi"), paths.adapter("esi-base")):
        shutil.copytree(ROOT / folder, project / folder)
    versions = load_params(project / "params.yaml").versions
    for data in dict.fromkeys(versions[name].data for name in KILLS):
        clinrl(project, "dataset", data)
        clinrl(project, "validate", data)
    for version in KILLS:
        clinrl(project, "probe", version)
    return project


def is_of_this_recipe(committed: Path, built: Path) -> bool:
    """Whether the adapter of the main checkout was made from the same base, data and recipe as the one built here."""
    if not (committed / artifacts.MANIFEST).exists():
        return False
    theirs, ours = artifacts.verified(committed), artifacts.verified(built)
    named = ("base", "data")
    return theirs.spec == ours.spec and [theirs.inputs[name] for name in named] == [ours.inputs[name] for name in named]


def files(folder: Path) -> dict[str, bytes]:
    """The bytes of every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_ten_kills_over_the_series_change_no_byte(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project = prepared(tmp_path / "killed")
    random = Random(SEED)
    for version, kills in KILLS.items():
        for kill in train_with_kills(project, version, kills, random):
            with capsys.disabled():
                print(f"\nkilled {kill.version} {kill.moment_s:.2f} s after its start, saved step {kill.saved_step}")
    assert not [*(project / ".clinrl/checkpoints").iterdir()]
    expected = ROOT
    if not all(is_of_this_recipe(ROOT / paths.adapter(name), project / paths.adapter(name)) for name in KILLS):
        with capsys.disabled():
            print("\nthe main checkout has no adapters of this recipe: comparing with an undisturbed run")
        expected = prepared(tmp_path / "undisturbed")
        for version in KILLS:
            clinrl(expected, "train", version)
    for version in KILLS:
        assert files(project / paths.adapter(version)) == files(expected / paths.adapter(version)), version
