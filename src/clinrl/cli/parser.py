"""The subcommands: what each is called, takes and says of itself."""

import argparse
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from clinrl import __version__

LONGEST = 18
"""Digits of a number that is read; int() refuses thousands."""


class _Stage(NamedTuple):
    """How a stage of dvc.yaml appears on the command line."""

    module: str
    argument: str
    help: str
    description: str
    examples: str


STAGES = {
    "base": _Stage(
        "models.bases",
        "TASK",
        "build a task's embedded base, or pin its hub checkpoint",
        "Writes data/bases/TASK. At scale embedded, trains the base model from scratch (minutes to an hour; a killed "
        "build continues); at scale full, resolves the hub revision to a commit and records it.",
        "clinrl base esi",
    ),
    "dataset": _Stage(
        "data.dataset",
        "DATASET",
        "draw the cases of a data set, or import them",
        "Writes data/cases/DATASET: cases.jsonl and its manifest. An imported one (`imports` in params.yaml) also gets "
        "refused.tsv, which says why each row was kept out, and import.json with the counts.",
        "clinrl dataset esi-d1\nclinrl dataset mietic-36",
    ),
    "validate": _Stage(
        "data.validate",
        "DATASET",
        "prove that a data set is what it must be",
        "Runs the task's expectations and the gold proof on data/cases/DATASET. Writes the proof "
        "data/reports/data/DATASET.json only on success, and pages for people under data/docs/DATASET.",
        "clinrl validate esi-d1",
    ),
    "probe": _Stage(
        "data.reward_audit",
        "VERSION",
        "prove that a version's reward and stream pay no lazy policy",
        "Scores lazy policies on the very stream that VERSION would train on. Writes the proof "
        "data/reports/probe/VERSION.json only if none of them beats a mediocre reader.",
        "clinrl probe esi-v46",
    ),
    "train": _Stage(
        "training.launch",
        "VERSION",
        "train a version's adapter",
        "Writes data/adapters/VERSION, warm-started from the version's parent. An interrupted run continues from its "
        "last checkpoint when the same command is given again.",
        "clinrl train esi-v46\nclinrl train esi-v46 --params trial.yaml",
    ),
    "evaluate": _Stage(
        "evaluation.evaluate",
        "VERSION",
        "let a version, or a base, sit its exam in every mode",
        "Writes the graded transcripts to data/graded/VERSION and the reports to data/reports/VERSION.",
        "clinrl evaluate esi-v46\nclinrl evaluate esi-base\nclinrl evaluate esi-v49-full",
    ),
    "mine": _Stage(
        "evaluation.error_analysis",
        "VERSION",
        "find out where a version errs, and what that would cost",
        "Lets VERSION answer its mine data (`mining` in params.yaml), which is neither training data nor an exam, in "
        "every mode. Groups the wrong answers by deciding rule, boundary, age, trigger and error, ranked by clinical "
        "cost. Writes data/reports/mine/VERSION.json, .md and .png.",
        "clinrl mine esi-v49",
    ),
    "external": _Stage(
        "evaluation.external",
        "VERSION",
        "let a version sit an exam from elsewhere, beside published results",
        "Lets VERSION answer the data that `external` in params.yaml names, in every mode. Writes "
        "data/reports/external/VERSION.json and .md: its figures with intervals, what lazy policies reach, and the "
        "task's published rows.",
        "clinrl external esi-v49",
    ),
    "protocol": _Stage(
        "evaluation.benchmark",
        "VERSION",
        "let a version, or a base, play a published protocol, and sample its exam",
        "For tasks that are played in an environment. Lets VERSION play the episodes that `protocols` in params.yaml "
        "names, in every mode, and answer its exam once more at their temperature. Writes "
        "data/reports/protocol/VERSION.json and .md: the published and the corrected score, beside lazy policies, the "
        "oracle and the published figures; and level by level whether its interval lies above theirs.",
        "clinrl protocol audit-base",
    ),
    "comparison": _Stage(
        "evaluation.compare",
        "COMPARISON",
        "compare recipes over seeds: intervals, controls and tests",
        "Reads the graded answers and reports of the base and of all versions that `comparisons` in params.yaml names; "
        "asks no model. Writes data/reports/comparisons/COMPARISON.json, .md and .png: each recipe as the mean over "
        "its seeds, beside controls, the base and who does not read, and the tests between recipes. In the folder "
        "COMPARISON each version has a page with every control as a row.",
        "clinrl comparison recipes",
    ),
    "merge": _Stage(
        "merging.merge",
        "MERGE",
        "fold a version into its base, or blend two versions",
        "Writes data/merged/MERGE, without training. A fold is a full model that needs no PEFT, checked against base "
        "and adapter; a blend is an adapter (cat, svd) or a full model (linear, ties, dare).",
        "clinrl merge esi-v49-full\nclinrl merge esi-v46-v49",
    ),
}
"""The stages that take a name of params.yaml, in the order in which they build on each other."""

