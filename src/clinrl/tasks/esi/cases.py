"""Synthetic triage cases: latent facts first, then the label by the rules, then the words. The label never comes from text.

A case is drawn from a template: complaint × target rule × frame (opening and order of sentences). The hash of the
template's name gives its pool for good, so paraphrases of one template never cross from training into an exam.
"""

import hashlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from random import Random

from pydantic import Field

from clinrl.artefacts import canonical_json
from clinrl.records import Case, Pool, Strict
from clinrl.tasks.esi.phrases import (
    ARRIVAL,
    BYSTANDER,
    CHILD_HISTORY,
    COMPLAINTS,
    CUES,
    FINDINGS,
    HISTORY,
    INFANT_ARRIVAL,
    NOT_RESOURCES,
    ONSET,
    Complaint,
)
from clinrl.tasks.esi.rules import (
    DANGER_VITALS,
    RESOURCE_WEIGHT,
    RULES,
    Decision,
    Presentation,
    band,
    decide,
    hypotension_limit_mmhg,
)


class EsiFacts(Strict):
    """What the model may see."""

    narrative: str = Field(min_length=1, max_length=4000)


class EsiKey(Strict):
    """What only the scorer may see."""

    presentation: Presentation
    level: int = Field(ge=1, le=5)
    rule: str
    """The rule that decided, or `resources_none`, `resources_one`, `resources_many`."""
    boundary: str = Field(pattern=r"^([1-4]\|[2-5])?$")
    """The neighbouring level that one changed fact would give, as "2|3"; empty when there is none next door."""
    ambiguous: bool


class EsiCase(Case):
    """One synthetic triage vignette."""

    facts: EsiFacts
    key: EsiKey


MIXES: Mapping[str, Mapping[int, float]] = {
    "natural": {1: 0.06, 2: 0.33, 3: 0.54, 4: 0.067, 5: 0.003},
    "reporting": {1: 0.39, 2: 0.31, 3: 0.14, 4: 0.11, 5: 0.06},
}
"""Class shares by level. "natural" is close to an emergency department's (MIMIC-like, unverified), "reporting" to MIETIC-36's."""

POOL_SHARE: Mapping[Pool, int] = {"base": 40, "train": 25, "mine": 15, "exam": 20}
"""Percentage of templates in each pool."""

CELLS: Mapping[int, Mapping[str, float]] = {
    1: {
        "done_intervention": 0.40, "unresponsive": 0.08, "active_seizure": 0.08, "respiratory_failure": 0.10, "shock": 0.10,
        "anaphylaxis": 0.06, "overdose_depression": 0.06, "major_bleeding": 0.08, "cardiac_arrest": 0.04,
    },
    2: {
        "severe_pain": 0.24, "open_injury": 0.20, DANGER_VITALS: 0.12, "acs": 0.05, "stroke_signs": 0.05, "thunderclap": 0.03,
        "new_confusion": 0.05, "breathing_distress": 0.04, "suspected_sepsis": 0.05, "immunosuppressed_fever": 0.03, "infant_fever": 0.02,
        "ectopic": 0.02, "torsion": 0.02, "suicidal": 0.03, "overdose": 0.02, "high_fall": 0.02, "limb_threat": 0.03, "vision_loss": 0.02,
    },
    3: {"resources_many": 1.0},
    4: {"resources_one": 1.0},
    5: {"resources_none": 1.0},
}  # fmt: skip
"""What decides within each level. Intervention done, severe pain and open injury are common, as in the published error analysis."""

RULE_FINDINGS: Mapping[str, tuple[str, ...]] = {
    "done_intervention": ("intubated", "chest_tube", "central_line"),
    "unresponsive": ("unresponsive",), "active_seizure": ("seizing",), "respiratory_failure": ("distress",), "shock": ("hypoperfusion",),
    "anaphylaxis": ("anaphylaxis",), "overdose_depression": ("overdose",), "major_bleeding": ("major_bleeding",), "cardiac_arrest": ("arrest",),
    "open_injury": ("open_fracture", "penetrating"), "breathing_distress": ("distress",), "suspected_sepsis": ("sepsis_signs",),
    "immunosuppressed_fever": ("immunosuppressed",),
}  # fmt: skip
"""The finding that a rule needs, where it is not the rule's own id; one is drawn."""

EVERYBODY: tuple[str, ...] = (
    "unresponsive",
    "hypoperfusion",
    "major_bleeding",
    "intubated",
    "chest_tube",
    "central_line",
    "distress",
    "seizing",
)
"""Findings that any patient may deny."""

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


def pool_of(group: str) -> Pool:
    """The pool of a template, by the hash of its name: the same for any seed, data set and machine."""
    draw = int.from_bytes(hashlib.sha256(group.encode()).digest()[:4], "big") % 100
    for pool, share in POOL_SHARE.items():
        if draw < share:
            return pool
        draw -= share
    raise AssertionError("pool shares do not sum to 100")


