"""The words of a case: latent facts in, the text of a triage note out.

Everything that the facts hold is said, and nothing else, apart from what is denied, past or true of somebody else. The
order in which numbers are drawn is part of the task's version: another order gives other texts.
"""

from collections.abc import Iterable
from random import Random

from clinrl.tasks.esi.phrases import (
    ARRIVAL,
    BYSTANDER,
    CHILD_HISTORY,
    CUES,
    FINDINGS,
    HISTORY,
    INFANT_ARRIVAL,
    NOT_RESOURCES,
    ONSET,
    Complaint,
)
from clinrl.tasks.esi.rules import Presentation

OPENINGS: tuple[str, ...] = (
    "{age} {sex} {arrival} with {complaint} {onset}.",
    "{arrival_cap}: {age} {sex}, {complaint} {onset}.",
    "{complaint_cap} {onset} in a {age} {sex} who {arrival}.",
    "{age} {sex}. {complaint_cap} {onset}. {arrival_cap}.",
    "Triage: {age} {sex}, {complaint} {onset}, {arrival}.",
    "{sex_cap}, {age}, {arrival} because of {complaint} {onset}.",
)
ORDERS: tuple[str, ...] = ("FHVPRD", "VPFDHR", "HFDRPV", "FDVRPH")
"""Order of the parts after the opening: Findings, History, Vital signs, Pain, Resource cues, Denials."""


def narrative(
    rng: Random, complaint: Complaint, p: Presentation, denied: tuple[str, ...], opening: str, order: str
) -> str:
    """The note on one patient.

    `denied` are ids of findings that the note says do not hold; `opening` is one of `OPENINGS`, `order` of `ORDERS`.
    """
    phrase = rng.choice(complaint.says)
    arrival = rng.choice(ARRIVAL if p.age_years >= 2 else INFANT_ARRIVAL)
    sex = _sex_word(rng, p)
    text = opening.format(
        age=_age_words(rng, p.age_years), sex=sex, sex_cap=sex.capitalize(), arrival=arrival, arrival_cap=_cap(arrival),
        complaint=phrase, complaint_cap=_cap(phrase), onset=rng.choice(ONSET),
    )  # fmt: skip
    parts = {
        "F": _sentences(rng.choice(FINDINGS[finding].yes) for finding in p.findings),
        "H": _history(rng, p),
        "V": _vital_words(rng, p),
        "P": _pain_words(rng, p),
        "R": _cue_words(rng, complaint, p),
        "D": _sentences(rng.choice(FINDINGS[finding].no) for finding in denied),
    }
    return " ".join([_cap(text), *(parts[part] for part in order if parts[part])])


def _cap(text: str) -> str:
    """The first letter raised and the rest kept, unlike `str.capitalize`."""
    return text[0].upper() + text[1:]


def _sentences(clauses: Iterable[str]) -> str:
    return " ".join(_cap(clause) + "." for clause in clauses)


def _sex_word(rng: Random, p: Presentation) -> str:
    if p.age_years < 18:
        return {"female": "girl", "male": "boy"}[p.sex]
    return rng.choice({"female": ("woman", "female", "F"), "male": ("man", "male", "M")}[p.sex])


def _age_words(rng: Random, years: float) -> str:
    if years < 90 / 365:
        return f"{round(years * 365)}-day-old"
    if years < 2:
        return f"{max(round(years * 12), 1)}-month-old"
    return rng.choice((f"{int(years)}-year-old", f"{int(years)} yo", f"{int(years)} y/o"))


def _history(rng: Random, p: Presentation) -> str:
    sentences = []
    if p.baseline_hypoxia:
        baseline = (f"On home oxygen, baseline SpO2 {p.spo2_pct}%.", f"Usual saturation is {p.spo2_pct}% from COPD.")
        sentences.append(rng.choice(baseline))
    elif rng.random() < 0.6:
        known = HISTORY if p.age_years >= 18 else CHILD_HISTORY
        conditions = rng.sample(known, rng.randint(1, 2))
        healthy = [condition for condition in conditions if condition == "no medical problems"]
        sentences.append(f"History of {', '.join(healthy or conditions)}.")
    if rng.random() < 0.2:
        sentences.append(rng.choice(BYSTANDER))
    return " ".join(sentences)


def _vital_words(rng: Random, p: Presentation) -> str:
    blood_pressure = None if p.sbp_mmhg is None else f"{p.sbp_mmhg}/{p.dbp_mmhg}"
    words = [
        rng.choice(styles).format(shown)
        for shown, styles in (
            (p.hr_bpm, ("HR {}", "pulse {}", "P {}")),
            (blood_pressure, ("BP {}", "pressure {}")),
            (p.rr_bpm, ("RR {}", "resps {}")),
            (p.spo2_pct, ("SpO2 {}%", "sats {}%", "O2 {}% on air")),
            (p.temp_c, ("T {}", "temp {}")),
        )
        if shown is not None
    ]
    rng.shuffle(words)
    if p.spo2_pct is None and rng.random() < 0.5:
        words.append("SpO2 not obtained")
    return _cap(", ".join(words)) + "." if words else ""


def _pain_words(rng: Random, p: Presentation) -> str:
    if p.pain is None:
        return ""
    if p.pain == 0:
        return "Denies pain."
    styles = ("Pain {}/10.", "Rates pain {} out of 10.", "Pain score {}.", "{}/10 pain.", "Pain {} of 10.")
    return rng.choice(styles).format(p.pain)


def _cue_words(rng: Random, complaint: Complaint, p: Presentation) -> str:
    """One or two hints at each resource beyond what the complaint itself needs, among care that counts as none."""
    clauses: list[str] = []
    for kind in p.resources:
        if kind not in complaint.needs or rng.random() < 0.25:
            clauses += rng.sample(CUES[kind], 2 if rng.random() < 0.2 else 1)
    clauses += rng.sample(NOT_RESOURCES, rng.choices((0, 1, 2), (3, 5, 2))[0])
    rng.shuffle(clauses)
    return _sentences(clauses)
