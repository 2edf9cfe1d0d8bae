"""A small project in which every stage of dvc.yaml is quick: `python scripted.py <address>` stands for `clinrl stage`.

Cases, streams, specs, manifests, answers' grades and reports are real; only what a model would do is scripted: training
writes a few numbers, and the exam is answered by the gold turns, with a mistake every so often.
"""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from clinrl import paths
from clinrl.analysis import baselines
from clinrl.analysis.run import Run
from clinrl.artifacts import identity, read_manifest, seal, staged, write_json, write_text
from clinrl.config.params import Params, load_params
from clinrl.data import dataset, validate
from clinrl.evaluation import error_analysis, evaluate
from clinrl.provenance import dvc_yaml, stages
from clinrl.reports import figures, model_card
from clinrl.runtime import starter
from clinrl.tasks.base import get_task
from clinrl.training import launch
from clinrl.types import Message, Transcript

ROOT = Path(__file__).parents[2]
SLOW = Path("slow")
"""A file with seconds: how long each training and each exam takes at least."""
FAIL = Path("fail")
"""A file with the stage that fails, and its exit code if that is not 1."""
MISTAKES = {"esi-base": 2, "v1": 5, "v2": 10}
"""Every so many cases are answered wrongly; never, for any other name."""
NO_BETTER = Path("no-better")
"""A file that makes every further version as bad as v2."""

PARAMS: dict[str, Any] = {
    "merges": {
        "folds": {"v2-full": {"task": "esi", "version": "v2", "exam": "x1"}},
        "blends": {
            "v1-v2": {
                "task": "esi", "first": "v1", "second": "v2", "method": "cat", "weights": [0.5, 0.5], "exam": "x1"
            }
        },
    },
    "mining": {},
    "imports": {},
    "external": {},
    "rivals": {},
    "protocols": {"bases": {}, "versions": {}},
    "gates": {
        "esi": {
            "least_cases": 20,
            "limits": {
                "critical_under": {"max": {"embedded": 0.5, "full": 0.5}, "may_rise": 0.0},
                "exact": {"min": {"embedded": 0.3, "full": 0.3}, "may_fall": 0.0, "paired": True},
            },
        }
    },
    "schedules": {"esi": {"cron": "0 3 * * 1", "answer_within_s": 60}},
}  # fmt: skip
MISSED = "severe_pain"
"""The rule that every version misses when its errors are mined, but for those that make no mistakes."""


IGNORED = "\n".join(
    ["/data/cases/", "/data/adapters/*", "!/data/adapters/*-base/", "/data/graded/", "/data/docs/", "/data/merged/",
     "/data/mined/", "/data/reports/**/*.png", "/data/reports/**/predictions_*.csv", "/.clinrl/", "/mlruns/",
     "__pycache__/", "worked.jsonl", "*.partial-*", "/.dvc/cache/", "/.dvc/tmp/", "/.dvc/config.local", ""]
)  # fmt: skip
"""What git ignores of a project."""


def sections() -> dict:
    """params.yaml of the scripted project: the doll's first two versions, with a gate, a schedule and a fold."""
    import dolls  # beside the tests, where DVC's stages do not look

    found = {**dolls.PARAMS, **PARAMS}
    found["versions"] = {name: dolls.PARAMS["versions"][name] for name in ("v1", "v2")}
    exam = dolls.PARAMS["datasets"]["x1"]
    return {**found, "datasets": {**found["datasets"], "x1": {**exam, "cases": 40, "seed": 9}}}


def write_project(folder: Path, sections: dict[str, Any]) -> None:
    """Write the parameters, and the project's dvc.yaml with this program in the place of `python -m clinrl stage`."""
    import laid  # beside the tests, where DVC's stages do not look

    graph = (ROOT / "dvc.yaml").read_text(encoding="utf-8")
    (folder / "dvc.yaml").write_text(graph.replace("python -m clinrl stage", f"python {__file__}"))
    laid.lay(folder, sections)


