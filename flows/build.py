"""Many versions on many machines: workers make them side by side, and this machine gathers and registers them.

python -m flows build imaging-arms
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, cast
from uuid import UUID, uuid4

import httpx
from prefect import State, flow, get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.logging import get_run_logger
from prefect.states import Completed

from clinrl.config.params import load_params
from clinrl.errors import Refused
from clinrl.pipeline.plan import generations
from clinrl.provenance import lock
from flows import branches, clone, lost_workers, pages, remote, runs, steps
from flows.reproduce import outputs

WORKERS = "make/elsewhere"
"""The deployment of prefect.yaml that workers poll for."""
TRIES = 8
"""The most times that a version is given to a worker. A lost worker costs a try; a stage that fails ends all tries."""
REST_S = 10.0
"""Seconds after the first lost worker of a version until it is given to another; twice as long after each further one,
so that all tries outlast a server that is away for 20 minutes."""
POLL_S = 5.0
WAITING_S = 600.0
"""Seconds between log lines about waiting versions that no worker takes."""


@flow(flow_run_name="build-{what}")
def build(what: str) -> State[None]:
    """Have workers make the versions of a task, of a comparison, or one version; gather them in a clone; register them.

    The result is the branch `built/{what}` of the origin, in the order of params.yaml, whichever worker was first. A
    version that fails stops only its descendants.
    """
    _answered(runs.begin)
    _answered(lost_workers.watch)
    to, failed, says = branches.result(what), dict[str, str](), list[str]()
    head = clone.head()
    clone.share(load_params().scale)
    with clone.at(head, "build"):
        params, made, registered = load_params(), list[str](), 0
        last = branches.tip(to)
        remote.check_may_push(to)
        stages = outputs(params)
        for names in generations(params, what):
            for name in names:
                if params.versions[name].parent in failed:
                    failed[name] = f"its parent {params.versions[name].parent} was not made"
            commit = clone.git("rev-parse", "HEAD")
            for name, reason in outcomes([name for name in names if name not in failed], commit):
                if reason is None:
                    try:
                        last = gather(name, stages[name], branches.branch(commit, name), to, last)
                    except Refused as error:
                        reason = str(error)
                if reason is not None:
                    failed[name] = reason
                    continue
                made.append(name)
                try:
                    steps.register(name)
                    _answered(partial(pages.show_exam, params, name))
                    registered += 1
                except Refused as error:  # its descendants need its files alone
                    says.append(f"{name} is not registered: {error}")
    says += [f"{name} is not built: {reason}" for name, reason in failed.items()]
    done = f"{len(made)} versions are built and {registered} registered"
    if made:
        done += f"; `git fetch && git merge origin/{to}` takes them over"
    if says:
        raise Refused("; ".join([done, *says]))
    return Completed(message=done)


def gather(name: str, stages: Mapping[str, Collection[str]], branch: str, to: str, last: str) -> str:
    """Take over a worker's results for a version, add them to the branch `to`, and return its commit; `last` is the one
    that it has now.

    Raises Refused if the worker's branch is refused, if another build has changed `to`, or if the origin is away; the
    clone then stays as it was.
    """
    before = clone.git("rev-parse", "HEAD")
    try:
        if branches.tip(branch):
            branches.take_in(branch, stages, f"{name}, made by a worker")
        remote.pull(stages)
        if absent := stages.keys() - lock.read():
            raise Refused(f"its worker made no {min(absent)}; see its log")
        return branches.hand_over(to, name, force=f"--force-with-lease=refs/heads/{to}:{last}")
    except Refused as refused:
        sent, now = clone.git("rev-parse", "HEAD"), last
        with suppress(Refused):
            now = branches.tip(to)
        if sent != last and now == sent:  # its answer was lost
            return sent
        clone.git("reset", "--quiet", "--hard", before)
        if now != last:
            raise Refused(f"another build has changed {to} at the origin; start again when it has ended") from refused
        raise


def outcomes(names: list[str], commit: str) -> Iterator[tuple[str, str | None]]:
    """Have workers make versions at a commit. Yields each version with None, or with the reason why it failed.

    They come in the given order, each as soon as it and those before it have ended. The run of a lost worker is given
    to another worker, which continues after the last stage that was handed over.
    """
    logger, since = get_run_logger(), time.monotonic()
    found, tries, seen = dict[str, str | None](), dict.fromkeys(names, 1), dict[UUID, float]()
    lost = dict[UUID, float]()  # when each loss was first seen
    given = {name: _answered(partial(_give, name, commit, name != names[0])) for name in names}
    for next_one in names:
        while next_one in given:
            time.sleep(POLL_S)
            states = _answered(partial(lost_workers.states, given, seen))
            if not all(state.is_scheduled() for state in states.values()):
                since = time.monotonic()
            elif time.monotonic() - since > WAITING_S:
                since = time.monotonic()
                more = f" (and {len(given) - 1} more)" if len(given) > 1 else ""
                logger.warning("%s%s waits; no worker takes it", next(iter(given)), more)
            for name, state in states.items():
                if not state.is_final():
                    continue
                run, now = given[name], time.monotonic()
                if state.is_crashed() and tries[name] < TRIES:
                    if now - lost.setdefault(run, now) < REST_S * 2 ** (tries[name] - 1):
                        continue
                    tries[name] += 1
                    logger.warning("%s is given to a worker again (%s); try %d", name, state.message, tries[name])
                    given[name] = _answered(partial(_give, name, commit, name != names[0]))
                    continue
                del given[name]
                found[name] = None if state.is_completed() else state.message or state.name or "it failed"
                logger.info("%s: %s; %d to go", name, state.message or state.name, len(given))
        yield next_one, found[next_one]


def _answered(ask: Callable[[], Any]) -> Any:
    """What the Prefect server answers, once it does: workers go on without it, so this waits while it is away."""
    with runs.prefect_errors():
        while True:
            try:
                return ask()
            except (httpx.TransportError, PrefectHTTPStatusError) as error:
                if not runs.is_away(error):
                    raise
            get_run_logger().warning("the Prefect server does not answer; asking again")
            time.sleep(POLL_S)


def _give(name: str, commit: str, base_last: bool) -> UUID:
    """Ask the workers for a version, unless somebody has; `base_last`: as in `make`. Raises Refused if no server knows
    of any workers."""
    folder, states = clone.git("rev-parse", "--show-prefix"), ["SCHEDULED", "PENDING", "RUNNING"]
    tag = f"{folder}{name}@{commit}"
    same = FlowRunFilter.model_validate({"tags": {"all_": [tag]}, "state": {"type": {"any_": states}}})
    try:
        with get_client(sync_client=True) as client:
            if begun := client.read_flow_runs(flow_run_filter=same, limit=1):
                get_run_logger().info("%s was asked for before; waiting for that run", name)
                return begun[0].id
        asked = {"name": name, "commit": commit, "folder": folder, "base_last": base_last}
        once = str(uuid4())  # the client asks again where the answer was lost, and the server would make another run
        given = {key: of for key, of in asked.items() if of}
        run = run_deployment(WORKERS, parameters=given, timeout=0, tags=[tag], idempotency_key=once)
        return cast(FlowRun, run).id  # of another type for asynchronous callers
    except ObjectNotFound:
        raise Refused(
            f"Prefect has no {WORKERS}; `CLINRL_REPOSITORY=URL prefect --no-prompt deploy --name elsewhere` makes it"
        ) from None
