"""Completions of many rows: nothing is read twice, rows that have ended are left out, and the tokens are the same."""

import shutil
from functools import wraps

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig

import dolls
from clinrl import paths
from clinrl.data.dataset import read_cases
from clinrl.models import bases, cache, decoding
from clinrl.models.chat import encode, render
from clinrl.models.generate import Sampler
from clinrl.models.rollout import run
from clinrl.tasks.base import get_task

GROUP = 3


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


def settings(tokenizer, **more):
    return GenerationConfig(
        max_new_tokens=12, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        disable_compile=True, **{"do_sample": False, **more},
    )  # fmt: skip


DRAWN = {"do_sample": True, "temperature": 1.5, "top_k": 0}


def plain(model, rows, config, **more):
    """What `generate` writes for rows that are padded on the left."""
    width = max(map(len, rows))
    ids, mask = decoding.padded(rows, width, config.pad_token_id, "cpu")
    return model.generate(input_ids=ids, attention_mask=mask, generation_config=config, **more)[:, width:].tolist()


def ended(rows, ends):
    """Completions up to their end tokens."""
    return [row[: next((i for i, token in enumerate(row, 1) if token in ends), len(row))] for row in rows]


@torch.inference_mode()
def test_room_changes_no_bit_of_what_is_written(doll):
    model, tokenizer, _, _, ids = doll
    rows, mask = decoding.padded(ids, max(map(len, ids)), tokenizer.pad_token_id, "cpu")
    config, found = settings(tokenizer, **DRAWN, output_scores=True, return_dict_in_generate=True), []
    for held in (None, cache.empty_cache(model)):
        torch.manual_seed(1)
        found.append(
            model.generate(input_ids=rows, attention_mask=mask, generation_config=config, past_key_values=held)
        )
    assert torch.equal(found[0].sequences, found[1].sequences)
    assert all(map(torch.equal, *(one.scores for one in found)))


@torch.inference_mode()
def test_what_prompts_share_is_read_once_and_the_completions_are_those_of_generate(doll, sizes):
    model, tokenizer, _, _, ids = doll
    rows = [row for row in ids for _ in range(GROUP)]
    whole = plain(model, rows, settings(tokenizer))
    sizes.clear()
    assert ended(decoding.complete(model, rows, settings(tokenizer)), {2}) == ended(whole, {2})
    (one, alike), (distinct, rest), first = sizes[:3]
    assert (one, distinct, first) == (1, len(ids), (len(rows), 1))
    assert alike + rest + 1 == max(map(len, ids))
    assert alike > 1 < rest


@torch.inference_mode()
@pytest.mark.parametrize("rows", [[[5]] * 2, [[5, 6]] * 2, [[5], [5, 6, 7]], [[5, 6, 7], [5, 6, 8]], [[5, 6]]])
def test_rows_that_share_everything_or_nothing(doll, rows):
    model, tokenizer, *_ = doll
    assert decoding.complete(model, rows, settings(tokenizer)) == plain(model, rows, settings(tokenizer))


