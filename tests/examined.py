"""A project whose versions were examined although nothing was trained: adapters of random weights, invented answers.

Everything has the form, the manifests and the digests that the stages write, so that what is built on finished
versions (registry, gate, release, lineage) can be tested in seconds.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import numpy
from ruamel.yaml import YAML
from safetensors.numpy import save_file

import dolls
from clinrl import dataset, evaluate, paths
from clinrl.artefacts import canonical_json, identity, read_manifest, seal, staged, write_json, write_text
from clinrl.dataset import read_cases
from clinrl.params import Params
from clinrl.records import Message, Transcript
from clinrl.task import get_task

RIGHT = "gold"
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


def build(answers: dict[str, object]) -> Params:
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
    sit("esi-base", [1], params)
    for name, pattern in answers.items():
        train(name)
        sit(name, pattern, params)
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


def sit(name: str, pattern: object, params: Params) -> None:
    """Let a version answer the exam with a pattern of levels, repeated, or rightly, in every mode."""
    who = evaluate.examinee(params, name)
    task = get_task("esi")
    cases = list(read_cases(paths.cases("x1"), task))
    exam = identity(read_manifest(paths.cases("x1")))
    levels: Sequence[int] = [task.label(case) for case in cases] if pattern == RIGHT else list(pattern)  # type: ignore[call-overload]
    turns = [
        Message(role="assistant", content=f"ANSWER: ESI {level}")
        for level, _ in zip(cycle(levels), cases, strict=False)
    ]
    transcripts = [Transcript(messages=(turn,), stop="answered") for turn in turns]
    graded = {mode: evaluate.grade(who.task, mode, cases, transcripts, who.reward) for mode in params.modes}
    blank = {mode: evaluate.sitting_of(who, mode, params, exam, cases) for mode in params.modes}
    adapter, base = identity(read_manifest(who.folder)), identity(read_manifest(paths.base("esi")))
    with staged(paths.graded(name)) as out:
        for mode, lines in graded.items():
            rows = (canonical_json(line.model_dump(mode="json")) + "\n" for line in lines)
            write_text(out / f"{mode}.jsonl", "".join(rows))
        spec = {"modes": {mode: dict(like.mode_spec) for mode, like in blank.items()}}
        inputs = {"exam": exam, "adapter": adapter, "base": base}
        seal(out, kind="graded", name=name, task="esi", task_version=1, spec=spec, inputs=inputs)
    after = {mode: replace(like, answers=[line.answer for line in graded[mode]]) for mode, like in blank.items()}
    parent = {mode: evaluate.load_sitting(who.parent, like, cases) for mode, like in blank.items() if who.parent}
    shutil.rmtree(paths.report(name), ignore_errors=True)
    with staged(paths.report(name)) as out:
        evaluate.write_reports(out, who, adapter, cases, [], graded, after, parent)
