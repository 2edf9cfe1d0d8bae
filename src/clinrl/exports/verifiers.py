"""A task as an installable package for verifiers: its cases, its tools, and clinrl's own parser and reward."""

import shutil
from pathlib import Path
from typing import Final

from clinrl import paths
from clinrl.artifacts import canonical_json, replaced, write_text
from clinrl.config.params import Params
from clinrl.exports.lm_eval import announce, exported_cases
from clinrl.tasks.base import get_task

PYPROJECT: Final = """\
# clinrl is on no index: install its checkout first, with `pip install --no-deps`.
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "clinrl-{name}"
version = "{version}"
description = "The task {name} of clinrl, version {version}, with cases of {data}. Research only."
requires-python = ">=3.11"
dependencies = ["uv", "verifiers>=0.4,<0.5"]

[tool.setuptools]
packages = ["clinrl_{name}"]

[tool.setuptools.package-data]
clinrl_{name} = ["cases.jsonl"]
"""
INIT: Final = """\
from clinrl_{name}.taskset import CaseEnv, CaseTaskset

__all__ = ["CaseEnv", "CaseTaskset"]
"""


def stage(params: Params, name: str, *, out: Path | None = None, open_exam: bool = False) -> None:
    """Write a task's package, with cases of the pool mine, or with `open_exam` its exam; print the folder.

    Raises as `exported_cases` does.
    """
    task, target = get_task(name), (out or paths.EXPORTS) / f"clinrl-{name}"
    data, cases = exported_cases(params, task, open_exam=open_exam)
    with replaced(target, "clinrl export verifiers") as folder:
        package = folder / f"clinrl_{name}"
        write_text(folder / "pyproject.toml", PYPROJECT.format(name=name, version=task.version, data=data))
        write_text(package / "__init__.py", INIT.format(name=name))
        shutil.copyfile(Path(__file__).with_name("verifiers_taskset.py"), package / "taskset.py")
        rows = (canonical_json(case.model_dump(mode="json")) + "\n" for case in cases)
        write_text(package / "cases.jsonl", "".join(rows))
    announce(target, open_exam=open_exam)
