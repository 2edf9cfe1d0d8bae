"""Builds an embedded base: a real causal language model of about a million parameters, from nothing, on the CPU.

The texts are rendered cases of the `base` pool in both modes. Each label is that of a reader who forgets every rule
with probability `forget`, so the base reads well, knows the format, and has that share of the medicine left to learn.
"""

from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from clinrl.determinism import settle
from clinrl.records import Case, Message
from clinrl.rollout import encode, render, write_turn
from clinrl.task import Task

if TYPE_CHECKING:
    from clinrl.blocks import EmbeddedBase

Pair = tuple[Case, Message]

EOS, PAD, START = "<|im_end|>", "<|endoftext|>", "<|im_start|>"
TOKENIZER_TEXTS = 3000
"""Rendered texts that the vocabulary is learned from; more changes nothing but the time."""

WINDOW = 50
"""Steps whose texts are sorted by length together."""


def build(task: Task, spec: "EmbeddedBase", out: Path, scratch: Path) -> None:
    """Write tokenizer, template and trained weights to `out`.

    Checkpoints go to `scratch`; a killed build continues there.
    """
    settle(spec.seed)
    pairs = _pairs(task, spec)
    tokenizer = _tokenizer(spec, pairs, task)
    examples = _encode(tokenizer, task, pairs)
    model = _model(spec, tokenizer, max(len(ids) for ids, _ in examples))
    _train(model, spec, _ordered(examples, spec), tokenizer.pad_token_id, scratch)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _pairs(task: Task, spec: "EmbeddedBase") -> list[Pair]:
    """Each case with the turn of a forgetful reader; modes alternate."""
    rng = Random(f"base/{spec.seed}")
    pairs = []
    for index, case in enumerate(task.cases(spec.cases, spec.seed, pool="base", mix="reporting")):
        omit = frozenset(rule for rule in task.rules if rng.random() < spec.forget)
        pairs.append((case, task.gold(case, thinking=index % 2 == 0, omit=omit)))
    return pairs


def _tokenizer(spec: "EmbeddedBase", pairs: list[Pair], task: Task) -> Any:
    """Byte-level BPE over whole texts, digits apart.

    Think tags are ordinary text, because TRL drops special tokens when it decodes.
    """
    import trl
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    template = (Path(trl.__file__).parent / "chat_templates" / f"{spec.template}.jinja").read_text(encoding="utf-8")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=EOS, pad_token=PAD, padding_side="left", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = template
    texts = []
    for case, turn in pairs[:TOKENIZER_TEXTS]:
        text = render(tokenizer, task.prompt(case.facts), turn.thinking is not None) + _completion(turn)
        texts += [part for part in text.replace(START, EOS).split(EOS) if part]
    trainer = trainers.BpeTrainer(
        vocab_size=spec.vocab,
        special_tokens=[PAD, START, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    result = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[START],
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    result.chat_template = template
    return result


def _completion(turn: Message) -> str:
    return write_turn(turn, turn.thinking is not None) + EOS


def _encode(tokenizer: Any, task: Task, pairs: list[Pair]) -> list[tuple[list[int], int]]:
    """(token ids, length of the prompt) of each text."""
    prompts = encode(
        tokenizer, [render(tokenizer, task.prompt(case.facts), turn.thinking is not None) for case, turn in pairs]
    )
    completions = encode(tokenizer, [_completion(turn) for _, turn in pairs])
    return [(prompt + completion, len(prompt)) for prompt, completion in zip(prompts, completions, strict=True)]


def _model(spec: "EmbeddedBase", tokenizer: Any, longest: int) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=spec.hidden,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.hidden // spec.heads,
        intermediate_size=spec.mlp,
        max_position_embeddings=max(1024, 4 * longest),
        tie_word_embeddings=True,
        initializer_range=0.05,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def _ordered(examples: list[tuple[list[int], int]], spec: "EmbeddedBase") -> list[tuple[list[int], int]]:
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


def _train(model: Any, spec: "EmbeddedBase", rows: list[tuple[list[int], int]], pad: int, scratch: Path) -> None:
    import torch
    from torch.nn.functional import cross_entropy
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    class WeightedTrainer(Trainer):  # type: ignore[misc]  # transformers has no types
        """Texts in the given order; tokens of the prompt count less than tokens of the answer."""

        def _get_train_sampler(self, dataset: Any = None) -> SequentialSampler:
            return SequentialSampler(rows)

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            weights = inputs["weights"][:, 1:]
            logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, :-1]
            losses = cross_entropy(logits.transpose(1, 2), inputs["input_ids"][:, 1:], reduction="none")
            loss = (losses * weights).sum() / weights.sum()
            return (loss, None) if return_outputs else loss

    def collate(batch: list[tuple[list[int], int]]) -> dict[str, Any]:
        longest = max(len(ids) for ids, _ in batch)
        gaps = [longest - len(ids) for ids, _ in batch]
        return {
            "input_ids": torch.tensor([ids + [pad] * gap for (ids, _), gap in zip(batch, gaps, strict=True)]),
            "attention_mask": torch.tensor(
                [[1] * len(ids) + [0] * gap for (ids, _), gap in zip(batch, gaps, strict=True)]
            ),
            "weights": torch.tensor(
                [
                    [spec.prompt_weight] * asked + [1.0] * (len(ids) - asked) + [0.0] * gap
                    for (ids, asked), gap in zip(batch, gaps, strict=True)
                ]
            ),
        }

    arguments = TrainingArguments(
        output_dir=str(scratch),
        max_steps=spec.steps,
        per_device_train_batch_size=spec.batch,
        learning_rate=spec.lr,
        lr_scheduler_type="cosine",
        warmup_steps=min(100, spec.steps // 10),
        weight_decay=0.01,
        max_grad_norm=1.0,
        adam_beta2=0.98,
        seed=spec.seed,
        data_seed=spec.seed,
        use_cpu=True,
        bf16=False,
        remove_unused_columns=False,
        save_steps=200,
        save_total_limit=2,
        logging_steps=50,
        report_to=[],
        dataloader_num_workers=0,
    )
    trainer = WeightedTrainer(model=model, args=arguments, train_dataset=rows, data_collator=collate)
    scratch.mkdir(parents=True, exist_ok=True)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(scratch)))
