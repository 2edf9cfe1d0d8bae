"""What is pinned, in processes of their own: kernels are chosen when torch is imported."""

import os
import random
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from urllib.request import proxy_bypass

import numpy as np
import pytest
import torch
import transformers

from clinrl.errors import Refused
from clinrl.runtime import determinism

TRAIN = """
import hashlib
from clinrl.runtime import determinism
determinism.settle(3)
import torch
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
for _ in range(5):
    torch.nn.functional.mse_loss(model(torch.randn(512, 64)), torch.randn(512, 64)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 1e-1 * parameter.grad
            parameter.grad = None
digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().numpy().tobytes())
print(digest.hexdigest(), torch.get_num_threads(), torch.backends.cpu.get_cpu_capability())
"""
NARROW = """
from clinrl.runtime import determinism
determinism.settle(3)
import torch
for rows in range(1, 64):
    for deep, wide in ((128, 16), (384, 16), (16, 128), (128, 128), (128, 384), (384, 128)):
        left, right = torch.randn(rows, deep), torch.randn(wide, deep).t()
        torch.set_num_threads(2)
        both = left @ right
        torch.set_num_threads(1)
        if not torch.equal(both, left @ right):
            print(rows, wide)
"""
LATE = """
import torch
from clinrl.runtime import determinism
from clinrl.errors import Refused
try:
    determinism.pin()
except Refused as refused:
    print(refused)
"""


