"""The command line of the flows: parse, set up the environment, start a private server if none is configured, run.

Exit codes are those of `clinrl`: 0 done, or nothing to do; 1 refused or not approved; 2 the command or params.yaml is
wrong; 3 training ended without an adapter; 4 an alert ended it; 75 another command is at work here; 130 interrupted.
"""

import atexit
import gc
import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

from clinrl.cli.arguments import LAST_PORT, Command, arg, natural
from clinrl.cli.parser import Parser, add_command
from clinrl.config.base import check_known
from clinrl.config.params import load_params
from clinrl.errors import ParamsError, Refused, echo, with_exit_code
from clinrl.pipeline.plan import WHAT, generations
from clinrl.runtime import child, determinism, dvc_state
from flows import interpreter, serve, servers
from flows.turns import at_work

if TYPE_CHECKING:
    from prefect import State

ALONE = (
    "With PREFECT_API_URL set, the run is recorded by that server, and a person can be asked on its page. "
    "The same command continues a run that was interrupted or killed."
)
NAME = arg("name", metavar="NAME", help="a version or a merge of params.yaml")
TASK = arg("task", metavar="TASK", help="a task of params.yaml")
APPROVER = arg("--approver", metavar="NAME", help="who approves the release, given beforehand")

FLOWS = {
    "reproduce": Command(
        help="build a version or a merge and what it comes from, and register it",
        description="Builds what is stale of NAME, a version or a merge, and of its ancestors, and registers them. "
        f"Needs no server. {ALONE}",
        examples="python -m flows reproduce esi-v49\npython -m flows reproduce esi-v46-v49",
        arguments=(NAME,),
    ),
    "build": Command(
        help="have workers build many versions side by side, and register them",
        description="Has workers of a Prefect server build the versions of WHAT and their ancestors, at this "
        "checkout's commit. Gathers them as the branch built/WHAT, and registers them. The same command "
        "goes on with what was begun. docs/many-machines.md tells more.",
        examples="python -m flows build imaging-arms\npython -m flows build esi",
        arguments=(arg("what", metavar="WHAT", help=f"{WHAT} of params.yaml"),),
        also="fan-out distribute",
    ),
    "release": Command(
        help="decide on a registered version or merge, have it approved and promote it",
        description="Decides whether NAME, a registered version or merge, may become champion, has that approved and "
        "promotes it; then makes a version's full models, which become champions by the same approval if they pass "
        f"the gate. Needs no server. {ALONE}",
        examples='python -m flows release esi-v49 --approver "Ada Lovelace"',
        arguments=(NAME, APPROVER),
        also="promote deploy",
    ),
    "retrain": Command(
        help="build what is stale of a task, release the newest version, or draft the next",
        description="Builds what is stale of all versions of TASK, then releases the newest. If nothing is stale, and "
        "the schedule of TASK says `draft: true`, drafts the next version from the champion's errors, builds it, and "
        "releases it, or drops it if it gains nothing. Works in this checkout; a run that `serve` starts by a schedule "
        f"hands over a branch instead. Needs no server. {ALONE}",
        examples='python -m flows retrain esi\npython -m flows retrain esi --approver "Ada Lovelace"',
        arguments=(TASK, APPROVER),
        also="train schedule",
    ),
    "watch": Command(
        help="check the served champion of a task; with a server, alarms are sent as events",
        description="Compares the requests and the answers of TASK's champion with its exam. Needs no server; with "
        "one, an event is sent for each new alarm. Ends with 0, alarm or not; `clinrl watch report` ends with 1.",
        examples="python -m flows watch esi",
        arguments=(TASK,),
    ),
    "serve": Command(
        help="serve the deployments by the schedules of params.yaml",
        description="Serves the deployments of params.yaml: retraining and watching by its schedules, rollbacks by "
        "alarms, `reproduce` and `release` by hand. Ends, and ends what it started, on Ctrl-C and on SIGTERM. What was "
        "interrupted is continued by the next run.",
        examples="python -m flows serve --servers\nPREFECT_API_URL=http://127.0.0.1:4200/api python -m flows serve",
        arguments=(
            arg("--servers", action="store_true", help="start Prefect and MLflow on 127.0.0.1 too"),
            arg("--prefect-port", type=natural(1, LAST_PORT), metavar="PORT", help="with --servers; default: 4200"),
            arg("--mlflow-port", type=natural(1, LAST_PORT), metavar="PORT", help="with --servers; default: 5000"),
        ),
    ),
}


