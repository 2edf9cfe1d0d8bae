"""The page that a person reads about an exam: tables and sentences that follow from the reports, and nothing more.

A sentence about a difference is chosen by the test: below 0.05 it says which way and by how much, otherwise that the
exam does not show one. Nothing here calls two versions equal.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from clinrl.analysis.alerts import Alarm
from clinrl.analysis.baselines import BAG_OF_WORDS
from clinrl.analysis.exam import COMPARED, NOTE, UNREADABLE, VIEW, EvalReport
from clinrl.intervals import Paired
from clinrl.tasks.base import Statistic, Task, get_task
from clinrl.types import Estimate

if TYPE_CHECKING:
    from clinrl.release.gate import FormRow

ALPHA = 0.05


def page(
    reports: Sequence[EvalReport],
    agreement: Mapping[str, Any],
    *,
    parent: str | None,
    alarms: Sequence[Alarm] | None = None,
) -> str:
    """The Markdown page on one version's reports, one a mode, on the agreement between its modes, and on its training.

    `alarms` are those of the training; None for what was not trained.
    """
    first = reports[0]
    parts = [
        f"# {first.name} on {first.exam}",
        f"{first.note} Not for clinical use. Task {first.task}, version {first.task_version}; {first.n} exam cases, "
        f"each answered once in every mode. Parent: {parent or 'none, this is the base'}. Brackets hold 95% intervals. "
        f"The metrics are defined in `clinrl.tasks.{first.task}`.",
    ]
    for report in reports:
        parts += [f"## Mode {report.mode}", headline(report), findings(report, parent), rows(report)]
        if report.paired:
            parts += ["Paired tests, exact McNemar, two-sided:", tests(report.paired)]
        parts += ["What was right and what was answered:", answers(report)]
        if VIEW in report.slices:
            parts += ["Other views of the same cases, where they have one:", views(report)]
        parts += [f"![Confusion matrix](confusion_{report.mode}.png)"]
    if agreement:
        parts += ["## Between modes", between(agreement)]
    if alarms is not None:
        parts += ["## Training", health(alarms), "![Training curves](curves.png)"]
    return "\n\n".join(parts) + "\n"


def health(alarms: Sequence[Alarm]) -> str:
    """The alarms of a training as a table, or that there was none."""
    if not alarms:
        return "The training raised no alarm."
    body = [(alarm.step, alarm.level, alarm.name, alarm.says, alarm.helps) for alarm in alarms]
    return table(("step", "level", "alarm", "what was seen", "what usually helps"), body)


def headline(report: EvalReport) -> str:
    """A table of the headline metrics with their intervals and denominators."""
    task = get_task(report.task)
    found = [(name, report.metrics[name]) for name in task.headline if name in report.metrics]
    return table(("metric", "estimate", "n"), [(name, shown(task, name, value), value.n) for name, value in found])


def rows(report: EvalReport) -> str:
    """A table of everybody who sat this exam."""
    task = get_task(report.task)
    chosen = [name for name in task.row_metrics if any(name in row.metrics for row in report.rows)]
    body = [(row.name, report.n, *_cells(task, chosen, row.metrics)) for row in report.rows]
    return table(("who", "n", *chosen), body)


def views(report: EvalReport) -> str:
    """A table of the same answers as given and under every other view."""
    task, found = get_task(report.task), report.slices[VIEW]
    chosen = list(dict.fromkeys(name for metrics in found.values() for name in metrics))
    body = [(view, metrics[COMPARED[0]].n, *_cells(task, chosen, metrics)) for view, metrics in found.items()]
    return table(("view", "n", *chosen), body)


def answers(report: EvalReport) -> str:
    """A table of how often each label is right and how often it is answered: a policy that hides shows here."""
    counts = report.confusion
    right = {name: sum(row) for name, row in zip(counts.rows, counts.counts, strict=True)}
    body = [
        (what, *(f"{100 * some.get(name, 0) / counts.total:.1f}%" for name in counts.columns))
        for what, some in (("right", right), ("answered", report.predicted))
    ]
    return table((f"share of {report.counted}", *counts.columns), body)


def tests(paired: Sequence[Paired]) -> str:
    """A table of paired tests. `only this` and `only other` are the discordant cases b and c."""
    body = [
        (test.other, test.metric, test.b, test.c, test.difference.n, points(test.difference), _p(test.p))
        for test in paired
    ]
    return table(("against", "metric", "only this (b)", "only other (c)", "n", "difference", "p"), body)


def findings(report: EvalReport, parent: str | None) -> str:
    """One paragraph: what the answers were, and what the tests do and do not show."""
    sentences = [
        f"In mode {report.mode}, {report.name} answers {percent(report.metrics['exact'])} of the cases exactly, errs "
        f"dangerously in {percent(report.metrics['dangerous'])} and cannot be read in "
        f"{percent(report.metrics['no_parse'])}, which count as wrong."
    ]
    for other in dict.fromkeys(test.other for test in report.paired):
        who = f"its parent {parent}" if other == parent else f"the {other}"
        if other == BAG_OF_WORDS:
            who += ", which learned from gold labels and does not read sentences"
        verdicts = "; ".join(verdict(test) for test in report.paired if test.other == other)
        sentences.append(f"Against {who}: {verdicts}.")
    most = max(report.predicted, key=lambda label: report.predicted[label])
    share = report.predicted[most] / report.confusion.total
    kind = "outcome" if most == UNREADABLE else "answer"
    sentences.append(f"Its commonest {kind} is {most}, {100 * share:.1f}% of {report.counted}.")
    holds = (
        "All figures hold for synthetic cases only."
        if report.note == NOTE
        else "All figures hold for these imported cases only."
    )
    if report.paired:
        sentences.append(
            f"The {len(report.paired)} p-values of this mode are not adjusted for each other, and a difference that is "
            f"not shown may still exist. {holds}"
        )
    else:
        sentences.append(f"Nothing is tested here: the base has no parent. {holds}")
    return " ".join(sentences)


def verdict(test: Paired) -> str:
    """What one paired test says, and no more."""
    what = {"exact": "exact answers", "dangerous": "dangerous errors"}.get(test.metric, test.metric)
    figures = f"{points(test.difference)}, p {_p(test.p, relation=True)}"
    if test.p >= ALPHA:
        return f"no difference in {what} is shown ({figures})"
    return f"{'more' if test.b > test.c else 'fewer'} {what} ({figures})"


def between(agreement: Mapping[str, Any]) -> str:
    """The agreement of the modes and the paired tests between them."""
    pairs = agreement["between_modes"]
    lines = [
        f"The same readable answer in every mode: {percent(agreement['mode_agreement'])} of "
        f"{agreement['mode_agreement'].n} cases."
    ]
    for pair, found in pairs.items():
        text = "; ".join(verdict(found[metric]) for metric in COMPARED)
        first = pair.removesuffix(f"_{found[COMPARED[0]].other}")
        lines.append(f"Mode {first} against mode {found[COMPARED[0]].other}: {text}.")
    return " ".join(lines) + "\n\n" + "\n\n".join(tests(list(found.values())) for found in pairs.values())


def form(rows: Sequence["FormRow"]) -> list[dict[str, str]]:
    """What the person sees who is asked to approve, a line for each who answered: shares, and the candidate's lead.

    A lead is the candidate minus that one on the same cases; it is empty for the candidate itself.
    """
    names = list(dict.fromkeys(name for row in rows for name in row.metrics))
    return [
        {"mode": row.mode, "who": row.name, "role": row.role}
        | {name: percent(row.metrics[name]) if name in row.metrics else "" for name in names}
        | {f"ahead in {name}": points(row.ahead[name]) if name in row.ahead else "" for name in names}
        for row in rows
    ]


def table(head: Sequence[str], body: Sequence[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _cells(task: Task, names: Sequence[str], metrics: Mapping[str, Estimate]) -> list[str]:
    """A cell for each metric; empty where it is undefined."""
    return [shown(task, name, metrics[name]) if name in metrics else "" for name in names]


def shown(task: Task, name: str, estimate: Estimate) -> str:
    """A metric of the task with its interval: a statistic or a count as a number, anything else in per cent."""
    if isinstance(task.metrics.get(name), Statistic):
        return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"
    if (quality := task.qualities.get(name)) is not None and quality.counts:
        return f"{estimate.value:.2f} [{estimate.low:.2f}, {estimate.high:.2f}]"
    return percent(estimate)


def percent(estimate: Estimate) -> str:
    """A share in per cent with its interval."""
    return f"{100 * estimate.value:.1f}% [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"


def points(difference: Estimate) -> str:
    """A difference of two shares in percentage points with its interval."""
    return f"{100 * difference.value:+.1f} points [{100 * difference.low:+.1f}, {100 * difference.high:+.1f}]"


def _p(p: float, *, relation: bool = False) -> str:
    text = f"{p:.3f}" if p >= 0.001 else "< 0.001"
    return f"= {text}" if relation and p >= 0.001 else text
