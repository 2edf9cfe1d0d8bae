"""The engine writes what transformers writes, says who it is, and refuses in a sentence whatever else may happen."""

import importlib
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from safetensors.torch import load_file
from starlette.testclient import TestClient

import dolls
import engines
from clinrl import paths
from clinrl.artifacts import identity, read_manifest, seal, staged, write_json
from clinrl.config.machine import Vllm
from clinrl.config.params import Params
from clinrl.config.schema import Mode
from clinrl.data import dataset
from clinrl.data.dataset import read_cases
from clinrl.errors import ArtefactError, EngineError, Refused
from clinrl.evaluation import answers, evaluate
from clinrl.models import bases, engine, engine_server, opening, rollout, vllm_client
from clinrl.models.chat import encode, render
from clinrl.models.engine import Engine
from clinrl.models.generate import Prompt, Sampler
from clinrl.models.journal import Journal
from clinrl.models.vllm_client import Client
from clinrl.registry.pyfunc import Decoding, Served
from clinrl.runtime.guard import EngineFence, Fence, Limits
from clinrl.serving.backends import Remote
from clinrl.serving.live import Version
from clinrl.serving.server import Bounds, Service
from clinrl.tasks.base import get_task
from clinrl.training.trl import write_adapter
from processes import eventually

HOW: dict[str, Any] = {"thinking": True, "temperature": 0.0, "budget": 24, "seed": 3}


def full() -> Params:
    """The doll's params at full scale, above its own base as a checkpoint; for a folder that has the doll's project."""
    shutil.copytree(paths.base("esi"), "checkpoint")
    changed = {"exam": "x1", "embedded": dolls.PARAMS["bases"]["esi"]["embedded"]}
    changed["full"] = {"repo": str(Path("checkpoint").resolve()), "revision": "main", "quantize": "none"}
    params = dolls.params(scale="full", bases={"esi": changed})
    bases.stage(params, "esi")
    return params


