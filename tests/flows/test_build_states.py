"""How a build hears of its runs, from a real Prefect server."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import httpx
import pytest

pytestmark = pytest.mark.long

if TYPE_CHECKING:
    from prefect import State


@pytest.mark.parametrize("at_once", [2, 100], ids=["in several requests", "in one"])
def test_runs_are_told_of_at_once_lost_ones_as_crashed(
    at_once: int, prefect: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect import flow, get_client
    from prefect.states import Completed, Pending, Running

    from flows import lost_workers, runs

    @flow
    def version() -> None: ...

    monkeypatch.setattr(lost_workers, "AT_ONCE", at_once)
    asked: list[int] = []
    with get_client(sync_client=True) as client:
        read = type(client).read_flow_runs

        def counted(self, *, flow_run_filter):
            asked.append(len(flow_run_filter.id.any_))
            return read(self, flow_run_filter=flow_run_filter)

        monkeypatch.setattr(type(client), "read_flow_runs", counted)
        given = {
            name: client.create_flow_run(version, state=state).id
            for name, state in (("done", Completed()), ("works", Running()), ("waits", Pending()), ("gone", Running()))
        }
        client.delete_flow_run(given["gone"])
        given["never"], pending = uuid4(), dict[UUID, float]()
        found = {name: state.type.value for name, state in lost_workers.states(given, pending).items()}
        assert found == {
            "done": "COMPLETED",
            "works": "RUNNING",
            "waits": "PENDING",
            "gone": "CRASHED",
            "never": "CRASHED",
        }
        assert asked == ([2, 2, 1] if at_once == 2 else [5])
        monkeypatch.setattr(runs, "PENDING_S", -1.0)
        assert lost_workers.states(given, pending)["waits"].is_crashed()
        assert client.read_flow_run(given["waits"]).state.is_cancelled(), "or it would begin beside another"
        assert lost_workers.states(given, {})["waits"].is_crashed(), "in another build that waits for it too"


def test_versions_come_in_their_order_each_as_soon_as_those_before_it(
    prefect: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect import flow, get_client
    from prefect.states import Completed, Failed, Running

    from flows import build

    @flow
    def version() -> None: ...

    with get_client(sync_client=True) as client:
        given = {name: client.create_flow_run(version, state=Running()).id for name in ("v1", "v2", "v3")}
        ends = iter([("v3", Completed()), ("v1", Completed()), ("v2", Failed(message="too little memory"))])
        ended: list[str] = []

        def pause(_seconds: float) -> None:
            name, state = next(ends)
            client.set_flow_run_state(given[name], state, force=True)
            ended.append(name)

        @flow
        def told() -> list[tuple[str, str | None, int]]:
            return [(name, reason, len(ended)) for name, reason in build.outcomes([*given], "a" * 40)]

        monkeypatch.setattr(build, "_give", lambda name, *_: given[name])
        monkeypatch.setattr(build, "time", SimpleNamespace(sleep=pause, monotonic=time.monotonic))
        assert told() == [("v1", None, 2), ("v2", "too little memory", 3), ("v3", None, 3)]


def given_until_built(
    monkeypatch: pytest.MonkeyPatch, state_at: Callable[[float], "State"], reason: str | None = None
) -> list[float]:
    """The seconds at which a version was given to a worker until it was built; its run has the state of that second.

    `reason`: why it is not built in the end.
    """
    from prefect import flow, get_client

    from flows import build

    @flow
    def version() -> None: ...

    with get_client(sync_client=True) as client:
        clock, given = [0.0], list[float]()

        def pause(seconds: float) -> None:
            clock[0] += seconds

        def give(*_: object) -> UUID:
            given.append(clock[0])
            assert len(given) <= build.TRIES
            return client.create_flow_run(version, state=state_at(clock[0])).id

        @flow
        def outcomes() -> list[tuple[str, str | None]]:
            return [*build.outcomes(["v1"], "a" * 40)]

        monkeypatch.setattr(build, "_give", give)
        clocks = SimpleNamespace(sleep=pause, monotonic=lambda: clock[0])
        for module in (build, build.lost_workers):
            monkeypatch.setattr(module, "time", clocks)
        assert outcomes() == [("v1", reason)]
    return given


def test_a_server_that_is_away_for_a_while_uses_up_no_tries(prefect: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect.states import Completed, Crashed

    away = Crashed(message="a server is away")
    given = given_until_built(monkeypatch, lambda now: away if now < 1200.0 else Completed())
    assert given[1] < 30.0, "a worker that was lost is another matter"


def test_a_version_whose_workers_are_lost_again_and_again_is_given_up(
    prefect: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect.states import Crashed

    from flows import build

    monkeypatch.setattr(build, "POLL_S", 200.0)
    given = given_until_built(monkeypatch, lambda _: Crashed(message="lost"), "lost")
    assert len(given) == build.TRIES


def test_a_version_that_its_worker_does_not_start_is_given_to_another(
    prefect: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its run counts as Crashed at one look only: it is cancelled at once."""
    from prefect.states import Completed, Pending

    from flows import runs

    given = given_until_built(monkeypatch, lambda now: Completed() if now else Pending())
    assert runs.PENDING_S < given[1] < runs.PENDING_S + 30.0


