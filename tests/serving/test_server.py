"""The server as clients have it: OpenAI's own, unmodified, and whoever sends something else."""

import json
import logging
import shutil
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from answering import Running, exam, prompts, running
from openai.types.chat import ChatCompletion
from starlette.testclient import TestClient

import exhibits
from clinrl.cli import main as cli
from clinrl.errors import OutOfMemory, Refused
from clinrl.models.chat import read_turn
from clinrl.registry import versions
from clinrl.runtime import guard
from clinrl.runtime.guard import Fence
from clinrl.serving import backends, server
from clinrl.serving.server import Bounds
from clinrl.tracking.mlflow_store import connect
from processes import eventually

ROOT = Path(__file__).parents[2]
CANARY = "Alice Smith, 61, chest pain since noon"
CANDIDATE = "esi@candidate"


def thinks(wanted: bool) -> dict[str, Any]:
    return {"extra_body": {"chat_template_kwargs": {"enable_thinking": wanted}}}


def body(**changes: Any) -> dict[str, Any]:
    return {"model": CANDIDATE, "messages": [{"role": "user", "content": "Chest pain."}]} | changes


def health(one: Running) -> dict[str, tuple[int, str]]:
    """Whether requests are sent to a server, and whether it is left running."""
    paths = "/health", "/health/live"
    answers = [httpx.get(one.url.replace("/v1", path), timeout=60) for path in paths]
    return {path: (one.status_code, one.json()["status"]) for path, one in zip(paths, answers, strict=True)}


@contextmanager
def held(one: Running, fault: Exception | None = None):
    """While it lasts, the candidate waits before it writes, or fails. Gives when it waits, and what lets it go on."""
    sampler, entered, going = one.live.names[CANDIDATE].sampler, threading.Event(), threading.Event()
    write = sampler.sample

    def slow(*given: Any, **how: Any) -> Any:
        entered.set()
        assert going.wait(60)
        if fault is not None:
            raise fault
        return write(*given, **how)

    sampler.sample = slow
    try:
        yield entered, going
    finally:
        going.set()
        del sampler.sample


# What is answered


@pytest.mark.long
@pytest.mark.parametrize("thinking", [True, False])
def test_the_answer_is_that_of_the_exam_whole_and_in_pieces_alone_and_together(served: Running, thinking: bool) -> None:
    sampler, written = exam(exhibits.params(), "v2", 4, thinking=thinking)
    turns = [read_turn(one.text, sampler.opens(thinking)) for one in written]
    expected = [(turn.thinking, turn.content, one.tokens, one.stop) for turn, one in zip(turns, written, strict=True)]
    stops = {"stop": "answered", "length": "max_tokens"}

    def whole(messages: Any) -> Any:
        one = served.client.chat.completions.create(model=CANDIDATE, messages=messages, **thinks(thinking))
        (choice,) = one.choices
        found = getattr(choice.message, "reasoning", None), choice.message.content
        return (*found, one.usage.completion_tokens, stops[choice.finish_reason])

    def pieces(messages: Any) -> Any:
        found, usage, reason = {"reasoning": "", "content": ""}, None, None
        with served.client.chat.completions.create(
            model=CANDIDATE, messages=messages, stream=True, stream_options={"include_usage": True}, **thinks(thinking)
        ) as chunks:
            for chunk in chunks:
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    reason = choice.finish_reason or reason
                    for name in found:
                        found[name] += getattr(choice.delta, name, None) or ""
        return (found["reasoning"] if thinking else None, found["content"], usage.completion_tokens, stops[reason])

    asked = prompts(4)
    assert [whole(messages) for messages in asked] == expected
    assert [pieces(messages) for messages in asked] == expected
    with ThreadPoolExecutor(8) as pool:
        both = [pool.submit(ask, messages) for messages in asked for ask in (whole, pieces)]
        assert [one.result() for one in both] == [one for one in expected for _ in range(2)]
    assert any(turn.thinking or turn.content for turn in turns)


def test_an_answer_names_its_version_and_the_adapter_that_wrote_it(served: Running) -> None:
    raw = httpx.post(f"{served.url}/chat/completions", json=body(max_completion_tokens=4))
    assert set(raw.json()) == {"id", "object", "created", "model", "system_fingerprint", "choices", "usage"}
    one = ChatCompletion.model_validate(raw.json(), strict=True)
    assert (one.model, one.system_fingerprint) == ("v2", served.live.names["v2"].served.digest)
    assert served.client.chat.completions.create(model="v2", messages=prompts(1)[0], max_tokens=4).model == "v2"


