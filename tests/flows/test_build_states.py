"""How a build hears of its runs, from a real Prefect server."""

import time
from types import SimpleNamespace
from uuid import UUID, uuid4

import pytest


@pytest.mark.parametrize("at_once", [2, 100], ids=["in several requests", "in one"])
def test_runs_are_told_of_at_once_lost_ones_as_crashed(
    at_once: int, prefect: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect import flow, get_client
    from prefect.states import Completed, Pending, Running

    from flows import build

    @flow
    def version() -> None: ...

    monkeypatch.setattr(build, "AT_ONCE", at_once)
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
        found = {name: state.type.value for name, state in build._states(given, pending).items()}
        assert found == {
            "done": "COMPLETED",
            "works": "RUNNING",
            "waits": "PENDING",
            "gone": "CRASHED",
            "never": "CRASHED",
        }
        assert asked == ([2, 2, 1] if at_once == 2 else [5])
        monkeypatch.setattr(build, "PENDING_S", -1.0)
        assert [*pending] == [given["waits"]]
        assert build._states(given, pending)["waits"].is_crashed()
        assert client.read_flow_run(given["waits"]).state.is_cancelled(), "or it would begin beside another"


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

        monkeypatch.setattr(build, "_give", lambda name, _commit: given[name])
        monkeypatch.setattr(build, "time", SimpleNamespace(sleep=pause, monotonic=time.monotonic))
        assert told() == [("v1", None, 2), ("v2", "too little memory", 3), ("v3", None, 3)]
