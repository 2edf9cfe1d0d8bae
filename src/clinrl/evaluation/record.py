"""What an exam left, by digest: the one small file of each exam on which comparisons depend.

A stage of DVC cannot list as many inputs as a comparison has versions, but it can depend on a folder: on that of a
task's records. A new version in a comparison then needs no edit of dvc.yaml.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from clinrl import paths
from clinrl.analysis.costs import Costs
from clinrl.artifacts import write_json
from clinrl.runtime.dvc_digest import md5
from clinrl.tasks.base import Task


def write_record(
    task: Task, name: str, exam: str, data: str | None, costs: Mapping[str, Costs | None] = MappingProxyType({})
) -> None:
    """Record the answers and reports of an exam, and the cases that they are about and were learned from.

    `costs`: what thresholds on the model's probabilities reach, by mode, where they were read. Digests
    are DVC's, as dvc.lock has them. Raises OSError if one of these cannot be read.
    """
    reports = sorted(paths.report(name).glob("*.json"))
    used = [paths.graded(name), *reports, *(paths.cases(cases) for cases in (exam, data) if cases)]
    record: dict[str, Any] = {"name": name, "md5": {path.as_posix(): md5(path) for path in used}}
    if read := {mode: found.model_dump(mode="json") for mode, found in costs.items() if found}:
        record["costs"] = read
    write_json(paths.exam_record(task.name, name), record)
