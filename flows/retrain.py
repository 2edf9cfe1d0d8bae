"""The scheduled run: build what is stale of a task's versions, then release the newest one. Nothing stale, nothing done.

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

from clinrl import artefacts, ledger, paths
from clinrl.errors import ParamsError
from clinrl.params import load_params
from clinrl.plan import dvc_states
from flows import runs, steps
from flows.release import carry_out, folds, merging
from flows.reproduce import build, order

if TYPE_CHECKING:
    from clinrl.params import Params

NOTHING_TO_DO = "Nothing to do"


@flow(flow_run_name="retrain-{task}")
def retrain(task: str, approver: str | None = None) -> State[None]:
    """Build every version of a task that is stale or not registered, parents first, and release the newest."""
    runs.begin()
    params = load_params()
    versions = of_task(params, task)
    left = unfinished(params, versions)
    if not left:
        settled = standing(params, versions[-1])
        message = f"nothing to do: every version of {task} is up to date and registered, and {settled}"
        get_run_logger().info(message)
        return Completed(name=NOTHING_TO_DO, message=message)
    get_run_logger().info("to do: %s", ", ".join(left))
    for version in versions:
        build(params, version)
    return carry_out(params, versions[-1], approver)


def of_task(params: "Params", task: str) -> list[str]:
    """The versions of a task, parents first; the last one of params.yaml is last. Raises ParamsError for none."""
    named = [name for name, version in params.versions.items() if version.task == task]
    if not named:
        raise ParamsError(f"params.yaml has no version of {task}, so there is nothing to retrain")
    first = dict.fromkeys(name for version in named for name in params.lineage(version))
    return [*(name for name in first if name != named[-1]), named[-1]]


def unfinished(params: "Params", versions: list[str]) -> list[str]:
    """What a retraining has to do, in words; nothing if all stages are up to date, registered, and the newest settled."""
    newest = versions[-1]
    merges = folds(params, newest)
    addresses = [address for version in versions for address in order(params, version)]
    merged = [address for name in merges for address in merging(name)]
    states = dvc_states({*addresses, *merged})
    left = [address for address in dict.fromkeys(addresses) if states[address] != "up to date"]
    left = left or [f"register {name}" for name in versions if not steps.is_registered(params, name)]
    left = left or ([] if standing(params, newest) else [f"release {newest}"])
    if left or not steps.is_champion(params, newest):
        return left
    left = [address for address in merged if states[address] != "up to date"]
    return left or [f"register {name}" for name in merges if not steps.is_registered(params, name)]


def standing(params: "Params", version: str) -> str | None:
    """What became of a registered version, in words; None if it is not the champion and nobody has decided yet.

    A decision counts against the champion that there is now. A no holds until a person starts a release; so does the
    silence of a day, or the same question would come back every week.
    """
    from clinrl import registry

    task = params.versions[version].task
    mine, champion = registry.find(task, version).digest, registry.holder(task, "champion")
    if champion is not None and champion.digest == mine:
        return f"{version} is the champion"
    lines = ledger.read(paths.ledger())
    asked = {
        artefacts.digest(line.body): line.body
        for line in lines
        if line.kind == "decision"
        and (line.body["candidate_digest"], line.body["champion_digest"]) == (mine, champion and champion.digest)
    }
    for line in reversed(lines):
        body = line.body
        if line.kind == "rollback" and body["from"]["digest"] == mine:
            return f"{version} was rolled back by {body['approver']}"
        if line.kind == "promotion" and body["digest"] == mine:
            return f"{version} gave way to {champion.name}" if champion else None
        if line.kind == "refusal" and body["decision"] in asked:
            return f"{version} was not approved ({body['reason']}); `python -m flows.release {version}` asks again"
        if line.kind == "decision" and body in asked.values():
            return None if body["promote"] else f"{version} was refused by its gate"
    return None
