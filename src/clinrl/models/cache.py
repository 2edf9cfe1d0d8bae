"""Keys and values of what a model has read: kept in room that grows by blocks, and computed once for equal rows.

transformers' own cache copies all it holds for every token that is written, which is half of the time of a tiny model.
Shapes: B rows, H heads, T tokens, D numbers a head.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

BLOCK = 64
"""Tokens by which the room of a layer grows."""


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

    def take(self, places: Tensor) -> None:
        """Keep the tokens at these places of each row, (B, K)."""
        index = places[:, None, :, None]
        self.keys, self.values = (
            states.gather(2, index.expand(-1, states.size(1), -1, states.size(3)))
            for states in (self.keys, self.values)
        )
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


def distinct(ids: Tensor, mask: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """The distinct rows of tokens and mask in one order for all machines, and which of them each row is."""
    rows, of = torch.unique(torch.cat([ids, mask], dim=1), dim=0, return_inverse=True)
    tokens, seen = rows.chunk(2, dim=1)
    return (tokens, seen), of
