"""What is counted of real requests to a real server: all of it, none of its words, and shadows that harm nobody."""

import asyncio
import json
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from answering import Running, prompts, running

from clinrl import paths
from clinrl.cli import main as cli
from clinrl.config.params import load_params
from clinrl.config.schema import Watch as Settings
from clinrl.errors import Refused
from clinrl.models.chat import Completion
from clinrl.registry import versions
from clinrl.serving import watch
from clinrl.serving.protocol import ChatRequest
from clinrl.serving.server import Service
from clinrl.tasks.base import get_task
from clinrl.types import Message
from clinrl.watching import counts, store
from clinrl.watching.standing import drift
from processes import eventually

CHAMPION = "esi@champion"
CANARY = "Zyxwvut Qrstonia, room 31415926, allergic to plumbism"


def ask(one: Running, messages: Any, *, stream: bool = False, most: int = 64) -> str:
    """The id of a response."""
    how = {"chat_template_kwargs": {"enable_thinking": False}}
    said = one.client.chat.completions.create(
        model=CHAMPION, messages=messages, extra_body=how, stream=stream, max_tokens=most
    )
    return {chunk.id for chunk in said}.pop() if stream else said.id


def shadow() -> str:
    """The feature of the candidate's answers."""
    return counts.shadow("v2", versions.find("esi", "v2").digest) + "direct"


def total(name: str) -> counts.Counts:
    digest = versions.find("esi", name).digest
    with suppress(Refused):  # without an exam nothing is counted by one
        exam = counts.exam_digest(load_params(), name)
        return sum(store.days("esi", digest) + store.days("esi", counts.key(digest, exam)), counts.Counts())
    return sum(store.days("esi", digest), counts.Counts())


@pytest.fixture
def counted(monkeypatch: Any) -> list[str]:
    """The features that were counted so far, in their order. They are written down at the end, together.

    Of a share of them that holds no request too little would be known to be written.
    """
    features: list[str] = []
    add = watch.Watch._add

    def noted(self: watch.Watch, served: Any, where: Any, text: str | None = None) -> None:
        add(self, served, where, text)
        features.extend(feature for feature, _ in where)

    monkeypatch.setattr(watch.Watch, "_add", noted)
    monkeypatch.setattr(watch, "FLUSH_S", 600.0)
    return features


@pytest.fixture
def project(released: Any) -> Any:
    """v1 is the champion, v2 the candidate."""
    versions.point("esi", "candidate", versions.find("esi", "v2"))
    return released


@pytest.mark.long
def test_requests_answers_shadows_and_labels_are_counted_and_no_word_is_written(
    project: Any, capfd: Any, counted: list[str]
) -> None:
    with running(project, shadow=1.0) as one:
        asked = [ask(one, messages, stream=number == 1) for number, messages in enumerate(prompts(5))]
        asked.append(ask(one, [{"role": "user", "content": CANARY}]))
        eventually(lambda: counted.count(shadow()) == 6, 60)
    found = total("v1")
    assert found[counts.TEXT, "familiar"] == 5
    assert found[counts.TEXT, "novel"] == 1
    assert sum(n for (feature, _), n in found.items() if feature == "answer, direct") == 6
    assert sum(n for (feature, _), n in found.items() if feature == shadow()) == 6
    assert not found[shadow(), counts.FAILED]
    lines = [json.dumps({"id": ident, "label": 1}) + "\n" for ident in asked]
    Path("labels.jsonl").write_text("".join(lines))
    assert cli.main(["watch", "labels", "esi", "labels.jsonl"]) == 0
    assert "6 of 6 labels are of answers that are kept" in capfd.readouterr().err
    assert sum(n for (feature, _), n in total("v1").items() if feature == "labelled, direct") == 6
    assert cli.main(["watch", "report", "esi", "--json"]) in (0, 1)
    champion = json.loads(capfd.readouterr().out)[0]
    assert (champion["version"], champion["requests"], champion["safety"][0]["n"]) == ("v1", 6, 6)
    Path("labels.jsonl").unlink()
    written = {path: path.read_bytes().lower() for path in Path().rglob("*") if path.is_file()}
    sown = [b"zyxwvut", b"qrstonia", b"31415926", b"plumbism", asked[0].encode()]
    assert not [(path, word) for path, held in written.items() for word in sown if word in held]


