"""Data, train, evaluate: the subcommands that make artefacts and measure them."""

from clinrl.cli.arguments import JSON, LAST_PORT, Command, arg, name, natural, value

DATA = {
    "dataset": Command(
        stage="data.dataset",
        arguments=(name("DATASET"),),
        help="draw the cases of a data set, or import them",
        description="Writes data/cases/DATASET: cases.jsonl and its manifest. An imported data set (`imports` in "
        "params.yaml) also gets refused.tsv, which says why each row was kept out, and import.json with the counts.",
        examples="clinrl dataset esi-d3\nclinrl dataset esi-x3",
        also="data import generate draw cases",
    ),
    "validate": Command(
        stage="data.validate",
        arguments=(name("DATASET"),),
        help="check a data set against its task's expectations",
        description="Runs the task's expectations and the gold proof on data/cases/DATASET. Writes the proof "
        "data/reports/data/DATASET.json only on success, and a page for people under data/docs/DATASET.",
        examples="clinrl validate esi-d3",
        also="expectations great-expectations quality",
    ),
}

TRAIN = {
    "base": Command(
        stage="models.bases",
        arguments=(name("TASK"),),
        help="build a task's embedded base, or pin its hub checkpoint",
        description="Writes data/bases/TASK. At scale embedded, trains the base model from scratch (minutes to an "
        "hour; a killed build continues); at scale full, resolves the hub revision to a commit and records it.",
        examples="clinrl base esi",
        also="pretrain download model",
    ),
    "probe": Command(
        stage="data.reward_audit",
        arguments=(name("VERSION"),),
        help="check that a version's reward pays no lazy policy",
        description="Scores lazy policies on the very stream that VERSION would train on. Writes the proof "
        "data/reports/probe/VERSION.json only if none of them beats a mediocre reader.",
        examples="clinrl probe esi-v46",
        also="reward reward-audit",
    ),
    "train": Command(
        stage="training.launch",
        arguments=(name("VERSION"),),
        help="train a version's adapter",
        description="Writes data/adapters/VERSION, warm-started from the version's parent. An interrupted run "
        "continues from its last checkpoint when the same command is given again.",
        examples="clinrl train esi-v46\nclinrl train esi-v46 --params trial.yaml",
        also="fit finetune fine-tune grpo sft lora run",
    ),
    "engine": Command(
        help="serve a task's base by vLLM, for exams and trainings",
        description="Becomes the vLLM server of TASK's base at full scale: its checkpoint at the pinned commit, on "
        "this machine alone, behind a random key, with room for adapters as params.yaml has them. Exams, GRPO and "
        "rejection sampling ask it where machine.yaml has `sampler: vllm`. Needs `make vllm` and a GPU, which "
        "CUDA_VISIBLE_DEVICES chooses. Ends with Ctrl-C.",
        examples="clinrl engine esi\nCUDA_VISIBLE_DEVICES=1 clinrl engine esi --port 8001",
        runs="models.engine_server:stage",
        arguments=(
            name("TASK"),
            arg("--port", type=natural(1, LAST_PORT), metavar="PORT", default=8000, help="default: 8000"),
        ),
        also="vllm serve server sampler generation",
    ),
    "merge": Command(
        stage="merging.merge",
        arguments=(name("MERGE"),),
        help="fold a version into its base, or blend two versions",
        description="Writes data/merged/MERGE, without training. A fold is a full model that needs no PEFT, checked "
        "against base and adapter; a blend is an adapter (cat, svd) or a full model (linear, ties, dare).",
        examples="clinrl merge esi-v49-full\nclinrl merge esi-v46-v49",
        also="fold blend ties dare export",
    ),
    "draft": Command(
        help="draft the next version from the champion's errors",
        description="Reads the error analysis of the champion of TASK and adds a data set, a recipe and a version "
        "to params/drafts.yaml. What was tried from this champion before is not tried again; a draft that nobody "
        "trained yet is printed again. Nothing is trained: read the draft, change it if you like, then run `dvc "
        "repro`.",
        examples="clinrl draft esi\nclinrl draft esi --from esi-v46 --name esi-v53\n"
        "clinrl draft esi --lever data --json",
        runs="cli.registry_commands:draft",
        arguments=(
            name("TASK"),
            arg("--from", dest="parent", metavar="VERSION", help="the version to start from; default: the champion"),
            arg("--name", dest="new_name", metavar="NAME", help="the version's name; default: the next number"),
            arg("--lever", metavar="LEVER", help="modifiers, data, lower-rate or higher-rate; default: the next"),
            JSON,
        ),
        also="propose next new",
    ),
}

