"""A command and its supervisor: its lines, its exit code and its end. Real processes."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from clinrl.runtime import child
from processes import alive, below, gone, number_in


def test_lines_come_as_they_are_printed_and_the_exit_code_at_the_end(tmp_path: Path) -> None:
    """The second line is printed only where the first has come."""
    said: list[str] = []
    come = tmp_path / "come"

    def note(line: str) -> None:
        said.append(line)
        come.touch()

    second = f"for _ in $(seq 600); do if [ -e {come} ]; then echo two >&2; break; fi; sleep 0.1; done"
    assert child.run(["sh", "-c", f"echo one; echo; {second}; exit 7"], note) == 7
    assert said == ["one", "two"]


def test_text_that_is_none_stops_nothing() -> None:
    said: list[str] = []
    assert child.run(["printf", r"\377\n"], said.append) == 0
    assert said == ["�"]


def test_python_is_the_interpreter_that_runs_the_flow() -> None:
    said: list[str] = []
    child.run(["sh", "-c", "python -c 'import sys; print(sys.prefix)'"], said.append)
    assert said == [sys.prefix]


def test_a_socket_that_is_handed_over_is_the_commands_until_it_has_ended() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port, number = listening.getsockname()[1], listening.fileno()
        held = f"import os, socket; print(socket.socket(fileno={number}).getsockname()[1], os.getppid(), flush=True)"
        command = [sys.executable, "-c", f"{held}; import time; time.sleep(600)"]
        process = child.start(command, stdout=subprocess.PIPE, pass_fds=[number])
    assert process.stdout is not None
    assert process.stdout.readline().split() == [str(port), str(process.pid)]
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", port))
    child.end(process)
    socket.create_server(("127.0.0.1", port)).close()


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


def test_a_killed_supervisor_does_not_keep_its_starter_waiting(tmp_path: Path) -> None:
    program = f"""
import sys; from clinrl.runtime import child
code = child.run(["bash", "-c", "echo $PPID > {tmp_path}/supervisor; echo $$ > {tmp_path}/pid; sleep 600"], print)
print(code)
"""
    starter = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    command = number_in(tmp_path / "pid")
    os.kill(number_in(tmp_path / "supervisor"), signal.SIGKILL)
    assert starter.communicate(timeout=60)[0] == f"{-signal.SIGKILL}\n"
    assert not alive(command)


def test_a_command_may_end_by_itself_when_its_starter_is_killed(tmp_path: Path) -> None:
    script = (
        f"trap 'echo asked > {tmp_path}/asked; exit' TERM; echo $$ > {tmp_path}/pid; while true; do sleep 0.1; done"
    )
    program = f"from clinrl.runtime import child; child.start(['bash', '-c', {script!r}]).wait()"
    starter = subprocess.Popen([sys.executable, "-c", program])
    number_in(tmp_path / "pid")
    started = below(starter.pid)
    assert len(started) >= 2  # the supervisor, and the shell with its sleep
    starter.kill()
    starter.wait()
    gone(started)
    assert (tmp_path / "asked").read_text() == "asked\n"
