"""Which GPUs are there, by a program in the place of nvidia-smi, and which one a training or an exam is shown."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import examined
from clinrl.config.machine import Machine
from clinrl.config.params import Params, load_params
from clinrl.errors import OutOfMemory, ParamsError
from clinrl.models import needs
from clinrl.runtime import determinism
from clinrl.runtime.gpus import Gpu, show_one, visible

VISIBLE = "CUDA_VISIBLE_DEVICES"
SMI = """#!/bin/sh
echo "0, GPU-aa, NVIDIA A, 81559, 1000"
echo "1, GPU-bb, NVIDIA B, 81559, 80000"
echo "2, MIG-cc, NVIDIA C, [N/A], [N/A]"
echo "3, GPU-dd, NVIDIA GB10, [N/A], [N/A]"
"""


@pytest.fixture
def cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin/nvidia-smi"
    program.parent.mkdir()
    program.write_text(SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv(VISIBLE, "")  # so that what is set below goes away again
    monkeypatch.delenv(VISIBLE)


@pytest.mark.usefixtures("cards")
def test_those_that_are_visible_are_listed_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    *own, shared = visible()
    assert [(gpu.number, gpu.name, gpu.free >> 20) for gpu in own] == [(0, "NVIDIA A", 1000), (1, "NVIDIA B", 80000)]
    assert (shared.number, shared.total >> 20) == (3, psutil.virtual_memory().total >> 20)
    assert 0 < shared.free < shared.total
    monkeypatch.setenv(VISIBLE, "GPU-bb, 0, MIG-cc")
    assert [gpu.number for gpu in visible()] == [1, 0]
    assert needs.free_memory(Machine(gpu=1)).gpu == visible()[1]
    with pytest.raises(ParamsError, match="gpu is 2, but 2 are visible"):
        needs.free_memory(Machine(gpu=2))
    assert needs.free_memory(Machine(processes=2)).gpu == visible()[1]  # the one with the least that is free
    with pytest.raises(ParamsError, match="processes is 3, one a GPU, but 2 are visible"):
        needs.free_memory(Machine(processes=3))


@pytest.mark.usefixtures("cards")
@pytest.mark.parametrize(
    ("named", "numbers"),
    [
        ("GPU-b", [1]),
        ("GPU-", []),
        ("GPU-b, GPU-a", [1, 0]),
        ("0,0", []),
        ("1, 9, 0", [1]),
        ("-1, 0", []),
        ("1,,0", [1]),
    ],
)
def test_they_are_named_as_cuda_reads_names(monkeypatch: pytest.MonkeyPatch, named: str, numbers: list[int]) -> None:
    monkeypatch.setenv(VISIBLE, named)
    assert [gpu.number for gpu in visible()] == numbers


def test_without_a_driver_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert visible() == []
    assert needs.free_memory(Machine()).gpu is None


@pytest.mark.parametrize(
    ("limit", "used", "idle"),
    [
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_of_a_container_counts_what_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str, used: str, idle: str
) -> None:
    monkeypatch.setattr(needs, "CONTAINERS", [(tmp_path, *own[1:]) for own in needs.CONTAINERS])
    (tmp_path / used).write_text("700\n")
    (tmp_path / "memory.stat").write_text(f"anon 400\n{idle} 200\n")
    (tmp_path / limit).write_text("max\n")
    assert needs.free_memory(Machine()).host > 1000
    (tmp_path / limit).write_text("1000\n")
    assert needs.free_memory(Machine()).host == 500


@pytest.mark.parametrize(
    ("named", "index", "shown"), [(None, 0, "0"), (None, 3, "3"), ("5,7", 1, "7"), ("5,7", 0, "5"), ("", 0, "")]
)
def test_a_training_is_shown_one(monkeypatch: pytest.MonkeyPatch, named: str | None, index: int, shown: str) -> None:
    monkeypatch.setenv(VISIBLE, named or "")
    if named is None:
        monkeypatch.delenv(VISIBLE)
    show_one(index)
    assert os.environ[VISIBLE] == shown


def test_one_process_of_several_is_the_first_on_the_gpu_that_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate moves a process to the GPU of its local rank, of those that are visible."""
    monkeypatch.setenv(VISIBLE, "5,7")
    monkeypatch.setenv("LOCAL_RANK", "1")
    show_one(1)
    assert (os.environ[VISIBLE], os.environ["LOCAL_RANK"]) == ("7", "0")
    monkeypatch.delenv("LOCAL_RANK")
    show_one(0)
    assert "LOCAL_RANK" not in os.environ


