"""The table of the subcommands: what each is called, does, takes and runs, in the groups in which `--help` lists them.

Only the standard library is imported here: `clinrl --help` answers in a tenth of a second.
"""

from collections.abc import Mapping

from clinrl.cli.arguments import Argument, Command, arg, natural, port, stage

JSON = arg("--json", dest="as_json", action="store_true", help="JSON instead of a table")


def name(kind: str, text: str = "") -> Argument:
    """The argument that names something of params.yaml. The kind decides what it is checked against."""
    return arg("name", metavar=kind, help=text or f"a {kind.lower()} of params.yaml")


DATA = {
    "dataset": stage(
        "data.dataset",
        name("DATASET"),
        help="draw the cases of a data set, or import them",
        description="Writes data/cases/DATASET: cases.jsonl and its manifest. An imported data set (`imports` in "
        "params.yaml) also gets refused.tsv, which says why each row was kept out, and import.json with the counts.",
        examples="clinrl dataset esi-d1\nclinrl dataset mietic-36",
        also="data import generate draw cases",
    ),
    "validate": stage(
        "data.validate",
        name("DATASET"),
        help="check that a data set is what it must be",
        description="Runs the task's expectations and the gold proof on data/cases/DATASET. Writes the proof "
        "data/reports/data/DATASET.json only on success, and pages for people under data/docs/DATASET.",
        examples="clinrl validate esi-d1",
        also="expectations great-expectations quality",
    ),
}

TRAIN = {
    "base": stage(
        "models.bases",
        name("TASK"),
        help="build a task's embedded base, or pin its hub checkpoint",
        description="Writes data/bases/TASK. At scale embedded, trains the base model from scratch (minutes to an "
        "hour; a killed build continues); at scale full, resolves the hub revision to a commit and records it.",
        examples="clinrl base esi",
        also="pretrain download model",
    ),
    "probe": stage(
        "data.reward_audit",
        name("VERSION"),
        help="check that a version's reward pays no lazy policy",
        description="Scores lazy policies on the very stream that VERSION would train on. Writes the proof "
        "data/reports/probe/VERSION.json only if none of them beats a mediocre reader.",
        examples="clinrl probe esi-v46",
        also="reward reward-audit",
    ),
    "train": stage(
        "training.launch",
        name("VERSION"),
        help="train a version's adapter",
        description="Writes data/adapters/VERSION, warm-started from the version's parent. An interrupted run "
        "continues from its last checkpoint when the same command is given again.",
        examples="clinrl train esi-v46\nclinrl train esi-v46 --params trial.yaml",
        also="fit finetune fine-tune grpo sft lora run",
    ),
    "merge": stage(
        "merging.merge",
        name("MERGE"),
        help="fold a version into its base, or blend two versions",
        description="Writes data/merged/MERGE, without training. A fold is a full model that needs no PEFT, checked "
        "against base and adapter; a blend is an adapter (cat, svd) or a full model (linear, ties, dare).",
        examples="clinrl merge esi-v49-full\nclinrl merge esi-v46-v49",
        also="fold blend ties dare export",
    ),
    "replicate": Command(
        help="train and evaluate a version's lineage again with other seeds",
        description="Trains VERSION and its ancestors again on the same base and data, each time with other seeds, "
        "and evaluates them on the same exam. Writes data/reports/seeds/VERSION.json and .md. The lineage of "
        "params.yaml counts as the first seed and must have been evaluated; each further seed takes as long as the "
        "lineage did. The same command continues where it was stopped.",
        examples="clinrl replicate esi-v46\nclinrl replicate esi-v49 --seeds 5",
        runs="pipeline.replicate:stage",
        arguments=(
            arg("version", metavar="VERSION", help="a version of params.yaml"),
            arg("--seeds", type=natural(2), metavar="N", default=3, help="params.yaml's own seed included; default: 3"),
        ),
        takes=("params", "source"),
        also="seeds repeat",
    ),
    "draft": Command(
        help="draft the next version from the champion's errors",
        description="Reads the error analysis of the champion of TASK and adds a data set, a recipe and a version to "
        "params/drafts.yaml, the one file of parameters that commands write: modifiers for the rules that are surely "
        "missed, more cases that they decide, and the settings of a refinement. What was tried from this champion "
        "before is not tried again, and a draft that nobody trained yet is printed again. Nothing is trained; read the "
        "draft, change it if you like, then run `dvc repro`.",
        examples="clinrl draft esi\nclinrl draft esi --from esi-v46 --name esi-v47\n"
        "clinrl draft esi --lever data --json",
        runs="cli.registry_commands:draft",
        arguments=(
            name("TASK"),
            arg("--from", dest="parent", metavar="VERSION", help="the version to start from; default: the champion"),
            arg("--name", dest="called", metavar="NAME", help="the version's name; default: the next number"),
            arg("--lever", metavar="LEVER", help="modifiers, data, lower-rate or higher-rate; default: the next"),
            JSON,
        ),
        also="propose next new",
    ),
}

