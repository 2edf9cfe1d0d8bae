"""The rewards of an audit: the published episode score, the published table of bonuses, and a corrected score.

Every number is a field of `Reward`. All three read the log of calls at the end; the published bonuses were paid during
the episode, call by call, which showed the model the labels.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Final, Literal, NamedTuple

from pydantic import Field

from clinrl.tasks.audit import published
from clinrl.tasks.audit.cases import AuditCase, Truth, differences_of
from clinrl.tasks.audit.env import APPROVE, FLAG, INVESTIGATE, REVIEW, TIMELINE, Call
from clinrl.tasks.audit.evidence import names_fallacy, read, supports
from clinrl.tasks.audit.published import Dense, Episode
from clinrl.tasks.parts import Weight
from clinrl.types import Score, Strict

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]

TERMS: Final = (
    "detection", "evidence", "fallacy", "steps", "invalid", "unsubmitted", "malformed", "approvals", "activity",
    "clipping", "look_ups", "report",
)  # fmt: skip
"""The terms of a score. Every score has all of them; a term that does not apply is zero."""

NEEDED_CALLS: Final = 4
"""Needed calls per proposal: three look-ups and a decision. The report is one more call."""


class Corrected(Strict):
    """The numbers of the corrected score."""

    detection: Weight = 0.8
    """Weight of detection: F-beta of the flags times the share of clean proposals that were approved."""
    beta: Annotated[float, Field(gt=0.0)] = 1.5
    """Beta of F-beta, above 0: how much more recall counts than precision."""
    typed_credit: Fraction = 0.5
    """Worth of a flag of the right type without right evidence, 0 to 1; with it, 1; of a wrong type, 0."""
    ungrounded_credit: Fraction = 0.0
    """Factor of a flag's worth if not everything was looked up before it, 0 to 1."""
    evidence: Weight = 0.1
    """Weight of the share of proposals that were decided rightly after everything about them was looked up."""
    fallacy: Weight = 0.1
    """Weight of the share of errors whose fallacy was named, whatever its values, times detection."""
    step: Weight = 0.01
    """Cost of each call beyond those needed: four a proposal, and the report."""
    invalid: Weight = 0.02
    """Cost of each call that its tool refuses."""
    malformed: Weight = 0.02
    """Cost of each call that cannot be read, or that no tool takes."""
    most: Weight = 0.2
    """Greatest cost of each of the three kinds: step, invalid, malformed."""
    unsubmitted: Weight = 0.7
    """Cost of an audit without a report, which earns nothing either. By default it exceeds the greatest cost of the
    three kinds together, so that silence is the worst outcome."""

    @property
    def low(self) -> float:
        return -(3 * self.most + self.unsubmitted)

    @property
    def high(self) -> float:
        return math.fsum((self.detection, self.evidence, self.fallacy))


class Reward(Strict):
    """The kind of reward, and every number of each kind."""

    kind: Literal["published_episode", "published_dense", "corrected"] = "corrected"
    """Which of the three blocks below pays: corrected, episode or dense."""
    corrected: Corrected = Corrected()
    episode: Episode = Episode()
    dense: Dense = Dense()

    @property
    def _range(self) -> tuple[float, float]:
        return {
            "corrected": (self.corrected.low, self.corrected.high),
            "published_episode": (self.episode.floor, self.episode.ceiling),
            "published_dense": (self.dense.low, self.dense.high),
        }[self.kind]

    @property
    def low(self) -> float:
        return self._range[0]

    @property
    def high(self) -> float:
        return self._range[1]


PUBLISHED: Final = Reward(kind="published_episode")
CORRECTED: Final = Reward()


class Decided(NamedTuple):
    """One decision about a proposal, and its merits."""

    truth: Truth
    flagged: bool
    grounded: bool
    """The proposal was reviewed, and the patient investigated and audited for dates, before the decision."""
    typed: bool
    """The proposal was flagged with the right type."""
    evident: bool
    """The flag is typed, and its reason gives right evidence."""
    understood: bool
    """The flag is typed, and its reason names the Actor's fallacy."""

    @property
    def right(self) -> bool:
        """Whether a clean proposal was approved, or an error flagged as what it is."""
        return self.typed if self.truth.error else not self.flagged


