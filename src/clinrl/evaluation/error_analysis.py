"""Error analysis: where a version errs, on cases that are neither in its training data nor in its exam.

The version answers the mine pool in every mode. Its wrong answers are grouped by the rule that decided the gold label,
by boundary, age band, trigger and kind of error, and the groups are ranked by what their errors would cost patients:
the first group is the one whose repair is worth most. The exam is never read, so it remains an unbiased measure of the
next version, which trains on the findings.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import Field

from clinrl import paths
from clinrl.analysis.baselines import text
from clinrl.analysis.exam import NOTE, UNREADABLE, column, note_of
from clinrl.analysis.run import Run, unless_one
from clinrl.artifacts import exclusive, identity, read_manifest, read_record, verified, write_json, write_text
from clinrl.config.params import Params
from clinrl.errors import ArtefactError, ParamsError, did_you_mean
from clinrl.evaluation.evaluate import answer_exam, keep, open_apart
from clinrl.intervals import DIGITS, mean, rate
from clinrl.models.judges import Judges
from clinrl.reports import figures
from clinrl.reports.episode import steps
from clinrl.reports.render import load, render
from clinrl.tasks.base import Task, parts_of
from clinrl.tasks.importing import is_imported
from clinrl.types import Case, Estimate, Graded, Strict, Unreadable, last_turn

POOL: Final = "mine"
MAX_WORST = 8
"""The number of transcripts that the page shows, the costliest first."""
MAX_GROUPS = 10
"""The number of groups of each kind that the page shows, the costliest first."""
MAX_ANSWERS = 6
"""The number of different wrong answers of a group that the page names, the commonest first."""
MIN_CASES = 5
"""Cases that a group needs to be ranked: an interval over fewer cases says nothing."""

NO_RULE = "none"
"""The rule of a case whose task does not name the deciding rule."""


class Group(Strict):
    """Cases with a common property, and their answers in all modes together."""

    by: str
    """The kind of the property: a slice of the task, such as rule or boundary, or `trigger`, or `error`."""
    value: str
    n: int = Field(gt=0)
    """Number of cases."""
    wrong: dict[str, Estimate]
    """By mode: the share of answers that are not the gold label, unreadable ones included."""
    cost: Estimate
    """Mean clinical cost of an answer, all modes together; the interval is a bootstrap over cases or clusters."""
    total: float
    """Clinical cost of the group's answers per 100 answers of the pool: what its repair is worth."""
    answers: dict[str, int]
    """The number of wrong answers by label; of an episode, each wrong decision counts."""

    @property
    def commonest(self) -> list[tuple[str, int]]:
        """`answers` as pairs, the commonest first; answers that the page does not name are summed up in one entry."""
        ranked = sorted(self.answers.items(), key=lambda item: (-item[1], item[0]))
        named, others = ranked[:MAX_ANSWERS], ranked[MAX_ANSWERS:]
        return named + ([(f"{len(others)} more", sum(count for _, count in others))] if others else [])


class WrongAnswer(Strict):
    """One wrong answer in full; for an imported case, without the case's text and the model's."""

    case_id: str
    mode: str
    gold: str
    """The right label; of an episode, those of its wrong decisions."""
    answered: str
    rule: str
    cost: float
    narrative: str
    text: str


class MineReport(Strict):
    """The report of an error analysis. Holds no times: equal answers give equal bytes."""

    name: str
    task: str
    task_version: int
    adapter_digest: str
    data: str
    data_digest: str
    pool: str
    modes: dict[str, dict[str, Any]]
    """Decoding of each mode."""
    n: int = Field(gt=0)
    """Number of cases; each is answered once in each mode."""
    wrong: dict[str, Estimate]
    """By mode."""
    cost: Estimate
    """Mean clinical cost of an answer."""
    groups: tuple[Group, ...]
    """The groups of each kind, the costliest first; the kinds are in a fixed order."""
    worst: tuple[WrongAnswer, ...]
    """The costliest answers; none of imported cases, of which a report holds counts alone."""
    note: str = NOTE


