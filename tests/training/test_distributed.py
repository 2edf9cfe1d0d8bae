"""Several processes of one training: their shares, what they agree on, and that two make what one makes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from ruamel.yaml import YAML
from safetensors.torch import load_file

import dolls
from clinrl import paths
from clinrl.config.machine import Machine
from clinrl.errors import Alarmed, ParamsError, Refused, TrainingError
from clinrl.models import bases
from clinrl.runtime import gpus
from clinrl.runtime.worker_process import run_worker
from clinrl.training import callback, launch, ranks, trl
from clinrl.training.draws import RowNoise, seeds_of
from clinrl.training.reward_fn import over_all

SFT = {"method": "sft", "scale": "full", "version": "v1", "trainer": {"batch": 8, "micro_batch": 4}}
GRPO = SFT | {"method": "grpo", "trainer": {"prompts": 2, "group": 4, "micro_batch": 4}}


@given(some.integers(1, 300), some.none() | some.integers(1, 64), some.integers(1, 16))
def test_shares_make_a_step_up_and_are_the_largest_that_fit(rows: int, most: int | None, world: int) -> None:
    if rows % world:
        with pytest.raises(ParamsError, match=r"^machine.yaml: processes is \d+, which does not divide the \d+ rows"):
            ranks.share(rows, most, world)
        return
    micro, accumulation = ranks.share(rows, most, world)
    assert micro * accumulation * world == rows
    assert most is None or micro <= most
    assert not any(rows // world % size == 0 for size in range(micro + 1, min(most or rows, rows // world) + 1))


@given(some.integers(1, 12), some.integers(1, 12), some.integers(1, 4))
def test_a_micro_batch_that_may_not_be_lowered_is_kept_or_refused(each: int, micro: int, world: int) -> None:
    if each % micro:
        with pytest.raises(ParamsError, match="depends on its micro_batch"):
            ranks.share(each * world, micro, world, lowers=False)
    else:
        assert ranks.share(each * world, micro, world, lowers=False) == (micro, each // micro)


def test_one_process_has_the_recipes_own_numbers() -> None:
    assert ranks.share(8, 2, 1) == (2, 4)
    assert ranks.share(8, None, 1) == (8, 1)
    assert ranks.micro_batch(Machine(), SFT) == 4
    assert ranks.micro_batch(Machine(), SFT | {"trainer": {"batch": 8, "micro_batch": None}}) is None


@pytest.mark.parametrize(("most", "processes", "micro"), [(None, 2, 4), (None, 4, 2), (3, 2, 2), (1, 8, 1)])
def test_micro_batches_are_lowered_to_the_share_of_a_process(most: int | None, processes: int, micro: int) -> None:
    for spec in (SFT, GRPO):
        assert ranks.micro_batch(Machine(micro_batch=most, processes=processes), spec) == micro


def test_the_embedded_scale_has_one_process() -> None:
    machine, spec = Machine(processes=3, launcher=("srun",)), SFT | {"scale": "embedded"}
    assert ranks.processes_of(machine, spec) == 1
    assert ranks.micro_batch(machine, spec) == 4
    assert ranks.command(machine, spec, "spec.json", 7) is None


def test_the_command_line_is_torchruns() -> None:
    assert ranks.command(Machine(), SFT, "spec.json", 7) is None
    built = ranks.command(Machine(processes=2), SFT, "spec.json", 7)
    own = ["--nproc_per_node", "2", "--standalone", "-m", "clinrl.training.worker", "spec.json"]
    assert built == [sys.executable, "-m", "clinrl.training.ranks", "7", *own]
    words = ("srun", "--nodes=2", "torchrun", "--nnodes=2")
    built = ranks.command(Machine(processes=16, launcher=words), SFT, "spec.json", 7)
    assert built == [*words, "-m", "clinrl.training.worker", "spec.json"]


def test_a_launcher_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"launcher cannot be started \(no-such-launcher: No such file"):
        run_worker(tmp_path / "spec.json", ["no-such-launcher", "-m", "x"])


def test_what_several_processes_cannot_train_is_refused() -> None:
    with pytest.raises(ParamsError, match="processes is 2, but rejection sampling runs in one; leave processes out"):
        ranks.check(Machine(processes=2), SFT | {"method": "rejection"}, plays=False)
    with pytest.raises(ParamsError, match="processes is 2, but GRPO in episodes runs in one"):
        ranks.check(Machine(processes=2), GRPO, plays=True)
    ranks.check(Machine(processes=2), SFT, plays=True)
    ranks.check(Machine(), GRPO, plays=True)


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "visible", lambda: [gpus.Gpu(0, "H100", 80, 80)])
    with pytest.raises(ParamsError, match="processes is 2, but 1 GPUs are visible; lower it"):
        ranks.check(Machine(processes=2), SFT, plays=False)
    ranks.check(Machine(processes=2, launcher=("srun",)), SFT, plays=False)


def test_training_under_a_launcher_is_refused_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(Refused, match=r"without a launcher, and set processes in machine.yaml to 4$"):
        launch.stage(dolls.params(), "v1")


def test_another_number_of_processes_than_machine_yaml_says_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = {"machine": {"processes": 2}}
    ranks.check_started(spec)
    for name, value in {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ParamsError, match=r"3 processes of a training were started, but machine.yaml says 2"):
        ranks.check_started(spec)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ranks.Followed):
        ranks.check_started(spec)


def processes(monkeypatch: pytest.MonkeyPatch, rank: int, gathered: Any) -> None:
    for name, value in {"LOCAL_RANK": rank, "RANK": rank, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(ranks, "gathered", gathered)


def test_what_the_first_process_refuses_the_others_do_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise Alarmed("too high")

    processes(monkeypatch, 0, lambda mine: [*mine, (None, False)])
    with pytest.raises(Alarmed, match="too high"):
        ranks.agreed(refuse)
    assert ranks.agreed(lambda: 3) == 3
    processes(monkeypatch, 1, lambda mine: [(None, True), *mine])
    with pytest.raises(ranks.Followed):
        ranks.agreed(lambda: pytest.fail("only the first decides"))
    processes(monkeypatch, 1, lambda mine: [(3, False), *mine])
    assert ranks.agreed(lambda: 4) == 3


@pytest.mark.parametrize("rank", [0, 1])
def test_a_score_sees_the_completions_of_all_processes(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """One group lies across both: each has two completions of it."""
    whole = {"case": list("abcd"), "mode": ["think"] * 4, "completion_ids": [[1], [2], [3], [4]]}
    seen: list[dict[str, Any]] = []

    def score(**columns: Any) -> list[float]:
        seen.append({name: list(columns[name]) for name in whole})
        return [float(ids[0]) for ids in columns["completion_ids"]]

    rows = [tuple(whole[name][place] for name in ("completion_ids", "case", "mode")) for place in range(4)]
    told = iter([rows, [([1.0, 2.0, 3.0, 4.0], False)]])
    processes(monkeypatch, rank, lambda mine: next(told))
    own = {name: values[2 * rank : 2 * rank + 2] for name, values in whole.items()}
    assert over_all(score)(log_metric=print, prompts=["p", "p"], **own) == [[1.0, 2.0], [3.0, 4.0]][rank]
    assert seen == ([whole] if rank == 0 else [])


def test_a_row_is_drawn_with_its_own_seed_whatever_is_beside_it() -> None:
    scores = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    seeds, device = seeds_of(1, range(4)), torch.device("cpu")
    assert len(set(seeds)) == 4
    whole = RowNoise(seeds, 0.7, device)
    first, second = whole(scores, scores), whole(scores, scores)
    apart = RowNoise(seeds[2:], 0.7, device)
    assert torch.equal(apart(scores[2:], scores[2:]), first[2:])
    assert torch.equal(apart(scores[2:], scores[2:]), second[2:])
    assert not torch.equal(first, second)


def test_the_likeliest_after_noise_is_a_draw() -> None:
    scores, temperature, draws = torch.tensor([1.0, 0.0, -1.0, 0.5]), 0.7, 20_000
    noise = RowNoise(seeds_of(0, range(draws)), temperature, torch.device("cpu"))
    drawn = noise(scores, scores.expand(draws, -1)).argmax(-1).bincount(minlength=4) / draws
    assert drawn.tolist() == pytest.approx((scores / temperature).softmax(-1).tolist(), abs=0.015)


def test_only_the_first_process_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And all stop where the first was asked to."""
    for rank in (1, 0):
        processes(monkeypatch, rank, lambda mine: [(True, False)])
        (folder := tmp_path / str(rank) / "checkpoint-1").mkdir(parents=True)
        watch = callback.Watch(folder.parent, version="v1", steps=2)
        state, control = SimpleNamespace(global_step=0, log_history=[]), SimpleNamespace()
        watch.on_train_begin(None, state, control)
        state.global_step = 1
        watch.on_log(None, state, control, logs={"loss": 1.0})
        watch.on_save(SimpleNamespace(output_dir=folder.parent), state, control)
        watch.on_step_end(None, state, control)
        assert control.should_training_stop
        assert len([path for path in folder.parent.rglob("*") if path.is_file()]) == (4 if rank == 0 else 0)


