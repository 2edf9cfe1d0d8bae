"""One version: dataset, validate, probe, train, evaluate, register; its ancestors first, where they are missing.

Or one merge, after the versions that it is made of.

    python -m flows reproduce esi-v49
"""

from prefect import State, flow
from prefect.states import Completed

from clinrl.config.params import Params, load_params
from clinrl.provenance import dvc_yaml
from clinrl.provenance.stages import addresses_of
from clinrl.release.standing import is_registered
from flows import pages, runs, steps


@flow(flow_run_name="reproduce-{name}")
def reproduce(name: str) -> State[None]:
    """Bring a version or a merge up to date, from data to reports, and register it, after its ancestors or parts."""
    runs.begin()
    params = load_params()
    names = dict.fromkeys([*params.family(name), name])
    ran = [address for before in names for address in build(params, before)]
    return Completed(message=f"{name} is built and registered; {len(ran)} stages ran")


def build(params: Params, name: str) -> list[str]:
    """Bring the stages of one name up to date and register it. Returns the addresses of the stages that ran."""
    ran = steps.bring_up_to_date(order(params, name))
    if ran or not is_registered(params, name):
        steps.register(name)
        pages.show_exam(params, name)
    return ran


def order(params: Params, name: str) -> list[str]:
    """The stages of a version or a merge in the order in which they run. The parent, or the parts, must be there."""
    own, resit = [*addresses_of(params, name).values()], []
    if name in params.resits:
        resit = [*params.data_stages(params.resits[name].data), f"resit@{name}"]
    if name not in params.versions:
        return [*own, *resit]
    block = params.versions[name]
    exams = dict.fromkeys([params.bases[block.task].exam, block.exam])
    data = [*own[:2], *(stage for exam in exams for stage in params.data_stages(exam))]
    return [f"base@{block.task}", *data, f"baseline@{block.task}", *own[2:], *resit]


def mining(params: Params, *names: str) -> list[str]:
    """The stages of the error analyses of those models whose errors are mined, each after its data."""
    mined = {name: params.mining[name].data for name in names if name in params.mining}
    return [stage for name, data in mined.items() for stage in (*params.data_stages(data), f"mine@{name}")]


def outputs(params: Params) -> dict[str, dict[str, dict[str, bool]]]:
    """The stages of each version, in the order in which they run, with their outputs in dvc.yaml."""
    stages = dvc_yaml.read()
    return {name: {address: stages[address].outs for address in order(params, name)} for name in params.versions}