def with_drafts(content: Any) -> None:
    """Mine data for v2, and a schedule that drafts."""
    content["datasets"]["m1"] = {**content["datasets"]["x1"], "use": "mine", "mix": "reporting", "cases": 320}
    content["mining"] = {"v2": {"task": "esi", "data": "m1"}}
    content["schedules"]["esi"]["draft"] = True
    content["plans"] = {
        "esi": {
            "changes": {
                "ancestors": ["v1"],
                "exam": "x1",
                "most_cases": 100,
                "recipes": ["imitate", "reward"],
                "fields": {
                    "reward.modifiers": {"min": -1.0, "max": 1.0},
                    **{
                        f"trainer.{scale}.{field}": {"max": 100.0}
                        for scale in ("embedded", "full")
                        for field in ("lr", "steps")
                    },
                },
            },
            "protocol": {"screen": 0.05},
            "budget": {"alpha": 0.2, "spend": 0.6, "looks": 1},
            "impact": "A worse model under-triages more patients.",
        }
    }


def git(*words: str) -> str:
    """What git says in the working directory."""
    done = subprocess.run(["git", *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit() -> None:
    """Make the working directory a person's checkout, with all of it committed."""
    write_text(Path(".gitignore"), IGNORED)
    for words in (["init", "-q", "-b", "main"], ["add", "--all"], ["commit", "-qm", "begun"]):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True)


def main(address: str) -> None:
    """Run one stage in the working directory."""
    starter.follow()
    if address == stages.FIRST:
        return dvc_yaml.prove(Path("params.yaml"))
    sys.argv[1:] = stage, name = stages.command_of(address)
    failing, *code = FAIL.read_text().split() if FAIL.exists() else [""]
    if failing == stage:
        print(f"clinrl: {stage} of {name} fails today", file=sys.stderr)
        sys.exit(int(*code) or 1)
    return run(load_params(), stage, name)


def run(params: Params, stage: str, name: str) -> None:
    """Do what a stage's command does."""
    {
        "base": base, "dataset": dataset.stage, "validate": prove, "probe": probe, "train": learn, "evaluate": examine,
        "merge": merge, "mine": mined,
    }[stage](params, name)  # fmt: skip


def base(params: Params, task: str) -> None:
    """A base of one tensor, and the adapter above it that changes nothing."""
    version = get_task(task).version
    common = {"task": task, "task_version": version, "spec": {}}
    with staged(paths.base(task)) as out:
        _weights(out / "model.safetensors", 0)
        write_json(out / "config.json", {"model_type": "scripted"})
        write_json(out / "tokenizer.json", {})
        sealed = seal(out, kind="base", name=task, inputs={}, **common)
    with staged(paths.adapter(f"{task}-base")) as out:
        seal(out, kind="adapter", name=f"{task}-base", inputs={"base": identity(sealed)}, **common)


def prove(params: Params, data: str) -> None:
    """The proof of a data set's validation, and its pages."""
    proof = {"data": {"name": data, "identity": identity(read_manifest(paths.cases(data)))}}
    write_json(paths.data_proof(data), proof | {"summary": {}, "expectations": []})
    validate.write_page(paths.data_proof(data))


def probe(params: Params, version: str) -> None:
    """The proof of a version's probe."""
    data = params.versions[version].data
    write_json(
        paths.probe_proof(version), {"data": {"name": data, "identity": identity(read_manifest(paths.cases(data)))}}
    )


def learn(params: Params, version: str) -> None:
    """An adapter that follows from its spec."""
    _take_time()
    spec, _ = launch.resolve(params, version)
    fields = launch.manifest_fields(spec)
    steps = spec["trainer"]["steps"]
    with staged(paths.adapter(version)) as out:
        _weights(out / "adapter_model.safetensors", spec["seed"])
        write_json(out / "adapter_config.json", {"peft_type": "LORA", "r": spec["lora"]["rank"]})
        write_json(out / "tokenizer.json", {})
        write_text(out / "chat_template.jinja", "{{ messages }}\n")
        lines = ({"step": step, "loss": 1 / step, "reward": step / steps} for step in range(1, steps + 1))
        write_text(out / "history.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
        write_text(out / "README.md", model_card.write(fields, lineage=params.lineage(version)))
        seal(out, **fields)


def examine(params: Params, name: str) -> None:
    """The exam, answered by the script. No table of simple policies and no drawing, which take longest."""
    _take_time()

    def answer_exam(_params: Params, run: Run, *_: Any) -> Run:
        model = run.model
        graded = {
            mode: evaluate.grade(
                model.task, mode, run.cases, [_answer(model, case, i, mode) for i, case in enumerate(run.cases)],
                model.reward,
            )
            for mode in run.modes
        }  # fmt: skip
        return replace(run, graded=graded)

    evaluate.answer_exam = answer_exam
    evaluate.baselines.answers = lambda *_: {}
    assert baselines is evaluate.baselines
    figures.confusion = lambda _counts, _title, out, **_: out.write_bytes(b"picture")
    figures.curves = lambda _history, _title, out, _labels: out.write_bytes(b"picture")
    evaluate.stage(params, name)


def mined(params: Params, name: str) -> None:
    """The mine data, answered wrongly where one rule decides."""

    def answer_exam(_params: Params, run: Run, *_: Any) -> Run:
        model = run.model
        transcripts = [Transcript(messages=(_mined(model, case),), stop="answered") for case in run.cases]
        grades = {mode: evaluate.grade(model.task, mode, run.cases, transcripts, model.reward) for mode in run.modes}
        return replace(run, graded=grades)

    error_analysis.answer_exam = answer_exam
    figures.groups = lambda _groups, _title, out: out.write_bytes(b"picture")
    error_analysis.stage(params, name)


def _mined(who: Any, case: Any) -> Message:
    if case.key.rule == MISSED and (who.name in MISTAKES or NO_BETTER.exists()):
        return Message(role="assistant", content="ANSWER: ESI 4")
    return who.task.gold(case, thinking=False).messages[-1]


def merge(params: Params, name: str) -> None:
    """A full model of one tensor."""
    _take_time()
    fold = params.merges.folds[name]
    inputs = {"base": paths.base(fold.task), fold.version: paths.adapter(fold.version)}
    with staged(paths.merged(name)) as out:
        _weights(out / "model.safetensors", 1)
        write_json(out / "config.json", {"model_type": "scripted"})
        write_json(out / "tokenizer.json", {})
        write_text(out / "README.md", f"---\nlibrary_name: transformers\n---\n\n# {name}\n")
        seal(
            out,
            kind="merged",
            name=name,
            task=fold.task,
            task_version=get_task(fold.task).version,
            spec={"method": "fold", "versions": {fold.version: 1.0}},
            inputs={key: identity(read_manifest(folder)) for key, folder in inputs.items()},
        )


def _answer(who: Any, case: Any, place: int, mode: str) -> Transcript:
    turn = who.task.gold(case, thinking=mode == "think").messages[-1]
    every = MISTAKES.get(who.name, MISTAKES["v2"] if NO_BETTER.exists() else None)
    if every and place % every == 0:
        turn = Message(role="assistant", content="I do not know.", thinking=turn.thinking)
    return Transcript(messages=(turn,), stop="answered")


def _weights(path: Path, seed: int) -> None:
    save_file({"weight": np.full((2, 2), seed, dtype=np.float32)}, path, metadata={"format": "pt"})


def _take_time() -> None:
    with Path("worked.jsonl").open("a") as log:
        started = time.time()
        time.sleep(float(SLOW.read_text()) if SLOW.exists() else 0)
        log.write(json.dumps({"words": sys.argv[1:], "from": started, "to": time.time()}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