def case_id(facts: EsiFacts, key: EsiKey) -> str:
    """The content hash that is the case's id."""
    content = canonical_json([facts.model_dump(mode="json"), key.model_dump(mode="json")])
    return "esi-" + hashlib.sha256(content.encode()).hexdigest()[:16]


def cases(n: int, seed: int, *, pool: Pool, mix: str) -> Iterator[EsiCase]:
    """`n` distinct cases of a pool. Ambiguous cases occur in the base and training pools only, flagged.

    Memory: one 8-byte entry a case would grow with n, so distinctness rests on the draw: vital signs, age and wording
    give a template more than a billion texts, and validation refuses the data set that repeats one all the same.
    """
    rng = Random(f"esi-cases/{pool}/{mix}/{seed}")
    levels, weights = zip(*MIXES[mix].items(), strict=True)
    for _ in range(n):
        level = rng.choices(levels, weights)[0]
        while (case := _draw(rng, level, pool)) is None:
            pass
        yield case


def _draw(rng: Random, level: int, pool: Pool) -> EsiCase | None:
    cells = CELLS[level]
    cell = rng.choices(tuple(cells), tuple(cells.values()))[0]
    complaint = rng.choice(_fitting(cell))
    opening, order = rng.randrange(len(OPENINGS)), rng.randrange(len(ORDERS))
    group = f"{complaint.id}/{cell}/{opening}{ORDERS[order]}"
    if _pool_cached(group) != pool:
        return None
    patient, denied = _patient(rng, complaint, cell)
    decision = decide(patient)
    wrong_cell = decision.rule != cell or decision.level != level
    if wrong_cell or (decision.ambiguous and pool in ("mine", "exam")):
        return None
    facts = EsiFacts(narrative=_narrative(rng, complaint, patient, denied, OPENINGS[opening], ORDERS[order]))
    key = EsiKey(
        presentation=patient,
        level=level,
        rule=cell,
        boundary=_boundary(patient, decision, denied),
        ambiguous=decision.ambiguous,
    )
    return EsiCase(id=case_id(facts, key), group=group, facts=facts, key=key)


_pool_cached = lru_cache(maxsize=None)(pool_of)


@lru_cache(maxsize=None)
def _fitting(cell: str) -> tuple[Complaint, ...]:
    """The complaints that a cell may occur with. The number of cells and templates is fixed, so the cache is bounded."""
    findings = RULE_FINDINGS.get(cell, (cell,))

    def fits(c: Complaint) -> bool:
        if cell.startswith("resources") or cell in (DANGER_VITALS, "done_intervention"):
            return cell != "resources_none" or not c.needs
        if cell == "severe_pain":
            return c.site == "visceral"
        if cell == "infant_fever":
            return c.ages[0] < 0.2
        if cell == "overdose_depression":
            return "overdose" in c.flags
        if cell in ("open_injury", "breathing_distress", "immunosuppressed_fever") or findings[0] not in EVERYBODY:
            return cell == "cardiac_arrest" or not set(findings).isdisjoint(c.flags)
        return True

    return tuple(c for c in COMPLAINTS if fits(c))


def _patient(rng: Random, complaint: Complaint, cell: str) -> tuple[Presentation, tuple[str, ...]]:
    """Latent facts aimed at a cell, and the findings that the narrative denies."""
    age = _age(rng, complaint, cell)
    findings = set()
    if cell in RULE_FINDINGS:
        options = [f for f in RULE_FINDINGS[cell] if f in complaint.flags or f in EVERYBODY or f == "arrest"]
        findings.add(rng.choice(options))
    elif cell in FINDINGS:
        findings.add(cell)
    if cell == "done_intervention" and rng.random() < 0.35 and complaint.flags:
        findings.add(rng.choice([f for f in complaint.flags if f not in ("anaphylaxis",)] or ["distress"]))
    candidates = [
        f
        for f in (*complaint.flags, *EVERYBODY, "open_fracture", "penetrating")
        if f not in findings and f != "immunosuppressed"
    ]
    denied = tuple(dict.fromkeys(rng.sample(candidates, rng.choices((0, 1, 2, 3), (2, 4, 4, 2))[0])))
    vitals = _vitals(rng, age, cell)
    site = complaint.site
    pain = None
    if cell == "severe_pain":
        pain = rng.randint(7, 10)
    elif site == "visceral" and rng.random() < 0.8:
        pain = rng.randint(0, 10) if cell in RULE_IDS_OF_A_AND_B else rng.randint(1, 6)
    elif site == "limb" and rng.random() < 0.8:
        pain = rng.randint(1, 10)
    return (
        Presentation(
            age_years=age,
            sex=complaint.sex or rng.choice(("female", "male")),
            complaint=complaint.id,
            findings=tuple(sorted(findings)),
            pain=pain,
            pain_site=site,
            resources=_resources(rng, complaint, cell),
            **vitals,
        ),
        denied,
    )