def test_a_stream_is_told_token_by_token(served: Running) -> None:
    chunks = served.client.chat.completions.create(
        model=CANDIDATE, messages=prompts(1)[0], stream=True, max_tokens=20, temperature=1.0, **thinks(False)
    )
    assert sum(bool(chunk.choices[0].delta.content) for chunk in chunks) > 3


def test_what_is_drawn_follows_from_the_seed_alone(served: Running) -> None:
    how = {"model": CANDIDATE, "messages": prompts(1)[0], "temperature": 1.5, "max_tokens": 20, **thinks(False)}

    def drawn(seed: int) -> str:
        return served.client.chat.completions.create(seed=seed, **how).choices[0].message.content

    with ThreadPoolExecutor(6) as pool:
        found = [*pool.map(drawn, [1, 2, 3, 1, 2, 3])]
    assert found[:3] == found[3:]
    assert len(set(found)) > 1


def test_the_models_are_listed(served: Running) -> None:
    assert [one.id for one in served.client.models.list()] == [CANDIDATE, "v2"]
    assert served.client.models.retrieve("v2").owned_by == "clinrl"
    with pytest.raises(openai.NotFoundError, match="there is no such model; there are esi@candidate, v2"):
        served.client.models.retrieve("v1")
    assert httpx.get(served.url.replace("/v1", "/health")).json() == {"status": "ok"}


def test_other_versions_answer_while_a_model_is_read(project: Any, monkeypatch: Any, tmp_path: Path) -> None:
    """As large as it likes. Reading draws no number, on which drawn answers would depend."""
    read, entered, going = backends.bases.open_base, threading.Event(), threading.Event()

    def slowly(folder: Path, **how: Any) -> Any:
        entered.set()
        assert going.wait(60)
        return read(folder, **how)

    with running(project) as one, ThreadPoolExecutor(1) as pool:
        held = one.live.names[CANDIDATE]
        (base,) = held.folder.rglob("base")
        shutil.copytree(base, tmp_path / "full/merged")
        full = held.served.model_copy(update={"form": "merged", "digest": "f" * 64})
        monkeypatch.setattr(backends.bases, "open_base", slowly)
        before = torch.get_rng_state()
        opening = pool.submit(one.service._backend.open, full, tmp_path / "full")
        try:
            assert entered.wait(60)
            answer = httpx.post(f"{one.url}/chat/completions", json=body(max_tokens=2), timeout=30)
            assert (answer.status_code, answer.json()["model"]) == (200, "v2")
        finally:
            going.set()
        assert opening.result(60).model is not held.sampler.model
        assert torch.equal(torch.get_rng_state(), before)


# What is said of the server itself


def test_where_no_version_has_a_name_no_request_is_sent_and_nothing_is_started_anew(project: Any) -> None:
    with running(project) as one:
        assert health(one) == {"/health": (200, "ok"), "/health/live": (200, "ok")}
        with connect() as client:
            client.delete_registered_model_alias("esi", "candidate")
        one.live.renew()
        assert health(one) == {"/health": (503, "nothing is served"), "/health/live": (200, "ok")}
        answer = httpx.post(f"{one.url}/chat/completions", json=body())
        assert (answer.status_code, answer.json()["error"]["message"][-14:]) == (404, "there are none")
        versions.point("esi", "candidate", versions.find("esi", "v2"))
        one.live.renew()
        assert health(one)["/health"] == (200, "ok")


@pytest.mark.long
def test_a_candidate_that_fails_beside_a_sound_champion_ends_nothing(released: Any) -> None:
    versions.point("esi", "candidate", versions.find("esi", "v2"))
    with running(released) as one:
        assert {"esi@champion", CANDIDATE} <= {*one.live.names}
        with held(one, RuntimeError("CUDA error: an illegal memory access was encountered")) as (_, going):
            going.set()
            asked = [httpx.post(f"{one.url}/chat/completions", json=body()) for _ in range(backends.FAILURES)]
        assert {answer.status_code for answer in asked} == {500}
        assert health(one)["/health/live"] == (200, "ok")