def write(name: str, seed: int) -> Path:
    """A sealed adapter of a version that was never trained."""
    model, tokenizer = bases.open_base(paths.base("esi"), for_training=False)
    with staged(paths.adapter(name)) as out:
        write_adapter(engines.adapt(model, seed), tokenizer, engines.SPEC, out)
        seal(
            out, kind="adapter", name=name, task="esi", task_version=get_task("esi").version, spec={},
            inputs={"base": identity(read_manifest(paths.base("esi")))},
        )  # fmt: skip
    return paths.adapter(name)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The doll's project at full scale, with two adapters. Not to be written to."""
    folder = tmp_path_factory.mktemp("full")
    shutil.copytree(dolls.built(), folder, dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        full()
        write("v1", 1)
        write("v2", 2)
    return folder


@pytest.fixture
def project(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(made)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(vllm_client, "PAUSES_S", (0.0, 0.0))
    return made


@pytest.fixture
def server(project: Path) -> engines.Imitation:
    """A server of the doll's base; `connect` starts it."""
    model, _ = bases.open_base(paths.base("esi"), for_training=False)
    return engines.Imitation(model, engine.model_of(paths.base("esi")))


@pytest.fixture
def connect(
    server: engines.Imitation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Engine]]:
    """The engine of the doll's base at the imitation, with copies of adapters that no other test uses."""
    monkeypatch.setattr(paths, "engine_adapters", lambda _: tmp_path / "engines")
    with ExitStack() as stack:

        def connected(**settings: Any) -> Engine:
            url = stack.enter_context(engines.served(server))
            monkeypatch.setenv(vllm_client.TOKEN, server.key)
            return engine.connect("esi", Vllm(url=url, **settings))

        yield connected


def prompts(count: int = 6) -> list[Prompt]:
    task = get_task("esi")
    return [Prompt(case.id, task.prompt(case.facts)) for case in list(read_cases(paths.cases("d1"), task))[:count]]


@pytest.mark.long
@pytest.mark.parametrize("version", ["", "v1"])
@pytest.mark.parametrize("thinking", [True, False])
def test_greedy_it_writes_the_tokens_of_transformers(
    connect: Callable[..., Engine], version: str, thinking: bool
) -> None:
    asked = prompts()
    model, tokenizer = bases.open_base(paths.base("esi"), for_training=False)
    served = connect()
    if version:
        model = opening.adapted(model, paths.adapter(version)).eval()
        served.adopt(paths.adapter(version))
        served.check_adopted()
    how = HOW | {"thinking": thinking}
    stock = Sampler(model, tokenizer).sample(asked, **how)
    done: list[int] = []
    assert served.sample(asked, progress=lambda: done.append(1), **how) == stock
    assert len(done) == len(asked)


@pytest.mark.long
def test_the_adapter_is_another_model_and_the_base_stays_what_it_was(
    connect: Callable[..., Engine], server: engines.Imitation
) -> None:
    served = connect()
    plain = served.sample(prompts(), **HOW)
    served.adopt(paths.adapter("v1"))
    first = served.sample(prompts(), **HOW)
    served.adopt(paths.adapter("v2"))
    assert served.sample(prompts(), **HOW) != first != plain
    served.adapter = None
    assert served.sample(prompts(), **HOW) == plain
    name = served.name_of(paths.adapter("v2"))
    assert server.adapters == {name: paths.engine_adapters("esi").resolve() / name}, "v1 is used by nobody any more"


@pytest.mark.long
def test_an_adapter_stays_while_anybody_uses_it_as_it_was_when_it_was_loaded(
    connect: Callable[..., Engine], server: engines.Imitation, tmp_path: Path
) -> None:
    """An exam and a training use the parent; the training goes on, and the parent is trained anew meanwhile."""
    exam, training, folder = connect(), connect(), tmp_path / "adapter"
    shutil.copytree(paths.adapter("v1"), folder)
    for one in (exam, training):
        one.adopt(folder)
    name, loaded = str(exam.adapter), server.paths.count("/v1/load_lora_adapter")
    assert loaded == 1
    before = weights_of(server.adapters[name])
    shutil.rmtree(folder)
    shutil.copytree(paths.adapter("v2"), folder)
    training.adopt(folder)
    assert server.adapters.keys() == {name, training.adapter}
    assert weights_of(server.adapters[name]) == before
    exam.let_go()
    training.adopt(folder)
    assert [*server.adapters] == [training.adapter]
    assert [one.name for one in paths.engine_adapters("esi").iterdir() if one.is_dir()] == [training.adapter]


def weights_of(folder: Path) -> bytes:
    return (folder / opening.WEIGHTS).read_bytes()


HOLDS = """
import fcntl, sys
file = open(sys.argv[1], "r+")
fcntl.flock(file, fcntl.LOCK_SH)
print("holds", flush=True)
sys.stdin.read()
"""


@pytest.mark.long
def test_what_a_killed_process_used_goes_with_the_next_change(
    connect: Callable[..., Engine], server: engines.Imitation
) -> None:
    here = connect()
    here.adopt(paths.adapter("v1"))
    first = server.adapters[str(here.adapter)]
    command = [sys.executable, "-c", HOLDS, str(first / opening.CONFIG)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as there:
        assert there.stdout is not None
        assert there.stdout.readline() == "holds\n"
        here.adopt(paths.adapter("v2"))
        assert server.adapters.keys() == {first.name, here.adapter}
        there.kill()
    first.with_name(f".{first.name}.partial-1").mkdir()  # of one that was killed while it copied
    here.adopt(paths.adapter("v2"))
    assert [*server.adapters] == [here.adapter]
    assert {one.name for one in first.parent.iterdir()} == {here.adapter, ".lock"}


@pytest.mark.long
def test_an_adapter_that_is_replaced_while_it_is_copied_is_refused(
    connect: Callable[..., Engine], server: engines.Imitation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name would be the digest of other weights, for all who use that name later."""
    served, folder, lock = connect(), tmp_path / "adapter", engine.locked
    shutil.copytree(paths.adapter("v1"), folder)

    def replaced(file: Path) -> Any:
        shutil.copytree(paths.adapter("v2"), folder, dirs_exist_ok=True)
        return lock(file)

    monkeypatch.setattr(engine, "locked", replaced)
    with pytest.raises(EngineError, match="adapter was replaced meanwhile; give the same command again"):
        served.adopt(folder)
    assert [one.name for one in paths.engine_adapters("esi").iterdir()] == [".lock"]


@pytest.mark.long
def test_checkouts_that_ask_one_server_do_not_unload_each_other_s_adapters(
    connect: Callable[..., Engine], server: engines.Imitation, tmp_path: Path
) -> None:
    here, there = connect(), connect()
    there.copies = tmp_path / "elsewhere"
    for one in (here, there):
        one.adopt(paths.adapter("v1"))
    assert server.adapters.keys() == {here.adapter, there.adapter}
    there.adopt(paths.adapter("v2"))
    assert server.adapters.keys() == {here.adapter, there.adapter}, "v1 of this checkout is still there"


@pytest.mark.long
def test_a_drawn_completion_depends_on_nothing_beside_it(connect: Callable[..., Engine]) -> None:
    served, how = connect(at_once=3), HOW | {"temperature": 1.5}
    asked = prompts()
    once = served.sample(asked, **how)
    assert served.sample(asked[::-1], **how) == once[::-1]
    assert served.sample(asked[2:3], **how) == once[2:3]
    assert served.sample(asked, **how | {"seed": 4}) != once
    same = served.sample([asked[0]] * 4, **how)
    assert same[0] == once[0]
    assert len({one.ids for one in same}) > 1, "each repeat of a prompt has a seed of its own"


def test_requests_are_token_ids_with_everything_that_decides_and_so_many_at_once(
    connect: Callable[..., Engine], server: engines.Imitation
) -> None:
    served = connect(at_once=2)
    served.sample([*prompts(3), Prompt("left", (), [5] * 9, left=4)], **HOW | {"top_p": 0.5, "temperature": 0.7})
    tokenizer = served.tokenizer
    assert [body["max_tokens"] for body in server.asked if body["prompt"] == [5] * 9] == [4]
    texts = {tuple(encode(tokenizer, [render(tokenizer, p.messages, True)])[0]) for p in prompts(3)}
    assert {tuple(body["prompt"]) for body in server.asked} == texts | {(5,) * 9}
    body = server.asked[0]
    said = {"temperature": 0.7, "top_p": 0.5, "top_k": 0, "min_p": 0.0, "logprobs": 0, "return_token_ids": True}
    said |= {"stop_token_ids": [tokenizer.eos_token_id], "repetition_penalty": 1.0, "model": server.name}
    assert {key: body[key] for key in said} == said
    assert 1 <= server.most_at_once <= 2


# Connections


def certificate(folder: Path, host: str) -> Path:
    """A certificate of a host that it signed itself, with its private key behind it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name, now = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)]), datetime.now(UTC)
    alternative: x509.GeneralName = x509.DNSName(host)
    with suppress(ValueError):
        alternative = x509.IPAddress(ip_address(host))
    made = x509.CertificateBuilder(
        name, name, key.public_key(), x509.random_serial_number(), now - timedelta(hours=1), now + timedelta(hours=1)
    )
    for extension in (x509.SubjectAlternativeName([alternative]), x509.BasicConstraints(ca=True, path_length=None)):
        made = made.add_extension(extension, critical=False)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    file = folder / f"{host}.pem"
    file.write_bytes(made.sign(key, SHA256()).public_bytes(Encoding.PEM) + private)
    return file


