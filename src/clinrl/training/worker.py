"""The training process: `python -m clinrl.training.worker <spec.json>`, started by `launch.stage` or `world`.

Reads the resolved spec and the rows beside it, trains (or continues from the newest whole checkpoint), and leaves the
adapter in the folder `adapter` beside the spec. `status.json` says how it ended; the exit code is 0 only if it is done.
SIGTERM and SIGINT end it at the next step boundary, with a checkpoint.
"""

import json
import os
import shutil
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

from clinrl import paths
from clinrl.artifacts import canonical_json, write_json
from clinrl.errors import EngineError, OutOfMemory, Refused, TrainingError, disk_is_full, echo
from clinrl.runtime import determinism, gpus
from clinrl.runtime.starter import die_with
from clinrl.tasks.base import get_task
from clinrl.tasks.importing import is_imported
from clinrl.training.launch import DISK_FULL, ROWS, SPEC
from clinrl.training.world import STOPPED, World, is_on_cpu, shares_threads, world_of

VERDICTS = "verdicts.jsonl"
"""The file with the judges' responses, of a training whose reward uses judges."""

LOSS_PATH = "loss_path.json"
"""The file with the requested and the used implementation of the loss, of a recipe that requests another than TRL's."""


def main(arguments: list[str]) -> int:
    """Train as the spec at the first argument says, and return the exit code. The second, if given, is the id of a
    process with which this one dies."""
    path = Path(arguments[0])
    if path.name != SPEC or not path.is_file():
        print(f"clinrl.training.worker: {path} is not a {SPEC}; `clinrl train` writes one", file=sys.stderr)
        return 2
    if len(arguments) > 1:
        die_with(int(arguments[1]))
    spec = json.loads(path.read_text(encoding="utf-8"))
    warnings.filterwarnings("ignore", message=".*environment_factory.*")  # experimental; TRL's version is pinned
    try:
        world = world_of(os.environ, spec["machine"])
        if spec["scale"] == "full":  # before an import that initialises CUDA, such as that of bitsandbytes
            gpus.show_one(world.rank if world.size > 1 else spec["machine"]["gpu"] or 0)
    except Refused as error:
        print(f"clinrl.training.worker: {error}", file=sys.stderr)
        return error.exit_code
    determinism.settle(spec["seed"], shares=shares_threads(spec))
    return _train(path.parent, spec, world)


def _train(folder: Path, spec: dict[str, Any], world: World) -> int:
    from clinrl.models.checkpoints import latest_checkpoint
    from clinrl.training.callback import RunCallback

    steps = spec["trainer"]["steps"]
    can_stop = spec["on_alarm"] == "stop"
    waiver = spec.get("waiver", "")
    watch = RunCallback(folder, version=spec["version"], steps=steps, can_stop=can_stop, waiver=waiver, world=world)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: watch.request_stop())
    checkpoints = folder / "trainer"
    checkpoints.mkdir(exist_ok=True)
    try:
        with world.joined(on_cpu=is_on_cpu(spec["scale"])):
            (checkpoint,) = world.gathered([latest_checkpoint(checkpoints)] if world.is_main else [])
            reached = int(checkpoint.name.rsplit("-", 1)[1]) if checkpoint else 0
            watch.saved = reached  # for a failure before the first step
            watch.status("running", reached)
            step = _fit(folder, spec, watch, checkpoint)
            watch.status("completed" if step == steps else "stopped", step)
        return 0 if step == steps else STOPPED
    except (EngineError, OutOfMemory) as error:
        resume = f"and the same command continues from step {watch.saved} of {steps}"
        watch.status("failed", watch.saved, f"{error}, {resume}")
        return TrainingError.exit_code
    except Refused as error:
        watch.status("failed", watch.saved, str(error))
        return error.exit_code
    except Exception as error:
        if disk_is_full(error, folder):
            if world.is_main:
                latest_checkpoint(checkpoints)  # deletes the one that was being written
            return DISK_FULL
        watch.status("crashed", watch.saved, type(error).__name__)
        raise
    finally:
        watch.line.stop()


