"""A client of a vLLM server over HTTP: identity, adapters, and completions in token ids.

The client imports nothing from vLLM, so it needs none of vLLM's libraries. It checks the size and the content of every
answer before using it. The calls follow the source of vLLM 0.30.0.
"""

import http.client
import json
import math
import os
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from clinrl.config.machine import FILE, Vllm
from clinrl.errors import EngineError, format_value

TOKEN = "CLINRL_VLLM_TOKEN"
"""The environment variable with the key of the server that machine.yaml names."""
MAX_BYTES = 64 << 20
"""The largest answer; a completion of 32,768 tokens has a few megabytes."""
PAUSES_S = (1.0, 2.0, 4.0, 8.0)
"""Seconds before each repeat of a request that got no answer, from a lost connection or a busy server. A repeat has the
same seed, so sending it twice does no harm."""
BUSY = (429, 502, 503, 504)
VERSION = re.compile(r"[\w.+-]{1,60}")


@dataclass(frozen=True, kw_only=True)
class Request:
    """A completion to be written."""

    name: str
    """For error messages."""
    ids: Sequence[int]
    budget: int
    temperature: float
    top_p: float
    seed: int


@dataclass(frozen=True, kw_only=True)
class Written:
    """A completion: its tokens, including an end token, and the log-probability with which each was drawn."""

    ids: tuple[int, ...]
    log_probabilities: tuple[float, ...]


class Call:
    """The connections of one call of `Client.complete` that are open."""

    def __init__(self) -> None:
        self.sockets, self.over = set[socket.socket](), threading.Event()

    def end(self) -> None:
        """Make the requests fail at once, without repeats: a process waits for its threads before it ends."""
        self.over.set()
        for each in list(self.sockets):
            with suppress(OSError):  # it was closed meanwhile
                # Below TLS: a socket of ssl forgets its keys first, and what is sent meanwhile would go in the clear.
                socket.socket.shutdown(each, socket.SHUT_RDWR)


