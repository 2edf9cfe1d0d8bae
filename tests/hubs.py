"""An imitation of the hub on this machine, and how its library is led there."""

import base64
import contextlib
import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

import pytest

REPO, COMMIT = "owner/name", "c" * 40
FILES = {"config.json": b'{"model_type": "qwen3"}', "model.safetensors": b"weights" * 9, "tokenizer.json": b"{}"}


@dataclass
class Imitation:
    """What the hub has, and how it fails."""

    files: dict[str, bytes] = field(default_factory=lambda: dict(FILES))
    status: int = 200
    code: str = ""
    """X-Error-Code, by which the hub tells apart what has one status."""
    says: str = ""
    """X-Error-Message, which tells apart the rest."""
    opens: tuple[str, ...] = ()
    """What of it never fails: a gated repository lets anybody see its list of files."""
    in_chunks: bool = False
    """It has weights in chunks, which another library fetches."""
    damaged: str = ""
    """cut: the weights end early. changed: they are as long, and others."""
    is_hub: bool = True
    """Or else it answers with a page."""
    silent: bool = False
    """It takes a request and never answers."""
    private: bool | None = None
    """Of the repository that somebody pushes to; None: there is none yet."""
    refuses: int = 0
    """The status with which it answers whoever writes; 0: it takes what it gets."""
    alters: bool = False
    """It keeps other weights than it got."""
    objects: dict[str, bytes] = field(default_factory=dict)
    """What was uploaded, by its digest, before a commit names it."""
    tokens: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    open: threading.Event = field(default_factory=threading.Event)


