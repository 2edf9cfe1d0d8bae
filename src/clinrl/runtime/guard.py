"""The fence around a server: which requests reach it, and which are refused before it sees them.

A web page of any origin can make a visitor's browser send requests to this machine. With a host name of its own that
resolves to this machine (DNS rebinding) it can read the answers too. So a request must be addressed to one of the
server's own names, must not come from any page but the server's own, and must carry the password if there is one.
"""

import asyncio
import base64
import errno
import hmac
import os
import socket
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from clinrl.errors import Refused

HEAD_S = 20.0
"""Seconds in which a connection must have sent the head of a request, and must have taken what was written to it."""
LAST_S = 1.0
"""Seconds in which a client must have taken the event that ends a stream before its time."""
EVENTS = "text/event-stream"
STOPPED = "this server is being stopped; ask another, or later"


class Limits(NamedTuple):
    """The limits of one request or session."""

    body_bytes: int
    request_s: float
    """Seconds from the request's head to the end of its answer."""
    idle_s: float
    """Seconds that a WebSocket may be silent."""


class Unread(asyncio.Protocol):
    """A connection that ends if its client does not take what was written to it. Uvicorn waits for that without end,
    even when it is stopped."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    _unread: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Have any byte that the client leaves pause writing."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)

    def pause_writing(self) -> None:
        """Begin to wait until the client has read; a transport that is only closed would wait for that too."""
        super().pause_writing()
        self._unread = self.loop.call_later(HEAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop waiting. A connection that is lost meanwhile is not resumed; to abort it then does nothing."""
        super().resume_writing()
        self._unread.cancel()


class ImpatientSocket(Unread, WebSocketsSansIOProtocol):  # type: ignore[misc]  # uvicorn's own argument differs
    """A WebSocket of uvicorn's that ends if its client does not read."""


class Impatient(Unread, H11Protocol):
    """A connection of uvicorn's that is closed if the head of a request does not come in time, or nobody reads.

    Uvicorn itself waits without end, so silent connections could use up its `limit_concurrency`.
    """

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Begin to wait for the first head."""
        super().connection_made(transport)
        self._timer = self.loop.call_later(HEAD_S, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting, which would keep the connection and its last request in memory."""
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def handle_events(self) -> None:
        """Handle what has come, and wait for the next head if nothing of a request is there."""
        super().handle_events()
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and self.transport.get_protocol() is self:  # another one has taken over a WebSocket
            self._timer = self._timer or self.loop.call_later(HEAD_S, self.transport.close)
        elif self._timer is not None:
            self._timer.cancel()
            self._timer = None


def refusal_response(status: int, sentence: str) -> JSONResponse:
    """A refusal as JSON, in the form of FastAPI's own errors."""
    return JSONResponse({"detail": sentence}, status)


