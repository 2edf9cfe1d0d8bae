"""Completions that are drawn row by row, so that they are the same on however many processes a step is shared."""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from clinrl.artifacts import digest


def seeds_of(seed: int, places: Sequence[int]) -> list[int]:
    """A seed for each completion of a training, by its place among all of them, step after step."""
    return [int(digest([seed, place])[:15], 16) for place in places]


def drawn(
    generate: Callable[..., Tensor], seeds: Sequence[int], *, input_ids: Tensor, generation_config: Any, **named: Any
) -> Tensor:
    """What `generate` of a model returns, with a seed of its own for each row."""
    greedy = copy(generation_config)
    greedy.do_sample = False
    noise = RowNoise(seeds, generation_config.temperature, input_ids.device)
    return generate(
        input_ids=input_ids, generation_config=greedy, logits_processor=LogitsProcessorList([noise]), **named
    )


class RowNoise(LogitsProcessor):  # type: ignore[misc]  # transformers has no types
    """Adds noise of Gumbel's distribution, after which the likeliest token is a draw (Gumbel, 1954)."""

    def __init__(self, seeds: Sequence[int], temperature: float, device: torch.device) -> None:
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self.temperature = temperature

    def __call__(self, _: Tensor, scores: Tensor) -> Tensor:
        """The scores of the next token of each row, with noise."""
        waits = torch.empty_like(scores, dtype=torch.float32)
        for row, generator in zip(waits, self.generators, strict=True):
            row.exponential_(generator=generator)
        return scores.float() / self.temperature - waits.log()
