"""The process that polls a Prefect server for runs of the served deployments, and goes on while the server is away.

Prefect's own loop ends after three failed polls in a row, and ends all runs with it.
"""

import asyncio
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from prefect import get_client
from prefect.exceptions import ObjectNotFound
from prefect.runner import Runner

from clinrl.config.params import load_params
from clinrl.errors import with_exit_code
from flows import runs
from flows.serve import deployments

AWAY = "the Prefect server does not answer; running flows go on, and due flows start when it answers"
PAUSE_S = 30.0
"""Seconds until the next try to register the deployments, if the server was away."""


def run() -> None:
    """Poll the configured Prefect server for runs of the deployments, and run them in processes of their own.

    SIGINT or SIGTERM ends this process and all runs. Exits as `flows.__main__.main` does.
    """
    if code := _sweep():
        sys.exit(code)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    served = deployments(load_params())
    print("serving the flows; stop with Ctrl-C", file=sys.stderr)
    with suppress(KeyboardInterrupt):
        while True:
            try:
                asyncio.run(poll(served))
            except Exception as error:
                if not runs.is_away(error):
                    raise
                print(AWAY, file=sys.stderr)
                time.sleep(PAUSE_S)
    sys.exit(_sweep())  # the runner has killed what it ran


async def poll(served: Iterable[Any]) -> None:
    """Register deployments, and poll for their runs. A poll that fails ends nothing.

    Returns once the server answers again after it was away, and nothing runs: a runner that lost the server is not
    informed of cancelled runs any more, but a new runner is.
    """
    # Without a limit: trainings wait for a slot, releases for a person, and a rollback must not wait behind them.
    runner, was_away = Runner(pause_on_shutdown=False, limit=None), False
    for deployment in served:
        await _stay_off(deployment)
        await runner.aadd_deployment(deployment)
    async with runner:
        poller = runner._scheduled_run_poller
        submitting = poller._submitting_flow_run_ids  # a Prefect without it fails now, and not after hours
        while True:
            try:
                await poller._get_and_submit_flow_runs()
            except Exception as error:
                if not runs.is_away(error):
                    raise
                if not was_away:
                    print(AWAY, file=sys.stderr)
                was_away = True
            else:
                if was_away and not submitting:  # it holds runs until their processes end
                    return
            await asyncio.sleep(runner.query_seconds)


async def _stay_off(deployment: Any) -> None:
    """Let a deployment, its schedules and its automations stay off if somebody switched them off on the server, since
    registering them switches them on."""
    async with get_client() as client:
        with suppress(ObjectNotFound):
            found = await client.read_deployment_by_name(f"{deployment.flow_name}/{deployment.name}")
            deployment.paused = found.paused
            for schedule in deployment.schedules if found.schedules else []:
                schedule.active = all(one.active for one in found.schedules)
        for trigger in deployment.triggers:  # none is there if a registration before this one was cut short
            if there := await client.read_automations_by_name(trigger.name):
                trigger.enabled = all(one.enabled for one in there)


@with_exit_code
def _sweep() -> int:
    with runs.prefect_errors(), get_client(sync_client=True) as client:
        runs.sweep(client)
    return 0