class Fence:
    """An ASGI application in front of another."""

    def __init__(
        self, app: ASGIApp, *, names: Collection[str] = (), login: str | None = None, token: str | None = None,
        limits: Limits | None = None, refuse: Callable[[int, str], Response] = refusal_response,
    ) -> None:  # fmt: skip
        """`names`: this server's names, besides localhost and the address of the connection. `login`: `user:password`;
        `token`: a bearer token; at most one of them. `refuse` turns a status and a sentence into a response."""
        self._app = app
        self._names = {"localhost", *(name.lower() for name in names)}
        self._login = None if login is None else base64.b64encode(login.encode()).decode()
        self._token = token
        self._limits = limits
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif refusal := self._refusal(scope):
            await refusal(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._app(scope, self._impatient(receive, send), send)
        else:
            await self._within_limits(scope, receive, _confine(send))

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._is_own(hosts[0], scope):
            return self._refuse(403, "The Host header does not name this server.")
        if not _is_from_own_page(scope["type"] == "http" and scope["method"] in ("GET", "HEAD"), headers, hosts[0]):
            return self._refuse(403, "A page of another origin may not send requests to this server.")
        if self._login is not None and not _gives("basic", self._login, headers.get("authorization", "")):
            refused = self._refuse(401, "This server asks for a user and a password.")
            refused.headers["www-authenticate"] = 'Basic realm="clinrl", charset="UTF-8"'
            return refused
        if self._token is not None and not _gives("bearer", self._token, headers.get("authorization", "")):
            refused = self._refuse(401, "This server asks for a bearer token, which is missing or wrong.")
            refused.headers["www-authenticate"] = 'Bearer realm="clinrl"'
            return refused
        return None

    def _is_own(self, host: str, scope: Scope) -> bool:
        """Whether a Host header has this server's address, which cannot be rebound, or one of its own names."""
        try:
            name = urlsplit(f"//{host}").hostname
        except ValueError:
            return False
        return name is not None and (name in self._names or name == (scope.get("server") or ("",))[0])

    async def _within_limits(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._limits is None:
            await self._app(scope, receive, send)
            return
        start: Message = {}
        is_whole = False

        async def noting(message: Message) -> None:
            nonlocal start, is_whole
            start = start or message
            is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        try:
            async with asyncio.timeout(self._limits.request_s):
                body = await _read(receive, self._limits.body_bytes)
                if body is None:
                    refusal = self._refuse(413, f"A request may have at most {self._limits.body_bytes:,} bytes.")
                    await refusal(scope, receive, noting)
                else:
                    await self._app(scope, _replay(body, receive), noting)
        except ClientDisconnect:
            pass  # nobody reads an answer
        except (TimeoutError, asyncio.CancelledError) as why:  # the latter: the server does not wait for its requests
            too_long = 408, f"A request may take at most {self._limits.request_s:g} seconds."
            refusal = self._refuse(*(too_long if isinstance(why, TimeoutError) else (503, STOPPED)))
            if not start:
                await refusal(scope, receive, send)
            elif not is_whole and Headers(raw=start["headers"]).get("content-type", "").startswith(EVENTS):
                with suppress(TimeoutError):  # of a client that does not read
                    async with asyncio.timeout(LAST_S):
                        await send({"type": "http.response.body", "body": b"data: %b\n\n" % bytes(refusal.body)})

    def _impatient(self, receive: Receive, send: Send) -> Receive:
        """A `receive` for a WebSocket that closes it if no message comes in time."""
        limits = self._limits
        if limits is None:
            return receive

        async def receive_in_time() -> Message:
            try:
                async with asyncio.timeout(limits.idle_s):
                    return await receive()
            except TimeoutError:
                code = 1001  # going away
                await send({"type": "websocket.close", "code": code, "reason": f"silent for {limits.idle_s:g} s"})
                return {"type": "websocket.disconnect", "code": code}

        return receive_in_time


class EngineFence(Fence):
    """The fence of `clinrl engine`, which vLLM takes by name: its own asks for the key at some of its paths alone."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(app, token=os.environ["VLLM_API_KEY"])


def listen(host: str, port: int, options: str = "--host and --port") -> socket.socket:
    """Open a socket that listens at an address; port 0 takes any free port.

    Raises Refused if the address is not available, and names the command's `options` for another.
    """
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        why = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be listened on ({error.strerror or error})"
        raise Refused(f"{host} port {port} {why}; choose another with {options}") from None


def address_of(listening: socket.socket) -> str:
    """The URL at which a socket listens."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _is_from_own_page(is_read: bool, headers: Headers, host: str) -> bool:
    """Whether a request comes from a page of the same origin, from an address bar or link, or from no browser.

    A browser sends Origin with each request that changes something, and Sec-Fetch-Site with every request.
    """
    origins = headers.getlist("origin")
    if any(origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()) for origin in origins):
        return False
    if headers.get("sec-fetch-site", "none") in ("none", "same-origin"):
        return True
    opened = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    return is_read and opened  # a link to this server; not a frame, an image or a script on somebody's page


def _gives(scheme: str, secret: str, authorization: str) -> bool:
    """Whether a header of this scheme holds a secret. The time of the comparison does not reveal the secret."""
    found, _, given = authorization.partition(" ")
    return found.lower() == scheme and hmac.compare_digest(given.strip().encode(), secret.encode())


async def _read(receive: Receive, most: int) -> bytes | None:
    """The whole body, or None as soon as it is longer than `most` bytes. Raises ClientDisconnect if the client left."""
    chunks, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > most:
            return None
        if not message.get("more_body", False):
            return b"".join(chunks)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` for a request whose body has already been read."""
    left = [body]

    async def replay() -> Message:
        return {"type": "http.request", "body": left.pop(), "more_body": False} if left else await receive()

    return replay


def _confine(send: Send) -> Send:
    """A `send` for answers that no other origin can read, or frame to steal clicks; pages connect here alone."""

    async def confine(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name in {name for name in headers if name.startswith("access-control-")}:
                del headers[name]
            headers["content-security-policy"] = "frame-ancestors 'self'; connect-src 'self'"
        await send(message)

    return confine
