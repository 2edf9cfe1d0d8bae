"""A GRPO step through `clinrl train` against a bare TRL script: same model, prompts, sampling, sizes and settings.

Both are commands of their own, and their steps are timed from outside, as their lines arrive, so whatever clinrl adds
is in the figure: the task's reward, the order check, the watch, live metrics, and a checkpoint every few steps. The
learning rate is too small to change an answer, so both sample the same completions; that they did is checked.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from clinrl import paths
from clinrl.analysis import alerts
from clinrl.config.params import load_params
from clinrl.config.plain_yaml import read_yaml
from clinrl.config.recipes import GrpoProfile
from clinrl.evaluation.answers import HISTORY
from clinrl.runtime import determinism

STEPS = 12
ROUNDS = 2
"""Each command runs this often, by turns, so that a slow minute of the machine hits both."""
VERSION = "bench-grpo"
CLINRL = [sys.executable, "-m", "clinrl"]


def project(folder: Path) -> str:
    """A project with one GRPO version of the first series' last recipe, its inputs built. Returns a note on its sizes.

    That reward asks no model, so that what is measured is not one.
    """
    from ruamel.yaml import YAML

    params = load_params()
    task = next(iter(params.bases))
    series = [(name, block) for name, block in params.versions.items() if block.task == task]
    last, block = next((name, block) for name, block in reversed(series) if is_grpo(params.profiles[block.profile]))
    tree = read_yaml(Path("params.yaml"))
    recipe = {**tree["profiles"][block.profile]}
    recipe["trainer"] = {
        **recipe["trainer"],
        "embedded": {**recipe["trainer"]["embedded"], "steps": STEPS, "lr": 1e-30},
    }
    tree["profiles"][VERSION] = recipe
    tree["versions"] = {VERSION: {**tree["versions"][last], "parent": f"{block.task}-base", "profile": VERSION}}
    for section in ("merges", "mining", "comparisons"):  # of versions that this project does not have
        del tree[section]
    YAML(typ="safe").dump(tree, folder / "params.yaml")
    for source in (paths.base(block.task), paths.adapter(f"{block.task}-base")):
        shutil.copytree(source, folder / source)
    (folder / "mlruns").mkdir()  # so that live metrics are sent, as in any project
    for command in (("dataset", block.data), ("validate", block.data), ("probe", VERSION)):
        subprocess.run([*CLINRL, *command], cwd=folder, check=True, stderr=subprocess.DEVNULL)
    trainer = params.trainer(block.profile)
    return f"{trainer.prompts} prompts x {trainer.group} completions"


def is_grpo(profile: Any) -> bool:
    """Whether a recipe follows a reward."""
    return isinstance(profile, GrpoProfile)


def step_seconds(command: list[str], folder: Path) -> float:
    """Mean wall time from the end of the first step, which pays for warming up, to the end of the last."""
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    ends, words = [], []
    for line in process.stderr:
        words.append(line)
        if re.search(r" step \d+/\d+", line):
            ends.append(time.perf_counter())
    if process.wait() or len(ends) != STEPS:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode} after {len(ends)} steps: {words}")
    return (ends[-1] - ends[0]) / (STEPS - 1)


def bare() -> None:
    """TRL as its manual shows it, on the rows of the same stream, with a reward of one line."""
    determinism.pin()
    from clinrl.models import bases
    from clinrl.models.chat import render
    from clinrl.tasks.base import get_task
    from clinrl.training import launch, trl, worker

    params = load_params()
    spec, lines = launch.resolve(params, VERSION)
    determinism.settle(spec["seed"])
    task = get_task(spec["task"])
    folder = Path(tempfile.mkdtemp(prefix="rows-", dir="."))
    (folder / launch.ROWS).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    rows = worker.read_rows(folder, spec, task)
    model, tokenizer = bases.load(params, task.name, for_training=True)
    model = trl.start_adapter(model, spec, None)
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
        max_steps=STEPS,
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
                print(f"bare step {state.global_step}/{STEPS}", file=sys.stderr, flush=True)
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


def main() -> None:
    """Print the rows."""
    taken: dict[str, list[float]] = {"clinrl train": [], "bare TRL": []}
    commands = {"clinrl train": [*CLINRL, "train", VERSION], "bare TRL": [sys.executable, __file__, "bare"]}
    with tempfile.TemporaryDirectory(prefix="clinrl-bench-") as name:
        folder = Path(name)
        size = project(folder)
        for turn in range(ROUNDS):
            for who in list(commands) if turn % 2 == 0 else list(commands)[::-1]:
                shutil.rmtree(folder / paths.adapter(VERSION), ignore_errors=True)
                taken[who].append(step_seconds(commands[who], folder))
                if who == "clinrl train":
                    history = alerts.read(folder / paths.adapter(VERSION) / HISTORY)
        if float((folder / "bare-tokens").read_text()) != history[-1]["num_tokens"]:
            raise RuntimeError("the two commands sampled different completions, so their times do not compare")
    ours, theirs = (sum(seconds) / ROUNDS for seconds in taken.values())
    note = f"{size}, {STEPS - 1} steps, twice"
    added = f"{note}; {ours / theirs:.3f} of bare TRL, checkpoints and all"
    rows = [
        {"what": "GRPO step, clinrl train", "value": round(ours, 3), "unit": "s", "note": added},
        {"what": "GRPO step, bare TRL", "value": round(theirs, 3), "unit": "s", "note": note},
        {
            "what": "alarms, share of a GRPO step",
            "value": round(100 * watched(history) / ours, 3),
            "unit": "%",
            "note": f"every rule on each of {STEPS} lines; held-out looks are part of the step above",
        },
    ]
    print(json.dumps(rows))


if __name__ == "__main__":
    determinism.pin()
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if sys.argv[1:] == ["bare"]:
        bare()
    else:
        main()
