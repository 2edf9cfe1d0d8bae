"""A doll's project whose versions can be registered: real adapters, and made-up answers to a real exam."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import dolls
import locks
from clinrl import paths
from clinrl.artifacts import canonical_json, identity, read_manifest, seal, staged, write_json, write_text
from clinrl.config.params import Params
from clinrl.data import dataset
from clinrl.models import bases
from clinrl.reports import model_card
from clinrl.training import launch
from clinrl.training.trl import write_adapter
from once import once

STEPS = 3
FOLDED = "v1-full"
MERGES = {"folds": {FOLDED: {"task": "esi", "version": "v1", "exam": "x1"}}}


def params() -> Params:
    """The doll's params with a fold of v1."""
    return dolls.params(merges=MERGES)


def built() -> Path:
    """A folder with the base, v1, its child v2 and the fold of v1, examined with few draws; made once a test run.

    Copy it; do not write to it."""
    return once("exhibits", build)


def build() -> None:
    """Build it in the working directory."""
    shutil.copytree(dolls.built(), Path(), dirs_exist_ok=True)
    with dolls.few_draws():
        dataset.stage(params(), "x1")
        named = {"data": {"name": "x1", "identity": identity(read_manifest(paths.cases("x1")))}}
        write_json(paths.data_proof("x1"), named)
        for data in ("d1", "x1"):
            write_text(paths.data_docs(data) / "index.html", f"<html>{data}</html>")
        dolls.examine(params(), "esi-base", [3])
        adapter("v1", 1)
        adapter("v2", 2)
        fold()
        dolls.examine(params(), "v1", [1, 2, 3])
        dolls.examine(params(), "v2", [1, 2, 3, 4])
        dolls.examine(params(), FOLDED, [1, 2, 3])
        locks.record(params())


def adapter(name: str, shift: int) -> None:
    """Seal a version's adapter as training would have: the worker's files, with weights that do something."""
    import torch
    from peft import LoraConfig, get_peft_model

    spec, _ = launch.resolve(params(), name)
    model, tokenizer = bases.open_base(paths.base("esi"), for_training=True)
    torch.manual_seed(shift)
    lora = LoraConfig(r=4, lora_alpha=8.0, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = get_peft_model(model, lora)
    with staged(paths.adapter(name)) as out:
        write_adapter(adapted, tokenizer, spec, out)
        write_text(out / "history.jsonl", "".join(canonical_json(line) + "\n" for line in history(shift)))
        fields = launch.manifest_fields(spec)
        write_text(out / "README.md", model_card.write(fields, lineage=params().lineage(name)))
        seal(out, **fields)


def history(shift: int) -> list[dict[str, float]]:
    """A training log; each line has what the trainer logs, and the second a value that could not be computed."""
    return [
        {"step": step, "loss": 1.0 / step + shift, "reward": float(step), "kl": None if step == 2 else 0.1}
        for step in range(1, STEPS + 1)
    ]


def fold() -> None:
    """Seal a full model in the place of v1's fold: the base's own weights, which is all that registering looks at."""
    base, version = read_manifest(paths.base("esi")), read_manifest(paths.adapter("v1"))
    with staged(paths.merged(FOLDED)) as out:
        for name in base.files:
            shutil.copyfile(paths.base("esi") / name, out / name)
        spec = {"method": "fold", "versions": {"v1": 1.0}}
        inputs = {"base": identity(base), "v1": identity(version)}
        seal(out, kind="merged", name=FOLDED, task="esi", task_version=2, spec=spec, inputs=inputs)


def change(path: Path) -> None:
    """Alter a file without changing its length."""
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def reports(name: str) -> Mapping[str, dict]:
    """The reports of a name, by mode."""
    return {mode: json.loads((paths.report(name) / f"{mode}.json").read_text()) for mode in params().modes}
