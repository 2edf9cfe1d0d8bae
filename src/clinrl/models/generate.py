"""From prompts to completions, in batches, with transformers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from clinrl.artifacts import digest
from clinrl.config.base import Scale
from clinrl.errors import DataError
from clinrl.models import memory
from clinrl.models.chat import Completion, decode, encode, end_tokens, opens, render, results
from clinrl.types import Message

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

    from clinrl.models.decoding import Rows
    from clinrl.models.journal import Journal
    from clinrl.models.probabilities import Watch

SHARED = "shared"
"""The generation path of a recipe whose completions are written by `decoding.complete`."""
MAX_TOKENS = 32768
"""Tokens in a padded batch of completions, prompts included, unless another limit is set."""
HELD_OUT_TOKENS = 8192
"""Tokens in a padded batch of held-out cases, for their log-probabilities."""
LOGITS_TOGETHER = 1 << 29
"""Logits that are held at once for these log-probabilities: 5 GiB, where a vocabulary is large."""
STEP = 16
"""Tokens: the widths of `equal_batches` are multiples of it."""


def shares(spec: Mapping[str, Any]) -> bool:
    """Whether the recipe of an adapter's spec writes on the shared path. Its exam and whatever serves it do too."""
    return bool(spec.get("trainer", {}).get("generation_path") == SHARED)


@dataclass(frozen=True, slots=True)
class Prompt:
    """The turns so far, and the name that error messages use for them."""

    name: str
    messages: Sequence[Message]
    ids: Sequence[int] | None = None
    """Their token ids if known; None: the ids of the turns as a prompt without tools."""
    left: int | None = None
    """Tokens that may still be written, if fewer than the budget of the call."""


def window(model: "PreTrainedModel") -> int | None:
    """The longest sequence the model's positions allow, in tokens, or None when its config names no limit."""
    limit: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return limit