@pytest.mark.long
def test_an_answer_that_the_client_decoded_otherwise_is_not_compared_with_the_exam(
    project: Any, counted: list[str]
) -> None:
    ways: list[dict[str, Any]] = [{"max_tokens": 1}, {"temperature": 1.5}, {"top_p": 0.5}, {"temperature": 0.0}]
    with running(project, shadow=1.0) as one:
        for way, messages in zip(ways, prompts(len(ways)), strict=True):
            one.client.chat.completions.create(
                model=CHAMPION,
                messages=messages,
                extra_body={"chat_template_kwargs": {"enable_thinking": False}},
                **way,
            )
        eventually(lambda: counted.count(shadow()) == 1, 60)
    found = total("v1")
    assert sum(n for (feature, _), n in found.items() if feature == counts.TEXT) == len(ways)
    assert sum(n for (feature, _), n in found.items() if feature == "answer, direct") == 1


@pytest.mark.parametrize(
    ("stop", "tokens", "budget", "counts"),
    [("answered", 8, 8, True), ("answered", 9, 16, False), ("max_tokens", 8, 8, True), ("max_tokens", 4, 4, False)],
)
def test_an_answer_of_another_length_than_the_exam_allows_is_not_compared_with_it(
    stop: Any, tokens: int, budget: int, counts: bool
) -> None:
    seen: list[watch.Seen] = []
    own = SimpleNamespace(max_new_tokens=8, temperature=0.0, top_p=1.0)
    version: Any = SimpleNamespace(served=SimpleNamespace(modes={"direct": own}), mode=lambda _: "direct")
    job: Any = SimpleNamespace(budget=budget, temperature=0.0, top_p=1.0)
    watching: Any = SimpleNamespace(answered=lambda one, *_: seen.append(one))
    service = Service(None, None, None, watching)  # type: ignore[arg-type]
    asked = ChatRequest(model=CHAMPION, messages=[{"role": "user", "content": "Pain."}])
    turn = Message(role="assistant", content="2")
    service._note("chatcmpl-0", asked, version, turn, job, Completion("2", stop, tuple(range(tokens))))
    assert [one.is_as_examined for one in seen] == [counts]


@pytest.mark.long
def test_where_nothing_was_counted_the_report_is_no_good_news(project: Any, capsys: Any, monkeypatch: Any) -> None:
    assert cli.main(["watch", "report", "esi"]) == 1
    lacks = "too few requests of a version were counted on this machine"
    said = f"nothing of esi is watched here: {lacks}; look where `clinrl serve esi` runs"
    assert capsys.readouterr() == ("", f"clinrl: {said}\n")
    assert cli.main(["watch", "report", "esi-merged"]) == 1
    assert "the registry has no champion or candidate" in capsys.readouterr().err
    monkeypatch.setattr(type(get_task("esi")), "episodes", object())
    assert cli.main(["watch", "report", "esi"]) == 1
    assert "esi is played with tools, so `clinrl serve` does not serve it" in capsys.readouterr().err


@pytest.mark.long
def test_exam_like_traffic_raises_no_alarm_and_other_texts_do(project: Any) -> None:
    with running(project, shadow=0.0) as one:
        for messages in prompts(40):
            ask(one, messages, most=1)
    champion = versions.find("esi", "v1")
    reader, exam = counts.reference(project, "v1", champion.digest)
    about = counts.key(champion.digest, reader.exam)
    texts = counts.Counts({key: n for key, n in exam.items() if not key[0].startswith(counts.ANSWER)})
    rows, p = drift(store.days("esi", about), texts, Settings())
    assert p > 0.5
    assert {row.feature for row in rows} >= {"text", "length in words", "hr", "spo2"}
    with running(project, shadow=0.0) as one:
        for number in range(60):
            ask(one, [{"role": "user", "content": f"Please order {number} boxes of printer paper."}], most=1)
    rows, p = drift(store.days("esi", about), texts, Settings())
    assert p <= 0.05
    assert rows[0].served > rows[0].limit > rows[0].exam


