"""`clinrl openenv`: serve a task's environment to OpenEnv clients, which train or evaluate their own models on it."""

from pathlib import Path
from typing import Final

from clinrl.errors import INSTALL, ParamsError, Refused, did_you_mean, echo
from clinrl.tasks.base import get_task, task_names

EXAM_IS_OPEN: Final = "an exam shows nothing about a model that was trained on cases of the pool exam"
SPARE_CONNECTIONS: Final = 32
"""Connections that are answered beyond one for each session; any further one gets 503."""
MESSAGE_BYTES: Final = 64 * 1024
"""The largest message of a session."""


def stage(
    source: Path, name: str, *, host: str, port: int, sessions: int, open_exam: bool = False, version: str | None = None
) -> None:
    """Serve a task's environment until interrupted. The first line of the output is the address.

    Port 0 takes any free one. `open_exam` serves cases of the pool `exam` too. `version` names the version of
    params.yaml that gives the reward; without it the task's own reward is paid. Raises ParamsError for a task without
    an environment, for a version of another task, for a control, and for a reward that needs other models; Refused if
    OpenEnv is not installed or the address cannot be bound.
    """
    if name not in task_names():
        raise ParamsError(f"{name!r} is no task whose environment can be served; {did_you_mean(name, task_names())}")
    try:
        from clinrl.tasks.openenv import application
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] != "openenv":
            raise
        raise Refused(f"OpenEnv is not installed; {INSTALL}") from None
    import uvicorn

    from clinrl.runtime.guard import Impatient, ImpatientSocket, address_of, listen

    task, reward = get_task(name), None
    if version is not None:
        from clinrl.cli.names import check_name
        from clinrl.config.params import load_params

        params = load_params(source)
        if check_name(params, version, "openenv", kind="VERSION", task=name) != name:
            raise ParamsError(f"{version} is no version of {name}")
        if params.model(version).placebo:
            raise ParamsError(f"{version} is a control, whose reward is no score of an answer; name another version")
        reward = params.reward(version)
    app = application(task, reward, sessions=sessions, names=[host], open_exam=open_exam)
    with listen(host, port) as listening:
        print(address_of(listening), flush=True)
        if open_exam:
            echo(f"THE EXAM IS OPEN: {EXAM_IS_OPEN}")
        config = uvicorn.Config(
            app,
            http=Impatient,
            ws=ImpatientSocket,
            log_level="warning",
            ws_max_size=MESSAGE_BYTES,
            limit_concurrency=sessions + SPARE_CONNECTIONS,
        )
        uvicorn.Server(config).run(sockets=[listening])
