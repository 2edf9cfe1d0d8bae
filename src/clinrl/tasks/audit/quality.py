"""How an audit was done, episode by episode: what was looked up before deciding, and what calls were wasted."""

from collections.abc import Callable, Mapping
from typing import Final

from clinrl.tasks.audit.cases import AuditCase
from clinrl.tasks.audit.episodes import play_again
from clinrl.tasks.audit.rewards import NEEDED_CALLS, Corrected, Decided, decisions, detection
from clinrl.tasks.parts import Quality, Responses
from clinrl.types import Transcript


def detection_of(case: AuditCase, transcript: Transcript, responses: Responses) -> float | None:
    """F-beta of the grounded flags times the share of clean proposals approved, 0 to 1: what the corrected reward pays
    most for. 0 for an audit that was not handed in."""
    done = play_again(case, transcript)
    return detection(case, decisions(case, done.log), Corrected()) if done.submitted else 0.0


def _share(
    holds: Callable[[Decided], bool], among: Callable[[Decided], bool] = lambda one: True
) -> Callable[[AuditCase, Transcript, Responses], float | None]:
    """Share of the decisions, among some, of which something holds. None where there are none."""

    def share(case: AuditCase, transcript: Transcript, responses: Responses) -> float | None:
        verdicts = [holds(one) for one in decisions(case, play_again(case, transcript).log) if among(one)]
        return sum(verdicts) / len(verdicts) if verdicts else None

    return share


def invalid_share(case: AuditCase, transcript: Transcript, responses: Responses) -> float | None:
    """Share of the calls that did nothing: refused, or not to be read. None without a call."""
    done = play_again(case, transcript)
    refused = sum(not call.valid for call in done.log) + done.malformed
    return refused / (len(done.log) + done.malformed) if done.log or done.malformed else None


def calls_per_decision(case: AuditCase, transcript: Transcript, responses: Responses) -> float | None:
    """Calls for each decision that was made, those that did nothing too. None where nothing is decided."""
    done = play_again(case, transcript)
    made = len(decisions(case, done.log))
    return (len(done.log) + done.malformed) / made if made else None


def economy(case: AuditCase, transcript: Transcript, responses: Responses) -> float | None:
    """Calls that the episode needs for each that was made, at most 1. None without a call."""
    done = play_again(case, transcript)
    needed = NEEDED_CALLS * len(case.facts.proposals) + 1
    return min(1.0, needed / len(done.log)) if done.log else None


QUALITIES: Final[Mapping[str, Quality]] = {
    "detection": Quality(of=detection_of, worse="lower"),
    # Of all decisions, those before which everything was looked up.
    "grounded": Quality(of=_share(lambda one: one.grounded), worse="lower"),
    # Of the flags of the right type, those whose reason holds right evidence, and those that name the Actor's fallacy.
    "evidence": Quality(of=_share(lambda one: one.evident, lambda one: one.typed), worse="lower"),
    "fallacy_named": Quality(of=_share(lambda one: one.understood, lambda one: one.typed), worse="lower"),
    "invalid_calls": Quality(of=invalid_share, worse="higher"),
    "calls_per_decision": Quality(of=calls_per_decision, worse="higher", counts=True),
    "economy": Quality(of=economy, worse="lower"),
}
