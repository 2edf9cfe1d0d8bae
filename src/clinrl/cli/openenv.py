"""A task's environment served to OpenEnv clients, which train or examine models of their own on it."""

from pathlib import Path
from typing import Final

from clinrl.errors import ParamsError, Refused, did_you_mean, echo
from clinrl.tasks.base import get_task, task_names

EXAM_IS_OPEN: Final = "whoever trains on cases of the pool exam can show nothing by an exam any more"
INSTALL: Final = "install it with `pip install --no-deps --require-hashes -r constraints.txt`"
SPARE_CONNECTIONS: Final = 32
"""How many connections beyond the sessions are answered; one more gets 503."""
MESSAGE_BYTES: Final = 64 * 1024
"""The longest message of a session."""


def stage(
    source: Path, name: str, *, host: str, port: int, sessions: int, open_exam: bool = False, version: str | None = None
) -> None:
    """Serve until interrupted; the first line of the output is the address. Port 0: any free one.

    `open_exam`: whether cases of the pool `exam` are served too. `version`: one of params.yaml, whose reward is paid.

    Raises ParamsError for a task without an environment and a reward that needs other models, Refused where OpenEnv is
    not installed or the address cannot be had.
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

    from clinrl.runtime.guard import address_of, listen

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
            app, log_level="warning", ws_max_size=MESSAGE_BYTES, limit_concurrency=sessions + SPARE_CONNECTIONS
        )
        uvicorn.Server(config).run(sockets=[listening])
