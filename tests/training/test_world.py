"""Several processes of one training: the adapter of one process, and an end for all when one of them ends."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch
from ruamel.yaml import YAML
from safetensors.torch import load_file

import dolls
import ranks
from clinrl import paths
from clinrl.config.machine import Machine
from clinrl.config.params import Params, load_params
from clinrl.errors import Alarmed, Refused, TrainingError
from clinrl.models import bases, opening
from clinrl.models.decoding import numbered
from clinrl.runtime.worker_process import WORKER
from clinrl.training import launch, worker, world
from clinrl.training.loss import continued_rows
from clinrl.training.world import ALONE, World, shares_threads
from processes import eventually

TRAIN = """
import sys
from clinrl.cli.main import main
sys.exit(main(["train", sys.argv[1]]))
"""
STEPS = 40
"""Of the imitation: long enough to be killed on the way."""
SAMPLED = {
    "lr": 1.0e-3, "steps": 3, "batch": 4, "checkpoint_every": 1, "prompts": 12, "group": 4, "temperature": 0.5,
    "max_completion": 32, "threshold": -1.25,
}  # fmt: skip


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Params:
    """The doll's project at full scale on the CPU, above its own base as a checkpoint; entered."""
    shutil.copytree(dolls.built(), tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    shutil.copytree(paths.base("esi"), "checkpoint")
    base: dict[str, Any] = {**dolls.PARAMS["bases"]["esi"]}
    base["full"] = {"repo": str(tmp_path / "checkpoint"), "revision": "main", "quantize": "none"}
    profiles = json.loads(json.dumps(dolls.PARAMS["profiles"]), object_hook=dolls._integer_keys)
    profiles["imitate"]["trainer"]["full"] |= {"steps": STEPS, "micro_batch": 1, "lr": 1.0e-4}
    profiles["reward"]["trainer"]["full"] |= {"steps": 6, "held_out": {"cases": 4, "every": 2}}
    own = {key: profiles["reward"][key] for key in ("modes", "lora", "stream", "reward")}
    profiles["sampled"] = own | {"method": "rejection", "trainer": dict.fromkeys(("embedded", "full"), SAMPLED)}
    profiles["reward"] |= {"placebo": "majority", "waiver": "A control."}
    versions = dolls.PARAMS["versions"] | {"v4": dolls.PARAMS["versions"]["v3"] | {"profile": "sampled", "seed": 4}}
    changed = {"scale": "full", "bases": {"esi": base}, "profiles": profiles, "versions": versions}
    YAML(typ="safe").dump(dolls.PARAMS | changed, Path("params.yaml"))
    params = load_params()
    bases.stage(params, "esi")
    dolls.prove(params)
    return params


def processes(number: int) -> None:
    Path("machine.yaml").write_text(f"processes: {number}\ntry_anyway: true\n")


def begin(version: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-c", TRAIN, version]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def trained(version: str) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """The weights of an adapter and its history, moved out of the way."""
    shutil.rmtree("before", ignore_errors=True)
    paths.adapter(version).rename("before")
    lines = Path("before/history.jsonl").read_text().splitlines()
    return load_file(Path("before") / opening.WEIGHTS), [json.loads(line) for line in lines]


def by_path(params: Params, version: str, path: str) -> Params:
    """The project with another way to the loss of a version."""
    tree = YAML(typ="safe").load(Path("params.yaml"))
    trainer = tree["profiles"][params.versions[version].profile]["trainer"]["full"]
    trainer["loss_path"] = path
    if path == "shared" and "beta" in trainer:
        trainer["beta"] = 0.0  # so that there are dead rows
    YAML(typ="safe").dump(tree, Path("params.yaml"))
    return load_params()


def by_one(params: Params, version: str) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    processes(1)
    with dolls.in_process():
        launch.stage(params, version)
    return trained(version)


def gap(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def state() -> dict[str, Any]:
    (file,) = Path(".clinrl/checkpoints").glob("v*/status.json")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def rank(number: int) -> psutil.Process:
    """The worker of a rank, below this process."""
    for child in psutil.Process().children(recursive=True):
        words = child.cmdline()
        if WORKER in words and "clinrl.training.world" not in words and child.environ().get("RANK") == str(number):
            return child
    raise AssertionError(f"there is no rank {number}")


def wait_for_checkpoint(running: subprocess.Popen[str], version: str = "v1") -> None:
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and running.poll() is None:
        if list(Path(".clinrl/checkpoints").glob(f"{version}-*/trainer/checkpoint-*/complete.json")):
            return
        time.sleep(0.02)
    raise AssertionError(running.communicate()[1])


# What is the same for any number of processes


def test_a_draw_follows_from_its_seed_step_turn_and_row_alone() -> None:
    whole = numbered(7, 3, 1, range(8), 16)
    assert torch.equal(torch.cat([numbered(7, 3, 1, range(4), 16), numbered(7, 3, 1, range(4, 8), 16)]), whole)
    assert torch.equal(numbered(7, 3, 1, [5], 8), whole[5:6, :8])
    others = [numbered(8, 3, 1, range(8), 16), numbered(7, 4, 1, range(8), 16), numbered(7, 3, 2, range(8), 16)]
    assert len({float(found.sum()) for found in [whole, *others]}) == 4
    assert len(set(whole[:, 0].tolist())) == 8
    assert 0 <= float(whole.min()) <= float(whole.max()) < 1


def test_a_turn_goes_on_from_the_row_that_it_continues() -> None:
    before = [(4, [1, 2, 3]), (5, [1, 2, 3]), (6, [1, 4]), (7, [1, 2])]
    assert [row for row, _ in continued_rows(before, [[1, 2, 3, 9], [1, 2, 3, 9], [1, 2, 8]])] == [4, 5, 7]
    assert [row for row, _ in continued_rows(before, [[1, 4, 0, 0]])] == [6]
    with pytest.raises(TrainingError, match="does not continue the one before"):
        continued_rows(before, [[1, 4, 0], [1, 4, 0]])


def test_one_process_gathers_what_it_has() -> None:
    assert ALONE.gathered(["a"]) == ["a"]
    assert ALONE.any(True)
    assert not ALONE.any(False)
    with ALONE.joined(on_cpu=True):
        assert not torch.distributed.is_initialized()


# Launchers


def test_a_worker_takes_the_place_that_the_launcher_gave_it_and_no_other_number_of_processes() -> None:
    machine = Machine(processes=4).model_dump()
    place = {"WORLD_SIZE": "4", "RANK": "3"}
    assert world.world_of(place, machine) == World(4, 3)
    assert world.world_of({}, Machine().model_dump()) == ALONE
    with pytest.raises(Refused, match="4 processes were started for a training by 1; set processes in"):
        world.world_of(place, Machine().model_dump())
    with pytest.raises(Refused, match="1 processes were started for a training by 4"):
        world.world_of({}, machine)


def test_a_process_knows_its_place_and_where_it_meets_the_others() -> None:
    assert world.place(8, 3, "folder") == {
        "RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "OMP_NUM_THREADS": "1",
        world.MEETING: "folder/store", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["LOCAL_RANK", "WORLD_SIZE"])
def test_a_launcher_around_the_whole_command_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "2")
    with pytest.raises(Refused, match=r"a launcher such as torchrun started this command, .* without a launcher"):
        launch.stage(dolls.params(), "v1")


def test_a_step_that_the_processes_cannot_share_is_refused_before_anything_is_loaded(project: Params) -> None:
    processes(3)
    with pytest.raises(Refused, match="3 processes cannot share the 4 rows of a training step evenly"):
        launch.stage(project, "v1")
    assert not Path(".clinrl/checkpoints").exists()


def test_a_spec_for_two_is_refused_by_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    spec = tmp_path / launch.SPEC
    spec.write_text(json.dumps({"machine": Machine(processes=2).model_dump(), "seed": 1}))
    assert worker.main([str(spec)]) == 1
    assert "1 processes were started for a training by 2" in capfd.readouterr().err


def test_at_the_embedded_scale_one_process_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    processes(2)
    spec = {"scale": "embedded", "trainer": {"micro_batch": None, "batch": 3}}
    assert launch._on_this_machine(spec)["machine"]["processes"] == 1


def test_why_another_process_failed_is_told_before_that_process_0_lost_it(tmp_path: Path) -> None:
    (tmp_path / launch.STATUS).write_text(json.dumps({"state": "crashed", "step": 4, "reason": "RuntimeError"}))
    failed = {"state": "failed", "step": 4, "reason": "out of memory in the loss"}
    (tmp_path / launch.OTHERS.format(1)).write_text(json.dumps(failed))
    with pytest.raises(TrainingError, match="training of v1 failed: out of memory in the loss"):
        launch._judge(1, tmp_path, "v1", 10)


def test_a_status_does_not_stay_running_when_the_trainer_was_killed(tmp_path: Path) -> None:
    (tmp_path / launch.STATUS).write_text(json.dumps({"state": "running", "step": 4, "reason": ""}))
    with pytest.raises(TrainingError, match=r"was killed \(signal 9.*continues from step 4 of 10"):
        launch._judge(-signal.SIGKILL, tmp_path, "v1", 10)
    assert json.loads((tmp_path / launch.STATUS).read_text()) == {"state": "ended", "step": 4, "reason": ""}


TWO = """
import os, sys
from clinrl.runtime import worker_process
from clinrl.training import world
worker_process.WORKER = "does"
sys.exit(world.main([sys.argv[1], str(os.getppid())]))
"""
WAITS = """
import os, signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, signal.SIG_IGN)
Path("waits-" + os.environ["RANK"]).touch()
while not (says := Path("code-" + os.environ["RANK"])).exists():
    time.sleep(0.05)
sys.exit(int(says.read_text()))
"""


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """The launcher of two processes, each of which ends with the code that a file says."""
    monkeypatch.chdir(tmp_path)
    Path(launch.SPEC).write_text(json.dumps({"machine": Machine(processes=2).model_dump()}))
    Path("does.py").write_text(WAITS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    running = subprocess.Popen([sys.executable, "-c", TWO, launch.SPEC], env=environment, text=True)
    eventually(lambda: len([*Path().glob("waits-*")]) == 2, 60)
    yield running
    running.kill()


@pytest.mark.long
@pytest.mark.parametrize("code", [1, 3, Alarmed.exit_code])
def test_a_process_that_fails_ends_one_that_heeds_no_request(two: subprocess.Popen[str], code: int) -> None:
    Path("code-1").write_text(str(code))
    assert two.wait(60) == code


@pytest.mark.long
def test_a_second_request_kills_them(two: subprocess.Popen[str]) -> None:
    for _ in range(2):
        two.send_signal(signal.SIGTERM)
        time.sleep(0.5)
    assert two.wait(60) == 128 + signal.SIGKILL


@pytest.mark.parametrize(
    ("codes", "found"), [((0, 0), 0), ((1, -9), -9), ((1, 5), 5), ((Alarmed.exit_code, 1), Alarmed.exit_code)]
)
def test_of_several_codes_the_one_that_says_why_counts(codes: tuple[int, ...], found: int) -> None:
    ended = [Mock(poll=Mock(return_value=code)) for code in codes]
    assert world._first_failure(ended, []) == found


# Two processes, started as a training starts them


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "path"),
    [("v1", "stock"), ("v1", "shared"), ("v3", "stock"), ("v3", "shared"), ("v4", "stock"), ("v4", "shared")],
)
def test_two_processes_make_the_adapter_of_one(project: Params, version: str, path: str) -> None:
    project = by_path(project, version, path)
    weights, history = by_one(project, version)
    processes(2)
    launch.stage(project, version)
    others, told = trained(version)
    assert gap(weights, others) < 1e-6
    if path == "shared":  # gradient checkpointing keeps no cache, so what is left out are dead rows
        used = json.loads(Path("before/loss_path.json").read_text())["used"]
        assert used == {"v1": "shared", "v3": "live", "v4": "shared"}[version]
    assert [line["step"] for line in told] == [line["step"] for line in history]
    for name in ["num_tokens", *(["reward", "groups/all_right", "answer/1"] if version == "v3" else [])]:
        assert [line[name] for line in told] == [line[name] for line in history]
    for line, other in zip(history, told, strict=True):
        assert other.keys() == line.keys()
        assert other["loss"] == pytest.approx(line["loss"], abs=1e-5)
        if "entropy" in line:  # one process has dead rows alone in some steps
            # TRL's SFT logs the mean over micro-batches, which hold other rows if there are more processes.
            assert other["entropy"] == pytest.approx(line["entropy"], abs=0.05 if version == "v1" else 1e-4)
    assert not list(Path(".clinrl/checkpoints").iterdir())


@pytest.fixture
def killed(project: Params) -> tuple[Params, dict[str, torch.Tensor]]:
    """A training of two processes, one of which was killed; and the weights that one process makes unbroken."""
    weights, _ = by_one(project, "v1")
    processes(2)
    running = begin("v1")
    wait_for_checkpoint(running)
    rank(1).send_signal(signal.SIGKILL)
    began = time.monotonic()
    _, errors = running.communicate()
    assert time.monotonic() - began < 60  # seconds on an idle machine
    assert running.returncode == 3, errors
    assert "the trainer of v1 was killed (signal 9" in errors
    assert state()["state"] not in ("running", "starting", "completed")
    return project, weights


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2])
def test_a_killed_process_ends_all_and_the_same_command_goes_on(
    killed: tuple[Params, dict[str, torch.Tensor]], number: int, capfd: pytest.CaptureFixture[str]
) -> None:
    params, weights = killed
    step = state()["step"]
    assert 0 < step < STEPS
    processes(number)
    launch.stage(params, "v1")
    assert f"v1 trains from step {step} to {STEPS}" in capfd.readouterr().err
    others, told = trained("v1")
    assert gap(weights, others) < 1e-6
    assert [line["step"] for line in told] == list(range(1, STEPS + 1))


@pytest.mark.slow
@pytest.mark.parametrize("version", ["v1", "v3"])
def test_a_request_to_stop_ends_all_at_one_step_and_one_process_goes_on(project: Params, version: str) -> None:
    project = by_path(project, version, "shared")
    weights, _ = by_one(project, version)
    processes(2)
    running = begin(version)
    wait_for_checkpoint(running, version)
    running.send_signal(signal.SIGTERM)
    _, errors = running.communicate()
    assert running.returncode == 3, errors
    assert f"training of {version} was stopped; the same command continues" in errors
    found = state()
    assert found["state"] == "stopped"
    assert list(Path(".clinrl/checkpoints").glob(f"{version}-*/trainer/checkpoint-{found['step']}/complete.json"))
    assert gap(weights, by_one(project, version)[0]) < 1e-6


@pytest.mark.slow
def test_an_alarm_of_process_0_ends_all(project: Params) -> None:
    tree = YAML(typ="safe").load(Path("params.yaml"))
    reward = tree["profiles"]["reward"]
    del reward["waiver"], reward["placebo"]
    reward["trainer"]["full"]["on_alarm"] = "stop"
    YAML(typ="safe").dump(tree, Path("params.yaml"))
    processes(2)
    with pytest.raises(Alarmed, match=r"training of v3 failed: stopped at step \d+ of \d+ \(no_parse\)"):
        launch.stage(load_params(), "v3")
    assert state()["state"] == "failed"


@pytest.mark.slow
def test_nobody_from_outside_can_reach_them_and_none_is_left_when_their_parent_is_killed(project: Params) -> None:
    processes(2)
    running = begin("v1")
    wait_for_checkpoint(running)
    workers = [rank(0), rank(1)]
    family = psutil.Process(running.pid).children(recursive=True)
    assert {one.pid for one in workers} < {one.pid for one in family}
    addresses = {
        found.laddr.ip
        for one in family
        for found in one.net_connections(kind="inet")
        if found.status == psutil.CONN_LISTEN
    }
    assert addresses <= {"127.0.0.1", "::1"}
    running.kill()
    running.communicate()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*environment_factory.*:UserWarning")
@pytest.mark.parametrize("path", ["stock", "shared"])
def test_two_processes_of_torchrun_play_the_episodes_of_a_step_as_one(tmp_path: Path, path: str) -> None:
    logs, weights = [], []
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={number}", ranks.__file__]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "ATEN_CPU_CAPABILITY": "avx2"}
        environment[world.MEETING] = str(folder / "store")
        subprocess.run([*torchrun, str(folder), path], env=environment, check=True, timeout=900)
        logs.append(json.loads((folder / "log.json").read_text())[0])
        weights.append(load_file(folder / "adapter.safetensors"))
    assert gap(*weights) < 1e-6
    one, two = logs
    assert max(float(tensor.abs().max()) for name, tensor in weights[0].items() if "lora_B" in name) > 1e-4  # it moved
    assert one.keys() == two.keys()
    for name in ("num_tokens", "reward", "reward_std", "groups/all_wrong", "tools/call_frequency", "not_submitted/m"):
        assert two[name] == pytest.approx(one[name], abs=1e-6), name


def counted(spec: Path, *, several: bool) -> int:
    """A trainer whose operations are counted, or two, which torchrun starts."""
    torchrun = ["torch.distributed.run", "--nproc-per-node=2", "-m"] if several else []
    return subprocess.run([sys.executable, "-m", *torchrun, "counted", str(spec)], check=False).returncode


def operations(params: Params, version: str, number: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Floating-point operations of all processes that train a version."""
    processes(number)
    monkeypatch.setattr(launch, "run_worker", counted)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv(world.MEETING, f"store-{number}")
    launch.stage(params, version)
    trained(version)
    return sum(int(Path(f"counted-{rank}").read_text()) for rank in range(number))


@pytest.mark.slow
@pytest.mark.parametrize(("version", "path"), [("v1", "stock"), ("v3", "stock"), ("v3", "shared")])
def test_two_processes_compute_little_more_than_one(
    project: Params, version: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = by_path(project, version, path)
    one, two = (operations(project, version, number, monkeypatch) for number in (1, 2))
    print(f"{version}, {path}: {two / one - 1:+.2%}")
    assert two <= 1.05 * one


@pytest.mark.parametrize(
    ("spec", "shares"),
    [
        ({"task": "esi"}, True),
        ({"task": "esi", "labels_only": False}, True),
        ({"task": "esi", "labels_only": True}, False),
        ({"task": "audit"}, False),
    ],
)
def test_a_training_whose_bytes_depend_on_threads_keeps_them(spec: dict[str, Any], shares: bool) -> None:
    assert shares_threads(spec) is shares
