"""The process that polls a Prefect server, where that is away for a while."""

import asyncio
import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from prefect import State, flow, get_client
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import DeploymentFilter
from prefect.client.schemas.schedules import CronSchedule
from prefect.flow_engine import run_flow
from prefect.schedules import Cron
from prefect.settings import PREFECT_RUNNER_POLL_FREQUENCY, temporary_settings
from prefect.states import AwaitingRetry, Completed, Scheduled
from prefect.types.entrypoint import EntrypointType

pytestmark = pytest.mark.long

END = "CLINRL_TEST_END"
"""Variable: the file that ends the flow."""


@flow
def waits() -> None:
    while not Path(os.environ[END]).exists():
        time.sleep(0.1)


def test_a_flow_that_is_started_by_a_worker_of_prefect_reports_no_use(
    prefect: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows import runs

    monkeypatch.delenv("DO_NOT_TRACK")
    flow(runs.begin)()
    assert os.environ["DO_NOT_TRACK"] == "true"


def test_of_runs_that_were_due_while_the_machine_was_off_one_is_enough(prefect: None) -> None:
    from flows import turns

    overtaken, fails = list[bool](), [1]

    @flow
    def due(of: str = "esi") -> State[None]:
        assert not fails
        overtaken.append(turns.is_overtaken())
        return Completed(name=turns.OVERTAKEN if overtaken[-1] else "Done")

    with get_client(sync_client=True) as client:
        deployment = client.create_deployment(client.create_flow(due), name="weekly")

        def begun(run: UUID, **given: Any) -> Any:
            return run_flow(due, flow_run=client.read_flow_run(run), parameters=given, return_type="state")

        def scheduled(when: datetime, **given: Any) -> UUID:
            state = Scheduled(scheduled_time=when)
            return client.create_flow_run_from_deployment(deployment, state=state, parameters=given).id

        weeks = [datetime.now(UTC) - timedelta(weeks=number) for number in (3, 2, 1)]
        failed = scheduled(weeks[0])
        assert begun(failed).is_failed()
        fails.clear()
        assert begun(scheduled(weeks[0], of="imaging"), of="imaging").is_completed()
        for week in weeks:
            begun(scheduled(week))
        assert overtaken == [False, False, True, True]
        now = datetime.now(UTC)
        begun(scheduled(weeks[0]))  # begins after that, and does nothing
        begun(scheduled(now))
        assert overtaken[4:] == [True, False]
        client.set_flow_run_state(failed, AwaitingRetry(), force=True)  # as a person does on its page
        begun(failed)
        due()  # a person's, of no deployment
    assert overtaken[6:] == [False, False]


def test_a_server_schedules_what_is_due(prefect: None) -> None:
    """If its libraries keep it from that, only its log says so, and its pages look healthy."""
    with get_client(sync_client=True) as client:
        weekly = [{"schedule": CronSchedule(cron="0 3 * * 1"), "active": True}]
        deployment = client.create_deployment(client.create_flow(waits), name="due", schedules=weekly)
        client._client.post(f"/deployments/{deployment}/schedule", json={}).raise_for_status()
        runs = client.read_flow_runs(deployment_filter=DeploymentFilter(id={"any_": [deployment]}))
    assert len(runs) >= 3
    assert all(run.auto_scheduled and run.state is not None and run.state.is_scheduled() for run in runs)


def test_what_somebody_switched_off_on_the_server_stays_off(prefect: None) -> None:
    from flows.watch import trigger

    from flows import runner

    async def registered(change: str = "") -> tuple[bool, list[bool], list[bool]]:
        deployment = await waits.ato_deployment(
            "off",
            schedules=[Cron("0 3 * * 1")],
            triggers=[trigger("esi", "drift")],
            entrypoint_type=EntrypointType.MODULE_PATH,
        )
        await runner._stay_off(deployment)
        await deployment.aapply()
        async with get_client() as client:
            automations = await client.read_automations_by_name(deployment.triggers[0].name)
            found = await client.read_deployment_by_name("waits/off")
            if change:
                await getattr(client, f"{change}_deployment")(found.id)
                await client.update_deployment_schedule(found.id, found.schedules[0].id, active=change == "resume")
                await getattr(client, f"{change}_automation")(automations[0].id)
            return found.paused, [one.active for one in found.schedules], [one.enabled for one in automations]

    on, off = (False, [True], [True]), (True, [False], [False])
    assert [asyncio.run(registered(change)) for change in ("pause", "", "resume", "")] == [on, off, off, on]


def test_a_server_that_is_away_for_many_polls_ends_no_run(
    prefect: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from flows import runner

    end, failed, poll = tmp_path / "end", 0, PrefectClient.get_scheduled_flow_runs_for_deployments
    monkeypatch.setenv(END, str(end))
    folders = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", folders)

    async def refused(*_args: object, **_how: object) -> None:
        nonlocal failed
        failed += 1
        raise httpx.ConnectError("away")

    async def served() -> str:
        deployment = await waits.ato_deployment("here", entrypoint_type=EntrypointType.MODULE_PATH)
        polling = asyncio.create_task(runner.poll([deployment]))
        async with get_client() as client:

            async def eventually(is_so) -> None:
                async with asyncio.timeout(200):
                    while not await is_so():
                        await asyncio.sleep(0.2)

            async def state() -> str:
                return (await client.read_flow_run(run.id)).state.name

            async def is_deployed() -> bool:
                return any(one.name == "here" for one in await client.read_deployments())

            async def runs() -> bool:
                return await state() == "Running"

            async def has_failed() -> bool:
                assert not polling.done()
                return failed > 3

            await eventually(is_deployed)
            run = await client.create_flow_run_from_deployment((await client.read_deployment_by_name("waits/here")).id)
            await eventually(runs)
            monkeypatch.setattr(PrefectClient, "get_scheduled_flow_runs_for_deployments", refused)
            await eventually(has_failed)
            monkeypatch.setattr(PrefectClient, "get_scheduled_flow_runs_for_deployments", poll)
            end.touch()
            async with asyncio.timeout(200):
                await polling  # ends by itself, so that a new one begins
            return await state()

    with temporary_settings({PREFECT_RUNNER_POLL_FREQUENCY: 1}):
        assert asyncio.run(served()) == "Completed"
    assert capsys.readouterr().err.count(runner.AWAY) == 1
