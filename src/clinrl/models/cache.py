"""Keys and values of what a model has read: kept in room that grows by blocks, and computed once for equal rows.

transformers' own cache copies all it holds for every token that is written, which is half of the time of a tiny model.
Shapes: B rows, H heads, T tokens, D numbers a head.
"""

from collections.abc import Sequence
from copy import copy
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer

BLOCK = 64
"""Tokens by which the room of a layer grows."""
STRETCH = 8
"""Tokens that are written before rows that have ended are left out."""


class Room(DynamicLayer):  # type: ignore[misc]  # transformers has no types
    """A layer's keys and values, (B, H, T, D) each, at the front of tensors with room for more. For no gradient."""

    keys: Tensor
    values: Tensor
    front: tuple[Tensor, Tensor] | None = None
    """The tensors, of which `keys` and `values` show the tokens that there are."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Add the keys and values of some tokens, and return all."""
        held = self.get_seq_length()
        length = held + key_states.size(-2)
        if self.front is None or length > self.front[0].size(-2):
            front = _room(key_states, length), _room(value_states, length)
            if held:
                front[0][..., :held, :], front[1][..., :held, :] = self.keys, self.values
            self.front = front
        keys, values = self.front
        keys[..., held:length, :], values[..., held:length, :] = key_states, value_states
        self.keys, self.values = keys[..., :length, :], values[..., :length, :]
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Take the rows with these numbers, each as often as it is named."""
        super().batch_select_indices(indices)
        self.front = None


def _room(states: Tensor, length: int) -> Tensor:
    return states.new_empty((*states.shape[:-2], -(-length // BLOCK) * BLOCK, states.size(-1)))


def is_plain(model: Any) -> bool:
    """Whether all layers of a model keep keys and values of every token, so that rows can share them."""
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers)


def room(model: Any) -> DynamicCache | None:
    """An empty cache for generation, which changes no token; None for a model whose layers keep something else."""
    if not is_plain(model):
        return None
    cache = DynamicCache(config=model.config)
    cache.layers = [Room() for _ in cache.layers]
    return cache


def read_once(model: Any, ids: Tensor, mask: Tensor) -> DynamicCache | None:
    """The cache of a model that has read these rows, (B, T) each, of which equal ones were computed once.

    None for a model whose layers keep something else than keys and values.
    """
    cache = room(model)
    if cache is not None:
        (rows, seen), of = distinct(ids, mask)
        positions = (seen.cumsum(1) - 1).clamp(min=0)  # as `generate` numbers tokens
        model(
            input_ids=rows, attention_mask=seen, position_ids=positions, past_key_values=cache, use_cache=True,
            logits_to_keep=1,
        )  # fmt: skip
        cache.batch_select_indices(of)
    return cache


def generate_shared(model: Any, *, input_ids: Tensor, attention_mask: Tensor, **settings: Any) -> Tensor:
    """`generate` of a model, with each prompt but its last token read once. Prompts are padded on the left.

    The same tokens but for rounding: where two tokens are as good as equal, another one may be written.
    """
    cache = read_once(model, input_ids[:, :-1], attention_mask[:, :-1]) if input_ids.size(1) > 1 else None
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "past_key_values": cache}
    return type(model).generate(model, **inputs, **settings)  # type: ignore[no-any-return]


def write(
    model: Any, rows: Sequence[Sequence[int]], width: int, config: GenerationConfig, *, is_compact: bool
) -> list[list[int]]:
    """The completion of each row, padded to a width.

    If compact, what all rows begin with is read once, and tokens are written in stretches: rows that have ended are
    left out of the next. A model that has no room for keys and values writes all in one.
    """
    ids, mask, alike = padded(rows, width, config.pad_token_id, model.device, share=is_compact)
    cache = read_once(model, ids[:, :alike], mask[:, :alike]) if alike else room(model)
    left = config.max_new_tokens
    stretch = STRETCH if is_compact and cache is not None else left
    ends = torch.tensor(config.eos_token_id, device=ids.device)
    going = torch.arange(len(ids), device=ids.device)
    written: list[list[int]] = [[] for _ in rows]
    while left > 0 and len(going):
        one = copy(config)
        one.max_new_tokens = min(left, stretch)
        output = model.generate(input_ids=ids, attention_mask=mask, past_key_values=cache, generation_config=one)
        new = output[:, ids.size(1) :]
        left -= one.max_new_tokens
        for row, tokens in zip(going.tolist(), new.tolist(), strict=True):
            written[row] += tokens
        rest = (~torch.isin(new, ends).any(1)).nonzero()[:, 0]
        if cache is not None and 0 < len(rest) < len(going):
            cache.batch_select_indices(rest)
        going, ids, mask = going[rest], output[rest], torch.cat([mask, torch.ones_like(new)], 1)[rest]
    return written


def padded(
    rows: Sequence[Sequence[int]], width: int, fill: int | None, device: Any, *, share: bool
) -> tuple[Tensor, Tensor, int]:
    """Tokens and mask of rows, padded to a width, and how many tokens stand first in all, 0 unless they are shared.

    Padding stands before what differs.
    """
    columns = zip(*(row[:-1] for row in rows), strict=False)  # the last token of each is read by itself
    alike = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns)) if share else 0
    pads = [width - len(row) for row in rows]
    tokens = [[*row[:alike], *[fill] * pad, *row[alike:]] for row, pad in zip(rows, pads, strict=True)]
    mask = [[1] * alike + [0] * pad + [1] * (width - alike - pad) for pad in pads]
    return torch.tensor(tokens, device=device), torch.tensor(mask, device=device), alike


def distinct(ids: Tensor, mask: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """The distinct rows of tokens and mask in one order for all machines, and which of them each row is."""
    rows, of = torch.unique(torch.cat([ids, mask], dim=1), dim=0, return_inverse=True)
    tokens, seen = rows.chunk(2, dim=1)
    return (tokens, seen), of
