"""The cases and the metrics of a clinrl task, for lm-evaluation-harness. clinrl's own parser reads the answers.

`clinrl export lm-eval` copies this file beside the task's YAML files, which name its functions. The harness needs an
environment that has clinrl.
"""

import json
from pathlib import Path
from typing import Any

from clinrl.models.chat import read_turn, read_whole
from clinrl.tasks.base import get_task
from clinrl.tasks.parts import verdicts
from clinrl.types import Message, transcript_of

HERE = Path(__file__).parent


def load(**_: Any) -> dict[str, Any]:
    """The cases of the file beside this one."""
    from datasets import Dataset

    with (HERE / "cases.jsonl").open(encoding="utf-8") as lines:
        return {"test": Dataset.from_list([json.loads(line) for line in lines])}


def process(row: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Share to whether it counts an answer, as 0 or 1; shares whose denominator excludes the case are left out."""
    return _counted(row, read_whole(results[0]))


def process_opened(row: dict[str, Any], results: list[str]) -> dict[str, float]:
    """The same, where the prompt opened a think block: a thought that was cut off before its end is no answer."""
    return _counted(row, read_turn(results[0], is_opened=True))


def _counted(row: dict[str, Any], turn: Message) -> dict[str, float]:
    task = get_task(row["task"])
    return verdicts(task.compared, json.loads(row["gold"]), task.parse(transcript_of(turn)))