def stage(params: Params, name: str) -> None:
    """Let a version answer its mine data; write the graded answers, and the report as JSON, page and plot.

    Raises ParamsError if `mining` in params.yaml does not have `name`, ArtefactError if an input is missing, altered,
    or drawn from another pool, and Busy if another command analyses the same version.
    """
    if name not in params.mining:
        raise ParamsError(f"params.yaml mines no errors of {name!r}; {did_you_mean(name, params.mining)}")
    with exclusive(paths.mined(name)):
        run, inputs = open_apart(params, name, params.mining[name].data, POOL, f"errors are mined on the {POOL} pool")
        run = answer_exam(params, run, Judges(paths.base(run.task.name)))
        keep(paths.mined(name), run, inputs | {"data": run.exam_digest})
        target = paths.mine_report(name)
        write_json(target, report_of(run).model_dump(mode="json"))
        write_pages(target, run.task, params.modes)


def write_pages(target: Path, task: Task, modes: Iterable[str]) -> None:
    """Write the page and the figure of a report beside it."""
    report = load(target, task, modes, MineReport)
    figures.groups(
        [(group.value, group.total, group.cost, group.n) for group in of_kind(report, "rule")[:MAX_GROUPS]],
        f"{report.name} on {report.data}: clinical cost by deciding rule",
        target.with_suffix(".png"),
    )
    write_text(target.with_suffix(".md"), render("mining", report=report, most=MAX_GROUPS))


def report_of(run: Run) -> MineReport:
    """The report on a run over the mine pool. A pure function."""
    task = run.task
    clusters = run.clusters or [""] * len(run.cases)
    lines = [
        _Line(case, line, task, cluster)
        for answers in run.graded.values()
        for case, line, cluster in zip(run.cases, answers, clusters, strict=True)
    ]
    wrong = sorted((line for line in lines if line.wrong), key=lambda line: (-line.cost, line.case.id, line.mode))
    return MineReport(
        name=run.model.name,
        task=task.name,
        task_version=task.version,
        adapter_digest=run.adapter_digest,
        data=run.model.exam,
        data_digest=run.exam_digest,
        pool=POOL,
        modes=run.modes,
        n=len(run.cases),
        wrong=_wrong(lines),
        cost=_cost(lines),
        groups=tuple(
            group
            for by, of in kinds(task).items()
            for group in sorted(_groups(by, of, lines), key=lambda group: (-group.total, group.value))
        ),
        worst=tuple(line.in_full() for line in wrong[:MAX_WORST] if not is_imported(line.case)),
        note=note_of(run.cases),
    )


def read_report(params: Params, version: str) -> MineReport:
    """The error analysis of a version. Raises ParamsError if params.yaml has none, and ArtefactError if it is missing,
    or about another adapter or other data than are here now."""
    again = f"run `dvc repro mine@{version}`"
    if version not in params.mining:
        raise ParamsError(f"params.yaml mines no errors of {version}; add mining.{version} with its mine data")
    if not paths.adapter(version).exists():
        raise ArtefactError(f"{paths.adapter(version)} is not here; {again}, which makes it, or `dvc checkout`")
    path, data = paths.mine_report(version), params.mining[version].data
    report = read_record(
        path,
        MineReport,
        missing=lambda: f"{path} does not exist: {again}",
        broken=lambda _: f"{path} is no mining report: {again}",
    )
    if (report.name, report.adapter_digest) != (version, identity(verified(paths.adapter(version)))):
        raise ArtefactError(f"{path} is about another adapter than {version} now is: {again}")
    cases = read_manifest(paths.cases(data))
    if (report.data, report.data_digest, report.pool) != (data, identity(cases), POOL) or cases.spec["use"] != POOL:
        raise ArtefactError(f"{path} is about other cases than {data} of the {POOL} pool now holds: {again}")
    return report


