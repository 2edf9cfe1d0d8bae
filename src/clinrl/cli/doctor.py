"""`clinrl doctor`: whether each task fits into this machine's memory, and which libraries a training can use."""

import importlib.metadata
import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from clinrl.cli.names import check_name
from clinrl.config.base import Scale
from clinrl.config.machine import read_machine
from clinrl.config.params import Params
from clinrl.models import memory, needs, step_time
from clinrl.models.needs import FreeMemory, Need
from clinrl.models.step_time import Rates, Times
from clinrl.reports.tables import show

LIBRARIES = ("torch", "bitsandbytes", "kernels", "flash-linear-attention", "causal-conv1d")
"""Qwen3.5 without kernels or flash-linear-attention runs parts of its layers in Python, many times slower."""
WIDTH = 79


def stage(params: Params, names: Sequence[str] = (), *, scale: Scale | None = None, as_json: bool = False) -> int:
    """Print the memory that each task needs, of all versions or of those in `names`. Returns 0 if all fits, else 1.

    `scale` is the active one by default. Raises ParamsError for an unknown name, for a wrong machine.yaml, and for a
    GPU in machine.yaml that this machine does not have.
    """
    for name in names:
        check_name(params, name, "doctor")
    at = params.model_copy(update={"scale": scale or params.scale})
    models, machine = list(names) or [*params.roots, *params.versions], read_machine()
    free, software = needs.free_memory(machine), _software()
    found = needs.worst(at, models, machine, free)
    is_gpu = at.scale == "full" and free.gpu is not None
    rates = step_time.measured(free.gpu if is_gpu else None) if at.scale == "full" else None
    times = step_time.slowest(at, models, machine, rates, is_gpu=is_gpu) if rates else []
    if as_json:
        gpus = [gpu._asdict() for gpu in free.gpus]
        hardware = {"gpus": gpus, "used": free.gpu and free.gpu.number, "host": free.host}
        reckoned = {"rates": rates and asdict(rates), "times": [asdict(each) for each in times]}
        content: dict[str, Any] = {"scale": at.scale, "machine": hardware, "software": software}
        content |= {"needs": [asdict(n) for n in found]} | ({"reckoned": reckoned} if at.scale == "full" else {})
        print(json.dumps(content, indent=2))
    else:
        _print(at.scale, found, free, software)
        if rates:
            _print_times(times, rates)
        if copies := sorted(task for task in params.bases if at.scale == "full" and needs.is_copy(at, task)):
            print(
                _wrapped(f"\nThe hub's cache has no config of the bases of {', '.join(copies)}: known shapes are used.")
            )
    return 0 if all(need.fits for need in found) else 1


def _software() -> dict[str, str]:
    """The version of CUDA and of each library, or `none`."""
    found = {str(package.metadata["Name"]).lower(): package.version for package in importlib.metadata.distributions()}
    versions = {name: found.get(name, "none") for name in LIBRARIES}
    return {"CUDA": memory.cuda()} | versions


def _print(scale: str, found: Sequence[Need], free: FreeMemory, software: dict[str, str]) -> None:
    for gpu in free.gpus:
        used = ", used" if gpu == free.gpu else ""
        print(_wrapped(f"GPU {gpu.number}: {gpu.name}, {_gib(gpu.free)} of {_gib(gpu.total)} GiB free{used}"))
    print(f"host: {_gib(free.host)} GiB free" + ("" if free.gpus else "; no GPU"))
    print(_wrapped(", ".join(f"{name} {version}" for name, version in software.items())))
    print(f"\nscale {scale}, GiB")
    columns = ("task", "place", "most, of", "GPU", "host", "fits")
    rows = [(n.task, n.place, n.name, _gib(n.gpu), _gib(n.host), "yes" if n.fits else "no") for n in found]
    show(columns, [dict(zip(columns, row, strict=True)) for row in rows], as_json=False)
    for need in found:
        if need.short:
            print(_wrapped(f"{need.task} {need.place} needs {need.short}" if need.host else need.short))


def _print_times(times: Sequence[Times], rates: Rates) -> None:
    print("\nreckoned, at most")
    columns, say = ("task", "longest, of", "write", "loss", "step", "all"), step_time.seconds
    rows = [(t.task, t.name, *map(say, (t.generation_s, t.loss_s, t.step_s, t.all_s))) for t in times]
    show(columns, [dict(zip(columns, row, strict=True)) for row in rows], as_json=False)
    print(_wrapped(f"Rates {rates}. Judges, held-out checks, checkpoints, exams and what vLLM writes are not counted."))


def _gib(size: int | None) -> str:
    """Bytes in GiB; `-` for 0, `?` for None, an unknown size."""
    return "?" if size is None else f"{size / (1 << 30):,.1f}" if size else "-"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False, replace_whitespace=False)
