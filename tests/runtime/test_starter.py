"""Who starts a stage takes it along: real processes below a real DVC, killed one by one. Nothing lives after 5 s."""

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from ruamel.yaml import YAML

import dolls
from clinrl import paths
from clinrl.errors import Refused
from clinrl.runtime import starter
from clinrl.training.launch import STATUS
from processes import alive, below, eventually, gone, number_in, quietly_killed

MADE = "whole\n"
STAGE = """\
import os, pathlib, sys, time

from clinrl.runtime import starter
from clinrl.errors import Refused
from clinrl.training.launch import STATUS

pathlib.Path("begun").write_text(str(os.getpid()))
try:
    time.sleep(float(os.environ.get("BEFORE_S", "0")))
    starter.follow()
    pathlib.Path("pid").write_text(str(os.getpid()))
    if not pathlib.Path("quick").exists():
        time.sleep(600)
except KeyboardInterrupt:
    pathlib.Path("asked").touch()
    if pathlib.Path("deaf").exists():
        time.sleep(600)
    sys.exit(130)
except Refused as refused:
    pathlib.Path("refused").write_text(str(refused))
    sys.exit(1)
pathlib.Path("made").write_text("whole\\n")
"""
"""A stage that follows its starter as those of clinrl do, without their libraries."""
SHELL_STAYS = "python stage.py; true"
MAKEFILE = "demo:\n\t@CLINRL_STARTER=$$PPID {python} -m clinrl.runtime.dvc_command repro\n"


def begun(folder: Path, command: list[str], **variables: str) -> "subprocess.Popen[bytes]":
    """A command in a session of its own, as a terminal gives it one."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {name: value for name, value in os.environ.items() if name not in (*starter.DVCS, starter.STARTER)}
    env |= {"PATH": path, "DVC_NO_ANALYTICS": "1", "SHELL": "/bin/bash"} | variables
    return subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )


DVC = [sys.executable, "-m", "clinrl.runtime.dvc_command", "repro"]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DVC project of one stage that runs until it is ended."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "stage.py").write_text(STAGE)
    (folder / "dvc.yaml").write_text("stages:\n  made:\n    cmd: python stage.py\n    outs: [made]\n")
    (folder / "Makefile").write_text(MAKEFILE.format(python=sys.executable))
    subprocess.run([sys.executable, "-m", "dvc", "init", "--no-scm", "--quiet"], cwd=folder, check=True)
    return folder


@pytest.fixture
def project(bare: Path, tmp_path: Path) -> Path:
    shutil.copytree(bare, tmp_path, dirs_exist_ok=True)
    return tmp_path


def ends_with(process: "subprocess.Popen[bytes]", victim: Callable[[dict[int, str]], int]) -> float:
    """Kill one of the processes below `process`, or itself, and return the seconds until all of them are gone."""
    family = {process.pid: "itself", **below(process.pid)}
    try:
        os.kill(victim(family), signal.SIGKILL)
        process.poll()
        return gone({pid: words for pid, words in family.items() if pid != process.pid})
    finally:
        quietly_killed(family)
        process.wait()


def itself(family: dict[int, str]) -> int:
    return next(iter(family))


def who_is(words: str) -> Callable[[dict[int, str]], int]:
    return lambda family: next(pid for pid, said in family.items() if words in said)


@pytest.mark.long
def test_a_stage_ends_with_its_dvc_and_the_same_command_completes(project: Path) -> None:
    process = begun(project, DVC)
    number_in(project / "pid")
    ends_with(process, itself)
    assert (project / "asked").exists()
    assert not (project / "made").exists()
    (project / "quick").touch()
    assert begun(project, DVC).wait(60) == 0
    assert (project / "made").read_text() == MADE


@pytest.mark.faults
def test_a_stage_that_does_not_hear_is_killed(project: Path) -> None:
    (project / "deaf").touch()
    process = begun(project, DVC)
    number_in(project / "pid")
    assert ends_with(process, itself) >= starter.GRACE_S - 0.5
    assert (project / "asked").exists()


@pytest.mark.faults
@pytest.mark.parametrize("victim", [itself, who_is(SHELL_STAYS)], ids=["dvc", "shell"])
def test_a_shell_between_the_two_makes_no_difference(project: Path, victim: Callable[[dict[int, str]], int]) -> None:
    (project / "dvc.yaml").write_text(f"stages:\n  made:\n    cmd: {SHELL_STAYS}\n    outs: [made]\n")
    process = begun(project, DVC)
    number_in(project / "pid")
    assert any(SHELL_STAYS in words for words in below(process.pid).values())
    ends_with(process, victim)


@pytest.mark.faults
def test_a_stage_whose_dvc_was_gone_before_it_could_look_does_not_begin(project: Path) -> None:
    process = begun(project, DVC, BEFORE_S="1")
    number_in(project / "begun")
    ends_with(process, itself)
    assert (project / "refused").read_text().startswith("the process that started this stage has ended")
    assert not (project / "pid").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    "victim", [itself, pytest.param(who_is("dvc_command repro"), marks=pytest.mark.faults)], ids=["make", "dvc"]
)
def test_a_demo_ends_with_make(project: Path, victim: Callable[[dict[int, str]], int]) -> None:
    process = begun(project, ["make", "demo"])
    number_in(project / "pid")
    ends_with(process, victim)


def test_the_demo_names_make_as_its_starter() -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    recipe = makefile.split("\ndemo:")[1].split("\n\n")[0]
    assert f"{starter.STARTER}=$$PPID python -m clinrl.runtime.forkserver" in recipe
    assert "exec $(DVC) --side-by-side --wait-for-lock repro" in recipe


@pytest.mark.long
@pytest.mark.parametrize(
    "both", [pytest.param(False, marks=pytest.mark.faults), True], ids=["supervisor", "flow-and-supervisor"]
)
def test_a_stage_of_a_flow_ends_with_its_supervisor(project: Path, both: bool) -> None:
    process = begun(project, [sys.executable, "-c", f"from clinrl.runtime import child; child.run({DVC!r}, print)"])
    number_in(project / "pid")
    if both:
        process.send_signal(signal.SIGSTOP)  # so that it cannot clear away
    ends_with(process, who_is("child.py"))


@pytest.mark.faults
def test_a_stage_of_a_closed_terminal_ends(project: Path) -> None:
    process = begun(project, DVC)
    number_in(project / "pid")
    family = {process.pid: "itself", **below(process.pid)}
    os.killpg(process.pid, signal.SIGHUP)
    process.wait(10)
    gone(family)


@pytest.mark.long
@pytest.mark.parametrize(
    "words", ["{python} stage.py &", pytest.param("nohup {python} -m dvc repro &", marks=pytest.mark.faults)]
)
def test_what_a_person_left_running_outlives_its_shell(project: Path, words: str) -> None:
    shell = begun(project, ["bash", "-c", words.format(python=sys.executable) + " sleep 600"])
    stage = number_in(project / "pid")
    shell.kill()
    shell.wait()
    time.sleep(4 * starter.EVERY_S)
    assert alive(stage)
    os.killpg(shell.pid, signal.SIGKILL)
    gone({stage: "stage.py"})


def test_whoever_ends_above_the_starter_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    parent = psutil.Process.parent

    def ended(process: psutil.Process) -> psutil.Process | None:
        if process.pid == os.getppid():
            raise psutil.NoSuchProcess(process.pid)
        return parent(process)

    monkeypatch.setattr(psutil.Process, "parent", ended)
    assert starter.is_above(os.getppid())
    assert not starter.is_above(0)


def test_a_name_that_is_no_number_is_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(starter.STARTER, "nobody")
    with pytest.raises(Refused, match="does not begin"):
        starter.follow()


TRAINING = """\
stages:
  train:
    cmd: python -m clinrl train v1
    deps: [data/bases/esi]
    outs: [data/adapters/v1]
