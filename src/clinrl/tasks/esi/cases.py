"""Synthetic triage cases: latent facts first, then the label by the rules, then the words (`narrative`).

The label never comes from text. A case is drawn from a template: complaint × target rule × frame (opening and order of
sentences). The hash of the template's name fixes its pool, so paraphrases of one template never cross from training
into an exam. Neither do words: training data has its own, and exams are written in words that the base alone has read.
The handbook's edition changes the labels of the patients, but not which patients are drawn.
"""

from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from random import Random
from types import MappingProxyType
from typing import Annotated

from pydantic import BeforeValidator, Field

from clinrl.tasks import importing
from clinrl.tasks.base import content_id, pool_by_hash
from clinrl.tasks.esi.complaints import COMPLAINTS, HELD_OUT, Complaint
from clinrl.tasks.esi.imported import ImportedKey
from clinrl.tasks.esi.narrative import OPENINGS, ORDERS, SILENT, narrative
from clinrl.tasks.esi.rules import (
    CHILD_FEVER,
    DANGER_VITALS,
    EDITIONS,
    FINDING_IDS,
    RESOURCES,
    RULES,
    SEXES,
    SICKLE_CRISIS,
    Decision,
    Edition,
    Finding,
    Presentation,
    Resource,
    decide,
    resource_count,
)
from clinrl.tasks.esi.vitals import vitals
from clinrl.tasks.esi.words import Readers
from clinrl.tasks.parts import check_pool
from clinrl.tasks.tables import read_table
from clinrl.types import Case, Pool, Strict


class EsiFacts(Strict):
    """The part of a case that the model may see."""

    narrative: str = Field(min_length=1, max_length=4000)


class EsiKey(Strict):
    """The part of a drawn case that only the scorer may see."""

    presentation: Presentation
    edition: Edition
    """The edition of the handbook by which the case is labelled."""
    denied: tuple[Finding, ...]
    """Findings that, by the note, the patient does not have."""
    seed: int
    """The seed of the wording: with the template and the facts, it gives the note in any vocabulary (`reworded`)."""
    level: int = Field(ge=1, le=5)
    rule: str
    """The rule that decided, or `resources_none`, `resources_one`, `resources_many`."""
    boundary: str = Field(pattern=r"^([1-4]\|[2-5])?$")
    """Two neighbouring levels, as "2|3", that one changed fact separates; empty if there are none."""
    ambiguous: bool


class EsiCase(Case):
    """One triage vignette, drawn here or imported."""

    facts: EsiFacts
    key: Annotated[EsiKey | ImportedKey, BeforeValidator(lambda value: importing.key_of(value, EsiKey, ImportedKey))]


class _Shares(Strict):
    mixes: Mapping[str, Mapping[int, float]]
    cells: Mapping[int, Mapping[str, float]]
    rule_findings: Mapping[str, tuple[Finding, ...]]


_SHARES = read_table(__file__, _Shares)
MIXES = _SHARES.mixes
"""For each mix, the share of each level."""
CELLS = _SHARES.cells
"""For each level, the weights of the rules that decide for it by the fifth edition."""
RULE_FINDINGS = _SHARES.rule_findings
"""The findings of which a rule needs one. Any other rule needs the finding of its own id, or none."""

READERS: Mapping[Pool, Readers] = {"base": "base", "train": "training", "mine": "base_only", "exam": "base_only"}
"""The vocabulary in which the notes of a pool are written."""

DECIDED_AT_A_OR_B: frozenset[str] = frozenset(rule.id for rule in RULES)
"""Cells that a rule of point A or B decides, so that no pain score changes their level."""

EVERYBODY: tuple[Finding, ...] = (
    "unresponsive", "hypoperfusion", "major_bleeding", "intubated", "chest_tube", "central_line", "distress", "seizing",
    "slow_breathing",
)  # fmt: skip
"""Findings that any patient whose complaint is not minor may have, and that any patient may deny."""

DENIED_FOR_THE_SILENT: tuple[Finding, ...] = (
    "chest_tube", "central_line", "major_bleeding", "open_fracture", "penetrating",
)  # fmt: skip


@lru_cache(1 << 17)  # more than there are templates
def pool_of(group: str) -> Pool:
    """The pool of a template, from the hash of its name: the same for any seed, data set and machine.

    The group of an imported case names its pool.
    """
    if (named := importing.pool_of(group)) is not None:
        return named
    pool = pool_by_hash(group)
    return "base" if pool == "train" and group.split("/")[0] in HELD_OUT else pool


