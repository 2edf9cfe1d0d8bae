"""Completions of many rows at once, without reading a prompt twice and without writing past the end of a row.

The common beginning of all prompts is read once, then the rest of each distinct prompt once. Rows that have ended are
dropped from the batch. A LoRA adapter is merged into the weights meanwhile. Shapes: B rows, P tokens of the padded
prompts, T tokens of the completions, V words of the vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from clinrl.artifacts import digest
from clinrl.models.cache import distinct, empty_cache, is_plain

STRETCH = 8
"""Tokens that are written before the rows that have ended are dropped."""
UNIT = 2.0**40
"""Probabilities are counted in whole multiples of 1 / UNIT: whole numbers have the same sum in any order."""


@dataclass(frozen=True)
class Rows:
    """Tokens and mask (B, P), with keys and values of all columns but the last, from which a model goes on."""

    ids: Tensor
    mask: Tensor
    cache: DynamicCache | None
    """None for a model whose layers keep something other than keys and values: nothing was read."""

    def some(self, places: Tensor) -> "Rows":
        """The rows at these places. They take over this object's cache, so the other rows are lost."""
        if self.cache is not None:
            self.cache.batch_select_indices(places)
        return Rows(self.ids[places], self.mask[places], self.cache)


def complete(
    model: Any, prompts: Sequence[Sequence[int]], config: GenerationConfig, watch: Sequence[LogitsProcessor] = (),
    numbers: Tensor | None = None,
) -> list[list[int]]:  # fmt: skip
    """The completion of each prompt, with its end token and perhaps padding after it.

    Greedy, or drawn at the config's temperature and top_p with one number a token: from `numbers` (B, T), or without
    them from torch's generator. No other setting of the config for sampling is used. A row's tokens do not depend on
    when other rows end, and equal those of `generate` but for rounding; drawn tokens have the same distribution but
    other values, since `generate` draws a number for each word of the vocabulary. `watch` sees the scores of each token
    and changes none. A model whose layers keep something other than keys and values reads and writes all rows whole.
    """
    rows = read_prompts(model, prompts, config.pad_token_id)
    if numbers is None:
        numbers = drawn_numbers(model, len(prompts), config)
    stretch = config.max_new_tokens if rows.cache is None else STRETCH
    going, written = torch.arange(len(prompts), device=model.device), [list[int]() for _ in prompts]
    for start in range(0, config.max_new_tokens, stretch):
        left = min(stretch, config.max_new_tokens - start)
        drawn = None if numbers is None else numbers[going, start:]
        rows, new, is_over = write(model, rows, config, left, drawn, watch)
        for row, tokens in zip(going.tolist(), new.tolist(), strict=True):
            written[row] += tokens
        rest = (~is_over).nonzero()[:, 0]
        if not len(rest):
            break
        if len(rest) < len(going):
            going, rows = going[rest], rows.some(rest)
    return written


def complete_turn(
    model: Any, prompts: Sequence[Sequence[int]], config: GenerationConfig, before: Rows | None,
    watch: Sequence[LogitsProcessor] = (), numbers: Tensor | None = None,
) -> tuple[list[list[int]], Rows]:  # fmt: skip
    """As `complete`, for one turn of conversations: the tokens of the turn `before` are not read again.

    Also returns the rows, none dropped, from which the next turn goes on.
    """
    fill = config.pad_token_id
    rows = resume(model, before, prompts, fill) or read_prompts(model, prompts, fill)
    if numbers is None:
        numbers = drawn_numbers(model, len(prompts), config)
    rows, new, _ = write(model, rows, config, config.max_new_tokens, numbers, watch)
    return new.tolist(), rows


def read_prompts(model: Any, prompts: Sequence[Sequence[int]], fill: int | None) -> Rows:
    """Read prompts: their common beginning once, then the rest of each distinct prompt once."""
    columns = zip(*(prompt[:-1] for prompt in prompts), strict=False)  # the last token of each is read by itself
    alike = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns)) if is_plain(model) else 0
    ids, mask = padded(prompts, max(map(len, prompts)), fill, model.device, first=alike)
    cache = empty_cache(model) if ids.size(1) > 1 else None
    if cache is None:
        return Rows(ids, mask, None)
    if alike:
        read(model, cache, ids[:1, :alike], mask[:1, :alike])
    of = torch.zeros(len(ids), dtype=torch.long, device=ids.device)
    if ids.size(1) - 1 > alike:
        (rest, seen), of = distinct(ids[:, alike:-1], mask[:, alike:-1])
        if alike:
            cache.batch_select_indices(torch.zeros_like(rest[:, 0]))
        read(model, cache, rest, torch.cat([seen.new_ones(len(rest), alike), seen], 1))
    cache.batch_select_indices(of)
    return Rows(ids, mask, cache)


