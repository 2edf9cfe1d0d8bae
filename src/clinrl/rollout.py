"""From cases to transcripts: render the prompt, sample a completion, read it as a turn.

A sampler turns prompts into completions and knows nothing of medicine; `run` joins it to a task. The functions that
render a prompt, decode token ids and read a turn are the only ones of their kind: training, evaluation and the
reward all see a model's text through them.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from clinrl.errors import DataError
from clinrl.records import Case, Message, Transcript
from clinrl.task import Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from clinrl.blocks import Mode

CLOSE = "</think>"
OPEN = "<think>"


STEP = 16
"""Tokens: widths of batches of one shape are multiples of it."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The turns before the model's own, and the name to use when something is wrong with them."""

    name: str
    messages: Sequence[Message]


@dataclass(frozen=True, slots=True)
class Completion:
    """What a model wrote after a prompt. `tokens` counts the end-of-turn token; `text` does not hold it."""

    text: str
    stop: Literal["answered", "max_tokens"]
    tokens: int


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


def render(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], thinking: bool) -> str:
    """The prompt as the chat template writes it, ending where the model has to go on.

    With `thinking` it ends in an opened think block, without it in an empty closed one. Templates of the Qwen family
    write these themselves; after one that knows of no thinking, as Llama's, they are added.
    """
    turns = [{"role": message.role, "content": message.content} for message in messages]
    text = str(
        tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, enable_thinking=thinking)
    )
    if _switches(tokenizer.get_chat_template()):
        return text
    return text + (f"{OPEN}\n" if thinking else f"{OPEN}\n\n{CLOSE}\n\n")


@cache
def _switches(template: str) -> bool:
    """Whether a chat template writes the two modes of thinking differently."""
    from transformers.utils.chat_template_utils import render_jinja_template

    question = [[{"role": "user", "content": "?"}]]
    marks = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "")
    written = [
        render_jinja_template(
            question, chat_template=template, add_generation_prompt=True, enable_thinking=thinking, **marks
        )[0]
        for thinking in (True, False)
    ]
    return bool(written[0] != written[1])


def encode(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> list[list[int]]:
    """Token ids of rendered texts. The template wrote every special token, so the tokenizer adds none."""
    return [list(ids) for ids in tokenizer(list(texts), add_special_tokens=False)["input_ids"]]


def decode(tokenizer: "PreTrainedTokenizerBase", ids: Sequence[int], ends: Collection[int]) -> Completion:
    """Token ids after a prompt, up to the first end-of-turn token, as a completion.

    Special tokens inside the text stay visible: a reward must see all that the model wrote.
    """
    ids = list(ids)
    end = next((index for index, token in enumerate(ids) if token in ends), None)
    written = ids if end is None else ids[:end]
    text = tokenizer.decode(written, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return Completion(
        text=str(text),
        stop="max_tokens" if end is None else "answered",
        tokens=len(ids) if end is None else end + 1,
    )


def end_tokens(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> frozenset[int]:
    """The ids that end a turn: those the model declares and the tokenizer's own."""
    declared = model.generation_config.eos_token_id
    ids = [declared] if isinstance(declared, int) else list(declared or [])
    return frozenset([*ids, tokenizer.eos_token_id])


def read_turn(text: str, thinking: bool) -> Message:
    """The assistant turn that a completion's text is. Never raises.

    With `thinking` the prompt already opened the think block: everything before the first closing tag is thinking, and
    without a closing tag there is no content. Without `thinking`, content is what follows the last closing tag, and a
    block that the model opened and never closed leaves no content.
    """
    if thinking:
        before, closed, after = text.partition(CLOSE)
        return Message(role="assistant", content=after.lstrip("\n") if closed else "", thinking=before.strip("\n"))
    content = text.rpartition(CLOSE)[2]
    return Message(role="assistant", content="" if OPEN in content else content.lstrip("\n"), thinking=None)


def write_turn(message: Message, thinking: bool) -> str:
    """The completion's text that `read_turn` reads as this turn, without the end-of-turn token."""
    return f"{message.thinking or ''}\n{CLOSE}\n\n{message.content}" if thinking else message.content


def run(
    sampler: Sampler,
    task: Task,
    cases: Sequence[Case],
    mode: "Mode",
    budget: int,
    seed: int,
    progress: Callable[[], None] | None = None,
) -> list[Transcript]:
    """One transcript a case, in the order of the cases, in one mode."""
    completions = sampler.sample(
        [Prompt(case.id, task.prompt(case.facts)) for case in cases],
        thinking=mode.thinking,
        temperature=mode.temperature,
        budget=budget,
        seed=seed,
        progress=progress,
    )
    return [
        Transcript(messages=(read_turn(completion.text, mode.thinking),), stop=completion.stop)
        for completion in completions
    ]


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


def check_room(names: Sequence[str], lengths: Sequence[int], budget: int, limit: int | None) -> None:
    """Raise DataError naming the first prompt that leaves no room for `budget` tokens in the model's window."""
    if limit is None:
        return
    for name, length in zip(names, lengths, strict=True):
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
        return self.write(
            [render(self.tokenizer, prompt.messages, thinking) for prompt in prompts],
            [prompt.name for prompt in prompts],
            temperature=temperature,
            budget=budget,
            seed=seed,
            progress=progress,
        )

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
        import torch
        from transformers import GenerationConfig

        ids = encode(self.tokenizer, texts)
        lengths = [len(row) for row in ids]
        check_room(names, lengths, budget, window(self.model))
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
        completions: list[Completion | None] = [None] * len(texts)
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.inference_mode(), torch.random.fork_rng():
                torch.manual_seed(seed)
                for batch, width in self._batches(lengths, budget):
                    rows = [[self.tokenizer.pad_token_id] * (width - lengths[index]) + ids[index] for index in batch]
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
                )
            )
            if progress is not None:
                progress()
        return completions


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

        ids = encode(self.tokenizer, [render(self.tokenizer, prompt.messages, thinking) for prompt in prompts])
        check_room(
            [prompt.name for prompt in prompts],
            [len(row) for row in ids],
            budget,
            self.engine.llm_engine.model_config.max_model_len,
        )
        settings = SamplingParams(
            temperature=temperature, max_tokens=budget, seed=seed, stop_token_ids=[self.tokenizer.eos_token_id]
        )
        outputs = self.engine.generate(
            [{"prompt_token_ids": row} for row in ids], settings, lora_request=self.lora, use_tqdm=False
        )
        completions = []
        for output in outputs:
            written = output.outputs[0]
            completion = decode(self.tokenizer, written.token_ids, {self.tokenizer.eos_token_id})
            stop: Literal["answered", "max_tokens"] = "answered" if written.finish_reason == "stop" else "max_tokens"
            completions.append(Completion(completion.text, stop, len(written.token_ids)))
            if progress is not None:
                progress()
        return completions
