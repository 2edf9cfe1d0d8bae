"""A project about the toy task: a Llama of some ten thousand parameters, its judge, and a lineage with a view."""

import copy
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import clinrl.tasks
import dolls
from clinrl import paths
from clinrl.artifacts import identity, read_manifest, write_json
from clinrl.config.params import Params

HOME = Path(__file__).parent / "toytasks"
SIZES = {
    "vocab": 400, "hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "mlp": 64, "steps": 60, "batch": 8,
    "lr": 1.0e-2, "seed": 1,
}  # fmt: skip
DATA = {"task": "toy", "task_version": 1, "mix": "reporting"}
LABEL = "Usually Not Appropriate"


def _trainer(scales: Any = ("embedded", "full"), **changes: Any) -> dict[str, Any]:
    return {scale: {"lr": 1.0e-3, "steps": 2, "checkpoint_every": 1, "on_alarm": "warn"} | changes for scale in scales}


PARAMS = {
    "scale": "embedded",
    "bases": {
        "toy": {
            "exam": "x1",
            "embedded": SIZES | {
                "template": "llama3", "architecture": "llama", "cases": 60, "forget": 0.2, "prompt_weight": 0.05,
                "judges": {"judge": SIZES | {"lessons": 60}},
            },
            "full": {"repo": "some/model", "revision": "main", "quantize": "none"},
        }
    },
    "modes": copy.deepcopy(dolls.PARAMS["modes"]),
    "datasets": {
        "d1": DATA | {"use": "train", "cases": 20, "seed": 1},
        "x1": DATA | {"use": "exam", "cases": 24, "seed": 2},
    },
    "profiles": {
        "imitate": {
            "method": "sft", "modes": ["think", "direct"], "view": "no-evidence",
            "lora": {"rank": 2, "alpha": 4.0, "targets": "all-linear"}, "trainer": _trainer(batch=4),
        },
        "reward": {
            "method": "grpo", "modes": ["think", "direct"],
            "lora": {"rank": 2, "alpha": 4.0, "targets": "all-linear"},
            "stream": {"repeat": {LABEL: 2}, "cap": {LABEL: 0.6}},
            "reward": {"right": 1.0, "similar": 0.5, "judged": 0.25},
            "trainer": _trainer(
                prompts=2, group=4, temperature=1.0, beta=0.0, max_completion=24, held_out={"cases": 4, "every": 2}
            ),
        },
    },
    "versions": {
        "v1": {"task": "toy", "parent": "toy-base", "data": "d1", "exam": "x1", "profile": "imitate", "seed": 1},
        "v2": {"task": "toy", "parent": "toy-base", "data": "d1", "exam": "x1", "profile": "reward", "seed": 2},
    },
}  # fmt: skip


@contextmanager
def at_home() -> Iterator[None]:
    """While it lasts, the toy task is one of the tasks."""
    before = clinrl.tasks.__path__
    clinrl.tasks.__path__ = [*before, str(HOME)]
    try:
        yield
    finally:
        clinrl.tasks.__path__ = before
        sys.modules.pop("clinrl.tasks.toy", None)
        vars(clinrl.tasks).pop("toy", None)


def params(**changes: Any) -> Params:
    """The toy's params; `changes` replaces whole sections."""
    return Params.model_validate(json.loads(json.dumps(PARAMS)) | changes)


def prove(data: str = "d1") -> None:
    """Write the proofs that training asks for, as `validate` and `probe` leave them behind."""
    named = {"data": {"name": data, "identity": identity(read_manifest(paths.cases(data)))}}
    write_json(paths.data_proof(data), named)
    for version in PARAMS["versions"]:
        write_json(paths.probe_proof(version), named)
