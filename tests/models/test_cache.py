"""Keys and values: room that grows holds what transformers' own cache holds."""

from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen2Config
from transformers.cache_utils import DynamicLayer

from clinrl.models import cache


@given(st.lists(st.integers(1, cache.BLOCK + 9), min_size=1, max_size=5), st.permutations(range(2)))
def test_room_holds_what_the_cache_of_transformers_holds(lengths, order):
    layers = DynamicLayer(), cache.GrowingLayer()
    random = torch.Generator().manual_seed(0)
    for number, length in enumerate(lengths):
        if number == 2:
            for layer in layers:
                layer.batch_select_indices(torch.tensor(order))
        states = torch.rand(2, 2, 3, length, 4, generator=random)
        (keys, values), (our_keys, our_values) = (layer.update(*states) for layer in layers)
        assert torch.equal(keys, our_keys)
        assert torch.equal(values, our_values)
        assert layers[0].get_seq_length() == layers[1].get_seq_length()


def test_room_is_copied_when_a_block_is_full_and_not_for_each_token():
    layer = cache.GrowingLayer()
    places = {layer.update(*torch.rand(2, 1, 1, 1, 4))[0].data_ptr() for _ in range(3 * cache.BLOCK)}
    assert len(places) == 3


def test_a_model_that_keeps_something_else_has_no_room():
    layers = ["full_attention", "sliding_attention"]
    sliding = Qwen2Config(num_hidden_layers=2, use_sliding_window=True, sliding_window=4, layer_types=layers)
    assert cache.empty_cache(SimpleNamespace(config=sliding)) is None
