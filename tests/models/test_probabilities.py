"""The probabilities of answers, kept while a real tiny model writes: those of a forward by hand, on both paths."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import dolls
from clinrl.evaluation.evaluate import grade
from clinrl.models import bases
from clinrl.models.chat import encode, render, write_turn
from clinrl.models.generate import Sampler
from clinrl.models.probabilities import Watch
from clinrl.models.rollout import run
from clinrl.tasks.base import get_task
from clinrl.types import Unreadable

ESI = get_task("esi")
CASES = list(ESI.cases(6, 1, pool="train", mix="reporting"))
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""How the tokenizers of Qwen 2 and 3 split a text before they merge bytes."""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    root = tmp_path_factory.mktemp("doll")
    shutil.copytree(dolls.built(), root, dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        yield bases.load(dolls.params(), "esi", for_training=False)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("mode", ["think", "direct"])
def test_they_are_those_of_a_forward_and_change_no_answer(loaded: tuple[Any, Any], mode: str, shared: bool) -> None:
    model, tokenizer = loaded
    spec, sampler = dolls.params().modes[mode], Sampler(*loaded, shared=shared)
    plain = run(sampler, ESI, CASES, spec, 64, 1)
    watch = Watch(tokenizer, ESI.ordered)
    sampler.watch = [watch]
    transcripts = run(sampler, ESI, CASES, spec, 64, 1)
    assert transcripts == plain
    lines = grade(ESI, mode, CASES, transcripts, ESI.Reward())
    rows = watch.read(ESI, CASES, lines, thinking=spec.thinking)
    assert [row is None for row in rows] == [isinstance(line.answer, Unreadable) for line in lines]
    read = [(case, line, row) for case, line, row in zip(CASES, lines, rows, strict=True) if row is not None]
    assert read
    for case, line, row in read:
        assert sum(row) == pytest.approx(1)
        assert ESI.ordered.answers[max(range(5), key=row.__getitem__)] == line.answer
        text = render(tokenizer, ESI.prompt(case.facts), spec.thinking)
        text += write_turn(line.transcript.messages[-1], spec.thinking).rpartition("ESI ")[0] + "ESI "
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor(encode(tokenizer, [text]))).logits[0, -1]
        words = [encode(tokenizer, [str(level)])[0][0] for level in ESI.labels]
        assert row == pytest.approx(logits[words].softmax(-1).tolist(), abs=1e-4)


def test_silence_has_none(loaded: tuple[Any, Any]) -> None:
    watch = Watch(loaded[1], ESI.ordered)
    lines = grade(ESI, "direct", CASES, [ESI.policies()["empty"](case, None) for case in CASES], ESI.Reward())
    assert watch.read(ESI, CASES, lines, thinking=False) == [None] * len(CASES)


def test_a_qwen_tokenizer_ends_the_prefix_by_a_space_and_gives_the_level_a_token() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: place for place, letter in enumerate(alphabet)}, []))
    split = pre_tokenizers.Split(Regex(QWEN), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    assert [text for text, _ in split.pre_tokenize_str("ANSWER: ESI 2")] == ["ANSWER", ":", " ESI", " ", "2"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    watch = Watch(tokenizer, ESI.ordered)
    ids = tokenizer("ANSWER: ESI 2")["input_ids"]
    assert ids[-2] in watch.ends.tolist()
    assert ids[-1] == watch.words[1]


def test_a_level_is_the_token_that_is_written_and_not_the_same_text_as_a_byte() -> None:
    """As in the vocabularies of Gemma and Llama 2, which hold each byte besides."""
    words = [*(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"ANSWERI:12345", dolls.EOS, dolls.PAD]
    plain = Tokenizer(
        models.BPE({word: place for place, word in enumerate(dict.fromkeys(words))}, [], byte_fallback=True)
    )
    plain.normalizer = normalizers.Replace(" ", "\u2581")
    plain.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token=dolls.EOS, pad_token=dolls.PAD)
    assert Watch(tokenizer, ESI.ordered).words == [plain.token_to_id(str(level)) for level in ESI.labels]
