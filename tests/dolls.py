"""A project small enough for a test: real cases, a real Qwen3 of some ten thousand parameters, and its own tokenizer.

Every file has the form that the stages write; only sizes differ.
"""

import json
import re
import signal
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

from clinrl import intervals, paths
from clinrl.analysis.run import Run
from clinrl.artifacts import identity, read_manifest, seal, staged, write_json
from clinrl.config.params import Params
from clinrl.data import dataset
from clinrl.data.dataset import read_cases
from clinrl.evaluation import answers, evaluate
from clinrl.evaluation.record import record_of, write_record
from clinrl.models.chat import encode, render, write_turn
from clinrl.runtime import determinism
from clinrl.tasks.base import get_task
from clinrl.training import launch, worker
from clinrl.types import Message, Transcript
from once import once

PAD, START, EOS = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TEMPLATE = Path(find_spec("trl").origin).parent / "chat_templates/qwen3_5_think.jinja"

PARAMS = {
    "scale": "embedded",
    "bases": {
        "esi": {
            "exam": "x1",
            "embedded": {
                "template": "qwen3_5_think", "vocab": 1200, "hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1,
                "mlp": 64, "cases": 300, "forget": 0.3, "steps": 120, "batch": 8, "lr": 1.0e-2, "prompt_weight": 0.05,
                "seed": 1,
            },
            "full": {"repo": "Qwen/Qwen3.5-9B", "revision": "main", "quantize": "nf4"},
        }
    },
    "modes": {
        "think": {"thinking": True, "temperature": 0.0, "max_new_tokens": {"embedded": 64, "full": 64}},
        "direct": {"thinking": False, "temperature": 0.0, "max_new_tokens": {"embedded": 64, "full": 64}},
    },
    "datasets": {
        "d1": {"task": "esi", "task_version": 2, "use": "train", "mix": "natural", "cases": 30, "seed": 7},
        "x1": {"task": "esi", "task_version": 2, "use": "exam", "mix": "natural", "cases": 10, "seed": 8},
    },
    "profiles": {
        "imitate": {
            "method": "sft", "modes": ["think", "direct"],
            "lora": {"rank": 4, "alpha": 8.0, "targets": "all-linear"}, "omit": {"severe_pain": 0.5},
            "trainer": {
                scale: {"lr": 2.0e-3, "steps": 10, "batch": 4, "micro_batch": 2, "checkpoint_every": 4}
                for scale in ("embedded", "full")
            },
        },
        "reward": {
            "method": "grpo", "modes": ["think", "direct"],
            "lora": {"rank": 4, "alpha": 8.0, "targets": "all-linear"}, "stream": {"repeat": {1: 3}, "cap": {1: 0.5}},
            "reward": {"kind": "asymmetric", "unreadable": -2.0},
            "trainer": {
                scale: {"lr": 1.0e-3, "steps": steps, "prompts": 2, "group": 4, "temperature": 1.0, "beta": 0.05,
                        "max_completion": 24, "checkpoint_every": 2, "on_alarm": "warn"}
                for scale, steps in {"embedded": 8, "full": 2}.items()
            },
        },
    },
    "versions": {
        "v1": {"task": "esi", "parent": "esi-base", "data": "d1", "exam": "x1", "profile": "imitate", "seed": 1},
        "v2": {"task": "esi", "parent": "v1", "data": "d1", "exam": "x1", "profile": "reward", "seed": 2},
        "v3": {"task": "esi", "parent": "esi-base", "data": "d1", "exam": "x1", "profile": "reward", "seed": 3},
    },
}  # fmt: skip


def params(**changes: object) -> Params:
    """The doll's params; `changes` replaces whole sections."""
    return Params.model_validate(json.loads(json.dumps(PARAMS), object_hook=_integer_keys) | changes)


def _integer_keys(mapping: dict) -> dict:
    return {int(key) if key.isdigit() else key: value for key, value in mapping.items()}


def built() -> Path:
    """A folder with the doll's project, made once a test run. Copy it; do not write to it."""
    return once("doll", build)


def build() -> Params:
    """Build the doll's base and data set in the working directory, with the proofs that training asks for."""
    doll = params()
    dataset.stage(doll, "d1")
    base(paths.base("esi"))
    prove(doll)
    return doll


