"""The state of a version at its gate: from the audit log if it has a decision, else from its reports alone."""

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
from clinrl.release.moves import against_others, decisions_on, recorded_champion
from clinrl.types import Estimate

State = Literal["base", "open", "refused", "passed", "champion", "waived", "unknown"]
MEANS: Mapping[State, str] = {
    "champion": "holds the name champion, by the audit log",
    "passed": "a decision says that it may be promoted",
    "refused": "a decision refuses it, or its exam breaks a limit of the gate",
    "open": "nobody has decided, and its exam breaks no limit that can be checked without a rival",
    "unknown": "the audit log cannot be believed here, so nothing is known of decisions",
    "waived": "its recipe is known to be wrong, or learns of no label; it is kept as a control, and never released",
}
"""The meaning of each state except `base`, for the legend."""


@dataclass(frozen=True)
class Standing:
    """The state of one model at its gate, and the evidence for it."""

    state: State
    says: str
    findings: tuple[Finding, ...] = ()
    """Findings of the last decision; without one, of the limits that reports alone can be checked against."""
    lines: tuple[Entry, ...] = ()
    """The entries of the audit log about this model."""


class History:
    """The audit log by digest, so that the pages of all models read it once."""

    def __init__(self, log: Sequence[Entry], fault: str = "") -> None:
        """`fault`: why the audit log cannot be believed, if so; `log` is empty then."""
        self.fault = fault
        self._lines: dict[str, dict[int, Entry]] = {}
        for number, line in enumerate(log):
            for named in _digests(line.body):
                self._lines.setdefault(named, {})[number] = line
        models = {str(line.body["model"]) for line in log if line.kind in ("promotion", "rollback")}
        self.champions = {model: recorded_champion(model, log) for model in models}
        """The champion's digest of each registered model."""

    def about(self, adapter: str) -> list[Entry]:
        """The entries that name a model's digest, or the digest of a decision on it, oldest first."""
        own = self._lines.get(adapter, {})
        found = dict(own)
        for decision in decisions_on(adapter, [*own.values()]):
            found |= self._lines.get(digest(decision), {})
        return [line for _, line in sorted(found.items())]


def standing(
    params: Params, model: Model, reports: Mapping[str, EvalReport], agreement: Estimate | None, log: History
) -> Standing:
    """The state of a model. `agreement` is the one between its modes."""
    if model.kind == "base":
        return Standing("base", "The base, from which all versions start.")
    adapter = next((report.adapter_digest for report in reports.values()), "")
    lines = log.about(adapter) if adapter else []
    decisions = against_others(decisions_on(adapter, lines))
    findings = tuple(_findings(params, model, reports, agreement))
    if decisions:
        findings = tuple(Finding.model_validate(finding) for finding in decisions[-1]["findings"])
    broken = [finding.sentence for finding in findings if not finding.passed]
    made_of = (params.versions[name] for name in params.family(*model.parts))
    waiver = next((text for version in made_of if (text := params.profiles[version.profile].waiver)), "")
    state: State = "open"
    if adapter and log.champions.get(model.registered) == adapter:
        state, says = "champion", f"The champion of {model.registered}."
    elif decisions:
        state = "passed" if decisions[-1]["promote"] else "refused"
        says = " ".join(f"{reason[:1].upper()}{reason[1:]}." for reason in decisions[-1]["reasons"])
    elif waiver:
        state, says = "waived", f"Never released: {waiver}"
    elif log.fault:
        state, says = "unknown", f"What was decided is unknown: {log.fault}."
    elif broken:
        state, says = "refused", f"No decision was made. Its exam breaks the gate: {'; '.join(broken)}."
    elif not reports:
        says = f"It was not examined: `dvc repro {model.stage}` does it."
    else:
        says = f"Nobody has decided: `clinrl decide {model.name}` does, once it is registered."
    return Standing(state, says, findings, tuple(lines))


def _digests(body: Mapping[str, Any]) -> list[str]:
    """The digests in an entry of the model, of the decision, and of both sides of a rollback; not those of rivals."""
    sides = [body[side].get("digest") for side in ("from", "to") if isinstance(body.get(side), dict)]
    return [str(value) for value in (body.get("candidate_digest"), body.get("decision"), body.get("digest"), *sides)]


def _findings(
    params: Params, model: Model, reports: Mapping[str, EvalReport], agreement: Estimate | None
) -> Sequence[Finding]:
    """The findings on the absolute limits of the task's gate, from the reports."""
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