EVALUATE = {
    "evaluate": stage(
        "evaluation.evaluate",
        name("VERSION", "a version or a merge of params.yaml, or TASK-base"),
        help="evaluate a version, a merge or a base on its exam, in every mode",
        description="Writes the graded answers to data/graded/NAME and the reports to data/reports/NAME.",
        examples="clinrl evaluate esi-v46\nclinrl evaluate esi-base\nclinrl evaluate esi-v49-full",
        also="eval exam test score grade baseline",
    ),
    "compare": Command(
        help="compare recipes over seeds, or two models with each other",
        description="With one name: a comparison of params.yaml (`comparisons`), recipes over seeds. It reads the "
        "graded answers and reports of the base and of all versions in it, asks no model, and writes "
        "data/reports/comparisons/NAME.json, .md and .png: each recipe as the mean over its seeds, beside controls "
        "and the base, and the tests between recipes. With two names: exact McNemar tests between two models that "
        "took the same exam, of every yes/no metric in every mode: the cases that count for one alone, the difference "
        "with its 95% interval, and p, not adjusted for their number.",
        examples="clinrl compare imaging-arms\nclinrl compare esi-v50 esi-v49\n"
        "clinrl compare esi-v49-full esi-v49 --json",
        runs="cli.registry_commands:compare",
        stage="evaluation.compare",
        arguments=(
            arg("name", metavar="NAME", help="a comparison; with OTHER, a version, a merge or TASK-base"),
            arg("other", metavar="OTHER", nargs="?", help="a version, a merge or TASK-base that took the same exam"),
            JSON,
        ),
        takes=("params", "source"),
        also="comparison versus diff arms recipes",
    ),
    "mine": stage(
        "evaluation.error_analysis",
        name("VERSION"),
        help="find out where a version errs, and what that would cost",
        description="Evaluates VERSION on its mine data (`mining` in params.yaml), which is neither training data nor "
        "an exam, in every mode. Groups the wrong answers by rule, boundary, age, trigger and error, ranked by "
        "clinical cost. Writes data/reports/mine/VERSION.json, .md and .png.",
        examples="clinrl mine esi-v49",
        also="errors error-analysis mistakes",
    ),
    "render": Command(
        help="write pages and figures again from the reports' numbers",
        description="Writes every page (.md) and figure (.png) below data/reports again from the JSON beside it, and "
        "prints those that changed. Asks no model and needs no graded answers. A training's curves need history.csv.",
        examples="clinrl render\nclinrl render esi-v49\nclinrl render imaging",
        runs="pipeline.render:stage",
        arguments=(
            arg("names", metavar="NAME", nargs="*", help="versions, merges, bases, comparisons or tasks; default: all"),
        ),
        also="page pages figures plots report reports draw",
    ),
    "external": stage(
        "evaluation.external",
        name("VERSION"),
        help="evaluate a version on cases from elsewhere",
        description="Evaluates VERSION on the data that `external` in params.yaml names, in every mode. Writes "
        "data/reports/external/VERSION.json and .md: its figures with intervals, what lazy policies reach, and the "
        "task's published rows.",
        examples="clinrl external esi-v49",
        also="mietic",
    ),
    "protocol": stage(
        "evaluation.benchmark",
        name("VERSION", "a version of params.yaml, or TASK-base"),
        help="evaluate a version or a base by a published protocol",
        description="For tasks that are played in an environment. VERSION plays the episodes that `protocols` in "
        "params.yaml names, in every mode, and answers its exam once more at their temperature. Writes "
        "data/reports/protocol/VERSION.json and .md: the published and the corrected score, beside lazy policies, the "
        "oracle and the published figures; and level by level whether its interval lies above theirs.",
        examples="clinrl protocol audit-base",
        also="benchmark published",
    ),
    "show": Command(
        help="print one answer of an exam as a person would read it",
        description="Prints what NAME did with a case of its exam: the request, each turn with its thinking, calls "
        "and what the tools answered, what was decided and what was right, and the score term by term. Reads the "
        "graded answers; asks no model. EPISODE is a case id, the beginning of one, or a number in the order of the "
        "exam.",
        examples="clinrl show esi-v49 1\nclinrl show esi-v49 esi-00a1 --mode direct\nclinrl show esi-v49 --random 7\n"
        "clinrl show esi-v49 --wrong 3\nclinrl show esi-base --wrong --json",
        runs="evaluation.show:stage",
        arguments=(
            name("NAME", "a version or a merge of params.yaml, or TASK-base"),
            arg("--mode", metavar="MODE", help="a mode of params.yaml; default: the first"),
            JSON,
        ),
        one_of=(
            arg("episode", metavar="EPISODE", nargs="?", help="a case id, its beginning, or a number from 1"),
            arg("--random", type=natural(0), metavar="SEED", help="one drawn with this seed"),
            arg(
                "--wrong",
                type=natural(1),
                nargs="?",
                const=1,
                metavar="N",
                help="the first N wrong ones; default: 1",
            ),
        ),
        also="transcript print read answer cat",
    ),
}

