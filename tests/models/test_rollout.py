"""Rendering, decoding, reading turns, and sampling with a real model of some ten thousand parameters."""

import shutil
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

import dolls
from clinrl import paths
from clinrl.data.dataset import read_cases
from clinrl.errors import DataError, Refused
from clinrl.models import bases
from clinrl.models.chat import (
    decode,
    encode,
    opens,
    read_turn,
    render,
    results,
    to_pieces,
    without_clock,
    without_prefill,
    write_turn,
)
from clinrl.models.generate import STEP, Prompt, Sampler, batches, check_room, equal_batches
from clinrl.models.rollout import run
from clinrl.tasks.base import get_task
from clinrl.types import Message, Transcript, Unreadable
from samplers import ScriptedSampler

PIECES = ["<think>", "</think>", "\n", "a", "<", "think>", " ", "ANSWER: ESI 2", "é", "\x00"]
TEXT = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


@given(TEXT, st.booleans())
def test_reading_a_turn_never_raises_and_never_leaks_an_unclosed_block(text, thinking):
    message = read_turn(text, thinking)
    opened = thinking or text.lstrip().startswith("<think>")
    assert message.role == "assistant"
    assert (message.thinking is None) == (not opened)
    if opened and "</think>" not in text:
        assert message.content == ""


@given(TEXT, st.booleans())
def test_nothing_that_a_model_wrote_vanishes_from_its_turn(text, thinking):
    message = read_turn(text, thinking)
    block = "" if message.thinking is None else f"{'' if thinking else '<think>'}{message.thinking}</think>"
    whole = f"{block}{message.content}"
    if message.thinking is not None and "</think>" not in text:
        whole = whole.removesuffix("</think>")
    assert whole.replace("\n", "").lstrip() == text.replace("\n", "").lstrip()


@given(st.text(), st.text())
def test_a_written_turn_reads_as_itself(thinking, content):
    thought = thinking.replace("</think>", "").strip("\n")
    said = content.replace("think>", "").lstrip("\n")
    thoughtful = Message(role="assistant", content=said, thinking=thought)
    direct = Message(role="assistant", content=said, thinking=None)
    assert read_turn(write_turn(thoughtful, True), True) == thoughtful
    assert read_turn(write_turn(direct, False), False) == direct


@pytest.mark.parametrize(
    ("text", "thinking", "content", "thought"),
    [
        ("seen\n</think>\n\nANSWER", True, "ANSWER", "seen"),
        ("seen, no end", True, "", "seen, no end"),
        ("a</think>b</think>c", True, "b</think>c", "a"),
        ("ANSWER", False, "ANSWER", None),
        ("ANSWER: ESI 1\n</think>\nANSWER", False, "ANSWER: ESI 1\n</think>\nANSWER", None),
        ("\n<think>\nown\n</think>\n\nANSWER</think>", False, "ANSWER</think>", "own"),
        ("<think>never closed ANSWER", False, "", "never closed ANSWER"),
        ("x</think>y<think>z", False, "x</think>y<think>z", None),
    ],
)
def test_reading_a_turn(text, thinking, content, thought):
    assert read_turn(text, thinking) == Message(role="assistant", content=content, thinking=thought)


TEMPLATES = dolls.TEMPLATE.parent
ASKED = [Message(role="system", content="Be brief."), Message(role="user", content="Why?")]


