"""A version beside the controls: everybody who shows what it must beat, as rows of one table a mode.

A control that is trained cannot be a row of the exam's own report: each exam would then wait for the trainings of the
controls, and theirs for themselves. Here all have been examined. The numbers are those of the reports; only the tests
against trained controls are new. Pure functions of records: no files, no models, no clock.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from clinrl.analysis.exam import Estimates, EvalReport, Row, Sitting, compare
from clinrl.errors import ArtefactError
from clinrl.intervals import Paired
from clinrl.reports.exam_page import ALPHA, shown, table, tests, verdict
from clinrl.tasks.base import Task, get_task
from clinrl.types import Estimate, Strict

Kind = Literal["version", "seed", "control", "parent", "base", "trivial"]
WHAT: dict[Kind, str] = {
    "version": "this version",
    "seed": "same recipe, other seed",
    "control": "trained control",
    "parent": "parent",
    "base": "untrained",
    "trivial": "trivial",
}
"""What a reader is told of each kind."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """Somebody who was examined, in one mode."""

    recipe: str
    """The row of the comparison; empty for the base."""
    control: bool
    parent: str | None
    data: str | None
    """What it was trained on, and so what the rows that learn learned from."""
    sitting: Sitting
    report: EvalReport


class Line(Strict):
    """One line of the table."""

    name: str
    """As the reports name it: a version, the base, the base under a view, or a trivial row."""
    recipe: str
    """The row of the comparison that it is of; empty for who was not trained in it."""
    kind: Kind
    metrics: Estimates
    """What every line has, as it stands in the rows of reports."""
    others: Estimates
    """What only its own report knows; empty for who has none."""


class Mode(Strict):
    """One mode: the version first, then everybody beside it."""

    mode: str
    lines: tuple[Line, ...]
    paired: tuple[Paired, ...]
    """The version against each trained control, not adjusted for their number."""


class Beside(Strict):
    """One version beside the controls. Holds no times: equal answers give equal bytes."""

    name: str
    recipe: str
    comparison: str
    task: str
    task_version: int
    exam: str
    exam_digest: str
    n: int
    clusters: int | None
    """How many clusters the cases are of; None for a task whose cases are by themselves."""
    modes: tuple[Mode, ...]
    note: str


def besides(
    comparison: str, task: Task, base: str, modes: Mapping[str, Mapping[str, Member]], clusters: int | None
) -> dict[str, Beside]:
    """Each version of a comparison beside its controls, by name. `modes` hold everybody by name, the base too.

    Raises ArtefactError if two reports differ in a row that is the same for both.
    """
    for mode, members in modes.items():
        _check(mode, base, members)
    found = {}
    for name, member in next(iter(modes.values())).items():
        if name == base:
            continue
        report = member.report
        found[name] = Beside(
            name=name,
            recipe=member.recipe,
            comparison=comparison,
            task=task.name,
            task_version=task.version,
            exam=report.exam,
            exam_digest=report.exam_digest,
            n=report.n,
            clusters=clusters,
            modes=tuple(_mode(task, mode, base, members, name) for mode, members in modes.items()),
            note=report.note,
        )
    return found


def _check(mode: str, base: str, members: Mapping[str, Member]) -> None:
    """Refuse reports that say different things of one row: of the base, or of who is the same for alike trainings."""
    alike: dict[tuple[str | None, str | None], str] = {}
    untrained = members[base].report.rows[0]
    for name, member in members.items():
        if name == base:
            continue
        first = alike.setdefault((member.parent, member.data), name)
        mine, theirs = _rest(member), _rest(members[first])
        _same(mode, name, first, mine, theirs)
        _same(mode, name, base, {base: mine.get(base, untrained)}, {base: untrained})


def _same(mode: str, a: str, b: str, mine: Mapping[str, Row], theirs: Mapping[str, Row]) -> None:
    for row in {**theirs, **mine}:
        if mine.get(row) != theirs.get(row):
            raise ArtefactError(
                f"the reports of {a} and {b} differ in the row {row!r}, mode {mode}, which is the same for both; "
                f"evaluate anew with `dvc repro -s -f evaluate@{a}`, or the other one"
            )


def _mode(task: Task, mode: str, base: str, members: Mapping[str, Member], name: str) -> Mode:
    me = members[name]
    seeds = [other for other, member in members.items() if member.recipe == me.recipe and other != name]
    controls = [other for other, member in members.items() if member.control and member.recipe != me.recipe]
    trained: list[tuple[str, Kind]] = [(name, "version")]
    trained += [(other, "seed") for other in seeds]
    trained += [(other, "control") for other in controls]
    found = {other: (kind, members[other].report.rows[0]) for other, kind in trained}
    # Who descends from another version has that one in its report, and not the base.
    untrained = {base: members[base].report.rows[0]}
    untrained |= {row: it for member in members.values() for row, it in _rest(member).items() if _of(base, row)}
    for row, it in (*_rest(me).items(), *untrained.items()):
        found.setdefault(row, ("base" if _of(base, row) else "parent" if _of(me.parent, row) else "trivial", it))
    order = list(WHAT)
    lines = [_line(row, it, kind, members.get(row)) for row, (kind, it) in found.items()]
    return Mode(
        mode=mode,
        lines=tuple(sorted(lines, key=lambda line: order.index(line.kind))),
        paired=tuple(test for other in controls for test in compare(me.sitting, members[other].sitting, task.metrics)),
    )


def _line(name: str, row: Row, kind: Kind, member: Member | None) -> Line:
    known = member.report.metrics if member else {}
    return Line(
        name=name,
        recipe=member.recipe if member else "",
        kind=kind,
        metrics=row.metrics,
        others={metric: estimate for metric, estimate in known.items() if metric not in row.metrics},
    )


def _rest(member: Member) -> dict[str, Row]:
    """The rows of a report below that of its version, by name."""
    return {row.name: row for row in member.report.rows[1:]}


def _of(who: str | None, row: str) -> bool:
    """A row is about somebody's answers, to the cases as given or under another view."""
    return who is not None and (row == who or row.startswith(f"{who}, "))


