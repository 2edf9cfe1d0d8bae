"""The prompt and the output contract: EXTRACTION, ESI ALGORITHM (steps A to D), ANSWER, with or without thinking.

The three blocks and their bullets are the published contract of the series; the wording is this project's own.
"""

from collections.abc import Sequence

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
    hypotensive,
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
    return [Message(role="system", content=SYSTEM), Message(role="user", content=facts.narrative)]


def gold(case: EsiCase, *, thinking: bool, omit: frozenset[str] = frozenset()) -> Transcript:
    """The turn of a nurse who reads everything and knows every rule except `omit`.

    The records do not give the reason for an imported level: its turn has the measured values and the steps that follow
    from the level, claims no finding, and ignores `omit`.
    """
    if isinstance(case.key, ImportedKey):
        content, thoughts = _imported(case.key)
    else:
        patient = case.key.presentation
        decision = decide(patient, edition=case.key.edition, omit=omit)
        content, thoughts = _drawn(patient, decision), _thoughts(patient, decision, case.key.edition)
    return transcript_of(Message(role="assistant", content=content, thinking=thoughts if thinking else None))


def red_flags(p: Presentation) -> tuple[str, ...]:
    """The alarming facts of a presentation, whether or not a rule uses them."""
    flags = [FINDING_SAYS[finding] for finding in p.findings]
    if p.pain is not None and p.pain >= 7:
        flags.append(f"pain {p.pain} {p.pain_site}" if p.pain_site != "none" else f"pain {p.pain}")
    if hypotensive(p):
        flags.append(f"SBP {p.sbp_mmhg}")
    if p.temp_c is not None and (p.temp_c >= 38.0 or p.temp_c < EXTREME_TEMPERATURES_C[0]):
        flags.append(f"T {p.temp_c}")
    if p.baseline_spo2_pct is not None:
        flags.append(f"baseline {p.baseline_spo2_pct}")
    return tuple(flags)


def _drawn(p: Presentation, decision: Decision) -> str:
    point, reason = decision.point, _SAYS.get(decision.rule, "")
    counted = f"{', '.join(p.resources) or 'none'} = {decision.resource_count}"
    return _blocks(
        p.complaint,
        _vital_words(p, decision.over),
        ", ".join(red_flags(p)) or "none",
        f"yes, {reason}" if point == "A" else "no",
        "-" if point == "A" else f"yes, {reason}" if point == "B" else "no",
        "-" if point in "AB" else counted,
        "-" if point in "AB" else "raise" if point == "D" else "no",
        decision.level,
    )


def _imported(key: ImportedKey) -> tuple[str, str]:
    level, vitals = key.level, _vital_words(key, ())
    content = _blocks(
        key.complaint or "as told",
        vitals,
        "not recorded",
        "yes" if level == 1 else "no",
        "-" if level == 1 else "yes" if level == 2 else "no",
        {3: "two or more", 4: "one", 5: "none"}.get(level, "-"),
        "-" if level <= 2 else "no",
        level,
    )
    return content, f"Measured: {vitals}."


def _blocks(complaint: str, vitals: str, flags: str, a: str, b: str, c: str, d: str, level: int) -> str:
    return (
        f"EXTRACTION:\n- Chief complaint: {complaint}\n- Vital signs: {vitals}\n- Red flags: {flags}\n"
        f"ESI ALGORITHM:\n- Step A (lifesaving): {a}\n- Step B (high-risk): {b}\n- Step C (resources): {c}\n"
        f"- Step D (vitals): {d}\nANSWER: ESI {level}"
    )


def _vital_words(p: Presentation | ImportedKey, over: Sequence[str], beyond: str = " out", fine: str = "") -> str:
    signs = {"HR": p.hr_bpm, "RR": p.rr_bpm, "SpO2": p.spo2_pct}
    return ", ".join(
        f"{name} {'n/a' if value is None else value}{beyond if name in over else fine}" for name, value in signs.items()
    )


def _thoughts(p: Presentation, decision: Decision, edition: Edition) -> str:
    limits = band(p.age_years, edition)
    return (
        f"Limits HR {limits.hr_bpm} RR {limits.rr_bpm}: {_vital_words(p, decision.over, ' over', ' fine')}.\n"
        f"Flags: {', '.join(red_flags(p)) or 'none'}.\n"
        f"Needs: {', '.join(p.resources) or 'none'}."
    )
