"""Writes pages and figures again from the JSON reports with their numbers, without a model."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from clinrl import paths
from clinrl.artifacts import write_text
from clinrl.benchmarks import external, protocol
from clinrl.config.params import Params
from clinrl.errors import ParamsError, did_you_mean, echo
from clinrl.evaluation import compare, error_analysis, evaluate
from clinrl.reports.render import load, render
from clinrl.runtime.progress import progress
from clinrl.tasks.base import get_task


class Report(NamedTuple):
    """An existing report, and the function that writes its pages."""

    name: str
    task: str
    path: Path
    """The JSON file, or the folder of an exam."""
    write: Callable[[], Sequence[Path] | None]
    """Returns the missing files whose figures were therefore not drawn again."""


def stage(params: Params, names: Sequence[str]) -> None:
    """Write the pages and figures of reports again and print which of them changed.

    `names` are versions, merges, bases, comparisons and tasks; without any, all reports are meant. Raises ParamsError
    for a name without a report.
    """
    found = list(reports(params))
    allowed = {report.name for report in found} | {report.task for report in found}
    for name in names:
        if name not in allowed:
            raise ParamsError(f"{name!r} has no report to write pages from; {did_you_mean(name, allowed)}")
    chosen = [report for report in found if not names or {report.name, report.task} & set(names)]
    count, changed = 0, list[Path]()
    try:
        with progress("Reports", len(chosen)) as advance:
            for report in chosen:
                before = _pages(report.path)
                for missing in report.write() or ():
                    echo(f"{missing} is not here, so its figure stays as it is; run `dvc pull`")
                after = _pages(report.path)
                count += len(after)
                changed += [path for path, content in after.items() if content != before.get(path)]
                advance()
    finally:  # not in between: rich would print them on stderr
        for path in changed:
            print(path)
    echo(f"wrote {count} pages and figures; the changed ones are listed")


def reports(params: Params) -> Iterator[Report]:
    """All existing reports: of models, of comparisons, and of the simulated retraining, in the order of params.yaml."""
    modes = list(params.modes)
    for name in [*params.roots, *params.versions, *params.merges.all]:
        model = params.model(name)
        task = model.task
        if (folder := paths.report(name)).is_dir():
            yield Report(name, task.name, folder, partial(evaluate.write_pages, folder, model, modes))
        for path, module in (
            (paths.mine_report(name), error_analysis),
            (paths.external_report(name), external),
            (paths.protocol_report(name), protocol),
        ):
            if path.exists():
                yield Report(name, task.name, path, partial(module.write_pages, path, task, modes))
    for name, spec in params.comparisons.items():
        if (path := paths.comparison_report(name)).exists():
            yield Report(name, spec.task, path, partial(compare.write_pages, path, get_task(spec.task), modes))
    for planned in params.plans:
        if (path := paths.retraining_report(planned)).exists():
            yield Report("retraining", planned, path, partial(write_retraining, path))


def write_retraining(path: Path) -> None:
    """Write the page of the simulated retraining from its JSON."""
    write_text(path.with_suffix(".md"), render("retraining", **load(path, get_task(path.stem), (), dict)))


def _pages(report: Path) -> dict[Path, bytes]:
    """The pages and figures of a report, by path."""
    folder, suffixes = report.with_suffix(""), (".md", ".png")
    beside = [report.with_suffix(suffix) for suffix in suffixes]
    inside = [path for path in folder.glob("*") if path.suffix in suffixes]
    return {path: path.read_bytes() for path in sorted([*beside, *inside]) if path.is_file()}
