"""What a run's page in Prefect shows: the comparison table, the training curves, and the decision."""

import base64
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from prefect.artifacts import create_image_artifact, create_markdown_artifact, create_table_artifact

from clinrl import paths
from clinrl.analysis.alerts import stored
from clinrl.evaluation.answers import ALARMS, load_report
from clinrl.reports import numbers
from clinrl.reports import render as markdown

if TYPE_CHECKING:
    from clinrl.analysis.exam import EvalReport
    from clinrl.config.params import Params
    from clinrl.pipeline.propose import Draft
    from clinrl.release.gate import Decision

CURVES = "curves.png"


def show_exam(params: "Params", name: str) -> None:
    """Put the comparison table of a version or a merge on the run's page, and its training curves if it has any."""
    reports = [load_report(name, mode) for mode in params.modes]
    create_table_artifact(
        table=comparison(reports),
        key=f"comparison-{name}",
        description=f"{name} on {reports[0].exam}, {reports[0].n} cases, beside its parent and simple policies. "
        f"In brackets: 95% interval. {reports[0].note}",
    )
    raised = stored(paths.report(name) / ALARMS)
    if raised is not None:
        count = f"{len(raised)} alarms" if raised else "no alarm"
        create_markdown_artifact(
            markdown=markdown.render("alarms", alarms=raised),
            key=f"health-{name}",
            description=f"The training of {name} raised {count}",
        )
    curves = paths.report(name) / CURVES
    if curves.exists():
        picture = base64.b64encode(curves.read_bytes()).decode()
        create_image_artifact(
            image_url=f"data:image/png;base64,{picture}", key=f"curves-{name}", description=f"Training of {name}"
        )


def show_decision(decision: "Decision") -> None:
    """Put a decision on the run's page."""
    create_markdown_artifact(
        markdown=in_words(decision),
        key=f"decision-{decision.candidate}",
        description=f"{decision.candidate} {'may' if decision.promote else 'may not'} be promoted",
    )


def show_draft(draft: "Draft") -> None:
    """Put what a draft is about on the run's page."""
    targets = [
        {
            "rule": target.rule,
            "cases": str(target.n),
            "cost for every 100 answers": f"{target.worth:.2f}",
            "mean cost": f"{target.cost.value:.3f} [{target.cost.low:.3f}, {target.cost.high:.3f}]",
        }
        for target in draft.targets
    ]
    create_markdown_artifact(
        markdown=f"## {draft.name}, drafted from {draft.parent}\n\nLever: {draft.lever}. Draft number "
        f"{draft.drafts_on_exam} for the exam {draft.version['exam']}.\n\n{table(targets)}",
        key=f"draft-{draft.name}",
        description=f"{draft.name} is about what {draft.parent} misses",
    )


def comparison(reports: Sequence["EvalReport"]) -> list[dict[str, Any]]:
    """A row for each mode and each name that sat the exam, with every metric of the table and its interval."""
    return [
        {"mode": report.mode, "name": row.name}
        | {
            metric: f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"
            for metric, estimate in row.metrics.items()
        }
        for report in reports
        for row in report.rows
    ]


def in_words(decision: "Decision") -> str:
    """A decision as Markdown: the verdict, the reasons, who answered how, and every limit with what was observed."""
    against = f"the champion {decision.champion}" if decision.champion else "no champion"
    verdict = "may be promoted" if decision.promote else "may **not** be promoted"
    how = f" To approve it in a terminal: `clinrl approve {decision.digest} --as NAME`." if decision.promote else ""
    modes = dict.fromkeys(row.mode for row in decision.rows)
    return "\n\n".join(
        [
            f"## {decision.candidate} against {against}\n\n{decision.candidate} {verdict}.",
            "\n".join(f"- {reason}" for reason in decision.reasons),
            *chain.from_iterable(_answered(decision, mode) for mode in modes),
            "### Limits",
            table(_limits(decision)),
            f"Adapter `{decision.candidate_digest[:16]}`, exam `{decision.exam_digest[:16]}`.",
            f"Decision `{decision.digest}`.{how}",
        ]
    )


def _answered(decision: "Decision", mode: str) -> list[str]:
    """How everybody answered in a mode, and how far the candidate is ahead of each on the same cases."""
    rows = [row for row in decision.rows if row.mode == mode]
    metrics = list(rows[0].metrics)
    shares, leads = [], []
    for row in rows:
        is_champion = row.role == "rival" and row.name == decision.champion
        name = {"": f"{row.name} (champion)" if is_champion else row.name}
        shares.append(name | {metric: numbers.percent(row.metrics[metric]) for metric in metrics})
        if row.ahead:
            leads.append(name | {metric: numbers.points(row.ahead[metric]) for metric in metrics})
    return [
        f"### Mode {mode}",
        f"Measures as `clinrl.tasks.{decision.task}` defines them, with their 95% intervals in brackets.",
        table(shares),
        f"{decision.candidate} minus each, case by case:",
        table(leads),
    ]


def _limits(decision: "Decision") -> list[dict[str, str]]:
    """A row for each limit on a metric, with what was observed in each mode."""
    modes = list(dict.fromkeys(finding.mode for finding in decision.findings))
    found: dict[tuple[str, str], dict[str, str]] = {}
    for finding in decision.findings:
        observed = "not measured" if finding.observed is None else f"{finding.observed:.4g}"
        row = found.setdefault((finding.metric, finding.limit), dict.fromkeys(modes, ""))
        row[finding.mode] = observed if finding.passed else f"**refused**: {observed}"
    return [{"metric": metric, "limit": limit} | row for (metric, limit), row in found.items()]


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows with the same keys as a Markdown table; nothing for no rows."""
    return markdown.table(rows[0], (row.values() for row in rows)) if rows else ""
