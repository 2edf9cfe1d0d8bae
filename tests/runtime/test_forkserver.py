"""Stages in forks of a server: each does what a process of its own would, ends as it would, and outlives nobody."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from ruamel.yaml import YAML

import dolls
from clinrl import paths
from clinrl.artifacts import locked
from clinrl.cli import stage_commands
from clinrl.errors import ParamsError, Refused
from clinrl.runtime import child, determinism, forkserver, worker_process
from processes import alive, below, eventually, gone, number_in, quietly_killed

COMMANDS = """\
import json, os, sys, time
from pathlib import Path

def main(words):
    what = words[0]
    if what == "tell":
        sys.stdin.read()
        print(json.dumps([os.getcwd(), os.environ.get("COLOUR"), os.environ.get("CLINRL_FORKSERVER"), words[1:]]))
        print("oh", file=sys.stderr)
        return 3
    if what == "quick":
        Path("done").write_text(str(os.getpid()))
        return 4
    if what == "raise":
        raise ValueError("what went wrong")
    Path("pid.new").write_text(str(os.getpid()))
    os.rename("pid.new", "pid")
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        Path("interrupted").touch()
    try:
        time.sleep(0.5)
    except KeyboardInterrupt:
        return 131
    return 130
"""
"""A command line with the server's contract, without libraries."""
SERVE = (
    "from clinrl.runtime import forkserver as f\n"
    "f.LIBRARIES, f.LATER, f.CLI = ('json',), ('absent',), 'commands'; f.serve('socket')"
)
ASK = "import sys; from clinrl.runtime import forkserver as f; sys.exit(f.ask(sys.argv[1:]))"


STAGES = ("train@v1", "train@v2")


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a server."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "commands.py").write_text(COMMANDS)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", SERVE]
    with subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path}) as server:
        eventually((folder / "socket").exists)
        yield folder
        server.kill()


def asked(serving: Path, folder: Path, *words: str, **variables: str) -> "subprocess.Popen[str]":
    """A process in a folder that has a fork do something."""
    env = os.environ | {forkserver.SERVER: str(serving / "socket")} | variables
    return subprocess.Popen(
        [sys.executable, "-c", ASK, *words], cwd=folder, env=env, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_a_fork_has_the_streams_folder_and_environment_of_who_asks_and_gives_its_exit_code(serving, tmp_path):
    for colour in ("red", "x" * 200_000):  # more than one message of a socket holds
        process = asked(serving, tmp_path, "tell", "a b", COLOUR=colour[:100_000], MORE=colour[100_000:])
        out, err = process.communicate()
        assert (process.returncode, err) == (3, "oh\n")
        assert json.loads(out) == [str(tmp_path), colour[:100_000], None, ["a b"]]


def test_a_fork_that_ends_before_its_stage_looks_gives_its_exit_code(serving, tmp_path, monkeypatch):
    send = forkserver.socket.send_fds

    def slowly(*arguments):
        sent = send(*arguments)
        fork = number_in(tmp_path / "done")
        eventually(lambda: not alive(fork))
        time.sleep(0.3)  # the server hangs up
        return sent

    monkeypatch.setattr(forkserver.socket, "send_fds", slowly)
    monkeypatch.setenv(forkserver.SERVER, str(serving / "socket"))
    monkeypatch.chdir(tmp_path)
    assert forkserver.ask(["quick"]) == 4


def test_what_goes_wrong_in_a_fork_is_said_as_a_process_says_it(serving, tmp_path):
    process = asked(serving, tmp_path, "raise")
    _, err = process.communicate()
    assert process.returncode == 1
    assert err.startswith("Traceback")
    assert "what went wrong" in err


@pytest.mark.parametrize("server", [None, "/nowhere/socket", "nobody listens"])
def test_without_a_server_nothing_is_handed_over(monkeypatch, tmp_path, server):
    monkeypatch.delenv(forkserver.SERVER, raising=False)
    if server == "nobody listens":
        import socket

        server = str(tmp_path / "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(server)
    if server:
        monkeypatch.setenv(forkserver.SERVER, server)
    assert forkserver.ask(["tell"]) is None


def test_an_interrupt_reaches_the_fork_once_and_its_answer_comes_back(serving, tmp_path):
    process = asked(serving, tmp_path, "wait")
    fork = number_in(tmp_path / "pid")
    assert os.getpgid(fork) != os.getpgid(process.pid)  # the terminal interrupts a group: the fork would hear it twice
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(20) == 130  # 131 if twice
    assert (tmp_path / "interrupted").exists()
    assert not alive(fork)
    process.communicate()


def test_a_fork_ends_with_who_asked(serving, tmp_path):
    process = asked(serving, tmp_path, "wait")
    fork = number_in(tmp_path / "pid")
    process.kill()
    process.communicate()
    gone({fork: "the fork"})


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_who_asked_learns_which_signal_ended_its_fork(serving, tmp_path, number):
    process = asked(serving, tmp_path, "wait")
    (tmp_path / "other").mkdir()
    other = asked(serving, tmp_path / "other", "wait")
    number_in(tmp_path / "other/pid")  # it holds nothing that would keep the first waiting
    os.kill(number_in(tmp_path / "pid"), number)
    assert process.wait(20) == 128 + number
    process.communicate()
    other.kill()
    other.communicate()


def test_the_server_ends_with_its_command_and_with_who_started_it(tmp_path):
    main = "import sys; from clinrl.runtime import forkserver as f; sys.exit(f.main(sys.argv[1:]))"
    told = (
        f"import os, time; there = lambda: os.path.exists(os.environ['{forkserver.SERVER}'])\n"
        "for _ in range(600):\n"
        "    there() or time.sleep(0.1)  # the server imports much before it listens\n"
        "print(there()); raise SystemExit(5)"
    )
    env = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", main, sys.executable, "-c", told]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=env)
    assert done.returncode == 5
    assert done.stdout == "True\n"
    assert not list(tmp_path.iterdir())
    process = subprocess.Popen([sys.executable, "-c", main, "sleep", "600"], start_new_session=True)
    family = eventually(lambda: len(found := below(process.pid)) > 1 and found)
    try:
        process.kill()
        process.wait()
        gone({pid: words for pid, words in family.items() if "sleep" not in words})  # a shell's command, as any
    finally:
        quietly_killed(family)


@pytest.mark.long
def test_an_interrupt_is_left_to_the_command_and_what_ends_the_server_s_process_ends_the_command(tmp_path):
    main = "import sys; from clinrl.runtime import forkserver as f; sys.exit(f.main(sys.argv[1:]))"
    slow = (
        "import pathlib, time\n"
        "try: pathlib.Path('begun').touch(); time.sleep(600)\n"
        "except KeyboardInterrupt: time.sleep(1); raise SystemExit(9)"
    )
    for number, code in ((signal.SIGINT, 9), (signal.SIGTERM, 128 + signal.SIGTERM)):
        (tmp_path / "begun").unlink(missing_ok=True)
        process = subprocess.Popen(
            [sys.executable, "-c", main, sys.executable, "-c", slow], cwd=tmp_path, start_new_session=True
        )
        eventually((tmp_path / "begun").exists)
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            process.send_signal(number)
        assert process.wait(20) == code


def test_who_asks_a_server_that_has_ended_does_not_wait_for_its_forks(tmp_path):
    (tmp_path / "commands.py").write_text(COMMANDS)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, "-c", SERVE], cwd=tmp_path, stdin=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path}
    ) as server:
        eventually((tmp_path / "socket").exists)
        first = asked(tmp_path, tmp_path, "wait")
        fork = number_in(tmp_path / "pid")
        server.kill()
    second = asked(tmp_path, tmp_path, "tell")
    second.communicate(timeout=20)
    assert second.returncode == 0  # sys.exit(None): nothing was handed over
    assert alive(fork)
    first.kill()
    first.communicate()
    gone({fork: "the fork"})