def answers(hub_: Imitation) -> type[BaseHTTPRequestHandler]:  # noqa: C901  # an imitation of a server, class and all
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Nothing: the tests read `asked`."""

        def send(self, status: int, body: bytes, length: int, **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            if self.command != "HEAD":
                with contextlib.suppress(ConnectionError):  # whoever asked has given up, as after silence
                    self.wfile.write(body)

        def do_GET(self) -> None:
            hub_.asked.append(self.path)
            if hub_.silent:
                hub_.open.wait(30)
            if hub_.status != 200 and not any(part in self.path for part in hub_.opens):
                message = json.dumps({"error": "no"}).encode()
                said = {"X_Error_Code": hub_.code, "X_Error_Message": hub_.says}
                self.send(hub_.status, message, len(message), **{name: text for name, text in said.items() if text})
            elif not hub_.is_hub:
                self.send(200, b"<html>Welcome</html>", 20)
            elif "/tree/" in self.path:
                held = [self.entry(name, text) for name, text in hub_.files.items()]
                self.reply(held)
            elif "/api/models/" in self.path:
                self.reply({"id": REPO, "sha": COMMIT, "siblings": [], "private": bool(hub_.private)})
            elif (name := unquote(self.path.split("?")[0].split("/resolve/")[-1].partition("/")[2])) in hub_.files:
                self.file(name)
            else:
                self.send(404, b"{}", 2, X_Error_Code="EntryNotFound")

        do_HEAD = do_GET

        def do_POST(self) -> None:  # noqa: C901  # as above
            """What writing takes: a repository, how each file is to be sent, where large ones go, and a commit."""
            hub_.asked.append(self.path)
            hub_.tokens.add(self.headers.get("Authorization", ""))
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if hub_.refuses:
                self.send(hub_.refuses, b"{}", 2)
            elif self.path == "/api/repos/create":
                if hub_.private is None:
                    hub_.private = json.loads(body).get("visibility") == "private"
                    self.reply({"url": f"{self.here}/{REPO}"})
                else:
                    there = json.dumps({"error": "exists", "url": f"{self.here}/{REPO}"}).encode()
                    self.send(409, there, len(there))
            elif self.path == "/api/validate-yaml":
                self.reply({"errors": [], "warnings": []})
            elif "/preupload/" in self.path:
                asked = [one["path"] for one in json.loads(body)["files"]]
                modes = [{"path": path, "uploadMode": "lfs" if is_large(path) else "regular", "shouldIgnore": False}
                         for path in asked]  # fmt: skip
                self.reply({"files": modes})
            elif self.path.endswith("/info/lfs/objects/batch"):
                places = [
                    {
                        "oid": one["oid"],
                        "size": one["size"],
                        "actions": {"upload": {"href": f"{self.here}/{one['oid']}"}},
                    }
                    for one in json.loads(body)["objects"]
                ]
                self.reply({"transfer": "basic", "objects": places}, "application/vnd.git-lfs+json")
            elif "/commit/" in self.path:
                for line in body.splitlines():
                    step = json.loads(line)
                    if step["key"] == "lfsFile":
                        text = hub_.objects[step["value"]["oid"]]
                        hub_.files[step["value"]["path"]] = text.swapcase() if hub_.alters else text
                    elif step["key"] == "file":
                        hub_.files[step["value"]["path"]] = base64.b64decode(step["value"]["content"])
                    elif step["key"] == "deletedFile":
                        del hub_.files[step["value"]["path"]]
                self.reply({"commitUrl": f"{self.here}/{REPO}/commit/{COMMIT}", "commitOid": COMMIT})
            elif "/paths-info/" in self.path:
                self.reply([self.entry(name, hub_.files[name]) for name in parse_qs(body.decode())["paths"]])
            else:
                self.send(404, b"{}", 2)

        def do_PUT(self) -> None:
            text = self.rfile.read(int(self.headers["Content-Length"]))
            hub_.objects[digest(text)] = text
            self.send(200, b"", 0)

        @property
        def here(self) -> str:
            return f"http://{self.headers['Host']}"

        def reply(self, held: Any, kind: str = "application/json") -> None:
            body = json.dumps(held).encode()
            self.send(200, body, len(body), Content_Type=kind)

        def entry(self, name: str, text: bytes) -> dict[str, Any]:
            large = {"lfs": {"oid": digest(text), "size": len(text), "pointerSize": 1}} if is_large(name) else {}
            chunks = {"xetHash": "a" * 64} if is_large(name) and hub_.in_chunks else {}
            return {"type": "file", "path": name, "size": len(text), "oid": digest(text)[:40], **large, **chunks}

        def file(self, name: str) -> None:
            text = hub_.files[name]
            sent = text
            if is_large(name):
                sent = {"cut": text[:-9], "changed": text.swapcase()}.get(hub_.damaged, text)
            tag = digest(text) if is_large(name) else digest(text)[:40]
            self.send(200, sent, len(text), ETag=f'"{tag}"', X_Repo_Commit=COMMIT)

    return Handler


def is_large(name: str) -> bool:
    return name.endswith(".safetensors")


def digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


@contextlib.contextmanager
def served(hub_: Imitation, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Imitation]:
    """A hub on this machine, and an empty cache in a folder; no token, no proxy, and no patience."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), answers(hub_))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    ask(monkeypatch, f"http://127.0.0.1:{server.server_address[1]}")
    for name, value in {"HF_HUB_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": False, "HF_HUB_ETAG_TIMEOUT": 1,
                        "HF_TOKEN_PATH": str(folder / "token"), "HF_HUB_DOWNLOAD_TIMEOUT": 1,
                        "HF_HUB_DISABLE_XET": True}.items():  # fmt: skip
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "SSL_CERT_FILE", "HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY",
                 "NO_PROXY", "https_proxy", "http_proxy", "all_proxy", "no_proxy"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)  # between its own attempts
    anew()
    try:
        yield hub_
    finally:
        hub_.open.set()
        server.shutdown()
        server.server_close()
        anew()


def ask(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
                        endpoint + "/{repo_id}/resolve/{revision}/{filename}")  # fmt: skip


def anew() -> None:
    """Connections are kept between requests, with the settings of when they were opened."""
    from huggingface_hub.utils import close_session

    close_session()


def closed() -> str:
    """An address of this machine at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"
