"""The prompt and the output contract: EXTRACTION, ESI ALGORITHM (steps A to D), ANSWER, with or without thinking.

The three blocks and their bullets are the published contract of the series; the wording is this project's own.
"""

from clinrl.tasks.esi import imported
from clinrl.tasks.esi.cases import EsiCase, EsiFacts
from clinrl.tasks.esi.complaints import FINDING_SAYS
from clinrl.tasks.esi.imported import ImportedKey
from clinrl.tasks.esi.rules import (
    EXTREME_TEMPERATURES_C,
    RULES,
    Decision,
    Edition,
    Presentation,
    band,
    decide,
    hypotension_limit_mmhg,
)
from clinrl.types import Message, Transcript, transcript_of

SYSTEM = (
    "You are an experienced emergency triage nurse. Read the note and assign an Emergency Severity Index level from 1 "
    "(most urgent) to 5. Write three blocks and at most 150 words: EXTRACTION with the chief complaint, vital signs "
    "and red flags; ESI ALGORITHM with steps A (lifesaving), B (high-risk), C (resources) and D (vitals); and a last "
    "line ANSWER: ESI n."
)

_SAYS = {rule.id: rule.says for rule in RULES}


def prompt(facts: EsiFacts) -> list[Message]:
    """System and user turn of one narrative."""
    return [Message(role="system", content=SYSTEM), Message(role="user", content=facts.narrative)]


def gold(case: EsiCase, *, thinking: bool, omit: frozenset[str] = frozenset()) -> Transcript:
    """The turn of a nurse who reads everything and knows every rule except `omit`, which means nothing to imports."""
    if isinstance(case.key, ImportedKey):
        return transcript_of(imported.gold(case.key, thinking=thinking))
    patient = case.key.presentation
    decision = decide(patient, edition=case.key.edition, omit=omit)
    turn = Message(
        role="assistant",
        content=_blocks(patient, decision),
        thinking=_thoughts(patient, decision, case.key.edition) if thinking else None,
    )
    return transcript_of(turn)


def red_flags(p: Presentation) -> tuple[str, ...]:
    """What stands out in a presentation, whether or not a rule uses it."""
    flags = [FINDING_SAYS[finding] for finding in p.findings]
    if p.pain is not None and p.pain >= 7:
        flags.append(f"pain {p.pain} {p.pain_site}" if p.pain_site != "none" else f"pain {p.pain}")
    if p.sbp_mmhg is not None and p.sbp_mmhg < hypotension_limit_mmhg(p.age_years):
        flags.append(f"SBP {p.sbp_mmhg}")
    if p.temp_c is not None and (p.temp_c >= 38.0 or p.temp_c < EXTREME_TEMPERATURES_C[0]):
        flags.append(f"T {p.temp_c}")
    if p.baseline_spo2_pct is not None:
        flags.append(f"baseline {p.baseline_spo2_pct}")
    return tuple(flags)


def _blocks(p: Presentation, decision: Decision) -> str:
    vitals = ", ".join(
        f"{name} {'n/a' if value is None else value}{' out' if name in decision.over else ''}"
        for name, value in _vitals(p)
    )
    point = decision.point
    reason, counted = _SAYS.get(decision.rule, ""), f"{', '.join(p.resources) or 'none'} = {decision.resource_count}"
    return "\n".join(
        (
            "EXTRACTION:",
            f"- Chief complaint: {p.complaint}",
            f"- Vital signs: {vitals}",
            f"- Red flags: {', '.join(red_flags(p)) or 'none'}",
            "ESI ALGORITHM:",
            f"- Step A (lifesaving): {f'yes, {reason}' if point == 'A' else 'no'}",
            f"- Step B (high-risk): {'-' if point == 'A' else f'yes, {reason}' if point == 'B' else 'no'}",
            f"- Step C (resources): {'-' if point in 'AB' else counted}",
            f"- Step D (vitals): {'-' if point in 'AB' else 'raise' if point == 'D' else 'no'}",
            f"ANSWER: ESI {decision.level}",
        )
    )


def _thoughts(p: Presentation, decision: Decision, edition: Edition) -> str:
    limits = band(p.age_years, edition)
    compared = ", ".join(
        f"{name} {'n/a' if value is None else value} {'over' if name in decision.over else 'fine'}"
        for name, value in _vitals(p)
    )
    return (
        f"Limits HR {limits.hr_bpm} RR {limits.rr_bpm}: {compared}.\n"
        f"Flags: {', '.join(red_flags(p)) or 'none'}.\n"
        f"Needs: {', '.join(p.resources) or 'none'}."
    )


def _vitals(p: Presentation) -> tuple[tuple[str, int | None], ...]:
    return (("HR", p.hr_bpm), ("RR", p.rr_bpm), ("SpO2", p.spo2_pct))
