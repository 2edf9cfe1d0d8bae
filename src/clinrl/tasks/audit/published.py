"""The published rewards: the episode score that trained the adapter, and the table of bonuses that was advertised.

The episode score divides by the errors of all patients, most of whom have no proposal, so that no audit reaches 1, and
it ignores the type of a flag. Both pay for look-ups, whether or not they are used.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

from pydantic import Field

from clinrl.tasks.audit.cases import MAX_PROPOSALS, AuditCase, Truth
from clinrl.tasks.audit.env import APPROVE, COHORT, FLAG, INVESTIGATE, REVIEW, SHAP, SUBMIT, TIMELINE, Call, calls_for
from clinrl.tasks.audit.rules import AGE, OVERRIDE, TEMPORAL, WINDOW, ErrorType
from clinrl.tasks.parts import Weight
from clinrl.types import Strict

MAX_CALLS: Final = calls_for(MAX_PROPOSALS)
"""The limit of calls in the largest episode. The declared range of the bonuses rests on it."""


class Episode(Strict):
    """The numbers of the published episode score."""

    detection: Weight = 0.7
    """Weight of F-beta of the flags."""
    approvals: Weight = 0.2
    """Weight of the share of approvals that are right."""
    activity: Weight = 0.1
    """Weight of the number of distinct actions."""
    beta: Annotated[float, Field(gt=0.0)] = 1.5
    """Beta of F-beta, above 0."""
    actions_per_error: Annotated[float, Field(gt=0.0)] = 3.0
    """Number of distinct actions per error that earns the whole weight of activity."""
    floor: float = 0.01
    """Least total."""
    ceiling: float = 0.99
    """Greatest total."""
    without_errors: tuple[float, float] = (0.5, 0.4)
    """Pay if no patient has an error: the first number, and the second times the share of right approvals."""


class Dense(Strict):
    """The numbers of the published table of bonuses, in the later of its two versions. The score is their sum."""

    flag: float = 0.30
    """Flag of an error, whatever its type."""
    false_flag: float = -0.25
    """Flag of a clean proposal."""
    approval: float = 0.15
    """Approval of a clean proposal."""
    false_approval: float = -0.20
    """Approval of an error."""
    review: float = 0.04
    """Review of a proposal."""
    look_up: float = 0.10
    """Investigation, or audit of the dates, of a patient who breaks a rule."""
    idle_look_up: float = 0.02
    """The same for another patient, or a Shapley value that does not matter."""
    shap: float = 0.12
    """Shapley value that matters to the rule that the patient breaks."""
    cohort: float = 0.06
    """Look at the cohort."""
    fallacy: float = 0.05
    """"Theory of mind": a right flag whose reason holds a keyword of its rule."""
    report: float = 0.05
    """Any report."""
    report_quality: float = 0.10
    """A report with at least two keywords."""
    completion: float = 0.08
    """A report after `completion_share` of the proposals are decided."""
    completion_share: float = 0.8
    """Share of proposals."""
    duplicate: float = -0.04
    """Repeated call."""
    decided_twice: float = -0.03
    """Second decision about a proposal."""
    invalid: float = -0.05
    """Call that its tool refuses, or that cannot be read."""
    step: float = -0.003
    """Each call that is neither invalid nor a second decision."""

    @property
    def _calls(self) -> tuple[float, ...]:
        look_ups = self.review, self.look_up, self.idle_look_up, self.shap, self.cohort
        return self.duplicate, self.invalid, self.decided_twice, *look_ups

    @property
    def _report(self) -> tuple[float, ...]:
        return self.report, self.report_quality, self.completion

    @property
    def low(self) -> float:
        """A lower bound of every total: the largest episode, with everything at the worst price."""
        flag = self.flag + min(self.fallacy, 0.0)
        decision = min(flag, self.false_flag, self.approval, self.false_approval, 0.0)
        call = min(*self._calls, 0.0) + min(self.step, 0.0)
        return MAX_PROPOSALS * decision + 2 * MAX_CALLS * call + sum(min(part, 0.0) for part in self._report)

    @property
    def high(self) -> float:
        """An upper bound of every total: the largest episode, with everything at the best price."""
        decision = max(self.flag + max(self.fallacy, 0.0), self.approval, self.false_flag, self.false_approval, 0.0)
        call = max(*self._calls, 0.0) + max(self.step, 0.0) + max(self.invalid, 0.0)  # as many malformed ones besides
        return MAX_PROPOSALS * decision + MAX_CALLS * call + sum(max(part, 0.0) for part in self._report)


FALLACY_KEYWORDS: Final[Mapping[ErrorType, tuple[str, ...]]] = {
    AGE: ("age", "old", "young", "eligib"),
    TEMPORAL: ("death", "temporal", "before", "deceased", "timeline"),
    WINDOW: ("window", "delay", "schedule", "days", "late"),
    OVERRIDE: ("comorbidity", "override", "exception", "stage iv"),
}
REPORT_KEYWORDS: Final = (
    "age", "temporal", "window", "bias", "comorbidity", "hallucination", "death", "protocol", "override",
)  # fmt: skip
REPORT_HITS: Final = 2

RELEVANT: Final[Mapping[ErrorType, frozenset[str]]] = {
    AGE: frozenset({"age"}), OVERRIDE: frozenset({"comorbidity"}), TEMPORAL: frozenset(), WINDOW: frozenset(),
}  # fmt: skip
"""The features whose Shapley value matters to each rule, among those that a model can request here."""


def f_beta(precision: float, recall: float, beta: float) -> float:
    """The weighted harmonic mean of precision and recall, 0 to 1; 0 if both are 0."""
    weighted = beta**2 * precision + recall
    return (1 + beta**2) * precision * recall / weighted if weighted else 0.0


def episode(case: AuditCase, log: Sequence[Call], numbers: Episode) -> dict[str, float]:
    """The terms of the published episode score; `clipping` is the change by its rounding and clipping."""
    wrong = {truth.proposal_id for truth in case.key.truths if truth.error is not None}
    flags = [call.arguments["proposal_id"] in wrong for call in log if call.valid and call.tool == FLAG]
    approvals = [call.arguments["proposal_id"] not in wrong for call in log if call.valid and call.tool == APPROVE]
    quality = sum(approvals) / max(1, len(approvals))
    errors = case.key.pool_errors
    if errors == 0:
        base, slope = numbers.without_errors
        terms = {"approvals": slope * quality, "activity": base}
    else:
        actions = {key for call in log if (key := action_key(call)) is not None}
        terms = {
            "detection": numbers.detection * f_beta(sum(flags) / max(1, len(flags)), sum(flags) / errors, numbers.beta),
            "approvals": numbers.approvals * quality,
            "activity": numbers.activity * min(1.0, len(actions) / (numbers.actions_per_error * errors)),
        }
    plain = math.fsum(terms.values())
    terms["clipping"] = min(numbers.ceiling, max(numbers.floor, round(plain, 4))) - plain
    return terms


def action_key(call: Call) -> tuple[str, ...] | None:
    """The identity of an action that counts; None for an invalid call, and for a report, which has no effect."""
    if not call.valid or call.tool == SUBMIT:
        return None
    return call.tool, *(
        call.arguments[name] for name in ("proposal_id", "patient_id", "feature") if name in call.arguments
    )


def dense(case: AuditCase, log: Sequence[Call], malformed: int, numbers: Dense) -> dict[str, float]:
    """The sums of the published bonuses by term. At most `MAX_CALLS` malformed calls count, so that the range holds."""
    truths = {truth.proposal_id: truth for truth in case.key.truths}
    broken = {proposal.patient_id: truths[proposal.proposal_id].broken for proposal in case.facts.proposals}
    terms = dict.fromkeys(("detection", "approvals", "fallacy", "look_ups", "report", "steps", "invalid"), 0.0)
    terms["malformed"] = numbers.invalid * min(malformed, MAX_CALLS)
    seen: set[tuple[str, ...]] = set()
    decided = 0
    for call in log:
        if not call.valid:
            twice = call.tool in (FLAG, APPROVE) and _names_one(call.arguments["proposal_id"], seen)
            terms["invalid"] += numbers.decided_twice if twice else numbers.invalid
            continue
        terms["steps"] += numbers.step
        key = action_key(call)
        if key is not None and key in seen:
            terms["look_ups"] += numbers.duplicate
            continue
        if key is not None:
            seen.add(key)
        if call.tool in (FLAG, APPROVE):
            decided += 1
            truth = truths[call.arguments["proposal_id"]]
            if call.tool == APPROVE:
                terms["approvals"] += numbers.false_approval if truth.error else numbers.approval
            else:
                terms["detection"] += numbers.flag if truth.error else numbers.false_flag
                terms["fallacy"] += numbers.fallacy * _names_a_keyword(truth, call.arguments["reason"])
        elif call.tool == SUBMIT:
            report = call.arguments["report"].lower()
            is_wordy = sum(word in report for word in REPORT_KEYWORDS) >= REPORT_HITS
            terms["report"] += numbers.report + numbers.report_quality * is_wordy
            terms["report"] += numbers.completion * (decided >= numbers.completion_share * len(truths))
        else:
            terms["look_ups"] += _look_up(call, broken, numbers)
    return terms


def _names_one(proposal_id: Any, seen: set[tuple[str, ...]]) -> bool:
    """Whether this is the id of a decided proposal. A model may have given a value of any type."""
    return isinstance(proposal_id, str) and any((tool, proposal_id) in seen for tool in (FLAG, APPROVE))


def _look_up(call: Call, broken: Mapping[str, ErrorType | None], numbers: Dense) -> float:
    if call.tool == REVIEW:
        return numbers.review
    if call.tool == COHORT:
        return numbers.cohort
    rule = broken.get(call.arguments["patient_id"])
    if call.tool == SHAP:
        return numbers.shap if rule and call.arguments["feature"] in RELEVANT[rule] else numbers.idle_look_up
    assert call.tool in (INVESTIGATE, TIMELINE), f"no reward for {call.tool}"
    return numbers.look_up if rule else numbers.idle_look_up


def _names_a_keyword(truth: Truth, reason: str) -> bool:
    return truth.error is not None and any(word in reason.lower() for word in FALLACY_KEYWORDS[truth.error])
