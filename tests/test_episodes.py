"""Episodes: calls are read as TRL reads them, and evaluation, teaching and TRL's own loop see the same episode."""

import copy
import functools
import json
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl.chat_template_utils import add_response_schema, parse_response

import dolls
from audits import READERS
from clinrl.config.schema import Mode
from clinrl.errors import DataError, TrainingError
from clinrl.models import rollout
from clinrl.models.chat import encode, encode_pieces, read_calls, read_turn, render, results, to_pieces, write_turn
from clinrl.models.generate import Prompt, Sampler
from clinrl.models.judges import Judges
from clinrl.tasks.audit import episodes, policies
from clinrl.tasks.audit.policies import Turn
from clinrl.tasks.base import get_task
from clinrl.training import reward_fn, trl
from clinrl.training.rows import Row, Taught
from clinrl.types import Call, Message, Transcript, Unreadable, is_malformed
from samplers import ScriptedSampler

TASK = get_task("audit")
CASES = list(TASK.cases(6, 3, pool="train", mix="easy"))
ASKED = [Message(role="user", content="Why?")]


def mode(thinking):
    return Mode(thinking=thinking, temperature=0.0, max_new_tokens={"embedded": 100, "full": 100})


@functools.cache
def tokenizer():
    """One of two thousand tokens with the template of Qwen 2.5, which TRL knows how to read.

    They are learned on whole episodes, so that an episode is short: TRL's loop attends to all of it, squared.
    """
    tools = rollout.schemas(TASK)
    texts = [json.dumps(tools), *(message.content for case in CASES for message in TASK.prompt(case.facts))]
    texts += [text for case in CASES for text in texts_of(transcript_of(case, True), True)]
    texts += [message.content for case in CASES for message in transcript_of(case, True).messages]
    made = PreTrainedTokenizerFast(
        tokenizer_object=dolls._bpe(texts, 2000), eos_token=dolls.EOS, pad_token=dolls.PAD,
        additional_special_tokens=[dolls.START], padding_side="left", clean_up_tokenization_spaces=False,
    )  # fmt: skip
    made.chat_template = (dolls.TEMPLATE.parent / "qwen2_5.jinja").read_text(encoding="utf-8")
    return add_response_schema(made)


def model(window=8192):
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer()), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, intermediate_size=16, max_position_embeddings=window,
            eos_token_id=tokenizer().eos_token_id, pad_token_id=tokenizer().pad_token_id, bos_token_id=None,
        )
    )  # fmt: skip


# Calls as TRL reads them

WELL = [
    '{"name": "approve", "arguments": {"proposal_id": "A1"}}',
    '{"name": "flag_error", "arguments": {"reason": "</think> né\\u00e9 \\"x\\"", "n": [1, {"a": null}]}}',
    '{"name": "submit", "arguments": {}}',
    '{"name": "submit"}',
    '{"arguments": null, "name": ""}',
    '{"name": "approve", "arguments": {"reason": "<tool_call>{}"}, "id": 7}',
]
ILL = ['{"name": 3, "arguments": {}}', "[]", "{", "never", '{"arguments": {}}', '"approve"', "{'name': 'approve'}"]
BODIES = st.sampled_from([*(body for body in WELL if "think>" not in body), *ILL])
PIECES = st.one_of(
    BODIES.map(lambda body: f"<tool_call>\n{body}\n</tool_call>"),
    BODIES,
    st.sampled_from(["<tool_call>", "</tool_call>", "\n", " ", "why né", "<tool_", "call>", "<|im_"]),
)


def by_trl(text, thinking, end=True):
    """The turn that TRL's parser makes of what a model wrote after a prompt."""
    prompt = encode(tokenizer(), [render(tokenizer(), ASKED, thinking)])[0]
    ids = encode(tokenizer(), [text + (tokenizer().eos_token if end else "")])[0]
    return parse_response(tokenizer(), ids, prefix=prompt)


def calls_of(parsed):
    return [(call["function"]["name"], call["function"]["arguments"]) for call in parsed.get("tool_calls", [])]


def ours(text, thinking):
    return read_calls(read_turn(text, thinking))


