"""The environment of an audit for trainers: one object, reset to a case, whose public methods are the tools.

Every public method except `reset` is offered to the model, and there are exactly eight. The docstrings of the tools are
part of the model's prompt. The object holds only the facts of a case, so it cannot tell right from wrong. No text of a
model raises: a call that cannot be done is answered with a text that begins with "error:", counted, and has no effect.
"""

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any, Final, TypeVar

from clinrl.tasks.audit.cases import AuditCase, differences_of
from clinrl.tasks.audit.observations import (
    CATEGORICAL,
    NUMERIC,
    cohort_line,
    patient_lines,
    review_line,
    shapley_line,
    timeline_line,
)
from clinrl.tasks.audit.rules import ERROR_TYPES
from clinrl.types import Strict

REVIEW: Final = "review_proposal"
INVESTIGATE: Final = "investigate_patient"
SHAP: Final = "request_shap"
COHORT: Final = "cohort_analysis"
TIMELINE: Final = "temporal_audit"
FLAG: Final = "flag_error"
APPROVE: Final = "approve"
SUBMIT: Final = "submit_audit_report"

CLOSED: Final = "closed"
"""The answer to any call after submission, or beyond the limit of calls. Such calls are not in the log."""

RECORDED: Final = "recorded"
"""The answer to a decision."""


T = TypeVar("T")


class _Invalid(Exception):
    """A call cannot be done. The message says why."""


class Call(Strict):
    """One call of a tool."""

    tool: str
    arguments: dict[str, Any]
    """The arguments as given, of any types."""
    result: str
    valid: bool
    """False: the call was answered with an error and had no effect."""


def calls_for(proposals: int) -> int:
    """The limit of calls in an episode with this number of proposals."""
    return 8 * proposals + 4


