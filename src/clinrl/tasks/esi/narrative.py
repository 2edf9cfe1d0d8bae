"""The words of a case: latent facts in, the text of a triage note out.

A note says everything that the facts hold, and nothing else except denials, past events and facts about other people.
The order in which numbers are drawn is part of the task's version: another order gives other texts.
"""

import re
from collections.abc import Callable
from random import Random

from clinrl.tasks.esi.complaints import Complaint
from clinrl.tasks.esi.rules import RESPIRATORY_DEPRESSION_BPM, Finding, Presentation
from clinrl.tasks.esi.words import Readers, wordings

OPENINGS: tuple[str, ...] = (
    "{who} {arrival} with {complaint} {onset}",
    "{arrival}: {who}, {complaint} {onset}",
    "{complaint} {onset} in a {who} who {arrival}",
    "{who}. {complaint} {onset}. {arrival}",
    "triage: {who}, {complaint} {onset}, {arrival}",
    "{who}, {arrival} because of {complaint} {onset}",
)
ORDERS: tuple[str, ...] = ("FHVPRDC", "VPFDHCR", "HFDCRPV", "FDVRCPH", "CVFPDRH")
"""Order of the parts after the opening: Findings, History, Vital signs, Pain, Resource cues, Denials, Context."""
MISTYPED_SHARE = 0.15
"""The share of notes with one to three typing errors."""
TELEGRAM_SHARE = 0.25
"""The share of notes without capitals and with semicolons between clauses."""
WALKS, BROUGHT, AMBULANCE = "arrival/walking", "arrival/brought", "arrival/ambulance"
NOBODY_WALKS: frozenset[Finding] = frozenset(
    {
        "arrest", "unresponsive", "seizing", "slow_breathing", "hypoperfusion", "intubated", "chest_tube",
        "central_line", "major_bleeding", "open_fracture", "high_fall", "dangerous_behaviour", "major_burn",
    }
)  # fmt: skip
"""Findings of patients who do not walk in: others bring them."""
LASTING: frozenset[Finding] = frozenset({"comfortable", "immunosuppressed", "sepsis_signs", "suicidal", "distress"})
"""Findings that may have begun weeks ago; with any other finding the note describes a sudden onset."""
SILENT: frozenset[Finding] = frozenset({"arrest", "unresponsive", "seizing", "slow_breathing", "intubated"})
"""Findings of patients who cannot answer: no pain score, no story, no denial that needs a question."""
_LONG_WORD = re.compile(r"[a-z]{5,}")

Pick = Callable[[str], str]
"""Draws one wording of an item."""


def narrative(
    rng: Random,
    complaint: Complaint,
    p: Presentation,
    denied: tuple[Finding, ...],
    opening: str,
    order: str,
    readers: Readers,
) -> str:
    """The note on one patient, in the words of `readers`.

    `denied` are findings that the note says do not hold; `opening` is one of `OPENINGS`, `order` of `ORDERS`.
    """

    def pick(item: str) -> str:
        return rng.choice(wordings(item, readers))

    first = opening.format(
        who=_age_and_sex(p, pick),
        arrival=pick(_arrival(rng, p)), complaint=pick(f"complaints/{complaint.id}/says"),
        onset=pick("onset/says" if set(p.findings) <= LASTING else "styles/sudden_onset"),
    )  # fmt: skip
    parts = {
        "F": [pick(f"findings/{finding}/yes") for finding in p.findings],
        "H": _history(rng, p, readers, pick),
        "V": _vital_words(rng, p, pick),
        "P": [pick("styles/pain").format(p.pain) if p.pain else pick("styles/no_pain")] if p.pain is not None else [],
        "R": _cue_words(rng, complaint, p, readers),
        "D": [pick(f"findings/{finding}/no") for finding in denied],
        "C": _context(rng, p, pick) if SILENT.isdisjoint(p.findings) else [],
    }
    if "arrest" in p.findings:
        parts["R"] = []  # a crew that resuscitates plans nothing else
    clauses = [*first.split(". "), *(clause for part in order for clause in parts[part])]
    if rng.random() < MISTYPED_SHARE:
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(len(clauses))
            clauses[place] = _mistyped(rng, clauses[place])
    if rng.random() < TELEGRAM_SHARE:
        return "; ".join(clauses)
    return " ".join(f"{clause[0].upper()}{clause[1:]}." for clause in clauses)


