"""The fence in front of a real server: what passes, and what never arrives."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, nullcontext
from http.client import HTTPConnection
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from clinrl.errors import Refused
from clinrl.runtime import guard
from clinrl.runtime.guard import Fence, Impatient, ImpatientSocket, Limits, listen
from processes import eventually

LIMITS = Limits(body_bytes=1000, request_s=60, idle_s=60)
ARRIVED: list[str] = []


async def echo(request: Request) -> PlainTextResponse:
    ARRIVED.append(request.method)
    body = await request.body()
    await asyncio.sleep(float(request.query_params.get("sleep", 0)))
    return PlainTextResponse(str(len(body)))


async def talk(socket: WebSocket) -> None:
    ARRIVED.append("WS")
    await socket.accept()
    async for text in socket.iter_text():
        await socket.send_text(text)


def app() -> Starlette:
    return Starlette(routes=[Route("/", echo, methods=["GET", "POST"]), WebSocketRoute("/ws", talk)])


def served(fence: Fence, **more: Any) -> Iterator[str]:
    """The address of a fence on a free port of loopback."""
    server = uvicorn.Server(uvicorn.Config(fence, port=0, log_level="error", **more))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        threading.Event().wait(0.01)
    host, port = server.servers[0].sockets[0].getsockname()
    try:
        yield f"{host}:{port}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def place() -> Iterator[str]:
    yield from served(Fence(app(), names=["triage.example"], limits=LIMITS))


@pytest.fixture(scope="module")
def hurried() -> Iterator[str]:
    yield from served(Fence(app(), limits=LIMITS._replace(request_s=0.5, idle_s=0.3)))


@pytest.fixture(scope="module")
def locked() -> Iterator[str]:
    yield from served(Fence(app(), login="clinrl:long-password"))


@pytest.fixture(scope="module")
def inviting() -> Iterator[str]:
    invitation = {"Access-Control-Allow-Origin": "*", "Access-Control-Allow-Credentials": "true"}
    yield from served(Fence(PlainTextResponse("read me", headers=invitation)))


@pytest.fixture(autouse=True)
def nothing_arrived() -> None:
    ARRIVED.clear()


@pytest.mark.long
def test_the_fence_that_vllm_takes_by_name_asks_for_its_key_at_every_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "k" * 40)
    with contextmanager(served)(guard.EngineFence(app())) as place:
        asked = [
            httpx.request(method, f"http://{place}/", headers=headers).status_code
            for method in ("GET", "POST", "OPTIONS")
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Bearer {'k' * 40}"})
        ]
    assert asked == [401, 401, 200, 401, 401, 200, 401, 401, 405]
    assert ARRIVED == ["GET", "POST"]


NAVIGATION = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "headers"),
    [
        ("POST", {}),
        ("POST", {"Host": "localhost:{port}"}),
        ("POST", {"Host": "LOCALHOST:{port}", "Origin": "http://localhost:{port}"}),
        ("POST", {"Host": "triage.example"}),
        ("POST", {"Host": "triage.example", "Origin": "https://triage.example"}),
        ("POST", {"Origin": "http://127.0.0.1:{port}", "Sec-Fetch-Site": "same-origin"}),
        ("GET", {"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate"}),
        ("GET", NAVIGATION),
    ],
)
def test_scripts_and_own_pages_get_in(place: str, method: str, headers: dict[str, str]) -> None:
    headers = {name: value.format(port=place.split(":")[1]) for name, value in headers.items()}
    answer = httpx.request(method, f"http://{place}/", headers=headers)
    assert (answer.status_code, ARRIVED) == (200, [method])
    assert "frame-ancestors 'self'" in answer.headers["content-security-policy"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "headers"),
    [
        ("GET", {"Host": "evil.example"}),
        ("GET", {"Host": "evil.example:{port}"}),
        ("GET", {"Host": "127.0.0.1.evil.example:{port}"}),
        ("GET", {"Host": "localhost@evil.example"}),
        ("GET", {"Host": "triage.example.evil.example"}),
        ("GET", {"Host": "[::1"}),
        ("GET", {"Host": ""}),
        ("GET", {"Host": "192.168.1.7"}),
        ("POST", {"Origin": "http://evil.example"}),
        ("POST", {"Origin": "null"}),
        ("POST", {"Origin": "http://127.0.0.1:1"}),
        ("POST", {"Origin": "http://localhost:{port}"}),
        ("POST", {"Origin": "file://"}),
        ("GET", {"Origin": "http://evil.example"}),
        ("OPTIONS", {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}),
        ("POST", {"Sec-Fetch-Site": "same-site"}),
        ("POST", NAVIGATION),
        ("GET", {**NAVIGATION, "Sec-Fetch-Dest": "iframe"}),
        ("GET", {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}),
    ],
)
def test_other_names_and_pages_of_other_origins_stay_out(place: str, method: str, headers: dict[str, str]) -> None:
    headers = {name: value.format(port=place.split(":")[1]) for name, value in headers.items()}
    answer = httpx.request(method, f"http://{place}/", headers=headers)
    assert (answer.status_code, ARRIVED) in ((403, []), (400, []))  # 400: not HTTP, as uvicorn sees it
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_a_second_host_header_is_refused(place: str) -> None:
    connection = HTTPConnection(place)
    connection.putrequest("GET", "/", skip_host=True)
    for host in (place, "evil.example"):
        connection.putheader("Host", host)
    connection.endheaders()
    assert connection.getresponse().status in (400, 403)
    assert ARRIVED == []
    connection.close()


def test_a_websocket_is_asked_for_the_same(place: str) -> None:
    with connect(f"ws://{place}/ws") as socket:
        socket.send("hello")
        assert socket.recv() == "hello"
    for headers in ({"Origin": "http://evil.example"}, {"Origin": "null"}):
        with pytest.raises(InvalidStatus, match="HTTP 403"):
            connect(f"ws://{place}/ws", additional_headers=headers)
    assert ARRIVED == ["WS"]


@pytest.mark.parametrize("login", [None, ("clinrl", ""), ("clinrl", "long-passwor"), ("admin", "long-password")])
def test_without_the_password_nobody_gets_in(locked: str, login: tuple[str, str] | None) -> None:
    answer = httpx.post(f"http://{locked}/", auth=login)
    assert (answer.status_code, answer.headers["www-authenticate"][:5], ARRIVED) == (401, "Basic", [])
    assert httpx.post(f"http://{locked}/", auth=("clinrl", "long-password")).status_code == 200


@pytest.mark.parametrize("header", ["Basic", "Basic ä", "Bearer long-password", "Basic Y2xpbnJs\xff", ":", "a b c"])
def test_a_password_that_cannot_be_read_is_none(locked: str, header: str) -> None:
    answer = httpx.get(f"http://{locked}/", headers=[(b"Authorization", header.encode())])
    assert (answer.status_code, ARRIVED) == (401, [])


def test_a_body_that_is_too_long_is_not_read_to_its_end(place: str) -> None:
    assert httpx.post(f"http://{place}/", content=b"x" * 1000).text == "1000"
    said = httpx.post(f"http://{place}/", content=(b"x" * 500 for _ in range(3)))
    assert (said.status_code, said.json()) == (413, {"detail": "A request may have at most 1,000 bytes."})
    assert ARRIVED == ["POST"]


def test_a_request_that_takes_too_long_ends(hurried: str) -> None:
    said = httpx.get(f"http://{hurried}/?sleep=600", timeout=60)
    assert (said.status_code, said.json()) == (408, {"detail": "A request may take at most 0.5 seconds."})


@pytest.mark.parametrize(("kind", "is_told"), [("text/event-stream", True), ("text/plain", False)])
def test_a_stream_that_takes_too_long_says_so_before_it_ends(kind: str, is_told: bool) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        await asyncio.sleep(600)

    fence = Fence(StreamingResponse(pieces(), media_type=kind), limits=LIMITS._replace(request_s=0.5))
    said = b""
    with (
        contextmanager(served)(fence) as place,
        httpx.stream("GET", f"http://{place}/", timeout=60) as answer,
        nullcontext() if is_told else pytest.raises(httpx.RemoteProtocolError),
    ):
        for piece in answer.iter_raw():
            said += piece
    ends = b'data: {"detail":"A request may take at most 0.5 seconds."}\n\n' if is_told else b""
    assert (answer.status_code, said) == (200, b"data: 1\n\n" + ends)


def test_a_session_that_is_silent_ends(hurried: str) -> None:
    with connect(f"ws://{hurried}/ws") as socket:
        with pytest.raises(ConnectionClosed) as ended:
            socket.recv(timeout=60)
        assert ended.value.rcvd is not None
        assert (ended.value.rcvd.code, ended.value.rcvd.reason) == (1001, "silent for 0.3 s")


def test_nobody_else_is_invited_to_read_an_answer(inviting: str) -> None:
    answer = httpx.get(f"http://{inviting}/")
    assert answer.text == "read me"
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_an_address_that_cannot_be_had_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Refused, match=rf"^127.0.0.1 port {port} is taken; choose another with --host and --port$"):
            listen("127.0.0.1", port)
    with pytest.raises(Refused, match=r"^192\.0\.2\.1 port 0 cannot be listened on \("):
        listen("192.0.2.1", 0)


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: loc", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\nGET"])
def test_a_connection_without_a_whole_head_is_closed_and_one_that_is_answered_is_not(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "HEAD_S", 0.3)
    with (
        contextmanager(served)(Fence(app(), limits=LIMITS), http=Impatient) as place,
        socket.create_connection((place.split(":")[0], int(place.split(":")[1])), timeout=20) as silent,
        connect(f"ws://{place}/ws") as talking,
    ):
        silent.sendall(sent)
        assert httpx.post(f"http://{place}/?sleep=0.8", content=b"x", timeout=20).text == "1"
        while silent.recv(4096):
            pass
        talking.send("still here")
        assert talking.recv() == "still here"


def test_a_connection_that_is_over_is_not_waited_for() -> None:
    made: list[Impatient] = []

    class Kept(Impatient):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            made.append(self)

    with contextmanager(served)(Fence(app(), limits=LIMITS), http=Kept) as place:
        with httpx.Client() as client:
            assert client.post(f"http://{place}/", content=b"x").text == "1"
            eventually(lambda: made[0]._timer)
        eventually(lambda: made[0]._timer is None)


UPGRADE = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {}==\r\n"


@pytest.mark.parametrize("head", ["", "Connection: close\r\n", UPGRADE.format("A" * 22)])
def test_a_client_that_reads_nothing_holds_no_connection(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "HEAD_S", 0.3)
    lost, much = threading.Event(), "x" * 20_000_000  # more than the kernel takes
    over = ImpatientSocket if "Upgrade" in head else Impatient
    end = over.connection_lost
    monkeypatch.setattr(over, "connection_lost", lambda self, exc: (end(self, exc), lost.set()))

    async def long(_: Request) -> PlainTextResponse:
        return PlainTextResponse(much)

    async def talk_long(deaf: WebSocket) -> None:
        await deaf.accept()
        await deaf.send_text(much)

    within = Fence(Starlette(routes=[Route("/", long), WebSocketRoute("/", talk_long)]), limits=LIMITS)
    with contextmanager(served)(within, http=Impatient, ws=ImpatientSocket) as place:
        host, port = place.split(":")
        with socket.create_connection((host, int(port)), timeout=20) as deaf:
            deaf.sendall(f"GET / HTTP/1.1\r\nHost: localhost\r\n{head}\r\n".encode())
            assert lost.wait(20)
