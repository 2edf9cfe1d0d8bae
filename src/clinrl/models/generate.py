"""Samplers: what turns prompts into completions, with transformers, with vLLM, or from a script."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from clinrl.errors import DataError
from clinrl.models.chat import Completion, decode, encode, end_tokens, render, results
from clinrl.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

STEP = 16
"""Tokens: widths of batches of one shape are multiples of it."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The turns so far, and the name to use when something is wrong with them."""

    name: str
    messages: Sequence[Message]
    ids: Sequence[int] | None = None
    """Token ids of all that: None before the first turn of a conversation, and for what is none."""
    left: int | None = None
    """Tokens that it may still use, where that is less than the others may: what is written beyond is cut off."""

    def room(self, budget: int) -> int:
        """Tokens that must fit after it."""
        return budget if self.left is None else min(budget, self.left)


class Sampler(Protocol):
    """Anything that can write completions."""

    def sample(
        self,
        prompts: Sequence[Prompt],
        *,
        thinking: bool,
        temperature: float,
        budget: int,
        seed: int,
        progress: Callable[[], None] | None = None,
    ) -> list[Completion]:
        """One completion a prompt, in the order of the prompts, of at most `budget` tokens each.

        Greedy at temperature 0, otherwise sampled, and the same for the same seed. `progress` is called once for each
        finished prompt. Raises DataError naming the prompt that leaves no room for the budget.
        """

    def opening(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], thinking: bool) -> list[int]:
        """Token ids of the prompt of a conversation, up to where the model has to go on."""

    def after(self, found: Sequence[Message], thinking: bool) -> list[int]:
        """Token ids of the results of a turn's calls, up to where the model has to go on."""

    def cut(self, completion: Completion, tokens: int) -> Completion:
        """The first so many tokens of a completion that has more."""


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