@pytest.mark.long
def test_a_process_that_fails_again_and_again_is_to_be_started_anew_and_an_answer_clears_it(served: Running) -> None:
    def ask() -> int:
        return httpx.post(f"{served.url}/chat/completions", json=body(max_tokens=1), timeout=60).status_code

    for faults, status in ((backends.FAILURES - 1, 200), (backends.FAILURES, 503)):
        with held(served, RuntimeError("CUDA error: an illegal memory access was encountered")) as (_, going):
            going.set()
            assert {ask() for _ in range(faults)} == {500}
        assert health(served)["/health/live"][0] == status
        assert ask() == 200
        assert health(served)["/health/live"] == (200, "ok")
    with held(served, OutOfMemory("a request that is too long for the memory")) as (_, going):
        going.set()
        assert {ask() for _ in range(backends.FAILURES)} == {503}
    assert health(served)["/health/live"] == (200, "ok"), "the request's fault"


# What is refused


@pytest.mark.parametrize(
    ("change", "status", "code", "says"),
    [
        ({"model": "esi@champion"}, 404, "model_not_found", "there are esi@candidate, v2"),
        ({"model": "../v2"}, 404, "model_not_found", "no such model"),
        ({"tools": []}, 400, "unsupported_parameter", "tools is not supported"),
        ({"messages": [{"role": "user", "content": "a <|im_end|> b"}]}, 400, None, "messages.0 holds a mark"),
        ({"messages": [{"role": "user", "content": "a </think> b"}]}, 400, None, "holds a mark"),
        ({"messages": [{"role": "user", "content": "pain " * 900}]}, 400, "context_length_exceeded", "leaves 0 for an"),
        ({"max_tokens": 257}, 400, None, "an answer may have at most 256 tokens (--tokens of the server), not 257"),
        ({"messages": [{"role": "assistant", "content": "?"}]}, 400, None, "does not take turns of these roles"),
    ],
)  # fmt: skip
def test_a_refusal_is_an_error_of_openai_s(
    served: Running, change: dict[str, Any], status: int, code: str | None, says: str
) -> None:
    answer = httpx.post(f"{served.url}/chat/completions", json=body(**change))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code)
    assert says in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


def test_bodies_routes_hosts_and_pages_of_others_are_refused_alike(served: Running) -> None:
    url = f"{served.url}/chat/completions"
    refused = [
        (413, httpx.post(url, content=b" " * (server.BODY_BYTES + 1))),
        (404, httpx.get(f"{served.url}/embeddings")),
        (404, httpx.post(f"{url}%0A", json=body())),
        (404, httpx.post(f"{url}/", json=body())),
        (405, httpx.get(url)),
        (403, httpx.post(url, json=body(), headers={"Origin": "http://evil.example"})),
        (403, httpx.post(url, json=body(), headers={"Host": "evil.example"})),
    ]
    for status, answer in refused:
        assert (answer.status_code, set(answer.json())) == (status, {"error"})
    assert refused[4][1].headers["allow"] == "POST"


def test_an_answer_may_come_back_as_history(served: Running) -> None:
    asked = prompts(1)[0]
    first = served.client.chat.completions.create(model="v2", messages=asked, max_tokens=4)
    message = first.choices[0].message
    for history in (message, message.model_dump()):  # the second with nulls
        both: Any = [*asked, history, {"role": "user", "content": "And now?"}]
        assert served.client.chat.completions.create(model="v2", messages=both, max_tokens=4).model == "v2"


@pytest.mark.long
def test_without_the_token_nobody_is_answered(project: Any) -> None:
    token = "a-token-of-some-length"
    with running(project, token=token) as one:
        assert one.client.chat.completions.create(model="v2", messages=prompts(1)[0], max_tokens=2).model == "v2"
        for key in ("another-token-of-length", token[:-1], "ä", token + " x"):
            headers = [(b"authorization", f"Bearer {key}".encode())]
            answer = httpx.post(f"{one.url}/chat/completions", json=body(), headers=headers)
            assert (answer.status_code, answer.headers["www-authenticate"][:6]) == (401, "Bearer")
            assert answer.json()["error"]["type"] == "authentication_error"
        assert httpx.get(f"{one.url}/models").status_code == 401
        assert httpx.get(f"{one.url.removesuffix('/v1')}/health").status_code == 401
        assert httpx.get(f"{one.url}/models", auth=("clinrl", token)).status_code == 401


