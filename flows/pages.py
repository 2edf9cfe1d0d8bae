"""The artifacts on a run's page in Prefect: the comparison table, the training curves, and the decision."""

import base64
from typing import Any

from prefect.artifacts import create_image_artifact, create_markdown_artifact, create_table_artifact

from clinrl import paths
from clinrl.analysis.alerts import stored
from clinrl.config.params import Params
from clinrl.evaluation.answers import ALARMS, load_report
from clinrl.pipeline.propose import Draft
from clinrl.release.form import Finding
from clinrl.release.gate import Decision
from clinrl.reports import numbers
from clinrl.reports import render as markdown

CURVES = "curves.png"


def show_exam(params: Params, name: str) -> None:
    """Put the comparison table of a version or a merge on the run's page, and its training curves if it has any."""
    reports = [load_report(name, mode) for mode in params.modes]
    create_table_artifact(
        table=[
            {"mode": report.mode, "name": row.name}
            | {metric: numbers.decimal(estimate) for metric, estimate in row.metrics.items()}
            for report in reports
            for row in report.rows
        ],
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


def show_decision(decision: Decision) -> None:
    """Put a decision on the run's page."""
    create_markdown_artifact(
        markdown=decision_page(decision),
        key=f"decision-{decision.candidate}",
        description=f"{decision.candidate} {'may' if decision.promote else 'may not'} be promoted",
    )


def show_draft(draft: Draft) -> None:
    """Put the subject of a draft on the run's page."""
    create_markdown_artifact(
        markdown=markdown.render("draft", draft=draft),
        key=f"draft-{draft.name}",
        description=f"{draft.name} is about what {draft.parent} misses",
    )


def decision_page(decision: Decision) -> str:
    """A decision as Markdown: the verdict, its reasons, the answers of each model, and every limit as observed."""
    return markdown.render("decision", **_limits(decision))


def approval_page(decision: Decision, wrong: str) -> str:
    """The question to an approver, below the decision; `wrong` is why it is asked again, if it is."""
    return markdown.render("approval", wrong=wrong, **_limits(decision))


def _limits(decision: Decision) -> dict[str, Any]:
    """A decision with its findings by limit and mode: a row for each limit."""
    modes = list(dict.fromkeys(finding.mode for finding in decision.findings))
    limits: dict[tuple[str, str], dict[str, Finding | None]] = {}
    for finding in decision.findings:
        limits.setdefault((finding.metric, finding.limit), dict.fromkeys(modes))[finding.mode] = finding
    return {"decision": decision, "modes": modes, "limits": limits, "points": numbers.points}