def output(code: str, **environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if name not in ("ATEN_CPU_CAPABILITY", "MKL_CBWR")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=inherited | environment, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_products_with_few_rows_and_a_lora_factor_alone_depend_on_threads() -> None:
    """What `world.shares_threads` rests on: only trainings on labels alone have products of so few rows."""
    differing = {tuple(map(int, line.split())) for line in output(NARROW).splitlines()}
    assert differing <= {(rows, 16) for rows in range(4, 16)}


def trained_here() -> str:
    """What the program says in this process, with these tests' threads and kernels."""
    said = StringIO()
    with redirect_stdout(said):
        exec(TRAIN)  # noqa: S102
    return said.getvalue().strip()


def test_threads_of_before_change_nothing() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = trained_here()
        torch.set_num_threads(3)
        assert one == trained_here()
    finally:
        torch.set_num_threads(before)
    assert f" {determinism.THREADS} " in one


@pytest.mark.skipif(not determinism.X86, reason="other processors have one kernel level")
def test_a_wish_for_other_kernels_is_overruled_before_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what torch and the BLAS below it read; another test imports them."""
    ours = {name: os.environ[name] for name in ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA")}
    for name in ours:
        monkeypatch.setenv(name, "default")
    determinism.pin()
    assert {name: os.environ[name] for name in ours} == ours
    assert ours["ATEN_CPU_CAPABILITY"] == determinism.KERNELS == torch.backends.cpu.get_cpu_capability().lower()


@pytest.mark.slow
def test_threads_hash_seed_and_a_wish_for_other_kernels_change_nothing() -> None:
    plain = trained_here()
    assert plain == output(TRAIN, OMP_NUM_THREADS="1", PYTHONHASHSEED="2", ATEN_CPU_CAPABILITY="default")
    assert f" {determinism.THREADS} " in plain
    assert not determinism.X86 or plain.endswith("AVX2")


PRODUCT = """
from clinrl.runtime import determinism
determinism.pin()
import hashlib
import numpy
draw = numpy.random.default_rng(0).normal
first, second = (draw(size=shape).astype("float32") for shape in ((5, 384), (384, 7)))
print(hashlib.sha256((first @ second).tobytes()).hexdigest())
"""


@pytest.mark.skipif(not determinism.X86, reason="kernels of other processors are others")
def test_numpy_multiplies_alike_whatever_kernels_the_processor_or_a_person_would_choose() -> None:
    asked = [None, "Nehalem", "Sandybridge"]
    env = [os.environ | ({"OPENBLAS_CORETYPE": kernels} if kernels else {}) for kernels in asked]
    done = [subprocess.run([sys.executable, "-c", PRODUCT], env=one, capture_output=True, text=True) for one in env]
    assert {one.stdout for one in done} == {"218d6e143097a7c179d9c878a5fb9970546741ba588848f3b87f9bd3a2243c11\n"}, [
        one.stderr for one in done
    ]


def test_every_generator_gets_the_seed_that_transformers_would_give_it() -> None:
    def drawn() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), float(torch.rand(1))

    determinism.settle(3)
    ours = drawn()
    transformers.set_seed(3)
    assert ours == drawn()


@pytest.mark.skipif(not determinism.X86, reason="other processors have one kernel level")
def test_what_torch_says_of_its_kernels_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    determinism.pin()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    with pytest.raises(Refused, match="torch was imported with default CPU kernels"):
        determinism.pin()


@pytest.mark.slow
@pytest.mark.skipif(not determinism.X86, reason="other processors have one kernel level")
def test_torch_with_other_kernels_is_refused() -> None:
    assert "torch was imported with default CPU kernels" in output(LATE, ATEN_CPU_CAPABILITY="default")


def test_telemetry_is_off_and_children_inherit_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DO_NOT_TRACK", "MLFLOW_DISABLE_TELEMETRY", "DVC_NO_ANALYTICS"):
        monkeypatch.setenv(name, "")
    determinism.pin()
    assert os.environ["DO_NOT_TRACK"] == os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert os.environ["DVC_NO_ANALYTICS"]


@pytest.mark.parametrize(
    ("given", "direct"),
    [
        ({}, "localhost,127.0.0.1"),
        ({"NO_PROXY": ".ward"}, ".ward,localhost,127.0.0.1"),
        ({"no_proxy": ".ward", "NO_PROXY": ".old"}, ".ward,localhost,127.0.0.1"),
        ({"NO_PROXY": "*"}, "*"),
    ],
)
def test_no_proxy_is_asked_for_servers_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], direct: str
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, given.get(name, ""))  # so that what is set here is undone
        if name not in given:
            monkeypatch.delenv(name)
    for _ in range(2):
        determinism.pin()
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert os.environ.get("no_proxy", os.environ["NO_PROXY"]) == direct
    assert proxy_bypass("127.0.0.1:4200")
    assert proxy_bypass("localhost")
    assert bool(proxy_bypass("mlflow.elsewhere")) == (direct == "*")


def test_the_record_names_no_build_and_no_machine() -> None:
    record = determinism.record()
    assert record["threads"] == 2
    assert record["versions"].keys() >= {"torch", "trl", "peft", "transformers"}
    assert not [version for version in record["versions"].values() if "+" in version]


@pytest.mark.parametrize(("stages", "shares", "spins"), [(2, False, "100"), (2, True, "10000"), (1, False, "10000")])
def test_threads_that_stay_sleep_where_another_stage_has_the_other_processors(
    stages: int, shares: bool, spins: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "running").write_text(str(stages))
    monkeypatch.setenv("GOMP_SPINCOUNT", "")
    monkeypatch.setenv(determinism.RUNNING, str(tmp_path / "running"))
    monkeypatch.setattr(determinism, "processors", lambda: 2)
    determinism.settle(3, shares=shares)
    assert os.environ["GOMP_SPINCOUNT"] == spins


@pytest.mark.parametrize(("stages", "processors", "threads"), [(1, 2, 2), (2, 2, 1), (2, 4, 2), (2, 3, 1), (1, 16, 2)])
def test_a_stage_beside_others_has_its_share_of_the_processors(
    stages: int, processors: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    monkeypatch.delenv(determinism.RUNNING)
    monkeypatch.setattr(determinism, "processors", lambda: processors)
    (tmp_path / "running").write_text(str(stages))
    try:
        torch.set_num_threads(3)
        determinism.share()
        assert torch.get_num_threads() == 3  # nobody said that others run
        for is_crowded, found in ((True, 1), (False, 2)):  # by strangers
            determinism.share(is_crowded=is_crowded)
            assert torch.get_num_threads() == found
        assert determinism.own_processors() == 0
        with monkeypatch.context() as only:
            only.setattr(determinism, "processors", lambda: 1)
            determinism.share()
            assert torch.get_num_threads() == 1
        monkeypatch.setenv(determinism.RUNNING, str(tmp_path / "running"))
        determinism.share(is_crowded=True)
        assert torch.get_num_threads() == 1
        determinism.share()
        assert torch.get_num_threads() == threads
        assert determinism.own_processors() == processors // stages
        determinism.use_one_thread()
        determinism.share()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
