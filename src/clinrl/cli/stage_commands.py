"""The commands that DVC runs: check params.yaml, and run a stage of dvc.yaml by its address or its name."""

import os
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from clinrl.cli.commands import COMMANDS
from clinrl.cli.names import check_name
from clinrl.config.params import Params, load_params
from clinrl.errors import ArtefactError, echo
from clinrl.provenance import dvc_yaml, lock, stages, statements
from clinrl.runtime import dvc_state, forkserver

HEAVY = ("train", "evaluate")
"""Commands whose imports take seconds."""


def check(source: Path) -> None:
    """Check params.yaml, and warn of a gate that an exam cannot meet. Raises ParamsError for the first error."""
    _guard()
    params = dvc_yaml.check(source)
    for exam, task in sorted({(version.exam, version.task) for version in params.versions.values()}):
        data, gate = params.datasets.get(exam), params.gates.get(task)
        if data and gate and data.cases < gate.least_cases:  # no refusal: a project to try out may release nothing
            echo(
                f"gates.{task}.least_cases is {gate.least_cases}, but the exam {exam} has {data.cases} cases, so no "
                "version that takes it can be released; draw more cases, or ask for fewer"
            )


def stage(source: Path, address: str) -> int:
    """Run the stage of dvc.yaml with this address and return its exit code. Raises ParamsError for an unknown one."""
    command, name = (address, "") if address == stages.FIRST else stages.command_of(address)
    if command in HEAVY and (code := forkserver.ask(["stage", address, "--params", str(source)])) is not None:
        return code
    _guard()
    if address == stages.FIRST:
        dvc_yaml.prove(source)
        return 0
    params = load_params(source)
    check_name(params, name, command, kind="COMPARISON" if command == "compare" else "")
    make(params, source, command, name)
    return 0


def make(params: Params, source: Path, command: str, name: str) -> None:
    """Run a stage and sign a statement of its inputs and outputs. Warns of inputs that dvc.lock does not record."""
    _warn_of_inputs(command, name, source)
    begun = None
    with suppress(ArtefactError):  # `record` reports it
        begun = statements.find(command, name, source)
    import_module(f"clinrl.{COMMANDS[command].stage}").stage(params, name)
    statements.record(command, name, params.scale, source, begun)


def _guard() -> None:
    """Secure DVC's files before they are read. Within a stage that DVC runs, also keep a copy of dvc.lock."""
    dvc_state.fence()
    if "DVC_STAGE" in os.environ:
        dvc_state.keep()


def _warn_of_inputs(command: str, name: str, source: Path) -> None:
    """Warn of inputs that dvc.lock does not record, if a person runs the stage. DVC checks the stages that it runs."""
    if "DVC_STAGE" in os.environ:
        return
    with suppress(ArtefactError):  # without a lock nothing is recorded, and nothing can be registered
        recorded = lock.read()
        if dvc_yaml.PIPELINE.exists():  # the lock keeps the stages of versions that were removed
            recorded = {address: recorded[address] for address in dvc_yaml.read(source) if address in recorded}
        for address in stages.addresses(command, name):
            facts = lock.unsound_inputs(recorded, address)
            if absent := [fact.path for fact in facts if fact.state == "absent"]:
                echo(
                    f"{', '.join(absent)} {'is' if len(absent) == 1 else 'are'} not here; `dvc repro {address}` makes"
                    " all that this needs, in order"
                )
            for fact in facts:
                if fact.state != "absent":
                    echo(
                        f"{fact.path} is not what dvc.lock records; `dvc repro {address}` makes both anew, and before"
                        " that the result cannot be registered"
                    )