class Client:
    """A client of a server for one model, named `model`, and LoRA adapters above it.

    `ends` are the tokens that end a turn; `vocabulary` is the number of tokens. Every failure raises EngineError with
    one sentence that says what to do.
    """

    def __init__(
        self, url: str, key: str, settings: Vllm, model: str, *, ends: frozenset[int], vocabulary: int, start: str
    ) -> None:
        parts = urlsplit(url)
        self.host, self.port, self.is_https = parts.hostname or "", parts.port, parts.scheme == "https"
        self.url = f"{parts.scheme}://{parts.netloc}"
        self.settings, self.model, self.ends, self.vocabulary = settings, model, ends, vocabulary
        self._key, self._start = key, start
        self.version = ""
        self.max_length = 0
        self._fingerprint: object = None

    def check(self) -> None:
        """Check that the server serves this model. Only the name it was started with says which commit vLLM serves."""
        self._request("GET", "/health", pauses=())
        version = self._request("GET", "/version").get("version")
        if not isinstance(version, str) or not VERSION.fullmatch(version):
            raise self._strange("its version")
        self.version = version
        names = self._models()
        if self.model not in names:
            served = ", ".join(format_value(name) for name in [*names][:3]) or "nothing"
            raise EngineError(f"the server at {self.url} serves {served}, not {self.model}; {self._start}")
        length = names[self.model].get("max_model_len")
        if not isinstance(length, int) or not _is_count(length):
            raise self._strange("the length that it has room for")
        self.max_length = length

    def load(self, name: str, folder: Path) -> None:
        """Have the server load the adapter in a folder under a name. The server must see the folder by this path."""
        if name in self._models():
            return
        path = str(folder)
        try:
            self._request("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}, adapter=path)
        except EngineError:
            if name not in self._models():  # it is there if the answer to the first of two requests was lost
                raise
        if name not in self._models():
            raise self._strange(f"the adapter {name} after it was loaded")

    def unload(self, name: str) -> None:
        """Unload an adapter, if the server has it."""
        if name in self._models():
            self._request("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    def complete(
        self, requests: Sequence[Request], adapter: str | None = None, call: Call | None = None
    ) -> Iterator[tuple[int, Written]]:
        """Yield the number and the completion of each request as they arrive; `settings.at_once` are under way at once.

        Another thread may end the `call` before that; then EngineError is raised, and the server stops writing.
        Raises EngineError for a request that has no room, before any is sent.
        """
        for one in requests:
            if len(one.ids) + one.budget > self.max_length:
                raise EngineError(
                    f"{one.name}: its prompt is {len(one.ids)} tokens, and with a budget of {one.budget} it exceeds "
                    f"the {self.max_length} that the vLLM server has room for; raise vllm.max_length in {FILE} and "
                    "start the server again"
                )
        pool, call = ThreadPoolExecutor(max_workers=self.settings.at_once), call or Call()
        try:
            waiting = {
                pool.submit(self._complete, one, adapter or self.model, call): number
                for number, one in enumerate(requests)
            }
            for done in as_completed(waiting):
                yield waiting[done], done.result()
        finally:
            call.end()
            pool.shutdown(wait=False, cancel_futures=True)

    def _complete(self, one: Request, model: str, call: Call) -> Written:
        body = {
            "model": model, "prompt": list(one.ids), "max_tokens": one.budget, "seed": one.seed,
            "temperature": one.temperature, "top_p": one.top_p, "stop_token_ids": sorted(self.ends),
            "logprobs": 0, "return_token_ids": True, "skip_special_tokens": False, "watermarking": False,
            # The checkpoint's own settings would replace any value that is left out.
            "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
        }  # fmt: skip
        answer = self._request("POST", "/v1/completions", body, call=call)
        written = self._read(one, model, answer)
        fingerprint = answer.get("system_fingerprint")
        if self._fingerprint is None:
            self._fingerprint = fingerprint
        if fingerprint != self._fingerprint:
            raise EngineError(
                f"the server at {self.url} was replaced by one of another configuration meanwhile; give the same "
                "command again"
            )
        return written

    def _read(self, one: Request, model: str, answer: Mapping[str, Any]) -> Written:
        """A completion as the server sent it. Raises EngineError if it is not one of this request."""
        choices = answer.get("choices")
        choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
        if answer.get("model") != model or not isinstance(choice, dict):
            raise self._strange(f"a completion of {model}")
        if choice.get("finish_reason") == "abort":
            raise EngineError(f"the server at {self.url} was ended; {self._start}, then give the same command again")
        if choice.get("prompt_token_ids") != list(one.ids):
            raise self._strange("the prompt that it was sent")
        ids, logprobs = choice.get("token_ids"), choice.get("logprobs")
        values = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
        if not isinstance(ids, list) or not isinstance(values, list) or not 1 <= len(ids) == len(values) <= one.budget:
            raise self._strange("as many log-probabilities as tokens, within the budget")
        if not all(_is_count(token, least=0) and token < self.vocabulary for token in ids):
            raise self._strange("tokens of the model's vocabulary")
        if not all(type(value) in (int, float) and math.isfinite(value) and value <= 1e-3 for value in values):
            raise self._strange("log-probabilities")
        ended, before = ids[-1] in self.ends, self.ends.isdisjoint(ids[:-1])
        is_whole = choice.get("finish_reason") == ("stop" if ended else "length")
        if not before or not is_whole or not (ended or len(ids) == one.budget):
            raise self._strange("a completion that ends at its end token or at its budget")
        return Written(ids=tuple(ids), log_probabilities=tuple(map(float, values)))

    def _models(self) -> dict[str, dict[str, Any]]:
        cards = self._request("GET", "/v1/models").get("data")
        if not isinstance(cards, list) or not all(
            isinstance(card, dict) and isinstance(card.get("id"), str) for card in cards
        ):
            raise self._strange("its models")
        return {card["id"]: card for card in cards}

    def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *,
        pauses: Sequence[float] | None = None, adapter: str = "", call: Call | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Send a request, with repeats; return the answer's JSON object, empty for paths that answer without one."""
        status, text, call = 0, b"", call or Call()
        for pause in (*(PAUSES_S if pauses is None else pauses), None):
            lost: Exception | None = None
            try:
                status, text = self._send(method, path, body, call)
            except TimeoutError:
                raise EngineError(
                    f"the server at {self.url} did not answer in {self.settings.timeout_s} s; raise vllm.timeout_s in "
                    f"{FILE}, or lower vllm.at_once, then give the same command again"
                ) from None
            except ssl.SSLError as error:
                raise EngineError(f"the server at {self.url} has no certificate to trust ({error.reason})") from error
            except (OSError, http.client.HTTPException) as error:
                lost = error
            if pause is None or (lost is None and status not in BUSY) or call.over.wait(pause):
                break
        if lost is not None:
            raise EngineError(
                f"no vLLM server answers at {self.url} ({type(lost).__name__}); {self._start}, then give the same "
                "command again"
            ) from lost
        if status != 200:
            raise EngineError(self._refusal(status, path, text, adapter))
        if path in ("/health", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            return {}
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise self._strange("JSON")
        return answer

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None, call: Call) -> tuple[int, bytes]:
        """Send one request on its own connection; no redirect or proxy is followed, so nobody else receives the key."""
        kind: Callable[..., http.client.HTTPConnection]
        kind = http.client.HTTPSConnection if self.is_https else http.client.HTTPConnection
        connection = kind(self.host, self.port, timeout=self.settings.timeout_s)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        opened = None
        try:
            connection.connect()
            call.sockets.add(opened := connection.sock)
            if call.over.is_set():
                raise ConnectionAbortedError
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            with connection.getresponse() as response:
                status, text = response.status, response.read(MAX_BYTES + 1)
        finally:
            call.sockets.discard(opened)
            connection.close()
        if len(text) > MAX_BYTES:
            raise self._strange(f"an answer of at most {MAX_BYTES >> 20} MiB")
        return status, text

    def _refusal(self, status: int, path: str, text: bytes, adapter: str) -> str:
        says, where = _message(text), f"the server at {self.url}"
        if status == 401:
            return f"{where} refuses the key; set {TOKEN} to the one that it was started with"
        if adapter and ("No adapter found" in says or "No such file" in says):
            return f"{where} does not see {adapter}; run it where it sees this project's folders by the same paths"
        if "lora_adapter" in path and (status == 404 or "not enabled" in says):
            return f"{where} takes no adapters while it runs; {self._start}"
        if adapter and "max_lora_rank" in says:
            return f"{where} has no room for the rank of {adapter} ({says}); {self._start}"
        if adapter and "target modules" in says:
            return f"{where} does not know a layer of {adapter} ({says}); set sampler to transformers in {FILE}"
        if path == "/v1/completions" and status == 404:
            return f"{where} does not serve the adapter any more (unloaded, or restarted); give the same command again"
        if "context length" in says or "max_model_len" in says:
            return f"{where} has no room for the prompt ({says}); raise vllm.max_length in {FILE} and start it again"
        if status >= 500:
            return (
                f"{where} failed ({status}: {says}); look at its log, start it again, then give the same command again"
            )
        return f"{where} refused {path} ({status}: {says}); is it vLLM 0.30 or newer?"

    def _strange(self, what: str) -> EngineError:
        return EngineError(f"the server at {self.url} did not send {what}; is it vLLM 0.30 or newer?")


def key_of(url: str) -> str:
    """The key for the server that machine.yaml names. Raises EngineError if it is on another machine and has no key."""
    key = os.environ.get(TOKEN, "")
    if not key and urlsplit(url).scheme == "https":
        raise EngineError(f"{url} is on another machine, and no key is set; set {TOKEN} to the one it was started with")
    if key and not (key.isascii() and key.isprintable()):
        raise EngineError(f"{TOKEN} is no key: it must be printable ASCII")
    return key


def _is_count(value: object, least: int = 1) -> bool:
    return type(value) is int and least <= value < 1 << 31


def _message(text: bytes) -> str:
    """The server's message about a failure, short and on one line. It names sizes and folders, and quotes no prompt."""
    try:
        found = json.loads(text)
        found = found.get("error", found)
        words = str(found["message"] if isinstance(found, dict) else found)
    except (ValueError, RecursionError, LookupError, AttributeError, TypeError):
        return "no reason given"
    line = " ".join(words.split())[:160]
    return line if line.isprintable() and line else "no reason given"