@given(st.lists(PIECES, max_size=7).map("".join), st.none() | st.sampled_from(["", "why", "<tool_call>{"]))
def test_calls_are_those_that_trl_reads(said, thought):
    thinking = thought is not None
    text = f"{thought}\n</think>\n\n{said}" if thinking else said
    parsed, turn = by_trl(text, thinking), ours(text, thinking)
    assert [(call.name, call.arguments) for call in turn.calls] == calls_of(parsed)
    assert is_malformed(turn) == ("<tool_call>" in said and not turn.calls)
    if (
        not said.partition("<tool_call>")[2].partition("</tool_call>")[2].strip()
        and said.count("<tool_call>") == len(turn.calls) < 2
    ):
        assert turn.content.strip() == parsed["content"].strip()
    if thinking and (turn.calls or "<tool_call>" not in said):
        assert (turn.thinking or "").strip() == parsed.get("reasoning_content", "")


@pytest.mark.parametrize("body", WELL)
def test_a_well_formed_call_is_made_wherever_it_stands(body):
    call = f"<tool_call>\n{body}\n</tool_call>"
    for text in (call, f"why\n{call}", f"{call}{call}\n", f"{call} and so\n{call}\nthen"):
        if "think>" in body:
            text = f"why\n</think>\n\n{text}"
        turn = ours(text, "think>" in body)
        assert len(turn.calls) == text.count("<tool_call>\n{")
        assert calls_of(by_trl(text, "think>" in body)) == [(one.name, one.arguments) for one in turn.calls]
        assert ours(write_turn(turn, False), False).calls == turn.calls or "think>" in body


@pytest.mark.parametrize("body", [*ILL, "", '{"name": "a"} {"name": "b"}'])
def test_a_turn_with_a_malformed_call_makes_none(body):
    text = f"<tool_call>\n{WELL[0]}\n</tool_call>\n<tool_call>\n{body}\n</tool_call>"
    turn = ours(text, False)
    assert (turn.calls, turn.content, is_malformed(turn)) == ((), text, True)
    assert calls_of(by_trl(text, False)) == []


DIFFERS = {
    "cut off after a whole call": (f"<tool_call>\n{WELL[0]}\n", False, False),
    "arguments that are no object": ('<tool_call>{"name": "approve", "arguments": "A1"}</tool_call>', False, True),
    "infinity": ('<tool_call>{"name": "approve", "arguments": {"a": 1e999}}</tool_call>', False, True),
    "no number": ('<tool_call>{"name": "approve", "arguments": {"a": NaN}}</tool_call>', False, True),
    "half a character": ('<tool_call>{"name": "approve", "arguments": {"a": "\\ud800"}}</tool_call>', False, True),
    "nested too deep": (f'<tool_call>{{"name": "a", "arguments": {{"a": {"[" * 200}{"]" * 200}}}}}</tool_call>',
                        False, True),
    "a key twice": ('<tool_call>{"name": "a", "arguments": {}, "arguments": {"b": 1}}</tool_call>', False, True),
    "a name twice": ('<tool_call>{"name": "approve", "name": "flag", "arguments": {}}</tool_call>', False, True),
    "an argument twice": ('<tool_call>{"name": "a", "arguments": {"b": 1, "b": 2}}</tool_call>', False, True),
    "a key twice, deep": ('<tool_call>{"name": "a", "arguments": {"b": [{"c": 1, "c": 1}]}}</tool_call>', False, True),
}  # fmt: skip
"""What TRL's parser would call, but no record can hold, or what is no part of the turn as it is read everywhere."""


@pytest.mark.parametrize(("text", "thinking", "end"), DIFFERS.values(), ids=DIFFERS)
def test_what_trl_would_call_and_is_not_called(text, thinking, end):
    assert by_trl(text, thinking, end)["tool_calls"]
    turn = ours(text, thinking)
    assert (turn.calls, turn.content, is_malformed(turn)) == ((), text, True)


@pytest.mark.parametrize(
    "text",
    [
        f"<tool_call>{WELL[0]}</tool_call><think>why</think>so",
        '<tool_call>{"name": "a", "arguments": {"b": "</think>"}}</tool_call>',
    ],
)
def test_a_tag_of_thoughts_that_opens_no_turn_hides_no_call(text):
    assert calls_of(by_trl(text, False)) == [(call.name, call.arguments) for call in ours(text, False).calls] != []