def cases(
    n: int,
    seed: int,
    *,
    pool: Pool,
    mix: str,
    emphasis: Mapping[str, float] = MappingProxyType({}),
    edition: str = "",
) -> Iterator[EsiCase]:
    """Yield `n` distinct cases of a pool. Ambiguous cases occur in the base and training pools only, flagged.

    `emphasis` multiplies the weight of a rule within its level, and hence the level's weight too. `edition` labels the
    cases: by default v5, but in the base pool either one by chance, since a base has read both.

    No set of earlier cases is kept, since it would grow with n. Distinctness rests on the draw: vital signs, age and
    wording give a template more than a billion texts, and validation refuses a data set that still repeats one.

    Raises KeyError for a pool or a mix that does not exist.
    """
    check_pool(pool)
    rng = Random(f"esi-cases/{pool}/{mix}/{seed}")
    cells = {level: {cell: w * emphasis.get(cell, 1.0) for cell, w in CELLS[level].items()} for level in CELLS}
    weights = [share * (sum(cells[level].values()) / sum(CELLS[level].values())) for level, share in MIXES[mix].items()]
    for _ in range(n):
        level = rng.choices(tuple(MIXES[mix]), weights)[0]
        while (case := _draw(rng, level, cells[level], pool, edition)) is None:
            pass
        yield case


@lru_cache(maxsize=2**12)  # asked for again by an exam's answers, its parent's and its slices
def reworded(case: EsiCase, readers: Readers) -> EsiCase | None:
    """The same patient in other words, with the same id and label.

    None for an imported case, and for one that already has these words.
    """
    if isinstance(case.key, ImportedKey):
        return None
    facts = _facts(case.group, case.key, readers)
    return None if facts == case.facts else case.model_copy(update={"facts": facts})


def _facts(group: str, key: EsiKey, readers: Readers) -> EsiFacts:
    name, _, frame = group.split("/")
    complaint = next(complaint for complaint in COMPLAINTS if complaint.id == name)
    rng = Random(f"esi-words/{key.seed}")
    opening, order = OPENINGS[int(frame[0])], frame[1:]
    return EsiFacts(narrative=narrative(rng, complaint, key.presentation, key.denied, opening, order, readers))


def _draw(rng: Random, level: int, cells: Mapping[str, float], pool: Pool, edition: str) -> EsiCase | None:
    cell = rng.choices(tuple(cells), tuple(cells.values()))[0]
    complaint = rng.choice(_fitting(cell))
    opening, order = rng.randrange(len(OPENINGS)), rng.randrange(len(ORDERS))
    group = f"{complaint.id}/{cell}/{opening}{ORDERS[order]}"
    if pool_of(group) != pool:
        return None
    patient, denied = _patient(rng, complaint, cell)
    aimed = decide(patient)
    if (aimed.rule, aimed.level) != (cell, level) or (aimed.ambiguous and pool in ("mine", "exam")):
        return None
    labelled_by: Edition = next(
        (known for known in EDITIONS if known == edition), rng.choice(EDITIONS) if pool == "base" else "v5"
    )
    decision = decide(patient, edition=labelled_by)
    key = EsiKey(
        presentation=patient,
        edition=labelled_by,
        denied=denied,
        seed=rng.getrandbits(48),
        level=decision.level,
        rule=decision.rule,
        boundary=_boundary(patient, decision, denied, labelled_by),
        ambiguous=decision.ambiguous,
    )
    facts = _facts(group, key, READERS[pool])
    return EsiCase(id=content_id("esi", facts, key), group=group, facts=facts, key=key)


@cache
def _fitting(cell: str) -> tuple[Complaint, ...]:
    """The complaints that a cell may occur with."""
    findings = RULE_FINDINGS.get(cell, (cell,))
    dying = cell in CELLS[1]

    def fits(c: Complaint) -> bool:
        if (c.id == SICKLE_CRISIS) != (cell == "sickle_crisis") and not dying:
            return False
        if c.minor and (dying or cell in (DANGER_VITALS, "hypotension", "extreme_temperature")):
            return False
        if cell in (DANGER_VITALS, "hypotension", "extreme_temperature", "done_intervention", "sickle_crisis"):
            return True
        if cell.startswith("resources"):
            return cell != "resources_none" or not c.needs
        if cell == "severe_pain":
            return c.site == "visceral"
        if cell in ("infant_fever", CHILD_FEVER):
            return c.ages[0] < (0.2 if cell == "infant_fever" else 1.5) and resource_count(c.needs) < 2
        if cell == "overdose_depression":
            return "overdose" in c.flags
        if cell in ("open_injury", "breathing_distress", "immunosuppressed_fever") or findings[0] not in EVERYBODY:
            return cell == "cardiac_arrest" or not set(findings).isdisjoint(c.flags)
        return True

    return tuple(c for c in COMPLAINTS if fits(c))


def _patient(rng: Random, complaint: Complaint, cell: str) -> tuple[Presentation, tuple[Finding, ...]]:
    """Latent facts aimed at a cell, and the findings that the narrative denies."""
    age = _age(rng, complaint, cell)
    findings = _findings(rng, complaint, cell)
    signs = vitals(rng, age, cell, slow_breathing="slow_breathing" in findings)
    pain = None if not SILENT.isdisjoint(findings) else _pain(rng, complaint, cell)
    if pain is not None and pain >= 7 and complaint.site == "visceral" and cell not in DECIDED_AT_A_OR_B:
        findings.add("comfortable")
    denied = _denied(rng, complaint, findings, pain)
    patient = Presentation(
        age_years=age,
        sex=rng.choice(SEXES) if complaint.sex is None else complaint.sex,
        complaint=complaint.id,
        findings=tuple(sorted(findings)),
        pain=pain,
        pain_site=complaint.site,
        resources=_resources(rng, complaint, cell),
        **signs,
    )
    return patient, denied