class AuditEnv:
    """One audit in progress. `reset` starts another, and nothing of the one before is left."""

    __slots__ = ("_decided", "_differences", "_limit", "_log", "_proposals", "_records", "submitted")

    def __init__(self) -> None:
        self._limit = 0  # an audit that was never started is closed
        self._log: list[Call] = []
        self.submitted = False
        """Whether the audit was handed in."""

    def reset(self, case: str | AuditCase, **_: Any) -> None:
        """Start the audit of a case, or of its JSON text; the other columns of its row are ignored.

        Raises pydantic's ValidationError for a text that is no case.
        """
        facts = (AuditCase.model_validate_json(case) if isinstance(case, str) else case).facts
        self._proposals = {proposal.proposal_id: proposal for proposal in facts.proposals}
        self._records = {record.patient_id: record for record in facts.records}
        self._differences = differences_of(facts)
        self._limit = calls_for(len(facts.proposals))
        self._log = []
        self._decided: set[str] = set()
        self.submitted = False

    def review_proposal(self, proposal_id: str) -> str:
        """Read what the Actor argued about a proposal.

        Args:
            proposal_id: The proposal.
        """
        return self._call(
            REVIEW,
            {"proposal_id": proposal_id},
            lambda: review_line(_find(self._proposals, proposal_id, "proposal")),
        )

    def investigate_patient(self, patient_id: str) -> str:
        """Read a patient's record without dates, with the signed distance of each value from its limit.

        Args:
            patient_id: The patient.
        """
        return self._call(
            INVESTIGATE,
            {"patient_id": patient_id},
            lambda: patient_lines(_find(self._records, patient_id, "patient"), self._differences[patient_id]),
        )

    def request_shap(self, patient_id: str, feature: str) -> str:
        """Get the Shapley value of a number of the record in a fixed risk score.

        Args:
            patient_id: The patient.
            feature: The number, for example age.
        """

        def line() -> str:
            record = _find(self._records, patient_id, "patient")
            _find(NUMERIC, feature, "number")
            return shapley_line(record, tuple(self._records.values()), feature)

        return self._call(SHAP, {"patient_id": patient_id, "feature": feature}, line)

    def cohort_analysis(self, feature: str) -> str:
        """Compare both arms of the trial in one field of the records.

        Args:
            feature: The field, for example sex.
        """

        def line() -> str:
            _find({**NUMERIC, **CATEGORICAL}, feature, "field")
            return cohort_line(tuple(self._records.values()), feature)

        return self._call(COHORT, {"feature": feature}, line)

    def temporal_audit(self, patient_id: str) -> str:
        """Read a patient's delay and death in days, with the signed distance from each limit.

        Args:
            patient_id: The patient.
        """
        return self._call(
            TIMELINE,
            {"patient_id": patient_id},
            lambda: timeline_line(patient_id, _find(self._differences, patient_id, "patient")),
        )

    def flag_error(self, proposal_id: str, error_type: str, reason: str) -> str:
        """Decide that the Actor is wrong about a proposal.

        Args:
            proposal_id: The proposal.
            error_type: The rule that the Actor missed or misapplied.
            reason: The distances that decide, then the Actor's fallacy.
        """

        def flag() -> str:
            self._check_open(proposal_id)
            _find(dict.fromkeys(ERROR_TYPES), error_type, "error type")
            _check_text(reason, "reason")
            return self._decide(proposal_id)

        return self._call(FLAG, {"proposal_id": proposal_id, "error_type": error_type, "reason": reason}, flag)

    def approve(self, proposal_id: str) -> str:
        """Decide that the Actor is right about a proposal.

        Args:
            proposal_id: The proposal.
        """
        return self._call(APPROVE, {"proposal_id": proposal_id}, lambda: self._decide(proposal_id))

    def submit_audit_report(self, report: str) -> str:
        """Hand in the audit. Nothing can be done after it.

        Args:
            report: What was found, in a few words.
        """

        def submit() -> str:
            _check_text(report, "report")
            self.submitted = True
            return "submitted"

        return self._call(SUBMIT, {"report": report}, submit)

    @property
    def log(self) -> tuple[Call, ...]:
        """Every call that was answered, in order."""
        return tuple(self._log)

    def _call(self, tool: str, arguments: dict[str, Any], answer: Callable[[], str]) -> str:
        """Make a call and log it. An error never repeats the text of the model, which may be of any length."""
        if self.submitted or len(self._log) >= self._limit:
            return CLOSED
        try:
            result, valid = answer(), True
        except _Invalid as error:
            result, valid = f"error: {error}", False
        self._log.append(Call(tool=tool, arguments=arguments, result=result, valid=valid))
        return result

    def _check_open(self, proposal_id: str) -> None:
        _find(self._proposals, proposal_id, "proposal")
        if proposal_id in self._decided:
            raise _Invalid(f"{proposal_id} is already decided")

    def _decide(self, proposal_id: str) -> str:
        self._check_open(proposal_id)
        self._decided.add(proposal_id)
        return RECORDED


ARGUMENTS: Final[Mapping[str, tuple[str, ...]]] = {
    tool: tuple(signature(getattr(AuditEnv, tool)).parameters)[1:]
    for tool in (REVIEW, INVESTIGATE, SHAP, COHORT, TIMELINE, FLAG, APPROVE, SUBMIT)
}
"""The names of the arguments of each tool. All are texts, and all are required."""


def _find(known: Mapping[str, T], name: object, kind: str) -> T:
    if not isinstance(name, str) or name not in known:  # models do not keep to the declared types
        raise _Invalid(f"no such {kind}; there are {' '.join(known)}")
    return known[name]


def _check_text(value: object, kind: str) -> None:
    if not isinstance(value, str):
        raise _Invalid(f"the {kind} must be a text")


def perform(env: AuditEnv, tool: str, arguments: Mapping[str, Any]) -> str:
    """Call a tool by its name. A call with an unknown tool or other arguments is answered, but not logged.

    A trainer answers such a call itself, and the call never reaches the environment.
    """
    if tool not in ARGUMENTS:
        return f"error: no such tool; there are {' '.join(ARGUMENTS)}"
    if set(arguments) != set(ARGUMENTS[tool]):
        return f"error: {tool} takes {' '.join(ARGUMENTS[tool])}"
    return str(getattr(env, tool)(**arguments))