@given(st.text() | st.lists(PIECES | st.sampled_from(["<think>", "</think>"]), max_size=9).map("".join), st.booleans())
def test_a_turn_is_the_same_in_trl_s_notation_and_whatever_is_called_can_be_written(text, thinking):
    turn = ours(text, thinking)
    reader = reward_fn.Reader(tokenizer(), thinking, frozenset({tokenizer().eos_token_id}))
    if tokenizer().eos_token not in text and text.isprintable():
        parsed = parse_response(reader, encode(tokenizer(), [text + tokenizer().eos_token])[0], prefix=[1])
        assert reward_fn.episode_transcript([parsed], clipped=False, most=1).messages == (turn,)
    assert Message.model_validate_json(turn.model_dump_json()) == turn


def test_the_calls_of_a_turn_without_an_end_are_written_down_and_not_made():
    """In an exam such a turn is the last; TRL would make them, and reward what follows."""
    text = f"<tool_call>{WELL[0]}</tool_call> and so"
    reader = reward_fn.Reader(tokenizer(), False, frozenset({tokenizer().eos_token_id}))
    parsed = parse_response(reader, encode(tokenizer(), [text])[0], prefix=[1])
    assert not parsed.get("tool_calls")
    assert reward_fn.episode_transcript([parsed], clipped=True, most=9) == Transcript(
        messages=(ours(text, False),), stop="max_tokens"
    )
    assert ours(text, False).calls


# One episode in three places


def policy_turns(case, which="reader"):
    return {**READERS, **policies.TRIVIAL}[which](case, Random(1))


def transcript_of(case, thinking, which="reader"):
    return episodes.write(case, [Turn("Seen.", turn) for turn in policy_turns(case, which)], thinking=thinking)


def texts_of(transcript, thinking):
    return [write_turn(message, thinking) for message in transcript.messages if message.role == "assistant"]


def script(texts):
    """A sampler that writes the next text in each turn; a token is a word."""
    return ScriptedSampler(lambda told: texts[sum(message.role == "assistant" for message in told)])


@pytest.mark.parametrize("thinking", [True, False])
def test_what_is_taught_is_in_the_tokens_in_which_a_model_is_asked(thinking):
    sampler, tools = Sampler(None, tokenizer()), rollout.schemas(TASK)
    for case in CASES:
        transcript, prompt = TASK.gold(case, thinking=thinking), TASK.prompt(case.facts)
        pieces = to_pieces(tokenizer(), prompt, transcript, thinking, tools, tokenizer().eos_token)
        ((taught, own),) = encode_pieces(tokenizer(), [pieces])
        asked, mine = sampler.opening(prompt, tools, thinking), []
        mine += [0] * len(asked)
        heard = []
        for message in transcript.messages:
            if message.role == "tool":
                heard.append(message)
                continue
            ids = sampler.after(heard, thinking) if heard else []
            asked, mine, heard = asked + ids, mine + [0] * len(ids), []
            ids = encode(tokenizer(), [write_turn(message, thinking) + tokenizer().eos_token])[0]
            asked, mine = asked + ids, mine + [1] * len(ids)
        assert (taught, list(own)) == (asked, mine)
        text = tokenizer().decode(taught)
        assert text.count("<tool_response>") == sum(message.role == "tool" for message in transcript.messages)
        assert text == "".join(piece.text for piece in pieces)


@pytest.mark.parametrize("thinking", [True, False])
def test_a_scripted_reader_earns_all_there_is(thinking):
    for case in CASES:
        written = transcript_of(case, thinking)
        (found,) = rollout.run(script(texts_of(written, thinking)), TASK, [case], mode(thinking), 10**6, 0)
        assert found == written
        assert found.stop == "answered"
        assert TASK.score(case, found, TASK.Reward()).total == 1.0
        assert TASK.parse(found) == TASK.label(case)


def words(messages):
    return sum(len(message.content.split(" ")) for message in messages)


