"""Keys and values: room that grows holds what transformers' own cache holds, and equal rows are read once."""

import shutil
from functools import wraps
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig, Qwen2Config
from transformers.cache_utils import DynamicLayer

import dolls
from clinrl import paths
from clinrl.data.dataset import read_cases
from clinrl.models import bases, cache
from clinrl.models.chat import encode, render
from clinrl.models.generate import Sampler
from clinrl.models.rollout import run
from clinrl.tasks.base import get_task

GROUP = 3


@given(st.lists(st.integers(1, cache.BLOCK + 9), min_size=1, max_size=5), st.permutations(range(2)))
def test_room_holds_what_the_cache_of_transformers_holds(lengths, order):
    layers = DynamicLayer(), cache.Room()
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
    layer = cache.Room()
    places = {layer.update(*torch.rand(2, 1, 1, 1, 4))[0].data_ptr() for _ in range(3 * cache.BLOCK)}
    assert len(places) == 3


@pytest.fixture(scope="module")
def doll(tmp_path_factory):
    """A base, its tokenizer, and prompts of some cases as ids."""
    folder = tmp_path_factory.mktemp("doll")
    shutil.copytree(dolls.built(), folder, dirs_exist_ok=True)
    task = get_task("esi")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        model, tokenizer = bases.load(dolls.params(), "esi", for_training=False)
        cases = list(read_cases(paths.cases("d1"), task))[:6]
    texts = [render(tokenizer, task.prompt(case.facts), True) for case in cases]
    return model, tokenizer, task, cases, encode(tokenizer, texts)


@pytest.fixture
def sizes(doll, monkeypatch):
    """The shapes of what the model is given, call by call."""
    model, shapes, forward = doll[0], [], doll[0].forward

    @wraps(forward)  # `generate` looks at what it takes
    def watched(**inputs):
        shapes.append(tuple(inputs["input_ids"].shape))
        return forward(**inputs)

    monkeypatch.setattr(model, "forward", watched)
    return shapes


def padded(rows, fill):
    width = max(map(len, rows))
    ids = torch.tensor([[fill] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def settings(tokenizer, **more):
    return GenerationConfig(
        max_new_tokens=12, do_sample=True, top_k=0, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id, disable_compile=True, **more,
    )  # fmt: skip


@torch.inference_mode()
def test_room_changes_no_bit_of_what_is_written(doll):
    model, tokenizer, _, _, ids = doll
    inputs, found = padded(ids, tokenizer.pad_token_id), []
    config = settings(tokenizer, output_scores=True, return_dict_in_generate=True)
    for held in (None, cache.room(model)):
        torch.manual_seed(1)
        found.append(model.generate(**inputs, generation_config=config, past_key_values=held))
    assert torch.equal(found[0].sequences, found[1].sequences)
    assert all(map(torch.equal, *(one.scores for one in found)))


@torch.inference_mode()
def test_a_group_s_prompt_is_read_once_and_its_completions_are_the_same(doll, sizes):
    model, tokenizer, _, _, ids = doll
    inputs = padded([row for row in ids for _ in range(GROUP)], tokenizer.pad_token_id)
    width, found = inputs["input_ids"].size(1), []
    for generate in (model.generate, lambda **given: cache.generate_shared(model, **given)):
        torch.manual_seed(1)
        sizes.clear()
        found.append(generate(**inputs, generation_config=settings(tokenizer)))
    assert torch.equal(*found)
    assert sizes[:2] == [(len(ids), width - 1), (GROUP * len(ids), 1)]


@torch.inference_mode()
def test_a_prompt_of_one_token_has_nothing_to_share(doll):
    model, tokenizer, *_ = doll
    inputs = {"input_ids": torch.full((2, 1), 5), "attention_mask": torch.ones(2, 1, dtype=torch.long)}
    assert cache.generate_shared(model, **inputs, generation_config=settings(tokenizer)).size(0) == 2


@pytest.mark.parametrize("mode", ["think", "direct"])
def test_what_all_prompts_begin_with_is_read_once_and_the_answers_are_the_same(doll, sizes, mode):
    model, tokenizer, task, cases, _ = doll
    mode = dolls.params().modes[mode]
    plain = run(Sampler(model, tokenizer), task, cases, mode, 16, 0)
    sizes.clear()
    assert run(Sampler(model, tokenizer, compact=True), task, cases, mode, 16, 0) == plain
    (one, alike), (all_rows, rest) = sizes[:2]
    assert (one, all_rows) == (1, len(cases))
    assert alike > 1 < rest
    assert run(Sampler(model, tokenizer, rows=4, compact=True), task, cases, mode, 16, 0) == plain
    assert run(Sampler(model, tokenizer, compact=True), task, cases[:1] * 2, mode, 16, 0) == [plain[0]] * 2


@torch.inference_mode()
@pytest.mark.parametrize("stretch", [1, 3, 12])
def test_rows_that_have_ended_are_left_out_and_the_others_write_what_they_would(doll, sizes, monkeypatch, stretch):
    monkeypatch.setattr(cache, "STRETCH", stretch)
    model, tokenizer, _, _, ids = doll
    inputs = padded(ids, tokenizer.pad_token_id)
    config = settings(tokenizer)
    config.do_sample = False
    whole = model.generate(**inputs, generation_config=config)[:, inputs["input_ids"].size(1) :].tolist()
    config.eos_token_id = sorted({row[number] for number, row in enumerate(whole)})  # rows end one after the other
    lengths = [next(i for i, token in enumerate(row, 1) if token in {*config.eos_token_id}) for row in whole]
    sizes.clear()
    written = cache.write(model, ids, max(map(len, ids)), config, is_compact=True)
    assert [row[:length] for row, length in zip(written, lengths, strict=True)] == [
        row[:length] for row, length in zip(whole, lengths, strict=True)
    ]
    assert max(map(len, written)) <= -(-max(lengths) // stretch) * stretch
    rows = [shape[0] for shape in sizes[1:]]  # the first reads what all begin with
    assert rows == sorted(rows, reverse=True)
    assert len(set(rows)) == (1 if stretch == 12 else len({-(-length // stretch) for length in lengths}))


def test_a_model_that_keeps_something_else_has_no_room():
    layers = ["full_attention", "sliding_attention"]
    sliding = Qwen2Config(num_hidden_layers=2, use_sliding_window=True, sliding_window=4, layer_types=layers)
    assert cache.room(SimpleNamespace(config=sliding)) is None
    assert cache.read_once(SimpleNamespace(config=sliding), torch.ones(1, 2), torch.ones(1, 2)) is None