def page(report: Beside) -> str:
    """The Markdown page on one version beside the controls."""
    task = get_task(report.task)
    of = "" if report.clusters is None else f" of {report.clusters} clusters"
    parts = [
        f"# {report.name} beside the controls, on {report.exam}",
        f"{report.note} Not for clinical use. Task {report.task}, version {report.task_version}; {report.n} exam "
        f"cases{of}, each answered once by everybody in every mode. Recipe: {report.recipe}. Brackets hold 95% "
        f"intervals. The metrics are defined in `clinrl.tasks.{report.task}`.",
        "All rows stand as in the versions' own reports; that of this one is "
        f"[here](../../{report.name}/report.md). All recipes over their seeds, and the tests between them: "
        f"[{report.comparison}](../{report.comparison}.md).",
    ]
    for mode in report.modes:
        parts += [f"## Mode {mode.mode}", *_tables(task, report, mode), *_words(task, report, mode)]
    return "\n\n".join(parts) + "\n"


def _tables(task: Task, report: Beside, mode: Mode) -> Iterator[str]:
    chosen = [name for name in task.row_metrics if any(name in line.metrics for line in mode.lines)]
    body = [
        (label(line), WHAT[line.kind], *(_cell(task, name, line.metrics.get(name), report.n) for name in chosen))
        for line in mode.lines
    ]
    yield table(("who", "what", *chosen), body)
    examined = [line for line in mode.lines if line.others]
    known = dict.fromkeys(name for line in examined for name in line.others)
    names = [name for name in (*task.qualities, *task.metrics) if name in known]
    names += [name for name in known if name not in names]
    yield "What only their own reports measure; n where it is not all cases:"
    yield table(
        ("metric", *map(label, examined)),
        [(name, *(_cell(task, name, line.others.get(name), report.n) for line in examined)) for name in names],
    )


def _words(task: Task, report: Beside, mode: Mode) -> Iterator[str]:
    """What the tests against the trained controls say, and what they rest on."""
    controls = [line for line in mode.lines if line.kind == "control"]
    if not controls:
        yield "No trained control stands beside it, so nothing is tested here."
        return
    said = [_against(task, label(line), [test for test in mode.paired if test.other == line.name]) for line in controls]
    said.append(
        f"The {len(mode.paired)} p-values of this mode are not adjusted for each other, and a difference that is not "
        f"shown may still exist. Each test is of one training against another, so none knows of the spread of seeds."
    )
    if report.clusters is not None:
        said.append(
            "McNemar's test takes cases for independent, which those of one cluster are not, so its p-values may be "
            "too small; the tests of the comparison are over clusters and seeds."
        )
    yield " ".join([*said, f"All figures hold for {report.exam} only."])
    yield "Paired tests against the trained controls, exact McNemar, two-sided:"
    yield tests(mode.paired)


def _against(task: Task, who: str, paired: Sequence[Paired]) -> str:
    """One sentence: better, worse, or no difference shown, and by how much."""
    judged = {
        "better" if (test.b > test.c) == (task.metrics[test.metric].worse == "lower") else "worse"
        for test in paired
        if test.p < ALPHA
    }
    if not judged:
        opening = f"No difference from {who} is shown"
    elif len(judged) == 1:
        opening = f"{judged.pop().capitalize()} than {who}"
    else:
        opening = f"Better than {who} in one way and worse in another"
    return f"{opening}: {'; '.join(map(verdict, paired))}."


def label(line: Line) -> str:
    """A version with its recipe; anybody else by name."""
    return f"{line.recipe} ({line.name})" if line.recipe else line.name


def _cell(task: Task, name: str, estimate: Estimate | None, n: int) -> str:
    if estimate is None:
        return ""
    return shown(task, name, estimate) + ("" if estimate.n == n else f", n {estimate.n}")
