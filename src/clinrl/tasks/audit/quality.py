"""How an audit was done, episode by episode: what was looked up before deciding, and what calls were wasted."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from clinrl.tasks.audit.cases import AuditCase
from clinrl.tasks.audit.episodes import played
from clinrl.tasks.audit.rewards import NEEDED_CALLS, Corrected, decisions, detection
from clinrl.tasks.parts import Quality, Responses
from clinrl.types import Transcript


def found(case: AuditCase, transcript: Transcript, responses: Responses) -> float | None:
    """F-beta of the grounded flags times the share of clean proposals approved, 0 to 1: what the corrected reward pays
    most for. 0 for an audit that was not handed in."""
    done = played(case, transcript)
    return detection(case, decisions(case, done.log), Corrected()) if done.submitted else 0.0


def grounded(case: AuditCase, transcript: Transcript, responses: Responses) -> float | None:
    """Share of the decisions before which everything was looked up. None where nothing is decided."""
    made = decisions(case, played(case, transcript).log)
    return sum(one.grounded for one in made) / len(made) if made else None


def evident(case: AuditCase, transcript: Transcript, responses: Responses) -> float | None:
    """Share of the flags of the right type whose reason holds right evidence. None without such a flag."""
    flags = [one for one in decisions(case, played(case, transcript).log) if one.typed]
    return sum(one.evident for one in flags) / len(flags) if flags else None


def understood(case: AuditCase, transcript: Transcript, responses: Responses) -> float | None:
    """Share of the flags of the right type that name the Actor's fallacy. None without such a flag."""
    flags = [one for one in decisions(case, played(case, transcript).log) if one.typed]
    return sum(one.understood for one in flags) / len(flags) if flags else None


def invalid(case: AuditCase, transcript: Transcript, responses: Responses) -> float | None:
    """Share of the calls that did nothing: refused, or not to be read. None without a call."""
    done = played(case, transcript)
    refused = sum(not call.valid for call in done.log) + done.malformed
    return refused / (len(done.log) + done.malformed) if done.log or done.malformed else None


def calls(case: AuditCase, transcript: Transcript, responses: Responses) -> float | None:
    """Calls for each decision that was made, those that did nothing too. None where nothing is decided."""
    done = played(case, transcript)
    made = len(decisions(case, done.log))
    return (len(done.log) + done.malformed) / made if made else None


def economy(case: AuditCase, transcript: Transcript, responses: Responses) -> float | None:
    """Calls that the episode needs for each that was made, at most 1. None without a call."""
    done = played(case, transcript)
    needed = NEEDED_CALLS * len(case.facts.proposals) + 1
    return min(1.0, needed / len(done.log)) if done.log else None


QUALITIES: Final[Mapping[str, Quality]] = MappingProxyType(
    {
        "detection": Quality(of=found, worse="lower"),
        "grounded": Quality(of=grounded, worse="lower"),
        "evidence": Quality(of=evident, worse="lower"),
        "fallacy_named": Quality(of=understood, worse="lower"),
        "invalid_calls": Quality(of=invalid, worse="higher"),
        "calls_per_decision": Quality(of=calls, worse="higher", counts=True),
        "economy": Quality(of=economy, worse="lower"),
    }
)
