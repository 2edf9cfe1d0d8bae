"""Parts of a stage in forks: side by side where there is room, and none outlives what it is for."""

import os
import signal
from functools import partial
from pathlib import Path

import pytest

from clinrl.errors import Refused
from clinrl.runtime import determinism, forks
from processes import alive, eventually, number_in


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
    found = forks.results(programs)
    assert [(is_met, threads) for is_met, _, threads in found] == [(True, 1)] * 3
    assert len({os.getpid(), *(process for _, process, _ in found)}) == 4


def test_beside_another_stage_programs_run_here_one_by_one(two_processors, tmp_path):
    (tmp_path / "running").write_text("2")
    assert forks.results([os.getpid, os.getpid]) == [os.getpid()] * 2


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
        forks.results([stays, refused])
    with pytest.raises(Refused, match="was killed"):
        forks.results([stays, killed])
    assert not alive(number_in(tmp_path / "pid"))
