"""A stage in a child process: its lines, its exit code, its end, and the lock that it waits for. Real processes."""

import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import forks
from clinrl.errors import ParamsError
from clinrl.runtime import child
from clinrl.runtime.dvc_state import REPRO
from processes import alive, eventually, number_in

ROOT = Path(__file__).parents[2]

STAGES = """\
stages:
  quick:
    cmd: echo made > quick.txt
    outs: [quick.txt]
  endless:
    cmd: echo $$ > pid; exec sleep 600
    outs: [endless.txt]
  broken:
    cmd: 'echo "clinrl: no adapter today" >&2; exit 3'
    outs: [broken.txt]
"""


@pytest.fixture(scope="module")
def dvc_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DVC project with one stage that works, one that never ends and one that fails."""
    folder = tmp_path_factory.mktemp("dvc")
    (folder / "dvc.yaml").write_text(STAGES)
    forks.dvc("init", "--no-scm", "--quiet", where=folder)
    return folder


@pytest.fixture
def here(dvc_project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(dvc_project, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def dvc(stage: str) -> list[str]:
    return [sys.executable, "-m", "dvc", "repro", "--single-item", stage]


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_starter_that_is_killed(here: Path, number: int) -> None:
    program = f"from clinrl.runtime import child; child.run({dvc('endless')!r}, print)"
    starter = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL)
    try:
        stage = number_in(here / "pid")
        starter.send_signal(number)
        starter.wait(30)
        eventually(lambda: not alive(stage))
    finally:
        starter.kill()
        starter.wait()


@pytest.mark.long
def test_a_killed_dvc_ends_its_stage(here: Path) -> None:
    process = child.start(dvc("endless"), stdout=subprocess.DEVNULL)
    stage = number_in(here / "pid")
    runner = subprocess.run(["ps", "-o", "ppid=", "-p", str(stage)], capture_output=True, text=True, check=True)
    os.kill(int(runner.stdout), signal.SIGKILL)
    assert process.wait(20) == 128 + signal.SIGKILL
    assert not alive(stage)
    child.end(process)


def test_a_stage_runs_once_and_fails_with_its_own_words(here: Path) -> None:
    """DVC is started once for three commands, as it takes longer to start than to do them."""
    from flows import steps

    said: list[str] = []
    stages = ("quick", "quick", "broken")
    program = f"from dvc.cli import main; *done, code = [main(words) for words in {[dvc(s)[3:] for s in stages]}]"
    code = child.run([sys.executable, "-c", f"{program}; assert done == [0, 0]; raise SystemExit(code)"], said.append)
    assert (here / "quick.txt").read_text() == "made\n"
    assert "Stage 'quick' didn't change, skipping" in said
    failed = steps.failure("broken@x", code, said)
    assert (str(failed), failed.exit_code) == ("broken@x failed: no adapter today", 3)
    assert not isinstance(failed, steps.DvcBusy)


@pytest.mark.slow
def test_a_stage_that_dvc_does_not_know_fails(here: Path) -> None:
    from flows import steps

    unknown: list[str] = []
    code = child.run(dvc("absent"), unknown.append)
    assert str(steps.failure("absent@x", code, unknown)).startswith("absent@x failed: ")


@pytest.mark.long
def test_a_stage_waits_for_another_dvc_that_holds_the_project_s_lock(here: Path) -> None:
    """DVC frees the lock while a stage works, and without the lock it would not record what the stage made."""
    from dvc.repo import Repo

    said: list[str] = []
    with ThreadPoolExecutor() as pool:
        with Repo(here) as repo, repo.lock:
            working = pool.submit(child.run, [sys.executable, *REPRO, "--single-item", "quick"], said.append)
            with pytest.raises(TimeoutError):
                working.result(8)  # DVC would wait for 3 s
        assert working.result(60) == 0, said


@pytest.mark.parametrize("is_cut_short", [False, True])
def test_a_path_that_another_dvc_writes_is_told_from_a_failure(here: Path, is_cut_short: bool) -> None:
    from flows import steps

    holder = {"pid": os.getpid(), "cmd": "dvc repro"}
    held = json.dumps({"write": {str(here / "quick.txt"): holder}})
    (here / ".dvc/tmp/rwlock").write_text("" if is_cut_short else held)  # as after a power cut
    said: list[str] = []
    code = child.run(dvc("quick"), said.append)
    busy = steps.failure("quick@x", code, said)
    assert isinstance(busy, steps.DvcBusy)
    assert "remove .dvc/tmp/rwlock" in str(busy), "DVC takes whoever has a dead one's number now for a DVC"


def test_what_follows_a_stage_that_runs_is_handed_to_dvc_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """DVC itself calls the later ones up to date, since it has not seen yet what the first will make."""
    from flows import steps

    states, ran = {"probe@v3": "up to date", "train@v3": "changed", "evaluate@v3": "up to date"}, []
    monkeypatch.setattr(steps, "dvc_states", lambda _addresses: states)
    monkeypatch.setattr(steps, "repro", lambda stage, name: ran.append(f"{stage}@{name}"))
    assert steps.bring_up_to_date([*states]) == ran == ["train@v3", "evaluate@v3"]
    states["train@v3"] = "up to date"
    assert steps.bring_up_to_date([*states]) == []


def test_a_failure_without_a_word_is_still_a_sentence() -> None:
    from flows import steps

    assert str(steps.failure("train@v1", 3, [])) == "train@v1 failed: exit code 3, without any output"
    said = ["> python -m clinrl train v1", "ERROR: failed to reproduce 'train@v1': ... exited with -9"]
    killed = steps.failure("train@v1", 255, said)
    assert killed.exit_code == 1


@pytest.mark.parametrize("code", [-9, 137], ids=["supervisor", "dvc"])
def test_a_stage_that_was_killed_is_said_to_have_been(code: int) -> None:
    from flows import steps

    said = ["Running stage 'train@v1':", "> python -m clinrl train v1", "clinrl: step 31 of 60, reward 0.81"]
    failed = steps.failure("train@v1", code, said)
    assert str(failed) == ("train@v1 failed: it was killed (SIGKILL), not by its own doing; the same command continues")
    assert failed.exit_code == 1


def test_a_name_is_checked_before_dvc_makes_a_path_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect.logging import disable_run_logger

    from flows import steps

    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "params.yaml", tmp_path)
    shutil.copytree(ROOT / "params", "params")
    sound = Path("params/esi.yaml").read_text(encoding="utf-8")
    Path("params/esi.yaml").write_text(sound.replace("  esi-d4:", "  ../../mlruns:"), encoding="utf-8")
    with disable_run_logger(), pytest.raises(ParamsError, match=r"datasets\.\.\./\.\./mlruns is not a name"):
        steps.repro.fn("dataset", "../../mlruns")