@pytest.mark.long
def test_a_candidate_that_fails_is_counted_and_the_champion_answers(
    project: Any, capfd: Any, counted: list[str]
) -> None:
    with running(project, shadow=1.0) as one:
        one.live.names["esi@candidate"].sampler.sample = lambda *_, **__: [][0]
        ask(one, prompts(1)[0])
        eventually(lambda: counted.count(shadow()) == 1)
        ask(one, prompts(2)[1])
        eventually(lambda: counted.count(shadow()) == 2)
    assert total("v1")[shadow(), counts.FAILED] == 2
    assert "a shadow failed: IndexError" in capfd.readouterr().err


@pytest.mark.long
def test_a_shadow_makes_way_for_a_request_and_is_begun_anew(project: Any, counted: list[str]) -> None:
    with running(project, shadow=1.0) as one:
        sampler, entered, going = one.live.names["esi@candidate"].sampler, threading.Event(), threading.Event()
        write, begun = sampler.sample, []

        def slow(*given: Any, **how: Any) -> Any:
            begun.append(how["seed"])
            entered.set()
            assert len(begun) > 1 or going.wait(60)
            return write(*given, **how)

        sampler.sample = slow
        ask(one, prompts(1)[0])
        assert entered.wait(20)
        asking = threading.Thread(target=ask, args=(one, prompts(1)[0]))
        asking.start()
        eventually(lambda: one.service._watch._job.is_dropped)
        going.set()
        asking.join()
        eventually(lambda: counted.count(shadow()) == 2)
        assert len(begun) == 3
    assert total("v1")[shadow(), counts.SAME] + total("v1")[shadow(), counts.OTHER] == 2


@pytest.mark.long
@pytest.mark.parametrize(("most", "kept"), [(3, 3), (2, 2)])
def test_what_could_not_be_written_down_is_written_later(
    project: Any, monkeypatch: Any, capfd: Any, most: int, kept: int
) -> None:
    monkeypatch.setattr(watch, "FLUSH_S", 0.05)
    monkeypatch.setattr(watch, "MOST", most)
    file, digest = paths.watched("esi"), versions.find("esi", "v1").digest
    key = counts.key(digest, counts.exam_digest(project, "v1"))
    file.mkdir(parents=True)  # which SQLite cannot open
    tries, add = [], store.add
    monkeypatch.setattr(store, "add", lambda *given: (tries.append(1), add(*given)))
    with running(project, shadow=0.0) as one:
        asked = [ask(one, messages) for messages in prompts(3)]
        eventually(lambda: one.service._watch._counts.get(key, {}).get((counts.TEXT, "familiar")) == 3)
        eventually(lambda: len(tries) > 3)
        assert capfd.readouterr().err.count("a count failed: OperationalError") == 1
        file.rmdir()
        eventually(lambda: not one.service._watch._counts)
    assert total("v1")[counts.TEXT, "familiar"] == 3
    assert store.match("esi", dict.fromkeys(asked[:-kept], "1")) == 0
    assert store.match("esi", dict.fromkeys(asked, "1")) == kept


def test_the_counts_of_few_requests_are_not_written(released: Any) -> None:
    served: Any = SimpleNamespace(name="v1", digest=versions.find("esi", "v1").digest)
    counting = watch.Watch("esi", SimpleNamespace(params=released), None, shadow=0.0)  # type: ignore[arg-type]
    for number in range(1, watch.LEAST + 1):
        counting._add(served, (), f"Chest pain, room {number}.")
        counting._flush()
        assert bool(total("v1")) is (number == watch.LEAST)
    counting.end()
    assert sum(n for (feature, _), n in total("v1").items() if feature == counts.TEXT) == watch.LEAST


