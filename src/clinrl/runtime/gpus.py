"""The GPUs of this machine and their memory, from nvidia-smi: without importing torch or starting CUDA."""

import os
import shutil
import subprocess
from typing import NamedTuple

from clinrl.errors import ParamsError

ASKED_S = 30
"""Seconds that nvidia-smi has to answer; the first answer after a start of the machine takes some of them."""


class Gpu(NamedTuple):
    """A GPU; memory in bytes."""

    number: int
    """Its number in nvidia-smi."""
    name: str
    total: int
    free: int


def visible() -> list[Gpu]:
    """The GPUs that this process may use, in the order of CUDA_VISIBLE_DEVICES; none without a driver.

    As for CUDA, the beginning of a UUID is enough if no other begins so, a name that is unknown ends the list, and a
    repeated one leaves none.
    """
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=ASKED_S)
    except (OSError, subprocess.SubprocessError):  # a driver that does not answer counts as none
        return []
    found: dict[str, Gpu] = {}
    for line in done.stdout.splitlines():
        number, uuid, name, *memory = (part.strip() for part in line.split(","))
        if memory == ["[N/A]", "[N/A]"] and not uuid.startswith("MIG-"):  # as a GB10, which shares the host's memory
            import psutil

            host = psutil.virtual_memory()
            memory = [str(size >> 20) for size in (host.total, host.available)]
        if all(part.isdecimal() for part in memory):  # otherwise a part of a GPU
            total, free = (int(part) << 20 for part in memory)
            found[number] = found[uuid] = Gpu(int(number), name, total, free)
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return list(dict.fromkeys(found.values()))
    listed: list[Gpu] = []
    for name in map(str.strip, named.split(",")):
        fits = {gpu for key, gpu in found.items() if key == name or (name.startswith("GPU-") and key.startswith(name))}
        if len(fits) != 1:
            break
        listed += fits
    return listed if len({*listed}) == len(listed) else []


def show_one(index: int) -> None:
    """Hide all GPUs but one from this process, by its place among the visible ones; before CUDA is asked for any.

    Raises ParamsError if CUDA_VISIBLE_DEVICES shows fewer. With several visible GPUs a trainer would use them all, and
    so other batches than the recipe's.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = None if named is None else [part.strip() for part in named.split(",") if part.strip()]
    if visible and index >= len(visible):
        raise ParamsError(
            f"machine.yaml: gpu is {index}, but CUDA_VISIBLE_DEVICES={named} shows {len(visible)}; lower it"
        )
    if visible != []:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[index] if visible else str(index)
        if "LOCAL_RANK" in os.environ:  # accelerate chooses among the visible GPUs by it
            os.environ["LOCAL_RANK"] = "0"
