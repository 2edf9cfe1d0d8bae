"""A stage in a child process: its lines, its exit code, its end, and the lock that it waits for. Real processes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clinrl.errors import ParamsError
from flows import child

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
    subprocess.run([sys.executable, "-m", "dvc", "init", "--no-scm", "--quiet"], cwd=folder, check=True)
    return folder


@pytest.fixture
def here(dvc_project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(dvc_project, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def dvc(stage: str) -> list[str]:
    return [sys.executable, "-m", "dvc", "repro", "--single-item", stage]


def alive(pid: int) -> bool:
    """Whether a process exists and is not just waiting for its parent to take notice of its end."""
    listed = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return bool(listed.stdout.strip()) and not listed.stdout.strip().startswith("Z")


def eventually(found: Callable[[], object]) -> object:
    """What `found` returns once that is true. Fails after twenty seconds."""
    deadline = time.monotonic() + 20
    while not (value := found()):
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)
    return value


def number_in(path: Path) -> int:
    """The process number in a file, as soon as it is there."""
    return int(str(eventually(lambda: path.exists() and path.read_text().strip())))


def test_lines_come_as_they_are_printed_and_the_exit_code_at_the_end() -> None:
    said: list[tuple[str, float]] = []
    code = child.run(
        ["sh", "-c", "echo one; echo; sleep 0.3; echo two >&2; exit 7"],
        lambda line: said.append((line, time.monotonic())),
    )
    assert (code, [line for line, _ in said]) == (7, ["one", "two"])
    assert said[1][1] - said[0][1] > 0.2


def test_text_that_is_none_stops_nothing() -> None:
    said: list[str] = []
    assert child.run(["printf", r"\377\n"], said.append) == 0
    assert said == ["�"]


def test_python_is_the_interpreter_that_runs_the_flow() -> None:
    said: list[str] = []
    child.run(["sh", "-c", "python -c 'import sys; print(sys.prefix)'"], said.append)
    assert said == [sys.prefix]


def test_an_exception_ends_the_whole_group(tmp_path: Path) -> None:
    def stop(_line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        child.run(["sh", "-c", f"sleep 600 & echo $! > {tmp_path}/pid; echo started; wait"], stop)
    assert not alive(number_in(tmp_path / "pid"))


def test_who_is_asked_to_end_is_asked_once_and_waited_for(tmp_path: Path) -> None:
    script = tmp_path / "trainer.sh"
    script.write_text(f"trap 'echo asked >> {tmp_path}/asked' TERM\necho ready\nwhile ! [ -s {tmp_path}/asked ]; do\n"
                      "sleep 0.05; done\nsleep 0.5; echo saved >> saved\n")  # fmt: skip
    process = child.start(["sh", "-c", f"bash {script}; true"], stdout=subprocess.PIPE, cwd=tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    child.end(process)
    assert (tmp_path / "saved").read_text() == "saved\n"
    assert (tmp_path / "asked").read_text() == "asked\n"


def test_who_does_not_end_is_killed(tmp_path: Path) -> None:
    process = child.start(["bash", "-c", f"trap '' TERM; echo $$ > {tmp_path}/pid; while true; do sleep 0.1; done"])
    pid = number_in(tmp_path / "pid")
    child.end(process, grace_s=0.5)
    assert not alive(pid)


def test_a_killed_command_takes_what_it_started_along(tmp_path: Path) -> None:
    process = child.start(["bash", "-c", f"sleep 600 & echo $! > {tmp_path}/pid; kill -9 $$"])
    assert process.wait(20) == 128 + signal.SIGKILL
    assert not alive(number_in(tmp_path / "pid"))
    child.end(process)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_starter_that_is_killed(here: Path, number: int) -> None:
    program = f"from flows import child; child.run({dvc('endless')!r}, print)"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    starter = subprocess.Popen([sys.executable, "-c", program], env=env, stdout=subprocess.DEVNULL)
    try:
        stage = number_in(here / "pid")
        starter.send_signal(number)
        starter.wait(30)
        eventually(lambda: not alive(stage))
    finally:
        starter.kill()
        starter.wait()


def test_a_killed_dvc_ends_its_stage(here: Path) -> None:
    said: list[str] = []
    process = child.start(dvc("endless"), stdout=subprocess.DEVNULL)
    stage = number_in(here / "pid")
    runner = subprocess.run(["ps", "-o", "ppid=", "-p", str(stage)], capture_output=True, text=True, check=True)
    os.kill(int(runner.stdout), signal.SIGKILL)
    assert process.wait(20) == 128 + signal.SIGKILL
    assert not alive(stage)
    child.end(process)
    assert said == []


def test_a_stage_runs_once_and_fails_with_its_own_words(here: Path) -> None:
    from flows import steps

    said: list[str] = []
    assert child.run(dvc("quick"), said.append) == 0
    assert (here / "quick.txt").read_text() == "made\n"
    assert child.run(dvc("quick"), said.append) == 0
    assert "Stage 'quick' didn't change, skipping" in said
    code = child.run(dvc("broken"), said.append)
    failed = steps.failure("broken@x", code, said)
    assert (str(failed), failed.exit_code) == ("broken@x failed: no adapter today", 3)
    assert not isinstance(failed, steps.DvcBusy)
    unknown: list[str] = []
    code = child.run(dvc("absent"), unknown.append)
    assert str(steps.failure("absent@x", code, unknown)).startswith("absent@x failed: ")


@pytest.fixture
def locked(here: Path) -> Iterator[None]:
    """Another DVC that holds the project's lock, in the form of the process that it is."""
    program = (
        "import sys, time\nfrom dvc.repo import Repo\n"
        "with Repo().lock:\n    print('held', flush=True); time.sleep(600)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    yield
    holder.kill()
    holder.communicate()


@pytest.mark.usefixtures("locked")
def test_a_lock_held_by_another_dvc_is_told_from_a_failure(here: Path) -> None:
    from flows import steps

    said: list[str] = []
    code = child.run(dvc("quick"), said.append)
    failed = steps.failure("quick@x", code, said)
    assert isinstance(failed, steps.DvcBusy)
    assert failed.exit_code == 75


def test_a_path_that_another_dvc_writes_is_told_from_a_failure(here: Path) -> None:
    from flows import steps

    holder = {"pid": os.getpid(), "cmd": "dvc repro"}
    (here / ".dvc/tmp/rwlock").write_text(json.dumps({"write": {str(here / "quick.txt"): holder}}))
    said: list[str] = []
    code = child.run(dvc("quick"), said.append)
    assert isinstance(steps.failure("quick@x", code, said), steps.DvcBusy)


def test_a_failure_without_a_word_is_still_a_sentence() -> None:
    from flows import steps

    assert str(steps.failure("train@v1", 137, [])) == "train@v1 failed: exit code 137, without a word"
    said = ["> python -m clinrl train v1", "ERROR: failed to reproduce 'train@v1': ... exited with -9"]
    killed = steps.failure("train@v1", 255, said)
    assert killed.exit_code == 1


def test_a_name_is_checked_before_dvc_makes_a_path_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect.logging import disable_run_logger

    from flows import steps

    monkeypatch.chdir(tmp_path)
    sound = (ROOT / "params.yaml").read_text(encoding="utf-8")
    Path("params.yaml").write_text(sound.replace("  esi-d2:", "  ../../mlruns:"), encoding="utf-8")
    with disable_run_logger(), pytest.raises(ParamsError, match=r"datasets\.\.\./\.\./mlruns is not a name"):
        steps.repro.fn("dataset", "../../mlruns")
