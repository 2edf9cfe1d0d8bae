"""The command line: parse, load params.yaml, call, give an exit code. `commands` says what there is.

Exit codes: 0 done; 1 refused (data, proofs, artefacts, gates, the registry, a full disk); 2 the command or params.yaml
is wrong; 3 training ended without an adapter; 4 an alarm ended it; 75 another command is writing the same artefact;
130 interrupted.
Anything else is a bug and shows its traceback.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING

from clinrl.cli.parser import ARGUMENTS, STAGES, parser
from clinrl.errors import ParamsError, ended
from clinrl.runtime import determinism, starter

if TYPE_CHECKING:
    from clinrl.config.params import Params


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. argparse itself exits: 0 after help, 2 after a usage error."""

    def run() -> int:
        determinism.pin()
        words = list(sys.argv[1:] if argv is None else argv)
        if words.count("--") > 1:  # argparse makes a list of an argument then
            parser().error("-- may stand once")
        arguments = parser().parse_args(words)
        starter.follow()
        return _run(arguments)

    return ended(run)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command == "verify":
        verdict: int = import_module("clinrl.pipeline.verify").stage(
            arguments.address,
            hash_seed=arguments.hash_seed,
            threads=arguments.threads,
            keep=arguments.keep,
            attest=arguments.attest,
            as_json=arguments.json,
        )
        return verdict
    if arguments.command == "openenv":
        import_module("clinrl.cli.openenv").stage(
            arguments.name,
            host=arguments.host,
            port=arguments.port,
            sessions=arguments.sessions,
            open_exam=arguments.open_exam,
        )
        return 0
    if arguments.command in ("keys", "approve"):
        signed: int = getattr(import_module("clinrl.cli.key_commands"), arguments.command)(arguments)
        return signed
    if arguments.command in ("check", "stage"):
        state = import_module("clinrl.runtime.dvc_state")
        state.fence()
        if "DVC_STAGE" in os.environ:
            state.keep()
    if arguments.command == "stage":
        stages = import_module("clinrl.config.stages")
        if arguments.address == stages.FIRST:
            stages.prove(arguments.params)
            return 0
        arguments.command, arguments.name = stages.command_of(arguments.address)
    from clinrl.config.params import load_params

    params = load_params(arguments.params)
    if arguments.command == "check":
        return 0
    if arguments.command == "params":
        import_module("clinrl.config.resolved").stage(
            params, arguments.name, resolved=arguments.resolved, as_json=arguments.json
        )
        return 0
    if arguments.command == "plan":
        import_module("clinrl.pipeline.plan").stage(params, arguments.version, as_json=arguments.json)
        return 0
    if arguments.command == "replicate":
        import_module("clinrl.pipeline.replicate").stage(
            params, arguments.version, seeds=arguments.seeds, source=arguments.params
        )
        return 0
    _check_name(params, arguments.command, arguments.name)
    if arguments.command == "show":
        import_module("clinrl.evaluation.show").stage(
            params,
            arguments.name,
            arguments.episode,
            mode=arguments.mode,
            random=arguments.random,
            wrong=arguments.wrong,
            as_json=arguments.json,
        )
        return 0
    if arguments.command not in STAGES:
        code: int = getattr(import_module("clinrl.cli.registry_commands"), arguments.command)(params, arguments)
        return code
    _note_strangers(arguments.command, arguments.name)
    import_module(f"clinrl.{STAGES[arguments.command].module}").stage(params, arguments.name)
    import_module("clinrl.provenance.statements").record(
        arguments.command, arguments.name, params.scale, source=arguments.params
    )
    return 0


def _note_strangers(command: str, name: str) -> None:
    """Say that a stage run by hand works on files that dvc.lock does not record. DVC sees to its own stages."""
    if "DVC_STAGE" in os.environ:
        return
    from clinrl.config.stages import addresses
    from clinrl.errors import ArtefactError
    from clinrl.provenance import lock

    with suppress(ArtefactError):  # without a lock nothing is recorded, and nothing can be registered
        recorded = lock.read()
        unknown = [path for address in addresses(command, name) for path in lock.strangers(recorded, address)]
        for path in dict.fromkeys(unknown):
            print(
                f"clinrl: {path} is not what dvc.lock records; what comes of it cannot be registered before `dvc repro`"
                " made both",
                file=sys.stderr,
            )


def _check_name(params: "Params", command: str, name: str) -> None:
    """Refuse a name that params.yaml does not have, before the stage's libraries are imported. Raises ParamsError."""
    from clinrl.config.base import did_you_mean, shown

    merges = [*params.merges.folds, *params.merges.blends]
    argument = STAGES[command].argument if command in STAGES else ARGUMENTS[command]
    names = {
        "TASK": [*params.bases],
        "DATASET": [*params.all_data],
        "VERSION": [*params.versions],
        "MERGE": merges,
        "COMPARISON": [*params.comparisons],
        "NAME": [*params.versions, *merges],
        "MODEL": [model for task in params.bases for model in (task, f"{task}-merged")],
    }[argument]
    if command == "protocol":
        names += [f"{task}-base" for task in params.bases]
    if command in ("evaluate", "show"):
        names += [*merges, *(f"{task}-base" for task in params.bases)]
    if name not in names:
        raise ParamsError(
            f"{shown(name)} is no {argument.lower()} that `clinrl {command}` knows; {did_you_mean(name, names)}"
        )