ARGUMENTS = {
    "register": "NAME",
    "decide": "NAME",
    "promote": "NAME",
    "rollback": "MODEL",
    "versions": "MODEL",
    "lookup": "MODEL",
    "lineage": "NAME",
    "alarms": "VERSION",
    "draft": "TASK",
    "compare": "NAME",
    "show": "NAME",
}
"""What the commands that answer questions take. `clinrl.cli.registry_commands` has a function for each but `show`."""


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    # Each subcommand accepts --params too; without a default there, it does not overwrite one given before the name.
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--params", type=Path, metavar="PATH", default=argparse.SUPPRESS, help="default: params.yaml")
    top = argparse.ArgumentParser(
        prog="clinrl",
        description="Trains, examines and verifies LoRA adapters for clinical reasoning. Research only.",
        epilog="examples:\n  clinrl plan\n  clinrl dataset esi-d1 && clinrl validate esi-d1\n  clinrl train --help\n\n"
        "Commands run in the project's root. `dvc repro` runs what is out of date, in order.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"clinrl {__version__}")
    top.add_argument("--params", type=Path, metavar="PATH", default=Path("params.yaml"), help="default: params.yaml")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, help_: str, description: str, examples: str) -> argparse.ArgumentParser:
        return commands.add_parser(
            name,
            help=help_,
            description=description,
            epilog="examples:\n" + "\n".join(f"  {line}" for line in examples.splitlines()),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            parents=[shared],
        )

    for name, stage in STAGES.items():
        stage_parser = command(name, stage.help, _wrapped(stage.description), stage.examples)
        stage_parser.add_argument("name", metavar=stage.argument, help=f"a {stage.argument.lower()} of params.yaml")

    command(
        "check",
        "check params.yaml",
        _wrapped(
            "Reads params.yaml within limits of size, depth and length, and checks every name, value and reference. "
            "Says nothing, or what is wrong first. `make demo`, `make test` and the flows do this before DVC reads it."
        ),
        "clinrl check\nclinrl check --params trial.yaml",
    )
    stage_of = command(
        "stage",
        "run the stage of dvc.yaml that has this address",
        _wrapped(
            "What every stage of dvc.yaml runs: DVC names the stage in DVC_STAGE, so that no name is part of a shell's "
            "line. The stage `params` checks params.yaml and writes data/reports/params.json."
        ),
        "clinrl stage train@esi-v46\nclinrl stage params",
    )
    stage_of.add_argument("address", metavar="ADDRESS", help="a stage of dvc.yaml, such as train@esi-v46")
    plan = command(
        "plan",
        "show the versions and which of their stages are up to date",
        _wrapped(
            "Shows each version of a lineage, root first, with its recipe and what DVC says of its stages: up to date, "
            "stale, missing, or unknown. A table on a terminal, tab-separated otherwise."
        ),
        "clinrl plan\nclinrl plan esi-v46 --json\nclinrl plan | cut -f 1,2,12",
    )
    plan.add_argument("version", metavar="VERSION", nargs="?", help="only this version and its ancestors")
    plan.add_argument("--json", action="store_true", help="one JSON list of objects")

    params = command(
        "params",
        "print what a version really uses, from all its blocks",
        _wrapped(
            "Prints the blocks of NAME as params.yaml has them: recipe, data, parent, exam, base and modes; without "
            "NAME, all of params.yaml. --resolved fills in every default and, of NAME, keeps the active scale alone."
        ),
        "clinrl params esi-v49 --resolved\nclinrl params esi-v49 --resolved --json\nclinrl params --resolved",
    )
    params.add_argument("name", metavar="NAME", nargs="?", help="a version, a merge, or TASK-base; default: everything")
    params.add_argument("--resolved", action="store_true", help="with defaults filled in, at the active scale")
    params.add_argument("--json", action="store_true", help="JSON instead of YAML")

    replicate = command(
        "replicate",
        "train and examine a version's lineage again with other seeds",
        _wrapped(
            "Trains VERSION and its ancestors again on the same base and data, each time with other seeds, and lets "
            "them sit the same exam. Writes data/reports/seeds/VERSION.json and .md. The lineage of params.yaml counts "
            "as the first seed and must have been examined; each further seed takes as long as the lineage did. The "
            "same command continues where it was stopped."
        ),
        "clinrl replicate esi-v46\nclinrl replicate esi-v49 --seeds 5",
    )
    replicate.add_argument("version", metavar="VERSION", help="a version of params.yaml")
    replicate.add_argument(
        "--seeds", type=natural(2), metavar="N", default=3, help="params.yaml's own seed included; default: 3"
    )

    verify = command(
        "verify",
        "rebuild an artefact from nothing and compare it byte by byte",
        _wrapped(
            "Rebuilds what ADDRESS names, with its ancestors, in a fresh git worktree without a cache, and compares "
            "every file with dvc.lock. Exit code 0: all equal; 1: not."
        ),
        "clinrl verify esi-v46\nclinrl verify esi-base\nclinrl verify base@esi\n"
        "clinrl verify esi-v46 --hash-seed 7 --threads 1 --keep\nclinrl verify esi-v49 --attest",
    )
    verify.add_argument("address", metavar="ADDRESS", help="a version, a merge, TASK-base, or base@TASK")
    verify.add_argument("--hash-seed", type=natural(0), metavar="N", help="PYTHONHASHSEED of the rebuild")
    verify.add_argument("--threads", type=natural(1), metavar="N", help="processors for the rebuild")
    verify.add_argument("--keep", action="store_true", help="keep the worktree for inspection")
    verify.add_argument(
        "--attest", action="store_true", help="if all are equal, sign that into data/attestations with your key"
    )
    verify.add_argument("--json", action="store_true", help="the verdict as one JSON object")
    openenv = command(
        "openenv",
        "serve a task's environment to OpenEnv clients",
        _wrapped(
            "Serves the environment of TASK over HTTP and WebSocket until Ctrl-C, and prints its address first. A "
            "client resets with seed, level, pool and index; the score comes with the last observation and is that of "
            "`clinrl evaluate`. There is no password: whoever reaches the address may play, but for web pages of other "
            "origins and requests to another host name. The pool exam is closed. Needs the extra openenv."
        ),
        "clinrl openenv audit\nclinrl openenv audit --port 8001 --sessions 8\n"
        "openenv validate --url http://127.0.0.1:8000",
    )
    openenv.add_argument("name", metavar="TASK", help="a task with an environment: audit")
    openenv.add_argument(
        "--host", metavar="ADDRESS", default="127.0.0.1", help="default: 127.0.0.1, this machine alone"
    )
    openenv.add_argument("--port", type=port(0), metavar="N", default=8000, help="0: any free one; default: 8000")
    openenv.add_argument("--sessions", type=natural(1), metavar="N", default=64, help="at once; default: 64")
    openenv.add_argument(
        "--open-exam", action="store_true", help="serve cases of the pool exam too: never to a trainer"
    )
    _add_registry_commands(command)
    _add_signing_commands(command)
    compare = command(
        "compare",
        "test two that sat the same exam against each other",
        _wrapped(
            "Exact McNemar tests of every yes/no metric in every mode, on the graded answers of NAME and OTHER: cases "
            "that count for one alone, the difference with its 95% interval, and p, not adjusted for their number."
        ),
        "clinrl compare esi-v50 esi-v49\nclinrl compare esi-v49-full esi-v49 --json",
    )
    compare.add_argument("name", metavar="NAME", help="a version or a merge of params.yaml")
    compare.add_argument("other", metavar="OTHER", help="another, or TASK-base, that sat the same exam")
    compare.add_argument("--json", action="store_true", help="one JSON list of objects")
    _add_show(command)
    draft = command(
        "draft",
        "write the next version into params.yaml, from the champion's errors",
        _wrapped(
            "Reads the mining report of the champion of TASK and adds a data set, a recipe and a version to "
            "params.yaml, whose comments and order stay: modifiers for the rules that are surely missed, more cases "
            "that they decide, and the settings of a refinement. What was tried from this champion before is not tried "
            "again, and a draft that nobody trained yet is printed again. Nothing is trained; read the draft, change "
            "it if you like, then run `dvc repro`."
        ),
        "clinrl draft esi\nclinrl draft esi --from esi-v46 --name esi-v47\nclinrl draft esi --lever data --json",
    )
    draft.add_argument("name", metavar="TASK", help="a task of params.yaml")
    draft.add_argument("--from", dest="parent", metavar="VERSION", help="the version to start from; default: champion")
    draft.add_argument("--name", dest="called", metavar="NAME", help="the version's name; default: the next number")
    draft.add_argument("--lever", metavar="LEVER", help="modifiers, data, lower-rate or higher-rate; default: the next")
    draft.add_argument("--json", action="store_true", help="the draft as one JSON object")
    return top


