"""`clinrl doctor`: whether each task fits into this machine's memory, and which libraries a training can use."""

import importlib.metadata
import json
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import import_module
from typing import TYPE_CHECKING

from clinrl.cli.names import check_name
from clinrl.config.params import Params

if TYPE_CHECKING:
    from clinrl.config.base import Scale
    from clinrl.models.needs import FreeMemory, Need
    from clinrl.models.step_time import Rates, Times

LIBRARIES = ("torch", "bitsandbytes", "kernels", "flash-linear-attention", "causal-conv1d")
"""Qwen3.5 without kernels or flash-linear-attention runs parts of its layers in Python, many times slower."""
WIDTH = 79
NAME = 32
"""Most characters of a name in the table."""


def stage(params: Params, names: Sequence[str] = (), *, scale: "Scale | None" = None, as_json: bool = False) -> int:
    """Print the memory that each task needs, of all versions or of those in `names`. Returns 0 if all fits, else 1.

    `scale` is the active one by default. Raises ParamsError for an unknown name, for a wrong machine.yaml, and for a
    GPU in machine.yaml that this machine does not have.
    """
    from clinrl.config.machine import read_machine

    needs, step_time = import_module("clinrl.models.needs"), import_module("clinrl.models.step_time")
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
        content = {"scale": at.scale, "machine": hardware, "software": software, "needs": [asdict(n) for n in found]}
        content |= {"reckoned": reckoned} if at.scale == "full" else {}
        print(json.dumps(content, indent=2))
    else:
        _print(at.scale, found, free, software)
        if rates:
            _print_times(times, rates, step_time.seconds)
        if copies := sorted(task for task in params.bases if at.scale == "full" and needs.is_copy(at, task)):
            print(
                _wrapped(f"\nThe hub's cache has no config of the bases of {', '.join(copies)}: known shapes are used.")
            )
    return 0 if all(need.fits for need in found) else 1


def _software() -> dict[str, str]:
    """The version of CUDA and of each library, or `none`."""
    found = {str(package.metadata["Name"]).lower(): package.version for package in importlib.metadata.distributions()}
    versions = {name: found.get(name, "none") for name in LIBRARIES}
    return {"CUDA": import_module("clinrl.models.memory").cuda()} | versions


def _print(scale: str, found: "Sequence[Need]", free: "FreeMemory", software: dict[str, str]) -> None:
    for gpu in free.gpus:
        used = ", used" if gpu == free.gpu else ""
        print(_wrapped(f"GPU {gpu.number}: {gpu.name}, {_gib(gpu.free)} of {_gib(gpu.total)} GiB free{used}"))
    print(f"host: {_gib(free.host)} GiB free" + ("" if free.gpus else "; no GPU"))
    print(_wrapped(", ".join(f"{name} {version}" for name, version in software.items())))
    print(f"\nscale {scale}, GiB\n{'task':<9}{'place':<12}{'most, of':<{NAME + 1}}{'GPU':>7}{'host':>8}  fits")
    for need in found:
        name = need.name if len(need.name) <= NAME else need.name[: NAME - 3] + "..."
        sizes = f"{_gib(need.gpu):>7}{_gib(need.host):>8}"
        print(f"{need.task:<9}{need.place:<12}{name:<{NAME + 1}}{sizes}  {'yes' if need.fits else 'no'}")
    for need in found:
        if need.short:
            print(_wrapped(f"{need.task} {need.place} needs {need.short}" if need.host else need.short))


def _print_times(times: "Sequence[Times]", rates: "Rates", say: "Callable[[float], str]") -> None:
    print(f"\nreckoned, at most\n{'task':<9}{'longest, of':<{NAME + 1}}{'write':>8}{'loss':>8}{'step':>10}{'all':>11}")
    for each in times:
        name = each.name if len(each.name) <= NAME else each.name[: NAME - 3] + "..."
        write, loss, step, whole = map(say, (each.generation_s, each.loss_s, each.step_s, each.all_s))
        print(f"{each.task:<9}{name:<{NAME + 1}}{write:>8}{loss:>8}{step:>10}{whole:>11}")
    print(_wrapped(f"Rates {rates}. Judges, held-out checks, exams and what vLLM writes are not counted."))


def _gib(size: int | None) -> str:
    """Bytes in GiB; `-` for 0, `?` for None, an unknown size."""
    return "?" if size is None else f"{size / (1 << 30):,.1f}" if size else "-"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False, replace_whitespace=False)
