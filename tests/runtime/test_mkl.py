"""MKL is asked about the processor, and answers as on an AMD Zen, in processes that have not computed yet."""

import _ctypes
import json
import subprocess
import sys
from pathlib import Path

import pytest

from clinrl.runtime import determinism, mkl

ASKED = """
import ctypes, json, os, sys
from pathlib import Path
from clinrl.runtime import determinism, mkl
determinism.pin()
import torch

LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"

def multiply():
    torch.ones(64, 64) @ torch.ones(64, 64)

def answers():
    library = ctypes.CDLL(str(LIBRARY))
    names = ("mkl_serv_intel_cpu_true", "mkl_serv_intel_cpu", "mkl_serv_cpuiszen", "mkl_serv_cpu_detect")
    return [getattr(library, name)() for name in names]

def said(*before):
    for act in before:
        act()
    return {"taken": mkl.take_zen_kernels(LIBRARY), "again": mkl.take_zen_kernels(LIBRARY), "answers": answers()}

# In forks: MKL keeps an answer for the life of a process.
for before in ((), (multiply,), (lambda: determinism.settle(0), multiply)):
    sys.stdout.flush()
    if not os.fork():
        print(json.dumps(said(*before)), flush=True)
        os._exit(0)
    os.wait()
"""
ZEN = [0, 0, 1, 0]

on_x86_linux = pytest.mark.skipif(
    not (determinism.X86 and sys.platform == "linux"), reason="the builds of torch that hold MKL are for x86-64 Linux"
)


@pytest.mark.long
@on_x86_linux
def test_mkl_computes_as_on_zen_if_it_is_asked_before_its_first_product() -> None:
    """Where a product came first, an Intel processor keeps its own kernels, and it is said."""
    done = subprocess.run([sys.executable, "-c", ASKED], check=True, capture_output=True, text=True)
    first, late, settled = map(json.loads, done.stdout.splitlines())
    assert first == settled == {"taken": True, "again": True, "answers": ZEN}
    is_intel = "GenuineIntel" in Path("/proc/cpuinfo").read_text(encoding="ascii")
    assert (late["taken"], late["answers"] == ZEN) == ((False, False) if is_intel else (True, True))


def test_a_library_without_mkl_is_left_alone(tmp_path: Path) -> None:
    assert not mkl.take_zen_kernels(tmp_path / "libtorch_cpu.so")
    assert not mkl.take_zen_kernels(Path(_ctypes.__file__))


@on_x86_linux
def test_a_late_call_is_said_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mkl, "take_zen_kernels", lambda library: False)
    determinism.settle(3)
    assert "kernels for this make of processor" in caplog.text