def _add_show(command: Callable[[str, str, str, str], argparse.ArgumentParser]) -> None:
    """The subcommand that prints what was kept of an exam."""
    show = command(
        "show",
        "print one answer of an exam as a person would read it",
        _wrapped(
            "Prints what NAME did with a case of its exam: the request, each turn with its thinking, calls and what "
            "the tools answered, what was decided and what was right, and the score term by term. Reads the graded "
            "answers; asks no model. EPISODE is a case id, the beginning of one, or a number in the order of the exam."
        ),
        "clinrl show esi-v49 1\nclinrl show esi-v49 esi-00a1 --mode direct\nclinrl show esi-v49 --random 7\n"
        "clinrl show esi-v49 --wrong 3\nclinrl show esi-base --wrong --json",
    )
    show.add_argument("name", metavar="NAME", help="a version or a merge of params.yaml, or TASK-base")
    which = show.add_mutually_exclusive_group(required=True)
    which.add_argument("episode", metavar="EPISODE", nargs="?", help="a case id, its beginning, or a number from 1")
    which.add_argument("--random", type=natural(0), metavar="SEED", help="one drawn with this seed")
    which.add_argument(
        "--wrong", type=natural(1), nargs="?", const=1, metavar="N", help="the first N that are wrong; default: 1"
    )
    show.add_argument("--mode", metavar="MODE", help="a mode of params.yaml; default: the first")
    show.add_argument("--json", action="store_true", help="one JSON list of objects")