@pytest.mark.parametrize(
    ("host", "trusted", "refusal"),
    [
        ("127.0.0.1", True, None),
        ("127.0.0.1", False, "CERTIFICATE_VERIFY_FAILED"),
        ("another.example", True, "CERTIFICATE_VERIFY_FAILED"),
    ],
)
def test_a_server_elsewhere_shows_a_certificate_of_its_host_that_is_trusted_here_before_it_sees_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, trusted: bool, refusal: str | None
) -> None:
    file, tls = certificate(tmp_path, host), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(file)
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(file))
    server = engines.Imitation(None, "a-model")
    with engines.served(server, tls) as url:
        client = Client(
            url, server.key, Vllm(url=url, timeout_s=20), "a-model", ends=frozenset([2]), vocabulary=9, start="start it"
        )
        if refusal:
            says = f"the server at {url} has no certificate to trust ({refusal})"
            with pytest.raises(EngineError, match=f"^{re.escape(says)}$"):
                client.check()
            assert server.paths == []
        else:
            client.check()
            assert client.max_length == server.max_length


# Episodes


@pytest.mark.long
def test_episodes_are_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn goes on from the tokens of those before it; the model was taught to call a tool and then another."""
    monkeypatch.setattr(vllm_client, "PAUSES_S", (0.0,))
    task = get_task("audit")
    cases = list(task.cases(3, 3, pool="train", mix="easy"))
    model, tokenizer = engines.auditor()
    mode = Mode(thinking=False, temperature=0.0, max_new_tokens={"embedded": 100, "full": 100})
    folder = tmp_path / "adapter"
    adapted = engines.adapt(model, 1, std=0.02)
    folder.mkdir()
    (tmp_path / "data/bases/audit").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    write_adapter(adapted, tokenizer, engines.SPEC | {"task": "audit"}, folder)
    budget = 1200
    stock = rollout.run(Sampler(adapted, tokenizer), task, cases, mode, budget, 1)
    with adapted.disable_adapter():
        plain = rollout.run(Sampler(adapted, tokenizer), task, cases, mode, budget, 1)
    imitation = engines.Imitation(adapted.unload(), "audit", max_length=8192)
    with engines.served(imitation) as url:
        served = engines.asked(url, imitation, tokenizer)
        assert rollout.run(served, task, cases, mode, budget, 1) == plain
        served.adopt(folder)
        assert rollout.run(served, task, cases, mode, budget, 1) == stock
    assert max(sum(message.role == "assistant" for message in one.messages) for one in stock) > 2
    assert any(message.role == "tool" for one in stock for message in one.messages)


# What may go wrong


def fail(**how: Any) -> Callable[[engines.Imitation], None]:
    def failing(server: engines.Imitation) -> None:
        for name, value in how.items():
            setattr(server, name, value)

    return failing


@pytest.mark.parametrize(
    ("failing", "sentence"),
    [
        (fail(name="owner/other@main"), r"serves 'owner/other@main', not .*checkpoint@local-.*:bfloat16; start one"),
        (fail(key="other"), "refuses the key; set CLINRL_VLLM_TOKEN to the one that it was started with"),
        (fail(takes_adapters=False), "takes no adapters while it runs; start one with `clinrl engine esi`"),
        (fail(has_lora=False), "takes no adapters while it runs; start one with `clinrl engine esi`"),
        (fail(layers="['lm_head']"), r"does not know a layer of .*/clinrl-.*'lm_head'.*; set sampler to transformers"),
        (fail(max_rank=2), r"no room for the rank of .*/clinrl-.* \(LoRA rank 4 is greater than max_lora_rank 2"),
        (fail(max_length=40), r"its prompt is \d+ tokens, and with a budget of 24 it exceeds the 40 that the vLLM"),
        (fail(ignores_adapters=True), "answers with the adapter as without it: it does not know the layers"),
        (fail(busy=99), r"failed \(503: busy\); look at its log"),
        (fail(drops=99), r"no vLLM server answers at http://127.0.0.1:\d+ \(RemoteDisconnected\); start one with `cli"),
    ],
)  # fmt: skip
def test_what_a_server_may_not_be_is_one_sentence(
    connect: Callable[..., Engine], server: engines.Imitation, monkeypatch: pytest.MonkeyPatch,
    failing: Callable[[engines.Imitation], None], sentence: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(engine, "key_of", lambda _: "k" * 40)
    failing(server)

    def use() -> None:
        served = connect()
        served.adopt(paths.adapter("v1"))
        served.check_adopted()
        served.sample(prompts(1), **HOW)

    with pytest.raises(EngineError, match=sentence):
        use()


def test_a_server_that_is_away_silent_or_elsewhere_without_a_key(
    project: Path, connect: Callable[..., Engine], server: engines.Imitation, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EngineError, match=r"no vLLM server answers at http://127.0.0.1:1 \(ConnectionRefusedError\)"):
        engine.connect("esi", Vllm(url="http://127.0.0.1:1"))
    monkeypatch.delenv(vllm_client.TOKEN, raising=False)
    with pytest.raises(EngineError, match=r"elsewhere:8000 is on another machine, and no key is set; set CLINRL_VLLM"):
        engine.connect("esi", Vllm(url="https://elsewhere:8000"))
    with pytest.raises(EngineError, match="no vLLM server was started here; start one with `clinrl engine esi`"):
        engine.connect("esi", Vllm())
    served = connect()
    monkeypatch.setattr(Client, "_send", lambda *_: (_ for _ in ()).throw(TimeoutError))
    with pytest.raises(EngineError, match=r"did not answer in 600 s; raise vllm.timeout_s in machine.yaml, or lower"):
        served.sample(prompts(1), **HOW)


def test_a_lost_connection_and_a_busy_server_are_asked_again(
    connect: Callable[..., Engine], server: engines.Imitation
) -> None:
    served = connect(at_once=1)
    once = served.sample(prompts(2), **HOW | {"temperature": 1.0})
    server.drops = server.busy = 1
    assert served.sample(prompts(2), **HOW | {"temperature": 1.0}) == once


def choice(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    def changed(answer: dict[str, Any]) -> Any:
        return answer | {"choices": [answer["choices"][0] | changes]}

    return changed


LOGS = {"token_logprobs": [-1.0] * 3}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (lambda answer: answer | {"model": "another"}, "did not send a completion of"),
        (lambda answer: answer | {"choices": answer["choices"] * 2}, "did not send a completion of"),
        (lambda answer: [answer], "did not send JSON"),
        (lambda answer: answer["choices"], "did not send JSON"),
        (lambda _: "<html>", "did not send JSON"),
        (lambda _: "[" * 10**6, "did not send JSON"),
        (choice(prompt_token_ids=[1, 2]), "did not send the prompt that it was sent"),
        (choice(token_ids=None), "as many log-probabilities as tokens, within the budget"),
        (choice(token_ids=[], logprobs={"token_logprobs": []}), "as many log-probabilities as tokens"),
        (choice(token_ids=[5] * 99, logprobs={"token_logprobs": [-1.0] * 99}), "within the budget"),
        (choice(token_ids=[5, 6, 10**6], logprobs=LOGS), "tokens of the model's vocabulary"),
        (choice(token_ids=[5, 6, True], logprobs=LOGS), "tokens of the model's vocabulary"),
        (choice(token_ids=[5, 6, -1], logprobs=LOGS), "tokens of the model's vocabulary"),
        (choice(token_ids=[5, 6, 7], logprobs={"token_logprobs": [-1.0, None, -1.0]}), "send log-probabilities"),
        (choice(token_ids=[5, 6, 7], logprobs={"token_logprobs": [-1.0, 3.0, -1.0]}), "send log-probabilities"),
        (choice(token_ids=[5, 6, 7], logprobs=LOGS), "ends at its end token or at its budget"),
        (choice(finish_reason="abort", token_ids=[], logprobs=None), "was ended; start .*, then give the same command"),
    ],
)  # fmt: skip
def test_whatever_a_server_sends_is_checked(
    connect: Callable[..., Engine], server: engines.Imitation, changes: Callable[..., Any], sentence: str
) -> None:
    served = connect()
    server.changes = changes
    with pytest.raises(EngineError, match=sentence):
        served.sample(prompts(1), **HOW)


def test_another_server_in_its_place_is_noticed(connect: Callable[..., Engine], server: engines.Imitation) -> None:
    served = connect()
    served.sample(prompts(1), **HOW)
    server.fingerprint = "vllm-0.30.0-tp2-76543210"
    with pytest.raises(EngineError, match="was replaced by one of another configuration meanwhile"):
        served.sample(prompts(1), **HOW)


def test_an_answer_without_end_is_not_read_to_it(
    connect: Callable[..., Engine], server: engines.Imitation, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = connect()
    monkeypatch.setattr(vllm_client, "MAX_BYTES", 200)
    with pytest.raises(EngineError, match="did not send an answer of at most"):
        served.sample(prompts(1), **HOW)


# A run that ends


@pytest.mark.parametrize("how", ["silent", "busy"])
def test_requests_under_way_end_with_their_call(
    connect: Callable[..., Engine], server: engines.Imitation, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A process joins its threads before it ends, and each of them would wait for minutes."""
    monkeypatch.setattr(vllm_client, "PAUSES_S", (600.0,))
    served, first, released = connect(at_once=2), threading.Lock(), threading.Event()

    def answer(written: dict[str, Any]) -> dict[str, Any]:
        if how == "silent" and not first.acquire(blocking=False):
            released.wait()
        return written

    def interrupt() -> None:
        eventually(lambda: len(server.paths) > asked + 1)
        raise KeyboardInterrupt

    server.changes, server.busy, asked = answer, int(how == "busy"), len(server.paths)
    before = {*threading.enumerate()}
    try:
        with pytest.raises(KeyboardInterrupt):
            served.sample(prompts(2), progress=interrupt, **HOW)
        eventually(lambda: not [one for one in {*threading.enumerate()} - before if "ThreadPool" in one.name])
    finally:
        released.set()
    assert len(server.paths) == asked + 2, "none is sent again"


