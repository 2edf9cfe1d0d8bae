"""A project whose versions were examined although nothing was trained: adapters of random weights, invented answers.

Everything has the form, the manifests and the digests that the stages write, so that what is built on finished
versions (registry, gate, release, lineage) can be tested in seconds.
"""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy
from ruamel.yaml import YAML
from safetensors.numpy import save_file

import dolls
import locks
from clinrl import paths
from clinrl.artifacts import canonical_json, identity, read_manifest, seal, staged, write_json, write_text
from clinrl.config.params import Params
from clinrl.data import dataset
from clinrl.registry import versions
from clinrl.registry.versions import Entry
from clinrl.release import promotion
from clinrl.release.gate import Decision
from clinrl.signing import approval as approvals
from clinrl.training import launch
from once import once

RIGHT: Sequence[int] = (0,)
"""An answer pattern: every case right."""
GOOD: Sequence[int] = (0, 0, 0, 0, 2)
"""Better than anybody who does not read, but too fond of level 2."""
DATA = dolls.PARAMS["datasets"]
DATASETS = DATA | {"x1": DATA["x1"] | {"cases": 40, "seed": 37}}
"""An exam large enough to tell reading from guessing."""
PARENTS = {"v1": "esi-base", "v2": "v1", "v3": "esi-base"}
MERGES = {
    "folds": {"v2-full": {"task": "esi", "version": "v2", "exam": "x1"}},
    "blends": {
        "v1-v2": {"task": "esi", "first": "v1", "second": "v2", "method": "cat", "weights": [0.5, 0.5], "exam": "x1"}
    },
}
GATES = {
    "esi": {
        "least_cases": 10,
        "limits": {
            "critical_under": {"max": {"embedded": 0.35, "full": 0.0}, "may_rise": 0.0},
            "exact": {"may_fall": 0.0, "paired": True},
        },
    }
}

SECTIONS = {"gates": GATES, "merges": MERGES, "datasets": DATASETS}
ANSWERS = {"v1": RIGHT, "v2": GOOD, "v3": [5], "v2-full": GOOD, "v1-v2": RIGHT}
"""v1 is as good as it gets, v2 calls too much urgent, v3 is dangerous.

The full model of v2 answers as v2 does, and the blend of v1 and v2 as v1.
"""


def params() -> Params:
    """The project's params."""
    return dolls.params(**SECTIONS)


def registered() -> Path:
    """A folder with the project in which all of ANSWERS are registered, made once a test run. Only `copy` it."""
    return once("examined", register)


MINE = {"task": "esi", "task_version": 2, "use": "mine", "mix": "natural", "cases": 6, "seed": 9}


def mining() -> Params:
    """The project's params with a data set to mine."""
    return dolls.params(**SECTIONS | {"datasets": DATASETS | {"m1": MINE}})


def answered() -> Path:
    """A folder in which v1 and v2 took their exam, with a data set to mine, made once a test run. Only read it."""

    def make() -> None:
        with dolls.few_draws():
            build({"v1": RIGHT, "v2": GOOD})
        YAML().dump(dolls.PARAMS | SECTIONS | {"datasets": DATASETS | {"m1": MINE}}, Path("params.yaml"))
        dataset.stage(mining(), "m1")

    return once("answered", make)


def register() -> None:
    """Build the project in the working directory and register all of it."""
    with dolls.few_draws():
        build(ANSWERS)
        for name in ANSWERS:
            versions.register(params(), name)


def copy(project: Path, to: Path) -> None:
    """Copy a project, without the bytes of the code in its registered models: hundreds of files that nobody writes to.

    They become hard links. Who alters one puts a new file in its place.
    """

    def place(source: str, target: str) -> None:
        if "/code/" in source:
            os.link(source, target)
        else:
            shutil.copy(source, target)

    shutil.copytree(project, to, dirs_exist_ok=True, copy_function=place)


