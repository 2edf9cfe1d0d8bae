"""`clinrl serve`: OpenAI's interface over the versions of a registered model.

Nothing of a request is stored but its status, the version that answered, and counts (`clinrl.serving.watch`).
"""

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as Event

from clinrl.config.machine import LOOPBACK, machine_at
from clinrl.config.params import Params
from clinrl.errors import EngineError, OutOfMemory, Refused, echo
from clinrl.models.chat import Completion, decode, encode, read_turn, render
from clinrl.registry.pyfunc import SEED
from clinrl.runtime import determinism
from clinrl.runtime.guard import STOPPED, Fence, Impatient, Limits, address_of, listen
from clinrl.serving.backends import Job, Local, Remote
from clinrl.serving.live import POLL_S, Live, Version
from clinrl.serving.protocol import Answer, ChatRequest, Refusal, error, event, read, refused, settled
from clinrl.serving.watch import Seen, Watch
from clinrl.tasks.base import get_task
from clinrl.tasks.marks import holds_mark
from clinrl.types import Message

TOKEN: Final = "CLINRL_SERVE_TOKEN"
"""The variable with the token that clients have to send."""
LEAST_TOKEN: Final = 20
"""The least number of characters of the token."""
BODY_BYTES: Final = 128 * 1024
SPARE_CONNECTIONS: Final = 256
"""Connections beyond those whose requests are answered or wait; one more gets 503."""
ENDING_S: Final = 5.0
"""Seconds that the end waits for each thread: that of the registry may be copying, that of models computing."""
CHAT: Final = "/v1/chat/completions"


class Bounds(NamedTuple):
    """The limits of a server."""

    at_once: int
    """Requests that are answered together."""
    queue: int
    """Requests that wait."""
    tokens: int
    """Tokens that one answer may have."""
    request_s: float


