"""Completions of many rows, of which nothing is read twice and nothing is written in vain.

What all prompts begin with is read once, then each distinct prompt once; rows that have ended are left out of what
follows; a LoRA adapter lies in the weights. Shapes: B rows, P tokens of the padded prompts, T of the completions, V
words of the vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear
from transformers import DynamicCache, GenerationConfig, LogitsProcessor, LogitsProcessorList

from clinrl.models.cache import distinct, is_plain, room

STRETCH = 8
"""Tokens that are written before rows that have ended are left out."""
UNIT = 2.0**40
"""Probabilities are counted in units of its inverse: whole numbers have the same sum in any order."""


def complete(model: Any, rows: Sequence[Sequence[int]], config: GenerationConfig) -> list[list[int]]:
    """The completion of each row, with its end token and perhaps padding after it.

    Greedy, or drawn at the config's temperature with one number a token from torch's generator; the config says nothing
    else of how tokens are drawn. A row's tokens do not depend on when others end, and are those of `generate` but for
    rounding; drawn ones have the same distribution and other values, since `generate` draws a number for each word of
    the vocabulary. A model whose layers keep something else than keys and values reads and writes all rows whole.
    """
    columns = zip(*(row[:-1] for row in rows), strict=False)  # the last token of each is read by itself
    alike = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns)) if is_plain(model) else 0
    ids, mask = padded(rows, max(map(len, rows)), config.pad_token_id, model.device, first=alike)
    budget, ends = config.max_new_tokens, torch.tensor(config.eos_token_id, device=ids.device)
    numbers = torch.rand(len(rows), budget, dtype=torch.float64, device=ids.device) if config.do_sample else None
    cache = read(model, ids[:, :-1], mask[:, :-1], alike) if ids.size(1) > 1 else None
    going, written = torch.arange(len(ids), device=ids.device), [list[int]() for _ in rows]
    for start in range(0, budget, budget if cache is None else STRETCH):
        stretch = GenerationConfig(
            max_new_tokens=min(budget - start, budget if cache is None else STRETCH),
            do_sample=False,
            pad_token_id=config.pad_token_id,
            eos_token_id=config.eos_token_id,
            disable_compile=True,
        )
        drawn = [] if numbers is None else [Drawn(numbers[going, start:], ids.size(1), config.temperature)]
        output = type(model).generate(
            model, input_ids=ids, attention_mask=mask, past_key_values=cache, generation_config=stretch,
            logits_processor=LogitsProcessorList(drawn),
        )  # fmt: skip
        new = output[:, ids.size(1) :]
        for row, tokens in zip(going.tolist(), new.tolist(), strict=True):
            written[row] += tokens
        rest = (~torch.isin(new, ends).any(1)).nonzero()[:, 0]
        if not len(rest):
            break
        if cache is not None and len(rest) < len(going):
            cache.batch_select_indices(rest)
        going, ids, mask = going[rest], output[rest], torch.cat([mask, torch.ones_like(new)], 1)[rest]
    return written


def padded(
    rows: Sequence[Sequence[int]], width: int, fill: int | None, device: Any, *, first: int = 0
) -> tuple[Tensor, Tensor]:
    """Tokens and mask of rows, (B, P) each, padded to a width after so many first tokens."""
    pads = [width - len(row) for row in rows]
    tokens = [[*row[:first], *[fill] * pad, *row[first:]] for row, pad in zip(rows, pads, strict=True)]
    mask = [[1] * first + [0] * pad + [1] * (width - first - pad) for pad in pads]
    return torch.tensor(tokens, device=device), torch.tensor(mask, device=device)


def read(model: Any, ids: Tensor, mask: Tensor, alike: int) -> DynamicCache | None:
    """The cache of a model that has read these rows, (B, P) each, whose first tokens are alike; each distinct row once.

    None for a model whose layers keep something else than keys and values.
    """
    cache = room(model)
    if cache is None:
        return None
    one = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
    if alike:
        model(input_ids=ids[:1, :alike], attention_mask=mask[:1, :alike], **one)
    of = torch.zeros(len(ids), dtype=torch.long, device=ids.device)
    if ids.size(1) > alike:
        (rest, seen), of = distinct(ids[:, alike:], mask[:, alike:])
        if alike:
            cache.batch_select_indices(torch.zeros_like(rest[:, 0]))
        seen = torch.cat([seen.new_ones(len(rest), alike), seen], 1)
        positions = (seen.cumsum(1) - 1).clamp(min=0)[:, alike:]  # as `generate` numbers tokens
        model(input_ids=rest, attention_mask=seen, position_ids=positions, **one)
    cache.batch_select_indices(of)
    return cache


def draw(scores: Tensor, numbers: Tensor) -> Tensor:
    """One word a row, given unnormalised log-probabilities (B, V) and numbers of [0, 1), one a row.

    The words' probabilities divide [0, 1), and the word is that whose part holds the number. Probabilities are rounded
    to 2^-40, and a word with less is never drawn.
    """
    bounds = (scores.softmax(-1).double() * UNIT).long().cumsum(-1)
    return torch.searchsorted(bounds, (numbers * bounds[:, -1]).long()[:, None], right=True)[:, 0]


class Drawn(LogitsProcessor):  # type: ignore[misc]  # transformers has no types
    """Leaves possible the one word that is drawn, given the numbers (B, T), for rows that begin with so many tokens."""

    def __init__(self, numbers: Tensor, first: int, temperature: float) -> None:
        self.numbers, self.first, self.temperature = numbers, first, temperature

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The scores (B, V), all but those drawn at minus infinity."""
        words = draw(scores / self.temperature, self.numbers[:, input_ids.size(1) - self.first])
        return torch.full_like(scores, -torch.inf).scatter(1, words[:, None], 0.0)


@contextmanager
def folded(model: Any) -> Iterator[None]:
    """Let a model's LoRA adapter lie in the weights, if these are float32; then put the weights back, bit for bit.

    Other types round what an adapter adds, so that another policy would write. Raises ValueError, as PEFT does, if an
    adapter is not finite.
    """
    layers = [layer for layer in model.modules() if hasattr(layer, "merged_adapters")]  # PEFT's
    is_exact = all(type(layer.get_base_layer()) is Linear and layer.weight.dtype is torch.float32 for layer in layers)
    if not layers or not is_exact:
        yield
        return
    held = [(weight, weight.data) for layer in layers for weight in layer.get_base_layer().parameters()]
    try:
        model.merge_adapter(safe_merge=True)  # into a copy
        yield
    finally:
        for layer in layers:
            if layer.merged:
                layer.unmerge()
        for weight, data in held:
            weight.data = data