def test_another_host_needs_a_token_that_is_one(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.delenv(server.TOKEN, raising=False)
    assert server._token("127.0.0.1") is None
    with pytest.raises(Refused, match=r"0\.0\.0\.0 can be reached from elsewhere: set CLINRL_SERVE_TOKEN to a token"):
        server._token("0.0.0.0")
    for token in ("short", "with spaces in the middle of it", "ü" * 30):
        monkeypatch.setenv(server.TOKEN, token)
        with pytest.raises(Refused, match="must be 20 or more printable ASCII characters") as refused:
            server._token("0.0.0.0")
        assert token not in str(refused.value)
    monkeypatch.setenv(server.TOKEN, "t" * 20)
    assert server._token("127.0.0.1") == server._token("0.0.0.0") == "t" * 20
    monkeypatch.chdir(ROOT)
    assert cli.main(["serve", "audit"]) == 1
    assert (
        "audit is played with tools, which are not served; `clinrl openenv audit` serves it" in capsys.readouterr().err
    )
    assert cli.main(["serve", "esi-v49"]) == 2


@pytest.mark.long
def test_who_comes_when_all_places_are_taken_is_told_when_to_ask_again(project: Any) -> None:
    bounds = Bounds(at_once=1, queue=1, tokens=8, request_s=60.0)
    with running(project, bounds=bounds) as one, held(one) as (entered, going), ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(httpx.post, f"{one.url}/chat/completions", json=body(), timeout=60) for _ in range(2)]
        assert entered.wait(60)
        eventually(lambda: one.service.in_flight == 2)
        full = httpx.post(f"{one.url}/chat/completions", json=body())
        assert (full.status_code, full.headers["retry-after"]) == (429, "1")
        assert full.json()["error"]["code"] == "rate_limit_exceeded"
        assert httpx.get(f"{one.url}/models").status_code == 200
        going.set()
        assert [answer.result().status_code for answer in waiting] == [200, 200]


@pytest.mark.long
def test_an_answer_that_takes_too_long_or_that_nobody_waits_for_is_given_up(project: Any) -> None:
    bounds = Bounds(at_once=1, queue=8, tokens=8, request_s=0.5)
    with running(project, bounds=bounds) as one:
        with held(one):
            late = httpx.post(f"{one.url}/chat/completions", json=body(), timeout=60)
            message = late.json()["error"]["message"]
            assert (late.status_code, message) == (408, "A request may take at most 0.5 seconds.")
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{one.url}/chat/completions", json=body(), timeout=0.1)
        eventually(lambda: not one.service.in_flight)

        def is_answered() -> bool:  # by a real model, which a busy machine may make as late
            return httpx.post(f"{one.url}/chat/completions", json=body(max_tokens=1), timeout=60).status_code == 200

        eventually(is_answered, 60)


def test_a_failure_is_told_and_the_next_request_is_answered(served: Running) -> None:
    with held(served, ValueError(CANARY)) as (_, going):
        going.set()
        whole = httpx.post(f"{served.url}/chat/completions", json=body())
        assert (whole.status_code, whole.json()["error"]["type"]) == (500, "server_error")
        with pytest.raises(openai.APIError, match="the answer could not be written"):
            [*served.client.chat.completions.create(**body(), stream=True)]
    with held(served, OutOfMemory("out of memory in an answer; set exam_tokens")) as (_, going):
        going.set()
        whole = httpx.post(f"{served.url}/chat/completions", json=body())
        assert (whole.status_code, whole.json()["error"]["message"][:34]) == (503, "there is no memory for this answer")
    assert httpx.post(f"{served.url}/chat/completions", json=body(max_tokens=2)).status_code == 200