APPROVER = arg("--approver", required=True, metavar="PERSON", help="the person who approves it")
MODEL = name("MODEL", "a registered model: a task, or TASK-merged")
REGISTERED = name("NAME", "a registered version or merge of params.yaml")

RELEASE = {
    "register": Command(
        help="put a version or a merge, with its metrics, into the registry",
        description="Logs parameters, metrics of every mode with intervals, training history, data digests, reports "
        "and plots of NAME, and the model itself, to MLflow. The same adapter is one model version, however often it "
        "is registered; what is missing is filled in. NAME must have been evaluated.",
        examples="clinrl register esi-v49\nclinrl register esi-v49-full\n"
        "MLFLOW_TRACKING_URI=http://127.0.0.1:5000 clinrl register esi-v49",
        runs="cli.registry_commands:register",
        arguments=(name("NAME", "a version or a merge of params.yaml"),),
        also="mlflow log publish push upload",
    ),
    "decide": Command(
        help="hold a version's exam against its task's gate and the champion",
        description="Writes the decision to data/reports/decisions.jsonl and to the version's tags; promotes nothing. "
        "Adapters are compared with the champion of the adapters, full models with that of the full models. Exit "
        "code 0: may be promoted; 1: not.",
        examples="clinrl decide esi-v49\nclinrl decide esi-v49-full --json",
        runs="cli.registry_commands:decide",
        arguments=(REGISTERED, JSON),
        also="gate limits",
    ),
    "approve": Command(
        help="make the token by which you approve a decision",
        description="Signs the approval of a decision with your key (CLINRL_SIGNING_KEY, CLINRL_SIGNING_KEY_FILE, or "
        ".clinrl/keys) and prints it as a token, to be pasted where it is asked for. Works anywhere: no project, no "
        "server and no network is needed. DECISION is the digest that `clinrl decide` and the form show.",
        examples='clinrl approve "$DECISION" --as "Ada Lovelace"\n'
        'CLINRL_SIGNING_KEY=agent clinrl approve "$DECISION" --as Ada',
        runs="cli.key_commands:approve",
        arguments=(
            arg("decision", metavar="DECISION", help="64 characters of 0-9 and a-f"),
            arg("--as", dest="approver", metavar="NAME", required=True, help="your name in `approvers`"),
        ),
        takes=(),
        also="accept token consent",
    ),
    "promote": Command(
        help="make a version or a merge the champion",
        description="Decides, and if every limit of the gate holds moves the alias champion to NAME and previous to "
        "the champion before. The decision and the approver's name go to the audit file and to the version's tags.",
        examples='clinrl promote esi-v49 --approver "Ada Lovelace"\n'
        'clinrl promote esi-v49-full --approver "Ada Lovelace"',
        runs="cli.registry_commands:promote",
        arguments=(
            REGISTERED,
            APPROVER,
            arg("--token", metavar="TOKEN", help="their approval, if their key is elsewhere: `clinrl approve`"),
        ),
        also="release deploy champion",
    ),
    "rollback": Command(
        help="bring the previous champion back",
        description="Swaps the aliases champion and previous of MODEL; the same command undoes it. Adapters and full "
        "models are rolled back one by one.",
        examples='clinrl rollback esi --approver "Ada Lovelace"\nclinrl rollback esi-merged --approver "Ada Lovelace"',
        runs="cli.registry_commands:rollback",
        arguments=(MODEL, APPROVER),
        also="revert undo previous demote",
    ),
}

