"""A project whose versions were examined although nothing was trained: adapters of random weights, invented answers.

Everything has the form, the manifests and the digests that the stages write, so that what is built on finished
versions (registry, gate, release, lineage) can be tested in seconds.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy
from ruamel.yaml import YAML
from safetensors.numpy import save_file

import dolls
from clinrl import dataset, paths
from clinrl.artefacts import identity, read_manifest, seal, staged, write_json, write_text
from clinrl.params import Params

RIGHT: Sequence[int] = ()
"""An answer pattern: every case right."""
PARENTS = {"v1": "esi-base", "v2": "v1", "v3": "esi-base"}
GATES = {
    "esi": {
        "least_cases": 10,
        "limits": {
            "dangerous": {"max": {"embedded": 0.35, "full": 0.0}, "may_rise": 0.0},
            "exact": {"may_fall": 0.0, "paired": True},
        },
    }
}


def build(answers: dict[str, Sequence[int]]) -> Params:
    """Build the project in the working directory, with each version's answers: a pattern of levels, or `RIGHT`."""
    YAML(typ="safe").dump(dolls.PARAMS | {"gates": GATES}, Path("params.yaml"))
    params = dolls.params(gates=GATES)
    for name in ("d1", "x1"):
        dataset.stage(params, name)
    for data in ("d1", "x1"):
        named = {"data": {"name": data, "identity": identity(read_manifest(paths.cases(data)))}}
        write_json(paths.data_proof(data), named)
    with staged(paths.base("esi")) as out:
        save_file({"w": numpy.zeros(2, dtype="float32")}, out / "model.safetensors")
        (out / "config.json").write_text('{"dtype": "float32"}\n')
        seal(out, kind="base", name="esi", task="esi", task_version=1, spec={"scale": "embedded"}, inputs={})
    with staged(paths.adapter("esi-base")) as out:
        base = identity(read_manifest(paths.base("esi")))
        seal(out, kind="adapter", name="esi-base", task="esi", task_version=1, spec={}, inputs={"base": base})
    dolls.sit(params, "esi-base", [1])
    for name, pattern in answers.items():
        train(name)
        dolls.sit(params, name, pattern)
    return params


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
        spec = {"scale": "embedded", "parent": parent, "data": "d1", "seed": seed, "method": "sft"}
        seal(out, kind="adapter", name=name, task="esi", task_version=1, spec=spec, inputs=inputs)