TRAIN = """
import sys
from clinrl.config.params import load_params
from clinrl.errors import Refused
from clinrl.training import launch
try:
    launch.stage(load_params(), sys.argv[1])
except Refused as refused:
    sys.exit(str(refused))
"""
ONE = {"processes": 1, "launcher": [sys.executable, "-m", "torch.distributed.run", "--standalone"]}
"""One process that is launched draws row by row, as several do."""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The doll's project at full scale, its base a checkpoint in a folder, in float32 on the CPU."""
    shutil.copytree(dolls.built(), tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(paths.base("esi"), checkpoint)
    base = dolls.PARAMS["bases"]["esi"] | {"full": {"repo": str(checkpoint), "revision": "main", "quantize": "none"}}
    profiles = json.loads(json.dumps(dolls.PARAMS["profiles"]), object_hook=dolls._integer_keys)
    for profile in profiles.values():
        profile["trainer"]["full"] |= {"steps": 4, "checkpoint_every": 2}
    content = dolls.PARAMS | {"scale": "full", "bases": {"esi": base}, "profiles": profiles}
    YAML(typ="safe").dump(content, tmp_path / "params.yaml")
    changed = {name: content[name] for name in ("scale", "bases", "profiles")}
    bases.stage(dolls.params(**changed), "esi")
    return tmp_path


def begin(version: str, machine: dict[str, Any]) -> subprocess.Popen[str]:
    YAML(typ="safe").dump({"try_anyway": True, **machine}, Path("machine.yaml"))
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen([sys.executable, "-c", TRAIN, version], env=environment, stderr=subprocess.PIPE, text=True)


def train(version: str, machine: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """The weights and the history of a version, which is then removed."""
    process = begin(version, machine)
    errors = process.communicate()[1]
    assert process.returncode == 0, errors
    folder = paths.adapter(version)
    found = load_file(folder / trl.WEIGHTS), (folder / "history.jsonl").read_text().splitlines()
    shutil.rmtree(folder)
    return found[0], [json.loads(line) for line in found[1]]


def assert_equal(one: Any, two: Any) -> None:
    """The same tokens and the same weights but for rounding, one line a step."""
    assert [line["step"] for line in one[1]] == [line["step"] for line in two[1]] == [1, 2, 3, 4]
    for name in ("num_tokens", "loss", "grad_norm"):
        assert [line[name] for line in two[1]] == pytest.approx([line[name] for line in one[1]], rel=1e-4, abs=1e-6)
    assert max(float((one[0][name] - two[0][name]).abs().max()) for name in one[0]) <= 1e-6


@pytest.mark.slow
def test_two_processes_imitate_what_one_does(project: Path) -> None:
    assert_equal(train("v1", {}), train("v1", {"processes": 2}))


@pytest.mark.slow
def test_two_processes_are_rewarded_as_one_that_draws_row_by_row(project: Path) -> None:
    one, two = train("v3", ONE), train("v3", {"processes": 2})
    assert_equal(one, two)
    for before, after in zip(one[1], two[1], strict=True):
        names = [name for name in before if name.startswith(("reward", "answer/", "groups/", "terms/", "completions/"))]
        assert {name: after[name] for name in names} == pytest.approx({name: before[name] for name in names}, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "then"), [(1, 2), (0, 1)])
def test_a_killed_process_ends_the_run_and_the_same_command_goes_on(project: Path, rank: int, then: int) -> None:
    whole = train("v1", {"processes": 2})
    process = begin("v1", {"processes": 2})
    deadline = time.monotonic() + 600
    while not list(Path(".clinrl/checkpoints").glob("v1-*/trainer/checkpoint-2/complete.json")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    running = [one for one in psutil.Process(process.pid).children(recursive=True) if one.is_running()]
    victim = next(one for one in running if one.environ().get("RANK") == str(rank))
    victim.send_signal(signal.SIGKILL)
    began, errors = time.monotonic(), process.communicate()[1]
    assert process.returncode == 1
    assert time.monotonic() - began < 30
    assert "the trainer of v1 was killed (signal 9" in errors
    assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in running)
    (status,) = Path(".clinrl/checkpoints").glob("v1-*/status.json")
    assert json.loads(status.read_text())["state"] in ("ended", "crashed")
    assert_equal(whole, train("v1", {"processes": then}))
