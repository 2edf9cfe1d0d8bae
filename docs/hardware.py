"""What fits which GPU, from the estimate of `clinrl doctor` and the reckoning before a training."""

from pathlib import Path
from typing import Any
from unittest import mock

from clinrl.config.machine import Machine
from clinrl.config.params import Params, load_params
from clinrl.models import needs, step_time
from clinrl.models.step_time import Rates
from clinrl.runtime.gpus import Gpu

ROOT = Path(__file__).resolve().parents[1]
CARDS = {"24 GB": (24564, 165e12, 1008e9), "80 GB": (81920, 312e12, 2039e9)}
"""The memory of a card in MiB, and the matrix operations and bytes a second that NVIDIA states of it: GeForce RTX 4090,
A100 SXM."""
IN_USE = 512 << 20
"""Bytes of a GPU that others use."""
START_S = 5e-6
"""Seconds that a kernel takes to be started: assumed."""
SHOWN = ("esi-v43", "esi-v49", "imaging-citations-1", "imaging-llm-eval-1", "audit-v3", "audit-v6")
SETTINGS = (None, 16384, 8192, 4096, 2048)
"""Bounds of tokens that are tried, in this order."""


def hardware() -> dict[str, Any]:
    """What the page on what fits tells: memory and time of one version of each kind, card by card."""
    params = load_params(ROOT / "params.yaml").model_copy(update={"scale": "full"})
    rates = {
        card: Rates(device=card, operations_per_s=operations, bytes_per_s=read, kernel_start_s=START_S, source="stated")
        for card, (_, operations, read) in CARDS.items()
    }
    with mock.patch("clinrl.models.hub.cached_config", return_value=None):  # equal bytes, whatever is in the cache
        fits = {(name, card): fitting(params, name, card) for name in SHOWN for card in CARDS}
        memory = [[name, *(fits[name, card][1] for card in CARDS)] for name in SHOWN]
        machines = [("24 GB", 1), ("80 GB", 1), ("80 GB", 8)]
        times = [
            [
                name,
                *(cell for card, n in machines for cell in reckoned(params, name, fits[name, card][0], rates[card], n)),
            ]
            for name in SHOWN
        ]
    return {
        "cards": [*CARDS],
        "memory": memory,
        "rates": [str(each).removeprefix("stated on ") for each in rates.values()],
        "kernels": step_time.KERNELS,
        "columns": [f"{card}, {what}" for card in (*CARDS, "8 x 80 GB") for what in ("a step", "all")],
        "times": times,
    }


def fitting(params: Params, name: str, card: str) -> tuple[Machine | None, str]:
    """The first setting with which all places of a version fit a card, and its cell."""
    total = CARDS[card][0] << 20
    there = needs.FreeMemory(Gpu(0, card, total, total - IN_USE), 1 << 40)
    rows = params.trainer(params.versions[name].profile).micro_batch or 1
    for tokens in SETTINGS:
        for micro in [None, *(1 << power for power in reversed(range(rows.bit_length() - 1)))]:
            machine = Machine(micro_batch=micro, exam_tokens=tokens)
            found = needs.needs(params, name, machine, there)
            most = max(found, key=lambda need: need.gpu or 0)
            place = f"{most.place} {(most.gpu or 0) / (1 << 30):.1f} GiB"
            if all(need.fits for need in found):
                set_ = {"micro_batch": micro, "exam_tokens": tokens}
                text = ", ".join(f"`{key}: {value}`" for key, value in set_.items() if value) or "as it is"
                return machine, f"{text}; {place}"
    return None, f"no: {place}"


def reckoned(params: Params, name: str, machine: Machine | None, rates: Rates, gpus: int) -> list[str]:
    """The cells of a training's step and of all of it."""
    if machine is None:
        return ["-", "-"]
    times = step_time.estimate_times(params, name, machine, rates, is_gpu=True, gpus=gpus)
    return [step_time.seconds(times.step_s), step_time.seconds(times.all_s)]
