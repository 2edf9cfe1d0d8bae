"""The acceptance commands of a GPU, at tiny shapes on the CPU: that each runs to its rows."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clinrl.runtime import gpus

HERE = Path(__file__).resolve().parent / "gpu"
SMALLEST = ("load.py", "3B", "nf4")
UNITS = {"s", "s a step", "ms", "GB", "tokens/s", "nats", "cases/min", "requests/min", ""}


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(HERE))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(HERE) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.usefixtures("scripts")
def test_without_a_gpu_it_says_so_and_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import acceptance

    monkeypatch.setattr(gpus, "visible", list)
    monkeypatch.setattr(acceptance, "REPORT", tmp_path / "report.json")
    assert acceptance.main([]) == 1
    assert capsys.readouterr().err == (
        "make gpu: no GPU is visible here, so nothing was measured; start it where nvidia-smi lists one\n"
    )
    assert acceptance.main(["lood"]) == 2
    assert acceptance.main(["--help"]) == 0
    assert not acceptance.REPORT.exists()


@pytest.mark.usefixtures("scripts")
def test_too_little_room_on_the_disk_is_said_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import acceptance

    monkeypatch.setattr(gpus, "visible", lambda: [gpus.Gpu(0, "A", 1, 1)])
    monkeypatch.setattr(acceptance, "ROOM", 1e18)
    assert acceptance.main([]) == 1
    assert "GB free, and 1000000000 are needed for random weights; set TMPDIR" in capsys.readouterr().err


@pytest.mark.usefixtures("scripts")
def test_the_smallest_measures_every_operation(capsys: pytest.CaptureFixture[str]) -> None:
    import operations

    operations.main(["--tiny"])
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 2 * len(operations.KINDS) + 2
    assert {unit for _, _, unit, _ in rows} == {"ms"}
    assert all(value > 0 or note for _, value, _, note in rows)


@pytest.mark.usefixtures("scripts")
def test_a_command_that_fails_is_in_the_report_and_the_rest_runs_on(tmp_path: Path) -> None:
    import acceptance

    report = tmp_path / "report.json"
    code = acceptance.measure([("absent.py",), ("operations.py", "--help")], report, {"gpu": "none"}, tmp_path)
    kept = json.loads(report.read_text())
    assert code == 1
    assert "No such file" in kept["absent"]["failed"]
    assert kept["operations --help"]["machine"] == {"gpu": "none"}


def commands() -> list[tuple[str, ...]]:
    sys.path.insert(0, str(HERE))
    try:
        import acceptance

        return list(acceptance.COMMANDS)
    finally:
        sys.path.remove(str(HERE))


@pytest.mark.parametrize(
    "command",
    [  # one of those that share the loading is run with every change
        pytest.param(one, id=" ".join(one), marks=pytest.mark.long if one == SMALLEST else pytest.mark.slow)
        for one in commands()
    ],
)
def test_each_command_runs_at_a_tiny_shape_on_the_cpu(command: tuple[str, ...], tmp_path: Path) -> None:
    environment = os.environ | {"CLINRL_GPU_MODELS": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(HERE / command[0]), *command[1:], "--tiny"], cwd=HERE.parents[1], env=environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    assert rows
    for what, value, unit, note, *interval in rows:
        assert isinstance(what, str)
        assert isinstance(note, str)
        assert isinstance(value, int | float)
        assert unit in UNITS
        assert not interval or interval[0] <= value <= interval[1]


@pytest.mark.gpu
def test_on_a_gpu_the_smallest_command_measures(tmp_path: Path) -> None:
    """The only test that asks for an accelerator; `make gpu` runs the rest."""
    if not gpus.visible():
        pytest.skip("no GPU is visible")
    done = subprocess.run(
        [sys.executable, str(HERE / SMALLEST[0]), *SMALLEST[1:], "--tiny"], cwd=HERE.parents[1], capture_output=True,
        text=True, check=True, env=os.environ | {"CLINRL_GPU_MODELS": str(tmp_path)},
    )  # fmt: skip
    assert json.loads(done.stdout.splitlines()[-1])
