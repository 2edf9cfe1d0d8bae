"""Promotions and rollbacks while people ask, and the end of the command: real processes, a real registry."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from answering import exam, prompts

import examined
from champions import ADA
from clinrl.cli import main as cli
from clinrl.models.chat import read_turn
from clinrl.registry import versions
from clinrl.release import decisions, promotion
from clinrl.tracking.mlflow_store import connect
from processes import eventually, patience_s

ROOT = Path(__file__).parents[2]
CHAMPION = "esi@champion"
CLIENTS, ROUNDS = 4, 10
DIRECT: dict[str, Any] = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_draws")]


@contextmanager
def command(*words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`clinrl serve esi` in a process of its own, and its address."""
    start = [sys.executable, "-m", "clinrl", "serve", "esi", "--port", "0", *words]
    with open("serve.log", "w", encoding="utf-8") as log:
        process = subprocess.Popen(start, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:"), Path("serve.log").read_text()
        yield process, url
    finally:
        process.kill()
        process.communicate()


def test_twenty_promotions_and_rollbacks_lose_no_request(released: Any) -> None:
    asked = prompts(3)
    expected = {}
    for name in ("v1", "v2"):
        sampler, written = exam(released, name, 3, thinking=False)
        expected[name] = [read_turn(one.text, sampler.opens(False)).content for one in written]
    assert expected["v1"] != expected["v2"]
    done, delays = threading.Event(), list[float]()
    with command() as (process, url), openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:

        def ask(number: int) -> list[tuple[int, str, str]]:
            heard = []
            while not done.is_set():
                said = client.chat.completions.create(model=CHAMPION, messages=asked[number % 3], **DIRECT)
                heard.append((number % 3, said.model, said.choices[0].message.content))
            return heard

        def followed(name: str) -> float:
            """Seconds until the first answer by a version."""
            started = time.monotonic()
            while client.chat.completions.create(model=CHAMPION, messages=asked[0], max_tokens=1).model != name:
                assert time.monotonic() - started < 60
            return time.monotonic() - started

        with ThreadPoolExecutor(CLIENTS) as pool:
            asking = [pool.submit(ask, number) for number in range(CLIENTS)]
            try:
                for _ in range(ROUNDS):
                    promotion.rollback(released, "esi", approver=ADA)
                    delays.append(followed("v2"))
                    examined.promote(released, "v1", ADA, decisions.decide(released, "v1"))
                    delays.append(followed("v1"))
            finally:
                done.set()
        heard = [one for answers in asking for one in answers.result()]  # raises for one that was lost
        assert process.poll() is None
    assert {name for _, name, _ in heard} == {"v1", "v2"}
    assert all(content == expected[name][number] for number, name, content in heard)
    assert len(delays) == 2 * ROUNDS
    assert max(delays) < 2 * patience_s(), delays  # ten seconds on an idle machine
    print(f"{len(heard)} answers, none lost; followed after {min(delays):.1f} to {max(delays):.1f} s: {delays}")


def test_a_name_that_was_moved_by_hand_is_not_followed(released: Any) -> None:
    with command() as (_, url), openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        versions.point("esi", "champion", versions.find("esi", "v2"))
        said = "v2 is esi@champion in the registry, and not in data/reports/decisions.jsonl"
        eventually(lambda: said in Path("serve.log").read_text(), 60)
        answer = client.chat.completions.create(model=CHAMPION, messages=prompts(1)[0], max_tokens=1)
    assert answer.model == "v1"


def test_what_gets_a_name_after_the_start_is_served(released: Any) -> None:
    with connect() as client:
        client.delete_registered_model_alias("esi", "champion")
    with command() as (_, url):
        asked = [httpx.get(url.replace("/v1", path), timeout=60) for path in ("/health", "/health/live")]
        assert [one.status_code for one in asked] == [503, 200]
        said = "clinrl: nothing is served yet: esi has neither a champion nor a candidate; `clinrl versions esi` lists"
        assert said in Path("serve.log").read_text()
        versions.point("esi", "champion", versions.find("esi", "v1"))
        eventually(lambda: httpx.get(url.replace("/v1", "/health"), timeout=60).status_code == 200, 60)


def test_it_answers_to_the_names_that_it_was_given(released: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLINRL_SERVE_TOKEN", "secret" * 6)
    with command("--known-as", "serve", "serve.clinrl") as (_, url):
        health, named = url.replace("/v1", "/health"), {"Authorization": f"Bearer {'secret' * 6}"}
        asked = [
            httpx.get(health, headers={"Host": f"{name}:8000"} | named).status_code
            for name in ("127.0.0.1", "serve", "serve.clinrl", "evil.example")
        ]
        assert httpx.get(f"{url}/models").status_code == 401
    assert asked == [200, 200, 200, 403]


def test_other_machines_reach_it_with_a_token_alone(released: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "esi", "--host", "0.0.0.0"]) == 1
    assert "CLINRL_SERVE_TOKEN" in capsys.readouterr().err


def test_a_signal_while_models_are_read_leaves_no_copy(released: Any, tmp_path: Path) -> None:
    copies = tmp_path / "copies"
    copies.mkdir()
    start = [sys.executable, "-m", "clinrl", "serve", "esi", "--port", "0"]
    process = subprocess.Popen(start, stderr=subprocess.DEVNULL, env=os.environ | {"TMPDIR": str(copies)})
    eventually(lambda: any(copies.glob("clinrl-*/*")), 120)
    process.terminate()
    assert process.wait(60) == 0
    assert not [*copies.glob("clinrl-*")]


def test_a_signal_lets_running_requests_end_and_the_command_ends_with_0(released: Any) -> None:
    body = {"model": CHAMPION, "messages": prompts(1)[0]}
    long = body | {"max_tokens": 600, "temperature": 2.0}  # drawn, so that each is written by itself and ends late
    with command() as (process, url), ThreadPoolExecutor(6) as pool:
        runs = [
            pool.submit(httpx.post, f"{url}/chat/completions", json=long | {"seed": seed}, timeout=120)
            for seed in range(6)
        ]
        eventually(lambda: httpx.get(url.replace("/v1", "/health"), timeout=60).status_code == 200)
        time.sleep(1)
        os.kill(process.pid, signal.SIGTERM)
        refused = 0
        while not all(one.done() for one in runs):
            try:
                answer = httpx.post(f"{url}/chat/completions", json=body | {"max_tokens": 1}, timeout=120)
            except httpx.TransportError:  # it ended when the last was answered
                break
            refused += answer.status_code == 503
            assert answer.status_code in (200, 503)
        assert [one.result().status_code for one in runs] == [200] * 6
        assert process.wait(30) == 0
    assert refused
    log = Path("serve.log").read_text()
    assert "Traceback" not in log
    assert log.count("chat 200 version=v1") >= 6


def test_a_second_signal_refuses_what_runs_and_leaves_no_traceback(released: Any) -> None:
    body = {"model": CHAMPION, "messages": prompts(1)[0], "max_tokens": 600, "temperature": 2.0}
    with command() as (process, url), ThreadPoolExecutor(4) as pool:
        runs = [
            pool.submit(httpx.post, f"{url}/chat/completions", json=body | {"seed": seed}, timeout=120)
            for seed in range(4)
        ]
        time.sleep(0.5)
        for _ in range(2):
            os.kill(process.pid, signal.SIGTERM)
            time.sleep(0.2)
        assert process.wait(30) == 0
        found = sorted(one.result().status_code for one in runs)
    assert set(found) <= {200, 503}
    assert found[-1] == 503
    log = Path("serve.log").read_text()
    assert "Traceback" not in log
    assert log.count("chat 503") == found.count(503)
