"""What a request may say, and that a stream is the answer in pieces."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionChunk

from clinrl.models.chat import read_turn
from clinrl.serving.protocol import Answer, Refusal, read, settled

CANARY = "Alice Smith, 61"
GOOD = {"model": "esi@champion", "messages": [{"role": "user", "content": "?"}]}
PIECES = st.sampled_from(["<think>", "</think>", "</thi", "nk>", "<", "\n", "\n\n", " ", "ANSWER: ESI 2", "é", ">"])


def said(events: list[bytes]) -> dict[str, str]:
    """What the pieces of a stream are together."""
    found = {"reasoning": "", "content": ""}
    for one in events:
        delta = ChatCompletionChunk.model_validate_json(one.removeprefix(b"data: ")).choices[0].delta
        for name in found:
            found[name] += getattr(delta, name, None) or ""
    return found


@given(st.lists(PIECES, max_size=12), st.booleans())
def test_the_pieces_of_a_stream_are_the_whole_answer(pieces: list[str], is_opened: bool) -> None:
    answer, text = Answer("v1", "0" * 64, 3), "".join(pieces)
    events = [
        one for end in range(len(text) + 1) for one in answer.more(settled(text[:end], is_opened))
    ]  # as its characters come
    turn = read_turn(text, is_opened)
    events += answer.more(turn)
    assert said(events) == {"reasoning": turn.thinking or "", "content": turn.content}


def test_a_stream_waits_for_no_more_than_a_tag_could_be() -> None:
    assert settled("The skin is hot", True).thinking == "The skin is hot"
    assert settled("The skin is hot\n</thi", True).thinking == "The skin is hot"
    assert settled("Hot.\n</think>\n\nANSWER", True).content == "ANSWER"
    assert settled("ANSWER", False).content == "ANSWER"
    assert settled("<thi", False).content == ""
    half = "38°".encode()[:-1].decode(errors="replace")
    assert settled(half, False).content == "38"


def test_a_stream_that_is_begun_anew_goes_on_or_ends_with_an_error() -> None:
    """As where a batch had no room in memory, and its requests are answered one by one."""
    for whole, is_same in (("ANSWER: ESI 2", True), ("ANSWER: ESI 3", False), ("ANS", False)):
        answer = Answer("v1", "0" * 64, 3)
        events = [*answer.more(settled("ANSWER: ESI", False)), *answer.more(settled("AN", False))]
        if is_same:
            events += answer.end(read_turn(whole, False), "answered", 5, with_usage=False)
            assert said(events[:-1])["content"] == whole
        else:
            events += answer.more(settled("ANSWER: ESI 2", False))
            with pytest.raises(Refusal, match="could not be written"):
                [*answer.end(read_turn(whole, False), "answered", 5, with_usage=False)]


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"tools": []}, "tools", "tools is not supported by this server"),
        ({"stop": CANARY}, "stop", "stop is not supported"),
        ({"logprobs": True}, "logprobs", "logprobs is not supported"),
        ({"n": 2}, "n", "n: Input should be 1"),
        ({"temperature": 2.5}, "temperature", "less than or equal to 2"),
        ({"temperature": 1e-38}, "temperature", "must be 0, or from 0.01 to 2"),
        ({"temperature": "0"}, "temperature", "valid number"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": True}, "max_tokens", "valid integer"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"seed": 2**63}, "seed", "less than"),
        ({"stream": "yes"}, "stream", "valid boolean"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": GOOD["messages"] * 65}, "messages", "at most 64 items"),
        ({"messages": [{"role": "tool", "content": CANARY}]}, "messages.0.role", "'system', 'user' or 'assistant'"),
        ({"messages": [{"role": "user", "content": CANARY, "name": "a"}]}, "messages.0.name", "is not supported"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": CANARY}}]}]},
            "messages.0.content.str", "valid string",
        ),
        ({"chat_template_kwargs": {"enable_thinking": True, "tools": 1}}, "chat_template_kwargs.tools", "supported"),
        ({"chat_template_kwargs": {"enable_thinking": CANARY}}, "chat_template_kwargs.enable_thinking", "boolean"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_its_name(change: dict[str, object], param: str, says: str) -> None:
    with pytest.raises(Refusal) as refused:
        read(json.dumps(GOOD | change).encode())
    assert (refused.value.status, refused.value.param) == (400, param)
    assert says in refused.value.message
    assert CANARY not in refused.value.message


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"[" * 5000, b'{"model": "a"}', b"NaN"])
def test_what_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(Refusal, match=r"body|messages"):
        read(body)


def test_null_is_as_absent_and_parts_of_text_are_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    ask = read(json.dumps(GOOD | {"seed": None, "messages": [{"role": "user", "content": parts}]}).encode())
    assert (ask.seed, ask.messages[0].message.content) == (None, "a\nb")
    ask = read(json.dumps(GOOD | {"stop": None, "max_tokens": 5, "max_completion_tokens": 9}).encode())
    assert ask.most == 5