def test_cuda_counts_gpus_as_nvidia_smi_does() -> None:
    determinism.pin()
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_a_training_is_not_shown_one_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "5,7")
    with pytest.raises(ParamsError, match="gpu is 2, but CUDA_VISIBLE_DEVICES=5,7 shows 2"):
        show_one(2)


ORDER = """
import sys
from clinrl.cli import main
from clinrl.runtime import gpus

def shown(index):
    print(index, sorted({"bitsandbytes", "peft", "torch", "transformers"} & sys.modules.keys()))
    sys.exit()

gpus.show_one = shown
main.main(sys.argv[1:])
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "shown"), [(("evaluate", "esi-base"), "3 []\n"), (("merge", "v2-full"), "3 ['torch']\n")]
)
def test_a_stage_is_shown_one_before_anything_is_imported_that_asks_for_all(
    tmp_path: Path, command: tuple[str, str], shown: str
) -> None:
    examined.copy(examined.registered(), tmp_path)
    params, machine = tmp_path / "params.yaml", tmp_path / "machine.yaml"
    params.write_text(params.read_text().replace("scale: embedded", "scale: full"))
    machine.write_text("gpu: 3\n")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", ORDER, *command], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.stdout == shown, done.stderr


@pytest.mark.long
@pytest.mark.usefixtures("cards")
def test_a_training_that_cannot_fit_is_refused_with_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).resolve().parents[2]
    params = load_params(root / "params.yaml").model_copy(update={"scale": "full"})
    monkeypatch.chdir(root)
    with pytest.raises(OutOfMemory, match=r"esi-v46 cannot be trained here: loading needs .* GiB of the GPU, .* more"):
        needs.check(params, "esi-v46", Machine(gpu=0))
    needs.check(params, "esi-v46", Machine(gpu=0, try_anyway=True))
    few, many = (dict(_sizes(params, Machine(gpu=1, micro_batch=rows))) for rows in (1, 64))
    assert few["training"] < many["training"]
    assert few["exam"] == many["exam"]
    alone, shared = (
        {need.place: need for need in needs.needs(params, "esi-v46", machine, needs.free_memory(machine))}
        for machine in (Machine(), Machine(processes=2, micro_batch=1))
    )
    assert shared["generation"].gpu < alone["generation"].gpu
    alike = Machine(micro_batch=1), Machine(processes=2, micro_batch=1)
    copies = [dict(_sizes(params, machine))["training"] for machine in alike]
    assert copies[1] - copies[0] == 4 * needs.workload(params, "esi-v46", alike[0], is_gpu=True).policy.adapter
    served = dict(_sizes(params, Machine(gpu=1, sampler="vllm", vllm={"url": "http://127.0.0.1:8000"})))
    assert served.keys() == alone.keys() - {"generation"}  # the server's memory, not the trainer's
    assert shared["training"].host == 2 * alone["training"].host
    there = needs.FreeMemory(Gpu(0, "C", 16 << 30, 16 << 30), 1 << 40)
    monkeypatch.setattr(needs, "free_memory", lambda _: there)
    of_exam = {need.place: need.fits for need in needs.needs(params, "imaging-labels-1", Machine(), there)}
    assert of_exam == {"loading": True, "training": True, "judges": False, "exam": True}
    needs.check(params, "imaging-labels-1", Machine())  # a training that asks no judge


def _sizes(params: Params, machine: Machine) -> list[tuple[str, int | None]]:
    return [(need.place, need.gpu) for need in needs.needs(params, "esi-v46", machine, needs.free_memory(machine))]
