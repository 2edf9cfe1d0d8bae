"""A server that speaks OpenAI's interface and says what was said before, turn by turn, for clients of other people."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from clinrl.types import Message, Transcript


@contextmanager
def replaying(answers: Mapping[str, Transcript]) -> Iterator[str]:
    """Its address. `answers`: the transcript for each case, by the text of the user's turn."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            (case,) = (turn["content"] for turn in asked["messages"] if turn["role"] == "user")
            taken = sum(turn["role"] == "assistant" for turn in asked["messages"])
            turns = [turn for turn in answers[case].messages if turn.role == "assistant"]
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream" if asked.get("stream") else "application/json")
            self.end_headers()
            self.wfile.write(_streamed(turns[taken]) if asked.get("stream") else _whole(turns[taken], "message"))

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()


def _said(turn: Message) -> dict[str, Any]:
    calls = [
        {"index": place, "id": f"call-{place}", "type": "function",
         "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
        for place, call in enumerate(turn.calls)
    ]  # fmt: skip
    said: dict[str, Any] = {"role": "assistant", "content": turn.content}
    return (
        said
        | ({"reasoning": turn.thinking} if turn.thinking is not None else {})
        | ({"tool_calls": calls} if calls else {})
    )


def _body(key: str, said: Mapping[str, Any] | None, reason: str | None) -> dict[str, Any]:
    kind = "chat.completion" if key == "message" else "chat.completion.chunk"
    choices = [] if said is None else [{"index": 0, key: said, "finish_reason": reason, "logprobs": None}]
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    told = {"usage": usage} if key == "message" or said is None else {}
    return {"id": "one", "object": kind, "created": 0, "model": "replayed", "choices": choices} | told


def _whole(turn: Message, key: str) -> bytes:
    return json.dumps(_body(key, _said(turn), "tool_calls" if turn.calls else "stop")).encode()


def _streamed(turn: Message) -> bytes:
    reason = "tool_calls" if turn.calls else "stop"
    bodies = _body("delta", _said(turn), None), _body("delta", {}, reason), _body("delta", None, None)
    return "".join(f"data: {json.dumps(body)}\n\n" for body in bodies).encode() + b"data: [DONE]\n\n"
