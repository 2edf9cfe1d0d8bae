"""Check a merged model against its base and adapters: by the logits of the same prompts, and by the weights.

Both models are read from the disk for this and held in float32, one after the other, so that the files are compared as
a reader finds them. The weights are compared on a sample, to the last bit; this needs little memory, so a model that is
too large to run is compared by its weights alone.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clinrl.errors import Refused, echo
from clinrl.merging import lora_delta, safetensors_io
from clinrl.models import opening
from clinrl.types import Strict

LOGITS = {"F32": 1e-4, "F16": 5e-3, "BF16": 3e-2}
"""Largest allowed difference of a logit, as a share of the largest logit, by the type of the stored merged weights.

In float32 only the order of sums differs; in the half types every changed weight was rounded once. These limits are
about a hundred times (float32) and ten times what the embedded models show; a model without its adapter is off by 0.2.
"""
LAST_PLACE = 0.501
"""Largest allowed distance of a stored weight from the float64 result, in units of its last place, beyond the error of
sums in float32: the weight is the nearest value."""
LAST = 64
"""Number of positions at the end of each prompt whose logits are compared."""
SAMPLED, ROWS = 8, 64
"""How many changed tensors, and about how many rows of each, are compared weight by weight."""
HEADROOM = 1.25
"""Memory that must be free for a model, as a multiple of its weights."""

Part = tuple[Path, float]
"""An adapter's folder and its weight in the sum."""


class Comparison(Strict):
    """One comparison of two models, and the difference that it found."""

    compared: int
    """Positions of prompts, or entries of weights."""
    difference: float
    """In the unit of LOGITS or of LAST_PLACE."""
    tolerance: float | None
    """The largest allowed `difference`; None if the method itself departs from the weighted sum."""


class Check(Strict):
    """The comparisons of a merged model with its base and adapters."""

    logits: Comparison | None
    """None: the model does not fit the memory of this machine."""
    agreement: float | None
    """Share of the compared positions with the same most probable token; None without logits."""
    weights: Comparison | None
    """None: an adapter was made, or the method departs from the weighted sum."""


def check(base: Path, parts: Sequence[Part], merged: Path, prompts: Sequence[str], *, exact: bool = True) -> Check:
    """Compare a merged model, or a blended adapter above the base, with the base and the weighted sum of adapters.

    `base` holds the weights that the adapters belong to. Raises Refused when a difference is above what rounding
    explains; with `exact` false, for a method that departs from the weighted sum, logits are compared and not judged.
    """
    whole = (merged / "config.json").exists()
    kind, size = _dtype(merged if whole else base)
    weights = _compare_weights(base, parts, merged) if whole and exact else None
    if not _fits(size, _device(kind)):
        if weights is None:
            echo(f"{merged.name} was compared with nothing: the model does not fit the memory of this machine")
        return Check(logits=None, agreement=None, weights=weights)
    tokens = _encoded(parts[0][0] if (parts[0][0] / "tokenizer.json").exists() else base, prompts)
    expected = list(_logits(base, parts, tokens))
    found = _logits(merged, [], tokens) if whole else _logits(base, [(merged, 1.0)], tokens)
    pairs = list(zip(expected, found, strict=True))
    compared = sum(len(want) for want, _ in pairs)
    agreeing = sum(int((want.argmax(-1) == got.argmax(-1)).sum()) for want, got in pairs)
    share = _largest(want - got for want, got in pairs) / _largest(expected)
    tolerance = LOGITS[kind if whole or kind == "F32" else "F16"] if exact else None  # factors are float32
    if tolerance is not None and not share <= tolerance:
        raise Refused(
            f"the merged model's logits are {share:.1e} of the largest logit away from those of base and adapter, and "
            f"rounding explains {tolerance:.0e}; nothing was kept: check that {base} is the adapter's base"
        )
    logits = Comparison(compared=compared, difference=_rounded(share), tolerance=tolerance)
    return Check(logits=logits, agreement=round(agreeing / compared, 6), weights=weights)