def test_an_episode_ends_where_its_budget_does_and_never_beyond():
    case = CASES[0]
    texts = texts_of(transcript_of(case, False), False)
    whole = rollout.run(script(texts), TASK, [case], mode(False), 10**6, 0)[0]
    first = len(texts[0].split(" ")) + 1
    heard = words(whole.messages[1:4])
    cut, dropped, filled, asked = (
        rollout.run(script(texts), TASK, [case], mode(False), budget, 0)[0]
        for budget in (first - 2, first + heard - 1, first + heard, first + heard + 1)
    )
    assert (cut.stop, len(cut.messages), cut.messages[0].calls) == ("max_tokens", 1, ())
    assert (dropped.stop, dropped.messages) == ("max_tokens", whole.messages[:1])
    assert (filled.stop, filled.messages) == ("max_tokens", whole.messages[:4])
    assert (asked.stop, asked.messages[:-1]) == ("max_tokens", whole.messages[:4])
    assert len(episodes.play_again(case, dropped).log) == 0
    assert len(episodes.play_again(case, filled).log) == 3
    assert isinstance(TASK.parse(asked), Unreadable)


def test_an_episode_ends_after_the_most_turns_and_what_it_called_last_is_not_answered():
    case = CASES[0]
    look = Message(role="assistant", content="", calls=(Call(name="cohort_analysis", arguments={"feature": "sex"}),))
    (found,) = rollout.run(ScriptedSampler(lambda _: write_turn(look, False)), TASK, [case], mode(False), 10**6, 0)
    own = [message for message in found.messages if message.role == "assistant"]
    assert (found.stop, len(own), found.messages[-1]) == ("max_turns", TASK.episodes.turns, look)
    assert len(episodes.play_again(case, found).log) == TASK.episodes.turns - 1


def odd_turns(case):
    """Turns of an auditor who does not know the tools, or how to write a call."""
    wrong = [
        Call(name="aprove", arguments={"proposal_id": "A1"}),
        Call(name="approve", arguments={"proposal": "A1"}),
        Call(name="approve", arguments={}),
        Call(name="approve", arguments={"proposal_id": 7}),
    ]
    return [
        write_turn(Message(role="assistant", content="Well.", calls=tuple(wrong)), False),
        f"{texts_of(transcript_of(case, False), False)[0]}\nand so on",
        '<tool_call>\n{"name": "submit_audit_report", "arguments": }\n</tool_call>',
    ]


def test_unknown_tools_and_arguments_are_answered_with_an_error_and_counted():
    case = CASES[0]
    (found,) = rollout.run(script(odd_turns(case)), TASK, [case], mode(False), 10**6, 0)
    said = [message.content for message in found.messages if message.role == "tool"]
    assert said[0] == "{'error': 'Tool aprove not found.'}"
    assert "unexpected keyword argument 'proposal'" in said[1]
    assert "missing 1 required positional argument: 'proposal_id'" in said[2]
    assert said[3].startswith("error: no such proposal")
    assert len(said) == 7  # with the three look-ups before which and after which there is text
    assert found.messages[5].content == "and so on"
    assert found.stop == "answered"
    done = episodes.play_again(case, found)
    assert (len(done.log), done.malformed, done.submitted) == (4, 4, False)


def test_a_conversation_needs_room_for_what_is_left_to_it_and_no_more():
    small = Sampler(model(window=64), tokenizer())
    long, short = [5] * 60, [5] * 40
    how = {"thinking": False, "temperature": 0.0, "budget": 24, "seed": 0}
    assert len(small.sample([Prompt("a", [], long, 4), Prompt("b", [], short, 24)], **how)) == 2
    with pytest.raises(DataError, match="a: its prompt is 60 tokens"):
        small.sample([Prompt("a", [], long), Prompt("b", [], short)], **how)


# In TRL's loop


class Scripted(Sampler):
    """Writes the token ids of one script, cut at the budget as a model's would be."""

    def __init__(self, texts):
        super().__init__(None, tokenizer())
        self.turns = [encode(tokenizer(), [text + tokenizer().eos_token])[0] for text in texts]
        self.asked = []

    def sample(self, prompts, *, thinking, temperature, budget, seed, top_p=1.0, progress=None):
        (prompt,) = prompts
        self.asked.append(list(prompt.ids))
        ids = self.turns[len(self.asked) - 1][:budget]
        return [reward_fn.decode(tokenizer(), ids, {tokenizer().eos_token_id})]


