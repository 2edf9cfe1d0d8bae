"""The hub, imitated on this machine: what is asked of it, and one sentence for each of its failures."""

import errno
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import httpx2
import pytest
from ruamel.yaml import YAML

import dolls
from clinrl.cli import main as cli
from clinrl.errors import Refused
from clinrl.models import hub
from hubs import COMMIT, FILES, REPO, Imitation, anew, ask, closed, served

INDEX, PARTS = "model.safetensors.index.json", {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}


@pytest.fixture
def imitation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Imitation]:
    with served(Imitation(), tmp_path, monkeypatch) as hub_:
        yield hub_


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


def test_a_folder_here_has_a_config_or_none(tmp_path: Path) -> None:
    assert hub.cached_config(str(tmp_path), "main") is None
    (tmp_path / "config.json").touch()
    assert hub.cached_config(str(tmp_path), "main") == tmp_path / "config.json"


def test_an_interrupted_download_goes_on_where_it_was(imitation: Imitation) -> None:
    imitation.damaged = "cut"
    with pytest.raises(Refused, match=r"did not deliver owner/name@c{12} whole .*what was fetched is kept") as refused:
        hub.fetch(REPO, COMMIT)
    is_one_sentence(str(refused.value))
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
    with pytest.raises(Refused, match=r"the cache has only a part of owner/name@c{12}, .*; unset it once"):
        hub.fetch(REPO, COMMIT)


