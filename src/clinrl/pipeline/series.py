"""The table of a whole series: the exam results of a task's base and of its recipes over all seeds.

`python -m clinrl.pipeline.series TASK` prints it, followed by a table of the newest lineage. With `--write` it renews
the table in README.md between its markers.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from clinrl import paths
from clinrl.analysis.baselines import BAG_OF_WORDS
from clinrl.analysis.compared import ALL, Compared
from clinrl.analysis.exam import Agreement
from clinrl.artifacts import write_text
from clinrl.config.base import check_known
from clinrl.config.params import Params, load_params
from clinrl.errors import ArtefactError, with_exit_code
from clinrl.evaluation.answers import BETWEEN_MODES, load_report
from clinrl.reports import render
from clinrl.reports.numbers import figures, percent
from clinrl.reports.render import load
from clinrl.tasks.base import EXACT, get_task
from clinrl.types import Estimate

BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


def table(params: Params, task: str) -> str:
    """The table in Markdown: the base, each recipe of the comparison `<task>-series`, rivals, the best simple policy.

    A recipe's number is the mean over its seeds, with a 95% interval over seeds and cases in brackets. For ordered
    answers both kinds of error are shown, since one can be traded for the other. Raises ArtefactError if there is no
    report of the comparison.
    """
    own, modes = get_task(task), list(params.modes)
    shares = [*own.compared, *([own.ordered.over] if own.ordered else [])]
    report = load(paths.comparison_report(f"{task}-series"), own, modes, Compared)
    rows_of = {part.mode: {row.name: row for row in part.rows} for part in report.sections if part.part == ALL}
    first = rows_of[modes[0]]
    simple = [name for name, row in first.items() if row.kind == "baseline" and name != BAG_OF_WORDS]
    best = max(simple, key=lambda name: first[name].metrics[EXACT].value)
    chosen = [name for name, row in first.items() if row.kind != "baseline" or name in (BAG_OF_WORDS, best)]
    rows: list[list[object]] = []
    for name in [name for name in chosen if name in rows_of[modes[-1]] and ", " not in name]:
        row = first[name]
        seeds = len(row.versions) if row.kind == "arm" else ""
        rows.append([name, seeds, [figures(own, shares, rows_of[mode][name].metrics) for mode in modes]])
    return render.table(["row", "seeds", [f"{share}, {mode}" for mode in modes for share in shares]], rows)


def lines(params: Params, task: str) -> str:
    """The exam results of the lineage of the task's newest version as Markdown, without drafts that took no exam. It is
    one seed of the table's rows."""
    modes, shares = list(params.modes), [*get_task(task).compared]
    lineage = params.lineage(params.newest_of(task))
    examined = [name for name in lineage if paths.report(name).is_dir()] or lineage
    columns = [f"{metric}, {mode}" for mode in modes for metric in shares]
    rows: list[list[object]] = [
        [name, load_report(name, modes[0]).exam, _results(name, modes, shares)] for name in params.lineage(examined[-1])
    ]
    return render.table(["version", "exam", columns, "modes agree"], rows)


def splice(page: str, block: str) -> str:
    """The page with the text between its markers replaced. Raises ArtefactError unless it has each marker once."""
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ArtefactError(f"README.md must have the lines {BEGIN} and {END}, once each and in this order")
    head, tail = page.split(BEGIN)[0], page.split(END)[1]
    return f"{head}{BEGIN}\n{block}\n{END}{tail}"


@with_exit_code
def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; with --write also put it into README.md. The exit code is 1 if a report is missing."""
    parser = argparse.ArgumentParser(prog="python -m clinrl.pipeline.series", description=__doc__)
    parser.add_argument("task", metavar="TASK", help="a task with a base")
    parser.add_argument("--write", action="store_true", help="renew the table in README.md")
    arguments = parser.parse_args(argv)
    params = load_params()
    check_known("params.yaml", arguments.task, params.bases, "a task with a base")
    block = table(params, arguments.task)
    print(block)
    if not arguments.write:
        print(f"\nThe lineage as it was examined here, one seed:\n\n{lines(params, arguments.task)}")
    else:
        readme = Path("README.md")
        write_text(readme, splice(readme.read_text(encoding="utf-8"), block))
    return 0


def _results(name: str, modes: Sequence[str], shares: Sequence[str]) -> list[str]:
    reports = [load_report(name, mode) for mode in modes]
    between = load(paths.report(name) / BETWEEN_MODES, get_task(reports[0].task), modes, Agreement)
    agreement = between.get("mode_agreement")
    return [
        *(percent(report.metrics[metric]) for report in reports for metric in shares),
        percent(agreement) if isinstance(agreement, Estimate) else "",
    ]


if __name__ == "__main__":
    sys.exit(main())
