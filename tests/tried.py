"""A project in which `clinrl try` answers: a small base, an adapter of random weights, reports of invented answers."""

import shutil
from pathlib import Path

from ruamel.yaml import YAML

import dolls
import locks
from clinrl import paths
from clinrl.artifacts import identity, read_manifest, seal, staged, write_json
from clinrl.data import dataset
from clinrl.models import bases
from once import once


def built() -> Path:
    """A folder with the project, made once a test run. Copy it; do not write to it."""
    return once("tried", _build)


def _build() -> None:
    from peft import LoraConfig, get_peft_model

    shutil.copytree(dolls.built(), ".", dirs_exist_ok=True)
    named = {"bases": dolls.PARAMS["bases"]}
    Path("params").mkdir()
    YAML().dump(named, Path("params/esi.yaml"))
    YAML().dump({key: block for key, block in dolls.PARAMS.items() if key not in named}, Path("params.yaml"))
    doll = dolls.params()
    dataset.stage(doll, "x1")
    exam = {"data": {"name": "x1", "identity": identity(read_manifest(paths.cases("x1")))}}
    write_json(paths.data_proof("x1"), exam)
    model, _ = bases.load(doll, "esi", for_training=False)
    shape = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    with staged(paths.adapter("v1")) as out:
        get_peft_model(model, shape).save_pretrained(out)
        inputs = {"base": identity(read_manifest(paths.base("esi")))}
        seal(out, kind="adapter", name="v1", task="esi", task_version=2, spec={}, inputs=inputs)
    with dolls.few_draws():
        dolls.examine(doll, "esi-base", [1])
        dolls.examine(doll, "v1", [0])
    locks.record(doll)