def _mistyped(rng: Random, clause: str) -> str:
    """The clause with one long word mistyped: two letters swapped, one left out, or one typed twice."""
    words = list(_LONG_WORD.finditer(clause))
    if not words:
        return clause
    word = rng.choice(words)
    at = word.start() + rng.randint(1, len(word.group()) - 3)
    one, following = clause[at], clause[at + 1]
    typed = rng.choice((following + one, following, one * 2 + following))
    return clause[:at] + typed + clause[at + 2 :]


def _age_and_sex(p: Presentation, pick: Pick) -> str:
    names = {"female": ("girl", "woman"), "male": ("boy", "man")}[p.sex]
    sex = pick(f"styles/{names[p.age_years >= 18]}")
    years = p.age_years
    if years >= 2:
        return pick("styles/adult").format(int(years), sex)
    count, unit = (round(years * 365), "day") if years < 90 / 365 else (max(round(years * 12), 1), "month")
    return pick("styles/infant").format(count, unit, sex)


def _arrival(rng: Random, p: Presentation) -> str:
    hardly_breathes = p.rr_bpm is not None and p.rr_bpm <= RESPIRATORY_DEPRESSION_BPM
    if hardly_breathes or not NOBODY_WALKS.isdisjoint(p.findings):
        return AMBULANCE if p.age_years < 16 else rng.choice((AMBULANCE, AMBULANCE, BROUGHT))
    if p.age_years < 2:
        return "arrival/infant"
    if p.age_years < 16:
        return rng.choice(("styles/child_arrival", "styles/child_arrival", AMBULANCE))
    return rng.choice((WALKS, WALKS, BROUGHT, AMBULANCE))


def _history(rng: Random, p: Presentation, readers: Readers, pick: Pick) -> list[str]:
    clauses = []
    if p.baseline_spo2_pct is not None:
        clauses.append(pick("styles/baseline").format(p.baseline_spo2_pct))
    elif rng.random() < 0.6:
        known = wordings("history/adult" if p.age_years >= 18 else "history/child", readers)
        listed = ", ".join(rng.sample(known, rng.randint(1, 2)))
        clauses.append(pick("styles/history").format(listed))
    if rng.random() < 0.2:
        clauses.append(pick("bystander/says"))
    return clauses


def _vital_words(rng: Random, p: Presentation, pick: Pick) -> list[str]:
    """The vital signs as one clause, in any order."""
    signs = {"hr": p.hr_bpm, "rr": p.rr_bpm, "spo2": p.spo2_pct, "temp": p.temp_c}
    words = [pick(f"styles/{sign}").format(value) for sign, value in signs.items() if value is not None]
    if p.sbp_mmhg is not None:
        words.append(pick("styles/bp").format(p.sbp_mmhg, p.dbp_mmhg))
    rng.shuffle(words)
    if words and len(words) < 5 and rng.random() < 0.5:
        words.append(pick("styles/unmeasured"))
    return [", ".join(words)] if words else []


def _cue_words(rng: Random, complaint: Complaint, p: Presentation, readers: Readers) -> list[str]:
    """One or two hints at each resource beyond those that the complaint needs, and care that counts as no resource."""
    clauses: list[str] = []
    for kind in p.resources:
        if kind not in complaint.needs or rng.random() < 0.25:
            clauses += rng.sample(wordings(f"resources/{kind}", readers), 2 if rng.random() < 0.2 else 1)
    if SILENT.isdisjoint(p.findings):
        clauses += rng.sample(wordings("care/not_resources", readers), rng.choices((0, 1, 2), (3, 5, 2))[0])
    rng.shuffle(clauses)
    return clauses


def _context(rng: Random, p: Presentation, pick: Pick) -> list[str]:
    """At most two clauses that decide nothing."""
    kinds = ("context/adult", "context/anybody") if p.age_years >= 18 else ("context/anybody",)
    count = rng.choices((0, 1, 2), (4, 5, 1))[0]
    return [pick(rng.choice(kinds)) for _ in range(count)]
