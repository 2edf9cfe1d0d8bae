"""The hub, imitated on this machine: what is asked of it, and one sentence for each of its failures."""

import errno
import hashlib
import json
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from clinrl.errors import Refused
from clinrl.models import hub

REPO, COMMIT = "owner/name", "c" * 40
FILES = {"config.json": b'{"model_type": "qwen3"}', "model.safetensors": b"weights" * 9}


@dataclass
class Imitation:
    """What the hub has, and how it fails."""

    files: dict[str, bytes] = field(default_factory=lambda: dict(FILES))
    status: int = 200
    code: str = ""
    """X-Error-Code, by which the hub tells apart what has one status."""
    damaged: str = ""
    """cut: the weights end early. changed: they are as long, and others."""
    is_hub: bool = True
    """Or else it answers with a page."""
    silent: bool = False
    """It takes a request and never answers."""
    asked: list[str] = field(default_factory=list)
    open: threading.Event = field(default_factory=threading.Event)


def answers(hub_: Imitation) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Nothing: the tests read `asked`."""

        def send(self, status: int, body: bytes, length: int, **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_GET(self) -> None:
            hub_.asked.append(self.path)
            if hub_.silent:
                hub_.open.wait(30)
            if hub_.status != 200:
                message = json.dumps({"error": "no"}).encode()
                self.send(hub_.status, message, len(message), **({"X_Error_Code": hub_.code} if hub_.code else {}))
            elif not hub_.is_hub:
                self.send(200, b"<html>Welcome</html>", 20)
            elif "/tree/" in self.path:
                held = [self.entry(name, text) for name, text in hub_.files.items()]
                self.reply(held)
            elif "/api/models/" in self.path:
                self.reply({"id": REPO, "sha": COMMIT, "siblings": []})
            else:
                self.file(self.path.split("/")[-1].split("?")[0])

        do_HEAD = do_GET

        def reply(self, held: Any) -> None:
            body = json.dumps(held).encode()
            self.send(200, body, len(body), Content_Type="application/json")

        def entry(self, name: str, text: bytes) -> dict[str, Any]:
            large = {"lfs": {"oid": digest(text), "size": len(text), "pointerSize": 1}} if is_large(name) else {}
            return {"type": "file", "path": name, "size": len(text), "oid": digest(text)[:40], **large}

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


@pytest.fixture
def imitation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Imitation]:
    """A hub on this machine, and an empty cache; no token, no proxy, and no patience."""
    hub_ = Imitation()
    server = ThreadingHTTPServer(("127.0.0.1", 0), answers(hub_))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    ask(monkeypatch, f"http://127.0.0.1:{server.server_address[1]}")
    for name, value in {"HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": False, "HF_HUB_ETAG_TIMEOUT": 1,
                        "HF_HUB_DOWNLOAD_TIMEOUT": 1, "HF_HUB_DISABLE_XET": True}.items():  # fmt: skip
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    for name in ("HF_TOKEN", "HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)  # between its own attempts
    anew()
    yield hub_
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


def test_a_branch_is_pinned_and_fetched_once(imitation: Imitation, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub.commit_of(REPO, "main") == COMMIT
    folder = hub.fetch(REPO, COMMIT)
    assert {file.name for file in folder.iterdir()} == FILES.keys()
    imitation.asked.clear()
    assert hub.fetch(REPO, COMMIT) == folder
    assert hub.commit_of(REPO, COMMIT) == COMMIT
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert hub.fetch(REPO, COMMIT) == folder
    assert hub.commit_of(REPO, COMMIT) == COMMIT
    assert not imitation.asked


def test_an_interrupted_download_goes_on_where_it_was(imitation: Imitation) -> None:
    imitation.damaged = "cut"
    with pytest.raises(Refused, match=r"did not deliver owner/name@c{12} whole .*what was fetched is kept"):
        hub.fetch(REPO, COMMIT)
    imitation.damaged = ""
    imitation.asked.clear()
    assert (hub.fetch(REPO, COMMIT) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert not [path for path in imitation.asked if path.endswith("config.json")]


def test_a_part_of_a_checkpoint_is_not_taken_for_the_whole(
    imitation: Imitation, monkeypatch: pytest.MonkeyPatch
) -> None:
    imitation.damaged = "cut"
    with pytest.raises(Refused):
        hub.fetch(REPO, COMMIT)
    offline(imitation, monkeypatch)
    with pytest.raises(Refused, match=r"the cache has a part of owner/name@c{12} only, .*; unset it once"):
        hub.fetch(REPO, COMMIT)


def test_weights_that_are_not_those_of_the_commit_are_removed(imitation: Imitation) -> None:
    imitation.damaged = "changed"
    with pytest.raises(Refused, match=r"model.safetensors of owner/name is not what the hub announced"):
        hub.fetch(REPO, COMMIT)
    imitation.damaged = ""
    assert (hub.fetch(REPO, COMMIT) / "model.safetensors").read_bytes() == FILES["model.safetensors"]


Break = Callable[[Imitation, pytest.MonkeyPatch], object]


def answering(status: int, code: str = "") -> Break:
    def to(imitation: Imitation, _: pytest.MonkeyPatch) -> None:
        imitation.status, imitation.code = status, code

    return to


def both(*breaks: Break) -> Break:
    return lambda imitation, monkeypatch: [one(imitation, monkeypatch) for one in breaks]


def token(_: Imitation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")


def offline(_: Imitation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def unreachable(_: Imitation, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(monkeypatch, closed())


def unresolved(_: Imitation, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(monkeypatch, "http://hub.invalid")


def by_a_dead_proxy(_: Imitation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", closed())
    ask(monkeypatch, "http://hub.invalid")


def full(kind: int) -> Break:
    def to(_: Imitation, monkeypatch: pytest.MonkeyPatch) -> None:
        def fails(*_: object, **__: object) -> None:
            raise OSError(kind, "no")

        monkeypatch.setattr("huggingface_hub.file_download.http_get", fails)

    return to


def pickled(imitation: Imitation, _: pytest.MonkeyPatch) -> None:
    imitation.files = {"config.json": b"{}", "pytorch_model.bin": b"pickle"}


def captive(imitation: Imitation, _: pytest.MonkeyPatch) -> None:
    """As the portal of a hotel's network answers whatever it is asked."""
    imitation.is_hub = False


