"""The time that a training takes, estimated from three rates of a device, without training anything.

Completions are written token by token, and each token reads all weights, so memory or the start of kernels bounds them.
A loss multiplies matrices, so arithmetic bounds it. `python -m clinrl.models.step_time` prints the rates of this
machine. It is a process of its own, so that no GPU memory stays in use.
"""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from clinrl.config.machine import Machine
from clinrl.config.params import Params
from clinrl.errors import Refused, echo
from clinrl.models import needs
from clinrl.runtime.gpus import Gpu

PROBE_S = 0.3
"""Seconds for which each of the three rates is measured."""
CPU = "this CPU"
"""The device of rates that were measured without a GPU."""
LIMIT_S = 120
"""Seconds that a process has to measure all rates; starting CUDA and importing torch take most of them."""
REACHED = 0.5
"""Assumed share of the measured rates that a training reaches."""
KERNELS = 500
"""Cost of a pass of a layer with its adapter, in starts of a kernel: measured on an H200, where a model of 8 billion
numbers in 4 bits wrote 64 tokens of 64 rows in 12.3 s. It includes Python's work between the kernels."""
UNPACKED = 4
"""Bytes that are written and read for a number in 4 bits each time it is unpacked."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The three rates of a device."""

    device: str
    operations_per_s: float
    """Multiplications and additions of matrices."""
    bytes_per_s: float
    """Read and written in memory."""
    kernel_start_s: float
    source: str = "measured"
    """Where the rates come from."""

    def __str__(self) -> str:
        return (
            f"{self.source} on {self.device}: {self.operations_per_s / 1e12:,.3g} T operations/s, "
            f"{self.bytes_per_s / 1e9:,.0f} GB/s, {self.kernel_start_s * 1e6:.3g} us a kernel"
        )


@dataclass(frozen=True, kw_only=True)
class Times:
    """A training in seconds, if every completion is as long as allowed."""

    task: str
    name: str
    sampling_s: float
    """Rejection sampling, before the first step."""
    generation_s: float
    """Generation in one step."""
    loss_s: float
    """Forward and backward pass of one step."""
    steps: int

    @property
    def step_s(self) -> float:
        return self.generation_s + self.loss_s

    @property
    def all_s(self) -> float:
        return self.sampling_s + self.steps * self.step_s


def estimate_times(
    params: Params, version: str, machine: Machine, rates: Rates, *, is_gpu: bool, gpus: int = 1
) -> Times:
    """The time that the training of a version takes at these rates, without judges, held-out cases and vLLM's writing.

    `gpus`: the rows of a step are divided among so many, at no cost. Raises Refused if the base's shape is not known.
    """
    load = needs.workload(params, version, machine, is_gpu=is_gpu)
    assert load.training is not None
    each = {field: math.ceil(getattr(load.training, field) / gpus) for field in ("sequences", "sampled")}
    training = replace(load.training, **each)
    written = _writing(load, training, rates) if training.sampled and machine.sampler != "vllm" else 0.0
    is_grpo = training.method == "grpo"
    passes = 3 if params.scale == "full" else 2  # checkpointing repeats the forward pass of what it did not keep
    passes += (training.beta > 0) + (is_grpo and machine.sampler == "vllm")  # by the reference, by the policy
    tokens = training.sequences * (load.prompt + training.written)
    arithmetic = passes * 2 * load.policy.multiplied * tokens / rates.operations_per_s / REACHED
    starts = passes * training.sequences / training.micro * load.policy.depth * KERNELS * rates.kernel_start_s
    return Times(
        task=params.versions[version].task,
        name=version,
        sampling_s=0.0 if is_grpo else written,
        generation_s=written if is_grpo else 0.0,
        loss_s=arithmetic + starts,
        steps=training.steps,
    )


def _writing(load: needs.Workload, training: needs.Training, rates: Rates) -> float:
    """Seconds for the completions of a step: per token the slower of memory and arithmetic, plus kernel starts."""
    policy, rows = load.policy, min(training.together, training.sampled)
    held = rows * ((load.prompt + training.written / 2) * policy.token + policy.row)
    memory = (policy.weights + UNPACKED * policy.packed + held) / rates.bytes_per_s
    operations = 2 * rows * policy.multiplied / rates.operations_per_s
    token = max(memory, operations) / REACHED + policy.depth * KERNELS * rates.kernel_start_s
    read = load.prompt + (training.reads - 1) * (load.prompt + training.written / 2)
    return math.ceil(training.sampled / rows) * (training.written * token + read * operations / REACHED)