@pytest.mark.long
def test_every_request_for_an_answer_leaves_one_line_with_its_status(project: Any, capfd: Any) -> None:
    bounds, token = Bounds(at_once=1, queue=0, tokens=8, request_s=2.0), "a-token-of-some-length"
    with running(project, token=token, bounds=bounds) as one, ThreadPoolExecutor(1) as pool:
        url, expected = f"{one.url}/chat/completions", []

        def ask(status: int, route: str = url, **how: Any) -> httpx.Response:
            how = {"json": body(max_tokens=1), "headers": {"Authorization": f"Bearer {token}"}} | how
            answer = httpx.post(route, timeout=60, **how)
            assert answer.status_code == status
            expected.append(f"{'chat' if route == url else 'other'} {status}")
            return answer

        ask(200)
        ask(401, headers={})
        ask(401, f"{one.url}/models", headers={})
        ask(403, headers={"Host": "evil.example"})
        ask(413, json=None, content=b" " * (server.BODY_BYTES + 1))
        ask(400, json={})
        ask(404, f"{url}%0A")
        with held(one) as (entered, _):
            late = pool.submit(ask, 408)
            assert entered.wait(60)
            ask(429)
            one.service.is_draining = True
            ask(503)
            one.service.is_draining = False
            late.result()
            said = ask(200, json=body(stream=True)).text
            assert json.loads(said.split("data: ")[-1])["error"]["message"] == "A request may take at most 2 seconds."
        with socket.create_connection((httpx.URL(url).host, httpx.URL(url).port)) as gone:
            head = f"POST {server.CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n"
            gone.sendall(f"{head}Content-Length: 9\r\n\r\n{{".encode())
        expected.append("chat dropped")
        assert httpx.get(f"{one.url}/models", headers={"Authorization": f"Bearer {token}"}).status_code == 200
        found = list[str]()

        def lines() -> list[str]:
            found.extend(line.split("clinrl: ")[1] for line in capfd.readouterr().err.splitlines() if " s=" in line)
            return found

        eventually(lambda: len(lines()) >= len(expected))
    assert sorted(" ".join(line.split()[:2]) for line in found) == sorted(expected)


@pytest.mark.long
def test_nothing_that_a_client_sends_is_written_down(served: Running, capfd: Any, caplog: Any) -> None:
    caplog.set_level(logging.DEBUG)
    url = f"{served.url}/chat/completions"
    turn = [{"role": "user", "content": CANARY}]
    httpx.post(url, json=body(messages=turn))
    httpx.post(url, json=body(messages=turn, stream=True))
    for change in (
        {"messages": [{"role": "user", "content": f"{CANARY} <|im_end|>"}]},
        {"messages": [{"role": "assistant", "content": CANARY}]},
        {"messages": [{"role": "user", "content": CANARY * 100}]},
        {"model": CANARY}, {CANARY: 1}, {"temperature": CANARY}, {"stop": CANARY},
    ):  # fmt: skip
        assert httpx.post(url, json=body(**change)).status_code >= 400
    httpx.post(url, content=CANARY)
    httpx.get(f"{served.url}/models/{CANARY}")
    httpx.get(f"{served.url}/{CANARY}", headers={"User-Agent": CANARY})
    with held(served, ValueError(CANARY)) as (_, going):
        going.set()
        httpx.post(url, json=body(messages=turn))
    fence = server.logged(Fence(served.service))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "read", lambda _: (_ for _ in ()).throw(RuntimeError(CANARY)))
        failed = TestClient(fence, base_url="http://localhost").post("/v1/chat/completions")
        assert (failed.status_code, failed.json()["error"]["message"]) == (500, "this server failed")
    own = [record.getMessage() for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    said = "".join([*capfd.readouterr(), *own])
    assert "chat 200 version=v2 prompt_tokens=" in said
    assert "a fault: RuntimeError" in said
    assert "Alice" not in said


def test_what_is_being_stopped_lets_nothing_new_in_and_ends_what_runs(project: Any) -> None:
    with running(project) as one, held(one) as (entered, going), ThreadPoolExecutor(1) as pool:
        runs = pool.submit(httpx.post, f"{one.url}/chat/completions", json=body(max_tokens=2), timeout=60)
        assert entered.wait(60)
        one.service.is_draining = True
        new = httpx.post(f"{one.url}/chat/completions", json=body())
        assert (new.status_code, new.headers["retry-after"]) == (503, "5")
        assert httpx.get(one.url.replace("/v1", "/health")).status_code == 503
        going.set()
        assert runs.result().status_code == 200


@pytest.mark.long
def test_a_second_signal_ends_what_runs_with_an_error(project: Any) -> None:
    with running(project) as one, held(one) as (entered, _), ThreadPoolExecutor(2) as pool:
        url = f"{one.url}/chat/completions"
        stream, whole = (pool.submit(httpx.post, url, json=body(stream=how), timeout=60) for how in (True, False))
        assert entered.wait(60)
        eventually(lambda: one.service.in_flight == 2)
        for _ in range(2):
            one.server.handle_exit(signal.SIGTERM, None)
        answers = stream.result(), whole.result()
        assert [answer.status_code for answer in answers] == [200, 503]
        for answer in answers:
            assert json.loads(answer.text.split("data: ")[-1])["error"]["message"] == guard.STOPPED
