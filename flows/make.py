"""What a worker does: one version in a clone of its own, handed over as a branch and through the DVC remote."""

from prefect import State, flow
from prefect.states import Completed

from clinrl.config.params import load_params
from flows import clone, runs, steps
from flows.reproduce import order


@flow(flow_run_name="make-{name}")
def make(name: str, commit: str) -> State[None]:
    """Build a version at a commit, of data and parents that the remote has, and hand it over. Nothing is registered.

    Each stage is handed over when it is done, so that another worker goes on after the last of them.
    """
    runs.begin()
    with clone.at(commit, "worker"):
        params = load_params()
        mine, to = order(params, name), clone.branch(commit, name)
        if clone.offers(to):
            clone.take_in(to, mine, f"{name}, begun before")
        clone.pull([address for before in params.lineage(name) for address in order(params, before)])
        ran = []
        for address in mine:
            if steps.bring_up_to_date([address]):
                clone.push([address])
                clone.hand_over(to, f"{name}: {address}")
                ran.append(address)
    return Completed(message=f"{name} is made; {len(ran)} stages ran")