def test_what_was_written_is_not_asked_again(
    tmp_path: Path, connect: Callable[..., Engine], server: engines.Imitation
) -> None:
    asked, how = prompts(6), HOW | {"temperature": 1.2}
    served = connect(at_once=1)
    whole = served.sample(asked, **how)
    server.asked.clear()
    server.dies_after = 4
    served.journal = Journal(tmp_path / "journal")
    with pytest.raises(EngineError, match="no vLLM server answers"):
        served.sample(asked, **how)
    server.dies_after = None
    server.asked.clear()
    with (tmp_path / "journal/completions.jsonl").open("ab") as stream:
        stream.write(b'\n{"asked": "cut sh')
    served.journal = Journal(tmp_path / "journal")
    assert len(served.journal.found) == 4
    assert served.sample(asked, **how) == whole
    assert len({tuple(body["prompt"]) for body in server.asked}) == 2
    server.asked.clear()
    other = replace(asked[0], name="another")
    served.journal = Journal(tmp_path / "journal")
    served.sample([other, *asked[1:]], **how)
    assert len(server.asked) == 1, "a request that differs is asked"
    served.journal.remove()
    assert not (tmp_path / "journal").exists()


# The server's start


def test_the_server_is_started_with_the_pinned_checkpoint_and_a_key_of_its_own(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = dolls.params(scale="full")
    monkeypatch.setattr(engine_server, "PROGRAM", Path("no/vllm"))
    with pytest.raises(Refused, match="no no/vllm; run `make vllm`"):
        engine_server.stage(params, "esi", 8000)
    with pytest.raises(Refused, match="set scale to full"):
        engine_server.stage(dolls.params(), "esi", 8000)
    program = project / "vllm"
    program.touch()
    monkeypatch.setattr(engine_server, "PROGRAM", program)
    begun: list[Any] = []
    monkeypatch.setattr("os.execve", lambda *given: begun.append(given))
    monkeypatch.setattr(paths, "engine", lambda task: project / f"{task}.json")
    engine_server.stage(params, "esi", 8123)
    ((path, command, environment),) = begun
    assert path == str(program)
    assert command[1:3] == ["serve", str(project / "checkpoint")]
    words = " ".join(command[3:])
    for part in (
        f"--served-model-name {engine.model_of(paths.base('esi'))}", "--host 127.0.0.1 --port 8123", "--dtype bfloat16",
        "--load-format safetensors", "--max-model-len 1024", "--generation-config vllm", "--enable-prefix-caching",
        "--logprobs-mode processed_logprobs", "--enable-lora --max-lora-rank 8",
    ):  # fmt: skip
        assert part in words
    assert "--language-model-only" not in words
    held = json.loads((project / "esi.json").read_text())
    assert (project / "esi.json").stat().st_mode & 0o77 == 0
    assert held["url"] == "http://127.0.0.1:8123"
    assert environment["VLLM_API_KEY"] == held["key"] not in words
    assert environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
    assert len(held["key"]) > 40
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(Refused, match="is taken"):
        engine_server.stage(params, "esi", taken.getsockname()[1])
    (project / "esi.json").unlink()


def test_a_server_that_loads_or_serves_keeps_its_key_until_it_has_ended(project: Path, monkeypatch) -> None:
    program, params = project / "vllm", dolls.params(scale="full")
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o700)
    monkeypatch.setattr(engine_server, "PROGRAM", program)
    monkeypatch.setattr(paths, "engine", lambda task: project / f"{task}.json")
    if not (first := os.fork()):
        try:
            engine_server.stage(params, "esi", 8123)
        finally:
            os._exit(1)
    try:
        eventually((project / "esi.json").exists)
        held = (project / "esi.json").read_text()
        with pytest.raises(Refused, match="another `clinrl engine esi` serves or loads"):
            engine_server.stage(params, "esi", 8124)
        assert (project / "esi.json").read_text() == held
    finally:
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
    monkeypatch.setattr("os.execve", lambda *_: None)
    engine_server.stage(params, "esi", 8124)
    assert (project / "esi.json").read_text() != held