def test_weights_are_compared_though_a_kill_came_before_that(
    imitation: Imitation, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(hub, "_check", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            hub.fetch(REPO, COMMIT)
    looked = mock.Mock(wraps=hub._check)
    monkeypatch.setattr(hub, "_check", looked)
    for _ in range(2):
        hub.fetch(REPO, COMMIT)
    assert looked.call_count == 1


def shared(imitation: Imitation, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the library keeps files in chunks: once for all repositories, under a hash of another kind."""
    imitation.in_chunks = True
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", False)

    def get(*, incomplete_path: Path, **_: object) -> None:
        text = FILES["model.safetensors"]
        incomplete_path.write_bytes(text.swapcase() if imitation.damaged else text)

    monkeypatch.setattr("huggingface_hub.file_download.xet_get", get)


@pytest.mark.parametrize("is_shared", [False, True])
def test_weights_that_are_not_those_of_the_commit_are_removed(
    imitation: Imitation, monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    if is_shared:
        shared(imitation, monkeypatch)
    imitation.damaged = "changed"
    with pytest.raises(Refused, match=r"model.safetensors of owner/name is not what the hub announced") as refused:
        hub.fetch(REPO, COMMIT)
    is_one_sentence(str(refused.value))
    imitation.damaged = ""
    file = hub.fetch(REPO, COMMIT) / "model.safetensors"
    assert file.read_bytes() == FILES["model.safetensors"]
    assert (file.resolve().name == "a" * 64) == is_shared


Break = Callable[[Imitation, pytest.MonkeyPatch], object]


def answering(status: int, code: str = "", says: str = "", opens: tuple[str, ...] = ()) -> Break:
    def to(imitation: Imitation, _: pytest.MonkeyPatch) -> None:
        imitation.status, imitation.code, imitation.says, imitation.opens = status, code, says, opens

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


def at(endpoint: str, **environment: str) -> Break:
    def to(_: Imitation, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        ask(monkeypatch, endpoint)

    return to


def raising(error: Exception, where: str = "huggingface_hub.file_download.http_get") -> Break:
    def to(_: Imitation, monkeypatch: pytest.MonkeyPatch) -> None:
        def fails(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr(where, fails)

    return to


def full(kind: int) -> Break:
    return raising(OSError(kind, "no"))


def in_chunks(imitation: Imitation, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the hub has large files; the message is what that library said of a host that was away."""
    imitation.in_chunks = True
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", False)
    away = RuntimeError("Task error: File reconstruction error: CAS Client Error: error sending request")
    raising(away, "huggingface_hub.file_download.xet_get")(imitation, monkeypatch)


def no_folder(_: Imitation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(Path(__file__) / "cache"))


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
    ("dead proxy", by_a_dead_proxy, r"the hub cannot be reached for owner/name@main .* and HTTPS_PROXY"),
    ("proxy by SOCKS", at("http://hub.invalid", ALL_PROXY="socks5://u:hf_secret@127.0.0.1:1"), r"a proxy did not let"),
    ("no proxy", at("http://hub.invalid", HTTP_PROXY="ftp://u:hf_secret@x"), r"a proxy did not let owner/name@main"),
    ("proxy asks", answering(407), r"the proxy asks for a login \(407\); set HTTPS_PROXY"),
    ("certificate", raising(httpx2.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] self-signed"), "httpx2.Client.send"),
     r"no root certificate is known for http.*/owner/name; set SSL_CERT_FILE"),
    ("no certificates", at("https://hub.invalid", SSL_CERT_FILE="/absent.pem"), r"no root certificate is known for"),
    ("no address", at("u:hf_secret@hub.invalid"), r"HF_ENDPOINT is no address such as .*; correct it"),
    ("token", both(token, at("http://hub.invalid", HF_TOKEN="hf_secret\u00e4")), r"HF_TOKEN has a character that no"),
    ("leads nowhere", answering(302), r"the hub did not deliver owner/name@main whole \(KeyError\)"),
    ("disabled", answering(403, says="Access to this resource is disabled."), r"the hub has disabled owner/name, so"),
    ("forbidden, no token", answering(403), r"the hub refuses requests without HF_TOKEN for owner/name \(403\)"),
    ("silence", silent, r"the hub did not answer in time about owner/name@main"),
    ("gated, no token", answering(401, "GatedRepo"), r"is gated; accept its licence on http.*/owner/name, set HF"),
    ("gated, licence", both(token, answering(403, "GatedRepo")), r"gated for the account of HF_TOKEN"),
    ("no repository", answering(404, "RepoNotFound"), r"the hub has no owner/name, or hides it from requests without"),
    ("hidden", both(token, answering(404, "RepoNotFound")), r"or hides it from the account of HF_TOKEN; check"),
    ("no revision", answering(404, "RevisionNotFound"), r"owner/name has no revision main; http.*/commits/main lists"),
    ("bad token", both(token, answering(401, says="Invalid credentials in Authorization header")),
     r"the hub refuses HF_TOKEN for owner/name \(401\)"),
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
    ("gated files", answering(401, "GatedRepo", opens=("/api/",)), r"owner/name is gated; accept its licence"),
    ("a file is gone", answering(404, "EntryNotFound", opens=("/api/",)), r"the hub lists a file of owner/name@c{12}"),
    ("too many files", answering(429, opens=("/api/",)), r"the hub has had too many requests \(429\)"),
    ("chunks", in_chunks, r"the hub did not deliver owner/name@c{12} whole \(RuntimeError\); check the network"),
    ("a full disk in words", raising(RuntimeError("No space left on device (os error 28)")), "no space is left"),
    ("read-only disk", full(errno.EROFS), r"may not be written; set HF_HUB_CACHE to a folder that may"),
    ("no folder", no_folder, r"test_hub.py/cache may not be written; set HF_HUB_CACHE to a folder that may"),
    ("access", full(errno.EACCES), r"may not be written; set HF_HUB_CACHE to a folder that may"),
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


PART: list[tuple[str, Break, str]] = [
    ("offline", offline, r"the cache has only a part of owner/name@c{12}"),
    ("no network", unreachable, r"the hub cannot be reached for owner/name@c{12} .* HTTPS_PROXY, then start the same"),
    ("broken", answering(500), r"the hub failed at owner/name@c{12} \(500\)"),
    ("gated", answering(401, "GatedRepo"), r"owner/name is gated; accept its licence"),
]  # fmt: skip


@pytest.mark.parametrize(("fail", "says"), [case[1:] for case in PART], ids=[case[0] for case in PART])
@pytest.mark.parametrize(
    "held",
    [
        ["config.json"],
        [INDEX, "model-1.safetensors", "tokenizer.json"],
        ["config.json", "model.safetensors", "vocab.json"],
    ],
    ids=["no weights", "a part", "no whole tokenizer"],
)
def test_a_cache_without_a_list_of_files_is_no_whole_checkpoint(
    imitation: Imitation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, held: list[str], fail: Break, says: str
) -> None:
    """As whoever opened only the configuration leaves it, or an older library that was stopped."""
    imitation.files = FILES | {
        "model-1.safetensors": b"1",
        "model-2.safetensors": b"2",
        INDEX: json.dumps(PARTS).encode(),
        "vocab.json": b"{}",
    }
    folder = tmp_path / "cache/models--owner--name/snapshots" / COMMIT
    folder.mkdir(parents=True)
    for name in held:
        (folder / name).write_bytes(imitation.files[name])
    with monkeypatch.context() as broken:
        fail(imitation, broken)
        with pytest.raises(Refused, match=says) as refused:
            hub.fetch(REPO, COMMIT)
        is_one_sentence(str(refused.value))
    imitation.status = 200
    anew()
    assert {file.name for file in hub.fetch(REPO, COMMIT).iterdir()} == imitation.files.keys()


def test_code_and_pickles_are_not_fetched(imitation: Imitation) -> None:
    imitation.files = FILES | {
        "modeling_own.py": b"1 / 0",
        "pytorch_model.bin": b"pickle",
        "original/consolidated.pth": b"",
    }
    assert {file.name for file in hub.fetch(REPO, COMMIT).iterdir()} == FILES.keys()


def test_a_command_says_one_line_and_touches_nothing(
    imitation: Imitation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    imitation.status = 503
    monkeypatch.chdir(tmp_path)
    full = {"repo": REPO, "revision": "main", "quantize": "none"}
    bases = {"esi": {**dolls.PARAMS["bases"]["esi"], "full": full}}
    YAML(typ="safe").dump({**dolls.PARAMS, "scale": "full", "bases": bases}, Path("params.yaml"))
    assert cli.main(["base", "esi"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        f"clinrl: the hub failed at owner/name@main (503); try later, and {hub.KEPT}"
    ]
    assert not list(tmp_path.glob("data/*/*/*"))


@pytest.mark.parametrize("revision", ["main", COMMIT])
def test_a_name_that_is_none_is_refused(imitation: Imitation, revision: str) -> None:
    with pytest.raises(Refused, match=r"'a/b/c' is not the name of a hub repository"):
        hub.commit_of("a/b/c", revision)
    with pytest.raises(Refused, match=r"'a/b/c' is not the name of a hub repository"):
        hub.fetch("a/b/c", COMMIT)