class Service:
    """The application."""

    def __init__(self, live: Live, backend: Local | Remote, bounds: Bounds, watch: Watch | None = None) -> None:
        self._live, self._backend, self._bounds, self._watch = live, backend, bounds, watch
        self.in_flight = 0
        self.is_draining = False
        routes = [
            Route(CHAT, self._chat, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{name}", self._model),
            Route("/health", self._health),
            Route("/health/live", self._alive),
        ]
        handlers = {HTTPException: _no_route, Refusal: _refused, Exception: _failed}
        self._app = Starlette(routes=routes, exception_handlers=handlers)
        self._app.router.redirect_slashes = False  # behind a proxy it would name an address that no client reaches

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, within the bounds."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        counted = scope["path"] == CHAT
        scope.setdefault("clinrl", {})
        if not scope["path"].isprintable():  # a route also matches its path and a line's end, uncounted here
            await refused(404, "there is no such route")(scope, receive, send)
            return
        if counted and self.is_draining:
            await refused(503, STOPPED)(scope, receive, send)
        elif counted and self.in_flight >= self._bounds.at_once + self._bounds.queue:
            says = "the queue of this server is full; ask again"
            await refused(429, says, code="rate_limit_exceeded")(scope, receive, send)
        else:
            self.in_flight += counted
            if counted and self._watch is not None:
                self._watch.make_way()
            try:
                await self._app(scope, receive, send)
            except Exception as fault:  # noqa: BLE001  only its type is printed: its message may quote the request
                echo(f"a fault: {type(fault).__name__}")
            finally:
                self.in_flight -= counted

    async def _health(self, _: Request) -> Response:
        status = "draining" if self.is_draining else "ok" if self._live.names else "nothing is served"
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    async def _alive(self, _: Request) -> Response:
        """Whether this process should go on. The champion decides, so that no candidate can end the process."""
        first = next(iter(self._live.names.values()), None)
        is_failing = first is not None and self._backend.is_failing(first.served.digest)
        return JSONResponse({"status": "failing" if is_failing else "ok"}, 503 if is_failing else 200)

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_card(*one) for one in self._live.names.items()]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        return JSONResponse(_card(name, self._version(name)))

    def _version(self, name: str) -> Version:
        version = self._live.names.get(name)
        if version is None:
            says = f"there is no such model; there are {', '.join(self._live.names) or 'none'}"
            raise Refusal(404, says, param="model", code="model_not_found")
        return version

    async def _chat(self, request: Request) -> Response:
        ask = read(await request.body())
        version = self._version(ask.model)
        job, is_opened = self._job(ask, version)
        request.scope["clinrl"] |= {"version": version.served.name, "prompt_tokens": len(job.ids)}
        self._backend.submit(job)
        answer = Answer(version.served.name, version.served.digest, len(job.ids))
        if ask.stream:
            events = self._events(request, ask, job, version, answer, is_opened)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        piece = asyncio.ensure_future(job.pieces.get())
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({piece, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not piece.done():
                return Response(status_code=499)  # nobody is there to read it
            written = _completion(piece.result())
        finally:
            job.drop()
            piece.cancel()
            gone.cancel()
        request.scope["clinrl"] |= {"completion_tokens": written.tokens}
        turn = read_turn(written.text, is_opened)
        self._note(answer.id, ask, version, turn, job, written)
        return JSONResponse(answer.whole(turn, written.stop, written.tokens))

    def _note(self, ident: str, ask: ChatRequest, version: Version, turn: Message, job: Job, of: Completion) -> None:
        if self._watch is not None:
            mode = version.mode(ask.thinking) or ""
            own = version.served.modes[mode]
            is_cut = of.stop != "answered" and job.budget < own.max_new_tokens
            is_long = of.tokens > own.max_new_tokens  # which the exam would have cut
            is_own = (job.temperature, job.top_p) == (own.temperature, own.top_p) and not (is_cut or is_long)
            seen = Seen(ident, ask, version, mode, turn, is_own)
            self._watch.answered(seen, lambda: not (self.in_flight or self.is_draining), self._job)

    def _job(self, ask: ChatRequest, version: Version) -> tuple[Job, bool]:
        """The prompt of a request, and whether it opened the think block. Raises Refusal."""
        name, sampler = version.served.name, version.sampler
        mode = version.mode(ask.thinking)
        if mode is None:
            says = f"{name} was examined in the modes {', '.join(version.served.modes)} alone"
            raise Refusal(400, says, param="chat_template_kwargs")
        decoding = version.served.modes[mode]
        messages, marks = [turn.message for turn in ask.messages], [*sampler.tokenizer.get_added_vocab()]
        for number, message in enumerate(messages):
            if holds_mark(message.content, marks):
                says = "holds a mark of the chat template, which the model would obey; remove it"
                raise Refusal(400, f"messages.{number} {says}", param=f"messages.{number}.content")
        try:
            text = render(sampler.tokenizer, messages, decoding.thinking)
        except Exception as error:  # a template may refuse an order of turns; its message may quote them
            says = f"the chat template of {name} does not take turns of these roles in this order"
            raise Refusal(400, says, param="messages") from error
        (ids,) = encode(sampler.tokenizer, [text])
        if (wanted := ask.most) and wanted > self._bounds.tokens:
            says = f"an answer may have at most {self._bounds.tokens} tokens (--tokens of the server), not {wanted}"
            raise Refusal(400, says, param="max_tokens")
        left = self._bounds.tokens if sampler.room is None else min(self._bounds.tokens, sampler.room - len(ids))
        budget = wanted or min(decoding.max_new_tokens, left)
        if budget > left or left < 1:
            says = f"the prompt has {len(ids)} tokens, which leaves {max(left, 0)} for an answer"
            says += f", and {wanted} were asked for" if wanted else ""
            raise Refusal(400, says, param="messages", code="context_length_exceeded")
        job = Job(
            version.served.digest, tuple(ids), budget,
            temperature=decoding.temperature if ask.temperature is None else ask.temperature,
            top_p=decoding.top_p if ask.top_p is None else ask.top_p,
            seed=SEED if ask.seed is None else ask.seed,
            is_streamed=bool(ask.stream),
        )  # fmt: skip
        return job, sampler.opens(decoding.thinking)

    async def _events(
        self, request: Request, ask: ChatRequest, job: Job, version: Version, answer: Answer, is_opened: bool
    ) -> AsyncIterator[bytes]:
        usage = ask.stream_options is not None and ask.stream_options.include_usage
        try:
            yield answer.begin()
            while isinstance(piece := await job.pieces.get(), tuple):
                for one in answer.more(settled(decode(version.sampler.tokenizer, piece, ()).text, is_opened)):
                    yield one
            written = _completion(piece)
            request.scope["clinrl"] |= {"completion_tokens": written.tokens}
            turn = read_turn(written.text, is_opened)
            last = [*answer.end(turn, written.stop, written.tokens, with_usage=usage)]
            self._note(answer.id, ask, version, turn, job, written)
            for one in last:
                yield one
        except Refusal as refusal:
            request.scope["clinrl"] |= {"error": refusal.status}
            yield event(error(refusal.status, refusal.message))
        finally:
            job.drop()


def _completion(piece: object) -> Completion:
    """The finished completion. Raises Refusal for a failure, without its message, which may quote the request."""
    if isinstance(piece, Completion):
        return piece
    kind = type(piece).__name__
    echo(f"an answer failed: {piece if isinstance(piece, Refused) else kind}")
    if isinstance(piece, EngineError):
        raise Refusal(503, "the server that writes answers failed; ask again")
    if isinstance(piece, OutOfMemory):
        raise Refusal(503, "there is no memory for this answer; shorten the prompt, ask for fewer tokens, or ask later")
    raise Refusal(500, "the answer could not be written")


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _card(name: str, version: Version) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": version.since, "owned_by": "clinrl"}


async def _no_route(_: Request, found: Exception) -> Response:
    assert isinstance(found, HTTPException)
    routes = "there is no such route; there are /v1/chat/completions, /v1/models and /health"
    answer = refused(found.status_code, routes if found.status_code == 404 else "this route takes another method")
    answer.headers.update(found.headers or {})
    return answer


async def _refused(_: Request, refusal: Exception) -> Response:
    assert isinstance(refusal, Refusal)
    return refused(refusal.status, refusal.message, refusal.param, refusal.code)


async def _failed(_: Request, __: Exception) -> Response:
    return refused(500, "this server failed")


def logged(app: ASGIApp) -> ASGIApp:
    """An application that writes a line about each chat, and about each other request that it refuses.

    The line has the status, the version, counts and seconds, and nothing that a client sent.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        started, status, found = time.monotonic(), 0, dict[str, object]()
        scope["clinrl"] = found

        async def noting(message: Event) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await app(scope, receive, noting)
        finally:
            is_chat = scope["path"] == CHAT
            if is_chat or not 0 < status < 400:
                found["s"] = f"{time.monotonic() - started:.3f}"
                says = " ".join(f"{name}={value}" for name, value in found.items())
                echo(f"{'chat' if is_chat else 'other'} {status or 'dropped'} {says}")

    return answer


class Server(uvicorn.Server):
    """A server whose first signal refuses new requests and waits for the running ones; the second does not wait."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.should_exit = self.force_exit = self._service.is_draining
        self._service.is_draining = True

    async def on_tick(self, counter: int) -> bool:
        if self._service.is_draining and not self._service.in_flight:
            self.should_exit = True
        return await super().on_tick(counter)


def stage(
    params: Params, name: str, *, host: str, known_as: Sequence[str], port: int, at_once: int, queue: int,
    tokens: int, timeout: int, shadow: float, source: Path,
) -> None:  # fmt: skip
    """Serve until a signal comes; the first line of the output is the address. Port 0: any free one. `known_as`: other
    names by which clients reach the server. `source`: params.yaml, which is read again when it changes. If nothing can
    be served yet, the reason is printed, and later versions are served.

    Raises Refused without a token for a host that other machines can reach, for a task that is played with tools, and
    if the address is not available.
    """
    token = _token(host)
    task = get_task(name.removesuffix("-merged"))
    if task.episodes is not None:
        raise Refused(f"{task.name} is played with tools, which are not served; `clinrl openenv {task.name}` serves it")
    machine = machine_at(params.scale)
    determinism.settle(SEED)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # until the server runs: copies are removed then too
    bounds = Bounds(at_once, queue, tokens, float(timeout))
    with listen(host, port) as listening:
        backend = Remote(task.name, machine.vllm) if machine.sampler == "vllm" else Local(params.scale, at_once)
        live = Live(params, name, backend, 2 * bounds.request_s, source)
        watch, stopping = Watch(name, live, backend, shadow), threading.Event()
        registry = threading.Thread(target=_follow, args=(live, stopping), name="registry", daemon=True)
        try:
            live.renew()
            if reason := live.why_nothing_served():
                echo(reason)
            service = Service(live, backend, bounds, watch)
            limits = Limits(body_bytes=BODY_BYTES, request_s=bounds.request_s, idle_s=bounds.request_s)
            config = uvicorn.Config(
                logged(Fence(service, names=[host, *known_as], token=token, limits=limits, refuse=refused)),
                http=Impatient, lifespan="off", log_level="warning", access_log=False,
                limit_concurrency=at_once + queue + SPARE_CONNECTIONS,
            )  # fmt: skip
            registry.start()
            print(f"{address_of(listening)}/v1", flush=True)
            Server(config, service).run(sockets=[listening])
        finally:
            stopping.set()
            try:
                _end(live, registry)
                if isinstance(backend, Local):
                    backend.rest(ENDING_S)
            finally:
                watch.end()  # last, since it may wait for its file: a supervisor that loses patience leaves no copy


def _follow(live: Live, stopping: threading.Event) -> None:
    while not stopping.wait(POLL_S):
        try:
            live.renew()
        except Exception as fault:  # noqa: BLE001  one failed check must not end the checks
            echo(f"a fault: {type(fault).__name__}: {fault}")


def _end(live: Live, registry: threading.Thread) -> None:
    """Remove the private copies. One that is being made is removed until copying fails, for ENDING_S at most."""
    live.end()
    until = time.monotonic() + ENDING_S
    while registry.is_alive() and time.monotonic() < until:
        registry.join(POLL_S / 10)
        live.end()


def _token(host: str) -> str | None:
    """The token that clients have to send. Raises Refused for a short one, or for none if others reach the server."""
    token = os.environ.get(TOKEN, "")
    if not token and host not in LOOPBACK:
        raise Refused(f"{host} can be reached from elsewhere: set {TOKEN} to a token that clients have to send")
    if token and not (token.isascii() and token.isprintable() and " " not in token and len(token) >= LEAST_TOKEN):
        raise Refused(f"{TOKEN} must be {LEAST_TOKEN} or more printable ASCII characters without spaces")
    return token or None