def _add_signing_commands(command: Callable[[str, str, str, str], argparse.ArgumentParser]) -> None:
    """Subcommands about keys and signatures; they need no params.yaml."""
    keys = command(
        "keys",
        "make a signing key, and say whose signatures count",
        _wrapped(
            "`init` makes this checkout's key in .clinrl/keys; if CLINRL_SIGNING_KEY or CLINRL_SIGNING_KEY_FILE names "
            "one that is elsewhere, it keeps only the public half. `show` lists whose signatures count here, those of "
            "params.yaml too. `trust` lets those of one more key count. A line of OpenSSH, as `show` prints it, is "
            "what `approvers` and `rebuilders` in params.yaml take. `vouch` is for the day after a key was revoked: it "
            "signs what that key left at the end of the audit file, so that commands read it again."
        ),
        'clinrl keys init\nclinrl keys show --json\nclinrl keys trust "Ada Lovelace" "$(cat ada.pub)"\n'
        'CLINRL_SIGNING_KEY=agent clinrl keys init\nclinrl keys vouch "laptop stolen; lines 1 to 12 are ours"',
    )
    actions = keys.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, does in {
        "init": "make the key of this checkout",
        "show": "list whose signatures count, and for what",
        "trust": "let the signatures of one more key count",
        "vouch": "sign the audit file, of which you read what a key signed that was revoked since",
    }.items():
        action = actions.add_parser(name, help=does, description=does, allow_abbrev=False)
        if name == "trust":
            action.add_argument("name", metavar="NAME", help="whose key it is")
            action.add_argument("line", metavar="LINE", help="their public key: ecdsa-sha2-nistp256 AAAA...")
        if name == "vouch":
            action.add_argument("reason", metavar="REASON", help="why the key was revoked, for the audit file")
        else:
            action.add_argument("--json", action="store_true", help="one JSON list of objects")
    approve = command(
        "approve",
        "make the token by which you approve a decision",
        _wrapped(
            "Signs the approval of a decision with your key (CLINRL_SIGNING_KEY, CLINRL_SIGNING_KEY_FILE, or "
            ".clinrl/keys) and prints it as a token, to be pasted where it is asked for. Works anywhere: no project, "
            "no server and no network is needed. DECISION is the digest that `clinrl decide` and the form show."
        ),
        'clinrl approve "$DECISION" --as "Ada Lovelace"\nCLINRL_SIGNING_KEY=agent clinrl approve "$DECISION" --as Ada',
    )
    approve.add_argument("decision", metavar="DECISION", help="64 characters of 0-9 and a-f")
    approve.add_argument("--as", dest="approver", metavar="NAME", required=True, help="your name in `approvers`")