def _fit(folder: Path, spec: dict[str, Any], watch: Any, checkpoint: Path | None) -> int:
    """Train to the last step or to a stop, write the adapter if it is finished, and return the last step."""
    import datasets
    import transformers
    from transformers import PrinterCallback

    from clinrl.models import bases, memory
    from clinrl.models.generate import MAX_TOKENS, Sampler, shares
    from clinrl.models.judges import Judges
    from clinrl.training import rejection, served, trl
    from clinrl.training.monitor import HeldOut
    from clinrl.training.rows import read_rows

    datasets.disable_progress_bars()
    transformers.utils.logging.set_verbosity_error()
    task = get_task(spec["task"])
    rows = read_rows(folder / ROWS, spec, task)
    model, tokenizer = bases.open_base(paths.base(spec["task"]), for_training=True, qlora=spec.get("qlora", False))
    parent = None if spec["parent"] == f"{spec['task']}-base" else paths.adapter(spec["parent"])
    model = trl.start_adapter(model, spec, parent)
    start = trl.adapter_state(model)
    world: World = watch.world
    verdicts = folder / (VERDICTS if world.is_main else f"verdicts-{world.rank}.jsonl")
    judges = Judges(paths.base(spec["task"]), verdicts, sorted(folder.glob("verdicts*.jsonl")))
    bound = spec["machine"]["exam_tokens"]
    tokens = bound or MAX_TOKENS
    sampled: dict[str, float] = {}
    engine = served.begin(folder, spec, model, parent, checkpoint, world)
    if spec["method"] == "rejection":
        sampler = engine or Sampler(
            model, tokenizer, max_tokens=tokens, shared=shares(spec),
            scale=spec["scale"], place="generation",
        )  # fmt: skip
        written = rejection.sample(
            folder / "sampled", sampler, task, spec, rows, judges, lambda: watch.stop_requested, world
        )
        if written is None:
            return 0
        rows, sampled = rejection.taught(task, spec, rows, written)
        if world.is_main:
            kept, of = sampled["sampled/kept"], sampled["sampled/completions"]
            echo(f"{spec['version']} imitates {kept:,} of {of:,} sampled completions")
    trainer: Any
    if spec["method"] == "grpo":
        trainer = trl.grpo_trainer(model, tokenizer, task, spec, rows, folder / "trainer", judges, world,
                                   longest=engine.client.max_length if engine else None)  # fmt: skip
        if engine is not None:
            served.serve(trainer, engine, spec, folder / "served", world)
    else:
        trainer = trl.sft_trainer(model, tokenizer, task, spec, rows, folder / "trainer", world)
        if sampled:
            trainer.served = [sampled] + [{}] * (spec["trainer"]["steps"] - 1)
        if checkpoint is not None:
            trainer.count_from(checkpoint)
    trainer.scale, trainer.most_tokens = spec["scale"], bound
    trl.restore_precision(model, start)
    watch.moved, watch.shares = lambda: trl.differs(model, start), shares_threads(spec)
    if spec["trainer"].get("held_out") and world.is_main:
        with trainer.accelerator.autocast():  # as when it looks: a policy that has not moved has a kl of 0
            trainer.held_out = HeldOut(model, tokenizer, task, spec, tokens)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(watch)
    at_once, loss_type = int(trainer.args.per_device_train_batch_size), spec["trainer"].get("loss_type", "")
    with memory.place("the loss", memory.fewer_rows(spec["scale"], at_once, loss_type)):
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if trainer.state.global_step == spec["trainer"]["steps"]:
        # A reply quotes its case, and an adapter's folder goes to the registry and to DVC's remote.
        replies = [] if any(is_imported(row.case) for row in rows) else judges.record()
        _finish(folder / "adapter", spec, watch, trainer, tokenizer, replies)
    return int(trainer.state.global_step)


def _finish(adapter: Path, spec: dict[str, Any], watch: Any, trainer: Any, tokenizer: Any, replies: Any) -> None:
    """Write the folder of a finished adapter. All processes must call it; process 0 writes."""
    from clinrl.training import trl
    from clinrl.training.callback import history

    if not watch.moved():
        raise TrainingError(
            "no step gave the adapter a gradient, so it still equals its parent's: each group earned equal rewards"
        )
    verdicts = sorted({canonical_json(verdict) for verdict in watch.world.gathered(replies)})
    if not watch.world.is_main:
        return
    shutil.rmtree(adapter, ignore_errors=True)
    adapter.mkdir()
    trl.write_adapter(trainer.model, tokenizer, spec, adapter)
    (adapter / "history.jsonl").write_text(history(trainer.state.log_history), encoding="utf-8")
    if spec["trainer"].get("loss_path", "stock") != "stock":
        write_json(adapter / LOSS_PATH, trainer.loss_record())
    if verdicts:
        (adapter / VERDICTS).write_text("".join(line + "\n" for line in verdicts), encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    determinism.pin()
    sys.exit(main(sys.argv[1:]))
