"""Build the embedded models: real causal language models of about a million parameters, from scratch, on the CPU.

A base learns rendered cases of the `base` pool in both modes. Each answer is by a reader who forgets every rule with
probability `forget`, so the base reads well, knows the format, and has that share of the medicine left to learn.
A judge learns the lessons of its task.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from clinrl.config.base import check_known
from clinrl.config.bases import Embedded, EmbeddedBase, EmbeddedJudge
from clinrl.errors import Refused
from clinrl.models.chat import Example, Piece, encode_pieces, to_pieces
from clinrl.models.checkpoints import latest_checkpoint, seal_checkpoint
from clinrl.models.rollout import schemas
from clinrl.runtime.determinism import settle
from clinrl.tasks.base import Task
from clinrl.types import Case

Text = Sequence[Piece]
"""A text to learn: the prompt that a model is given, the turn that it should write with its end, and so on."""


@dataclass(frozen=True)
class Marks:
    """The special tokens of a family of chat templates."""

    end: str
    """Ends a turn."""
    pad: str
    bos: str | None
    """Begins a text, where the template writes it."""
    others: tuple[str, ...]

    @property
    def all(self) -> tuple[str, ...]:
        """All of them, in the order of their ids."""
        return (self.pad, *((self.bos,) if self.bos else ()), *self.others, self.end)


QWEN = Marks(end="<|im_end|>", pad="<|endoftext|>", bos=None, others=("<|im_start|>",))
LLAMA = Marks(
    end="<|eot_id|>",
    pad="<|finetune_right_pad_id|>",
    bos="<|begin_of_text|>",
    others=("<|start_header_id|>", "<|end_header_id|>"),
)

TOKENIZER_TEXTS = 3000
"""Rendered texts from which the vocabulary is learned; more texts only take more time."""

WINDOW = 50
"""Steps whose texts are sorted by length together."""


def build(task: Task, spec: EmbeddedBase, out: Path, scratch: Path) -> None:
    """Write tokenizer, template and trained weights of a base to `out`.

    Checkpoints go to `scratch`; a killed build continues there. Raises Refused for a template that TRL lacks, or
    of an unknown family.
    """
    import trl

    files = {file.stem: file for file in (Path(trl.__file__).parent / "chat_templates").glob("*.jinja")}
    check_known(f"bases.{task.name}.embedded.template", spec.template, files, "a chat template of TRL")
    template = files[spec.template].read_text(encoding="utf-8")
    marks = next((family for family in (QWEN, LLAMA) if family.end in template), None)
    if marks is None:
        raise Refused(f"the chat template {spec.template} ends no turn with {QWEN.end} or {LLAMA.end}; choose another")
    teach(spec, _texts(task, spec, marks, template), marks, template, out, scratch)


def build_judge(task: Task, name: str, spec: EmbeddedJudge, out: Path, scratch: Path) -> None:
    """Write tokenizer and trained weights of a judge to `out`, as `build` does.

    Raises Refused if the task has no lessons for it.
    """
    lessons = task.asks.lessons(name, spec.lessons, spec.seed)
    texts = [(Piece(prompt, own=False), Piece(reply + QWEN.end, own=True)) for prompt, reply in lessons]
    if not texts:
        raise Refused(f"the task {task.name} has no lessons for a {name}; leave it out of bases.{task.name}.embedded")
    teach(spec, texts, QWEN, None, out, scratch)


def teach(spec: Embedded, texts: Sequence[Text], marks: Marks, template: str | None, out: Path, scratch: Path) -> None:
    """Learn a vocabulary from the texts, train a model on them, and write both to `out`."""
    settle(spec.seed)
    tokenizer = _tokenizer(spec.vocab, texts, marks, template)
    examples = encode_pieces(tokenizer, texts)
    model = _model(spec, tokenizer, max(len(ids) for ids, _ in examples))
    _train(model, spec, _ordered(examples, spec), tokenizer.pad_token_id, scratch)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def corpus(task: Task, spec: EmbeddedBase, **edition: Any) -> Iterator[Case]:
    """The cases that a base learns from; with `edition`, the same patients labelled by that edition alone."""
    return task.cases(spec.cases, spec.seed, pool="base", mix="reporting", **edition)


def _texts(task: Task, spec: EmbeddedBase, marks: Marks, template: str) -> list[Text]:
    """Each case rendered with the transcript of a forgetful reader; the modes alternate."""
    from tokenizers import Tokenizer, models

    blank = _wrapped(Tokenizer(models.BPE()), marks, template)  # rendering needs the template alone
    rng = Random(f"base/{spec.seed}")
    tools = schemas(task)
    texts: list[Text] = []
    for index, case in enumerate(corpus(task, spec)):
        careful = spec.careful > 0 and rng.random() < spec.careful
        omit = frozenset(rule for rule in task.checks.rules if not careful and rng.random() < spec.forget)
        thinking = index % 2 == 0
        done = task.gold(case, thinking=thinking, omit=omit)
        texts.append(to_pieces(blank, task.prompt(case.facts), done, thinking, tools, marks.end))
    return texts


def _tokenizer(vocab: int, taught: Sequence[Text], marks: Marks, template: str | None) -> Any:
    """Byte-level BPE over whole texts, digits apart.

    Think tags are ordinary text, because TRL drops special tokens when it decodes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    between = re.compile("|".join(map(re.escape, marks.all)))
    texts = [
        part
        for text in taught[:TOKENIZER_TEXTS]
        for part in between.split("".join(piece.text for piece in text))
        if part
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(marks.all),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return _wrapped(backend, marks, template)


def _wrapped(backend: Any, marks: Marks, template: str | None) -> Any:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=marks.end,
        pad_token=marks.pad,
        **({"bos_token": marks.bos} if marks.bos else {}),
        additional_special_tokens=list(marks.others),
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer


def shape(spec: Embedded, vocab: int) -> dict[str, Any]:
    """The fields of a config.json that define a model's architecture."""
    return {
        "vocab_size": vocab, "hidden_size": spec.hidden, "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads, "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.hidden // spec.heads, "intermediate_size": spec.mlp, "tie_word_embeddings": True,
    }  # fmt: skip


def _model(spec: Embedded, tokenizer: Any, longest: int) -> Any:
    import transformers

    family = spec.architecture.capitalize()
    config, model = getattr(transformers, f"{family}Config"), getattr(transformers, f"{family}ForCausalLM")
    return model(
        config(
            **shape(spec, len(tokenizer)),
            max_position_embeddings=max(1024, 4 * longest),
            initializer_range=0.05,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
        )
    )


def _ordered(examples: list[Example], spec: Embedded) -> list[Example]:
    """The texts of all steps in order: shuffled passes, sorted by length within a window so that batches pad little."""
    rng = Random(f"order/{spec.seed}")
    needed = spec.steps * spec.batch
    order: list[int] = []
    while len(order) < needed:
        order += rng.sample(range(len(examples)), len(examples))
    ordered = []
    for start in range(0, needed, WINDOW * spec.batch):
        window = sorted(
            order[start : min(start + WINDOW * spec.batch, needed)], key=lambda index: len(examples[index][0])
        )
        batches = [window[i : i + spec.batch] for i in range(0, len(window), spec.batch)]
        rng.shuffle(batches)
        ordered += [examples[index] for batch in batches for index in batch]
    return ordered


def _train(model: Any, spec: Embedded, rows: list[Example], pad: int, scratch: Path) -> None:
    import torch
    from torch.nn.functional import cross_entropy
    from torch.nn.utils.rnn import pad_sequence
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class WeightedTrainer(Trainer):  # type: ignore[misc]  # transformers has no types
        """Tokens of the prompt count less than tokens of the answer."""

        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            weights = inputs["weights"][:, 1:]
            logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, :-1]
            losses = cross_entropy(logits.transpose(1, 2), inputs["input_ids"][:, 1:], reduction="none")
            return (losses * weights).sum() / weights.sum()

    class Sealed(TrainerCallback):  # type: ignore[misc]  # transformers has no types
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seal_checkpoint(scratch / f"checkpoint-{state.global_step}")

    def collate(batch: list[Example]) -> dict[str, Any]:
        ids = [torch.tensor(ids) for ids, _ in batch]
        weights = [torch.tensor([1.0 if is_own else spec.prompt_weight for is_own in own]) for _, own in batch]
        return {
            "input_ids": pad_sequence(ids, batch_first=True, padding_value=pad),
            "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
            "weights": pad_sequence(weights, batch_first=True),
        }

    arguments = TrainingArguments(
        output_dir=str(scratch),
        max_steps=spec.steps,
        per_device_train_batch_size=spec.batch,
        train_sampling_strategy="sequential",
        learning_rate=spec.lr,
        lr_scheduler_type="cosine",
        warmup_steps=min(100, spec.steps // 10),
        weight_decay=0.01,
        adam_beta2=0.98,
        seed=spec.seed,
        data_seed=spec.seed,
        use_cpu=True,
        remove_unused_columns=False,
        save_steps=200,
        logging_steps=50,
    )
    how = {"train_dataset": rows, "data_collator": collate, "callbacks": [Sealed()]}
    trainer = WeightedTrainer(model=model, args=arguments, **how)
    scratch.mkdir(parents=True, exist_ok=True)
    trainer.train(resume_from_checkpoint=latest_checkpoint(scratch))
