"""The scheduled run: build what is stale of a task's versions, then release the newest. Nothing stale, nothing done.

python -m flows.retrain esi
"""

if __name__ == "__main__":  # before Prefect is imported, which takes a second and reads the environment
    import sys

    from flows import command

    sys.exit(command.main("retrain"))

from typing import TYPE_CHECKING

from prefect import State, flow
from prefect.logging import get_run_logger
from prefect.states import Completed

from clinrl.errors import ParamsError
from clinrl.params import load_params
from clinrl.plan import dvc_states
from flows import runs
from flows.release import carry_out, folds
from flows.reproduce import build, order
from flows.standing import is_champion, is_registered, settled

if TYPE_CHECKING:
    from clinrl.params import Params

NOTHING_TO_DO, NOT_RELEASED = "Nothing to do", "Not released"
"""How a retraining ends that releases nothing, since nothing changed, or nothing of the newest version."""


@flow(flow_run_name="retrain-{task}")
def retrain(task: str, approver: str | None = None) -> State[None]:
    """Build every version of a task that is stale or not registered, parents first, and release the newest."""
    runs.begin()
    params = load_params()
    versions = of_task(params, task)
    left = unfinished(params, versions)
    if not left:
        standing = settled(params, versions[-1])
        message = f"nothing to do: every version of {task} is up to date and registered, and {standing}"
        get_run_logger().info(message)
        return Completed(name=NOTHING_TO_DO, message=message)
    get_run_logger().info("to do: %s", ", ".join(left))
    for version in versions:
        build(params, version)
    newest = versions[-1]
    if (standing := settled(params, newest)) and not is_champion(params, newest):
        return Completed(name=NOT_RELEASED, message=f"everything is up to date and registered; {standing}")
    return carry_out(params, newest, approver)


def of_task(params: "Params", task: str) -> list[str]:
    """The versions of a task, parents first; the last one of params.yaml is last. Raises ParamsError for none."""
    named = [name for name, version in params.versions.items() if version.task == task]
    if not named:
        raise ParamsError(f"params.yaml has no version of {task}, so there is nothing to retrain")
    first = dict.fromkeys(name for version in named for name in params.lineage(version))
    return [*(name for name in first if name != named[-1]), named[-1]]


def unfinished(params: "Params", versions: list[str]) -> list[str]:
    """What a retraining has to do, in words. Nothing: all is up to date and registered, and the newest is settled."""
    newest = versions[-1]
    merges = folds(params, newest)
    addresses = [address for version in versions for address in order(params, version)]
    merged = [address for name in merges for address in order(params, name)]
    states = dvc_states({*addresses, *merged})
    left = [address for address in dict.fromkeys(addresses) if states[address] != "up to date"]
    left = left or [f"register {name}" for name in versions if not is_registered(params, name)]
    left = left or ([] if settled(params, newest) else [f"release {newest}"])
    if left or not is_champion(params, newest):
        return left
    left = [address for address in merged if states[address] != "up to date"]
    left = left or [f"register {name}" for name in merges if not is_registered(params, name)]
    return left or [f"release {name}" for name in merges if not settled(params, name)]
