"""The work of a worker: one version, built in a clone, and handed over as a branch and through the DVC remote."""

from collections.abc import Collection
from contextlib import chdir
from pathlib import Path

import httpx
from prefect import State, flow
from prefect.exceptions import PrefectHTTPStatusError
from prefect.logging import get_run_logger
from prefect.states import Completed, Crashed

from clinrl.config.params import load_params
from clinrl.errors import Refused, mask
from clinrl.pipeline.plan import dvc_states
from flows import branches, clone, records, remote, runs, steps
from flows.reproduce import outputs


@flow(flow_run_name="make-{name}")
def make(name: str, commit: str, folder: str = "", base_last: bool = False) -> State[None]:
    """Build a version at a commit, from data and parents in the remote, and hand it over. Nothing is registered.

    Stages that it shares with versions that others have begun, such as the base's exam, are taken from their branches.
    Of versions that begin together, one evaluates the base first. With `base_last` this waits until the version is
    trained, and is taken from that one if it is made by then.

    `folder`: of the project in the repository, if it is not the root.

    Each long stage is handed over when it is done, so that another worker can continue after it. If a server of
    Prefect, of git or of the remote is away, this counts as a lost worker: the version is tried again.
    """
    try:
        runs.begin()
        with chdir(_project(folder)):
            checkout = Path.cwd()
            with clone.at(commit, "worker"):
                records.link(load_params(), checkout)
                ran = _make(name, commit, base_last=base_last)
    except (httpx.TransportError, PrefectHTTPStatusError, clone.Away) as error:
        if not isinstance(error, clone.Away) and not runs.is_away(error):
            raise
        return Crashed(message=f"a server is away: {mask(str(error))}")
    return Completed(message=f"{name} is made; {ran} stages ran")


def _project(folder: str) -> Path:
    """The project in a folder of this clone. Raises Refused if there is none."""
    project = Path(folder).resolve()
    if folder and not (project.is_relative_to(Path.cwd()) and (project / "params.yaml").is_file()):
        raise Refused(f"{folder} is no project of the clone that this worker starts in; push it to its branch main")
    return project


def _make(name: str, commit: str, *, base_last: bool) -> int:
    params, to = load_params(), branches.branch(commit, name)
    before = branches.tip(to)
    stages = outputs(params)
    own, base = [*stages[name]], f"baseline@{params.versions[name].task}"

    def take_in(addresses: Collection[str], one: str = "") -> None:
        for reason in branches.go_on_with(name, commit, stages, one):
            get_run_logger().warning("stages that another worker has begun are made anew: %s", reason)
        remote.pull(addresses)

    def hand_over(address: str) -> None:
        nonlocal before  # a worker that was thought lost must not replace what its successor handed over
        if address.partition("@")[0] not in steps.LIGHT:
            remote.push(stages[name])
            before = branches.hand_over(to, f"{name}: {address}", force=f"--force-with-lease=refs/heads/{to}:{before}")

    take_in([address for version in params.lineage(name) for address in stages[version]])
    remote.check_may_push(to)
    remote.check_may_write()
    ran = list[str]()
    if base_last and dvc_states([base])[base] != "up to date":
        trained = own[: own.index(f"train@{name}") + 1]
        ran = steps.bring_up_to_date([address for address in trained if address != base], hand_over)
        take_in([base], base)
    return len({*ran, *steps.bring_up_to_date(own, hand_over)})