def _add_registry_commands(command: Callable[[str, str, str, str], argparse.ArgumentParser]) -> None:
    """Subcommands that speak to the MLflow registry: mlruns/mlflow.db, or the server of MLFLOW_TRACKING_URI."""
    register = command(
        "register",
        "put a version or a merge, with all its metrics, into the registry",
        _wrapped(
            "Logs parameters, metrics of every mode with intervals, training history, data digests, reports and plots "
            "of NAME, and the model itself, to MLflow. The same adapter is one model version, however often it is "
            "registered; what is missing is filled in. NAME must have been examined."
        ),
        "clinrl register esi-v49\nclinrl register esi-v49-full\n"
        "MLFLOW_TRACKING_URI=http://127.0.0.1:5000 clinrl register esi-v49",
    )
    register.add_argument("name", metavar="NAME", help="a version or a merge of params.yaml")
    decide = command(
        "decide",
        "hold a version's exam against its task's gate and the champion",
        _wrapped(
            "Writes the decision to data/reports/decisions.jsonl and to the version's tags; promotes nothing. Adapters "
            "are compared with the champion of the adapters, full models with that of the full models. Exit code 0: "
            "may be promoted; 1: not."
        ),
        "clinrl decide esi-v49\nclinrl decide esi-v49-full --json",
    )
    decide.add_argument("name", metavar="NAME", help="a registered version or merge of params.yaml")
    decide.add_argument("--json", action="store_true", help="the decision as one JSON object")
    promote = command(
        "promote",
        "make a version or a merge the champion",
        _wrapped(
            "Decides, and if every limit of the gate holds moves the alias champion to NAME and previous to the "
            "champion before. The decision and the approver's name go to the audit file and to the version's tags."
        ),
        'clinrl promote esi-v49 --approver "Ada Lovelace"\nclinrl promote esi-v49-full --approver "Ada Lovelace"',
    )
    promote.add_argument("name", metavar="NAME", help="a registered version or merge of params.yaml")
    promote.add_argument("--approver", required=True, metavar="NAME", help="the person who approves it")
    promote.add_argument("--token", metavar="TOKEN", help="their approval, if their key is elsewhere: `clinrl approve`")
    rollback = command(
        "rollback",
        "bring the previous champion back",
        _wrapped(
            "Swaps the aliases champion and previous of MODEL; the same command undoes it. Adapters and full models "
            "are rolled back one by one."
        ),
        'clinrl rollback esi --approver "Ada Lovelace"\nclinrl rollback esi-merged --approver "Ada Lovelace"',
    )
    rollback.add_argument("name", metavar="MODEL", help="a registered model: a task, or TASK-merged")
    rollback.add_argument("--approver", required=True, metavar="NAME", help="the person who decides it")
    versions = command(
        "versions",
        "list what is registered",
        _wrapped("Every version of a registered model, oldest first, with its aliases and how its gate stands."),
        "clinrl versions esi\nclinrl versions esi-merged --json\nclinrl versions esi | cut -f 2,4",
    )
    versions.add_argument("name", metavar="MODEL", help="a registered model: a task, or TASK-merged")
    versions.add_argument("--json", action="store_true", help="one JSON list of objects")
    lookup = command(
        "lookup",
        "say which version a name stands for",
        _wrapped("WHICH is an alias (champion, candidate, previous), a version of params.yaml or a number."),
        "clinrl lookup esi champion\nclinrl lookup esi esi-v49 --json",
    )
    lookup.add_argument("name", metavar="MODEL", help="a registered model: a task, or TASK-merged")
    lookup.add_argument("which", metavar="WHICH", help="alias, version or number")
    lookup.add_argument("--json", action="store_true", help="one JSON object")
    lineage = command(
        "lineage",
        "check where a version comes from, link by link",
        _wrapped(
            "Files, parents, base, data, exam, registry, gate and approver of NAME and what it was made from, from "
            "manifests, the registry's tags and the audit file. Exit code 0: no link is broken; 1: one is."
        ),
        "clinrl lineage esi-v49\nclinrl lineage esi-v49-full --json",
    )
    lineage.add_argument("name", metavar="NAME", help="a version or a merge of params.yaml")
    lineage.add_argument("--json", action="store_true", help="one JSON list of objects")
    alarms = command(
        "alarms",
        "say what was wrong with a version's training",
        _wrapped(
            "Reads the history of VERSION with the code that watches a training while it runs: clipped and unreadable "
            "turns, shares of answers, groups without a signal, entropy, distance from the parent, held-out cases. "
            "Exit code 0: nothing, or warnings; 1: an alarm that stops a training."
        ),
        "clinrl alarms esi-v46\nclinrl alarms esi-v46 --json",
    )
    alarms.add_argument("name", metavar="VERSION", help="a trained version of params.yaml")
    alarms.add_argument("--json", action="store_true", help="one JSON list of objects")


def natural(least: int) -> Callable[[str], int]:
    """A parser of whole numbers from `least` up. It raises ArgumentTypeError for anything else: a usage error."""

    def parse(text: str) -> int:
        if not text.isdecimal() or len(text) > LONGEST or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a whole number from {least} up")
        return int(text)

    return parse


def port(least: int) -> Callable[[str], int]:
    """A parser of the numbers of ports from `least` up: 0 is any free one, where that has a meaning.

    It raises ArgumentTypeError for anything else.
    """

    def parse(text: str) -> int:
        number = natural(least)(text)
        if number > 65535:
            raise argparse.ArgumentTypeError(f"{text!r} is not a port: there are 65535")
        return number

    return parse


def _wrapped(text: str) -> str:
    """Prose at 100 columns, because the raw formatter that keeps the examples' lines does not wrap."""
    return textwrap.fill(text, 100)
