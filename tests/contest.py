"""A project whose recipes were examined although nothing was trained: real imaging cases, scripted readers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from ruamel.yaml import YAML

import dolls
from clinrl import intervals, paths
from clinrl.artifacts import identity, read_manifest, staged, write_json
from clinrl.config.params import Params
from clinrl.data import dataset
from clinrl.data.dataset import read_cases
from clinrl.evaluation import answers, compare, evaluate
from clinrl.evaluation.record import record_of, write_record
from clinrl.tasks.base import get_task
from clinrl.tasks.imaging import judging
from clinrl.types import Case, Message, Transcript
from once import once
from valid_params import LORA

TASK = get_task("imaging")
RECIPES = ("plain", "better", "same")
SEEDS = (1, 2, 3)
COMPARISON: dict[str, Any] = {
    "task": "imaging",
    "columns": ["macro_f1", "exact", "kappa", "over_use", "recall_mba"],
    "quality": "statement_recall",
    "parts": "conditions",
    "arms": {recipe: [f"{recipe}-{seed}" for seed in SEEDS] for recipe in RECIPES}
    | {"blind": ["blind-1"], "terse": ["terse-1"]},
    "rivals": {"boosted trees": "trees"},
    "tests": [
        {"first": "better", "second": "plain", "says": "reading with care"},
        {"first": "same", "second": "plain", "says": "another name"},
        {"first": "plain", "second": "base, without_evidence", "says": "training"},
        {"first": "better", "second": "blind", "says": "evidence"},
        {"first": "better", "second": "boosted trees", "says": "a language model"},
    ],
    "partition": {"parent": "base", "random": "plain", "majority": "same", "labels": "better"},
    "published": {"plain": {"macro_f1": 0.335}},
    "published_parts": {"held_out": {"plain": {"macro_f1": 0.31}}},
}
PRIMARY: dict[str, Any] = {
    "measure": "exact", "modes": ["think", "direct"], "first": "better", "second": "plain", "effect": 10.0,
    "discordant": 0.4, "seed_sd": 2.0, "design_effect": 1.5,
}  # fmt: skip
"""What the comparison is not registered for, unless a test says so."""
BASE: dict[str, Any] = dolls.PARAMS["bases"]["esi"]
SIZES = {name: size for name, size in BASE["embedded"].items() if name not in ("template", "cases", "forget")}
JUDGES = {"embedded": {"second_judge": SIZES | {"lessons": 8}}, "full": {"second_judge": BASE["full"]}}
Reader = tuple[float, float]
"""How often the label is right, and how often a gold sentence is said."""


READERS: dict[str, Reader] = {
    "base": (0.4, 0.3), "plain": (0.55, 0.4), "better": (0.85, 0.8), "same": (0.55, 0.4), "blind": (0.5, 0.3),
    "terse": (0.5, 0.0),
}  # fmt: skip
"""One for each recipe, and for the base."""
CASES = 80
DRAWS = 110
"""Of an interval: enough for a difference that stands the correction for all tests."""


def mapping() -> dict[str, Any]:
    """The project's params.yaml."""
    data = {"task": "imaging", "task_version": 1}
    trainer = {scale: {"lr": 1.0e-3, "steps": 2, "batch": 2} for scale in ("embedded", "full")}
    recipe = {"method": "sft", "modes": ["think"], "lora": LORA, "trainer": trainer}
    versions = {f"{name}-{seed}": (name, seed) for name in RECIPES for seed in SEEDS}
    versions |= {"blind-1": ("blind", 1), "terse-1": ("terse", 1)}
    judges = {scale: BASE[scale] | {"judges": asked} for scale, asked in JUDGES.items()}
    return {
        "scale": "embedded",
        "bases": {"imaging": BASE | {"exam": "x1"} | judges},
        "modes": dolls.PARAMS["modes"],
        "datasets": {
            "d1": data | {"use": "train", "mix": "natural", "cases": 60, "seed": 7},
            "x1": data | {"use": "exam", "mix": "reporting", "cases": CASES, "seed": 8},
            "x2": data | {"use": "exam", "mix": "reporting", "cases": CASES, "seed": 9},
        },
        "profiles": dict.fromkeys((*RECIPES, "terse"), recipe) | {"blind": recipe | {"view": "without_evidence"}},
        "versions": {
            version: {
                "task": "imaging", "parent": "imaging-base", "data": "d1", "exam": "x1", "profile": name, "seed": seed,
            }
            for version, (name, seed) in versions.items()
        },
        "rivals": {"trees": {"task": "imaging", "data": ["d1"], "exam": "x1"}},
        "comparisons": {"recipes": COMPARISON},
    }  # fmt: skip


