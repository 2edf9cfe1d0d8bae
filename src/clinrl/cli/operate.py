"""Release, inspect, setup: the subcommands about what was made, and about the project."""

from clinrl.cli.arguments import JSON, LAST_PORT, Action, Command, arg, file, folder, name, natural, share, value

APPROVER = arg("--approver", required=True, metavar="PERSON", help="the person who approves it")
MODEL = name("MODEL", "a registered model: a task, or TASK-merged")
OPEN_EXAM = arg("--open-exam", action="store_true", help="its exam instead of cases to mine: never to a trainer")
SHADOW = "of requests, also asked of the candidate; default: none"
OUT = arg("--out", type=folder, metavar="DIR", help="a folder; default: data/exports")
REGISTERED = name("NAME", "a registered version or merge of params.yaml")

RELEASE = {
    "register": Command(
        help="put a version or a merge, with its metrics, into the registry",
        description="Logs parameters, metrics with intervals, training history, reports and plots of NAME, and the "
        "model itself, to MLflow. The same adapter is one model version, however often it is registered. NAME must "
        "have been evaluated. The server of `make serve` asks for the credentials in .clinrl/servers/credentials.env.",
        examples="clinrl register esi-v49\nclinrl register esi-v49-full\n"
        "MLFLOW_TRACKING_URI=http://127.0.0.1:5000 clinrl register esi-v49",
        runs="cli.registry_commands:register",
        arguments=(name("NAME", "a version or a merge of params.yaml"),),
        also="mlflow log",
    ),
    "traces": Command(
        help="log the answers of an exam to MLflow, one trace each",
        description="Logs graded answers of NAME, which must be registered, to MLflow: request, turns, calls of tools, "
        "reward and gold label. Of each mode there are 200 answers, wrong ones first, unless --all. "
        "An answer that is there is not logged again. Exams that were imported are refused.",
        examples="clinrl traces esi-v49\nclinrl traces audit-v3 --all",
        runs="exports.traces:stage",
        arguments=(REGISTERED, arg("--all", dest="every", action="store_true", help="every answer of every mode")),
        also="trace spans assessments genai review",
    ),
    "labels": Command(
        help="write the labels that people gave answers in MLflow",
        description="Writes a JSON line for each assessment called `label` that a person added to a trace of TASK: "
        "case, version, mode, label, person and trace, by case. A label that TASK does not have is refused.",
        examples="clinrl labels esi --out reviewed.jsonl",
        runs="exports.traces:labels",
        arguments=(name("TASK"), arg("--out", type=file, metavar="FILE", required=True, help="the file to write")),
        also="annotations feedback human review",
    ),
    "decide": Command(
        help="compare a version's exam with its task's gate and the champion",
        description="Writes the decision to data/reports/decisions.jsonl and to the version's tags; promotes "
        "nothing. Adapters are compared with the champion of the adapters, full models with that of the full models. "
        "Exit code 0: may be promoted; 1: not.",
        examples="clinrl decide esi-v49\nclinrl decide esi-v49-full --json",
        runs="cli.registry_commands:decide",
        arguments=(REGISTERED, JSON),
        also="gate limits",
    ),
    "approve": Command(
        help="make the token by which you approve a decision",
        description="Signs the approval of a decision with your key and prints it as a token, to be pasted where it "
        "is asked for. Needs no project, no server and no network. DECISION is the digest that `clinrl decide` and "
        "the form show.",
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
        "the champion before. The decision and the approver's name go to the audit log and to the version's tags.",
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
    "dossier": Command(
        help="write the documents about a version that a regulator asks for",
        description="Writes a change control plan, technical documentation in the order of the EU AI Act's Annex IV, "
        "the TRIPOD-LLM checklist and the pre-registration of VERSION to data/dossiers/VERSION, which git ignores: "
        "Markdown, one page dossier.html, and numbers.json with the file, key and digest of each value. All is looked "
        'up in artefacts; what nobody made says "not done". Two artefacts that state a number differently, or a file '
        "that dvc.lock does not record, stop it.",
        examples="clinrl dossier esi-v49\nclinrl dossier esi-v49 --check\nclinrl dossier esi-v49 --out papers",
        runs="release.dossier:stage",
        arguments=(
            name("VERSION"),
            arg("--out", type=folder, metavar="FOLDER", help="instead of data/dossiers/VERSION"),
            arg("--check", action="store_true", help="compare the one that is there; 1 if a number is another now"),
        ),
        takes=("params", "source"),
        also="regulator regulatory fda pccp annex-iv tripod papers documentation",
    ),
    "export": Command(
        help="write what other tools open: logs of exams, tasks",
        description="Writes files that the unmodified tool opens, to data/exports unless --out says otherwise. "
        "`inspect` writes an exam from its graded answers as a log of Inspect, and needs Inspect in an environment of "
        "its own. `lm-eval` and `verifiers` write a task with cases of the pool mine, or its exam with --open-exam. "
        "Imported data is refused. `openenv` writes the manifest of what `clinrl openenv` serves.",
        examples="clinrl export inspect esi-v49\nclinrl export inspect audit-v3 --mode direct --out logs\n"
        "clinrl export lm-eval esi --out tasks\nclinrl export verifiers audit\nclinrl export openenv esi",
        actions={
            "inspect": Action(
                "an exam as a log of Inspect, a sample a case",
                (
                    name("NAME", "a version or a merge of params.yaml, or TASK-base"),
                    arg("--mode", metavar="MODE", help="a mode of params.yaml; default: the first"),
                    OUT,
                ),
                "exports.inspect_log:stage",
            ),
            "lm-eval": Action(
                "a task of one turn as a folder of lm-evaluation-harness",
                (name("TASK"), OPEN_EXAM, OUT),
                "exports.lm_eval:stage",
            ),
            "openenv": Action(
                "the manifest of a task's environment", (name("TASK"), OUT), "exports.openenv_manifest:stage"
            ),
            "verifiers": Action(
                "a task as a package of verifiers", (name("TASK"), OPEN_EXAM, OUT), "exports.verifiers:stage"
            ),
        },
        also="inspect-ai eval-log lm-eval prime-rl convert",
    ),
    "push": Command(
        help="push a version or a merge, with its card, to a Hugging Face hub",
        description="Sends weights, tokenizer and card of NAME to a repository, which is private unless --public, as "
        "one commit. Compares the files with dvc.lock first, and afterwards the weights on the hub with those sent. "
        "Weights and settings that were pushed there before are removed. Cases and answers are never sent. "
        "The token is that of HF_TOKEN or of `hf auth login`.",
        examples="clinrl push esi-v49 --repo ada/esi-v49\n"
        "clinrl push esi-v49-full --repo ada/esi-v49-full --endpoint https://hub.example.org",
        runs="exports.hub:stage",
        arguments=(
            name("NAME", "a version or a merge of params.yaml"),
            arg("--repo", metavar="OWNER/NAME", required=True, help="the repository; made if it is not there"),
            arg("--endpoint", metavar="URL", help="of another hub; default: HF_ENDPOINT, or huggingface.co"),
            arg("--public", action="store_true", help="let anybody read it"),
        ),
        also="upload publish hub huggingface hf",
    ),
    "rollback": Command(
        help="bring the previous champion back",
        description="Swaps the aliases champion and previous of MODEL. A second rollback is refused unless --from "
        "names the champion that is to go, or --to an earlier one that is to return. Adapters and full models are "
        "rolled back one by one.",
        examples='clinrl rollback esi --approver "Ada Lovelace"\nclinrl rollback esi-merged --approver "Ada Lovelace"\n'
        'clinrl rollback esi --from esi-v49 --approver "Ada Lovelace"',
        runs="cli.registry_commands:rollback",
        arguments=(
            MODEL,
            APPROVER,
            arg("--from", dest="champion", metavar="NAME", help="name or number of the champion that is to go"),
            arg("--to", dest="earlier", metavar="NAME", help="name or number of the champion that is to return"),
        ),
        also="revert undo previous demote",
    ),
    "serve": Command(
        help="serve a task's champion and candidate to OpenAI clients",
        description="Serves MODEL@champion and MODEL@candidate over HTTP in the form of OpenAI's chat completions "
        "until Ctrl-C or SIGTERM, and prints the address first. A promotion or a rollback is followed within seconds; "
        "running requests end on the version that they began with. An answer names its version and adapter. With "
        "CLINRL_SERVE_TOKEN, which another host than this machine needs, clients have to send that token. Where "
        "machine.yaml has `sampler: vllm`, the server of `clinrl engine` writes.",
        examples="clinrl serve esi\nclinrl serve esi-merged --port 8001\n"
        'CLINRL_SERVE_TOKEN="$(cat token)" clinrl serve esi --host 0.0.0.0',
        runs="serving.server:stage",
        takes=("params", "source"),
        arguments=(
            MODEL,
            arg("--host", metavar="ADDRESS", default="127.0.0.1", help="default: 127.0.0.1, this machine alone"),
            arg("--known-as", metavar="HOST", nargs="+", default=(), help="other names by which clients reach it"),
            arg("--port", type=natural(0, LAST_PORT), metavar="N", default=8000, help="0: any free one; default: 8000"),
            value("--at-once", natural(1), "requests answered together", 8),
            value("--queue", natural(0), "waiting requests, more get 429", 64),
            value("--tokens", natural(1), "most tokens of an answer", 4096),
            arg("--timeout", type=natural(1), metavar="S", default=120, help="seconds of a request; default: 120"),
            arg("--shadow", type=share, metavar="SHARE", default=0.0, help=SHADOW),
        ),
        also="openai api chat endpoint http vllm infer inference ask",
    ),
    "watch": Command(
        help="compare what is served with the exam, and count labels",
        description="`report` compares what champion and candidate of MODEL were asked and answered with the exam: "
        "texts, lengths, numbers, answers, disagreement, and the safety metric on labels that came. Exit code 1: there "
        "is an alarm, or nothing was counted here. `labels` validates FILE, JSONL of ids of responses and labels, and "
        "counts the labels of answers that are kept.",
        examples="clinrl watch report esi\nclinrl watch report esi --json\nclinrl watch labels esi outcomes.jsonl",
        runs="cli.watch_command:watch",
        actions={
            "report": Action("say how champion and candidate stand", (MODEL, JSON)),
            "labels": Action(
                "count labels that came",
                (MODEL, arg("file", type=file, metavar="FILE", help='lines of {"id": ..., "label": ...}')),
            ),
        },
        also="drift monitor shadow labels alarm monitoring",
    ),
    "simulate-retraining": Command(
        help="simulate what a task's change plan lets pass in a year",
        description="Simulates lives of a model with a draft each week, useless, worse or better than the champion, "
        "and prints in which share of them a draft was promoted: by the plan of TASK, by an even share of its alpha "
        "each week, and without a budget. A row is left out, and named, if one of its drafts would gain as much as the "
        "first champion errs. Brackets hold 95% intervals. Asks no model and reads no exam: by default a champion errs "
        "as esi-v49 does, whatever TASK is, and cases are independent, also where those of TASK are not.",
        examples="clinrl simulate-retraining esi\nclinrl simulate-retraining esi --cases 2000 --discordance 0.069\n"
        "clinrl simulate-retraining esi --lives 10000 --seed 7 --json\nclinrl simulate-retraining esi --write",
        runs="cli.retraining_command:stage",
        arguments=(
            name("TASK"),
            arg("--lives", type=natural(1, 100_000), metavar="N", default=1000, help="default: 1000"),
            value("--weeks", natural(1, 1000), "drafts in a life", 52),
            value("--cases", natural(1, 1_000_000), "cases of the exam; default: as many as the plan's exam has"),
            value("--mine", natural(1, 1_000_000), "cases of the mine data; default: as many as it has"),
            value("--wrong", share, "of cases that the champion errs in", 0.106),
            value("--discordance", share, "of the cases that only one of champion and useless draft gets right", 0.041),
            arg("--seed", type=natural(0), metavar="N", default=1, help="default: 1"),
            arg("--write", action="store_true", help="write data/reports/retraining/TASK.json, .md, for more worlds"),
            JSON,
        ),
        also="power error budget alpha plan lives",
    ),
}

INSPECT = {
    "plan": Command(
        help="show the versions and which of their stages are up to date",
        description="Shows each version of a lineage, root first, with its recipe and how its stages stand: up to "
        "date, stale, missing, or unknown. A table on a terminal, tab-separated otherwise. --graph draws versions "
        "and merges as a tree, with the first stage that is not up to date.",
        examples="clinrl plan\nclinrl plan --graph esi\nclinrl plan esi-v46 --json\nclinrl plan | cut -f 1,2,12",
        runs="pipeline.plan:stage",
        arguments=(
            arg("version", metavar="VERSION", nargs="?", help="only this version and its ancestors"),
            arg("--graph", metavar="TASK", nargs="?", const="", help="draw the versions of TASK, or all, as a tree"),
            JSON,
        ),
        also="status dag graph stages list ls tree repro",
    ),
    "doctor": Command(
        help="say what this machine has the memory for",
        description="Estimates, for the version of each task that needs most, the GPU and host memory of loading, "
        "training, generation, judges and the exam; prints it beside the free memory, with the versions of the "
        "libraries that a training may use. Estimates come from the shapes in the models' configs and from "
        "machine.yaml; nothing is downloaded. Exit code 0: all fits; 1: something does not.",
        examples="clinrl doctor\nclinrl doctor --scale full\nclinrl doctor esi-v46 esi-v49 --scale full --json",
        runs="cli.doctor:stage",
        arguments=(
            arg("names", metavar="VERSION", nargs="*", help="versions, or TASK-base; default: all"),
            arg("--scale", choices=("embedded", "full"), help="default: the scale of params.yaml"),
            JSON,
        ),
        also="memory gpu cuda hardware vram fit machine",
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
        arguments=(MODEL, arg("which", metavar="WHICH", nargs="?", help="needed: alias, version or number"), JSON),
        also="alias champion find which",
    ),
    "lineage": Command(
        help="check where a version comes from, link by link",
        description="Files, parents, base, data, exam, resit, registry, gate and approver of NAME and what it was made "
        "from, from manifests, the registry's tags and the audit log. Exit code 0: no link is broken; 1: one is.",
        examples="clinrl lineage esi-v49\nclinrl lineage esi-v49-full --json",
        runs="cli.registry_commands:lineage",
        arguments=(name("NAME", "a version or a merge of params.yaml"), JSON),
        also="provenance audit ancestors history",
    ),
    "site": Command(
        help="write everything as one folder of pages that open from a disk",
        description="Writes the tree of versions, a page for each, answers one by one, comparisons, the audit log and "
        "the documentation to build/site, from the reports in git and, where they are here, from graded answers. The "
        "pages need no server and no network. Of imported cases they hold counts alone. A folder that another program "
        "made is refused. At most 20 MB, for many models 0.15 MB each.",
        examples="clinrl site\nclinrl site --out pages --answers 400\nclinrl site --answers 0",
        runs="site.build:stage",
        arguments=(
            arg("--out", type=folder, metavar="DIR", help="instead of build/site"),
            value("--answers", natural(0), "right ones of a model and mode, beside all wrong ones", 200, dest="most"),
        ),
        also="html pages browse dashboard report web static ui",
    ),
    "alarms": Command(
        help="say what was wrong with a version's training",
        description="Reads the history of VERSION with the code that watches a training while it runs. Exit code 0: "
        "nothing, or warnings; 1: an alert that stops a training.",
        examples="clinrl alarms esi-v46\nclinrl alarms esi-v46 --json",
        runs="cli.registry_commands:alarms",
        arguments=(name("VERSION", "a trained version of params.yaml"), JSON),
        also="alerts health warnings monitor",
    ),
    "verify": Command(
        help="rebuild an artefact from nothing and compare it byte by byte",
        description="Rebuilds what ADDRESS names, with its ancestors, in a fresh git worktree without a cache, and "
        "compares every file with dvc.lock. A GRPO run is equal only on a processor of the same maker. Records of an "
        "import are there only if their address is absolute. "
        "Exit code 0: all equal; 1: not.",
        examples="clinrl verify esi-v46\nclinrl verify esi-base\nclinrl verify base@esi\n"
        "PYTHONHASHSEED=7 taskset -c 0 clinrl verify esi-v46 --keep\nclinrl verify esi-v49 --attest",
        runs="pipeline.verify:stage",
        arguments=(
            arg("address", metavar="ADDRESS", help="a version, a merge, TASK-base, or base@TASK"),
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
        "reference. Says nothing, or what is wrong first. Warns of a gate that asks for more cases than an exam has.",
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
    "completion": Command(
        help="print what a shell needs to complete commands",
        description="Prints the script by which a shell completes subcommands, options and their choices.",
        examples="clinrl completion bash > ~/.local/share/bash-completion/completions/clinrl\n"
        'clinrl completion zsh > "${fpath[1]}/_clinrl"\n'
        "clinrl completion fish > ~/.config/fish/completions/clinrl.fish",
        runs="cli.parser:complete",
        arguments=(arg("shell", choices=("bash", "zsh", "fish"), help="bash, zsh or fish"),),
        takes=(),
        also="complete autocomplete shell tab",
    ),
    "stage": Command(
        help="run the stage of dvc.yaml that has this address",
        description="What every stage of dvc.yaml runs: DVC names the stage in DVC_STAGE, so that no name is part "
        "of a shell's line. The stage `params` checks params.yaml and writes data/reports/params.json.",
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
        "signatures count here. `trust` lets those of one more key count. `vouch` is for use after a key "
        "was revoked: it signs anew what that key signed at the end of the audit log.",
        examples='clinrl keys init\nclinrl keys show --json\nclinrl keys trust "Ada Lovelace" "$(cat ada.pub)"\n'
        "CLINRL_SIGNING_KEY=agent clinrl keys init\n"
        'clinrl keys vouch "laptop stolen; lines 1 to 12 are ours"',
        runs="cli.key_commands:keys",
        actions={
            "init": Action("make the key of this checkout", (JSON,)),
            "show": Action("list whose signatures count, and for what", (JSON,)),
            "trust": Action(
                "let the signatures of one more key count",
                (
                    arg("name", metavar="NAME", help="whose key it is"),
                    arg("line", metavar="LINE", help="their public key: ecdsa-sha2-nistp256 AAAA..."),
                    JSON,
                ),
            ),
            "vouch": Action(
                "sign the audit log anew after you read the lines of a key that was revoked",
                (arg("reason", metavar="REASON", help="why the key was revoked, for the audit log"),),
                "cli.key_commands:vouch",
            ),
        },
        takes=("source",),
        also="key sign trust ssh",
    ),
    "openenv": Command(
        help="serve a task's environment to OpenEnv clients",
        description="Serves the environment of TASK over HTTP and WebSocket until Ctrl-C, and prints its address "
        "first. There is no password: any client that reaches the address may play, except web pages of other origins "
        "and requests to another host name. The pool exam is closed. A reward that asks other models is refused. Needs "
        "the extra openenv.",
        examples="clinrl openenv esi --reward esi-v49\nclinrl openenv audit --port 8001 --sessions 8\n"
        "openenv validate --url http://127.0.0.1:8000",
        runs="cli.openenv:stage",
        arguments=(
            arg("name", metavar="TASK", help="a task"),
            arg("--reward", dest="version", metavar="VERSION", help="the reward of this one; default: the task's own"),
            arg("--host", metavar="ADDRESS", default="127.0.0.1", help="default: 127.0.0.1, this machine alone"),
            arg("--port", type=natural(0, LAST_PORT), metavar="N", default=8000, help="0: any free one; default: 8000"),
            arg("--sessions", type=natural(1), metavar="N", default=64, help="at once; default: 64"),
            arg("--open-exam", action="store_true", help="serve cases of the pool exam too: never to a trainer"),
        ),
        takes=("source",),
        also="serve server environment env",
    ),
}