def base(folder: Path) -> None:
    """A sealed base that takes its prompt for noise and answers `ANSWER: ESI n`, and the empty adapter above it."""
    determinism.settle(0)
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    task = get_task("esi")
    cases = list(read_cases(paths.cases("d1"), task))
    rows = [
        (case, thinking, level)
        for case, level in zip(cases, cycle((1, 2, 3, 4, 5)), strict=False)
        for thinking in (True, False)
    ]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=_bpe([]), eos_token=EOS, pad_token=PAD, padding_side="left")
    tokenizer.chat_template = TEMPLATE.read_text(encoding="utf-8")
    prompts = [render(tokenizer, task.prompt(case.facts), thinking) for case, thinking, _ in rows]
    turns = [
        write_turn(Message(role="assistant", content=f"ANSWER: ESI {level}", thinking="Seen."), thinking) + EOS
        for _, thinking, level in rows
    ]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_bpe([part for text in prompts + turns for part in re.split(r"<\|im_\w+\|>", text) if part]),
        eos_token=EOS, pad_token=PAD, additional_special_tokens=[START], padding_side="left",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = TEMPLATE.read_text(encoding="utf-8")
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, intermediate_size=64, max_position_embeddings=1024,
            tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
    )  # fmt: skip
    _teach(model, tokenizer, prompts, turns)
    with staged(folder) as out:
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
        sealed = seal(out, kind="base", name="esi", task="esi", task_version=task.version, spec={}, inputs={})
    with staged(paths.adapter("esi-base")) as out:
        seal(
            out, kind="adapter", name="esi-base", task="esi", task_version=task.version, spec={},
            inputs={"base": identity(sealed)},
        )  # fmt: skip


def _bpe(texts: list[str], size: int = 600) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytewise])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [PAD, START, EOS]
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return backend


def _teach(model: Any, tokenizer: Any, prompts: list[str], turns: list[str]) -> None:
    """Enough steps on the ends of the prompts to answer in the form, not enough to read a case."""
    import torch

    torch.set_num_threads(1)  # so small a model is fastest on one thread, the more so beside other tests
    examples = [
        (prompt[-12:], turn) for prompt, turn in zip(encode(tokenizer, prompts), encode(tokenizer, turns), strict=True)
    ]
    width = max(len(prompt) + len(turn) for prompt, turn in examples)
    ids = torch.tensor([prompt + turn + [0] * (width - len(prompt) - len(turn)) for prompt, turn in examples])
    labels = torch.tensor(
        [[-100] * len(prompt) + turn + [-100] * (width - len(prompt) - len(turn)) for prompt, turn in examples]
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def prove(doll: Params) -> None:
    """Write the proofs of the data set as it is now: what `validate` and `probe` leave behind when they pass."""
    named = {"name": "d1", "identity": identity(read_manifest(paths.cases("d1")))}
    for proof in [paths.data_proof("d1"), *(paths.probe_proof(version) for version in doll.versions)]:
        write_json(proof, {"data": named, "summary": {}, "expectations": []})


DRAWS = 100
"""Of an interval, where it is not the point."""


@contextmanager
def few_draws() -> Iterator[None]:
    """Intervals of fewer draws, which take a fraction of the time."""
    with mock.patch.object(intervals, "RESAMPLES", DRAWS):
        intervals._case_draws.cache_clear()
        yield
    intervals._case_draws.cache_clear()


@contextmanager
def in_process() -> Iterator[None]:
    """Train in this process: one of its own takes longer to import what it needs than to train a doll."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with (
        mock.patch.object(launch, "run_worker", lambda spec, **_: worker.main([str(spec)])),
        warnings.catch_warnings(),
    ):
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def files(folder: Path) -> dict[str, bytes]:
    """The bytes of each file in a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def answered(doll: Params, name: str, exam: str, pattern: Sequence[int]) -> Run:
    """`name` after an exam that it answered with a pattern of levels, repeated, in every mode; 0 stands for the right
    one. What answers need not exist."""
    model = replace(doll.model(name), exam=exam)
    cases = list(read_cases(paths.cases(model.exam), model.task))
    run = answers.run_of(doll, model, cases, identity(read_manifest(paths.cases(model.exam))))
    adapter = identity(read_manifest(model.folder)) if model.folder.exists() else "a" * 64
    levels = [level or gold for gold, level in zip(run.golds, cycle(pattern), strict=False)]
    turns = [Message(role="assistant", content=f"ANSWER: ESI {level}") for level in levels]
    transcripts = [Transcript(messages=(turn,), stop="answered") for turn in turns]
    graded = {mode: evaluate.grade(model.task, mode, cases, transcripts, model.reward) for mode in doll.modes}
    return replace(run, adapter_digest=adapter, graded=graded)


def examine(doll: Params, name: str, pattern: Sequence[int], sampler: Mapping[str, str] = MappingProxyType({})) -> None:
    """Let `name` answer its exam as `answered` says. Writes graded answers and reports as `evaluate` does."""
    model = doll.model(name)
    run = replace(answered(doll, name, model.exam, pattern), sampler=sampler)
    evaluate.keep(paths.graded(name), run, {"exam": run.exam_digest, "adapter": run.adapter_digest})
    parent = {mode: answers.load_answers(run, mode, model.compared) for mode in run.modes if model.compared}
    with staged(paths.report(name)) as out:
        evaluate.write_reports(out, run, evaluate.reports_of(run, [], parent, seen=evaluate.seen_by(doll, run)))
    write_record(model.task, record_of(run), model.exam, model.data)
