"""A project about the audit whose models are scripts: known policies play its exam and its published protocol."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from ruamel.yaml import YAML

from clinrl import paths
from clinrl.analysis.exam import build as build_report
from clinrl.artifacts import identity, read_manifest, seal, staged, write_json
from clinrl.benchmarks import protocol
from clinrl.config.params import Params
from clinrl.data import dataset
from clinrl.data.dataset import read_cases
from clinrl.evaluation import answers, evaluate
from clinrl.models.chat import Completion, write_turn
from clinrl.models.generate import Prompt
from clinrl.models.judges import Judges
from clinrl.tasks.base import get_task
from clinrl.types import Case, Message, Transcript
from dolls import PARAMS as DOLL
from once import once
from samplers import ScriptedSampler

TASK = get_task("audit")
Policy = Callable[[Case, Random], Transcript]
LORA = {"rank": 2, "alpha": 4.0, "targets": "all-linear"}
SCALES = ("embedded", "full")
SETTINGS = {
    "task": "audit", "exam": "x1", "seeds": [42, 137], "levels": ["easy", "medium", "hard"], "temperature": 1.0,
    "episodes": 4,
}  # fmt: skip
PARAMS: dict[str, Any] = {
    "scale": "embedded",
    "bases": {
        "audit": {
            "exam": "x1",
            "embedded": DOLL["bases"]["esi"]["embedded"],
            "full": {"repo": "Qwen/Qwen2.5-3B-Instruct", "revision": "main", "quantize": "nf4"},
        }
    },
    "modes": {
        mode: {
            "thinking": mode == "think", "temperature": 0.0, "max_new_tokens": dict.fromkeys(SCALES, 9000),
        }
        for mode in ("think", "direct")
    },
    "datasets": {
        "d1": {"task": "audit", "task_version": 2, "use": "train", "mix": "natural", "cases": 4, "seed": 7},
        "x1": {"task": "audit", "task_version": 2, "use": "exam", "mix": "natural", "cases": 36, "seed": 8},
    },
    "profiles": {
        "imitate": {
            "method": "sft", "modes": ["think", "direct"], "lora": LORA,
            "trainer": {scale: {"lr": 2.0e-3, "steps": 2, "batch": 2} for scale in SCALES},
        },
    },
    "versions": {
        "v1": {"task": "audit", "parent": "audit-base", "data": "d1", "exam": "x1", "profile": "imitate", "seed": 1},
        "v2": {"task": "audit", "parent": "v1", "data": "d1", "exam": "x1", "profile": "imitate", "seed": 2},
    },
    "protocols": {
        "bases": {"audit-base": SETTINGS},
        "versions": {"v1": SETTINGS | {"against": "audit-base"}, "v2": SETTINGS | {"against": "audit-base"}},
    },
}  # fmt: skip


def params(**changes: Any) -> Params:
    """The project's params; `changes` replaces whole sections."""
    return Params.model_validate(PARAMS | changes)


def build(project: Params, players: Mapping[str, Policy]) -> None:
    """Build the project in the working directory: empty models, and the exam as these policies answer it."""
    for data in project.datasets:
        dataset.stage(project, data)
        named = {"data": {"name": data, "identity": identity(read_manifest(paths.cases(data)))}}
        write_json(paths.data_proof(data), named)
    fields = {"task": "audit", "task_version": TASK.version, "spec": {}}
    with staged(paths.base("audit")) as out:
        base = identity(seal(out, kind="base", name="audit", inputs={}, **fields))
    for name, policy in players.items():
        with staged(paths.adapter(name)) as out:
            seal(out, kind="adapter", name=name, inputs={"base": base}, **fields)
        examine(project, name, policy)


def examine(project: Params, name: str, policy: Policy) -> None:
    """Let a script take the exam, and keep its transcripts as `evaluate` does."""
    cases = list(read_cases(paths.cases("x1"), TASK))
    run = answers.run_of(project, project.model(name), cases, identity(read_manifest(paths.cases("x1"))))
    with speaking(policy, cases):
        run = evaluate.answer_exam(project, run, Judges(paths.base("audit")))
    inputs = {"exam": run.exam_digest, "adapter": identity(read_manifest(paths.adapter(name)))}
    evaluate.keep(paths.graded(name), run, inputs)


@contextmanager
def speaking(policy: Policy, cases: Sequence[Case]) -> Iterator[None]:
    """While it lasts, a policy speaks where a model would be loaded: on these cases, by what their prompts say."""
    said = {TASK.prompt(case.facts)[-1].content: policy(case, Random(case.id)) for case in cases}

    def turn_after(messages: Sequence[Message]) -> Message:
        asked = next(message.content for message in messages if message.role == "user")
        turns = [turn for turn in said[asked].messages if turn.role == "assistant"]
        taken = sum(message.role == "assistant" for message in messages)
        return turns[taken] if taken < len(turns) else Message(role="assistant", content="Done.")

    class Speaker(ScriptedSampler):
        """Writes turns as the mode wants them."""

        def sample(self, prompts: Sequence[Prompt], *, thinking: bool, **how: Any) -> list[Completion]:
            self.reply = lambda messages: write_turn(turn_after(messages), thinking)
            return super().sample(prompts, thinking=thinking, **how)

    with pytest.MonkeyPatch.context() as patch:
        for module in (evaluate, protocol):
            patch.setattr(module, "open_sampler", lambda *_: Speaker(lambda _: ""))
        yield


def oracle(case: Case, rng: Random) -> Transcript:
    """The task's own best answer."""
    return TASK.gold(case, thinking=False)


def write_slipping() -> None:
    """In the working directory, a project whose base slips now and then."""
    build(params(), {"audit-base": TASK.policies()["mediocre"]})
    YAML(typ="safe").dump(PARAMS, Path("params.yaml"))


def reported() -> Path:
    """A folder with the same project and the reports of its exam, made once a test run. Only read it."""
    return once("audits", _write_reported)


def _write_reported() -> None:
    write_slipping()
    run = answers.open_run(params(), params().model("audit-base"))
    graded = {mode: answers.read_graded(paths.graded("audit-base") / f"{mode}.jsonl") for mode in run.modes}
    done = replace(run, graded=graded, adapter_digest=read_manifest(paths.graded("audit-base")).inputs["adapter"])
    for mode in run.modes:
        report = build_report(done, mode, others={}, tests=[])
        write_json(paths.report("audit-base") / f"{mode}.json", report.model_dump(mode="json"))
