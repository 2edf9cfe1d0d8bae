"""What an exam left, by digest: the one small file of each exam on which comparisons depend.

A stage of DVC cannot list as many inputs as a comparison has versions, but it can depend on a folder: on that of a
task's records. A new version in a comparison then needs no edit of dvc.yaml.
"""

from clinrl import paths
from clinrl.artifacts import write_json
from clinrl.runtime.dvc_digest import md5
from clinrl.tasks.base import Task


def write_record(task: Task, name: str, exam: str, data: str | None) -> None:
    """Record the answers and reports of an exam, and the cases that they are about and were learned from.

    Digests are DVC's, as dvc.lock has them. Raises OSError if one of these cannot be read.
    """
    reports = sorted(paths.report(name).glob("*.json"))
    kept = [paths.graded(name)] if paths.graded(name).exists() else []  # a rival, which says nothing, keeps none
    used = [*kept, *reports, *(paths.cases(cases) for cases in (exam, data) if cases)]
    write_json(paths.exam_record(task.name, name), {"name": name, "md5": {path.as_posix(): md5(path) for path in used}})
