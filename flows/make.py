"""What a worker does: one version in a clone of its own, handed over as a branch and through the DVC remote."""

import httpx
from prefect import State, flow
from prefect.states import Completed, Crashed

from clinrl.config.params import load_params
from flows import branches, clone, runs, steps
from flows.reproduce import order


@flow(flow_run_name="make-{name}")
def make(name: str, commit: str) -> State[None]:
    """Build a version at a commit, of data and parents that the remote has, and hand it over. Nothing is registered.

    Each long stage is handed over when it is done, so that another worker goes on after the last of them. A server that
    is away, of Prefect, git or the remote, counts as a lost worker: the version is tried again.
    """
    try:
        runs.begin()
        with clone.at(commit, "worker"):
            ran = _make(name, commit)
    except (httpx.TransportError, clone.Away) as error:
        return Crashed(message=f"a server is away: {error}")
    return Completed(message=f"{name} is made; {ran} stages ran")


def _make(name: str, commit: str) -> int:
    params = load_params()
    mine, to = order(params, name), branches.branch(commit, name)
    if branches.offers(to):
        branches.take_in(to, mine, f"{name}, begun before")
    clone.pull([address for before in params.lineage(name) for address in order(params, before)])

    def hand_over(address: str) -> None:
        if address.partition("@")[0] not in steps.LIGHT:
            clone.push(mine)
            branches.hand_over(to, f"{name}: {address}")

    return len(steps.bring_up_to_date(mine, hand_over))
