"""How a version stands at its gate, from the audit log where it tells of it, else from its reports alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from clinrl.analysis.exam import EvalReport
from clinrl.artifacts import digest
from clinrl.config.model import Model
from clinrl.config.params import Params
from clinrl.release import gate
from clinrl.release.audit_log import Entry
from clinrl.release.form import BOTH_MODES, Finding
from clinrl.release.moves import decisions_on, recorded_champion
from clinrl.types import Estimate

State = Literal["base", "open", "refused", "passed", "champion", "waived"]
MEANS: Mapping[State, str] = {
    "champion": "holds the name champion, by the audit log",
    "passed": "a decision says that it may be promoted",
    "refused": "a decision refuses it, or its exam breaks a limit of the gate",
    "open": "nobody has decided, and its exam breaks no limit that can be told without a rival",
    "waived": "its recipe is known to be wrong, or learns of no label; it is kept as a control, and never released",
}
"""Every state of a version, for the legend."""


@dataclass(frozen=True)
class Standing:
    """What the gate says of one version or merge."""

    state: State
    says: str
    findings: tuple[Finding, ...] = ()
    """Of the last decision; without one, the limits that can be held against reports alone."""
    lines: tuple[Entry, ...] = ()
    """All of the audit log that is about it."""


def standing(
    params: Params, model: Model, reports: Mapping[str, EvalReport], agreement: Estimate | None, log: Sequence[Entry]
) -> Standing:
    """How a model stands. `agreement` is that of its modes, `log` the whole audit log."""
    if model.kind == "base":
        return Standing("base", "The base, from which all versions start.")
    mine = next((report.adapter_digest for report in reports.values()), "")
    lines = about(mine, log) if mine else []
    decisions = decisions_on(mine, log)
    findings = tuple(_findings(params, model, reports, agreement))
    if decisions:
        findings = tuple(Finding.model_validate(finding) for finding in decisions[-1]["findings"])
    broken = [finding.sentence for finding in findings if not finding.passed]
    made_of = (params.versions[name] for part in model.parts for name in params.lineage(part))
    waiver = next((text for version in made_of if (text := params.profiles[version.profile].waiver)), "")
    state: State = "open"
    if mine and recorded_champion(model.registered, log) == mine:
        state, says = "champion", f"The champion of {model.registered}."
    elif decisions:
        state = "passed" if decisions[-1]["promote"] else "refused"
        says = " ".join(f"{reason[:1].upper()}{reason[1:]}." for reason in decisions[-1]["reasons"])
    elif waiver:
        state, says = "waived", f"Never released: {waiver}"
    elif broken:
        state, says = "refused", f"No decision was made. Its exam breaks the gate: {'; '.join(broken)}."
    elif not reports:
        says = f"It was not examined: `dvc repro evaluate@{model.name}` does it."
    else:
        says = f"Nobody has decided: `clinrl decide {model.name}` does, once it is registered."
    return Standing(state, says, findings, tuple(lines))


def about(mine: str, log: Sequence[Entry]) -> list[Entry]:
    """The lines of the audit log that are about a model, by its digest, or by that of a decision on it."""
    names = {mine, *map(digest, decisions_on(mine, log))}
    return [line for line in log if names & set(_values(line.body))]


def _values(body: Mapping[str, Any]) -> list[str]:
    """The digests that a line names: its own, and those of both sides of a rollback. Rivals of a decision are not."""
    sides = [body[side].get("digest") for side in ("from", "to") if isinstance(body.get(side), dict)]
    return [str(value) for value in (body.get("candidate_digest"), body.get("decision"), body.get("digest"), *sides)]


def _findings(
    params: Params, model: Model, reports: Mapping[str, EvalReport], agreement: Estimate | None
) -> Sequence[Finding]:
    """The absolute limits of the task's gate, held against the reports."""
    spec = params.gates.get(model.task.name)
    if spec is None or not reports:
        return []
    found: list[Finding] = []
    for metric, limit in spec.limits.items():
        values = {mode: report.metrics.get(metric) for mode, report in reports.items()}
        if metric == "mode_agreement":
            values = {BOTH_MODES: agreement}
        found += gate.bounds(metric, limit, params.scale, values)
    return found
