"""The cases and the metrics of a task of clinrl, for lm-evaluation-harness. Answers are read by clinrl's own parser.

It is copied beside the task's YAML, which names its functions, and needs clinrl where the harness runs.
"""

import json
from pathlib import Path
from typing import Any

from clinrl.models.chat import read_whole
from clinrl.tasks.base import get_task
from clinrl.tasks.parts import verdicts
from clinrl.types import transcript_of

HERE = Path(__file__).parent


def load(**_: Any) -> dict[str, Any]:
    """The cases that lie beside this file."""
    from datasets import Dataset

    lines = (HERE / "cases.jsonl").read_text(encoding="utf-8").splitlines()
    return {"test": Dataset.from_list([json.loads(line) for line in lines])}


def process(row: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Whether each share counts the answer to a case; without those in whose denominator the case is not."""
    task = get_task(row["task"])
    answer = task.parse(transcript_of(read_whole(results[0])))
    return verdicts(task.compared, json.loads(row["gold"]), answer)