def silent(imitation: Imitation, _: pytest.MonkeyPatch) -> None:
    imitation.silent = True


FAILURES: list[tuple[str, Break, str]] = [
    ("offline", offline, r"owner/name@main is not in the cache, and HF_HUB_OFFLINE forbids .*\(none\), or unset"),
    ("no network", unreachable, r"the hub cannot be reached for owner/name@main \(ConnectError\); check the network"),
    ("no such host", unresolved, r"the hub cannot be reached for owner/name@main"),
    ("dead proxy", by_a_dead_proxy, r"(the proxy did not let|the hub cannot be reached for) owner/name@main"),
    ("silence", silent, r"the hub did not answer in time about owner/name@main"),
    ("gated, no token", answering(401, "GatedRepo"), r"is gated; accept its licence on http.*/owner/name, set HF"),
    ("gated, licence", both(token, answering(403, "GatedRepo")), r"gated for the account of HF_TOKEN"),
    ("no repository", answering(404, "RepoNotFound"), r"the hub has no owner/name, or hides it from whoever has no"),
    ("hidden", both(token, answering(404, "RepoNotFound")), r"or hides it from the account of HF_TOKEN; check"),
    ("no revision", answering(404, "RevisionNotFound"), r"owner/name has no revision main; http.*/commits/main lists"),
    ("bad token", both(token, answering(401)), r"the hub (refuses HF_TOKEN for|has no) owner/name"),
    ("forbidden", both(token, answering(403)), r"the hub refuses HF_TOKEN for owner/name \(403\); set HF_TOKEN"),
    ("captive portal", captive, r"the hub did not deliver owner/name@main whole \(JSONDecodeError\); check"),
    ("too many", answering(429), r"the hub has had too many requests \(429\); wait some minutes"),
    ("broken", answering(500), r"the hub failed at owner/name@main \(500\); try later"),
    ("overloaded", answering(503), r"the hub failed at owner/name@main \(503\); try later"),
    ("bad gateway", answering(504), r"the hub failed at owner/name@main \(504\); try later"),
]  # fmt: skip


@pytest.mark.parametrize(("fail", "says"), [case[1:] for case in FAILURES], ids=[case[0] for case in FAILURES])
def test_a_revision_that_cannot_be_named_is_one_sentence(
    imitation: Imitation, monkeypatch: pytest.MonkeyPatch, fail: Break, says: str
) -> None:
    fail(imitation, monkeypatch)
    with pytest.raises(Refused, match=says) as refused:
        hub.commit_of(REPO, "main")
    is_one_sentence(str(refused.value))


def is_one_sentence(said: str) -> None:
    assert "\n" not in said
    assert len(said) < 300
    assert "hf_secret" not in said
    assert "; " in said  # what happened; what to do


UNDELIVERED: list[tuple[str, Break, str]] = [
    ("offline", offline, r"owner/name@c{12} is not in the cache, and HF_HUB_OFFLINE forbids"),
    ("no network", unreachable, r"the hub cannot be reached for owner/name@c{12}"),
    ("gated", answering(401, "GatedRepo"), r"owner/name is gated; accept its licence"),
    ("no revision", answering(404, "RevisionNotFound"), r"owner/name has no revision c{40}"),
    ("broken", answering(503), r"the hub failed at owner/name@c{12} \(503\)"),
    ("full disk", full(errno.ENOSPC), r"no space is left for owner/name@c{12} in .*cache; free some"),
    ("quota", full(errno.EDQUOT), r"no space is left for owner/name@c{12}"),
    ("read-only", full(errno.EACCES), r"may not be written; set HF_HUB_CACHE to a folder that may"),
    ("pickle", pickled, r"owner/name holds no model\*.safetensors, and other weights are never opened; choose one"),
]  # fmt: skip


@pytest.mark.parametrize(("fail", "says"), [case[1:] for case in UNDELIVERED], ids=[case[0] for case in UNDELIVERED])
def test_a_checkpoint_that_is_not_delivered_is_one_sentence(
    imitation: Imitation, monkeypatch: pytest.MonkeyPatch, fail: Break, says: str
) -> None:
    fail(imitation, monkeypatch)
    with pytest.raises(Refused, match=says) as refused:
        hub.fetch(REPO, COMMIT)
    is_one_sentence(str(refused.value))


def test_offline_names_the_commits_that_are_there(imitation: Imitation, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hub.fetch(REPO, COMMIT)
    offline(imitation, monkeypatch)
    with pytest.raises(Refused, match=rf"set `revision` to a commit that the cache has \({COMMIT}\)"):
        hub.commit_of(REPO, "a-tag")
    shutil.rmtree(folder)
    with pytest.raises(Refused, match=r"owner/name@c{12} is not in the cache"):
        hub.fetch(REPO, COMMIT)


def test_a_name_that_is_none_is_refused(imitation: Imitation) -> None:
    with pytest.raises(Refused, match=r"'a/b/c' is no name of a repository of the hub"):
        hub.commit_of("a/b/c", "main")
