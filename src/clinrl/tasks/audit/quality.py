"""Measures of how an episode was audited: look-ups before decisions, evidence, and wasted calls."""

from collections.abc import Callable, Mapping
from typing import Final

from clinrl.tasks.audit.cases import AuditCase
from clinrl.tasks.audit.episodes import play_again
from clinrl.tasks.audit.rewards import NEEDED_CALLS, Corrected, Decided, decisions, detection
from clinrl.tasks.parts import Quality, Responses
from clinrl.types import Transcript


def detection_of(case: AuditCase, transcript: Transcript, responses: Responses) -> float | None:
    """The detection of the default corrected reward, 0 to 1: F-beta of the grounded flags times the share of clean
    proposals approved. 0 for an audit that was not submitted."""
    done = play_again(case, transcript)
    return detection(case, decisions(case, done.log), Corrected()) if done.submitted else 0.0


def _share(
    holds: Callable[[Decided], bool], among: Callable[[Decided], bool] = lambda one: True
) -> Callable[[AuditCase, Transcript, Responses], float | None]:
    """A measure: the share of the decisions in `among` for which `holds` is true. None without such decisions."""

    def share(case: AuditCase, transcript: Transcript, responses: Responses) -> float | None:
        verdicts = [holds(one) for one in decisions(case, play_again(case, transcript).log) if among(one)]
        return sum(verdicts) / len(verdicts) if verdicts else None

    return share


def invalid_share(case: AuditCase, transcript: Transcript, responses: Responses) -> float | None:
    """Share of the calls without effect: refused or unreadable ones. None without a call."""
    done = play_again(case, transcript)
    refused = sum(not call.valid for call in done.log) + done.malformed
    return refused / (len(done.log) + done.malformed) if done.log or done.malformed else None


def calls_per_decision(case: AuditCase, transcript: Transcript, responses: Responses) -> float | None:
    """Calls per decision, those without effect included. None without a decision."""
    done = play_again(case, transcript)
    made = len(decisions(case, done.log))
    return (len(done.log) + done.malformed) / made if made else None


def economy(case: AuditCase, transcript: Transcript, responses: Responses) -> float | None:
    """Number of calls that the episode needs, divided by the number of logged calls; at most 1. None without a call."""
    done = play_again(case, transcript)
    needed = NEEDED_CALLS * len(case.facts.proposals) + 1
    return min(1.0, needed / len(done.log)) if done.log else None


QUALITIES: Final[Mapping[str, Quality]] = {
    "detection": Quality(of=detection_of, worse="lower"),
    # Share of all decisions that follow every look-up.
    "grounded": Quality(of=_share(lambda one: one.grounded), worse="lower"),
    # Shares of the flags of the right type: with right evidence in the reason, and with the name of the fallacy.
    "evidence": Quality(of=_share(lambda one: one.evident, lambda one: one.typed), worse="lower"),
    "fallacy_named": Quality(of=_share(lambda one: one.understood, lambda one: one.typed), worse="lower"),
    "invalid_calls": Quality(of=invalid_share, worse="higher"),
    "calls_per_decision": Quality(of=calls_per_decision, worse="higher", counts=True),
    "economy": Quality(of=economy, worse="lower"),
}