def of_kind(report: MineReport, by: str) -> list[Group]:
    """The groups of one kind, the costliest first."""
    return [group for group in report.groups if group.by == by]


def kinds(task: Task) -> dict[str, Callable[["_Line"], Sequence[str]]]:
    """The kinds of groups: for each, a function from an answer to its groups, which may be one, several or none."""
    slices = {by: (lambda line, of=of: [of(line.case)]) for by, of in task.reporting.slices.items()}
    return {
        **slices,
        "trigger": lambda line: [name for name, shows in task.improvement.triggers.items() if shows(line.case)],
        "error": lambda line: [*{f"{right} answered {given}": None for _, right, given in line.missed}],
    }


class _Line:
    """One graded answer with its case and its cost."""

    def __init__(self, case: Case, line: Graded, task: Task, cluster: str) -> None:
        gold = task.label(case)
        self.case, self.line, self.mode, self.cluster, self.task = case, line, line.mode, cluster, task
        self.wrong = line.answer != gold
        self.missed = [
            (about, str(right), column(given))
            for about, (right, given) in parts_of(task, gold, line.answer).items()
            if given != right
        ]
        """The wrong decisions of an episode, or the wrong answer: its name, the right label and the given one."""
        self.cost = task.improvement.cost(gold, line.answer)

    def in_full(self) -> WrongAnswer:
        case, task, is_episode = self.case, self.task, self.task.episodes is not None
        last, turns = last_turn(self.line.transcript), self.line.transcript.messages
        thinking = f"<think>\n{last.thinking}\n</think>\n" if last.thinking else ""
        gold, answered = (
            "; ".join(f"{one[0]} {one[label]}" if is_episode else one[label] for one in self.missed) for label in (1, 2)
        )
        return WrongAnswer(
            case_id=case.id,
            mode=self.mode,
            gold=gold,
            answered=UNREADABLE if isinstance(self.line.answer, Unreadable) else answered,
            rule=task.reporting.slices.get("rule", lambda case: NO_RULE)(case),
            cost=round(self.cost, DIGITS),
            narrative=str(getattr(case.facts, task.checks.text, "")) or text(task, case),
            # The last turn of an episode says nothing of what went wrong before it.
            text="\n".join(map(" ".join, steps(turns))) if is_episode else f"{thinking}{last.content}",
        )


def _groups(by: str, of: Callable[[_Line], Sequence[str]], lines: Sequence[_Line]) -> list[Group]:
    members: dict[str, list[_Line]] = {}
    for line in lines:
        for value in of(line):
            members.setdefault(value, []).append(line)
    return [
        Group(
            by=by,
            value=value,
            n=n,
            wrong=_wrong(some),
            cost=_cost(some),
            total=round(100 * math.fsum(line.cost for line in some) / len(lines), DIGITS),
            answers=dict(Counter(given for line in some for _, _, given in line.missed)),
        )
        for value, some in members.items()
        if (n := len({line.case.id for line in some})) >= MIN_CASES
    ]


def _wrong(lines: Sequence[_Line]) -> dict[str, Estimate]:
    """The share of wrong answers by mode."""
    found = {}
    for mode in dict.fromkeys(line.mode for line in lines):
        some = [line for line in lines if line.mode == mode]
        found[mode] = rate([line.wrong for line in some], unless_one([line.cluster for line in some]))
    return found


def _cost(lines: Sequence[_Line]) -> Estimate:
    """Mean cost of an answer. The bootstrap draws cases or clusters, since answers to a case in two modes are alike."""
    clusters, by_case = {line.case.id: line.cluster for line in lines}, dict[str, list[float]]()
    for line in lines:
        by_case.setdefault(line.case.id, []).append(line.cost)
    costs = [round(math.fsum(some) / len(some), DIGITS) for some in by_case.values()]
    return mean(costs, unless_one([*clusters.values()]))