def build(answers: dict[str, Sequence[int]]) -> Params:
    """Build the project in the working directory, with the answers of versions and merges, as patterns."""
    YAML().dump(dolls.PARAMS | SECTIONS, Path("params.yaml"))
    params = dolls.params(**SECTIONS)
    for name in ("d1", "x1"):
        dataset.stage(params, name)
    for data in ("d1", "x1"):
        named = {"data": {"name": data, "identity": identity(read_manifest(paths.cases(data)))}}
        write_json(paths.data_proof(data), named)
        write_text(paths.data_docs(data) / "index.html", f"<html>{data}</html>")
    for version in params.versions:
        write_json(paths.probe_proof(version), {"data": {"name": "d1"}})
    with staged(paths.base("esi")) as out:
        save_file({"w": numpy.zeros(2, dtype="float32")}, out / "model.safetensors")
        (out / "config.json").write_text('{"dtype": "float32"}\n')
        seal(out, kind="base", name="esi", task="esi", task_version=2, spec={"scale": "embedded"}, inputs={})
    with staged(paths.adapter("esi-base")) as out:
        base = identity(read_manifest(paths.base("esi")))
        seal(out, kind="adapter", name="esi-base", task="esi", task_version=2, spec={}, inputs={"base": base})
    dolls.examine(params, "esi-base", [1])
    for name, pattern in answers.items():
        if name in params.versions:
            train(name)
        else:
            merge(params, name)
        dolls.examine(params, name, pattern)
    locks.record(params)
    return params


def examine(params: Params, name: str, pattern: Sequence[int]) -> None:
    """Let a name sit its exam again, and have dvc.lock record it."""
    dolls.examine(params, name, pattern)
    locks.record(params)


def promote(params: Params, name: str, approver: str, decision: Decision) -> Entry:
    """Promote with the approval of a person who uses this machine's key."""
    approval = approvals.sign_approval(params, decision.digest, approvals.check_approver(approver))
    return promotion.promote(params, name, decision=decision, approval=approval)


def merge(params: Params, name: str) -> None:
    """Put weights where merging would put a full model or an adapter, with the manifest that it would write."""
    full = name in params.merges.folds
    with staged(paths.merged(name)) as out:
        weights = {"w": numpy.ones(2, dtype="float32")}
        save_file(weights, out / ("model.safetensors" if full else "adapter_model.safetensors"))
        write_json(out / ("config.json" if full else "adapter_config.json"), {"r": 4})
        write_text(out / "README.md", f"---\nlibrary_name: transformers\n---\n\n# {name}\n")
        inputs = {part: identity(read_manifest(paths.adapter(part))) for part in params.parts(name)}
        inputs["base"] = identity(read_manifest(paths.base("esi")))
        spec = {"scale": "embedded", "method": "fold" if full else "cat"}
        seal(out, kind="merged", name=name, task="esi", task_version=2, spec=spec, inputs=inputs)


def train(name: str, seed: int = 0) -> None:
    """Put random weights where training would put an adapter, with the manifest that it would write."""
    parent = PARENTS[name]
    weights = numpy.random.default_rng([seed, *name.encode()]).normal(size=(2, 2)).astype("float32")
    with staged(paths.adapter(name)) as out:
        save_file({"lora": weights}, out / "adapter_model.safetensors")
        write_json(out / "adapter_config.json", {"peft_type": "LORA", "r": 2})
        lines = [{"step": step, "loss": 1 / step, "reward": 0.1 * step} for step in (1, 2, 3)]
        write_text(out / "history.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
        write_text(out / "README.md", f"---\nlibrary_name: peft\n---\n\n# {name}\n")
        inputs = {
            "base": identity(read_manifest(paths.base("esi"))),
            "parent": identity(read_manifest(paths.adapter(parent))),
            "data": identity(read_manifest(paths.cases("d1"))),
        }
        seal(
            out,
            **launch.manifest_fields(json.loads(canonical_json(launch.requested(params(), name) | {"inputs": inputs}))),
        )