def test_a_forked_child_is_waited_for_as_a_started_one():
    for end, code in (
        (lambda: 4, 4), (lambda: sys.exit(6), 6), (lambda: sys.exit("no"), 1), (lambda: sys.exit(), 0),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), -15),
    ):  # fmt: skip
        ended = forkserver.Fork(end)
        assert (ended.wait(), ended.poll()) == (code, code)
    waiting = forkserver.Fork(lambda: signal.pause() or 0)
    assert waiting.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(0.05)
    assert os.getsid(waiting.pid) == waiting.pid  # at once: a signal to its group must find it
    os.killpg(waiting.pid, signal.SIGKILL)
    assert waiting.wait() == -9


def test_a_fork_holds_no_lock_of_its_starter(tmp_path):
    def held() -> int:
        descriptors = Path("/proc/self/fd").iterdir()
        return sum(one.exists() and one.readlink().name == "stage.lock" for one in descriptors)

    with locked(tmp_path / "stage.lock"):
        assert held() == 1
        assert forkserver.Fork(held).wait(60) == 0


def test_what_a_library_left_for_the_end_of_python_does_not_change_a_fork_s_exit_code(monkeypatch):
    def of_threads_no_fork_has() -> None:
        raise AssertionError

    monkeypatch.setattr(threading, "_threading_atexits", [of_threads_no_fork_has])  # as Prefect's
    assert forkserver.Fork(lambda: 4).wait() == 4


@pytest.fixture
def two_processors(tmp_path, monkeypatch):
    """As in a stage that has two processors and runs alone, of several that may run side by side."""
    import torch

    (tmp_path / "running").write_text("1")
    monkeypatch.setenv(determinism.RUNNING, str(tmp_path / "running"))
    monkeypatch.setattr(determinism, "processors", lambda: 2)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def met(mine: Path, other: Path) -> tuple[bool, int, int]:
    """Whether another came while this one was there, in which process, and with how many threads."""
    import torch

    mine.touch()
    found = bool(eventually(other.exists))
    return found, os.getpid(), torch.get_num_threads()