class Played(trl.Grpo):
    """TRL's loop, in which scripts write what a model would."""

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        if self.waiting is None:
            self.waiting = [(list(ids), number) for number, ids in enumerate(prompt_ids)]
        written, going = [], []
        for ids in prompt_ids:
            place = next(
                place for place, (before, number) in enumerate(self.waiting)
                if ids[: len(before)] == before and number not in going
            )  # fmt: skip
            number = self.waiting[place][1]
            going.append(number)
            self.asked[number].append(list(ids))
            turn = self.scripts[number][len(self.asked[number]) - 1][: self.max_completion_length]
            written.append(list(turn))
            self.waiting[place] = (list(ids) + list(turn), number)
        return written, None

    def _generate_and_score_completions(self, inputs):
        self.inputs = inputs
        self.outcome = super()._generate_and_score_completions(inputs)
        return self.outcome


def training(modes, **trainer):
    """The resolved spec of a short training; `modes` says of each whether it thinks."""
    return {
        "scale": "embedded", "seed": 1, "checkpoint_every": 9, "stream": {},
        "lora": {"rank": 2, "alpha": 4.0, "targets": "all-linear"},
        "modes": {mode: {"thinking": thinking} for mode, thinking in modes.items()},
        "reward": TASK.Reward().model_dump(mode="json"),
        "trainer": {
            "steps": 1, "prompts": 2, "group": 2, "micro_batch": None, "lr": 1.0e-3, "temperature": 1.0, "beta": 0.0,
            "max_completion": 400, "scale_rewards": "group", "vllm": False,
        } | trainer,
    }  # fmt: skip


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*environment_factory.*:UserWarning")
@pytest.mark.parametrize("thinking", [True, False])
def test_trl_s_loop_plays_scores_and_masks_as_everything_else_does(thinking, tmp_path, monkeypatch):
    cases, reward = CASES[:2], TASK.Reward()

    def thought(texts):
        return [f"Hm.\n</think>\n\n{text}" for text in texts] if thinking else texts

    read = transcript_of(cases[0], thinking)
    ((ids, _),) = encode_pieces(
        tokenizer(), [to_pieces(tokenizer(), ASKED, read, thinking, end=tokenizer().eos_token)[1:]]
    )
    budget = 2 * len(ids)
    reading = texts_of(read, thinking)
    unknown = Message(role="assistant", content="", calls=(Call(name="x", arguments={}),))
    endless = Message(role="assistant", content="", calls=(Call(name="x", arguments={"y": "?" * 20000}),))
    error = Message(role="tool", content="{'error': 'Tool x not found.'}")
    left = budget - len(encode(tokenizer(), [results(tokenizer(), [error], thinking)])[0])
    (turn,) = thought([write_turn(unknown, False)])
    least = len(encode(tokenizer(), [turn.replace("<t", "?<t")])[0])
    padded = turn.replace("<t", "?" * (left - least) + "<t")
    assert len(encode(tokenizer(), [padded])[0]) + 1 == left  # with the results, the budget to the last token
    scripts = [
        reading, thought(odd_turns(cases[0])), [padded, "Never asked."], [padded.replace("<t", "?<t"), "Never asked."],
        [reading[0], reading[0], *thought([write_turn(endless, False)])], thought(["?" * 20000]),
        [turn] * (TASK.episodes.turns + 1), thought(["So be it."]),
    ]  # fmt: skip
    seen = []
    earn = reward_fn.scores
    monkeypatch.setattr(
        reward_fn,
        "scores",
        lambda task, pairs, *rest: [seen.append((pairs, found := earn(task, pairs, *rest))), found][1],
    )
    monkeypatch.setattr(trl, "Grpo", Played)
    path = "shared" if thinking else "stock"  # once is enough to compare both
    spec = training({"m": thinking}, group=4, max_completion=budget, loss_path=path)
    spec["stream"] = {"phases": [{"share": 1.0, "slice": "level", "values": ["easy", "hard"]}]}
    rows = [Row(case, "m", thinking) for case in cases]
    adapted = trl.start_adapter(model(), spec, None)
    before = trl.adapter_state(adapted)
    grpo = trl.grpo_trainer(adapted, tokenizer(), TASK, spec, rows, tmp_path, Judges(tmp_path))
    grpo.scripts = [[encode(tokenizer(), [text + tokenizer().eos_token])[0] for text in texts] for texts in scripts]
    grpo.asked, grpo.waiting = [[] for _ in scripts], None
    grpo.train()

    assert [row["row"] for row in grpo.inputs] == [0, 0, 0, 0, 1, 1, 1, 1]  # a group shares one episode
    ((pairs, earned),) = seen
    assert [case.id for case, _ in pairs] == [cases[place].id for place in (0, 0, 0, 0, 1, 1, 1, 1)]
    completions = [
        [token for token, kept in zip(ids, mask, strict=True) if kept]
        for ids, mask in zip(
            grpo.outcome["completion_ids"].tolist(), grpo.outcome["completion_mask"].tolist(), strict=True
        )
    ]
    masks = [mask[: len(ids)] for mask, ids in zip(grpo.outcome["tool_mask"].tolist(), completions, strict=True)]
    for number, (case, transcript) in enumerate(pairs):
        sampler = Scripted(scripts[number])
        (found,) = rollout.run(sampler, TASK, [case], mode(thinking), budget, 0)
        assert transcript == found
        assert earned[number] == TASK.score(case, found, reward)
        # TRL asks once more where the budget is full, and keeps nothing of the answer.
        assert [*sampler.asked, *grpo.asked[number][len(sampler.asked) :][: number == 2]] == grpo.asked[number]
        opening = sampler.asked[0]
        heard = [ids for ids, mine in zip(completions[number], masks[number], strict=True) if not mine]
        answers = [results(tokenizer(), list(group), thinking) for group in groups_of(found)]
        assert tokenizer().decode(heard) == "".join(answers)
        whole = [*opening, *completions[number]]
        assert whole[: len(sampler.asked[-1])] == sampler.asked[-1]
    assert pairs[0][1] == read
    assert (earned[0].total, TASK.parse(read), read.stop) == (1.0, TASK.label(cases[0]), "answered")
    taught = to_pieces(
        tokenizer(), TASK.prompt(cases[0].facts), read, thinking, rollout.schemas(TASK), tokenizer().eos_token
    )
    ((ids, own),) = encode_pieces(tokenizer(), [taught])
    first = len(grpo.asked[0][0])
    assert (completions[0], masks[0]) == (ids[first:], list(own[first:]))
    stops = ["answered", "answered", *["max_tokens"] * 4, "max_turns", "answered"]
    assert [transcript.stop for _, transcript in pairs] == stops
    filled, over, cut = (pairs[number][1].messages for number in (2, 3, 4))
    assert (len(filled), filled[-1]) == (2, error)
    assert (len(over), over[0].calls) == (1, unknown.calls)
    assert "<tool_call>" in cut[-1].content  # cut within a call

    (line,) = [entry for entry in grpo.state.log_history if "loss" in entry]
    assert (line["served/easy"], line["served/hard"], line["phase"]) == (1.0, 0.0, 1.0)
    assert line["not_submitted/m"] == pytest.approx(7 / 8)
    assert line["malformed/m"] > 0
    if thinking:
        assert line["loss_path/gradient_gap"] < 1e-3  # with what tools returned masked: rounding alone
    assert line["tools/failure_frequency"] > 0
    after = trl.adapter_state(adapted)
    assert any(not (before[name] == after[name]).all() for name in before)


