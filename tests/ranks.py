"""One step on episodes of the audit task that scripts write: by this process, or by those that torchrun started."""

import json
import os
import sys
import warnings
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.distributed_c10d import _get_default_store

import test_episodes as episodes
from clinrl.models.chat import encode, write_turn
from clinrl.models.judges import Judges
from clinrl.runtime import determinism
from clinrl.training import trl
from clinrl.training.rows import Row
from clinrl.training.world import TIMEOUT, World
from clinrl.types import Call, Message


def play(folder: Path, world: World, path: str) -> None:
    """Train on eight episodes, of which those of the second case are short, and write adapter and log."""
    warnings.filterwarnings("ignore", message=".*environment_factory.*")
    determinism.settle(1)
    torch.set_num_threads(1)
    cases, tokenizer = episodes.CASES[:2], episodes.tokenizer()
    read = episodes.texts_of(episodes.transcript_of(cases[0], False), False)
    unknown = write_turn(Message(role="assistant", content="", calls=(Call(name="x", arguments={}),)), False)
    scripts = [read, episodes.odd_turns(cases[0]), [*read[:1], "Done."], [unknown, unknown, "So."]]
    scripts += [["Never."], [unknown, "Then."], ["So be it."], ["No."]]
    spec = episodes.training({"m": False}, group=4, max_completion=2000, loss_path=path)
    adapted = trl.start_adapter(episodes.model(), spec, None)
    trl.Grpo = episodes.Played
    rows = [Row(case, "m", False) for case in cases]
    grpo = trl.grpo_trainer(adapted, tokenizer, episodes.TASK, spec, rows, folder / "t", Judges(folder), world)
    here = slice(world.rank * len(scripts) // world.size, (world.rank + 1) * len(scripts) // world.size)
    grpo.scripts = [[encode(tokenizer, [text + tokenizer.eos_token])[0] for text in texts] for texts in scripts[here]]
    grpo.asked, grpo.waiting = [[] for _ in grpo.scripts], None
    grpo.train()
    if world.is_main:
        save_file(trl.adapter_state(adapted), folder / "adapter.safetensors")
        (folder / "log.json").write_text(json.dumps(grpo.state.log_history))


if __name__ == "__main__":
    determinism.pin()
    place = World(*(int(os.environ[name]) for name in ("WORLD_SIZE", "RANK")))
    with place.joined(on_cpu=True):
        assert _get_default_store().timeout == TIMEOUT  # else a slow process is given up after five minutes
        play(Path(sys.argv[1]), place, sys.argv[2])