def resume(model: Any, before: Rows | None, prompts: Sequence[Sequence[int]], fill: int | None) -> Rows | None:
    """Read only the part of each prompt that follows a row of `before`; None if a prompt follows none of its rows."""
    if before is None or before.cache is None:
        return None
    held = [ids[mask > 0].tolist() for ids, mask in zip(before.ids[:, :-1], before.mask[:, :-1], strict=True)]
    places = []
    for prompt in prompts:
        ends = [place for place, row in enumerate(held) if len(row) < len(prompt) and prompt[: len(row)] == row]
        if not ends:
            return None
        places.append(ends[0])
    rest = [prompt[len(held[place]) :] for prompt, place in zip(prompts, places, strict=True)]
    ids, mask = padded(rest, max(map(len, rest)), fill, model.device)
    rows = before.some(torch.tensor(places, device=model.device))
    width = max(len(held[place]) for place in places)
    used = rows.mask[:, :-1].argsort(dim=1, stable=True)[:, -width:]  # padding first, and only where a row is shorter
    for layer in before.cache.layers:
        layer.take(used)
    ids = torch.cat([rows.ids.gather(1, used), ids], 1)
    mask = torch.cat([rows.mask.gather(1, used), mask], 1)
    if ids.size(1) > width + 1:
        read(model, before.cache, ids[:, width:-1], mask[:, :-1])
    return Rows(ids, mask, before.cache)


def read(model: Any, cache: DynamicCache, ids: Tensor, mask: Tensor) -> None:
    """Run a model on tokens (B, T) that follow those in a cache, given the mask of both together."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.size(1) :]  # as `generate` numbers tokens
    model(
        input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True,
        logits_to_keep=1,
    )  # fmt: skip


def write(
    model: Any, rows: Rows, config: GenerationConfig, tokens: int, numbers: Tensor | None,
    watch: Sequence[LogitsProcessor] = (),
) -> tuple[Rows, Tensor, Tensor]:  # fmt: skip
    """Write up to `tokens` tokens; return the longer rows, the new tokens (B, T), and which rows have ended (B,)."""
    first = rows.ids.size(1)
    drawing = [] if numbers is None else [TemperatureLogitsWarper(config.temperature), Drawn(numbers, first)]
    if numbers is not None and (config.top_p or 1.0) < 1.0:
        drawing.insert(1, TopPLogitsWarper(config.top_p))
    ids = type(model).generate(
        model,
        input_ids=rows.ids,
        attention_mask=rows.mask,
        past_key_values=rows.cache,
        generation_config=GenerationConfig(
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=config.pad_token_id,
            eos_token_id=config.eos_token_id,
            disable_compile=True,
        ),
        logits_processor=LogitsProcessorList([*watch, *drawing]),
    )
    new = ids[:, first:]
    ends = torch.isin(new, torch.tensor(config.eos_token_id, device=ids.device)).long()
    is_before_end = ends.cumsum(1) - ends == 0
    rows = Rows(ids, torch.cat([rows.mask, is_before_end.to(rows.mask)], 1), rows.cache)
    return rows, new, ends.any(1)


def drawn_numbers(model: Any, rows: int, config: GenerationConfig) -> Tensor | None:
    """A random number in [0, 1) for each token of the completions (B, T); None if the config is greedy."""
    if not config.do_sample:
        return None
    return torch.rand(rows, config.max_new_tokens, dtype=torch.float64, device=model.device)


def numbered(seed: int, step: int, turn: int, rows: Sequence[int], tokens: int) -> Tensor:
    """A random number in [0, 1) for each token (B, T) of some rows in one turn of a step.

    The numbers follow from seed, step, turn and row alone. So a row draws the same ones beside any other rows and in
    any process.
    """
    drawn = []
    for row in rows:
        seeded = torch.Generator().manual_seed(int(digest([seed, step, turn, row])[:15], 16))
        drawn.append(torch.rand(tokens, dtype=torch.float64, generator=seeded))
    return torch.stack(drawn)


def padded(
    rows: Sequence[Sequence[int]], width: int, fill: int | None, device: Any, *, first: int = 0
) -> tuple[Tensor, Tensor]:
    """Tokens and mask of rows, (B, P) each. The padding to `width` goes after the `first` tokens of each row."""
    pads = [width - len(row) for row in rows]
    tokens = [[*row[:first], *[fill] * pad, *row[first:]] for row, pad in zip(rows, pads, strict=True)]
    mask = [[1] * first + [0] * pad + [1] * (width - first - pad) for pad in pads]
    return torch.tensor(tokens, device=device), torch.tensor(mask, device=device)


def draw(scores: Tensor, numbers: Tensor) -> Tensor:
    """Draw one word a row, given unnormalised log-probabilities (B, V) and one number in [0, 1) for each row.

    The words' probabilities divide [0, 1) into parts, and the part that holds the number gives the word. Probabilities
    are rounded down to multiples of 2^-40, so a word with less is never drawn.
    """
    bounds = (scores.softmax(-1).double() * UNIT).long().cumsum(-1)
    words = torch.searchsorted(bounds, (numbers * bounds[:, -1]).long()[:, None], right=True)[:, 0]
    return words.clamp(max=scores.size(-1) - 1)  # if scores are NaN, no part holds the number


class Drawn(LogitsProcessor):  # type: ignore[misc]  # transformers has no types
    """Leaves only the drawn word possible, given numbers (B, T) for the tokens after the `first` ones of each row."""

    def __init__(self, numbers: Tensor, first: int) -> None:
        self.numbers, self.first = numbers, first

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores (B, V) of 0 for the drawn words and of minus infinity for all others."""
        words = draw(scores, self.numbers[:, input_ids.size(1) - self.first])
        return torch.full_like(scores, -torch.inf).scatter(1, words[:, None], 0.0)


@contextmanager
def folded(model: Any) -> Iterator[None]:
    """Merge a model's LoRA adapter into its float32 weights for this block, then restore the weights bit for bit.

    Weights of other types are left alone: they would round the adapter's change, and so sample from another policy.
    Raises ValueError, as PEFT does, if an adapter is not finite.
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