class Sampled(trl.Grpo):
    """TRL's loop, which keeps the prompts and the results that it asks a model with."""

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        self.asked.append([tokenizer().decode(ids) for ids in prompt_ids])
        call = write_turn(Message(role="assistant", content="", calls=(Call(name="x", arguments={}),)), False)
        text = f"Hm.\n</think>\n\n{call}" if self.thinking else call
        return [encode(tokenizer(), [text + tokenizer().eos_token])[0] for _ in prompt_ids], None


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*environment_factory.*:UserWarning")
@pytest.mark.parametrize("remark", ["", "{# ours #}"])
def test_each_step_is_played_in_its_own_mode(tmp_path, monkeypatch, remark):
    """Also by a chat template that TRL does not know, since it knows some byte by byte."""
    monkeypatch.setattr(trl, "Grpo", Sampled)
    own = copy.deepcopy(tokenizer())
    own.chat_template, own.response_template = own.chat_template + remark, None
    spec = training({"think": True, "direct": False}, steps=3)
    adapted = trl.start_adapter(model(), spec, None)
    modes = (("think", True), ("direct", False), ("think", True))
    rows = [Row(case, *each) for each in modes for case in CASES[:2]]
    grpo = trl.grpo_trainer(adapted, own, TASK, spec, rows, tmp_path, Judges(tmp_path))
    grpo.asked = []
    grpo.train()
    rounds = len(grpo.asked) // 3
    assert rounds > 1  # the calls are read, so their results are asked with
    for number, asked in enumerate(grpo.asked):
        thinks = modes[number // rounds][1]
        assert all(text.endswith("<think>\n" if thinks else "<think>\n\n</think>\n\n") for text in asked)
    logged = [entry for entry in grpo.state.log_history if "loss" in entry]
    assert [[name for name, _ in modes if f"reward/{name}" in entry] for entry in logged] == [
        ["think", "think"], ["direct"], ["think", "think"],
    ]  # fmt: skip
    assert all(entry["tools/call_frequency"] > 0 for entry in logged)


@pytest.mark.filterwarnings("ignore:.*environment_factory.*:UserWarning")
def test_a_step_of_two_modes_is_refused(tmp_path):
    spec = training({"think": True, "direct": False})
    adapted = trl.start_adapter(model(), spec, None)
    rows = [Row(CASES[0], "think", True), Row(CASES[1], "direct", False)]
    grpo = trl.grpo_trainer(adapted, tokenizer(), TASK, spec, rows, tmp_path, Judges(tmp_path))
    with pytest.raises(TrainingError, match="step 1 was served rows in the modes direct, think"):
        grpo.train()


@pytest.mark.long
def test_an_imitation_logs_what_each_step_served(tmp_path):
    hard = list(TASK.cases(2, 3, pool="train", mix="hard"))
    cases = [CASES[0], CASES[1], CASES[0], *hard, CASES[1]]
    phases = [
        {"share": 1 / 3, "slice": "level", "values": ["easy"]},
        {"share": 2 / 3, "slice": "level", "values": ["easy", "hard"]},
    ]
    spec = {
        "scale": "embedded", "seed": 1, "checkpoint_every": 9, "stream": {"phases": phases},
        "trainer": {"steps": 3, "batch": 2, "micro_batch": 1, "lr": 1.0e-3},
    }  # fmt: skip
    rows = [Taught(case, "m", False, TASK.gold(case, thinking=False)) for case in cases]
    sft = trl.sft_trainer(model(), tokenizer(), TASK, spec, rows, tmp_path)
    sft.train()
    logged = [entry for entry in sft.state.log_history if "loss" in entry]
    assert [entry["phase"] for entry in logged] == [1, 2, 2]
    assert [(entry["served/easy"], entry["served/hard"]) for entry in logged] == [(1.0, 0.0), (0.5, 0.5), (0.5, 0.5)]


def groups_of(transcript: Transcript):
    """The results of each turn's calls."""
    found = []
    for before, message in zip((None, *transcript.messages), transcript.messages, strict=False):
        if message.role == "tool":
            if before.role != "tool":
                found.append([])
            found[-1].append(message)
    return found


# Budgets of a turn, and what is kept between turns


def test_a_turn_ends_at_its_own_budget_and_the_episode_with_it():
    case = CASES[0]
    texts = texts_of(transcript_of(case, False), False)
    longest = max(len(text.split(" ")) for text in texts) + 1
    bounded = mode(False).model_copy(update={"turn_tokens": longest})
    (whole,) = rollout.run(script(texts), TASK, [case], bounded, 10**6, 0)
    assert whole.stop == "answered"
    (cut,) = rollout.run(script(texts), TASK, [case], bounded.model_copy(update={"turn_tokens": longest - 2}), 10**6, 0)
    assert (cut.stop, cut.messages[-1].calls) == ("max_tokens", ())
    assert cut.messages[:-1] == whole.messages[: len(cut.messages) - 1]


class Counting(Sampler):
    """Counts the tokens that the model reads in each pass."""

    def __init__(self, weights, **settings):
        super().__init__(weights, tokenizer(), **settings)
        self.read = 0
        weights.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, _, __, named):
        self.read += named["input_ids"].numel()