@pytest.mark.parametrize("code", [500, 422])
def test_a_server_that_cannot_answer_is_asked_again_and_one_that_refuses_is_not(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect.exceptions import PrefectHTTPStatusError
    from prefect.states import Completed

    from flows import build

    request = httpx.Request("POST", "http://127.0.0.1/api/flow_runs/filter")
    error = PrefectHTTPStatusError("no", request=request, response=httpx.Response(code, request=request))
    asked: list[int] = []

    def states(*_: object) -> "dict[str, State]":
        asked.append(code)
        if len(asked) == 1:
            raise error
        return {"v1": Completed()}

    monkeypatch.setattr(build, "_give", lambda *_: uuid4())
    monkeypatch.setattr(build.lost_workers, "states", states)
    monkeypatch.setattr(build, "get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr(build, "time", SimpleNamespace(sleep=lambda _: None, monotonic=time.monotonic))
    with nullcontext() if code == 500 else pytest.raises(PrefectHTTPStatusError):
        assert [*build.outcomes(["v1"], "a" * 40)] == [("v1", None)]
    assert len(asked) == (2 if code == 500 else 1)


def test_where_no_worker_takes_a_version_the_build_says_so(prefect: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect import flow, get_client
    from prefect.states import Completed, Running, Scheduled

    from flows import build

    @flow
    def version() -> None: ...

    with get_client(sync_client=True) as client:
        given = {name: client.create_flow_run(version, state=Scheduled()).id for name in ("v1", "v2")}
        clock, said = [0.0], list[str]()

        def pause(_seconds: float) -> None:
            clock[0] += 400.0
            if clock[0] == 1600.0:  # a worker has come
                client.set_flow_run_state(given["v1"], Running(), force=True)
            if clock[0] == 2800.0:
                for run in given.values():
                    client.set_flow_run_state(run, Completed(), force=True)

        @flow
        def outcomes() -> list[tuple[str, str | None]]:
            return [*build.outcomes([*given], "a" * 40)]

        logger = SimpleNamespace(info=lambda *_: None, warning=lambda text, *values: said.append(text % values))
        monkeypatch.setattr(build, "get_run_logger", lambda: logger)
        monkeypatch.setattr(build, "_give", lambda name, *_: given[name])
        monkeypatch.setattr(build, "time", SimpleNamespace(sleep=pause, monotonic=lambda: clock[0]))
        assert outcomes() == [("v1", None), ("v2", None)]
    assert said == ["v1 (and 1 more) waits; no worker takes it"]


def test_the_automation_for_lost_workers_takes_the_place_of_an_older_one(prefect: None) -> None:
    from prefect import get_client
    from prefect.events.schemas.automations import AutomationCore, EventTrigger

    from flows import lost_workers

    wide = EventTrigger(expect={"prefect.flow-run.heartbeat"}, posture="Proactive", threshold=1, within=90)
    with get_client(sync_client=True) as client:
        names = (lost_workers.NAME, "somebody's own")
        for name in names:
            client.create_automation(AutomationCore(name=name, trigger=wide, actions=[]))
        kept = list[object]()
        for _ in range(2):
            lost_workers.watch()
            new, other = (client.read_automations_by_name(name) for name in names)
            assert (len(new), len(other)) == (1, 1)
            assert new[0].trigger != wide
            kept.append(new[0].id)
        assert kept[0] == kept[1]


def test_a_run_that_counts_as_lost_after_its_end_has_the_state_in_which_it_ended(prefect: None) -> None:
    """The server may hear that it ended before it is asked to expect a heartbeat."""
    from prefect import flow, get_client
    from prefect.states import Completed, Crashed, Failed, Running

    from flows import lost_workers

    @flow
    def version() -> None: ...

    with get_client(sync_client=True) as client:
        given = {
            state.name: client.create_flow_run(version, state=Running()).id
            for state in (Completed(), Failed(), Running())
        }
        for state in (Completed(), Failed(message="too little memory")):
            client.set_flow_run_state(given[state.name], state, force=True)
        for run in given.values():
            client.set_flow_run_state(run, Crashed(message=lost_workers.SILENT), force=True)
        found = lost_workers.states(given, {})
    assert [state.type.value for state in found.values()] == ["COMPLETED", "FAILED", "CRASHED"]
    assert found["Failed"].message == "too little memory"


def test_the_server_is_asked_now_and_then_to_expect_a_heartbeat_of_what_runs(
    prefect: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has forgotten to where it was away as a worker died. Runs of somebody's own flow `make` are left alone."""
    from flows.make import make
    from prefect import get_client
    from prefect.server.events.schemas.automations import EventTrigger
    from prefect.server.events.schemas.events import ReceivedEvent, Resource
    from prefect.states import Pending, Running

    from flows import lost_workers, runs

    sent, clock = list[tuple[Any, ...]](), [0.0]
    monkeypatch.setattr(
        lost_workers, "emit_event", lambda event, resource, related: sent.append((event, resource, related))
    )
    monkeypatch.setattr(lost_workers, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    with get_client(sync_client=True) as client:
        given = {
            name: client.create_flow_run(
                make, parameters={"name": name, "commit": ""}, tags=[runs.OURS], state=state
            ).id
            for name, state in (("v1", Running()), ("v2", Pending()))
        }
        seen = dict[UUID, float]()
        for clock[0] in (0.0, 300.0, 700.0, 1300.0):
            lost_workers.states({"v1": given["v1"]}, seen)
        assert [resource["prefect.resource.id"] for _, resource, _ in sent] == [f"prefect.flow-run.{given['v1']}"]
        lost_workers.watch()
        (automation,) = client.read_automations_by_name(lost_workers.NAME)
    trigger = EventTrigger.model_validate_json(automation.trigger.model_dump_json())
    event, resource, related = sent[0]

    def covers(about: list[dict[str, str]]) -> bool:
        return trigger.covers_resources(
            Resource.model_validate(resource),
            ReceivedEvent.model_validate(
                {
                    "event": event,
                    "resource": resource,
                    "related": about,
                    "occurred": "2026-01-01T00:00:00Z",
                    "id": str(uuid4()),
                }
            ).related,
        )

    assert event in trigger.after & trigger.expect
    assert covers(related)
    assert not covers(related[:1]), "a flow of somebody else's"


def test_a_version_that_another_build_has_asked_for_is_not_asked_for_again(
    prefect: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows.make import make
    from prefect import flow, get_client
    from prefect.states import Cancelled, Running

    from flows import build

    @flow
    def asked(name: str, commit: str) -> UUID:
        return build._give(name, commit, base_last=False)

    with get_client(sync_client=True) as client:
        client.create_deployment(client.create_flow(make), name="elsewhere")
        waits = asked("v1", "a" * 40)
        assert asked("v1", "a" * 40) == waits
        client.set_flow_run_state(waits, Running(), force=True)
        assert asked("v1", "a" * 40) == waits
        with monkeypatch.context() as patch:
            patch.setattr(build.clone, "git", lambda *_: "full/")
            folder = asked("v1", "a" * 40)
        assert client.read_flow_run(folder).parameters == {"name": "v1", "commit": "a" * 40, "folder": "full/"}
        others = folder, asked("v2", "a" * 40), asked("v1", "b" * 40)
        client.set_flow_run_state(waits, Cancelled(), force=True)
        assert len({waits, *others, asked("v1", "a" * 40)}) == 5
        for run in client.read_flow_runs():
            if run.deployment_id:
                client.delete_flow_run(run.id)


@pytest.mark.parametrize("is_taken", [False, True], ids=["the question is lost", "the answer is lost"])
def test_a_server_that_is_away_when_a_version_is_given_ends_no_build(
    is_taken: bool, prefect: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows.make import make
    from prefect import flow, get_client
    from prefect.deployments import run_deployment
    from prefect.states import Completed

    from flows import build

    with get_client(sync_client=True) as client:
        client.create_deployment(client.create_flow(make), name="elsewhere")
        asked, pauses = list[object](), list[float]()

        def ask(*words: object, **how: object) -> object:
            asked.append(words)
            run = run_deployment(*words, **how) if is_taken or len(asked) > 1 else None
            if run:  # the client of Prefect asks again by itself where the answer was lost
                assert run_deployment(*words, **how).id == run.id
            if len(asked) == 1:
                raise httpx.ReadError("away")
            return run

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            for run in client.read_flow_runs() if len(pauses) > 1 else ():
                if run.deployment_id:
                    client.set_flow_run_state(run.id, Completed(), force=True)

        @flow
        def outcomes() -> list[tuple[str, str | None]]:
            return [*build.outcomes(["v1"], "c" * 40)]

        monkeypatch.setattr(build, "run_deployment", ask)
        monkeypatch.setattr(build, "time", SimpleNamespace(sleep=pause, monotonic=time.monotonic))
        assert outcomes() == [("v1", None)]
    assert len(asked) == (1 if is_taken else 2)


@pytest.mark.parametrize("is_registered", [True, False])
def test_a_version_that_fails_stops_its_descendants_and_no_others(
    is_registered: bool, prefect: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dolls
    from clinrl.errors import Refused
    from flows import build

    params, asked, registered = dolls.params(), list[list[str]](), list[str]()

    def outcomes(names: list[str], _: str) -> Iterator[tuple[str, str | None]]:
        asked.append(names)
        return iter([(name, "too little memory" if name == "v1" else None) for name in names])

    def register(name: str) -> None:
        if not is_registered:
            raise Refused("no approver")
        registered.append(name)

    own = {
        build.clone: {"head": lambda: "a" * 40, "share": ignore, "at": lambda *_: nullcontext(), "git": lambda *_: ""},
        build.branches: {"tip": lambda _: ""},
        build.remote: {"check_may_push": ignore},
        build.steps: {"register": register},
        build.pages: {"show_exam": ignore},
        build: {
            "load_params": lambda: params,
            "outputs": lambda _: dict.fromkeys(params.versions),
            "outcomes": outcomes,
            "gather": lambda *_: "b" * 40,
        },
    }
    for module, names in own.items():
        for name, value in names.items():
            monkeypatch.setattr(module, name, value)
    with pytest.raises(Refused) as refused:
        build.build("esi")
    assert str(refused.value) == "; ".join(
        [
            f"1 versions are built and {len(registered)} registered",
            "`git fetch && git merge origin/built/esi` takes them over",
            *["v3 is not registered: no approver"] * (not is_registered),
            "v1 is not built: too little memory",
            "v2 is not built: its parent v1 was not made",
        ]
    )
    assert asked == [["v1", "v3"], []]


def ignore(*_: object) -> None: ...


@pytest.mark.parametrize("is_away", [True, False])
def test_a_worker_whose_origin_is_away_is_lost_and_one_that_is_refused_has_failed(
    is_away: bool, prefect: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from clinrl.errors import Refused
    from flows import clone, make

    def make_it(*_: object, **__: object) -> int:
        raise clone.Away("the origin is away: http://ada:secret@h/api") if is_away else Refused("a bad row")

    monkeypatch.setattr(make, "_make", make_it)
    monkeypatch.setattr(clone, "at", lambda *_: nullcontext())
    monkeypatch.setattr(make.records, "link", ignore)
    monkeypatch.setattr(make, "load_params", ignore)
    state = make.make("v1", "a" * 40, return_state=True)
    assert (state.is_crashed(), state.is_failed()) == (is_away, not is_away)
    assert ("the origin is away: http://h/api" if is_away else "a bad row") in state.message
