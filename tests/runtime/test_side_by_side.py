"""Stages of a real DVC side by side: a diamond whose two middle stages can see whether both run at once."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dvc.utils.serialize import load_yaml

from clinrl.runtime import determinism, side_by_side, starter
from processes import below, eventually, gone, number_in, quietly_killed

ROOT = Path(__file__).parents[2]
STAGE = """\
import json, os, pathlib, sys, time

from clinrl.runtime import starter

starter.follow()
name, how = sys.argv[1], json.loads(pathlib.Path("how.json").read_text())
with open("log", "a") as log:
    log.write(f"begin {name}\\n")
pathlib.Path("begun", name).write_text(str(os.getpid()))
deadline = time.monotonic() + how["meets_s"]
other = pathlib.Path("begun", {"left": "right", "right": "left"}.get(name, name))
while not other.exists() and time.monotonic() < deadline:
    time.sleep(0.01)
print(f"met {other.exists()}")
if name == how["fails"]:
    sys.exit(7)
if name in how["stays"]:
    time.sleep(600)
pathlib.Path("out", name).write_text("whole\\n")
with open("log", "a") as log:
    log.write(f"end {name}\\n")
"""
AFTER = {"top": [], "left": ["top"], "right": ["top"], "bottom": ["left", "right"]}
COMMAND = [sys.executable, "-m", "clinrl.runtime.dvc_command", "--side-by-side", "repro", "--no-run-cache", "bottom"]

pytestmark = pytest.mark.skipif(determinism.processors() < 2, reason="stages run one by one on one processor")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("diamond")
    for inner in ("out", "begun"):
        (folder / inner).mkdir()
    stages = {
        name: {
            "cmd": f"{sys.executable} stage.py {name}",
            "deps": [f"out/{before}" for before in above],
            "params": ["scale"],
            "outs": [f"out/{name}"],
        }
        for name, above in AFTER.items()
    }
    (folder / "dvc.yaml").write_text(json.dumps({"stages": stages}))
    (folder / "params.yaml").write_text("scale: embedded\n")
    (folder / "stage.py").write_text(STAGE)
    subprocess.run([sys.executable, "-m", "dvc", "init", "--no-scm", "-q"], cwd=folder, check=True)
    return folder


@pytest.fixture
def project(bare: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bare, tmp_path / "project"))


def begun(
    project: Path, *, meets_s: float = 60, fails: str = "", stays: tuple[str, ...] = ()
) -> "subprocess.Popen[str]":
    """The command in a session of its own. The middle stages wait so long for each other; one may fail or stay."""
    shutil.rmtree(project / "begun")
    (project / "begun").mkdir()
    (project / "how.json").write_text(json.dumps({"meets_s": meets_s, "fails": fails, "stays": stays}))
    env = {name: value for name, value in os.environ.items() if name not in (*starter.DVCS, starter.STARTER)}
    env |= {"PYTHONPATH": str(ROOT / "src"), "DVC_NO_ANALYTICS": "1", "DVC_SITE_CACHE_DIR": str(project / "site")}
    return subprocess.Popen(
        COMMAND, cwd=project, env=env, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def said(process: "subprocess.Popen[str]", code: int) -> str:
    """All that a command printed, which ends with this exit code."""
    try:
        text, _ = process.communicate(timeout=300)
    finally:
        quietly_killed({process.pid: "itself"})
    assert process.returncode == code, text
    return text


def completes(project: Path) -> None:
    """The same command goes on, with what was ended and not with what was done."""
    said(begun(project), 0)
    lock = load_yaml(str(project / "dvc.lock"))["stages"]
    assert lock.keys() == AFTER.keys()
    assert (project / "log").read_text().count("end top") == 1
    for name in AFTER:
        assert (project / "out" / name).read_text() == "whole\n"


@pytest.mark.long
def test_stages_begin_after_those_before_them_and_run_beside_others(project: Path) -> None:
    text = said(begun(project), 0)
    log = (project / "log").read_text().splitlines()
    assert log[:2] == ["begin top", "end top"]
    assert {*log[2:4]} == {"begin left", "begin right"}
    assert log[-2:] == ["begin bottom", "end bottom"]
    lines = text.splitlines()
    assert {"left | met True", "right | met True", "bottom | met True"} <= {*lines}
    assert any(line.startswith("left took ") for line in lines)
    assert "didn't change, skipping" not in text
    again = said(begun(project), 0)
    assert again.count("didn't change, skipping") == len(AFTER)
    assert {*load_yaml(str(project / "dvc.lock"))["stages"]} == {*AFTER}


def test_a_stage_is_counted_before_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands, counts, begin = side_by_side.Commands(tmp_path / "running"), list[str](), subprocess.Popen

    def counted(*words: Any, **how: Any) -> "subprocess.Popen[str]":
        counts.append(commands.count.read_text())
        return begin(*words, **how)

    monkeypatch.setattr(side_by_side.subprocess, "Popen", counted)
    for _ in range(2):
        with commands.turn:
            commands.run("/bin/sh", "true", env=os.environ | {"DVC_STAGE": "s"})
    assert counts == ["1", "1"]


@pytest.mark.long
@pytest.mark.parametrize("why", ["full scale", "one processor"])
def test_stages_run_one_by_one(why: str, project: Path) -> None:
    allowed = os.sched_getaffinity(0)
    if why == "full scale":
        (project / "params.yaml").write_text("scale: full\n")
    else:
        os.sched_setaffinity(0, {min(allowed)})
    try:
        said(begun(project, meets_s=0.3), 0)
    finally:
        os.sched_setaffinity(0, allowed)
    log = (project / "log").read_text().splitlines()
    assert [line for line in log if line.startswith("end")] == [line.replace("begin", "end") for line in log[::2]]


@pytest.mark.long
def test_a_failure_names_its_stage_and_ends_the_others(project: Path) -> None:
    text = said(begun(project, fails="left", stays=("right",)), 255)
    assert "failed to reproduce 'left'" in text
    assert "exited with 7" in text
    assert "right was ended; the same command goes on with it" in text
    assert "begin bottom" not in (project / "log").read_text()
    assert {*load_yaml(str(project / "dvc.lock"))["stages"]} == {"top"}
    completes(project)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_end_reaches_all_stages_and_the_same_command_completes(number: int, project: Path) -> None:
    process = begun(project, stays=("left", "right"))
    for name in ("left", "right"):
        number_in(project / "begun" / name)
    family = below(process.pid)
    try:
        os.kill(process.pid, number)
        process.communicate(timeout=300)
        gone(family)
    finally:
        quietly_killed(family)
    assert {*load_yaml(str(project / "dvc.lock"))["stages"]} == {"top"}
    completes(project)


@pytest.mark.slow
def test_lines_of_many_stages_and_of_another_dvc_are_all_in_the_lock(project: Path) -> None:
    many, other = [f"s{number}" for number in range(16)], "other"
    stages = {name: {"cmd": f"echo {name} > out/{name}", "outs": [f"out/{name}"]} for name in (*many, other)}
    stages["all"] = {"cmd": "true", "deps": [f"out/{name}" for name in many]}
    (project / "dvc.yaml").write_text(json.dumps({"stages": stages}))
    plain = [word for word in COMMAND if word != "--side-by-side"]
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "DVC_SITE_CACHE_DIR": str(project / "site")}
    running = subprocess.Popen([*COMMAND[:-1], "all"], cwd=project, env=env, stdout=subprocess.DEVNULL)
    eventually(lambda: (project / "dvc.lock").exists())
    beside = subprocess.run([*plain[:-1], "--single-item", other], cwd=project, env=env, check=False)
    assert [running.wait(300), beside.returncode] == [0, 0]
    assert {*load_yaml(str(project / "dvc.lock"))["stages"]} == {*many, other, "all"}
