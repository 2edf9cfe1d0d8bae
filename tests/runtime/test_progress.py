"""What a progress display says of a machine that others use."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clinrl.runtime import progress
from clinrl.training.callback import ProgressLine
from forks import fork

CPU_BOUND = "print(flush=True)\nwhile True: pass"


def waits(seconds: float) -> str:
    """What the kernel counts for a thread that has waited so long."""
    return f"5000000000 {round(seconds * 1e9)} 17"


@pytest.fixture
def scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the kernel's counts, to be written to, and a clock that ticks once a second."""
    path = tmp_path / "schedstat"
    path.write_text(waits(40.0))
    seconds = iter(range(1000))
    monkeypatch.setattr(progress, "SCHEDULER", path)
    monkeypatch.setattr(time, "monotonic", lambda: float(next(seconds)))
    return path


def test_the_share_is_of_the_time_since_the_last_call(scheduler: Path) -> None:
    queue = progress.Queue()
    scheduler.write_text(waits(40.25))
    assert queue.share() == pytest.approx(0.25)
    assert queue.share() == 0.0
    scheduler.write_text(waits(90.0))
    assert queue.share() == 1.0


@pytest.mark.parametrize("text", [None, "", "1 x 2"])
def test_nothing_is_said_where_the_system_counts_nothing(scheduler: Path, text: str | None) -> None:
    scheduler.unlink() if text is None else scheduler.write_text(text)
    assert progress.Queue().share() == 0.0


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts")
def test_a_thread_waits_for_the_one_processor_that_it_shares() -> None:
    def share() -> float:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        with subprocess.Popen([sys.executable, "-c", CPU_BOUND], stdout=subprocess.PIPE) as other:
            try:
                assert other.stdout is not None
                other.stdout.readline()
                queue, end = progress.Queue(), time.monotonic() + 0.3
                while time.monotonic() < end:
                    pass
                return queue.share()
            finally:
                other.kill()

    assert fork(share).value > 0.2


def test_a_line_tells_the_time_left_and_that_the_machine_is_overcommitted(
    scheduler: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ProgressLine("v1", 4)
    line.start(2)
    scheduler.write_text(waits(40.5))
    line.show(3, {"loss": 0.5, "mean_token_accuracy": 0.25})
    line.show(4, {"loss": 0.5, "mean_token_accuracy": 0.25})
    _, third, fourth = capsys.readouterr().err.splitlines()
    shown = "loss 0.500 accuracy 0.250"
    warning = "machine overcommitted: 25% of the time spent waiting for a processor"
    assert third == f"clinrl: v1 step 3/4 {shown}, 0:00:02 left; {warning}"
    assert fourth == f"clinrl: v1 step 4/4 {shown}, 0:00:00 left"