@contextmanager
def drawn() -> Iterator[None]:
    """Intervals of as many draws as those of the project."""
    with mock.patch.object(intervals, "RESAMPLES", DRAWS):
        intervals._case_draws.cache_clear()
        yield
    intervals._case_draws.cache_clear()


def compared() -> Path:
    """A folder with the project, its recipes compared; made once a test run. Copy it; do not write to it."""
    return once("contest", build)


def build() -> None:
    """Build it in the working directory."""
    with drawn():
        compare.stage(examined(), "recipes")


def examined() -> Params:
    """The project with the answers and reports of all models."""
    content = mapping()
    YAML(typ="safe", pure=True).dump(content, Path("params.yaml"))
    params = Params.model_validate(content)
    for data in ("d1", "x1"):
        dataset.stage(params, data)
        named = {"data": {"name": data, "identity": identity(read_manifest(paths.cases(data)))}}
        write_json(paths.data_proof(data), named)
    examine(params, "imaging-base", READERS["base"])
    evaluate.stage(params, "trees")
    for version, spec in params.versions.items():
        examine(params, version, READERS[spec.profile])
    return params


def examine(params: Params, name: str, reader: Reader, seed: str | None = None) -> None:
    """Let a scripted reader answer the exam as `name`, and write what `clinrl evaluate` writes."""
    model = params.model(name)
    run = answers.open_run(params, model)
    graded = {}
    for mode, spec in params.modes.items():
        for variant in (model.variant, *(model.variants if spec.thinking else ())):
            shown = [other for case in run.cases if (other := _seen(case, variant, model.variant)) is not None]
            turns = [turn(case, reader, f"{seed or name}/{variant}", thinking=spec.thinking) for case in shown]
            key = mode if variant == model.variant else f"{mode}.{variant}"
            graded[key] = evaluate.grade(TASK, mode, shown, turns, model.reward)
    run = replace(run, adapter_digest="a" * 64, graded=graded)
    evaluate.keep(paths.graded(name), run, {"exam": run.exam_digest, "adapter": "a" * 64})
    training = list(read_cases(paths.cases(model.data), TASK)) if model.data else []
    parent = {mode: found for mode in run.modes if (found := answers.load_parent(run, mode)) is not None}
    with staged(paths.report(name)) as out:
        reports = evaluate.reports_of(run, training, parent, Agreeable(), evaluate.seen_by(params, run))
        evaluate.write_reports(out, run, reports)
    write_record(TASK, record_of(run), model.exam, model.data)


class Agreeable(dict[Any, Any]):
    """A second judge that gives everybody the same verdict."""

    def __missing__(self, ask: Any) -> str:
        return judging.reply((7, 8, 9))


def _seen(case: Case, view: str, own: str) -> Case | None:
    if view == "given":
        return case
    return TASK.reporting.variants[view](case) or (case if view == own else None)


def turn(case: Any, reader: Reader, seed: str, *, thinking: bool) -> Transcript:
    """What a reader says: the gold label and sentences so often, else another label and silence."""
    rng = Random(f"{seed}/{case.id}")
    right, care = reader
    label = TASK.label(case)
    if rng.random() >= right:
        label = rng.choice([other for other in TASK.labels if other != label])
    said = " ".join(sentence for sentence in case.key.reasoning if rng.random() < care) if thinking else None
    return Transcript(
        messages=(Message(role="assistant", content=f"<answer>{label}</answer>", thinking=said),), stop="answered"
    )
