"""The audit as a trainer plays it: one object, reset to a case, whose public methods are the tools.

Every public method except `reset` is offered to the model, so there are exactly eight. The object holds the facts of a
case alone: it could not tell right from wrong if it were asked to. Nothing that a model writes raises; what cannot be
done is answered with a text that begins with "error:", counted, and changes nothing.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

from clinrl.tasks.audit.cases import AuditCase, AuditFacts, Proposal, differences_of
from clinrl.tasks.audit.observations import (
    CATEGORICAL,
    NUMERIC,
    cohort_line,
    patient_lines,
    review_line,
    shapley_line,
    timeline_line,
)
from clinrl.tasks.audit.rules import ERROR_TYPES, Differences, PatientRecord
from clinrl.types import Strict

REVIEW: Final = "review_proposal"
INVESTIGATE: Final = "investigate_patient"
SHAP: Final = "request_shap"
COHORT: Final = "cohort_analysis"
TIMELINE: Final = "temporal_audit"
FLAG: Final = "flag_error"
APPROVE: Final = "approve"
SUBMIT: Final = "submit_audit_report"

ARGUMENTS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        REVIEW: ("proposal_id",),
        INVESTIGATE: ("patient_id",),
        SHAP: ("patient_id", "feature"),
        COHORT: ("feature",),
        TIMELINE: ("patient_id",),
        FLAG: ("proposal_id", "error_type", "reason"),
        APPROVE: ("proposal_id",),
        SUBMIT: ("report",),
    }
)
"""The tools with the names of their arguments, all of them text and all needed."""

CLOSED: Final = "closed"
"""The answer to any call after submission, or beyond the limit of calls. Such calls are not in the log."""

_FEATURES: Final = frozenset(CATEGORICAL) | frozenset(NUMERIC)


class Call(Strict):
    """One call of a tool."""

    tool: str
    arguments: dict[str, Any]
    """As given, whatever the types."""
    result: str
    valid: bool
    """False: it was answered with an error and did nothing."""


def calls_for(proposals: int) -> int:
    """How many calls an episode with so many proposals has room for."""
    return 8 * proposals + 4


def was_submitted(log: Iterable[Call]) -> bool:
    """Whether the audit was handed in."""
    return any(call.valid and call.tool == SUBMIT for call in log)


def _is_text(value: object) -> bool:
    """Models do not keep to the declared types."""
    return isinstance(value, str)


class AuditEnv:
    """One audit in progress; `reset` starts another, of which nothing before it is left."""

    __slots__ = ("_decided", "_differences", "_limit", "_log", "_proposals", "_records", "_submitted")

    def __init__(self) -> None:
        self._clear()

    def reset(self, case: str | AuditCase, **_: Any) -> None:
        """Start the audit of a case, or of its JSON text; the other columns of its row are ignored.

        Raises pydantic's ValidationError for a text that is no case.
        """
        self._start((AuditCase.model_validate_json(case) if isinstance(case, str) else case).facts)

    def review_proposal(self, proposal_id: str) -> str:
        """Read what the Actor argued about a proposal.

        Args:
            proposal_id: The proposal.
        """
        given = {"proposal_id": proposal_id}
        if self._over:
            return CLOSED
        proposal = self._proposals.get(proposal_id) if isinstance(proposal_id, str) else None
        if proposal is None:
            return self._refuse(REVIEW, given, self._no_proposal())
        return self._answer(REVIEW, given, review_line(proposal))

    def investigate_patient(self, patient_id: str) -> str:
        """Read a patient's record without dates, with the signed distance of each value from its limit.

        Args:
            patient_id: The patient.
        """
        given = {"patient_id": patient_id}
        if self._over:
            return CLOSED
        record = self._records.get(patient_id) if isinstance(patient_id, str) else None
        if record is None:
            return self._refuse(INVESTIGATE, given, self._no_patient())
        return self._answer(INVESTIGATE, given, patient_lines(record, self._differences[patient_id]))

    def request_shap(self, patient_id: str, feature: str) -> str:
        """Get the Shapley value of a number of the record in a fixed risk score.

        Args:
            patient_id: The patient.
            feature: The number, for example age.
        """
        given = {"patient_id": patient_id, "feature": feature}
        if self._over:
            return CLOSED
        record = self._records.get(patient_id) if isinstance(patient_id, str) else None
        if record is None:
            return self._refuse(SHAP, given, self._no_patient())
        if not isinstance(feature, str) or feature not in NUMERIC:
            return self._refuse(SHAP, given, f"no such number; there are {' '.join(NUMERIC)}")
        return self._answer(SHAP, given, shapley_line(record, tuple(self._records.values()), feature))

    def cohort_analysis(self, feature: str) -> str:
        """Compare both arms of the trial in one field of the records.

        Args:
            feature: The field, for example sex.
        """
        given = {"feature": feature}
        if self._over:
            return CLOSED
        if not isinstance(feature, str) or feature not in _FEATURES:
            return self._refuse(COHORT, given, f"no such field; there are {' '.join((*NUMERIC, *CATEGORICAL))}")
        return self._answer(COHORT, given, cohort_line(tuple(self._records.values()), feature))

    def temporal_audit(self, patient_id: str) -> str:
        """Read a patient's delay and death in days, with the signed distance from each limit.

        Args:
            patient_id: The patient.
        """
        given = {"patient_id": patient_id}
        if self._over:
            return CLOSED
        found = self._differences.get(patient_id) if isinstance(patient_id, str) else None
        if found is None:
            return self._refuse(TIMELINE, given, self._no_patient())
        return self._answer(TIMELINE, given, timeline_line(patient_id, found))

    def flag_error(self, proposal_id: str, error_type: str, reason: str) -> str:
        """Decide that the Actor is wrong about a proposal.

        Args:
            proposal_id: The proposal.
            error_type: The rule that the Actor missed or misapplied.
            reason: The distances that decide, then the Actor's fallacy.
        """
        given = {"proposal_id": proposal_id, "error_type": error_type, "reason": reason}
        if self._over:
            return CLOSED
        if (refusal := self._undecidable(proposal_id)) is not None:
            return self._refuse(FLAG, given, refusal)
        if not isinstance(error_type, str) or error_type not in ERROR_TYPES:
            return self._refuse(FLAG, given, f"no such error type; there are {' '.join(ERROR_TYPES)}")
        if not _is_text(reason):
            return self._refuse(FLAG, given, "the reason must be a text")
        self._decided.add(proposal_id)
        return self._answer(FLAG, given, "recorded")

    def approve(self, proposal_id: str) -> str:
        """Decide that the Actor is right about a proposal.

        Args:
            proposal_id: The proposal.
        """
        given = {"proposal_id": proposal_id}
        if self._over:
            return CLOSED
        if (refusal := self._undecidable(proposal_id)) is not None:
            return self._refuse(APPROVE, given, refusal)
        self._decided.add(proposal_id)
        return self._answer(APPROVE, given, "recorded")

    def submit_audit_report(self, report: str) -> str:
        """Hand in the audit. Nothing can be done after it.

        Args:
            report: What was found, in a few words.
        """
        given = {"report": report}
        if self._over:
            return CLOSED
        if not _is_text(report):
            return self._refuse(SUBMIT, given, "the report must be a text")
        self._submitted = True
        return self._answer(SUBMIT, given, "submitted")

    @property
    def log(self) -> tuple[Call, ...]:
        """Every call that was answered, in order."""
        return tuple(self._log)

    @property
    def submitted(self) -> bool:
        """Whether the audit was handed in."""
        return self._submitted

    @property
    def _over(self) -> bool:
        return self._submitted or len(self._log) >= self._limit

    def _clear(self) -> None:
        self._proposals: dict[str, Proposal] = {}
        self._records: dict[str, PatientRecord] = {}
        self._differences: dict[str, Differences] = {}
        self._limit = 0  # an audit that was never started is closed
        self._log: list[Call] = []
        self._decided: set[str] = set()
        self._submitted = False

    def _start(self, facts: AuditFacts) -> None:
        self._clear()
        self._proposals = {proposal.proposal_id: proposal for proposal in facts.proposals}
        self._records = {record.patient_id: record for record in facts.records}
        self._differences = differences_of(facts)
        self._limit = calls_for(len(facts.proposals))

    def _answer(self, tool: str, arguments: dict[str, Any], result: str, *, valid: bool = True) -> str:
        self._log.append(Call(tool=tool, arguments=arguments, result=result, valid=valid))
        return result

    def _refuse(self, tool: str, arguments: dict[str, Any], why: str) -> str:
        """Answer with an error. It never repeats what the model wrote, which may be of any length."""
        return self._answer(tool, arguments, f"error: {why}", valid=False)

    def _no_proposal(self) -> str:
        return f"no such proposal; there are {' '.join(self._proposals)}"

    def _no_patient(self) -> str:
        return f"no such patient; there are {' '.join(self._records)}"

    def _undecidable(self, proposal_id: Any) -> str | None:
        if not isinstance(proposal_id, str) or proposal_id not in self._proposals:
            return self._no_proposal()
        return f"{proposal_id} is already decided" if proposal_id in self._decided else None


def perform(env: AuditEnv, tool: str, arguments: Mapping[str, Any]) -> str:
    """Call a tool by its name. A call that no tool takes, for its name or its arguments, is answered and not logged.

    A trainer answers such a call itself and never reaches the environment.
    """
    if tool not in ARGUMENTS:
        return f"error: no such tool; there are {' '.join(ARGUMENTS)}"
    if set(arguments) != set(ARGUMENTS[tool]):
        return f"error: {tool} takes {' '.join(ARGUMENTS[tool])}"
    return str(getattr(env, tool)(**arguments))


def replay(facts: AuditFacts, calls: Iterable[tuple[str, Mapping[str, Any]]]) -> AuditEnv:
    """The environment after these calls from the start; equal calls, equal logs. Pure."""
    env = AuditEnv()
    env._start(facts)
    for tool, arguments in calls:
        perform(env, tool, arguments)
    return env
