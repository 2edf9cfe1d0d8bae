"""A cache of a model's keys and values, which grows by blocks and is computed once for equal rows.

transformers' own cache copies everything it holds for each new token, which takes half of the time of a tiny model.
Shapes: B rows, H heads, T tokens, D numbers a head.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

BLOCK = 64
"""Tokens by which a layer's tensors grow at a time."""


class GrowingLayer(DynamicLayer):  # type: ignore[misc]  # transformers has no types
    """A layer's keys and values, (B, H, T, D) each, at the front of larger tensors. Gradients are not supported."""

    keys: Tensor
    values: Tensor
    front: tuple[Tensor, Tensor] | None = None
    """The larger tensors. `keys` and `values` are views of their filled part."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens, and return those of all tokens."""
        filled = self.get_seq_length()
        length = filled + key_states.size(-2)
        if self.front is None or length > self.front[0].size(-2):
            front = _room(key_states, length), _room(value_states, length)
            if filled:
                front[0][..., :filled, :], front[1][..., :filled, :] = self.keys, self.values
            self.front = front
        keys, values = self.front
        keys[..., filled:length, :], values[..., filled:length, :] = key_states, value_states
        self.keys, self.values = keys[..., :length, :], values[..., :length, :]
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select rows by their numbers, each as often as its number occurs."""
        super().batch_select_indices(indices)
        self.front = None

    def take(self, places: Tensor) -> None:
        """Keep only the tokens at these places of each row, (B, K)."""
        index = places[:, None, :, None]
        self.keys, self.values = (
            states.gather(2, index.expand(-1, states.size(1), -1, states.size(3)))
            for states in (self.keys, self.values)
        )
        self.front = None


def _room(states: Tensor, length: int) -> Tensor:
    return states.new_empty((*states.shape[:-2], -(-length // BLOCK) * BLOCK, states.size(-1)))


def is_plain(model: Any) -> bool:
    """Whether every layer of a model keeps the keys and values of all tokens, so that rows can share them."""
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers)


def empty_cache(model: Any) -> DynamicCache | None:
    """An empty cache that does not change what is generated; None for a model whose layers keep something else."""
    if not is_plain(model):
        return None
    cache = DynamicCache(config=model.config)
    cache.layers = [GrowingLayer() for _ in cache.layers]
    return cache


def distinct(ids: Tensor, mask: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """The distinct rows of tokens and mask, in the same order on every machine, and each row's index among them."""
    rows, of = torch.unique(torch.cat([ids, mask], dim=1), dim=0, return_inverse=True)
    tokens, seen = rows.chunk(2, dim=1)
    return (tokens, seen), of