def slowest(params: Params, names: Sequence[str], machine: Machine, rates: Rates, *, is_gpu: bool) -> list[Times]:
    """For each task, the training that takes longest. Bases and checkpoints of unknown shape are left out."""
    found: dict[str, Times] = {}
    for name in names:
        with suppress(Refused):
            if name in params.versions:
                times = estimate_times(params, name, machine, rates, is_gpu=is_gpu)
                found[times.task] = max(found.get(times.task, times), times, key=lambda one: one.all_s)
    return list(found.values())


def announce(params: Params, version: str, machine: Machine) -> None:
    """Print on stderr how long a training at full scale will take, before it starts; nothing at the embedded scale."""
    if params.scale == "embedded":
        return
    gpu = needs.free_memory(machine).gpu
    rates = measured(gpu)
    text = "what a step takes cannot be reckoned here; the training starts all the same"
    with suppress(Refused):
        if rates is not None:
            times = estimate_times(params, version, machine, rates, is_gpu=gpu is not None)
            before = f"{seconds(times.sampling_s)} of sampling, then " if times.sampling_s else ""
            besides = "; what vLLM writes is not counted" if machine.sampler == "vllm" else ""
            text = (
                f"reckoned, not measured: {before}at most {seconds(times.step_s)} a step "
                f"(generation {seconds(times.generation_s)}, loss {seconds(times.loss_s)}), "
                f"{seconds(times.all_s)} in all{besides}; rates {rates}"
            )
    echo(f"{version}: {text}")


def seconds(time_s: float) -> str:
    """Format a time in seconds, minutes or hours."""
    if time_s < 100:
        return f"{time_s:.3g} s"
    return f"{time_s / 60:.3g} min" if time_s < 100 * 60 else f"{time_s / 3600:,.1f} h"


def measured(gpu: Gpu | None) -> Rates | None:
    """Measure the rates of a GPU or, without one, of this CPU; None if that fails.

    The measurement runs in a process of its own, which sees no other GPU: a process that has used CUDA holds GPU memory
    until it ends.
    """
    number = "" if gpu is None else str(gpu.number)
    shown = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": number}  # as nvidia-smi counts
    command = [sys.executable, "-m", "clinrl.models.step_time"]
    try:
        done = subprocess.run(
            command, env=os.environ | shown, capture_output=True, text=True, timeout=LIMIT_S, check=True
        )
        return Rates(**json.loads(done.stdout.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError, TypeError):
        return None


def probe() -> Rates:
    """Measure this process's device for about a second."""
    import torch

    is_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if is_gpu else ("cpu", torch.float32)
    width, numbers = (4096, 1 << 28) if is_gpu else (768, 1 << 24)
    generator = torch.Generator(device).manual_seed(0)  # not the process's own, from which others draw
    left, right = (torch.randn(width, width, device=device, dtype=dtype, generator=generator) for _ in range(2))
    source, target = (torch.zeros(numbers, device=device, dtype=dtype) for _ in range(2))
    few = torch.zeros(8, device=device)
    wait: Callable[[], Any] = torch.cuda.synchronize if is_gpu else lambda: None

    def each(work: Callable[[], Any], at_once: int = 1) -> float:
        """Seconds per call of `work`; `at_once` calls are started before each wait for the device."""
        work()
        wait()
        began, calls = time.perf_counter(), 0
        while time.perf_counter() - began < PROBE_S:
            for _ in range(at_once):
                work()
            wait()
            calls += at_once
        return (time.perf_counter() - began) / calls

    with torch.inference_mode():
        return Rates(
            device=torch.cuda.get_device_name() if is_gpu else CPU,
            operations_per_s=2 * width**3 / each(lambda: left @ right),
            bytes_per_s=2 * numbers * dtype.itemsize / each(lambda: target.copy_(source)),
            kernel_start_s=each(lambda: few.add_(1), at_once=100),
        )


if __name__ == "__main__":
    print(json.dumps(asdict(probe())))
