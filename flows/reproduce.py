"""One version: dataset, validate, probe, train, evaluate, register; its ancestors first, where they are missing.

python -m flows.reproduce esi-v49
"""

if __name__ == "__main__":  # before Prefect is imported, which takes a second and reads the environment
    import sys

    from flows import command

    sys.exit(command.main("reproduce"))

from typing import TYPE_CHECKING

from prefect import State, flow
from prefect.states import Completed

from clinrl.params import load_params
from flows import pages, runs, steps
from flows.standing import is_registered

if TYPE_CHECKING:
    from clinrl.params import Params


@flow(flow_run_name="reproduce-{version}")
def reproduce(version: str) -> State[None]:
    """Bring a version up to date, from its data to its reports, and register it; its ancestors before it."""
    runs.begin()
    params = load_params()
    ran = [address for name in params.lineage(version) for address in build(params, name)]
    return Completed(message=f"{version} is built and registered; {len(ran)} stages ran")


def build(params: "Params", version: str) -> list[str]:
    """Bring the stages of one version up to date and register it. Returns the addresses of the stages that ran."""
    ran = steps.bring_up_to_date(order(params, version))
    if ran or not is_registered(params, version):
        steps.register(version)
        pages.show_exam(params, version)
    return ran


def order(params: "Params", version: str) -> list[str]:
    """The stages of one version in the order in which they run. Its parent must be there, the base is brought along."""
    block = params.versions[version]
    base_exam = params.bases[block.task].exam
    return [
        f"base@{block.task}",
        f"dataset@{block.data}",
        f"validate@{block.data}",
        *dict.fromkeys(f"{stage}@{exam}" for exam in (base_exam, block.exam) for stage in ("dataset", "validate")),
        f"baseline@{block.task}",
        f"probe@{version}",
        f"train@{version}",
        f"evaluate@{version}",
    ]
