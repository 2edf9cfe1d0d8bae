"""A task of one turn as a folder for lm-evaluation-harness: YAML files, cases, and a scorer with clinrl's parser.

There are two tasks, with and without `_think`, since the scorer cannot see whether the prompt opened a think block.
"""

import json
import shutil
from pathlib import Path
from typing import Any, Final

from clinrl import paths
from clinrl.artifacts import canonical_json, replaced, write_text
from clinrl.config.params import Params
from clinrl.data.dataset import read_cases
from clinrl.errors import DataError, ParamsError, echo
from clinrl.tasks.base import Task, get_task
from clinrl.tasks.importing import is_imported
from clinrl.types import Case

EXAM_IS_OPEN: Final = "this exam shows nothing about a model that was trained on these cases"


def stage(params: Params, name: str, *, out: Path | None = None, open_exam: bool = False) -> None:
    """Write a task's folder, with cases of the pool mine, or with `open_exam` its exam; print the folder.

    Raises ParamsError for a task of several turns or without such a data set, ArtefactError if its cases are not here,
    and DataError if they are imported.
    """
    from ruamel.yaml import YAML

    task = get_task(name)
    if task.episodes is not None:
        raise ParamsError(
            f"{name} is played in several turns, and lm-eval asks once; `clinrl export verifiers` has them"
        )
    data, cases = exported_cases(params, task, open_exam=open_exam)
    target = (out or paths.EXPORTS) / f"clinrl_{name}"
    prompts = [task.prompt(case.facts) for case in cases]
    rows = [
        {"id": case.id, "task": name, "text": prompt[-1].content, "gold": json.dumps(task.label(case))}
        for case, prompt in zip(cases, prompts, strict=True)
    ]
    system = {message.content for prompt in prompts for message in prompt if message.role == "system"}
    if len(system) > 1:
        raise ParamsError(f"the harness gives all cases one system turn, and those of {name} have {len(system)}")
    budget = max(params.budget(mode, name) for mode in params.modes)
    with replaced(target, "clinrl export lm-eval") as folder:
        write_text(folder / "cases.jsonl", "".join(canonical_json(row) + "\n" for row in rows))
        shutil.copyfile(Path(__file__).with_name("lm_eval_scorer.py"), folder / "scorer.py")
        content = {
            "custom_dataset": _function("load"),
            "test_split": "test",
            "output_type": "generate_until",
            "description": "".join(system),
            "doc_to_text": "{{text}}",
            "doc_to_target": "{{gold}}",
            "metric_list": [
                {"metric": metric, "aggregation": "mean", "higher_is_better": of.worse == "lower"}
                for metric, of in task.compared.items()
            ],
            "metadata": {"version": task.version, "cases": data},
        }
        for suffix, function in (("", "process"), ("_think", "process_opened")):
            named = {"task": f"clinrl_{name}{suffix}", **content, "process_results": _function(function)}
            named["generation_kwargs"] = {"until": [], **_decoding(params, name, bool(suffix)), "max_gen_toks": budget}
            with (folder / f"clinrl_{name}{suffix}.yaml").open("w", encoding="utf-8") as stream:
                YAML().dump(named, stream)
    announce(target, open_exam=open_exam)


def _decoding(params: Params, task: str, thinking: bool) -> dict[str, Any]:
    """As transformers names it, of the first mode that thinks, or does not; of the first of all if none is such."""
    modes = [params.mode(mode, task) for mode in params.modes]
    mode = next((one for one in modes if one.thinking is thinking), modes[0])
    found = {"do_sample": mode.temperature > 0, "temperature": mode.temperature, "repetition_penalty": 1.0}
    if mode.temperature > 0:
        found |= {"top_p": mode.top_p, "top_k": 0}  # a checkpoint's own value would replace any that is left out
    return found


def exported_cases(params: Params, task: Task, *, open_exam: bool) -> tuple[str, list[Case]]:
    """Name and cases of the data set that is exported of a task: its first of the pool mine, or its exam.

    Raises ParamsError if there is none, ArtefactError if the cases are not here, DataError if they are imported.
    """
    mine = [data for data, of in params.datasets.items() if (of.task, of.use) == (task.name, "mine")]
    if not open_exam and not mine:
        raise ParamsError(f"params.yaml has no data set of {task.name} with use: mine; name one, or give --open-exam")
    data = params.bases[task.name].exam if open_exam else mine[0]
    cases = list(read_cases(paths.cases(data), task))
    if any(map(is_imported, cases)):
        raise DataError(f"{data} holds somebody's records, whose text must not leave; nothing was written")
    return data, cases


def announce(target: Path, *, open_exam: bool) -> None:
    """Print the path of an export, with a warning on stderr if it holds the exam."""
    if open_exam:
        echo(f"THE EXAM IS OPEN: {EXAM_IS_OPEN}")
    print(target)


def _function(name: str) -> Any:
    from ruamel.yaml.comments import TaggedScalar

    return TaggedScalar(f"scorer.{name}", tag="!function")
