"""The cases and the metrics of a task of clinrl, for lm-evaluation-harness. Answers are read by clinrl's own parser.

It is copied beside the task's YAML, which names its functions, and needs clinrl where the harness runs.
"""

import json
from pathlib import Path
from typing import Any

from clinrl.models.chat import CLOSE, OPEN, read_turn
from clinrl.tasks.base import get_task
from clinrl.tasks.parts import Share
from clinrl.types import transcript_of

HERE = Path(__file__).parent


def load(**_: Any) -> dict[str, Any]:
    """The cases that lie beside this file."""
    from datasets import Dataset

    lines = (HERE / "cases.jsonl").read_text(encoding="utf-8").splitlines()
    return {"test": Dataset.from_list([json.loads(line) for line in lines])}


def process(row: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Whether each share counts the answer to a case; without those in whose denominator the case is not.

    A prompt may have opened the think block, so a text may close what it did not open.
    """
    task, text = get_task(row["task"]), results[0]
    turn = read_turn(text, is_opened=CLOSE in text and not text.lstrip().startswith(OPEN))
    gold, answer = json.loads(row["gold"]), task.parse(transcript_of(turn))
    shares = {name: metric for name, metric in task.compared.items() if isinstance(metric, Share)}
    verdicts = {name: share.of(gold, answer) for name, share in shares.items()}
    return {name: float(verdict) for name, verdict in verdicts.items() if verdict is not None}