def decisions(case: AuditCase, log: Sequence[Call]) -> tuple[Decided, ...]:
    """Every decision, in the order of the log. Pure; no text of a model makes it raise."""
    truths = {truth.proposal_id: truth for truth in case.key.truths}
    patients = {proposal.proposal_id: proposal.patient_id for proposal in case.facts.proposals}
    found = differences_of(case.facts)
    seen: set[tuple[str, ...] | None] = set()
    made = []
    for call in log:
        seen.add(published.action_key(call))
        if call.valid and call.tool in (FLAG, APPROVE):
            truth = truths[call.arguments["proposal_id"]]
            patient = patients[truth.proposal_id]
            typed = call.tool == FLAG and truth.error is not None and call.arguments["error_type"] == truth.error
            reason = read(call.arguments["reason"]) if typed else None
            made.append(
                Decided(
                    truth=truth,
                    flagged=call.tool == FLAG,
                    grounded={(REVIEW, truth.proposal_id), (INVESTIGATE, patient), (TIMELINE, patient)} <= seen,
                    typed=typed,
                    evident=reason is not None and supports(reason, found[patient], truth.deciding),
                    understood=reason is not None and names_fallacy(reason, truth.fallacy),
                )
            )
    return tuple(made)


def detection(case: AuditCase, made: Sequence[Decided], numbers: Corrected) -> float:
    """F-beta of the flags times specificity, 0 to 1: 1 if every error is flagged well and all else approved.

    Without errors F is 1; without clean proposals specificity is 1. An undecided proposal counts as neither.
    """
    errors = sum(truth.error is not None for truth in case.key.truths)
    clean = len(case.key.truths) - errors
    flags = sum(one.flagged for one in made)
    worth = math.fsum(_worth(one, numbers) for one in made)
    approved = sum(one.grounded and one.right for one in made if one.truth.error is None)
    f = published.f_beta(worth / flags if flags else 0.0, worth / errors, numbers.beta) if errors else 1.0
    return f * (approved / clean if clean else 1.0)


def _worth(one: Decided, numbers: Corrected) -> float:
    if not one.typed:
        return 0.0
    return (1.0 if one.evident else numbers.typed_credit) * (1.0 if one.grounded else numbers.ungrounded_credit)


def score(case: AuditCase, log: Sequence[Call], *, submitted: bool, malformed: int, reward: Reward) -> Score:
    """The reward of an episode, taken apart into all of `TERMS`; it lies in [reward.low, reward.high].

    `malformed`: calls that could not be read or that no tool takes; they are not in the log. No text of a model
    makes it raise.
    """
    terms = dict.fromkeys(TERMS, 0.0)
    if reward.kind == "published_episode":
        terms |= published.episode(case, log, reward.episode)
    elif reward.kind == "published_dense":
        terms |= published.dense(case, log, malformed, reward.dense)
    else:
        terms |= _corrected(case, log, submitted, malformed, reward.corrected)
    terms = {name: value + 0.0 for name, value in terms.items()}  # no minus zero in a report
    return Score(terms=terms, total=math.fsum(terms.values()))


def _corrected(
    case: AuditCase, log: Sequence[Call], submitted: bool, malformed: int, numbers: Corrected
) -> dict[str, float]:
    needed = NEEDED_CALLS * len(case.key.truths) + 1
    costs = {
        "steps": -min(numbers.most, numbers.step * max(0, len(log) - needed)),
        "invalid": -min(numbers.most, numbers.invalid * sum(not call.valid for call in log)),
        "malformed": -min(numbers.most, numbers.malformed * malformed),
    }
    if not submitted:
        return {**costs, "unsubmitted": -numbers.unsubmitted}
    made = decisions(case, log)
    found = detection(case, made, numbers)
    errors = sum(truth.error is not None for truth in case.key.truths)
    well = sum(one.grounded and one.right for one in made) / len(case.key.truths)
    understood = sum(one.grounded and one.understood for one in made) / errors if errors else 1.0
    return {
        **costs,
        "detection": numbers.detection * found,
        "evidence": numbers.evidence * well,
        "fallacy": numbers.fallacy * understood * found,
    }