def bare(template: str) -> PreTrainedTokenizerFast:
    """A tokenizer that can do nothing but render."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE()), bos_token="<|begin_of_text|>")
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    return tokenizer


@pytest.mark.parametrize("template", ["llama3", "llama3_1", "qwen2_5"])
def test_a_template_that_knows_of_no_thinking_gets_the_blocks_of_one_that_does(template):
    tokenizer = bare(template)
    turns = [message.model_dump(include={"role", "content"}) for message in ASKED]
    written = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert written.endswith("assistant" + ("<|end_header_id|>\n\n" if "llama" in template else "\n"))
    assert written.startswith("<|begin_of_text|>") == ("llama" in template)
    assert render(tokenizer, ASKED, True) == written + "<think>\n"
    assert render(tokenizer, ASKED, False) == written + "<think>\n\n</think>\n\n"


@pytest.mark.parametrize("template", ["qwen3_5_think", "qwen3_5_nothink", "qwen3"])
def test_a_template_that_thinks_is_left_as_it_is(template):
    tokenizer = bare(template)
    turns = [message.model_dump(include={"role", "content"}) for message in ASKED]
    for thinking in (True, False):
        written = tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
        )
        assert render(tokenizer, ASKED, thinking) == written


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize(("template", "head"), [("qwen3", "\n<|im_start|>user\n"), ("qwen2_5", "\n<|im_start|>user\n")])
def test_what_tools_found_begins_with_the_head_of_its_turn(template, head, thinking):
    """Qwen 3 writes a think block in the last turn alone, so that what follows a turn begins elsewhere than it did."""
    tokenizer = bare(template)
    tokenizer.eos_token = "<|im_end|>"
    said = results(tokenizer, [Message(role="tool", content="found")], thinking)
    assert said.startswith(f"{head}<tool_response>\nfound")


TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("template", ["llama3", "llama3_1", "qwen3_5_think"])
def test_a_template_whose_calls_are_not_read_is_given_no_tools(template):
    with pytest.raises(Refused, match="does not write tool calls as JSON between <tool_call> and </tool_call>"):
        render(bare(template), ASKED, True, [TOOL])


@pytest.mark.parametrize("template", ["qwen2_5", "qwen3"])
def test_a_template_whose_calls_are_read_is_given_tools(template):
    assert '"look"' in render(bare(template), ASKED, True, [TOOL])


def test_a_prompt_is_the_same_on_every_day():
    tokenizer = bare("qwen2_5")
    asks = "{%- if strftime_now is defined %}{{- strftime_now('%d %b %Y') }}{%- endif %}" + tokenizer.chat_template
    tokenizer.chat_template = without_clock(asks)
    assert render(tokenizer, ASKED, True).startswith("26 Jul 2024<|im_start|>")
    assert without_clock(tokenizer.chat_template) == tokenizer.chat_template
    assert without_clock(bare("qwen3").chat_template) == bare("qwen3").chat_template


@pytest.mark.parametrize(
    ("template", "is_opened"),
    [("llama3_1", True), ("qwen2_5", True), ("qwen3_5_think", True), ("qwen3_5_nothink", True), ("qwen3", False)],
)
def test_whether_a_prompt_opens_the_think_block_is_read_from_the_template(template, is_opened):
    tokenizer = bare(template)
    assert opens(tokenizer, True) is is_opened
    assert opens(tokenizer, True) is render(tokenizer, ASKED, True).endswith("<think>\n")
    assert not opens(tokenizer, False)


@pytest.mark.parametrize("template", ["llama3", "llama3_1", "qwen2_5"])
def test_a_think_block_may_be_left_to_the_model(template):
    tokenizer = bare(template)
    direct = render(tokenizer, ASKED, False)
    turns = [message.model_dump(include={"role", "content"}) for message in ASKED]
    written = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    tokenizer.chat_template = without_prefill(tokenizer.chat_template)
    assert render(tokenizer, ASKED, True) == written
    assert render(tokenizer, ASKED, False) == direct
    assert not opens(tokenizer, True)
    turn = Message(role="assistant", content="<answer>Yes</answer>", thinking="First this.")
    done = Transcript(messages=(turn,), stop="answered")
    opening, own = to_pieces(tokenizer, ASKED, done, True)
    assert (opening.text, own.text) == (written, "<think>\nFirst this.\n</think>\n\n<answer>Yes</answer>")
    assert read_turn(own.text, opens(tokenizer, True)) == turn


@pytest.mark.parametrize("template", ["qwen3_5_think", "qwen3"])
def test_a_template_with_a_block_of_its_own_is_not_changed(template):
    with pytest.raises(ValueError, match="writes the think block itself"):
        without_prefill(bare(template).chat_template)


@given(st.lists(st.integers(1, 300), max_size=40), st.integers(1, 50), st.integers(1, 2000))
def test_batches_hold_every_prompt_once_and_fit(lengths, budget, limit):
    made = list(batches(lengths, budget, limit))
    assert sorted(index for batch in made for index in batch) == list(range(len(lengths)))
    for batch in made:
        assert len(batch) == 1 or len(batch) * (max(lengths[i] for i in batch) + budget) <= limit


@pytest.fixture
def doll(tmp_path, monkeypatch):
    shutil.copytree(dolls.built(), tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    params = dolls.params()
    model, tokenizer = bases.load(params, "esi", for_training=False)
    task = get_task("esi")
    return params, model, tokenizer, task, list(read_cases(paths.cases("d1"), task))[:7]


def test_prompts_end_in_an_opened_or_an_empty_think_block_and_gain_no_token(doll):
    _, _, tokenizer, task, cases = doll
    messages = task.prompt(cases[0].facts)
    think, direct = render(tokenizer, messages, True), render(tokenizer, messages, False)
    assert think.endswith("<|im_start|>assistant\n<think>\n")
    assert direct.endswith("<think>\n\n</think>\n\n")
    for text in (think, direct):
        assert tokenizer.decode(encode(tokenizer, [text])[0], skip_special_tokens=False) == text


def test_decoding_stops_at_the_end_of_turn_and_keeps_think_tags(doll):
    _, _, tokenizer, _, _ = doll
    ids = encode(tokenizer, ["why\n</think>\n\nANSWER: ESI 3<|im_end|>\n<|im_start|>user"])[0]
    done = decode(tokenizer, ids, {tokenizer.eos_token_id})
    assert (done.text, done.stop) == ("why\n</think>\n\nANSWER: ESI 3", "answered")
    cut = decode(tokenizer, ids[: done.tokens - 1], {tokenizer.eos_token_id})
    assert (cut.text, cut.stop, cut.tokens) == (done.text, "max_tokens", done.tokens - 1)
    assert decode(tokenizer, [], {tokenizer.eos_token_id}).stop == "max_tokens"


@pytest.mark.long
@pytest.mark.parametrize("mode", ["think", "direct"])
def test_greedy_transcripts_do_not_depend_on_batches_or_order(doll, mode):
    params, model, tokenizer, task, cases = doll
    finished = []
    one = run(
        Sampler(model, tokenizer, max_tokens=1), task, cases, params.modes[mode], 16, 0,
        progress=lambda: finished.append(1),
    )  # fmt: skip
    assert len(finished) == len(cases)
    many = run(Sampler(model, tokenizer), task, cases, params.modes[mode], 16, 0)
    assert one == many
    shuffled = Random(0).sample(range(len(cases)), len(cases))
    again = run(Sampler(model, tokenizer), task, [cases[i] for i in shuffled], params.modes[mode], 16, 0)
    assert again == [many[i] for i in shuffled]


@pytest.mark.long
def test_sampling_obeys_its_seed_and_leaves_the_global_one(doll):
    import torch

    params, model, tokenizer, task, cases = doll
    mode = params.modes["think"].model_copy(update={"temperature": 1.5})
    sampler = Sampler(model, tokenizer)
    before = torch.random.get_rng_state()
    first, same, other = (run(sampler, task, cases, mode, 16, seed) for seed in (1, 1, 2))
    assert first == same != other
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_completion_that_runs_out_of_tokens_says_so(doll):
    params, model, tokenizer, task, cases = doll
    for transcript in run(Sampler(model, tokenizer), task, cases, params.modes["think"], 1, 0):
        assert transcript.stop == "max_tokens"
        assert isinstance(task.parse(transcript), Unreadable)


def test_a_prompt_without_room_is_named(doll):
    params, model, tokenizer, task, cases = doll
    with pytest.raises(DataError, match=rf"{cases[0].id}: its prompt is \d+ tokens.*window of 1024"):
        run(Sampler(model, tokenizer), task, cases, params.modes["think"], 1020, 0)


def test_a_text_to_imitate_that_is_longer_than_the_window_is_no_matter_of_a_budget():
    with pytest.raises(DataError, match="c1: it is 90 tokens with what is to be learned, more than the window of 80"):
        check_room(["c1"], [90], 0, 80)


def test_a_scripted_sampler_says_what_it_is_told_within_the_budget():
    said = ScriptedSampler(lambda messages: messages[-1].content)
    prompts = [Prompt("a", [Message(role="user", content="one two three")])]
    whole, cut = (said.sample(prompts, thinking=False, temperature=0, budget=budget, seed=0)[0] for budget in (9, 2))
    assert (whole.text, whole.stop) == ("one two three", "answered")
    assert (cut.text, cut.stop) == ("one two", "max_tokens")


@given(st.lists(st.integers(0, 90), max_size=60), st.integers(1, 9))
def test_batches_of_one_shape_hold_everything_and_a_shape_follows_from_the_length_alone(lengths, rows):
    found = list(equal_batches(lengths, rows))
    assert {index for batch, _ in found for index in batch} == set(range(len(lengths)))
    assert sum(len(set(batch)) for batch, _ in found) == len(lengths)
    for batch, width in found:
        assert len(batch) == rows
        assert all(lengths[index] <= width < lengths[index] + STEP for index in batch)
        assert width % STEP == 0