RULE_IDS_OF_A_AND_B = frozenset(rule.id for rule in RULES)


def _age(rng: Random, complaint: Complaint, cell: str) -> float:
    low, high = complaint.ages
    if cell == "infant_fever":
        return rng.randint(7, 88) / 365
    if low < 12 and rng.random() < 0.3:
        young = rng.uniform(max(low, 0.08), 12)
        return round(young, 2) if young < 2 else float(int(young))
    return float(rng.randint(int(max(low, 12)), int(high)))


def _resources(rng: Random, complaint: Complaint, cell: str) -> tuple[str, ...]:
    """Distinct resource types: as many as a C cell asks for; for other cells any number, one often, so that missing the rule shows."""
    if cell == "resources_none":
        return ()
    target = {"resources_one": 1, "resources_many": 2}.get(cell) or rng.choices((1, 2, 3), (5, 4, 1))[0]
    kinds = list(complaint.needs)
    others = [kind for kind in CUES if kind not in kinds]
    rng.shuffle(others)
    if target == 1 and kinds:
        return tuple(sorted(kinds))
    if target >= 2 and rng.random() < 0.25:
        target += 1
    for kind in others:
        if sum(RESOURCE_WEIGHT.get(k, 1) for k in kinds) >= target:
            break
        if target == 1 and RESOURCE_WEIGHT.get(kind, 1) > 1:
            continue
        kinds.append(kind)
    return tuple(sorted(kinds))


def _vitals(rng: Random, age: float, cell: str) -> dict[str, int | float | bool | None]:
    """Vital signs within the age band's limits, unless the cell needs them out; about 30% of cases lack at least one."""
    limits = band(age)
    adult = age >= 12
    hr = rng.randint(60, 100) if adult else rng.randint(int(limits.hr_bpm * 0.65), limits.hr_bpm)
    rr = rng.randint(12, 20) if adult else rng.randint(int(limits.rr_bpm * 0.55), limits.rr_bpm)
    spo2, sbp = rng.randint(93, 100), rng.randint(104, 158) if adult else rng.randint(88, 115)
    temp = round(rng.uniform(36.1, 37.8), 1)
    baseline = False
    if cell == DANGER_VITALS:
        kind = rng.randrange(4)
        if kind in (0, 3):
            hr = rng.randint(int(limits.hr_bpm * 1.12) + 1, int(limits.hr_bpm * 1.5))
        if kind in (1, 3):
            rr = rng.randint(int(limits.rr_bpm * 1.12) + 1, int(limits.rr_bpm * 1.7))
        if kind == 2:
            spo2 = rng.randint(84, 91)
    elif cell == "respiratory_failure":
        spo2, rr = rng.randint(76, 89), rng.randint(int(limits.rr_bpm * 1.2), int(limits.rr_bpm * 1.8))
    elif cell == "breathing_distress":
        spo2, rr = rng.randint(90, 96), rng.randint(limits.rr_bpm, int(limits.rr_bpm * 1.5))
    elif cell == "shock":
        sbp, hr = (
            rng.randint(hypotension_limit_mmhg(age) - 26, hypotension_limit_mmhg(age) - 1),
            rng.randint(limits.hr_bpm, int(limits.hr_bpm * 1.5)),
        )
    elif cell == "overdose_depression":
        rr, spo2 = rng.randint(4, 8), rng.randint(80, 93)
    elif cell in ("infant_fever", "immunosuppressed_fever"):
        temp = round(rng.uniform(38.1, 40.2), 1)
    elif rng.random() < 0.10:
        hr = rng.randint(limits.hr_bpm + 1, int(limits.hr_bpm * 1.09))
    elif age > 40 and rng.random() < 0.08:
        spo2, baseline = rng.randint(86, 91), True
    elif rng.random() < 0.12 and age >= 1:
        temp = round(rng.uniform(38.0, 39.5), 1)
    needed = {
        DANGER_VITALS: {"hr", "rr", "spo2"}, "respiratory_failure": {"spo2"}, "shock": {"bp"}, "overdose_depression": {"rr"},
        "infant_fever": {"temp"}, "immunosuppressed_fever": {"temp"},
    }.get(cell, set())  # fmt: skip
    if baseline:
        needed = needed | {"spo2"}
    missing = set()
    if rng.random() < 0.32:
        droppable = [v for v in ("hr", "rr", "spo2", "bp", "temp") if v not in needed]
        missing = set(rng.sample(droppable, rng.randint(1, min(2, len(droppable)))))
    dbp = min(sbp - 15, int(sbp * rng.uniform(0.52, 0.68)))
    return {
        "hr_bpm": None if "hr" in missing else hr,
        "rr_bpm": None if "rr" in missing else rr,
        "spo2_pct": None if "spo2" in missing else spo2,
        "sbp_mmhg": None if "bp" in missing else sbp,
        "dbp_mmhg": None if "bp" in missing else dbp,
        "temp_c": None if "temp" in missing else temp,
        "baseline_hypoxia": baseline,
    }


