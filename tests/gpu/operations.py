"""Operations with torch's deterministic mode on and off, and the delta rule with kernels and without."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import shaped

from clinrl.runtime import determinism

KINDS = ("matmul", "index_add", "cumsum", "scatter", "attention", "embedding", "cross entropy", "4-bit matmul")


def operations(tiny: bool) -> dict[str, Callable[[], Any]]:
    """What a training does most of, forward and backward where it has a gradient."""
    import torch
    from torch.nn import functional as F

    on = {"device": "cuda" if torch.cuda.is_available() else "cpu"}
    half = {**on, "dtype": torch.bfloat16 if torch.cuda.is_available() else torch.float32}
    rows, width, words = (32, 64, 500) if tiny else (2048, 4096, 128256)
    left, right = torch.randn(rows, width, **half, requires_grad=True), torch.randn(width, width, **half)
    places = torch.randint(0, rows, (rows,), **on)
    table = torch.randn(words, width, **half, requires_grad=True)
    heads = [torch.randn(2, 4, rows // 4, 64, **half, requires_grad=True) for _ in range(3)]
    logits = torch.randn(rows // 8, words, **half, requires_grad=True)
    names = torch.randint(0, words, (rows // 8,), **on)

    def packed() -> Any:
        import bitsandbytes as bnb

        layer = bnb.nn.Linear4bit(width, width, bias=False, compute_dtype=half["dtype"], quant_type="nf4").to(**on)
        return lambda: layer(left).sum().backward()

    return {
        "matmul": lambda: (left @ right).sum().backward(),
        "index_add": lambda: torch.zeros_like(left).index_add(0, places, left).sum().backward(),
        "cumsum": lambda: left.cumsum(0),
        "scatter": lambda: (
            torch.zeros_like(left).scatter_add(0, places[:, None].expand_as(left), left).sum().backward()
        ),
        "attention": lambda: F.scaled_dot_product_attention(*heads, is_causal=True).sum().backward(),
        "embedding": lambda: F.embedding(names, table).sum().backward(),
        "cross entropy": lambda: F.cross_entropy(logits.float(), names).backward(),
        "4-bit matmul": packed(),
    }


def measured(tiny: bool) -> Iterator[tuple[str, float, str, str]]:
    """Each operation twice; one that deterministic mode refuses has the value -1 and torch's words."""
    import torch

    found = operations(tiny)
    assert tuple(found) == KINDS
    was = torch.are_deterministic_algorithms_enabled()
    try:
        for name, work in found.items():
            for is_on in (False, True):
                torch.use_deterministic_algorithms(is_on)
                what = f"{name}, deterministic mode {'on' if is_on else 'off'}"
                try:
                    yield what, 1e3 * shaped.seconds(work, 0.01 if tiny else 0.2), "ms", ""
                except RuntimeError as error:
                    yield what, -1, "ms", str(error).splitlines()[0][:160]
    finally:
        torch.use_deterministic_algorithms(was)


def delta_rule(tiny: bool) -> Iterator[tuple[str, float, str, str]]:
    """The chunked delta rule of Qwen3.5, by what transformers found for it and by its loops in Python."""
    import torch
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

    rule = qwen.torch_chunk_gated_delta_rule
    device = "cuda" if torch.cuda.is_available() else "cpu"
    heads, width, tokens = (2, 16, 64) if tiny else (32, 128, 1024)
    kind = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    query, key, value = (torch.randn(2, tokens, heads, width, device=device, dtype=kind) for _ in range(3))
    gate, beta = -torch.rand(2, tokens, heads, device=device), torch.rand(2, tokens, heads, device=device, dtype=kind)
    for name, work in (("as installed", rule), ("loops in Python", getattr(rule, "__wrapped__", rule))):
        took = shaped.seconds(
            lambda work=work: work(query, key, value, g=gate, beta=beta, use_qk_l2norm_in_kernel=True),
            0.01 if tiny else 0.5,
        )
        yield f"delta rule, {tokens} tokens, {name}", 1e3 * took, "ms", ""


def main(arguments: list[str] | None = None) -> None:
    """Print the rows."""
    asked = shaped.options().parse_args(arguments)
    rows = [*measured(asked.tiny), *delta_rule(asked.tiny)]
    print(json.dumps([(what, round(value, 4), unit, note) for what, value, unit, note in rows]))


if __name__ == "__main__":
    determinism.pin()
    main()
