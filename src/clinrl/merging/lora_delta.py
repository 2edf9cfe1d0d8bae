"""The changes that adapters make to weights, as low-rank matrices, and ways to combine several of them.

A LoRA adapter changes a weight by `scale * B @ A`. Weighted sums of such changes are again low-rank, so they can be
concatenated exactly or cut to a smaller rank without ever forming the dense matrix. Methods that act on single entries
(TIES, DARE) work on the dense matrix some rows at a time.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from clinrl.errors import ArtefactError, Refused, format_value
from clinrl.merging.safetensors_io import FLOATS, Stored, load, read_header, rows_at_once
from clinrl.models import opening


@dataclass(frozen=True, slots=True)
class Delta:
    """A change of one weight: `scale * left @ right`."""

    left: Tensor
    """[rows, rank]"""
    right: Tensor
    """[rank, columns]"""
    scale: float = 1.0

    def rows(self, first: int, count: int) -> Tensor:
        """Some rows of the dense matrix."""
        return (self.left[first : first + count] @ self.right).mul_(self.scale)


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter whose effect is fully known; its tensors are still on the disk."""

    folder: Path
    config: Mapping[str, Any]
    factors: Mapping[str, tuple[Stored, Stored]]
    """A [rank, in] and B [out, rank], by the module's name in the model."""

    def scale(self, module: str) -> float:
        """The number by which the product of a module's factors is multiplied."""
        rank = self.factors[module][0].shape[0]
        alpha = float(_pattern(self.config["alpha_pattern"], module, self.config["lora_alpha"]))
        return alpha / (math.sqrt(rank) if self.config["use_rslora"] else rank)

    def delta(self, module: str) -> Delta:
        """The change of a module's weight [out, in]."""
        down, up = (load(stored) for stored in self.factors[module])
        return Delta(up, down, self.scale(module))


def read_adapter(folder: Path) -> Adapter:
    """A LoRA adapter in PEFT's format, without its tensors.

    Raises ArtefactError if the folder is no adapter, or if its files do not fit together, and Refused as
    `opening.check` does and for weights that are stored as [in, out].
    """
    opening.check(folder)
    config = json.loads((folder / opening.CONFIG).read_bytes())
    if config.get("fan_in_fan_out"):
        raise Refused(
            f"{folder} changes weights that lie as [in, out], as GPT-2's, which is not supported; serve it unmerged"
        )
    complete = {"lora_alpha": 8, "use_rslora": False} | config
    complete |= {key: config.get(key) or {} for key in ("rank_pattern", "alpha_pattern")}
    return Adapter(folder, complete, _factors(folder, complete, read_header(folder / opening.WEIGHTS)))


def _factors(folder: Path, config: Mapping[str, Any], stored: Mapping[str, Stored]) -> dict[str, tuple[Stored, Stored]]:
    found: dict[str, dict[str, Stored]] = {}
    for name, tensor in stored.items():
        if (factor := opening.factor_of(name)) is not None:
            found.setdefault(factor[0], {})[factor[1]] = tensor
    if not found:
        raise ArtefactError(f"{folder} holds no tensors; rebuild it")
    factors = {}
    for module, parts in found.items():
        rank = _pattern(config["rank_pattern"], module, config["r"])
        if parts.keys() != {"A", "B"}:
            raise ArtefactError(f"{folder} has one of the two factors of {format_value(module)} only; rebuild it")
        down, up = parts["A"], parts["B"]
        if not (len(down.shape) == len(up.shape) == 2 and down.shape[0] == up.shape[1] == rank):
            raise ArtefactError(
                f"{folder} has factors of shape {list(up.shape)} and {list(down.shape)} for {format_value(module)}, "
                f"whose rank by {opening.CONFIG} is {format_value(rank)}; rebuild it"
            )
        factors[module] = (down, up)
    return dict(sorted(factors.items()))


def _pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that the end of a module's name matches, as PEFT looks it up."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def stack(deltas: Sequence[Delta], weights: Sequence[float]) -> Delta:
    """The weighted sum of changes, exactly: their factors side by side, weights and scales inside the left one.

    In float64, with scale 1; the rank is the sum of the ranks.
    """
    left = [delta.left.double() * (weight * delta.scale) for delta, weight in zip(deltas, weights, strict=True)]
    return Delta(torch.cat(left, dim=1), torch.cat([delta.right.double() for delta in deltas], dim=0))


def truncate(delta: Delta, rank: int) -> Delta:
    """The nearest change of at most this rank, in the Frobenius norm: a truncated SVD, without the dense matrix.

    With left = Q R and right^T = P S, the singular values are those of the small matrix R S^T. In float64, scale 1.
    """
    outer, inner = torch.linalg.qr(delta.left.double()), torch.linalg.qr(delta.right.double().T)
    u, values, vh = torch.linalg.svd(outer.R @ inner.R.T * delta.scale, full_matrices=False)
    rank = min(rank, len(values))
    root = values[:rank].sqrt()
    return Delta(outer.Q @ (u[:, :rank] * root), (root[:, None] * vh[:rank]) @ inner.Q.T)


def norm(delta: Delta) -> float:
    """The Frobenius norm of a change, without the dense matrix."""
    left, right = torch.linalg.qr(delta.left.double()).R, torch.linalg.qr(delta.right.double().T).R
    return float(torch.linalg.norm(left @ right.T)) * abs(delta.scale)