def batches(lengths: Sequence[int], budget: int, max_tokens: int) -> Iterator[list[int]]:
    """Indices of prompts, shortest first, in batches whose padded size (rows x longest total) fits `max_tokens`.

    A prompt that fits no batch gets one of its own.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: (lengths[index], index)):
        if batch and (len(batch) + 1) * (lengths[index] + budget) > max_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def equal_batches(lengths: Sequence[int], rows: int) -> Iterator[tuple[list[int], int]]:
    """Indices of prompts, shortest first, in batches of `rows`, and the width that each batch is padded to.

    A prompt's width follows from its own length, and the last batch of a width is filled up with repeats of its first
    row. So a prompt is always computed in the same shape, whichever prompts share its batch.
    """
    by_width: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        by_width.setdefault(-(-length // STEP) * STEP, []).append(index)
    for width, members in sorted(by_width.items()):
        for start in range(0, len(members), rows):
            batch = members[start : start + rows]
            yield batch + [batch[0]] * (rows - len(batch)), width


def check_room(names: Sequence[str], lengths: Sequence[int], budgets: int | Sequence[int], limit: int | None) -> None:
    """Raise DataError naming the first prompt that leaves no room for its budget of tokens in a window."""
    if limit is None:
        return
    each = [budgets] * len(names) if isinstance(budgets, int) else budgets
    for name, length, budget in zip(names, lengths, each, strict=True):
        if length + budget > limit:
            raise DataError(
                f"{name}: its prompt is {length} tokens, and with a budget of {budget} it exceeds the window "
                f"of {limit}; shorten the case, lower the budget, or raise the max_length of a server that writes"
                if budget
                else f"{name}: it is {length} tokens with what is to be learned, more than the window of {limit}; draw "
                "shorter cases, or choose a checkpoint with a longer window"
            )


class Sampler:
    """Writes completions with `generate` of transformers, batched and left-padded, on the model's device.

    `max_tokens` bounds the padded size of a batch. The same prompts in the same order give the same completions. With
    `rows`, every batch has that many rows; on the CPU a prompt then gets the same greedy completion whichever prompts
    share its batch. With `shared` and without `rows`, `decoding.complete` writes the completions. If memory runs out,
    OutOfMemory names `place` and a remedy that suits `scale`.
    """

    identity: Mapping[str, str] = MappingProxyType({})
    """The sampler's identity for manifests; empty at the embedded scale, where it is always the same."""
    can_watch = True
    """Whether `watch` sees the scores of what is written."""
    journal: "Journal | None" = None
    """Records each batch that is written, and supplies the batches that it already holds."""

    def __init__(
        self, model: Any, tokenizer: "PreTrainedTokenizerBase", *, max_tokens: int = MAX_TOKENS,
        rows: int | None = None, shared: bool = False, scale: Scale = "embedded", place: str = "an exam",
    ) -> None:  # fmt: skip
        self.model, self.tokenizer = model, tokenizer
        self.window = self.room = None if model is None else window(model)
        """Tokens that prompt and completion may have together; None: any number. A server may have less `room`."""
        self.max_tokens, self.rows = max_tokens, rows
        self.scale, self.place = scale, place
        self._is_shared = shared and rows is None
        self._plays = False
        self._turn: Rows | None = None
        """The rows of the previous turn, while conversations are played."""
        self.watch: Sequence[Watch] = ()
        """Processors that see the scores of each token and change none."""

    def together(self, lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
        """Yield places of conversations that are played to their ends together, given the tokens of their openings.

        At full scale, for models whose layers keep keys and values, a part is so small that the rows of a turn stay in
        memory for the next turn: until the next part is asked for, each call of `sample` continues the call before.
        Otherwise all conversations are one part, and each turn reads everything again.
        """
        from clinrl.models.cache import is_plain

        if self.scale == "embedded" or self.rows is not None or not is_plain(self.model):
            yield list(range(len(lengths)))
            return
        for part in batches(lengths, budget, self.max_tokens):
            self._plays = True
            try:
                yield part
            finally:
                self._plays, self._turn = False, None

    def sample(
        self, prompts: Sequence[Prompt], *, thinking: bool, temperature: float, budget: int, seed: int,
        top_p: float = 1.0, progress: Callable[[], None] = lambda: None,
    ) -> list[Completion]:  # fmt: skip
        """One completion a prompt, in the order of the prompts, of at most `budget` tokens each.

        Greedy at temperature 0; otherwise sampled, reproducibly for a seed, from the likeliest tokens that hold `top_p`
        of the probability. `progress` is called once for each finished prompt. Raises DataError naming the prompt that
        leaves no room for the budget.
        """
        import torch
        from transformers import GenerationConfig

        from clinrl.models.decoding import folded

        ids, _ = self._encode_prompts(prompts, thinking, budget)
        lengths = [len(row) for row in ids]
        ends = end_tokens(self.model.generation_config, self.tokenizer)
        choice = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0} if temperature > 0 else {}
        config = GenerationConfig(
            max_new_tokens=budget,
            pad_token_id=self.tokenizer.pad_token_id,
            eos_token_id=sorted(ends),
            disable_compile=True,
            **({"do_sample": False} | choice),
        )
        completions: list[Completion | None] = [None] * len(ids)
        was_training = self.model.training
        self.model.eval()
        try:
            weights = folded(self.model) if self._is_shared else nullcontext()
            with weights, torch.inference_mode(), torch.random.fork_rng():
                torch.manual_seed(seed)
                call = self.journal.call() if self.journal else []
                for number, (batch, width) in enumerate(self._batches(lengths, budget)):
                    rows = [ids[index] for index in batch]
                    with memory.place(self.place, memory.fewer_tokens(self.scale, len(rows), width + budget)):
                        written = self._written(rows, width, config, call, number)
                    for index, row in zip(batch, written, strict=True):
                        if completions[index] is None:
                            progress()
                        completions[index] = decode(self.tokenizer, row, ends)
        finally:
            self.model.train(was_training)
        return [completion for completion in completions if completion is not None]

    def _encode_prompts(
        self, prompts: Sequence[Prompt], thinking: bool, budget: int
    ) -> tuple[list[Sequence[int]], list[int]]:
        """Token ids of prompts, and how many tokens may follow each. Raises DataError for one that leaves no room."""
        ids = [self.opening(prompt.messages, (), thinking) if prompt.ids is None else prompt.ids for prompt in prompts]
        rooms = [budget if prompt.left is None else min(budget, prompt.left) for prompt in prompts]
        check_room([prompt.name for prompt in prompts], list(map(len, ids)), rooms, self.window)
        return ids, rooms

    def _written(
        self, rows: Sequence[Sequence[int]], width: int, config: "GenerationConfig", *place: object
    ) -> list[list[int]]:
        """The result of `_write` or, from the journal, its tokens; then watches and generators are restored as well."""
        if self.journal is None:
            return self._write(rows, width, config)
        from clinrl.models import journal

        key, device = digest((dict(self.identity), self.max_tokens, *place, rows)), self.model.device
        entry = self.journal.found.get(key)
        if entry is None:
            before = [watch.take() for watch in self.watch]
            written = self._write(rows, width, config)
            seen = [watch.take() for watch in self.watch]
            drawn = journal.generators(device) if config.do_sample else []
            self.journal.put(key, ids=written, seen=seen, drawn=drawn)
        else:
            before, seen, written = [{} for _ in self.watch], entry["seen"], entry["ids"]
            if entry["drawn"]:
                journal.restore(entry["drawn"], device)
        for watch, *some in zip(self.watch, before, seen, strict=True):
            for kept in some:
                watch.kept |= {text: tuple(row) for text, row in kept.items()}
        return written

    def _write(self, rows: Sequence[Sequence[int]], width: int, config: "GenerationConfig") -> list[list[int]]:
        from transformers import LogitsProcessorList

        from clinrl.models.cache import empty_cache
        from clinrl.models.decoding import complete, complete_turn, padded

        if self._plays:
            written, self._turn = complete_turn(self.model, rows, config, self._turn, self.watch)
            return written
        if self._is_shared:
            return complete(self.model, rows, config, self.watch)
        ids, mask = padded(rows, width, config.pad_token_id, self.model.device)
        output = self.model.generate(
            input_ids=ids, attention_mask=mask, past_key_values=empty_cache(self.model), generation_config=config,
            logits_processor=LogitsProcessorList(self.watch),
        )  # fmt: skip
        return output[:, width:].tolist()  # type: ignore[no-any-return]

    def _batches(self, lengths: Sequence[int], budget: int) -> Iterator[tuple[list[int], int]]:
        if self.rows is not None:
            return equal_batches(lengths, self.rows)
        if self._plays:
            return iter([([*range(len(lengths))], max(lengths))])
        return ((batch, max(lengths[i] for i in batch)) for batch in batches(lengths, budget, self.max_tokens))

    def opening(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], thinking: bool) -> list[int]:
        """Token ids of a prompt, up to where the model has to go on."""
        return encode(self.tokenizer, [render(self.tokenizer, messages, thinking, tools)])[0]

    def opens(self, thinking: bool) -> bool:
        """Whether a prompt opens the think block of its completion."""
        return opens(self.tokenizer, thinking)

    def after(self, found: Sequence[Message], thinking: bool) -> list[int]:
        """Token ids of the results of a turn's calls, up to where the model has to go on."""
        return encode(self.tokenizer, [results(self.tokenizer, found, thinking)])[0]

    def cut(self, completion: Completion, tokens: int) -> Completion:
        """The first `tokens` tokens of a completion that has more."""
        return decode(self.tokenizer, completion.ids[:tokens], ())