def parser() -> Parser:
    """The parser of the command line."""
    top = Parser(
        prog="python -m flows",
        description="Runs a flow, or serves them all by the schedules of params.yaml.",
        epilog="`python -m flows FLOW --help` has examples.",
        also={name: flow.also.split() for name, flow in FLOWS.items()},
    )
    commands = top.add_subparsers(dest="flow", metavar="FLOW", required=True)
    for name, flow in FLOWS.items():
        add_command(commands, name, flow)
    return top


@with_exit_code
def main(argv: Sequence[str] | None = None) -> int:
    """Run one flow and return its exit code. argparse itself exits: 0 after help, 2 after a usage error."""
    top = parser()
    arguments = vars(top.parse_args(argv))
    name = arguments.pop("flow")
    determinism.pin()
    task = check(arguments)
    servers.configure()
    if name == "serve":
        return serve.main(top, arguments)
    # With a server, stages wait for its slots. Two flows that decide would spend one budget twice.
    is_alone = name != "watch" and (not servers.is_configured() or name in ("release", "retrain"))
    with at_work(task, f"flows {name} {arguments.get('name', task)}") if is_alone else nullcontext():
        return _run(name, arguments)


def check(arguments: dict[str, Any]) -> str:
    """Refuse names that params.yaml does not have, an invalid approver, and a Python that cannot run stages.

    Nothing has been started at this point. Returns the task of the flow; empty for `serve`.
    """
    dvc_state.fence()
    interpreter.stages_python()
    params = load_params()
    task: str
    if "name" in arguments:
        task = params.versions[params.parts(arguments["name"])[0]].task
    elif "what" in arguments:
        if not (groups := generations(params, arguments["what"])):
            raise ParamsError(f"{arguments['what']} has no version yet, so there is nothing to build")
        task = params.versions[groups[0][0]].task
        if not servers.is_configured():
            raise Refused("workers poll a Prefect server, and none is configured: set PREFECT_API_URL to theirs")
    elif task := arguments.get("task", ""):
        check_known("params.yaml", task, params.bases, "a task with a base")
    if arguments.get("approver") is not None:
        from clinrl.release.promotion import check_listed

        check_listed(params, arguments["approver"])  # refused now, since a training may take days
    return task


def _run(name: str, arguments: dict[str, Any]) -> int:
    with nullcontext() if servers.is_configured() else servers.starting():
        server = servers.begin_private()
        if server is not None:
            atexit.register(child.end, server)  # before Prefect's own handler, hence run after it
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        module = import_module(f"flows.{name}")  # takes a second, while the server starts
        approver = arguments.pop("approver", None)
        flow = module.approved_by(approver) if name in ("release", "retrain") else getattr(module, name)
        from flows import runs

        if server is not None:
            servers.wait("prefect", server, servers.health())
    return verdict(runs.start(flow, arguments))


def verdict(state: "State[Any]") -> int:
    """The exit code for a flow's last state. Raises the refusal or the fault that ended the flow."""
    if not state.is_completed():
        from flows import runs

        with runs.prefect_errors():  # the server may have been away in the middle of the flow
            state.result(raise_on_failure=True)
    echo(state.message)
    from flows.release import NOT_APPROVED, REFUSED

    return 1 if state.name in (REFUSED, NOT_APPROVED) else 0


if __name__ == "__main__":
    code = main()
    gc.freeze()  # else the interpreter scans all imported objects at exit
    sys.exit(code)
