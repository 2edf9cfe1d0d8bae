"""Which process is which, and which of them has ended."""

import subprocess
import sys
from pathlib import Path

import pytest

from clinrl.runtime import processes


def test_a_process_is_dead_once_it_has_ended() -> None:
    program = (
        "import sys; from clinrl.runtime.processes import identity; print(identity(), flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1, text=True) as child:
        assert child.stdout is not None
        identity = child.stdout.readline().strip()
        assert not processes.is_dead(identity)
        child.kill()
        child.wait()
    assert processes.is_dead(identity)


def test_a_number_that_is_used_again_is_another_process() -> None:
    host, number, start = processes.identity().rsplit(":", 2)
    assert not processes.is_dead(f"{host}:{number}:{start}")
    assert processes.is_dead(f"{host}:{number}:{start}0")


def test_of_another_machine_with_this_hostname_nothing_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ids = tmp_path / "one", tmp_path / "other"
    for number, file in enumerate(ids):
        file.write_text(f"{number:032x}"[::-1], encoding="ascii")
    monkeypatch.setattr(processes, "MACHINE", ids[0])
    host, number, start = processes.identity().rsplit(":", 2)
    stranger = f"{host}:{number}:{start}0"
    assert processes.is_dead(stranger)
    monkeypatch.setattr(processes, "MACHINE", ids[1])
    assert not processes.is_dead(stranger)


def test_a_machine_without_an_id_goes_by_its_hostname(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(processes, "MACHINE", tmp_path / "none")
    assert not processes.is_dead(processes.identity())