def test_a_share_of_the_champion_s_requests_is_shadowed_and_a_full_queue_harms_no_answer() -> None:
    champion, candidate = (SimpleNamespace(served=SimpleNamespace(name=name, digest=name)) for name in "ab")
    live = SimpleNamespace(names={"esi@champion": champion, "esi@candidate": candidate})

    async def shadows() -> list[str]:
        counting = watch.Watch("esi", live, None, shadow=0.2)  # type: ignore[arg-type]
        counting._count = lambda _: None  # type: ignore[assignment,method-assign]

        def answer(ident: int, version: Any, is_as_examined: bool = True) -> None:
            seen = SimpleNamespace(ident=f"chatcmpl-{ident:032x}", version=version, is_as_examined=is_as_examined)
            counting.answered(seen, lambda: False, None)  # type: ignore[arg-type]

        last = int(0.2 * 2**32)
        answer(last, champion)
        answer(last + 1, champion)
        answer(0, candidate)
        answer(0, champion, False)
        for ident in range(2 * watch.WAITING):
            answer(ident, champion)
        queued = [counting._shadows.get_nowait().ident for _ in range(counting._shadows.qsize())]
        assert counting._following is not None
        counting._following.cancel()
        counting.end()
        return queued

    assert asyncio.run(shadows()) == [
        f"chatcmpl-{ident:032x}" for ident in (int(0.2 * 2**32), *range(watch.WAITING // 8 - 1))
    ]


def test_an_exam_is_looked_for_again_and_learned_anew_if_it_is_another(monkeypatch: Any) -> None:
    here, learned = [""], []

    def reference(*_: Any) -> tuple[counts.Reader, counts.Counts]:
        learned.append(here[0])
        return counts.Reader((), {}, None, lambda _: {}, here[0]), counts.Counts()

    monkeypatch.setattr(counts, "exam_digest", lambda *_: here[0])
    monkeypatch.setattr(counts, "reference", reference)
    monkeypatch.setattr(watch, "AGAIN_S", 0.0)
    counting = watch.Watch("esi", SimpleNamespace(params=None), None, shadow=0.0)  # type: ignore[arg-type]
    for here[0] in ("first", "first", "second", "second"):
        reader = counting._learned("v1", "digest")
        assert reader is not None
        assert reader.exam == here[0]
    counting.end()
    assert learned == ["first", "second"]


def test_a_candidate_that_went_while_a_request_waited_ends_no_later_shadow(capfd: Any) -> None:
    async def follow() -> None:
        counting = watch.Watch("esi", SimpleNamespace(names={}), None, shadow=1.0)  # type: ignore[arg-type]
        following = asyncio.create_task(counting._follow(lambda: True, lambda *_: None))  # type: ignore[arg-type]
        counting._shadows.put_nowait(None)  # type: ignore[arg-type]
        await asyncio.wait([following], timeout=0.05)
        assert counting._shadows.empty()
        assert following.cancel()
        counting.end()

    asyncio.run(follow())
    assert capfd.readouterr().err == ""


def test_a_shadow_is_decoded_as_in_the_candidate_s_exam() -> None:
    served = SimpleNamespace(modes={"direct": SimpleNamespace(thinking=False)}, name="b", digest="b")
    version: Any = SimpleNamespace(served=served)
    asked = ChatRequest(
        model=CHAMPION, messages=[{"role": "user", "content": "Pain."}], max_tokens=40, temperature=0.0, stream=True
    )
    seen, found = watch.Seen("0", asked, version, "direct", None, is_as_examined=True), []  # type: ignore[arg-type]

    def job(ask: ChatRequest, version: Any) -> Any:
        found.append(ask)
        raise Refused("enough is known")

    async def follow() -> None:
        live = SimpleNamespace(names={"esi@candidate": version})
        counting = watch.Watch("esi", live, None, shadow=1.0)  # type: ignore[arg-type]
        counting._add = lambda *_: None  # type: ignore[method-assign]
        following = asyncio.create_task(counting._follow(lambda: True, job))
        counting._shadows.put_nowait(seen)
        await asyncio.wait([following], timeout=0.05)
        assert following.cancel()
        counting.end()

    asyncio.run(follow())
    (ask,) = found
    assert (ask.most, ask.temperature, ask.top_p, ask.stream, ask.thinking) == (None, None, None, False, False)
    assert ask.messages == asked.messages


@pytest.mark.long
def test_a_version_whose_exam_is_not_here_is_served_and_not_watched(project: Any, capfd: Any) -> None:
    Path("data/cases/x1/cases.jsonl").unlink()
    Path("data/cases/x1/manifest.json").unlink()
    with running(project, shadow=0.0) as one:
        asked = ask(one, [{"role": "user", "content": "Chest pain."}])
    assert capfd.readouterr().err.count("v1 is not watched for drift: ") == 1
    assert total("v1") == counts.Counts()
    assert cli.main(["watch", "report", "esi"]) == 1
    assert "were counted on this machine, and data/cases/x1 has no manifest.json; run" in capfd.readouterr().err
    assert store.match("esi", {asked: "1"}) == 1  # a label counts all the same
