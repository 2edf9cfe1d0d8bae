"""What a worker does: one version in a clone of its own, handed over as a branch and through the DVC remote."""

import httpx
from prefect import State, flow
from prefect.states import Completed, Crashed

from clinrl.config.params import load_params
from clinrl.provenance import dvc_yaml
from flows import branches, clone, runs, steps
from flows.reproduce import order


@flow(flow_run_name="make-{name}")
def make(name: str, commit: str) -> State[None]:
    """Build a version at a commit, of data and parents that the remote has, and hand it over. Nothing is registered.

    What it shares with versions that others have begun, such as the base's exam, is taken from their branches.
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
    params, stages = load_params(), dvc_yaml.read()
    mine, to = order(params, name), branches.branch(commit, name)
    missing = set(mine)
    for other in sorted(branches.begun(commit), key=lambda other: other != name):  # its own first
        # Stages that versions share come before all others, so a branch that has been handed over has them.
        if other in params.versions and (same := missing.intersection(order(params, other))):
            outs = {address: stages[address].outs for address in same}
            of, is_shared = branches.branch(commit, other), other != name
            branches.take_in(of, outs, f"{name}, begun for {other}", is_shared=is_shared)
            missing -= same
    clone.pull([address for before in params.lineage(name) for address in order(params, before)])

    def hand_over(address: str) -> None:
        if address.partition("@")[0] not in steps.LIGHT:
            clone.push(mine)
            branches.hand_over(to, f"{name}: {address}")

    return len(steps.bring_up_to_date(mine, hand_over))
