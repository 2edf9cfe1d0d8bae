"""How an audit was done, episode by episode: what was looked up before deciding, and what calls were wasted."""

from collections.abc import Mapping, Sequence
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


def grounded_share(case: AuditCase, transcript: Transcript, responses: Responses) -> float | None:
    """Share of the decisions before which everything was looked up. None where nothing is decided."""
    return _mean([one.grounded for one in _decisions(case, transcript)])


def evident_share(case: AuditCase, transcript: Transcript, responses: Responses) -> float | None:
    """Share of the flags of the right type whose reason holds right evidence. None without such a flag."""
    return _mean([one.evident for one in _decisions(case, transcript) if one.typed])


def understood_share(case: AuditCase, transcript: Transcript, responses: Responses) -> float | None:
    """Share of the flags of the right type that name the Actor's fallacy. None without such a flag."""
    return _mean([one.understood for one in _decisions(case, transcript) if one.typed])


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


def _decisions(case: AuditCase, transcript: Transcript) -> Sequence[Decided]:
    return decisions(case, play_again(case, transcript).log)


def _mean(verdicts: Sequence[bool]) -> float | None:
    return sum(verdicts) / len(verdicts) if verdicts else None


QUALITIES: Final[Mapping[str, Quality]] = {
    "detection": Quality(of=detection_of, worse="lower"),
    "grounded": Quality(of=grounded_share, worse="lower"),
    "evidence": Quality(of=evident_share, worse="lower"),
    "fallacy_named": Quality(of=understood_share, worse="lower"),
    "invalid_calls": Quality(of=invalid_share, worse="higher"),
    "calls_per_decision": Quality(of=calls_per_decision, worse="higher", counts=True),
    "economy": Quality(of=economy, worse="lower"),
}
