"""The work of a worker: one version, built in a clone, and handed over as a branch and through the DVC remote."""

from collections.abc import Collection
from pathlib import Path

import httpx
from prefect import State, flow
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.exceptions import PrefectHTTPStatusError
from prefect.logging import get_run_logger
from prefect.states import Completed, Crashed

from clinrl.config.params import load_params
from clinrl.pipeline.plan import dvc_states
from flows import branches, clone, records, runs, steps
from flows.reproduce import outputs, training


@flow(flow_run_name="make-{name}")
def make(name: str, commit: str, exams_last: bool = False) -> State[None]:
    """Build a version at a commit, from data and parents in the remote, and hand it over. Nothing is registered.

    Stages that it shares with versions that others have begun, such as the base's exam, are taken from their branches.
    Of versions that begin together, one makes them at once. For the others, `exams_last`, they can wait until the
    version is trained: its worker looks for them again then.

    Each long stage is handed over when it is done, so that another worker can continue after it. If a server of
    Prefect, of git or of the remote is away, this counts as a lost worker: the version is tried again.
    """
    try:
        runs.begin()
        checkout = Path.cwd()
        with clone.at(commit, "worker"):
            records.link(load_params(), checkout)
            ran = _make(name, commit, exams_last=exams_last)
    except (httpx.TransportError, PrefectHTTPStatusError, ConcurrencySlotAcquisitionError, clone.Away) as error:
        if not isinstance(error, clone.Away) and not runs.is_away(error):
            raise
        return Crashed(message=f"a server is away: {error}")
    return Completed(message=f"{name} is made; {ran} stages ran")


def _make(name: str, commit: str, *, exams_last: bool) -> int:
    params, to = load_params(), branches.branch(commit, name)
    before = branches.tip(to)
    stages = outputs(params)
    trained = training(params, name)

    def take_in(addresses: Collection[str]) -> None:
        for reason in branches.go_on_with(name, commit, stages):
            get_run_logger().warning("stages that another worker has begun are made anew: %s", reason)
        clone.pull(addresses)

    def hand_over(address: str) -> None:
        nonlocal before  # a worker that was thought lost must not replace what its successor handed over
        if address.partition("@")[0] not in steps.LIGHT:
            clone.push(stages[name])
            before = branches.hand_over(to, f"{name}: {address}", force=f"--force-with-lease=refs/heads/{to}:{before}")

    take_in([address for version in params.lineage(name) for address in stages[version]])
    ran = list[str]()
    shared = [address for address in stages[name] if not address.endswith(f"@{name}") and address not in trained]
    if exams_last and set(dvc_states(shared).values()) != {"up to date"}:
        ran = steps.bring_up_to_date(trained, hand_over)
        take_in(shared)
    return len({*ran, *steps.bring_up_to_date([*stages[name]], hand_over)})
