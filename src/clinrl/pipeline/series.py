"""The table of a whole series: a task's base and versions, root first, and what their exam said in every mode.

`python -m clinrl.pipeline.series TASK` prints it, with `--write` it also renews the table in README.md between its
markers.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clinrl import paths
from clinrl.analysis.baselines import BAG_OF_WORDS
from clinrl.config.base import check_known
from clinrl.config.params import load_params
from clinrl.errors import ArtefactError, exit_code_of
from clinrl.evaluation.answers import BETWEEN_MODES, load_report
from clinrl.reports import render
from clinrl.reports.numbers import percent
from clinrl.tasks.base import get_task
from clinrl.types import Estimate

if TYPE_CHECKING:
    from clinrl.config.params import Params

BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


def table(params: "Params", task: str) -> str:
    """Markdown: a line for a task's base and each version, the root first, and one for the classifier to beat.

    Brackets hold 95% intervals.
    Raises ArtefactError if a report is missing.
    """
    modes, shares = list(params.modes), [*get_task(task).compared]
    columns = [f"{metric}, {mode}" for mode in modes for metric in shares]
    rows: list[list[object]] = []
    names = [name for version in params.versions for name in params.lineage(version)]
    mine = [name for name in dict.fromkeys(names) if params.versions[name].task == task]
    base = "embedded base" if params.scale == "embedded" else "hub checkpoint"
    rows.append([f"{task}-base", "", base, _results(f"{task}-base", modes, shares)])
    for name in mine:
        version = params.versions[name]
        rows.append([name, version.parent, version.profile, _results(name, modes, shares)])
    if mine:
        rows.append(
            [BAG_OF_WORDS, "", f"gold labels of {params.versions[mine[0]].data}", _rival(mine[0], modes, shares)]
        )
    return render.table(["version", "parent", "recipe", columns, "modes agree"], rows)


def splice(page: str, block: str) -> str:
    """A page with the text between its markers replaced. Raises ArtefactError unless each is there once."""
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ArtefactError(f"README.md must have the lines {BEGIN} and {END}, once each and in this order")
    head, tail = page.split(BEGIN)[0], page.split(END)[1]
    return f"{head}{BEGIN}\n{block}\n{END}{tail}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; with --write also put it into README.md. The exit code is 1 if a report is missing."""
    parser = argparse.ArgumentParser(prog="python -m clinrl.pipeline.series", description=__doc__)
    parser.add_argument("task", metavar="TASK", help="a task with a base")
    parser.add_argument("--write", action="store_true", help="renew the table in README.md")
    arguments = parser.parse_args(argv)

    def show() -> int:
        params = load_params()
        check_known("params.yaml", arguments.task, params.bases, "a task with a base")
        block = table(params, arguments.task)
        print(block)
        if arguments.write:
            readme = Path("README.md")
            readme.write_text(splice(readme.read_text(encoding="utf-8"), block), encoding="utf-8")
        return 0

    return exit_code_of(show)


def _results(name: str, modes: Sequence[str], shares: Sequence[str]) -> list[str]:
    reports = [load_report(name, mode) for mode in modes]
    found: dict[str, Any] = json.loads((paths.report(name) / BETWEEN_MODES).read_bytes())
    agreement = found.get("mode_agreement")
    return [
        *(percent(report.metrics[metric]) for report in reports for metric in shares),
        percent(Estimate.model_validate(agreement)) if agreement else "",
    ]


def _rival(name: str, modes: Sequence[str], shares: Sequence[str]) -> list[str]:
    """The row to beat, from the report of `name`. It has no modes, so each mode repeats it."""
    found = [next(line.metrics for line in load_report(name, mode).rows if line.name == BAG_OF_WORDS) for mode in modes]
    return [*(percent(metrics[metric]) for metrics in found for metric in shares), ""]


if __name__ == "__main__":
    sys.exit(main())
