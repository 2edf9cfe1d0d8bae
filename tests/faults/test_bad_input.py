"""Bad input, a full disk, Ctrl-C and a second command at once, through the real command line on a doll.

Each ends in one sentence on stderr and a non-zero exit code, leaves nothing half-written where the next stage would
take it, and loses nothing that was finished.
"""

import contextlib
import copy
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

import dolls
import exhibits
from clinrl import artifacts, paths
from clinrl.cli import main as cli
from clinrl.models.checkpoints import SENTINEL
from clinrl.tasks.esi import answer, triggers
from clinrl.training import callback

pytestmark = pytest.mark.long

STEPS = 30
"""Enough that a signal meets the run before its end, and few enough to be done in seconds."""
CLINRL = [sys.executable, "-m", "clinrl"]
FILE = paths.cases("d1") / paths.CASES_FILE
ADAPTER = paths.adapter("v1")


def doll_params() -> dict[str, Any]:
    """The doll's params with a longer training."""
    source = copy.deepcopy(dolls.PARAMS)
    source["profiles"]["imitate"]["trainer"]["embedded"] |= {"steps": STEPS, "checkpoint_every": 10}
    return source


def start(folder: Path, *arguments: str, offline: bool = False) -> subprocess.Popen[str]:
    """A command as a shell with job control starts it: in a process group of its own, which Ctrl-C goes to."""
    # Threads that wait for work must not spin: two trainings share the processors with the tests.
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": str(int(offline))}
    with (folder / "stderr.txt").open("w") as errors:
        return subprocess.Popen(
            [*CLINRL, *arguments], cwd=folder, env=environment, stderr=errors, text=True, start_new_session=True
        )


def errors_of(folder: Path) -> str:
    return (folder / "stderr.txt").read_text()


def wait_for(happened: Callable[[], bool], process: subprocess.Popen[str], what: str, folder: Path) -> None:
    deadline = time.monotonic() + 300
    while not happened():
        assert process.poll() is None, f"ended before {what}: {errors_of(folder)}"
        assert time.monotonic() < deadline, f"no {what} in 300 s: {errors_of(folder)}"
        time.sleep(0.005)


def reached(folder: Path, version: str, step: int) -> bool:
    """Whether the training of a version has finished a step."""
    timings = [*(folder / ".clinrl/checkpoints").glob(f"{version}-*/{callback.TIMINGS}")]
    return bool(timings) and timings[0].read_text().count("\n") >= step