"""


@pytest.mark.faults
def test_a_real_training_takes_its_worker_and_its_follower_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed three times (DVC, the stage, its worker), it ends with the bytes of an undisturbed one."""
    source = copy.deepcopy(dolls.PARAMS)
    source["profiles"]["imitate"]["trainer"]["embedded"] |= {"steps": 80, "checkpoint_every": 5}
    projects = [tmp_path / name for name in ("undisturbed", "killed")]
    for project in projects:
        shutil.copytree(dolls.built(), project)
        YAML(typ="safe").dump(source, project / "params.yaml")
        (project / "dvc.yaml").write_text(TRAINING)
        (project / "mlruns").mkdir()
        subprocess.run([sys.executable, "-m", "dvc", "init", "--no-scm", "--quiet"], cwd=project, check=True)
    assert begun(projects[0], DVC).wait(300) == 0
    monkeypatch.chdir(projects[1])

    def steps() -> int:
        return sum(file.read_text().count("\n") for file in Path(".clinrl/checkpoints").glob(f"v1-*/{paths.LIVE_FILE}"))

    for victim in (itself, who_is("clinrl train"), who_is("clinrl.training.worker")):
        before = steps()
        process = begun(projects[1], DVC)
        eventually(lambda before=before: steps() >= before + 8, 120)
        assert any("clinrl.tracking.live_metrics" in words for words in below(process.pid).values())
        seconds = ends_with(process, victim)
        assert not paths.adapter("v1").exists(), "it was done before it could be killed"
        print(f"{seconds:.1f} s, load {os.getloadavg()[0]:.1f}")
        if victim is itself and seconds < starter.GRACE_S:  # it had the time to end by itself
            status = next(Path(".clinrl/checkpoints").glob(f"v1-*/{STATUS}"))
            assert json.loads(status.read_text())["state"] == "stopped"
    assert begun(projects[1], DVC).wait(300) == 0
    assert dolls.files(paths.adapter("v1")) == dolls.files(projects[0] / paths.adapter("v1"))