def alike(lengths: Sequence[int], rows: int) -> Iterator[tuple[list[int], int]]:
    """Indices of prompts, shortest first, in batches of `rows`, and the width that each batch is padded to.

    A prompt's width follows from its own length, and the last batch of a width is filled up with repeats of its first
    row. So each prompt is computed in one and the same shape, whatever it is computed beside.
    """
    by_width: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        by_width.setdefault(-(-length // STEP) * STEP, []).append(index)
    for width, members in sorted(by_width.items()):
        for start in range(0, len(members), rows):
            batch = members[start : start + rows]
            yield batch + [batch[0]] * (rows - len(batch)), width


def check_room(names: Sequence[str], lengths: Sequence[int], budgets: int | Sequence[int], limit: int | None) -> None:
    """Raise DataError naming the first prompt that leaves no room for its budget of tokens in the model's window."""
    if limit is None:
        return
    each = [budgets] * len(names) if isinstance(budgets, int) else budgets
    for name, length, budget in zip(names, lengths, each, strict=True):
        if length + budget > limit:
            raise DataError(
                f"{name}: its prompt is {length} tokens, and with a budget of {budget} it exceeds the model's "
                f"window of {limit}; shorten the case or lower max_new_tokens"
            )


class TransformersSampler:
    """Samples with `generate` of transformers, batched and left-padded, on the model's device.

    `max_tokens` bounds the padded size of a batch. The same prompts in the same order give the same completions. With
    `rows`, all batches have so many rows, and then on the CPU the same prompt gets the same greedy completion beside
    any others.
    """

    def __init__(
        self, model: Any, tokenizer: "PreTrainedTokenizerBase", *, max_tokens: int = 32768, rows: int | None = None
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.rows = rows

    def sample(
        self,
        prompts: Sequence[Prompt],
        *,
        thinking: bool,
        temperature: float,
        budget: int,
        seed: int,
        progress: Callable[[], None] | None = None,
    ) -> list[Completion]:
        """See `Sampler`."""
        return self.go_on(
            [_ids(self.tokenizer, prompt, thinking) for prompt in prompts],
            [prompt.name for prompt in prompts],
            temperature=temperature,
            budget=budget,
            seed=seed,
            progress=progress,
            rooms=[prompt.room(budget) for prompt in prompts],
        )

    def opening(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], thinking: bool) -> list[int]:
        """See `Sampler`."""
        return _encoded(self.tokenizer, render(self.tokenizer, messages, thinking, tools))

    def after(self, found: Sequence[Message], thinking: bool) -> list[int]:
        """See `Sampler`."""
        return _encoded(self.tokenizer, results(self.tokenizer, found, thinking))

    def cut(self, completion: Completion, tokens: int) -> Completion:
        """See `Sampler`."""
        return decode(self.tokenizer, completion.ids[:tokens], ())

    def write(
        self,
        texts: Sequence[str],
        names: Sequence[str],
        *,
        temperature: float,
        budget: int,
        seed: int,
        progress: Callable[[], None] | None = None,
    ) -> list[Completion]:
        """As `sample`, after texts that are rendered already, or are no turns at all."""
        ids = encode(self.tokenizer, texts)
        return self.go_on(ids, names, temperature=temperature, budget=budget, seed=seed, progress=progress)

    def go_on(
        self,
        ids: Sequence[Sequence[int]],
        names: Sequence[str],
        *,
        temperature: float,
        budget: int,
        seed: int,
        progress: Callable[[], None] | None = None,
        rooms: Sequence[int] | None = None,
    ) -> list[Completion]:
        """As `sample`, after token ids. `rooms`: tokens that must fit after each, where not all of the budget."""
        import torch
        from transformers import GenerationConfig

        lengths = [len(row) for row in ids]
        check_room(names, lengths, budget if rooms is None else rooms, window(self.model))
        ends = end_tokens(self.model, self.tokenizer)
        choice = {"do_sample": True, "temperature": temperature, "top_p": 1.0, "top_k": 0} if temperature > 0 else {}
        config = GenerationConfig(
            max_new_tokens=budget,
            pad_token_id=self.tokenizer.pad_token_id,
            eos_token_id=sorted(ends),
            disable_compile=True,
            **({"do_sample": False} | choice),
        )
        device = self.model.device
        completions: list[Completion | None] = [None] * len(ids)
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.inference_mode(), torch.random.fork_rng():
                torch.manual_seed(seed)
                for batch, width in self._batches(lengths, budget):
                    rows = [
                        [self.tokenizer.pad_token_id] * (width - lengths[index]) + list(ids[index]) for index in batch
                    ]
                    mask = [[0] * (width - lengths[index]) + [1] * lengths[index] for index in batch]
                    output = self.model.generate(
                        input_ids=torch.tensor(rows, device=device),
                        attention_mask=torch.tensor(mask, device=device),
                        generation_config=config,
                    )
                    for index, row in zip(batch, output[:, width:].tolist(), strict=True):
                        if completions[index] is None and progress is not None:
                            progress()
                        completions[index] = decode(self.tokenizer, row, ends)
        finally:
            self.model.train(was_training)
        return [completion for completion in completions if completion is not None]

    def _batches(self, lengths: Sequence[int], budget: int) -> Iterator[tuple[list[int], int]]:
        if self.rows is not None:
            return alike(lengths, self.rows)
        return ((batch, max(lengths[i] for i in batch)) for batch in batches(lengths, budget, self.max_tokens))


class ScriptedSampler:
    """Writes what a function of the prompt says: a known policy in the place of a model."""

    def __init__(self, reply: Callable[[Sequence[Message]], str]) -> None:
        self.reply = reply

    def sample(
        self,
        prompts: Sequence[Prompt],
        *,
        thinking: bool,
        temperature: float,
        budget: int,
        seed: int,
        progress: Callable[[], None] | None = None,
    ) -> list[Completion]:
        """See `Sampler`; a token is a word here, and a reply longer than the budget is cut there."""
        completions = []
        for prompt in prompts:
            text = self.reply(prompt.messages)
            words = text.split(" ")
            answered = len(words) < budget
            completions.append(
                Completion(
                    text=text if answered else " ".join(words[:budget]),
                    stop="answered" if answered else "max_tokens",
                    tokens=min(len(words) + 1, budget),
                    ids=(0,) * min(len(words) + 1, budget),
                )
            )
            if progress is not None:
                progress()
        return completions

    def opening(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], thinking: bool) -> list[int]:
        """See `Sampler`."""
        return [0] * sum(len(message.content.split(" ")) for message in messages)

    def after(self, found: Sequence[Message], thinking: bool) -> list[int]:
        """See `Sampler`."""
        return self.opening(found, (), thinking)

    def cut(self, completion: Completion, tokens: int) -> Completion:
        """See `Sampler`."""
        text = " ".join(completion.text.split(" ")[:tokens])
        return Completion(text=text, stop="max_tokens", tokens=tokens, ids=completion.ids[:tokens])


def _ids(tokenizer: "PreTrainedTokenizerBase", prompt: Prompt, thinking: bool) -> Sequence[int]:
    return _encoded(tokenizer, render(tokenizer, prompt.messages, thinking)) if prompt.ids is None else prompt.ids


def _encoded(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    return encode(tokenizer, [text])[0]


class VllmSampler:
    """Samples with vLLM's offline engine, the adapter applied as a LoRA request. GPU only.

    Needs the optional package `vllm`. The base must not be quantised: vLLM would serve other weights than those the
    adapter was trained on.
    """

    def __init__(self, base: str, *, revision: str | None, adapter: Path | None, rank: int = 64) -> None:
        from vllm import LLM
        from vllm.lora.request import LoRARequest

        self.engine = LLM(
            model=base,
            revision=revision,
            tokenizer_revision=revision,
            trust_remote_code=False,
            enable_lora=adapter is not None,
            max_lora_rank=rank,
            enable_prefix_caching=True,
            generation_config="vllm",  # the checkpoint's own sampling defaults are no part of a mode
            seed=0,
        )
        self.tokenizer = self.engine.get_tokenizer()
        self.lora = LoRARequest(adapter.name, 1, str(adapter)) if adapter is not None else None

    def sample(
        self,
        prompts: Sequence[Prompt],
        *,
        thinking: bool,
        temperature: float,
        budget: int,
        seed: int,
        progress: Callable[[], None] | None = None,
    ) -> list[Completion]:
        """See `Sampler`."""
        from vllm import SamplingParams

        ids = [_ids(self.tokenizer, prompt, thinking) for prompt in prompts]
        check_room(
            [prompt.name for prompt in prompts],
            [len(row) for row in ids],
            [prompt.room(budget) for prompt in prompts],
            self.engine.llm_engine.model_config.max_model_len,
        )
        settings = SamplingParams(
            temperature=temperature, max_tokens=budget, seed=seed, stop_token_ids=[self.tokenizer.eos_token_id]
        )
        outputs = self.engine.generate(
            [{"prompt_token_ids": list(row)} for row in ids], settings, lora_request=self.lora, use_tqdm=False
        )
        completions = []
        for output in outputs:
            written = output.outputs[0]
            completion = decode(self.tokenizer, written.token_ids, {self.tokenizer.eos_token_id})
            stop: Literal["answered", "max_tokens"] = "answered" if written.finish_reason == "stop" else "max_tokens"
            completions.append(Completion(completion.text, stop, len(written.token_ids), tuple(written.token_ids)))
            if progress is not None:
                progress()
        return completions

    opening = TransformersSampler.opening
    after = TransformersSampler.after
    cut = TransformersSampler.cut
