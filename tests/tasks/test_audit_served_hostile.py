"""The served audit and whoever means it ill: odd requests, long ones, pages of other origins, too many sessions."""

import json
from collections.abc import Iterator
from random import Random
from typing import Any

import httpx
import pytest

from clinrl.cli import main as cli

pytest.importorskip("openenv", reason="OpenEnv is an optional extra")

from starlette.testclient import TestClient
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from oddities import CASES, Served, odd, request, served
from processes import eventually

REQUESTS = 300
COST_S = 1.0
"""Seconds of processor time that any request may cost the server. A busy machine answers later, and no dearer."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("served") / "log") as found:
        yield found


@pytest.mark.long
def test_no_request_breaks_the_server_or_keeps_it_busy(server: Served) -> None:
    rng = Random(7)
    seen: set[int] = set()
    dearest = 0.0
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for _ in range(REQUESTS):
            method, path, content, kind = request(rng)
            before = server.cost_s()
            answer = client.request(method, path, content=content, headers={"Content-Type": kind})
            dearest = max(dearest, server.cost_s() - before)
            seen.add(answer.status_code)
            assert answer.status_code < 500 or answer.status_code == 501, (method, path, content[:300], answer.text)
            if answer.status_code >= 400 and answer.status_code not in (404, 405):
                assert isinstance(answer.json()["detail"], str), (path, answer.text)
                assert len(answer.content) < 2_000
    assert {200, 413, 422} <= seen
    assert dearest < COST_S
    assert server.log.read_text() == ""


@pytest.mark.long
def test_no_message_breaks_a_session_for_others(server: Served) -> None:
    rng = Random(8)
    socket, other = connect(server.socket), connect(server.socket)
    other.send(json.dumps({"type": "reset", "data": {"seed": 1}}))
    begun = other.recv(timeout=60)
    for _ in range(REQUESTS):
        kind = rng.choice(["reset", "step", "state", "mcp", "close", "", 3])
        message = json.dumps({"type": kind, "data": odd(rng)} if rng.random() < 0.8 else odd(rng))
        before = server.cost_s()
        try:
            socket.send(message if rng.random() < 0.95 else rng.choice(["{", "[" * 20_000, "x" * 70_000, "\x00"]))
            socket.recv(timeout=60)
        except ConnectionClosed:
            socket = connect(server.socket)
        assert server.cost_s() - before < COST_S
    socket.close()
    other.send(json.dumps({"type": "reset", "data": {"seed": 1}}))
    assert other.recv(timeout=60) == begun
    other.close()
    assert "Traceback" not in server.log.read_text()
    assert httpx.post(f"{server.url}/reset", json={"seed": 1}).status_code == 200


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"index": CASES}, "index: Input should be less than 200"),
        ({"index": 10_000}, "index: Input should be less than 200"),
        ({"seed": -1}, "body.seed: Input should be greater than or equal to 0"),
        ({"level": "extreme", "index": "x"}, "index: Input should be a valid integer"),
        ({"levle": "easy"}, "levle: Extra inputs are not permitted"),
        ({"pool": "exam"}, "pool: the exam is closed; start the server with --open-exam to open it"),
    ],
)
def test_a_reset_that_asks_for_too_much_is_refused_at_once(
    server: Served, options: dict[str, Any], sentence: str
) -> None:
    before = server.cost_s()
    answer = httpx.post(f"{server.url}/reset", json=options)
    assert server.cost_s() - before < COST_S
    assert (answer.status_code, answer.json()["detail"].startswith(sentence)) == (422, True), answer.text


def test_the_last_case_is_served_in_time(server: Served) -> None:
    before = server.cost_s()
    options = {"seed": 3, "index": CASES - 1, "level": "published"}
    assert httpx.post(f"{server.url}/reset", json=options, timeout=60).status_code == 200
    assert server.cost_s() - before < COST_S


def test_the_exam_is_opened_on_purpose_and_loudly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[Any] = []
    monkeypatch.setattr("uvicorn.Server.run", lambda served, sockets: opened.append(served.config.app))
    assert cli.main(["openenv", "audit", "--port", "0", "--open-exam"]) == 0
    assert capsys.readouterr().err.startswith("clinrl: THE EXAM IS OPEN: ")
    with TestClient(opened[0], base_url="http://localhost") as client:
        assert client.post("/reset", json={"pool": "exam", "seed": 1}).status_code == 200


def test_pages_of_other_origins_and_other_names_are_refused(server: Served) -> None:
    for headers in ({"Origin": "http://127.0.0.1:1"}, {"Host": "evil.example"}, {"Sec-Fetch-Site": "same-site"}):
        assert httpx.post(f"{server.url}/reset", json={}, headers=headers).status_code == 403
    with pytest.raises(InvalidStatus, match="HTTP 403"):
        connect(server.socket, additional_headers={"Origin": "http://evil.example"})


def test_sessions_beyond_the_limit_are_told_so_and_come_in_when_one_has_ended(server: Served) -> None:
    held = [connect(server.socket) for _ in range(3)]
    for socket in held:
        socket.send('{"type": "state"}')
        assert json.loads(socket.recv())["type"] == "state"
    with connect(server.socket) as one_more:
        refusal = json.loads(one_more.recv(timeout=60))
        assert (refusal["type"], refusal["data"]["code"]) == ("error", "CAPACITY_REACHED")
    held.pop().close()

    def comes_in() -> bool:
        with connect(server.socket) as again:
            again.send('{"type": "state"}')
            return bool(json.loads(again.recv(timeout=60))["type"] == "state")

    eventually(comes_in, 60)
    for socket in held:
        socket.close()
    assert "Traceback" not in server.log.read_text()
