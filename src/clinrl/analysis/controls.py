"""The control table of a version: every baseline that it must beat, one table per mode.

Trained controls cannot stand in a version's own report: its evaluation would then depend on their trainings, and theirs
on each other, in a cycle. Here all have been evaluated. The numbers are those of the reports; only the tests against
trained controls are new. Pure functions of records: no files, no models, no clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from clinrl.analysis.exam import Estimates, EvalReport, Row
from clinrl.analysis.paired import Answers, compare
from clinrl.errors import ArtefactError
from clinrl.intervals import Paired
from clinrl.tasks.base import Task
from clinrl.types import Strict

Kind = Literal["version", "seed", "control", "parent", "base", "rival", "trivial"]
WHAT: dict[Kind, str] = {
    "version": "this version",
    "seed": "same recipe, other seed",
    "control": "trained control",
    "parent": "parent",
    "base": "untrained",
    "rival": "classifier",
    "trivial": "trivial",
}
"""The name of each kind on pages."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """An evaluated model of the comparison, in one mode."""

    recipe: str
    """The row of the comparison; empty for the base."""
    control: bool
    parent: str | None
    data: str | None
    """Its training data, which the bag of words of its report learned from too."""
    answers: Answers
    report: EvalReport
    qualities: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    """Of the qualities that ask no judge: a number for every case."""


class Line(Strict):
    """One line of the table."""

    name: str
    """As the reports name it: a version, the base, the base under an input variant, or a trivial row."""
    recipe: str
    """Its row of the comparison; empty for a model that is not trained in it."""
    kind: Kind
    metrics: Estimates
    """The metrics that every line has, as the rows of reports have them."""
    others: Estimates
    """The metrics that only its own report has; empty for a row without one."""

    @property
    def label(self) -> str:
        """A version with its recipe; any other by name."""
        return f"{self.recipe} ({self.name})" if self.recipe else self.name


class Mode(Strict):
    """One mode: the version first, then the rows beside it."""

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
    comparison: str,
    task: Task,
    base: str,
    modes: Mapping[str, Mapping[str, Member]],
    clusters: int | None,
    rivals: Sequence[Row] = (),
) -> dict[str, Beside]:
    """Each version of a comparison beside its controls, by name. `modes` hold all members by name, the base too;
    `rivals` are the same in every mode.

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
            modes=tuple(_mode(task, mode, base, members, name, rivals) for mode, members in modes.items()),
            note=report.note,
        )
    return found


def _check(mode: str, base: str, members: Mapping[str, Member]) -> None:
    """Refuse reports that differ in one row: the base's, or one that is the same for trainings alike."""
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


def _mode(task: Task, mode: str, base: str, members: Mapping[str, Member], name: str, rivals: Sequence[Row]) -> Mode:
    me = members[name]
    seeds = [other for other, member in members.items() if member.recipe == me.recipe and other != name]
    controls = [other for other, member in members.items() if member.control and member.recipe != me.recipe]
    trained: list[tuple[str, Kind]] = [(name, "version")]
    trained += [(other, "seed") for other in seeds]
    trained += [(other, "control") for other in controls]
    found = {other: (kind, members[other].report.rows[0]) for other, kind in trained}
    found |= {row.name: ("rival", row) for row in rivals}
    # The report of a version with a trained parent has that parent's row, and not the base's.
    untrained = {base: members[base].report.rows[0]}
    untrained |= {row: it for member in members.values() for row, it in _rest(member).items() if _of(base, row)}
    for row, it in (*_rest(me).items(), *untrained.items()):
        found.setdefault(row, ("base" if _of(base, row) else "parent" if _of(me.parent, row) else "trivial", it))
    order = list(WHAT)
    lines = [_line(row, it, kind, members.get(row)) for row, (kind, it) in found.items()]
    return Mode(
        mode=mode,
        lines=tuple(sorted(lines, key=lambda line: order.index(line.kind))),
        paired=tuple(test for other in controls for test in compare(me.answers, members[other].answers, task.compared)),
    )


def _line(name: str, row: Row, kind: Kind, member: Member | None) -> Line:
    metrics = member.report.metrics if member else {}
    return Line(
        name=name,
        recipe=member.recipe if member else "",
        kind=kind,
        metrics=row.metrics,
        others={metric: estimate for metric, estimate in metrics.items() if metric not in row.metrics},
    )


def _rest(member: Member) -> dict[str, Row]:
    """The rows of a report below that of its version, by name."""
    return {row.name: row for row in member.report.rows[1:]}


def _of(model: str | None, row: str) -> bool:
    """Whether a row holds the answers of a model, to the cases as given or under an input variant."""
    return model is not None and (row == model or row.startswith(f"{model}, "))
