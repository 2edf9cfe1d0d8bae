"""Sentences on an exam that the tests choose.

A difference is named only where its p is below 0.05; otherwise it is said that none is shown. Nothing here calls two
versions equal.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from clinrl.analysis.baselines import BAG_OF_WORDS
from clinrl.analysis.exam import NOTE, UNREADABLE, Confusion, EvalReport
from clinrl.intervals import Paired
from clinrl.reports.numbers import p_relation, percent, points
from clinrl.tasks.base import EXACT, Task, get_task

ALPHA = 0.05


def shares(counts: Mapping[str, int], confusion: Confusion) -> list[str]:
    """Each outcome as a share of everything that a confusion matrix counts."""
    return [f"{100 * counts.get(name, 0) / confusion.total:.1f}%" for name in confusion.columns]


def findings(report: EvalReport, parent: str | None) -> str:
    """One paragraph: what the answers were, and what the tests do and do not show."""
    task = get_task(report.task)
    sentences = [
        f"In mode {report.mode}, {report.name} answers {percent(report.metrics[EXACT])} of the cases exactly, "
        f"{task.safety.verb} {percent(report.metrics[task.safety.metric])} and cannot be read in "
        f"{percent(report.metrics['no_parse'])}, which count as wrong."
    ]
    for other in dict.fromkeys(test.other for test in report.paired):
        who = f"its parent {parent}" if other == parent else f"the {other}"
        if other == BAG_OF_WORDS:
            who += ", which learned from gold labels and does not read sentences"
        verdicts = "; ".join(verdict(task, test) for test in report.paired if test.other == other)
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


def verdict(task: Task, test: Paired) -> str:
    """What one paired test says, and no more."""
    what = task.called(test.metric)
    figures = f"{points(test.difference)}, p {p_relation(test.p)}"
    if test.p >= ALPHA:
        return f"no difference in {what} is shown ({figures})"
    return f"{'more' if test.b > test.c else 'fewer'} {what} ({figures})"


def between(task: Task, agreement: Mapping[str, Any]) -> str:
    """The agreement of the modes and the paired tests between them."""
    lines = [
        f"The same readable answer in every mode: {percent(agreement['mode_agreement'])} of "
        f"{agreement['mode_agreement'].n} cases."
    ]
    for pair, found in agreement["between_modes"].items():
        text = "; ".join(verdict(task, found[metric]) for metric in task.compared)
        first = pair.removesuffix(f"_{found[EXACT].other}")
        lines.append(f"Mode {first} against mode {found[EXACT].other}: {text}.")
    return " ".join(lines)


def against(task: Task, who: str, paired: Sequence[Paired]) -> str:
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
    return f"{opening}: {'; '.join(verdict(task, test) for test in paired)}."