INSPECT = {
    "plan": Command(
        help="show the versions and which of their stages are up to date",
        description="Shows each version of a lineage, root first, with its recipe and how its stages stand: up to "
        "date, stale, missing, or unknown. A table on a terminal, tab-separated otherwise. --graph draws versions and "
        "merges as a tree, with the first stage that is not up to date and how the gate decided.",
        examples="clinrl plan\nclinrl plan --graph esi\nclinrl plan esi-v46 --json\nclinrl plan | cut -f 1,2,12",
        runs="cli.plan_command:plan",
        arguments=(
            arg("version", metavar="VERSION", nargs="?", help="only this version and its ancestors"),
            arg("--graph", metavar="TASK", nargs="?", const="", help="draw the versions of TASK, or all, as a tree"),
            JSON,
        ),
        also="status dag graph stages list ls tree repro",
    ),
    "versions": Command(
        help="list what is registered",
        description="Every version of a registered model, oldest first, with its aliases and how its gate stands.",
        examples="clinrl versions esi\nclinrl versions esi-merged --json\nclinrl versions esi | cut -f 2,4",
        runs="cli.registry_commands:versions",
        arguments=(MODEL, JSON),
        also="models registry list ls mlflow",
    ),
    "lookup": Command(
        help="say which version a name stands for",
        description="WHICH is an alias (champion, candidate, previous), a version of params.yaml or a number.",
        examples="clinrl lookup esi champion\nclinrl lookup esi esi-v49 --json",
        runs="cli.registry_commands:lookup",
        arguments=(MODEL, arg("which", metavar="WHICH", nargs="?", help="alias, version or number"), JSON),
        also="alias champion find which",
    ),
    "lineage": Command(
        help="check where a version comes from, link by link",
        description="Files, parents, base, data, exam, registry, gate and approver of NAME and what it was made from, "
        "from manifests, the registry's tags and the audit file. Exit code 0: no link is broken; 1: one is.",
        examples="clinrl lineage esi-v49\nclinrl lineage esi-v49-full --json",
        runs="cli.registry_commands:lineage",
        arguments=(name("NAME", "a version or a merge of params.yaml"), JSON),
        also="provenance audit ancestors history",
    ),
    "alarms": Command(
        help="say what was wrong with a version's training",
        description="Reads the history of VERSION with the code that watches a training while it runs: clipped and "
        "unreadable turns, shares of answers, groups without a signal, entropy, distance from the parent, held-out "
        "cases. Exit code 0: nothing, or warnings; 1: an alarm that stops a training.",
        examples="clinrl alarms esi-v46\nclinrl alarms esi-v46 --json",
        runs="cli.registry_commands:alarms",
        arguments=(name("VERSION", "a trained version of params.yaml"), JSON),
        also="alerts health warnings monitor",
    ),
    "verify": Command(
        help="rebuild an artefact from nothing and compare it byte by byte",
        description="Rebuilds what ADDRESS names, with its ancestors, in a fresh git worktree without a cache, and "
        "compares every file with dvc.lock. Exit code 0: all equal; 1: not.",
        examples="clinrl verify esi-v46\nclinrl verify esi-base\nclinrl verify base@esi\n"
        "clinrl verify esi-v46 --hash-seed 7 --threads 1 --keep\nclinrl verify esi-v49 --attest",
        runs="pipeline.verify:stage",
        arguments=(
            arg("address", metavar="ADDRESS", help="a version, a merge, TASK-base, or base@TASK"),
            arg("--hash-seed", type=natural(0), metavar="N", help="PYTHONHASHSEED of the rebuild"),
            arg("--threads", type=natural(1), metavar="N", help="processors for the rebuild"),
            arg("--keep", action="store_true", help="keep the worktree for inspection"),
            arg("--attest", action="store_true", help="if all are equal, sign that into data/attestations"),
            JSON,
        ),
        takes=(),
        also="reproduce rebuild repro attest",
    ),
}