def test_programs_run_in_forks_side_by_side_and_their_results_come_in_order(two_processors, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    programs = [partial(met, first, second), partial(met, second, first), lambda: (True, os.getpid(), 1)]
    found = forkserver.results(programs)
    assert [(is_met, threads) for is_met, _, threads in found] == [(True, 1)] * 3
    assert len({os.getpid(), *(process for _, process, _ in found)}) == 4


def test_beside_another_stage_programs_run_here_one_by_one(two_processors, tmp_path):
    (tmp_path / "running").write_text("2")
    assert forkserver.results([os.getpid, os.getpid]) == [os.getpid()] * 2


def test_what_a_program_raises_or_dies_of_ends_the_others(two_processors, tmp_path):
    def refused() -> None:
        raise Refused("not so")

    def stays() -> None:
        (tmp_path / "pid").write_text(str(os.getpid()))
        signal.pause()

    def killed() -> None:
        number_in(tmp_path / "pid")
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(Refused, match="not so"):
        forkserver.results([stays, refused])
    with pytest.raises(Refused, match="was killed"):
        forkserver.results([stays, killed])
    assert not alive(number_in(tmp_path / "pid"))


def test_where_there_is_a_gpu_nothing_is_served(monkeypatch, tmp_path):
    import torch

    served = []
    monkeypatch.setattr(forkserver, "LIBRARIES", ("torch",))
    monkeypatch.setattr(forkserver, "_serve_forever", lambda _: served.append(True))
    monkeypatch.setattr(forkserver, "_end_with_input", lambda: None)
    monkeypatch.setattr(forkserver.gc, "freeze", lambda: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for has_gpu, expected in ((True, []), (False, [True])):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        forkserver.serve(str(tmp_path / str(has_gpu)))
        assert served == expected


def test_below_a_supervisor_of_its_own_a_stage_works_by_itself(monkeypatch):
    monkeypatch.setenv(forkserver.SERVER, "/nowhere")
    said = []
    told = f"import os; print(os.environ.get('{forkserver.SERVER}'))"
    assert child.run([sys.executable, "-c", told], said.append) == 0
    assert said == ["None"]


@pytest.mark.slow
def test_trainings_in_forks_give_the_bytes_of_processes(tmp_path):
    found = []
    for kind, server in (("processes", []), ("forks", [sys.executable, "-m", "clinrl.runtime.forkserver"])):
        folder = tmp_path / kind
        shutil.copytree(dolls.built(), folder)
        YAML(typ="safe").dump(dolls.PARAMS, folder / "params.yaml")
        shutil.copyfile(Path(__file__).parents[2] / "dvc.yaml", folder / "dvc.yaml")
        stages = " && ".join(f"{sys.executable} -m clinrl stage {stage}" for stage in STAGES)
        env = {name: value for name, value in os.environ.items() if name != "DVC_STAGE"}
        subprocess.run([*server, "bash", "-c", stages], cwd=folder, env=env, check=True)
        found.append([dolls.files(folder / made) for made in map(paths.adapter, ("v1", "v2"))])
    assert found[0] == found[1]
    assert all(found[0])


def test_within_a_fork_the_worker_is_a_fork_that_dies_with_it(monkeypatch, tmp_path):
    monkeypatch.setattr(forkserver, "IS_FORK", True)
    monkeypatch.setattr(worker_process, "WORKER", "commands")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "commands.py").write_text(
        "import os, time\n"
        "from clinrl.runtime.starter import die_with\n"
        "def main(arguments):\n"
        "    die_with(int(arguments[1]))\n"
        "    open(arguments[0], 'w').write(str(os.getpid()))\n"
        "    if arguments[0].endswith('short'):\n"
        "        return 4\n"
        "    time.sleep(600)\n"
    )
    assert worker_process.run_worker(tmp_path / "short") == 4
    stage = forkserver.Fork(lambda: worker_process.run_worker(tmp_path / "long"))
    worker = number_in(tmp_path / "long")
    os.kill(stage.pid, signal.SIGKILL)
    stage.wait()
    gone({worker: "the worker"})
    with suppress(ProcessLookupError):
        os.kill(worker, signal.SIGKILL)


def test_a_stage_that_needs_libraries_is_handed_over_and_others_are_not(monkeypatch, tmp_path):
    handed = []
    monkeypatch.setattr(forkserver, "ask", lambda words: handed.append(words) or 7)
    assert stage_commands.stage(Path("other.yaml"), "train@esi-v46") == 7
    assert stage_commands.stage(Path("other.yaml"), "baseline@esi") == 7
    assert handed == [["stage", address, "--params", "other.yaml"] for address in ("train@esi-v46", "baseline@esi")]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ParamsError, match=r"^params\.yaml does not exist; start in the project's root"):
        stage_commands.stage(Path("params.yaml"), "dataset@esi-d3")
    assert len(handed) == 2