@torch.inference_mode()
@pytest.mark.parametrize("stretch", [1, 3, 12])
@pytest.mark.parametrize("choice", [{}, DRAWN], ids=["greedy", "drawn"])
def test_rows_that_have_ended_are_left_out_and_the_others_write_what_they_would(
    doll, sizes, monkeypatch, stretch, choice
):
    model, tokenizer, _, _, ids = doll
    config = settings(tokenizer, **choice)

    def written(tokens):
        monkeypatch.setattr(decoding, "STRETCH", tokens)
        torch.manual_seed(1)
        sizes.clear()
        return decoding.complete(model, ids, config)

    config.eos_token_id = [-1]  # none ends
    whole = written(12)
    config.eos_token_id = sorted({row[number] for number, row in enumerate(whole)})  # rows end one after the other
    expected = ended(whole, config.eos_token_id)
    found = written(stretch)
    assert ended(found, config.eos_token_id) == expected
    lengths = [len(row) for row in expected]
    assert max(map(len, found)) <= -(-max(lengths) // stretch) * stretch
    rows = [shape[0] for shape in sizes[2:]]
    assert rows == sorted(rows, reverse=True)
    assert len(set(rows)) == (1 if stretch == 12 else len({-(-length // stretch) for length in lengths}))


@torch.inference_mode()
@pytest.mark.parametrize("choice", [{}, DRAWN], ids=["greedy", "drawn"])
def test_a_conversation_goes_on_where_its_turn_ended(doll, sizes, choice):
    model, tokenizer, _, _, ids = doll
    config = settings(tokenizer, **choice)
    torch.manual_seed(1)
    config.eos_token_id = [-1]  # none ends
    first, _ = decoding.complete_turn(model, ids, config, None)
    config.eos_token_id = sorted({row[2 * number] for number, row in enumerate(first)})  # one after the other
    torch.manual_seed(1)
    first, before = decoding.complete_turn(model, ids, config, None)
    said = ended(first, config.eos_token_id)
    results = [[7, 8, 9], [7], [], [9, 9, 9, 9, 9], [11]]  # the last conversation is over, and a row is there twice
    going = [*(ids[n] + said[n] + results[n] for n in range(5)), ids[4] + said[4] + [12]]
    going[2].append(3)
    torch.manual_seed(2)
    anew = ended(decoding.complete(model, going, config), config.eos_token_id)
    torch.manual_seed(2)
    sizes.clear()
    found, after = decoding.complete_turn(model, going, config, before)
    assert ended(found, config.eos_token_id) == anew
    assert sizes[0][0] == sizes[1][0] == len(going)
    assert sizes[0][1] <= 6
    assert sizes[1][1] == 1
    held = max(len(ids[n] + said[n]) for n in range(5))
    assert after.ids.size(1) <= held + 6 + max(map(len, found))  # what was padding is gone
    third = [[*row, *tokens, 5] for row, tokens in zip(going, anew, strict=True)]
    assert decoding.resume(model, after, [*third, third[0][1:]], 0) is None
    again = decoding.complete_turn(model, third, config, after)[0]
    if not choice:
        assert ended(again, config.eos_token_id) == ended(decoding.complete(model, third, config), config.eos_token_id)


def test_a_model_that_keeps_something_else_reads_conversations_anew():
    assert decoding.resume("model", None, [[1]], 0) is None
    assert decoding.resume("model", decoding.Rows(torch.ones(1, 2), torch.ones(1, 2), None), [[1, 1, 1]], 0) is None


@given(st.integers(0, 2**31), st.integers(2, 9), st.sampled_from([0.5, 1.0, 3.0]))
def test_a_word_is_drawn_by_its_part_of_the_numbers(seed, words, spread):
    random = torch.Generator().manual_seed(seed)
    scores = torch.randn(1, words, generator=random) * spread
    numbers = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    found = decoding.draw(scores.expand(1000, -1), numbers)
    assert torch.equal(found, found.sort().values)
    assert torch.bincount(found, minlength=words) / 1000 == pytest.approx(scores.softmax(-1)[0], abs=2e-3)


def test_no_number_draws_a_word_that_cannot_be():
    scores = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -60.0]]).expand(3, -1)
    numbers = torch.tensor([0.0, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    assert decoding.draw(scores, numbers).tolist() == [1, 3, 3]


@torch.inference_mode()
def test_scores_that_are_no_numbers_draw_a_word_of_the_vocabulary():
    words = decoding.draw(
        torch.tensor([[0.0, 1.0]]) / 0 * torch.ones(3, 1), torch.tensor([0.0, 0.5, 1 - 1e-12]).double()
    )
    assert set(words.tolist()) <= {0, 1}


@pytest.mark.long
def test_drawn_completions_are_spread_as_those_of_generate(doll):
    model, tokenizer, _, _, ids = doll
    rows, config = [ids[0]] * 4000, settings(tokenizer, **DRAWN)
    config.max_new_tokens = 1
    counts = []
    for write in (plain, decoding.complete):
        torch.manual_seed(3)
        counts.append(torch.bincount(torch.tensor(write(model, rows, config))[:, 0], minlength=len(tokenizer)))
    theirs, ours = (count.double() / len(rows) for count in counts)
    assert 0 < (theirs - ours).abs().max() < 4 * (0.25 / len(rows)) ** 0.5 * 2**0.5


@pytest.fixture
def adapted(doll):
    """A copy of the base with an adapter that changes what is written."""
    torch.manual_seed(0)
    model = type(doll[0])(doll[0].config)
    model.load_state_dict(doll[0].state_dict())
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).eval()


def test_an_adapter_lies_in_the_weights_for_a_while_and_they_come_back_bit_for_bit(doll, adapted, monkeypatch):
    _, tokenizer, _, _, ids = doll
    before = {name: (value.data_ptr(), value.clone()) for name, value in adapted.state_dict().items()}
    own = plain(adapted, ids, settings(tokenizer))
    forwards = []
    layer = next(module for module in adapted.modules() if hasattr(module, "lora_A"))
    layer.lora_A["default"].register_forward_hook(lambda *_: forwards.append(1))
    with decoding.folded(adapted):
        assert ended(plain(adapted, ids, settings(tokenizer)), {2}) == ended(own, {2})
    assert not forwards
    with pytest.raises(KeyboardInterrupt), decoding.folded(adapted):
        raise KeyboardInterrupt
    for name, value in adapted.state_dict().items():
        assert value.data_ptr() == before[name][0]
        assert torch.equal(value, before[name][1])
    plain(adapted, ids[:1], settings(tokenizer))
    assert forwards


def test_weights_that_would_round_an_adapter_are_left_alone(adapted):
    adapted.to(torch.bfloat16)
    with decoding.folded(adapted):
        assert not any(getattr(module, "merged", False) for module in adapted.modules())


def test_a_broken_adapter_is_not_folded(adapted):
    next(value for name, value in adapted.named_parameters() if "lora_A" in name).data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN"), decoding.folded(adapted):
        pass


@pytest.mark.parametrize("mode", ["think", "direct"])
def test_an_exam_on_the_shared_path_has_the_same_answers(doll, sizes, mode):
    model, tokenizer, task, cases, _ = doll
    mode = dolls.params().modes[mode]
    stock = run(Sampler(model, tokenizer), task, cases, mode, 16, 0)
    sizes.clear()
    assert run(Sampler(model, tokenizer, shared=True), task, cases, mode, 16, 0) == stock
    assert sizes[0][0] == 1
    assert run(Sampler(model, tokenizer, rows=4, shared=True), task, cases, mode, 16, 0) == stock


@pytest.mark.parametrize("shared", [False, True])
def test_a_small_mass_leaves_the_likeliest_token_alone(doll, shared):
    model, tokenizer, task, cases, _ = doll
    sampler = Sampler(model, tokenizer, shared=shared)
    mode = dolls.params().modes["think"]
    tight, wide = (mode.model_copy(update={"temperature": 1.5, "top_p": mass}) for mass in (1e-6, 1.0))
    greedy, least, drawn = (run(sampler, task, cases, one, budget=12, seed=3) for one in (mode, tight, wide))
    assert least == greedy
    assert drawn != greedy
