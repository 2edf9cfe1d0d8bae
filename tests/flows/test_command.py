"""The command line of the flows: quick to say what it is, and one sentence for what it will not do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLOWS = ("reproduce", "release", "retrain", "serve")


def flow(name: str, *words: str, python: tuple[str, ...] = ()) -> "subprocess.CompletedProcess[str]":
    env = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    command = [sys.executable, *python, "-m", f"flows.{name}", *words]
    return subprocess.run(command, env=env | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", FLOWS)
def test_help_has_examples_and_loads_nothing_heavy(name: str) -> None:
    done = flow(name, "--help", python=("-X", "importtime"))
    assert done.returncode == 0
    assert f"python -m flows.{name}" in done.stdout.split("examples:")[1]
    loaded = {line.rsplit("|", 1)[1].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert not {"prefect", "mlflow", "torch", "pandas", "numpy"} & loaded


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (("reproduce", "v22"), 2, "params.yaml: 'v22' is not a version; did you mean v2? allowed: v1, v2"),
        (("reproduce", "../v2"), 2, "params.yaml: '../v2' is not a version; allowed: v1, v2"),
        (("release", "v2;ls"), 2, "params.yaml: 'v2;ls' is not a version; allowed: v1, v2"),
        (("retrain", "imaging"), 2, "params.yaml: 'imaging' is not a task with a base; allowed: esi"),
        (
            ("release", "v2", "--approver", " "), 1,
            "a promotion needs the name of the person who approves it, 2 to 80 characters; nothing moved",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_before_anything_starts(
    project: Path, words: tuple[str, ...], code: int, sentence: str
) -> None:
    done = flow(*words)
    assert (done.returncode, done.stderr) == (code, f"clinrl: {sentence}\n")
    assert not Path(".clinrl/prefect").exists()


def test_a_release_without_a_server_and_without_a_name_is_refused(project: Path) -> None:
    done = flow("release", "v2")
    assert done.returncode == 1
    assert "nobody can be asked" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_flow_needs_no_server(project: Path) -> None:
    done = flow("release", "v2", "--approver", "Ada Lovelace")
    assert done.returncode == 0
    assert done.stderr.splitlines()[-1] == "clinrl: v2 is the champion of esi"
    again = flow("retrain", "esi")
    assert again.returncode == 0
    assert again.stderr.splitlines()[-1].startswith("clinrl: nothing to do: ")
    assert "Traceback" not in done.stderr + again.stderr