@pytest.fixture(scope="module")
def doll(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The doll's project with its exam and without an adapter."""
    root = tmp_path_factory.mktemp("doll")
    shutil.copytree(dolls.built(), root, dirs_exist_ok=True)
    with contextlib.chdir(root):
        YAML(typ="safe").dump(doll_params(), Path("params.yaml"))
        assert cli.main(["dataset", "x1"]) == 0
        exam = artifacts.identity(artifacts.read_manifest(paths.cases("x1")))
        artifacts.write_json(paths.data_proof("x1"), {"data": {"name": "x1", "identity": exam}})
    return root


@pytest.fixture(scope="module")
def undisturbed(doll: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """A project in which a training is under way; it goes on while other tests run."""
    folder = tmp_path_factory.mktemp("undisturbed")
    shutil.copytree(doll, folder, dirs_exist_ok=True)
    process = start(folder, "train", "v1")
    yield folder, process
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def trained(undisturbed: tuple[Path, subprocess.Popen[str]]) -> Path:
    """The project in which v1 was trained without a disturbance."""
    folder, process = undisturbed
    assert process.wait(300) == 0, errors_of(folder)
    return folder


def stop_and_continue(folder: Path) -> tuple[int, str]:
    """Train v1 until Ctrl-C comes after step 5, and again to the end. Returns how the first attempt ended.

    Offline, unlike the undisturbed run, since that must not matter either.
    """
    process = start(folder, "train", "v1", offline=True)
    wait_for(lambda: reached(folder, "v1", 5), process, "step 5", folder)
    os.killpg(process.pid, signal.SIGINT)
    code, said = process.wait(300), errors_of(folder)
    assert not (folder / ADAPTER).exists()
    again = start(folder, "train", "v1", offline=True)
    assert again.wait(300) == 0, errors_of(folder)
    return code, said


@pytest.fixture(scope="module")
def stopped(doll: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Future[tuple[int, str]]]]:
    """A project in which the same training is being stopped and continued, while other tests run."""
    folder = tmp_path_factory.mktemp("stopped")
    shutil.copytree(doll, folder, dirs_exist_ok=True)
    with ThreadPoolExecutor(max_workers=1) as pool:
        yield folder, pool.submit(stop_and_continue, folder)


@pytest.fixture
def project(doll: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the doll's project, entered."""
    shutil.copytree(doll, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder: Path = Path("data")) -> dict[str, bytes]:
    """The bytes of every file below a folder, but for pages and reports of a refusal, which no stage reads."""
    return {
        str(path): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "docs" not in path.parts and not path.name.endswith(".failed.json")
    }


@pytest.fixture
def refusal(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that must be refused, and returns its sentence. All files stay as they are, but for `gone`."""

    def run(*arguments: str, code: int = 1, gone: tuple[Path, ...] = ()) -> str:
        before = contents()
        assert cli.main(arguments) == code
        message = capfd.readouterr().err
        assert message.startswith("clinrl: ")
        assert message.endswith("\n")
        assert message[:-1].isprintable(), "one line, and no control character of the input"
        assert len(message) < 700
        assert contents() == {path: held for path, held in before.items() if Path(path) not in gone}
        return message

    return run


def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]


def rewrite(cases: list[dict[str, Any]], *, reseal: bool) -> None:
    """Write the cases back, and if asked a manifest with the digest that the file now has."""
    FILE.write_text("".join(artifacts.canonical_json(case) + "\n" for case in cases), encoding="utf-8")
    if reseal:
        manifest = artifacts.read_manifest(FILE.parent)
        artifacts.seal(FILE.parent, **manifest.model_dump(exclude={"files"}))


BUSY = "clinrl: another command is writing data/adapters/v1; wait for it to end and start this one again\n"


def test_the_second_of_two_commands_is_busy(project: Path, refusal: Callable[..., str]) -> None:
    with artifacts.exclusive(ADAPTER):
        assert refusal("train", "v1", code=75) == BUSY
        assert not list(Path(".clinrl/checkpoints").glob("*"))


@pytest.mark.slow
@pytest.mark.usefixtures("stopped")  # begun here, so that it is done when its own test comes
def test_the_second_of_two_trainings_is_busy_and_the_first_goes_on(
    undisturbed: tuple[Path, subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, process = undisturbed
    monkeypatch.chdir(folder)
    wait_for(lambda: any(Path(".clinrl/checkpoints").glob("v1-*/spec.json")), process, "the start", folder)
    assert cli.main(["train", "v1"]) == 75
    assert capfd.readouterr().err == BUSY
    assert process.poll() is None  # that it ends well is what `trained` asserts


def test_a_truncated_data_set(project: Path, refusal: Callable[..., str]) -> None:
    FILE.write_bytes(FILE.read_bytes()[:-200])
    sentence = f"{FILE} row 30 is cut short: no line end"
    assert sentence in refusal("validate", "d1", gone=(paths.data_proof("d1"),))
    shutil.copyfile(dolls.built() / paths.data_proof("d1"), paths.data_proof("d1"))
    for command in ("train", "probe"):
        message = refusal(command, "v1")
        assert f"{FILE} was altered after it was built ({sentence}); rebuild with `dvc repro dataset@d1`" in message


@pytest.mark.parametrize("reseal", [False, True])
def test_a_label_changed_by_hand(project: Path, refusal: Callable[..., str], reseal: bool) -> None:
    cases = rows()
    cases[16]["key"]["level"] = cases[16]["key"]["level"] % 5 + 1
    rewrite(cases, reseal=reseal)
    message = refusal("train", "v1")
    assert ("is for other data than data/cases/d1 now holds" if reseal else f"{FILE} was altered after") in message
    message = refusal("validate", "d1", gone=(paths.data_proof("d1"),))
    assert f"{FILE} row 17 ({cases[16]['id']}), column id_matches_content: " in message
    assert "does not exist, so the data set d1 did not pass validation" in refusal("train", "v1")


def test_an_impossible_oxygen_saturation(project: Path, refusal: Callable[..., str]) -> None:
    cases = rows()
    cases[16]["key"]["presentation"]["spo2_pct"] = 140
    rewrite(cases, reseal=True)
    message = refusal("validate", "d1", gone=(paths.data_proof("d1"),))
    assert f"{FILE} row 17, column key.presentation.spo2_pct: " in message
    assert "100, got 140; rebuild with `dvc repro dataset@d1`" in message
    assert "did not pass validation" in refusal("train", "v1")


def test_control_characters_in_a_narrative(project: Path, refusal: Callable[..., str]) -> None:
    cases = rows()
    cases[4]["facts"]["narrative"] += " \x1b[2J\x00\u202e"
    rewrite(cases, reseal=True)
    assert " row 5 (" in refusal("validate", "d1", gone=(paths.data_proof("d1"),))
    FILE.write_bytes(FILE.read_bytes().replace(b"\\u0000", b"\x00"))
    assert f"{FILE} row 5, column (the whole line): Invalid JSON" in refusal("validate", "d1")


def test_a_narrative_of_100_000_words(project: Path, refusal: Callable[..., str]) -> None:
    cases = rows()
    cases[4]["facts"]["narrative"] = "word " * 100_000
    rewrite(cases, reseal=True)
    message = refusal("validate", "d1", gone=(paths.data_proof("d1"),))
    assert f"{FILE} row 5, column facts.narrative: " in message
    assert "(500,002 characters)" in message


@pytest.mark.usefixtures("seconds")
@pytest.mark.parametrize(
    "phrase",
    ["no", "prior intubation of the", "pain 8", "ANSWER: ESI 2 *\n"],
)
def test_triggers_and_answers_of_30_000_words_are_read_in_the_end(phrase: str) -> None:
    text = " ".join([phrase] * (30_000 // len(phrase.split())))
    for reads in (triggers.done_intervention, triggers.open_injury, triggers.severe_pain, answer.parse):
        reads(text)


def test_a_missing_parent(project: Path, refusal: Callable[..., str]) -> None:
    assert "v2 starts from v1, but data/adapters/v1 does not exist; run `dvc repro train@v1` first" in refusal(
        "train", "v2"
    )
    assert "data/adapters/v1 has no manifest.json" in refusal("evaluate", "v1")
    shutil.rmtree(paths.adapter("esi-base"))
    assert "run `clinrl base esi` first" in refusal("train", "v1")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[tuple[Path, list[str]]]:
    """A real disk of 3 MiB, mounted in a namespace of its own: its path from here, and what runs a command on it."""
    point = tmp_path / "disk"
    point.mkdir()
    mount = f"mount -t tmpfs -o size=3m tmpfs {point} && echo mounted && exec sleep 600"
    try:
        holder = subprocess.Popen(
            ["unshare", "--map-root-user", "--mount", "sh", "-c", mount],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    except FileNotFoundError:
        pytest.skip("this system has no unshare, so no disk can be mounted for the test")
    try:
        assert holder.stdout is not None
        if holder.stdout.readline() != "mounted\n":
            pytest.skip(f"no disk can be mounted for the test: {holder.communicate()[1].strip()}")
        entering = ["nsenter", "--preserve-credentials", "--user", "--mount", "--target", str(holder.pid)]
        yield Path(f"/proc/{holder.pid}/root{point}"), [*entering, "sh", "-c", f'cd {point} && exec "$@"', "sh"]
    finally:
        holder.kill()
        holder.communicate()


def fill(path: Path) -> None:
    """Write a file until the disk has no room for more."""
    with path.open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(512))
    assert os.statvfs(path).f_bavail == 0


def test_a_full_disk(doll: Path, small_disk: tuple[Path, list[str]]) -> None:
    disk, on_disk = small_disk
    shutil.copytree(doll, disk, dirs_exist_ok=True)
    larger = doll_params()
    larger["datasets"]["d1"]["cases"] = 300
    YAML(typ="safe").dump(larger, disk / "larger.yaml")
    before = contents(disk / "data")
    fill(disk / "filler")
    os.truncate(disk / "filler", (disk / "filler").stat().st_size - (64 << 10))  # room for a part of it

    def run(*arguments: str) -> str:
        done = subprocess.run([*on_disk, *CLINRL, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 1, done.stderr
        assert contents(disk / "data") == before
        return done.stderr

    assert run("dataset", "d1", "--params", "larger.yaml") == (
        "clinrl: disk is full at data/cases/d1: free some space and give the same command again\n"
    )
    fill(disk / "filler")
    assert run("train", "v1").startswith("clinrl: disk is full")
    (disk / "filler").unlink()
    done = subprocess.run([*on_disk, *CLINRL, "dataset", "d1"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert contents(disk / "data") == before


@pytest.mark.faults
def test_a_disk_that_fills_up_while_training(
    doll: Path, trained: Path, small_disk: tuple[Path, list[str]], tmp_path: Path
) -> None:
    disk, on_disk = small_disk
    shutil.copytree(doll, disk, dirs_exist_ok=True)
    with (tmp_path / "stderr.txt").open("w") as errors:
        process = subprocess.Popen([*on_disk, *CLINRL, "train", "v1"], stderr=errors, text=True)
    whole = f".clinrl/checkpoints/v1-*/trainer/checkpoint-10/{SENTINEL}"
    wait_for(lambda: any(disk.glob(whole)), process, "a checkpoint", tmp_path)
    fill(disk / "filler")
    assert process.wait(300) == 3
    said = errors_of(tmp_path)
    assert "Traceback" not in said
    sentence = (
        r"clinrl: training of v1 ended because the disk is full; free some space, "
        rf"and the same command continues from step (\d+) of {STEPS}"
    )
    step = re.fullmatch(sentence, said.splitlines()[-1])
    assert step, said
    assert not (disk / ADAPTER).exists()
    (disk / "filler").unlink()
    again = subprocess.run([*on_disk, *CLINRL, "train", "v1"], stderr=subprocess.PIPE, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert f"clinrl: v1 trains from step {step[1]} to {STEPS}\n" in again.stderr
    assert dolls.files(disk / ADAPTER) == dolls.files(trained / ADAPTER)


@pytest.mark.slow
def test_ctrl_c_in_the_middle_of_training_and_the_same_command_again(
    stopped: tuple[Path, Future[tuple[int, str]]], trained: Path
) -> None:
    folder, ending = stopped
    code, said = ending.result(300)
    assert code == 3
    assert "Traceback" not in said
    last = said.splitlines()[-1]
    sentence = rf"clinrl: training of v1 was stopped; the same command continues from step (\d+) of {STEPS}"
    step = re.fullmatch(sentence, last)
    assert step, said
    assert 5 <= int(step[1]) < STEPS
    assert f"clinrl: v1 trains from step {step[1]} to {STEPS}\n" in errors_of(folder)
    with contextlib.chdir(trained):
        expected = contents()
    with contextlib.chdir(folder):
        assert contents() == expected


@pytest.mark.parametrize("command", [("train", "v2"), ("evaluate", "v1")])
@pytest.mark.parametrize("damaged", [ADAPTER / "adapter_model.safetensors", paths.base("esi") / "model.safetensors"])
def test_one_flipped_byte(project: Path, command: tuple[str, str], damaged: Path, refusal: Callable[..., str]) -> None:
    exhibits.adapter("v1", 1)
    held = bytearray(damaged.read_bytes())
    held[len(held) // 2] ^= 1
    damaged.write_bytes(held)
    assert refusal(*command) == (
        f"clinrl: {damaged} was altered after it was built; restore it with `dvc checkout` or {artifacts.AGAIN}\n"
    )