def test_a_rank_for_which_vllm_has_no_room_is_refused(project: Path) -> None:
    with pytest.raises(Refused, match="no room for adapters of rank 513, at most 512"):
        engine_server.arguments(paths.base("esi"), 513, 8000)


def test_there_is_room_for_a_blend_which_has_the_ranks_of_both_versions() -> None:
    blend = {"task": "esi", "first": "v1", "second": "v2", "weights": [0.5, 0.5], "exam": "x1"}
    ranks = {
        method: engine_server.largest_rank(
            dolls.params(merges={"blends": {"mixed": blend | {"method": method}}}), "esi"
        )
        for method in ("cat", "svd")
    }
    assert ranks == {"cat": 8, "svd": 4}


# A checkpoint with images, which vLLM opens as a class that calls its layers as the checkpoint does


@pytest.fixture
def seeing(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project above a tiny Qwen3.5 with images, with an adapter; entered."""
    import transformers as t

    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    _, tokenizer = bases.open_base(paths.base("esi"), for_training=False)
    size = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "head_dim": 8}
    linear = {f"linear_{part}": 2 for part in ("num_key_heads", "num_value_heads")}
    linear |= {f"linear_{part}_head_dim": 8 for part in ("key", "value")}
    text = size | linear | {"vocab_size": len(tokenizer), "num_hidden_layers": 2, "num_key_value_heads": 1}
    text |= {"layer_types": ["linear_attention", "full_attention"], "eos_token_id": tokenizer.eos_token_id}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    torch.manual_seed(0)
    model = t.Qwen3_5ForConditionalGeneration(t.Qwen3_5Config(text_config=text, vision_config=vision))
    shutil.rmtree("checkpoint")
    model.save_pretrained("checkpoint")
    tokenizer.save_pretrained("checkpoint")
    base = dolls.PARAMS["bases"]["esi"] | {"full": block(tmp_path)}
    bases.stage(dolls.params(scale="full", bases={"esi": base}), "esi")
    write("v1", 1)
    return tmp_path


@pytest.mark.long
def test_above_a_checkpoint_with_images_an_adapter_is_served_by_the_names_of_the_checkpoint(
    seeing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForImageTextToText

    words = engine_server.arguments(paths.base("esi"), 4, 8000)
    assert "--language-model-only" in words
    assert "--hf-overrides" not in words
    module, _, fence = words[words.index("--middleware") + 1].rpartition(".")
    assert getattr(importlib.import_module(module), fence) is EngineFence
    stored = load_file("checkpoint/model.safetensors")
    assert any(name.startswith("model.visual.") for name in stored), "the class for text alone would refuse them"
    weights, tokenizer = bases.open_base(paths.base("esi"), for_training=False)
    bare = Sampler(weights, tokenizer).sample(prompts(), **HOW)
    adapted = Sampler(opening.adapted(weights, paths.adapter("v1")).eval(), tokenizer).sample(prompts(), **HOW)
    whole = AutoModelForImageTextToText.from_pretrained("checkpoint", dtype=torch.float32).eval()
    server = engines.Imitation(whole, engine.model_of(paths.base("esi")))
    monkeypatch.setenv(vllm_client.TOKEN, server.key)
    with engines.served(server) as url:
        served = engine.connect("esi", Vllm(url=url))
        assert served.sample(prompts(), **HOW) == bare
        served.adopt(paths.adapter("v1"))
        served.check_adopted()
        assert served.sample(prompts(), **HOW) == adapted != bare
        (copy,) = server.adapters.values()
        modules = {opening.factor_of(name)[0] for name in load_file(copy / opening.WEIGHTS)}  # type: ignore[index]
        assert modules < {name.removesuffix(".weight") for name in stored}


def test_an_adapter_that_does_not_fit_a_checkpoint_with_images_is_refused(seeing: Path) -> None:
    *_, names = bases.open_tokenizer(paths.base("esi"))
    assert names["model.norm.weight"] == "model.language_model.norm.weight"
    with pytest.raises(ArtefactError, match="no adapter for this base"):
        opening.rename_modules(paths.adapter("v1"), {}, seeing)


# An exam


@pytest.mark.long
def test_an_exam_names_its_sampler_and_is_compared_with_no_other(
    project: Path, server: engines.Imitation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(project, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    params = dolls.params(scale="full", bases={"esi": dolls.PARAMS["bases"]["esi"] | {"full": block(project)}})
    dataset.stage(params, "x1")
    exam = {"data": {"name": "x1", "identity": identity(read_manifest(paths.cases("x1")))}}
    write_json(paths.data_proof("x1"), exam)
    with dolls.few_draws(), engines.served(server) as url:
        monkeypatch.setenv(vllm_client.TOKEN, server.key)
        evaluate.stage(params, "esi-base")
        stock = read_manifest(paths.graded("esi-base")).spec["sampler"]
        assert (stock["name"], stock["dtype"], stock["quantize"]) == ("transformers", "float32", "none")
        by_stock = dolls.files(paths.graded("esi-base"))
        Path("machine.yaml").write_text(f"sampler: vllm\nvllm: {{url: '{url}'}}\n")
        with pytest.raises(
            ArtefactError, match=r"v1 and esi-base cannot be compared: vllm 0.30.0 wrote the answers of"
        ):
            evaluate.stage(params, "v1")
        assert len(server.asked) == 2, "the probe of the adapter, and no case"
        evaluate.stage(params, "esi-base")
        by_engine = dolls.files(paths.graded("esi-base"))
        assert {name for name in by_stock if by_stock[name] != by_engine[name]} == {"manifest.json"}
        evaluate.stage(params, "v1")
    manifest = read_manifest(paths.graded("v1"))
    model = engine.model_of(paths.base("esi")).removesuffix(":bfloat16")
    assert manifest.spec["sampler"] == {
        "name": "vllm", "version": "0.30.0", "model": model, "dtype": "bfloat16", "quantize": "none",
    }  # fmt: skip
    assert json.loads(paths.exam_record("esi", "v1").read_text())["sampler"] == manifest.spec["sampler"]
    assert answers.load_report("v1", "think").sampler == manifest.spec["sampler"]
    assert stock["model"] == model
    assert not any(Path(".clinrl/exams").iterdir())


def block(project: Path) -> dict[str, Any]:
    return {"repo": str(project / "checkpoint"), "revision": "main", "quantize": "none"}


# Serving


def version() -> Served:
    """v1, as `clinrl serve` reads it of the registry."""
    return Served(
        name="v1", task="esi", task_version=2, digest=identity(read_manifest(paths.adapter("v1"))), form="adapter",
        base_digest=identity(read_manifest(paths.base("esi"))), default_mode="direct",
        modes={"direct": Decoding(thinking=False, temperature=0.0, max_new_tokens=24)},
    )  # fmt: skip


def test_what_is_served_is_forwarded_with_the_adapter_s_name(
    server: engines.Imitation, connect: Callable[..., Engine], tmp_path: Path
) -> None:
    """The application of `clinrl serve` over the imitation: whole and in a stream, the tokens are the engine's."""
    direct = connect()
    direct.adopt(paths.adapter("v1"))
    (asked,), how = prompts(1), HOW | {"thinking": False}
    (expected,) = direct.sample([asked], **how)
    shutil.copytree(paths.adapter("v1"), tmp_path / "adapter")
    backend = Remote("esi", Vllm(url=direct.client.url))
    served = version()
    sampler = backend.open(served, tmp_path)
    live = SimpleNamespace(names={"v1": Version(served, sampler, tmp_path, 0)})
    service = Service(cast(Any, live), backend, Bounds(at_once=2, queue=2, tokens=64, request_s=60.0))
    body = {"model": "v1", "messages": [{"role": one.role, "content": one.content} for one in asked.messages]}
    with TestClient(service) as client:
        whole = client.post("/v1/chat/completions", json=body).json()
        assert whole["choices"][0]["message"]["content"] == expected.text
        assert whole["usage"]["completion_tokens"] == expected.tokens
        stream = client.post("/v1/chat/completions", json=body | {"stream": True}).text
        chunks = [json.loads(line.removeprefix("data: ")) for line in stream.split("\n\n")[:-2]]
        assert "".join(one["choices"][0]["delta"].get("content", "") for one in chunks) == expected.text
        assert server.asked[-1]["model"] == direct.name_of(paths.adapter("v1"))
        server.dies_after = 0
        assert {client.post("/v1/chat/completions", json=body).status_code for _ in range(6)} == {503}
        assert client.get("/health/live").status_code == 200
    with pytest.raises(EngineError, match="v1 is for another base than data/bases/esi, which the vLLM server has"):
        backend.open(served.model_copy(update={"base_digest": "0" * 64}), tmp_path)
    backend.close(served.digest)
    direct.adopt(paths.adapter("v2"))
    assert [*server.adapters] == [direct.adapter], (
        "of the attempts to open it again while the server was away none is left"
    )


def test_a_request_that_its_client_gave_up_is_ended_at_the_server_too(
    server: engines.Imitation, connect: Callable[..., Engine], tmp_path: Path
) -> None:
    """The second signal at the end waits for none either: a process waits for its threads."""
    shutil.copytree(paths.adapter("v1"), tmp_path / "adapter")
    served, backend = version(), Remote("esi", Vllm(url=connect().client.url, at_once=1))
    live = SimpleNamespace(names={"v1": Version(served, backend.open(served, tmp_path), tmp_path, 0)})
    service = Service(cast(Any, live), backend, Bounds(at_once=2, queue=2, tokens=64, request_s=60.0))
    fence = Fence(service, limits=Limits(body_bytes=10_000, request_s=0.5, idle_s=1.0))
    body = {"model": "v1", "messages": [{"role": one.role, "content": one.content} for one in prompts(1)[0].messages]}
    going, before = threading.Event(), len(server.paths)
    server.changes = lambda answer: going.wait(60) and answer
    try:
        with TestClient(fence, base_url="http://localhost") as client:
            assert client.post("/v1/chat/completions", json=body).status_code == 408
        assert backend._pool.submit(int).result(10) == 0, "its thread is free"
        assert server.paths[before:] == ["/v1/completions"], "it was neither repeated nor taken for a lost server"
    finally:
        going.set()


def test_a_version_that_is_closed_is_unloaded_with_the_next_change(
    server: engines.Imitation, connect: Callable[..., Engine], tmp_path: Path
) -> None:
    """And a request that comes late is not answered by the base."""
    shutil.copytree(paths.adapter("v1"), tmp_path / "adapter")
    served, backend = version(), Remote("esi", Vllm(url=connect().client.url))
    sampler = backend.open(served, tmp_path)
    server.drops = 99
    backend.close(served.digest)
    server.drops = 0
    connect().adopt(paths.adapter("v2"))
    assert sampler.adapter not in server.adapters  # type: ignore[attr-defined]
    with pytest.raises(EngineError, match="does not serve the adapter any more"):
        sampler.sample(prompts(1), **HOW)
    backend.open(served, tmp_path)
    assert sampler.adapter in server.adapters  # type: ignore[attr-defined]


def test_a_server_that_was_started_again_is_asked_again(
    server: engines.Imitation, connect: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under another key and without its adapters. Who finds that out is refused, and later requests are not."""
    shutil.copytree(paths.adapter("v1"), tmp_path / "adapter")
    served, backend = version(), Remote("esi", Vllm(url=connect().client.url))
    sampler = backend.open(served, tmp_path)
    live = SimpleNamespace(names={"v1": Version(served, sampler, tmp_path, 0)})
    service = Service(cast(Any, live), backend, Bounds(at_once=2, queue=2, tokens=64, request_s=60.0))
    body = {"model": "v1", "messages": [{"role": one.role, "content": one.content} for one in prompts(1)[0].messages]}
    with TestClient(service) as client:

        def asked() -> Any:
            return client.post("/v1/chat/completions", json=body)

        before = asked().json()["choices"]
        server.key, server.adapters = "l" * 40, {}
        assert asked().status_code == 503
        monkeypatch.setenv(vllm_client.TOKEN, server.key)
        assert eventually(lambda: (said := asked()).status_code == 200 and said.json()["choices"]) == before
    (name,) = server.adapters
    backend.close(served.digest)
    backend._reopen(served.digest, cast(Any, sampler))
    assert served.digest not in backend._engines
    connect().adopt(paths.adapter("v2"))
    assert name not in server.adapters


def test_a_version_that_is_closed_while_it_is_connected_anew_is_not_left_on_the_server(
    server: engines.Imitation, connect: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(paths.adapter("v1"), tmp_path / "adapter")
    served, backend = version(), Remote("esi", Vllm(url=connect().client.url))
    before, check = backend.open(served, tmp_path), Engine.check_adopted
    server.key, server.adapters = "l" * 40, {}
    monkeypatch.setenv(vllm_client.TOKEN, server.key)

    def closed_meanwhile(asked: Engine) -> None:
        check(asked)
        assert server.adapters
        backend.close(served.digest)  # the engine that is connected anew uses the adapter
        assert server.adapters

    monkeypatch.setattr(Engine, "check_adopted", closed_meanwhile)
    backend._reopen(served.digest, cast(Any, before))
    assert served.digest not in backend._engines
    (name,) = server.adapters
    connect().adopt(paths.adapter("v2"))
    assert name not in server.adapters