def ties(changes: Sequence[Tensor], weights: Sequence[float], thresholds: Sequence[float]) -> Tensor:
    """TIES merging of some rows (Yadav et al. 2023): trim, elect a sign, average what agrees with it.

    Entries smaller than their change's threshold count as zero. The sign of an entry is that of the weighted sum; the
    result is the weighted mean of the entries with that sign, times the sum of all weights (the paper's lambda), so
    that without conflicts and trimming it is the weighted sum. A negative weight subtracts the change.
    """
    total = torch.zeros_like(changes[0])
    trimmed = []
    for change, weight, threshold in zip(changes, weights, thresholds, strict=True):
        trimmed.append(torch.where(change.abs() >= threshold, change, 0.0).mul_(math.copysign(1.0, weight)))
        total.add_(trimmed[-1], alpha=abs(weight))
    elected = total.sign()
    agreeing, share = torch.zeros_like(total), torch.zeros_like(total)
    for change, weight in zip(trimmed, weights, strict=True):
        agrees = (change.sign() == elected) & (elected != 0)
        agreeing.add_(torch.where(agrees, change, 0.0), alpha=abs(weight))
        share.add_(agrees, alpha=abs(weight))
    mean = torch.where(share > 0, agreeing / share, 0.0)
    return mean.mul_(math.fsum(map(abs, weights)))


def threshold(change: Delta, density: float) -> float:
    """The smallest magnitude in the largest share `density` of a change's entries, exactly; 0 for a density of 1.

    Entries are computed in the blocks of rows of `safetensors_io.rewrite`, so that each has the same bits there.
    """
    if density == 1:
        return 0.0
    rows, columns = len(change.left), change.right.shape[1]
    step = rows_at_once(columns)
    entries = torch.cat([change.rows(first, step).abs().flatten() for first in range(0, rows, step)])
    keep = max(1, round(density * rows * columns))
    return float(entries.kthvalue(len(entries) - keep + 1).values)


def dare(
    changes: Sequence[Tensor], weights: Sequence[float], density: float, generators: Sequence[Generator]
) -> Tensor:
    """DARE of some rows (Yu et al. 2024): keep each entry with probability `density`, divide by it, sum up weighted.

    Each change has a generator of its own, from which its rows draw in their order.
    """
    total = torch.zeros_like(changes[0])
    for change, weight, generator in zip(changes, weights, generators, strict=True):
        kept = torch.rand(change.shape, generator=generator) < density
        total.add_(torch.where(kept, change, 0.0), alpha=weight / density)
    return total


def linear(changes: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The weighted sum of some rows."""
    total = torch.zeros_like(changes[0])
    for change, weight in zip(changes, weights, strict=True):
        total.add_(change, alpha=weight)
    return total


def generator(seed: int, *names: object) -> Generator:
    """A generator that depends on the seed and the names alone, not on what was drawn before."""
    drawn = hashlib.sha256(json.dumps([seed, *map(str, names)]).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(drawn[:8], "little", signed=True))


def weight_names(adapters: Sequence[Adapter], checkpoint: Path, stored: Mapping[str, Stored]) -> dict[str, str]:
    """Map the name of each adapted weight in a checkpoint to the name of its module.

    A checkpoint's names may differ from the model's, as when the text part of a multimodal model was adapted;
    transformers has the mapping. Raises Refused for a module without a tensor, and with one of another shape or of a
    type that cannot be changed.
    """
    modules = sorted({module for adapter in adapters for module in adapter.factors})
    names = {module: f"{module}.weight" for module in modules}
    if any(name not in stored for name in names.values()):
        renamed = opening.stored_names(checkpoint, stored)
        names = {module: renamed.get(names[module], names[module]) for module in modules}
    for adapter in adapters:
        for module, (down, up) in adapter.factors.items():
            _check_fit(adapter, module, stored.get(names[module]), (up.shape[0], down.shape[1]))
    return {names[module]: module for module in modules}


def _check_fit(adapter: Adapter, module: str, weight: Stored | None, expected: tuple[int, int]) -> None:
    what = format_value(module)
    if weight is None:
        raise Refused(f"{adapter.folder} adapts {what}, of which the base has no weight; it belongs to another base")
    if weight.shape != expected:
        raise Refused(
            f"{adapter.folder} changes {what} as {list(expected)}, but its weight in the base is "
            f"{list(weight.shape)}; it belongs to another base"
        )
    if weight.dtype not in FLOATS:
        raise Refused(
            f"the base holds {what} as {weight.dtype}, and an adapter is never folded into quantised weights; use "
            f"the checkpoint in {', '.join(FLOATS)}"
        )


def blended_config(adapters: Sequence[Adapter], ranks: Mapping[str, int]) -> dict[str, Any]:
    """The config of an adapter of scale 1 with a rank for each module, otherwise like the first of `adapters`.

    Modules are named by the end of their names if all adapters have the same ends, otherwise in full.
    """
    usual = max(sorted(set(ranks.values())), key=list(ranks.values()).count)
    others = {re.escape(module): rank for module, rank in sorted(ranks.items()) if rank != usual}
    first = adapters[0].config
    shared = [adapter.config.get("target_modules") for adapter in adapters]
    limits = ("layers_to_transform", "layers_pattern", "exclude_modules")
    ends = {tuple(sorted(target)) if isinstance(target, list) else None for target in shared}
    narrowed = any(adapter.config.get(limit) for adapter in adapters for limit in limits)
    alike = ends.pop() if len(ends) == 1 and not narrowed else None
    return {
        **first,
        **dict.fromkeys(limits),
        "r": usual,
        "lora_alpha": usual,
        "rank_pattern": others,
        "alpha_pattern": others,
        "use_rslora": False,
        "init_lora_weights": True,
        "lora_dropout": 0.0,
        "inference_mode": True,
        "target_modules": list(alike) if alike else sorted(ranks),
    }
