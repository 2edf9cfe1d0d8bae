"""A GRPO step through `clinrl train` against a bare TRL script: same model, prompts, sampling, sizes and settings.

Both are commands of their own, and their steps are timed from outside, as their lines arrive, so whatever clinrl adds
is in the figure: the task's reward, the order check, the watch, live metrics, and a checkpoint every few steps. The
script runs in the environment of a shell. The learning rate is too small to change an answer, so that on TRL's paths
both sample the same completions, which is checked. The shared path draws others of the same lengths but for chance.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import chdir
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import threads
from clinrl import paths
from clinrl.analysis import alerts
from clinrl.config.files import merge_files, read_files
from clinrl.config.params import load_params
from clinrl.evaluation.answers import HISTORY
from clinrl.runtime import determinism
from clinrl.training.worker import LOSS_PATH

STEPS = 12
LR = 1e-9
"""Moves the last bits of small weights, as a training must, and no answer."""
ROUNDS = 2
"""Each command runs this often, by turns, so that a slow minute of the machine hits all."""
LENGTHS = 0.05
"""Largest relative difference of tokens between the paths."""
MEASURED = "esi-v49"
"""The version whose recipe and parent are measured."""
STOCK, SHARED = "bench-stock", "bench-shared"
"""Versions with the recipe, by the paths of loss and generation."""
BARE = "bare TRL"
OURS = (*determinism._ALLOCATOR, *determinism._WAITING)
"""What clinrl sets for its processes and a script does not."""
CLINRL = [sys.executable, "-m", "clinrl"]


def project(folder: Path, steps: int = STEPS) -> str:
    """A project with the measured recipe twice, by its paths, with its inputs built. Returns a note.

    Its ancestors come along, and nothing else. That reward asks no model, so that what is measured is not one.
    """
    from ruamel.yaml import YAML

    params = load_params()
    block = params.versions[MEASURED]
    task = block.task
    tree, _ = merge_files(read_files(Path("params.yaml")))
    line = [*reversed(params.lineage(MEASURED)), f"{task}-base"]
    blocks = {name: tree["versions"][name] for name in line if name in tree["versions"]}
    recipe = tree["profiles"][block.profile]
    recipes = {}
    for version, path in ((STOCK, "stock"), (SHARED, "shared")):
        sizes = recipe["trainer"]["embedded"] | {"steps": steps, "lr": LR, "loss_path": path, "generation_path": path}
        recipes[version] = recipe | {"trainer": recipe["trainer"] | {"embedded": sizes}}
    needed = {data for one in blocks.values() for data in (one["data"], one["exam"])} | {tree["bases"][task]["exam"]}
    stripped = {
        "scale": tree["scale"],
        "modes": tree["modes"],
        "bases": {task: tree["bases"][task] | {"full": tree["bases"][task]["full"] | {"recipes": {}}}},
        "datasets": {name: without_file(tree["datasets"][name]) for name in sorted(needed)},
        "profiles": {one["profile"]: tree["profiles"][one["profile"]] for one in blocks.values()} | recipes,
        "versions": {name: without_file(one) for name, one in blocks.items()}
        | {version: without_file(tree["versions"][MEASURED]) | {"profile": version} for version in recipes},
    }
    YAML(typ="safe").dump(stripped, folder / "params.yaml")
    for source in (paths.base(task), *map(paths.adapter, line[1:])):
        shutil.copytree(source, folder / source)
    (folder / "mlruns").mkdir()  # so that live metrics are sent, as in any project
    for command in (("dataset", block.data), ("validate", block.data), ("probe", STOCK), ("probe", SHARED)):
        subprocess.run([*CLINRL, *command], cwd=folder, check=True, stderr=subprocess.DEVNULL)
    trainer = params.trainer(block.profile)
    return f"{trainer.prompts} prompts x {trainer.group} completions, {MEASURED} from {block.parent}"


def without_file(block: dict[str, Any]) -> dict[str, Any]:
    """A block for a params.yaml without files beside it."""
    return {key: value for key, value in block.items() if key != "file"}


def step_seconds(command: list[str], folder: Path, environment: dict[str, str]) -> float:
    """Mean wall time from the end of the first step, which pays for warming up, to the end of the last."""
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        ends, words = [], []
        for line in process.stderr:
            words.append(line)
            if re.search(r" step \d+/\d+", line):
                ends.append(time.perf_counter())
    if process.wait() or len(ends) < 2:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode} after {len(ends)} steps: {words}")
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def bare() -> None:
    """TRL as its manual shows it, on the rows of the same stream, with a reward of one line."""
    determinism.pin()
    for name in OURS:  # threads wait as they do for anybody
        os.environ.pop(name, None)
    from clinrl.models import bases
    from clinrl.models.chat import render
    from clinrl.tasks.base import get_task
    from clinrl.training import launch, trl
    from clinrl.training.rows import read_rows

    params = load_params()
    spec, lines = launch.resolve(params, STOCK)
    determinism.settle(spec["seed"])
    task = get_task(spec["task"])
    folder = Path(tempfile.mkdtemp(prefix="rows-", dir="."))
    (folder / launch.ROWS).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    rows = read_rows(folder / launch.ROWS, spec, task)
    model, tokenizer = bases.load(params, task.name, for_training=True)
    model = trl.start_adapter(model, spec, paths.adapter(str(params.versions[STOCK].parent)))
    texts = [render(tokenizer, task.prompt(row.case.facts), row.thinking) for row in rows]
    golds = [str(task.label(row.case)) for row in rows]
    fit(model, tokenizer, spec, texts, golds, folder)


def fit(model: Any, tokenizer: Any, spec: dict[str, Any], texts: list[str], golds: list[str], output: Path) -> None:
    """Train, and write a line to stderr at the end of each step and the count of tokens at the end of all."""
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    sizes = spec["trainer"]
    config = GRPOConfig(
        output_dir=str(output),
        learning_rate=sizes["lr"],
        max_steps=sizes["steps"],
        seed=spec["seed"],
        data_seed=spec["seed"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=sizes["prompts"] * sizes["group"],
        steps_per_generation=1,
        num_generations=sizes["group"],
        max_completion_length=sizes["max_completion"],
        temperature=sizes["temperature"],
        beta=sizes["beta"],
        shuffle_dataset=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )

    def exact(completions: list[str], gold: list[str], **_: Any) -> list[float]:
        return [float(text.rstrip().endswith(f"ESI {level}")) for text, level in zip(completions, gold, strict=True)]

    class Steps(TrainerCallback):  # type: ignore[misc]  # transformers has no types
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
            if logs and "loss" in logs:
                print(f"bare step {state.global_step}/{state.max_steps}", file=sys.stderr, flush=True)
                Path("bare-tokens").write_text(str(logs["num_tokens"]))

    data = Dataset.from_dict({"prompt": texts, "gold": golds})
    trainer = GRPOTrainer(
        model=model, reward_funcs=[exact], args=config, train_dataset=data, processing_class=tokenizer
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Steps())
    trainer.train()


def watched(history: list[dict[str, Any]]) -> float:
    """Seconds that the alarms take a step, from as many readings of a history as a tenth of a second allows."""
    started, read = time.perf_counter(), 0
    while time.perf_counter() - started < 0.1:
        alerts.alarms(history)
        read += 1
    return (time.perf_counter() - started) / read / len(history)


def limit(history: list[dict[str, Any]]) -> tuple[float, float]:
    """Seconds a step that its multiplications take at this machine's rate, and the share of groups without a signal.

    Counted are 2 operations a weight and token of a forward pass, and as many again for the gradient of what flows
    through it (weights get none): each prompt once and each completion, forward to write it, and forward and backward
    where its group has a signal. Attention, the adapter and everything else is left out, so no program is as fast.
    """
    import torch

    from clinrl.models import bases

    model, _ = bases.load(load_params(), load_params().versions[STOCK].task, for_training=False)
    weights = sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, torch.nn.Linear))
    dead = sum(line["frac_reward_zero_std"] for line in history) / len(history)
    sizes = load_params().trainer(STOCK)
    written = sizes.prompts * sizes.group * sum(line["completions/mean_length"] for line in history) / len(history)
    tokens = written + (history[-1]["num_tokens"] / len(history) - written) / sizes.group
    operations = 2 * weights * tokens * (1 + 2 * (1 - dead))
    a, b = torch.rand(2048, 512), torch.rand(512, 512)
    taken = []
    for _ in range(20):
        began = time.perf_counter()
        torch.mm(a, b)
        taken.append(time.perf_counter() - began)
    return operations * min(taken) / (2 * a.numel() * b.size(1)), dead


def measured(folder: Path, steps: int, rounds: int) -> list[tuple[Any, ...]]:
    """The rows of the report."""
    size = project(folder, steps)
    commands = {version: [*CLINRL, "train", version] for version in (STOCK, SHARED)}
    commands[BARE] = [sys.executable, str(Path(__file__).resolve()), "bare"]
    shell = {name: value for name, value in os.environ.items() if name not in OURS}
    taken: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(rounds):
        for name in list(commands) if turn % 2 == 0 else list(commands)[::-1]:
            shutil.rmtree(folder / paths.adapter(name), ignore_errors=True)
            environment = shell if name == BARE else dict(os.environ)
            taken[name].append(step_seconds(commands[name], folder, environment))
    history = {name: list(alerts.read(folder / paths.adapter(name) / HISTORY)) for name in (STOCK, SHARED)}
    record = json.loads((folder / paths.adapter(SHARED) / LOSS_PATH).read_text(encoding="utf-8"))
    shutil.rmtree(folder / paths.adapter(SHARED))
    with threads.busy(determinism.processors()):
        crowded = step_seconds(commands[SHARED], folder, dict(os.environ))
    tokens = {name: lines[-1]["num_tokens"] for name, lines in history.items()}
    if (
        tokens[STOCK] != float((folder / "bare-tokens").read_text())
        or abs(tokens[SHARED] / tokens[STOCK] - 1) > LENGTHS
    ):
        raise RuntimeError(f"the commands sampled different completions ({tokens}), so their times do not compare")
    with chdir(folder):
        least, dead = limit(history[STOCK])
    stock, shared, bare_trl = (sum(taken[name]) / rounds for name in (STOCK, SHARED, BARE))
    note = f"{size}, {steps - 1} steps, {rounds} rounds"
    used = (
        f"loss path used: {record['used']}; gradients differ by {record['gradient_gap'] or 0:.1g}; "
        f"{tokens[SHARED] / tokens[STOCK]:.3f} of the tokens"
    )
    return [
        ("GRPO step against stock TRL", round(shared / bare_trl, 3), "ratio", used),
        ("GRPO step, shared paths against TRL's, both in clinrl train", round(shared / stock, 3), "ratio",
         "the same process settings"),
        ("GRPO step, clinrl train, shared paths", round(shared, 3), "s", note),
        ("GRPO step, shared paths, beside one busy process per processor against alone", round(crowded / shared, 2),
         "ratio", "whole steps of clinrl train"),
        ("GRPO step, clinrl train", round(stock, 3), "s", f"{stock / bare_trl:.3f} of bare TRL, checkpoints and all"),
        ("GRPO step, bare TRL", round(bare_trl, 3), "s", note),
        ("GRPO step, arithmetic limit", round(least, 3), "s",
         "matrix products alone, at this machine's rate; live groups, each prompt once"),
        ("groups without a signal", round(100 * dead, 1), "%", f"{steps} steps"),
        ("alarms, share of a GRPO step", round(100 * watched(history[STOCK]) / stock, 3), "%",
         f"every rule on each of {steps} lines; held-out checks are part of the step above"),
    ]  # fmt: skip


def main() -> None:
    """Print the rows."""
    with tempfile.TemporaryDirectory(prefix="clinrl-bench-") as name:
        print(json.dumps(measured(Path(name), STEPS, ROUNDS)))


if __name__ == "__main__":
    determinism.pin()
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if sys.argv[1:] == ["bare"]:
        bare()
    else:
        main()