EVALUATE = {
    "try": Command(
        help="ask a model about a drawn case, in each mode, in a minute",
        description="Draws a case that is in no training data and no exam, and prints what a version answers in each "
        "mode, the rule that decides, the score term by term, and what the version and its rivals reached on its exam. "
        "Asks the models that came with the installation, or else those of this checkout. Needs no network.",
        examples="clinrl try\nclinrl try imaging --seed 7\nclinrl try audit --json",
        runs="evaluation.shipped:stage",
        arguments=(
            arg("name", metavar="NAME", nargs="?", default="esi", help="a task or a version; default: esi"),
            arg("--seed", type=natural(0), metavar="N", default=1, help="draws the case; default: 1"),
            JSON,
        ),
        takes=(),
        also="demo example sample first hello start",
    ),
    "preregister": Command(
        help="write a comparison's plan down before its runs, with its power",
        description="Writes data/preregistrations/COMPARISON.json, to be committed: the primary measure of the "
        "comparison with its smallest effect of interest, digests of metric, data and recipes, the seeds, and the "
        "power of the exam. `clinrl compare` demands that all of it still holds. Refused once a version of its two "
        "recipes took the exam, unless --retrospective says so; a plan is never overwritten.",
        examples="clinrl preregister COMPARISON\nclinrl preregister COMPARISON --json\n"
        "clinrl preregister COMPARISON --retrospective",
        runs="pipeline.preregister:stage",
        arguments=(
            name("COMPARISON"),
            arg("--retrospective", action="store_true", help="the exams were taken; every report will say so"),
            JSON,
        ),
        also="pre-registration preregistration register-plan power sample-size",
    ),
    "evaluate": Command(
        stage="evaluation.evaluate",
        arguments=(name("VERSION", "a version or a merge of params.yaml, or TASK-base"),),
        help="evaluate a version, a merge or a base on its exam, in each mode",
        description="Writes the graded answers to data/graded/NAME and the reports to data/reports/NAME.",
        examples="clinrl evaluate esi-v46\nclinrl evaluate esi-base\nclinrl evaluate esi-v49-full",
        also="eval exam test score grade baseline",
    ),
    "compare": Command(
        help="compare recipes over seeds, or two models with each other",
        description="With one name: a comparison of params.yaml, recipes over seeds. It reads graded answers and "
        "reports, asks no model, and writes data/reports/comparisons/NAME.json, .md and .png. With two names: exact "
        "paired tests between two models that took the same exam, one perhaps as a resit: `exact` and the safety "
        "metric in each mode; p is not adjusted for their number, nor for imaging cases of one condition.",
        examples="clinrl compare imaging-arms\nclinrl compare esi-v49 esi-v43\n"
        "clinrl compare esi-v49-full esi-v49 --json",
        runs="cli.registry_commands:compare",
        stage="evaluation.compare",
        arguments=(
            arg("name", metavar="NAME", help="a comparison; with OTHER, a version, a merge or TASK-base"),
            arg("other", metavar="OTHER", nargs="?", help="a version, a merge or TASK-base that took that exam"),
            JSON,
        ),
        takes=("params", "source"),
        also="comparison versus diff arms recipes",
    ),
    "mine": Command(
        stage="evaluation.error_analysis",
        arguments=(name("VERSION"),),
        help="find out where a version errs, and what that would cost",
        description="Evaluates VERSION on its mine data (`mining` in params.yaml), which is neither training data "
        "nor an exam. Groups the wrong answers by kind, ranked by clinical cost. Writes "
        "data/reports/mine/VERSION.json, .md and .png.",
        examples="clinrl mine esi-v49",
        also="errors error-analysis mistakes",
    ),
    "resit": Command(
        stage="evaluation.resit",
        arguments=(name("NAME", "a version or a merge of params.yaml"),),
        help="let a champion take a fresh exam besides its own",
        description="Evaluates NAME on the exam that `resits` in params.yaml names, besides its own. Keeps the answers "
        "in data/resits/NAME for the decisions on later versions, and writes no report.",
        examples="clinrl resit esi-v49",
        also="fresh exam again",
    ),
    "render": Command(
        help="write pages and figures again from the reports' numbers",
        description="Writes every page (.md) and figure (.png) below data/reports again from the JSON beside it, "
        "and prints those that changed; judges.md is written with its study. Asks no model and needs no graded "
        "answers. A training's curves need history.csv.",
        examples="clinrl render\nclinrl render esi-v49\nclinrl render imaging",
        runs="pipeline.render:stage",
        arguments=(
            arg("names", metavar="NAME", nargs="*", help="versions, merges, bases, comparisons or tasks; default: all"),
        ),
        also="page pages figures plots report reports draw",
    ),
    "external": Command(
        stage="benchmarks.external",
        arguments=(name("VERSION"),),
        help="evaluate a version on cases from elsewhere",
        description="Evaluates VERSION on the data that `external` in params.yaml names. Writes "
        "data/reports/external/VERSION.json and .md: its figures with intervals, what lazy policies reach, and the "
        "task's published rows.",
        examples="clinrl external esi-v49",
        also="mietic",
    ),
    "protocol": Command(
        stage="benchmarks.protocol",
        arguments=(name("VERSION", "a version of params.yaml, or TASK-base"),),
        help="evaluate a version or a base by a published protocol",
        description="For tasks that are played in an environment. VERSION plays the episodes that `protocols` in "
        "params.yaml names, in every mode, and answers its exam once more at their temperature. Writes "
        "data/reports/protocol/VERSION.json and .md: the published and the corrected score, beside lazy policies and "
        "the published figures.",
        examples="clinrl protocol audit-base",
        also="benchmark published",
    ),
    "show": Command(
        help="print one answer of an exam as a person would read it",
        description="Prints what NAME did with a case of its exam: the request, each turn, what was decided and "
        "what was right, and the score term by term. Reads the graded answers; asks no model. EPISODE is a case id, "
        "the beginning of one, or a number in the order of the exam.",
        examples="clinrl show esi-v49 1\nclinrl show esi-v49 esi-0a4e --mode direct\nclinrl show esi-v49 --random 7\n"
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
            value("--wrong", natural(1), "the first N wrong ones; default: 1", nargs="?", const=1),
        ),
        also="transcript print read answer cat",
    ),
}
