"""Serve the flows as deployments until stopped; retraining follows the schedules of params.yaml.

python -m flows serve --servers
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any

from clinrl.config.params import Params
from clinrl.errors import Refused
from clinrl.runtime import child
from flows import credentials, servers

BY_HAND = "by-hand"
"""The deployments of a single version, which a person starts."""
PORTS = 4200, 5000
"""Of Prefect and MLflow, where nothing else is asked for."""
ADDRESSES = """Prefect  {prefect}  (log in with PREFECT_API_AUTH_STRING of {file})
MLflow   {mlflow}  (log in with MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD of that file)
scripts  export PREFECT_API_URL={prefect}/api MLFLOW_TRACKING_URI={mlflow}; set -a; . {file}; set +a"""


def main(top: argparse.ArgumentParser, arguments: Mapping[str, Any]) -> int:
    """Serve until a signal comes; returns the exit code. `top` exits after misuse. Raises Refused without a server, or
    if one that was started ends: its socket stays open here, so clients would wait for ever."""
    given = arguments["prefect_port"], arguments["mlflow_port"]
    if any(given) and not arguments["servers"]:
        top.error("--prefect-port and --mlflow-port belong to --servers, which is missing")
    ports = given[0] or PORTS[0], given[1] or PORTS[1]
    if ports[0] == ports[1]:
        top.error(f"--prefect-port and --mlflow-port are both {ports[0]}; each needs its own")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ExitStack() as stack, suppress(KeyboardInterrupt):
        started: dict[str, Any] = {}
        if arguments["servers"]:
            with servers.starting():
                started = _start_servers(stack, *ports)
        elif not servers.is_configured():
            raise Refused("no Prefect server is configured: set PREFECT_API_URL, or give --servers to start one")
        # In a process group of its own, so that its flow runs end with it, whichever process gets the signal.
        runner = child.start([sys.executable, "-c", "from flows import runner; runner.run()"])
        stack.callback(child.end, runner)
        while runner.poll() is None:
            for name, server in started.items():
                servers.check_runs(name, server)
            time.sleep(1)
        return int(runner.returncode)
    return 0


def deployments(params: Params) -> list[Any]:
    """The served deployments: a scheduled retraining for each task with a schedule; a scheduled look at the counts, and
    the rollback that may follow, for each watched task; and the two other flows by hand, in the checkout.

    A retraining that is due while another one runs, or waits for its answer, waits its turn.
    """
    from prefect.schedules import Cron
    from prefect.types.entrypoint import EntrypointType

    from clinrl.watching.standing import DRIFT, SAFETY
    from flows import runs
    from flows.release import release
    from flows.reproduce import reproduce
    from flows.retrain import scheduled as retrain
    from flows.watch import rollback, trigger, watch

    ours: dict[str, Any] = {"entrypoint_type": EntrypointType.MODULE_PATH, "tags": [runs.OURS]}
    scheduled = [
        retrain.to_deployment(
            name=task,
            parameters={"task": task},
            schedules=[Cron(schedule.cron, timezone=schedule.timezone)],
            triggers=[trigger(task, DRIFT)] if task in params.watches else [],
            **ours,
        )
        for task, schedule in params.schedules.items()
    ]
    for task, watched in params.watches.items():
        how: dict[str, Any] = {"name": task, "parameters": {"task": task}, "concurrency_limit": 1} | ours
        scheduled.append(watch.to_deployment(schedules=[Cron(watched.cron, timezone="UTC")], **how))
        scheduled.append(rollback.to_deployment(triggers=[trigger(task, SAFETY)], **how))
    return [*scheduled, *(flow.to_deployment(name=BY_HAND, **ours) for flow in (reproduce, release))]


def _start_servers(stack: ExitStack, prefect_port: int, mlflow_port: int) -> dict[str, Any]:
    """Start both servers, which end with the stack, and print their addresses once they answer. Returns them by name.

    Raises Refused if a port is taken, or a server does not start.
    """
    from clinrl.runtime.guard import address_of, listen

    # Open as long as this process: nobody else must get the port of a server that ended, and with it the password.
    listening = [
        stack.enter_context(listen(servers.HOST, number, f"{option}, or stop what listens there"))
        for option, number in (("--prefect-port", prefect_port), ("--mlflow-port", mlflow_port))
    ]
    kept = credentials.load_credentials()
    started = {"prefect": servers.prefect(listening[0], kept.PREFECT_API_AUTH_STRING)}
    started["mlflow"] = servers.mlflow(listening[1], kept.mlflow)
    for server in started.values():
        stack.callback(child.end, server)
    prefect, mlflow = map(address_of, listening)
    os.environ |= {"PREFECT_API_URL": f"{prefect}/api", "PREFECT_API_AUTH_STRING": kept.PREFECT_API_AUTH_STRING}
    servers.wait("prefect", started["prefect"], servers.health())
    servers.wait("mlflow", started["mlflow"], f"{mlflow}/health", kept.mlflow)
    print(ADDRESSES.format(prefect=prefect, mlflow=mlflow, file=credentials.FILE), file=sys.stderr)
    return started