def _boundary(p: Presentation, decision: Decision, denied: tuple[str, ...]) -> str:
    """The nearest neighbouring level one fact away: the deciding rule gone, a denied finding true, or one resource more or less."""
    if decision.point != "C":
        other = decide(p, omit=frozenset({decision.rule})).level
    else:
        flipped = (decide(p.model_copy(update={"findings": tuple(sorted({*p.findings, f}))})).level for f in denied)
        other = max((level for level in flipped if level < decision.level), default=0)
        if decision.level - other != 1:
            other = {3: 4, 4: 5, 5: 4}[decision.level]
    low, high = sorted((decision.level, other))
    return f"{low}|{high}" if high - low == 1 else ""


def _narrative(
    rng: Random, complaint: Complaint, p: Presentation, denied: tuple[str, ...], opening: str, order: str
) -> str:
    said = rng.choice(complaint.says)
    arrival, sex = rng.choice(ARRIVAL if p.age_years >= 2 else INFANT_ARRIVAL), _sex_word(rng, p)
    text = opening.format(
        age=_age_words(rng, p.age_years), sex=sex, sex_cap=sex.capitalize(), arrival=arrival, arrival_cap=_cap(arrival),
        complaint=said, complaint_cap=_cap(said), onset=rng.choice(ONSET),
    )  # fmt: skip
    parts = {
        "F": _sentences(rng.choice(FINDINGS[f].yes) for f in p.findings),
        "H": _history(rng, p),
        "V": _vital_words(rng, p),
        "P": _pain_words(rng, p),
        "R": _cue_words(rng, complaint, p),
        "D": _sentences(rng.choice(FINDINGS[f].no) for f in denied),
    }
    return " ".join([_cap(text), *(parts[part] for part in order if parts[part])])


def _cap(text: str) -> str:
    return text[0].upper() + text[1:]


def _sentences(clauses: Iterator[str]) -> str:
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
    said = []
    if p.baseline_hypoxia:
        said.append(
            rng.choice(
                (f"On home oxygen, baseline SpO2 {p.spo2_pct}%.", f"Usual saturation is {p.spo2_pct}% from COPD.")
            )
        )
    elif rng.random() < 0.6:
        known = HISTORY if p.age_years >= 18 else CHILD_HISTORY
        conditions = rng.sample(known, rng.randint(1, 2))
        healthy = [condition for condition in conditions if condition == "no medical problems"]
        said.append(f"History of {', '.join(healthy or conditions)}.")
    if rng.random() < 0.2:
        said.append(rng.choice(BYSTANDER))
    return " ".join(said)


def _vital_words(rng: Random, p: Presentation) -> str:
    words = []
    for value, styles in (
        (p.hr_bpm, ("HR {}", "pulse {}", "P {}")),
        (p.sbp_mmhg, ("BP {}", "pressure {}")),
        (p.rr_bpm, ("RR {}", "resps {}")),
        (p.spo2_pct, ("SpO2 {}%", "sats {}%", "O2 {}% on air")),
        (p.temp_c, ("T {}", "temp {}")),
    ):
        if value is None:
            continue
        shown = f"{value}/{p.dbp_mmhg}" if value is p.sbp_mmhg and styles[0].startswith("BP") else value
        words.append(rng.choice(styles).format(shown))
    rng.shuffle(words)
    if p.spo2_pct is None and rng.random() < 0.5:
        words.append("SpO2 not obtained")
    return _cap(", ".join(words)) + "." if words else ""


def _pain_words(rng: Random, p: Presentation) -> str:
    if p.pain is None:
        return ""
    if p.pain == 0:
        return "Denies pain."
    return rng.choice(
        ("Pain {}/10.", "Rates pain {} out of 10.", "Pain score {}.", "{}/10 pain.", "Pain {} of 10.")
    ).format(p.pain)


def _cue_words(rng: Random, complaint: Complaint, p: Presentation) -> str:
    """One or two hints at each resource beyond what the complaint itself needs, among care that counts as none."""
    clauses = []
    for kind in p.resources:
        if kind not in complaint.needs or rng.random() < 0.25:
            clauses += rng.sample(CUES[kind], 2 if rng.random() < 0.2 else 1)
    clauses += rng.sample(NOT_RESOURCES, rng.choices((0, 1, 2), (3, 5, 2))[0])
    rng.shuffle(clauses)
    return _sentences(iter(clauses))