def test_at_full_scale_an_exam_reads_each_turn_once_and_says_the_same():
    torch.manual_seed(3)
    weights = model().eval()
    for parameter in weights.parameters():
        parameter.data *= 8  # so that greedy turns differ
    found = {}
    for scale in ("embedded", "full"):
        sampler = Counting(weights, scale=scale, max_tokens=10**6)
        ids = [sampler.opening(TASK.prompt(case.facts), rollout.schemas(TASK), False) for case in CASES[:3]]
        more = [[7, 8, 9, 10], [11], [12, 13]]
        for part in sampler.together([len(row) for row in ids], 60):
            assert part == [0, 1, 2] or scale == "full"
            asked = [list(ids[place]) for place in part]
            for turn in range(3):
                said = sampler.sample(
                    [Prompt("a", [], row) for row in asked], thinking=False, temperature=0.0, budget=6, seed=0
                )
                found.setdefault((scale, turn), []).extend(zip(part, [one.ids for one in said], strict=True))
                asked = [[*row, *one.ids, *more[place]] for row, one, place in zip(asked, said, part, strict=True)]
        found[scale] = sampler.read
    for turn in range(3):
        assert sorted(found["full", turn]) == sorted(found["embedded", turn])
    assert found["full"] < found["embedded"] / 2


