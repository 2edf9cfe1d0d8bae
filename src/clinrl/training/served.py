"""GRPO on completions of a vLLM server, which loads the adapter of each step and leaves the base unchanged.

TRL's own way to vLLM merges the adapter into the base in bfloat16 at each step and takes it out again. The base drifts
by that, and it is impossible with a base of 4 bits. Here the adapter of a step is served beside the base. In place of
its own generator, TRL gets tokens and log-probabilities of the engine. It compares these with the trainer's
log-probabilities at each step, and weights the loss by the ratio of the two probabilities.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clinrl import paths
from clinrl.artifacts import write_json
from clinrl.config.machine import Vllm
from clinrl.errors import TrainingError
from clinrl.models import bases
from clinrl.models.engine import Engine, connect, seed_of
from clinrl.models.vllm_client import Request
from clinrl.training.launch import SAMPLERS
from clinrl.training.rejection import OVER
from clinrl.training.trl import write_weights
from clinrl.training.world import World

CORRECTION = "token_truncate"
"""The loss of each token is weighted by its ratio of probabilities, up to TRL's bound. TRL's default weights whole
completions by the product of their ratios; with a trainer in 4 bits and an engine in bfloat16 that leaves out most long
completions."""


class Served:
    """Replaces TRL's `VLLMGeneration`: it has only the methods that the trainer calls."""

    def __init__(self, engine: Engine, trainer: Any, spec: Mapping[str, Any], folder: Path, world: World) -> None:
        self.engine, self.trainer, self.spec, self.world = engine, trainer, spec, world
        self.partial = folder / f"process-{world.rank}"

    def sync_weights(self) -> None:
        """Make the server load the current adapter. One process does so, and the others find it by its digest.

        Raises TrainingError if the processes have different adapters.
        """
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir(parents=True)
        write_weights(self.trainer.accelerator.unwrap_model(self.trainer.model), self.spec, self.partial)
        self.engine.adopt(self.partial)
        shutil.rmtree(self.partial)
        if len({*self.world.gathered([self.engine.adapter])}) > 1:
            raise TrainingError(f"the processes have different adapters after step {self.trainer.state.global_step}")

    def generate(self, prompts: list[list[int]], **_: Any) -> tuple[Any, list[list[int]], list[list[list[float]]], Any]:
        """A turn of each row, with the log-probability of each of its tokens, as TRL's generator returns them."""
        args, step, turn = self.trainer.args, self.trainer.state.global_step, self.trainer.turns
        # The budget is what the row with most of its episode left may write; each row's own rest fits the server.
        requests, budget, longest = [], self.trainer.turn_budget(prompts), self.engine.client.max_length
        for (row, _), ids in zip(self.trainer.open_rows, prompts, strict=True):
            requests.append(
                Request(
                    name=f"row {row} of step {step + 1}", ids=ids, budget=max(1, min(budget, longest - len(ids))),
                    temperature=args.temperature, top_p=1.0, seed=seed_of(self.spec["seed"], step, turn, row),
                )
            )  # fmt: skip
        written = self.engine.write(requests)
        logs = [[[value] for value in one.log_probabilities] for one in written]
        return prompts, [list(one.ids) for one in written], logs, None


def begin(
    folder: Path, spec: Mapping[str, Any], model: Any, parent: Path | None, checkpoint: Path | None, world: World
) -> Engine | None:
    """Connect to the server that samples in a training, or return None if the trained model itself samples.

    At full scale the sampler's identity is written down. Rejection sampling imitates the parent, so for that the server
    loads the parent's adapter.
    """
    if spec["scale"] != "full" or spec["method"] == "sft":
        return None
    parts = folder / "sampled"
    if spec["method"] == "rejection" and (parts / OVER).exists():  # imitation needs no server
        return None
    engine = None
    if spec["machine"]["sampler"] == "vllm":
        engine = connect(spec["task"], Vllm.model_validate(spec["machine"]["vllm"]))
        if parent is not None and spec["method"] == "rejection":
            engine.adopt(parent)
            engine.check_adopted()
    if world.is_main:
        after = len([*parts.glob("*.json")]) or (int(checkpoint.name.rsplit("-", 1)[1]) if checkpoint else 0)
        note(folder, engine.identity if engine else bases.identity_of(model, paths.base(spec["task"])), after)
    return engine


def serve(trainer: Any, engine: Engine, spec: Mapping[str, Any], folder: Path, world: World) -> None:
    """Make a trainer of GRPO learn from completions that an engine writes."""
    trainer.use_vllm, trainer.vllm_mode, trainer._last_loaded_step = True, "server", -1
    trainer.vllm_importance_sampling_mode = CORRECTION
    trainer.seed = spec["seed"]  # so that rows are numbered in their step
    trainer.vllm_generation = Served(engine, trainer, spec, folder, world)


def note(folder: Path, identity: Mapping[str, str], after: int) -> None:
    """Record the sampler from step `after` on if it has changed. Rejection sampling counts parts instead of steps."""
    file = folder / SAMPLERS
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    held = [entry for entry in known if entry["after"] < after]
    if not held or held[-1]["sampler"] != dict(identity):
        held.append({"after": after, "sampler": dict(identity)})
    write_json(file, held)
