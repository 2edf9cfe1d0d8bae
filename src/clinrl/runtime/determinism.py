"""One set of kernels, one thread count and no telemetry, for every process of the project.

`pin` belongs before torch is imported: torch and the BLAS below it choose their kernels once, when they are loaded.
The default, AVX2 and AVX-512 kernels round differently, so a training run ends in three different adapters; AVX2 is
the level that every x86-64 machine of the last ten years has. `settle` belongs after the import and before torch
computes, once a run: it has MKL choose the same kernels on processors of every maker (`clinrl.runtime.mkl`).
"""

import importlib.metadata
import logging
import os
import platform
import random
import sys
import warnings
from pathlib import Path
from typing import Any

from clinrl.errors import Refused
from clinrl.runtime import mkl

THREADS = 2
"""Intra-op threads of torch, whatever OMP_NUM_THREADS says: how a sum is split depends on their number."""
RUNNING = "CLINRL_RUNNING"
"""The variable that tells stages side by side the path of a file with the number of them that run now."""

X86 = platform.machine().lower() in ("x86_64", "amd64")
KERNELS = "avx2" if X86 else "default"
"""CPU kernel level. Other processors than x86-64 have one level only; their bytes differ from those made here."""

_ARITHMETIC = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # cuBLAS sums in one order only with a fixed workspace
    "OMP_DYNAMIC": "FALSE",
    "MKL_DYNAMIC": "FALSE",
    "TOKENIZERS_PARALLELISM": "false",
}
_X86_ARITHMETIC = {
    "ATEN_CPU_CAPABILITY": KERNELS,
    "MKL_CBWR": "AVX2,STRICT",  # the processes that call `pin` alone; without it MKL picks AVX-512 on Intel
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "OPENBLAS_CORETYPE": "Haswell",  # NumPy's and SciPy's products; its kernels for AVX-512 round otherwise
}
_ALLOCATOR = {  # glibc gives large blocks back at once; a training step then spends half its time on page faults
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
    "MALLOC_TOP_PAD_": str(256 << 20),
}
"""Read when a process starts, so it speeds up children only. It changes no result."""
_WAITING = {"GOMP_SPINCOUNT": "10000"}
"""How often a thread of GNU's OpenMP looks for work before it sleeps. By default it looks for milliseconds, and on a
shared processor it takes that time from the very thread that it waits for. A tenth of this count makes a training on an
idle machine slower by a quarter. It changes no result."""
_SLEEPING = {"GOMP_SPINCOUNT": "100"}
"""The same for a stage that begins beside another and keeps its threads. It makes a step of two audit trainings, with
two threads each on two processors, 2.5 times faster, and a step of one training alone 1.7 times slower (Intel)."""
_GPUS = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""Number GPUs as nvidia-smi does, since their memory is looked up there. CUDA's own order is by speed."""
_QUIET = {
    "DO_NOT_TRACK": "true",  # the word: MLflow ignores "1"
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DVC_NO_ANALYTICS": "1",
    "ITERATIVE_DO_NOT_TRACK": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",  # of transformers: TRL would import MLflow, for seconds, and not use it
}
_OWN = "localhost,127.0.0.1"
"""Hosts for which no proxy is used: a proxy cannot reach the servers of this machine, such as Prefect's."""
_log = logging.getLogger(__name__)
_VERSIONS = ("torch", "transformers", "tokenizers", "trl", "peft", "accelerate")


def pin() -> None:
    """Fix the arithmetic, switch telemetry off and bypass proxies for this machine, in this process and its children.

    Idempotent. Raises Refused if torch is already loaded with other kernels: then it is too late.
    """
    torch = sys.modules.get("torch")
    if X86 and torch is not None and hasattr(torch, "backends"):
        loaded = torch.backends.cpu.get_cpu_capability().lower()
        if loaded != KERNELS:
            raise Refused(
                f"torch was imported with {loaded} CPU kernels before clinrl could ask for {KERNELS}; "
                f"import clinrl first, or start Python with ATEN_CPU_CAPABILITY={KERNELS}"
            )
    os.environ.update(_ARITHMETIC | _ALLOCATOR | _WAITING | _GPUS | _QUIET | (_X86_ARITHMETIC if X86 else {}))
    direct = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""  # in that order, as libraries do
    if _OWN not in direct and direct != "*":
        os.environ |= dict.fromkeys(("no_proxy", "NO_PROXY"), f"{direct},{_OWN}".lstrip(","))
    # Libraries' advice to each other, which nobody at the command line can follow.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft|torch)\.")


def settle(seed: int, *, shares: bool = True) -> None:
    """Seed every generator and allow deterministic algorithms only. Pins first; raises Refused as `pin` does.

    `shares`: whether this process calls `share`, to use fewer threads beside other stages. If it does not, and begins
    beside another stage, its threads sleep while they wait; this has no effect if torch was imported before. Logs a
    warning if torch has already computed in this process, with kernels for processors of this maker alone.
    """
    pin()
    if not shares and 0 < own_processors() < THREADS:
        os.environ.update(_SLEEPING)
    import numpy as np
    import torch

    if X86 and not mkl.take_zen_kernels(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"):
        _log.warning("torch computes with kernels for this make of processor: the last digits may differ from others'")
    torch.use_deterministic_algorithms(True)
    # Otherwise torch fills each new buffer, even the one of megabytes that TRL's loss overwrites at each call.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # set by its module
    torch.backends.cudnn.benchmark = False
    torch.set_num_threads(THREADS)
    # As transformers.set_seed does, whose import takes six seconds.
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def share(*, is_crowded: bool | None = None) -> None:
    """Have torch use this stage's share of the processors as threads, if others may run beside it; at most THREADS.

    This holds on one processor too, where a second thread makes a step of esi-v43 take a tenth more processor time.
    `is_crowded`: whether other programs use the processors, so that two threads would wait for each other; then one
    thread is used. None: not measured.

    Call it between steps and between modes, so that a stage takes over the processors that another leaves; and only
    where results stay the same: torch splits sums of 32,768 numbers and more among its threads, and MKL has other
    kernels with one thread for products as narrow as 16 numbers with 4 to 15 rows.
    """
    own = own_processors() or (0 if is_crowded is None else THREADS)
    if own:
        _compute_with(1 if is_crowded else min(THREADS, own))


def own_processors() -> int:
    """This stage's share of the processors, if stages run side by side; otherwise 1 on one processor, and 0 on more."""
    if running := os.environ.get(RUNNING):
        return max(1, processors() // int(Path(running).read_text(encoding="ascii")))
    return 1 if processors() == 1 else 0


def use_one_thread() -> None:
    """Use one thread for the rest of this process, which is a fork: OpenMP's threads do not survive a fork."""
    os.environ.pop(RUNNING, None)
    _compute_with(1)


def _compute_with(threads: int) -> None:
    import torch

    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)


def processors() -> int:
    return len(os.sched_getaffinity(0))


def record() -> dict[str, Any]:
    """What is pinned, for a manifest: kernel level, thread count and the versions of the libraries that do arithmetic.

    A version carries no build tag: `2.13.0+cpu` and `2.13.0` are the same code on the CPU.
    """
    versions = {name: importlib.metadata.version(name).split("+")[0] for name in _VERSIONS}
    return {"kernels": KERNELS, "threads": THREADS, "versions": versions}
