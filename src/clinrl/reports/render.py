"""Pages from what reports hold as JSON."""

import json
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path
from typing import Any

from clinrl.analysis.exam import COMPARED, UNREADABLE
from clinrl.tasks.base import GIVEN, Task


def load(path: Path, task: Task, modes: Iterable[str]) -> Any:
    """The JSON of a report on a task. JSON sorts the keys of a mapping; here they have the order of pages again.

    That is the order in which params.yaml names modes and the task its metrics, views, levels and labels; any other key
    comes after these. Raises FileNotFoundError.
    """
    modes = list(modes)
    pairs = [f"{first}_{second}" for first, second in combinations(modes, 2)]
    headline = [name for name in task.headline if name in task.metrics]
    levels = task.protocol.levels if task.protocol else ()
    names = [
        *modes, *pairs, *COMPARED, *headline, *task.metrics, *task.qualities,
        GIVEN, *task.views, *levels, *map(str, task.labels), UNREADABLE,
    ]  # fmt: skip
    places = {name: place for place, name in reversed(list(enumerate(names)))}
    return _arranged(json.loads(path.read_bytes()), places)


def _arranged(value: Any, places: dict[str, int]) -> Any:
    if isinstance(value, list):
        return [_arranged(item, places) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _arranged(value[key], places) for key in sorted(value, key=lambda key: places.get(key, len(places)))}