SETUP = {
    "check": Command(
        help="check params.yaml",
        description="Reads params.yaml within limits of size, depth and length, and checks every name, value and "
        "reference. Says nothing, or what is wrong first. `make demo`, `make test` and the flows do this before DVC "
        "reads it.",
        examples="clinrl check\nclinrl check --params trial.yaml",
        runs="cli.stage_commands:check",
        takes=("source",),
        also="lint config yaml",
    ),
    "params": Command(
        help="print what a version really uses, from all its blocks",
        description="Prints the blocks of NAME as params.yaml has them: recipe, data, parent, exam, base and modes; "
        "without NAME, all of params.yaml. --resolved fills in every default and, of NAME, keeps the active scale "
        "alone.",
        examples="clinrl params esi-v49 --resolved\nclinrl params esi-v49 --resolved --json\nclinrl params --resolved",
        runs="config.resolved:stage",
        arguments=(
            arg("name", metavar="NAME", nargs="?", help="a version, a merge, or TASK-base; default: everything"),
            arg("--resolved", action="store_true", help="with defaults filled in, at the active scale"),
            arg("--json", dest="as_json", action="store_true", help="JSON instead of YAML"),
        ),
        also="config settings resolved",
    ),
    "stage": Command(
        help="run the stage of dvc.yaml that has this address",
        description="What every stage of dvc.yaml runs: DVC names the stage in DVC_STAGE, so that no name is part of "
        "a shell's line. The stage `params` checks params.yaml and writes data/reports/params.json.",
        examples="clinrl stage train@esi-v46\nclinrl stage params",
        runs="cli.stage_commands:stage",
        arguments=(arg("address", metavar="ADDRESS", help="a stage of dvc.yaml, such as train@esi-v46"),),
        takes=("source",),
        also="repro run dvc",
    ),
    "keys": Command(
        help="make a signing key, and say whose signatures count",
        description="`init` makes this checkout's key in .clinrl/keys; if CLINRL_SIGNING_KEY or "
        "CLINRL_SIGNING_KEY_FILE names one that is elsewhere, it keeps only the public half. `show` lists whose "
        "signatures count here, those of params.yaml too. `trust` lets those of one more key count. A line of OpenSSH, "
        "as `show` prints it, is what `approvers` and `rebuilders` in params.yaml take. `vouch` is for the day after a "
        "key was revoked: it signs what that key left at the end of the audit file, so that commands read it again.",
        examples='clinrl keys init\nclinrl keys show --json\nclinrl keys trust "Ada Lovelace" "$(cat ada.pub)"\n'
        "CLINRL_SIGNING_KEY=agent clinrl keys init\n"
        'clinrl keys vouch "laptop stolen; lines 1 to 12 are ours"',
        runs="cli.key_commands:keys",
        actions={
            "init": ("make the key of this checkout", (JSON,)),
            "show": ("list whose signatures count, and for what", (JSON,)),
            "trust": (
                "let the signatures of one more key count",
                (
                    arg("name", metavar="NAME", help="whose key it is"),
                    arg("line", metavar="LINE", help="their public key: ecdsa-sha2-nistp256 AAAA..."),
                    JSON,
                ),
            ),
            "vouch": (
                "sign the audit file, of which you read what a key signed that was revoked since",
                (arg("reason", metavar="REASON", help="why the key was revoked, for the audit file"),),
            ),
        },
        takes=("source",),
        also="key sign trust ssh",
    ),
    "openenv": Command(
        help="serve a task's environment to OpenEnv clients",
        description="Serves the environment of TASK over HTTP and WebSocket until Ctrl-C, and prints its address "
        "first. A client resets with seed, level, pool and index; the score comes with the last observation and is "
        "that of `clinrl evaluate`. There is no password: whoever reaches the address may play, but for web pages of "
        "other origins and requests to another host name. The pool exam is closed. Needs the extra openenv.",
        examples="clinrl openenv audit\nclinrl openenv audit --port 8001 --sessions 8\n"
        "openenv validate --url http://127.0.0.1:8000",
        runs="cli.openenv:stage",
        arguments=(
            arg("name", metavar="TASK", help="a task with an environment: audit"),
            arg("--host", metavar="ADDRESS", default="127.0.0.1", help="default: 127.0.0.1, this machine alone"),
            arg("--port", type=port(0), metavar="N", default=8000, help="0: any free one; default: 8000"),
            arg("--sessions", type=natural(1), metavar="N", default=64, help="at once; default: 64"),
            arg("--open-exam", action="store_true", help="serve cases of the pool exam too: never to a trainer"),
        ),
        takes=(),
        also="serve server environment env",
    ),
}

GROUPS: Mapping[str, Mapping[str, Command]] = {
    "data": DATA, "train": TRAIN, "evaluate": EVALUATE, "release": RELEASE, "inspect": INSPECT, "setup": SETUP,
}  # fmt: skip
"""The groups in the order of the work, and so are the commands of each."""
COMMANDS: Mapping[str, Command] = {name: command for group in GROUPS.values() for name, command in group.items()}