def _encoded(folder: Path, prompts: Sequence[str]) -> list[Tensor]:
    """The tokens of each prompt, by one tokenizer: beside a config.json transformers may take another class."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return [tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"] for prompt in prompts]


def _logits(model: Path, parts: Sequence[Part], tokens: Sequence[Tensor]) -> Iterator[Tensor]:
    """Logits [position, token] at the end of each prompt, on the CPU; the model is loaded for this and dropped."""
    loaded = _load(model, parts)
    for ids in tokens:  # one prompt at a time: padding would be one more difference
        with torch.inference_mode():
            yield loaded(input_ids=ids.to(loaded.device), logits_to_keep=LAST).logits[0].float().cpu()


def _load(model: Path, parts: Sequence[Part]) -> Any:
    """A model in float32, with the weighted sum of adapters if there are any."""
    from peft.tuners.lora import LoraLayer
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    device = _device(_dtype(model)[0])
    loaded = AutoModelForCausalLM.from_pretrained(
        model,
        dtype=torch.float32,
        device_map={"": device},
        use_safetensors=True,
        trust_remote_code=False,
        attn_implementation="sdpa",
    )
    if parts:
        names = [f"part{number}" for number in range(len(parts))]
        for name, (folder, _) in zip(names, parts, strict=True):
            loaded = opening.adapted(loaded, folder, name=name)
        loaded.base_model.set_adapter(names)
        for module in loaded.modules():
            if isinstance(module, LoraLayer):
                for name, (_, weight) in zip(names, parts, strict=True):
                    module.set_scale(name, weight)
    return loaded.eval()


def _compare_weights(base: Path, parts: Sequence[Part], merged: Path) -> Comparison:
    """Compare a sample of changed weights with the result in float64, whose nearest value each must be."""
    before, after = safetensors_io.read_index(base), safetensors_io.read_index(merged)
    adapters = [lora_delta.read_adapter(folder) for folder, _ in parts]
    modules = lora_delta.weight_names(adapters, base, before)
    distances = []
    for name in sorted(modules)[:: max(1, len(modules) // SAMPLED)]:
        module = modules[name]
        kind = getattr(torch, safetensors_io.FLOATS[after[name].dtype])
        height = after[name].shape[0]
        rows = torch.arange(0, height, max(1, height // ROWS))
        exact = _rows(before[name], rows)
        reach = exact.abs()
        for adapter, (_, weight) in zip(adapters, parts, strict=True):
            if module in adapter.factors:
                delta = adapter.delta(module)
                left, right = delta.left[rows].double() * (weight * delta.scale), delta.right.double()
                exact = exact + left @ right
                reach = reach + left.abs() @ right.abs()
        spacing = torch.finfo(kind).eps * torch.exp2(exact.abs().clamp_min(torch.finfo(kind).tiny).log2().floor())
        # The error of float32 before the final rounding: a few roundings of the largest terms.
        slack = 8 * torch.finfo(torch.float32).eps * reach
        distances.append(((_rows(after[name], rows) - exact).abs() - slack).clamp_min(0) / spacing)
    worst, compared = _largest(distances), sum(distance.numel() for distance in distances)
    if not worst <= LAST_PLACE:
        raise Refused(
            f"weights of the merged model are {worst:.3g} units of the last place away from base and adapter, and "
            f"rounding explains half a unit; nothing was kept: check that {base} is the adapter's base"
        )
    return Comparison(compared=compared, difference=_rounded(worst), tolerance=LAST_PLACE)


def _rows(stored: safetensors_io.Stored, rows: Tensor) -> Tensor:
    """Some rows of a matrix on the disk, in float64."""
    width = stored.size // stored.shape[0]
    picked = [
        safetensors_io.Stored(stored.file, stored.dtype, stored.shape[1:], stored.start + int(row) * width, width)
        for row in rows
    ]
    return torch.stack([safetensors_io.load(row) for row in picked]).double()


def _dtype(model: Path) -> tuple[str, int]:
    """The type of a model's largest tensor, and the bytes of all in float32."""
    stored = safetensors_io.read_index(model).values()
    return max(stored, key=lambda tensor: tensor.size).dtype, sum(4 * prod(tensor.shape) for tensor in stored)


def _device(kind: str) -> str:
    """The device of a model. Small models, in full precision, stay on the CPU, where equal inputs give equal bytes."""
    return "cuda:0" if torch.cuda.is_available() and kind != "F32" else "cpu"


def _fits(size: int, device: str) -> bool:
    import psutil

    free = psutil.virtual_memory().available if device == "cpu" else torch.cuda.mem_get_info()[0]
    return bool(free > HEADROOM * size)


def _largest(tensors: Iterable[Tensor]) -> float:
    """The largest magnitude in several tensors; NaN if a tensor has one, which Python's own `max` would pass over."""
    return float(torch.stack([tensor.abs().max() for tensor in tensors]).max())


def _rounded(value: float) -> float:
    """A difference, rounded to two significant digits: more would mean nothing."""
    return float(f"{value:.2g}")