@pytest.mark.filterwarnings("ignore:.*environment_factory.*:UserWarning")
@pytest.mark.parametrize(
    ("scale", "turn_tokens", "asked"),
    [("embedded", None, [400, 400, 400]), ("embedded", 50, [50, 50, 30]), ("full", None, [400, 300, 30]),
     ("full", 50, [50, 50, 30])],
)  # fmt: skip
def test_a_turn_in_training_is_asked_for_what_is_left(tmp_path, scale, turn_tokens, asked):
    spec = training({"m": False}, **({"turn_tokens": turn_tokens} if turn_tokens else {}))
    rows = [Row(case, "m", False) for case in CASES[:2]]
    grpo = trl.grpo_trainer(
        trl.start_adapter(model(), spec, None), tokenizer(), TASK, spec, rows, tmp_path, Judges(tmp_path)
    )
    grpo.scale = scale
    openings = [[5] * 20, [5] * 10 + [6]]
    turns = [openings, [[*openings[0], *[7] * 100], [*openings[1], *[7] * 350]], [[*openings[1], *[7] * 370]]]
    assert [grpo.turn_budget(prompts) for prompts in turns] == asked


@pytest.mark.filterwarnings("ignore:.*environment_factory.*:UserWarning")
@pytest.mark.parametrize("path", ["stock", "shared"])
def test_in_trl_s_loop_no_turn_is_longer_than_its_budget(tmp_path, path):
    spec = training({"m": False}, turn_tokens=12, max_completion=60, generation_path=path)
    rows = [Row(case, "m", False) for case in CASES[:2]]
    adapted = trl.start_adapter(model(), spec, None)
    grpo = trl.grpo_trainer(adapted, tokenizer(), TASK, spec, rows, tmp_path, Judges(tmp_path))
    grpo.scale, write, longest = "full", grpo._generate_part, []

    def measured(*arguments, **named):
        written = write(*arguments, **named)
        longest.append(max(map(len, written[0])))
        return written

    grpo._generate_part = measured
    grpo.train()
    assert grpo.turn_tokens == 12
    assert max(longest) == 12  # random weights end no turn
    (line,) = [entry for entry in grpo.state.log_history if "loss" in entry]
    assert line["completions/max_length"] == 12