def _age(rng: Random, complaint: Complaint, cell: str) -> float:
    low, high = complaint.ages
    if cell == "infant_fever":
        return rng.randint(7, 88) / 365
    if cell == CHILD_FEVER:
        return round(rng.uniform(max(low, 0.3), 2.9), 2)
    if low < 12 and rng.random() < 0.3:
        young = rng.uniform(max(low, 0.08), 12)
        return round(young, 2) if young < 2 else float(int(young))
    return float(rng.randint(int(max(low, 12)), int(high)))


def _findings(rng: Random, complaint: Complaint, cell: str) -> set[Finding]:
    """The finding that the cell needs, if any; a done intervention may come with a finding that was its reason."""
    findings: set[Finding] = set()
    if cell in RULE_FINDINGS:
        possible = {*complaint.flags, *EVERYBODY, "arrest"}
        findings.add(rng.choice([finding for finding in RULE_FINDINGS[cell] if finding in possible]))
    elif cell in FINDING_IDS:
        findings.add(cell)
    if cell == "done_intervention" and rng.random() < 0.35 and complaint.flags:
        findings.add(
            rng.choice([flag for flag in complaint.flags if flag not in ("anaphylaxis", "suicidal")] or ["distress"])
        )
    return findings


def _denied(rng: Random, complaint: Complaint, findings: set[Finding], pain: int | None) -> tuple[Finding, ...]:
    """Up to three findings that the patient does not have. Those of the complaint come up most."""
    listed = (
        (*complaint.flags * 3, *EVERYBODY, "open_fracture", "penetrating")
        if SILENT.isdisjoint(findings)
        else DENIED_FOR_THE_SILENT
    )
    candidates = [finding for finding in listed if finding not in findings]
    denied = list(
        dict.fromkeys(rng.sample(candidates, min(len(candidates), rng.choices((0, 1, 2, 3), (2, 4, 4, 2))[0])))
    )
    if pain is not None and pain >= 7 and "comfortable" not in findings and rng.random() < 0.5:
        denied.append("comfortable")
    return tuple(denied)


def _pain(rng: Random, complaint: Complaint, cell: str) -> int | None:
    """A pain score that decides the level only if the cell is severe pain.

    Isolated limb pain decides nothing at any score, nor does the high score of a patient who looks at ease.
    """
    if cell == "severe_pain":
        return rng.randint(7, 10)
    if complaint.site == "visceral" and rng.random() < 0.8:
        return rng.randint(0, 10) if cell in DECIDED_AT_A_OR_B or rng.random() < 0.2 else rng.randint(1, 6)
    if complaint.site == "limb" and rng.random() < 0.8:
        return rng.randint(1, 10)
    return None


def _resources(rng: Random, complaint: Complaint, cell: str) -> tuple[Resource, ...]:
    """Distinct resource types, sorted: as many as a C cell asks for.

    For other cells any number, often one, so that a reader who misses the rule gives another level.
    """
    if cell in ("resources_none", "cardiac_arrest"):
        return ()
    few = cell == CHILD_FEVER
    target = {"resources_one": 1, "resources_many": 2}.get(cell) or rng.choices(
        (0, 1, 2, 3), (2, 5, 0 if few else 3, 0 if few else 1)
    )[0]
    kinds: list[Resource] = list(complaint.needs)
    others = [kind for kind in RESOURCES if kind not in kinds]
    rng.shuffle(others)
    if target == 1 and kinds:
        return tuple(sorted(kinds))
    if target >= 2 and rng.random() < 0.25:
        target += 1
    for kind in others:
        if resource_count(kinds) >= target:
            break
        if target == 1 and resource_count([kind]) > 1:
            continue
        kinds.append(kind)
    return tuple(sorted(kinds))


def _boundary(p: Presentation, decision: Decision, denied: tuple[Finding, ...], edition: Edition) -> str:
    """The level and a neighbouring one that one changed fact would give, as "2|3"; empty if there is none.

    The change removes the deciding rule, makes a denied finding true, or adds or removes one resource.
    """
    if decision.point != "C":
        other = decide(p, edition=edition, omit=frozenset({decision.rule})).level
    else:
        others = (
            p.model_copy(update={"findings": tuple(sorted({*p.findings, f}))}) for f in denied if f != "comfortable"
        )
        flipped = (decide(other, edition=edition).level for other in others)
        other = max((level for level in flipped if level < decision.level), default=0)
        if decision.level - other != 1:
            other = {3: 4, 4: 5, 5: 4}[decision.level]
    low, high = sorted((decision.level, other))
    return f"{low}|{high}" if high - low == 1 else ""
