"""Synthetic imaging requests: latent facts first, then the rating by the rules, then words and evidence.

A case is drawn for a variant: a condition with a suspected finding, the kind of patient and the phase of the work-up.
The name of the variant fixes its pool, so all procedures of a variant lie in one pool. Five conditions are in the exam
pool only. Conditions, ratings, reasons and studies are invented; none is clinical guidance.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from random import Random
from types import MappingProxyType
from typing import Annotated

from pydantic import BeforeValidator, Field

from clinrl.tasks import importing
from clinrl.tasks.base import content_id, pool_by_hash
from clinrl.tasks.imaging import evidence
from clinrl.tasks.imaging.answer import LABELS, Label
from clinrl.tasks.imaging.evidence import Abstract, Study
from clinrl.tasks.imaging.guideline import (
    ADVANCED,
    BY_ID,
    CONDITIONS,
    CONTRAST,
    ELSEWHERE,
    HELD_OUT,
    MODALITIES,
    RADIATION,
    SEXES,
    Condition,
    Modality,
    Sex,
)
from clinrl.tasks.imaging.imported import ImportedKey
from clinrl.tasks.imaging.rules import (
    CHILD_BELOW_YEARS,
    EGFR_LIMIT,
    RULE_IDS,
    Decision,
    Scenario,
    decide,
    deciding_rule,
    weak_kidneys,
)
from clinrl.tasks.imaging.statements import CITES, RATING, STANCES, Statement, slots, to_sentence
from clinrl.tasks.parts import check_pool
from clinrl.types import Case, Pool, Strict


class ImagingFacts(Strict):
    """The part of a case that the model may see."""

    condition: str = Field(min_length=1, max_length=300)
    variant: str = Field(min_length=1, max_length=2000)
    procedure: str = Field(min_length=1, max_length=300)
    evidence: tuple[Abstract, ...] = ()

    @property
    def narrative(self) -> str:
        """The request and its abstracts, on one line."""
        return " | ".join((self.condition, self.variant, self.procedure, *(study.text for study in self.evidence)))


class ImagingKey(Strict):
    """The part of a case that only the scorer may see."""

    scenario: Scenario
    studies: tuple[Study, ...]
    label: Label
    rating: int = Field(ge=1, le=9)
    rule: str
    """The first rule whose omission changes the label, or "yield"."""
    reasoning: tuple[str, ...]
    """Gold statements as sentences, in order; studies are cited as [n]."""


class ImagingCase(Case):
    """One request, drawn here or imported: is this procedure appropriate for this variant of this condition?"""

    facts: ImagingFacts
    key: Annotated[
        ImagingKey | ImportedKey, BeforeValidator(lambda value: importing.key_of(value, ImagingKey, ImportedKey))
    ]


NATURAL: Mapping[str, float] = dict(zip(LABELS, (0.642, 0.173, 0.185), strict=True))
"""The published mix of labels, training and test together."""
ELSEWHERE_MIX: Mapping[str, float] = dict(zip(LABELS, (0.676, 0.124, 0.201), strict=True))
"""The published mix on held-out conditions."""
MIXES: Mapping[str, Mapping[str, float]] = {
    "natural": NATURAL,
    "balanced": dict.fromkeys(LABELS, 1 / 3),
    "reporting": NATURAL,
}
"""Class shares by label. In "reporting", the exam pool has held-out conditions too, with a mix of their own."""

HELD_OUT_SHARE = 1 / 3
"""Share of held-out conditions in an exam of the mix "reporting": 259 of 779 cases in the published study."""

AIMED_SHARE = 0.65
"""Share of the draws whose facts are made for one of the rules to hold, so that rare rules are not rare here."""

CHILDBEARING = (18, 42)
"""Youngest and oldest age in years at which a woman may be pregnant here."""

RED_FLAGS = ("weight loss", "fever", "numbness", "sudden onset", "night pain", "a history of cancer")


@lru_cache(1 << 17)  # more than a data set has variants
def pool_of(group: str) -> Pool:
    """The pool of a variant: by the hash of its name, or the exam pool if its condition is held out.

    The group of an imported case names its pool.
    """
    if (named := importing.pool_of(group)) is not None:
        return named
    if group.split("/")[0] in _HELD_OUT_IDS:
        return "exam"
    return pool_by_hash(group)


_HELD_OUT_IDS = frozenset(condition.id for condition in HELD_OUT)


def is_held_out(case: ImagingCase) -> bool:
    """Whether the condition of a case is held out: only the exam pool has it."""
    return case.group.split("/")[0] in _HELD_OUT_IDS


def cases(
    n: int, seed: int, *, pool: Pool, mix: str, emphasis: Mapping[str, float] = MappingProxyType({})
) -> Iterator[ImagingCase]:
    """`n` distinct cases of a pool. `emphasis` multiplies how often a rule decides, at fixed label shares.

    Raises KeyError for a pool or a mix that does not exist.
    """
    check_pool(pool)
    rng = Random(f"imaging-cases/{pool}/{mix}/{seed}")
    most = max([1.0, *emphasis.values()])
    seen: set[str] = set()
    while len(seen) < n:
        held_out = pool == "exam" and mix == "reporting" and rng.random() < HELD_OUT_SHARE
        conditions, shares = (HELD_OUT, ELSEWHERE_MIX) if held_out else (CONDITIONS, MIXES[mix])
        label = rng.choices(tuple(shares), tuple(shares.values()))[0]
        while True:
            case = _draw(rng, conditions, pool, label)
            if case is None or case.id in seen:
                continue
            if rng.random() * most <= emphasis.get(case.key.rule, 1.0):
                break
        seen.add(case.id)
        yield case


def _draw(rng: Random, conditions: tuple[Condition, ...], pool: Pool, label: str) -> ImagingCase | None:
    scenario = _scenario(rng, rng.choice(conditions))
    group = variant_of(scenario)
    if pool_of(group) != pool:
        return None
    found, variant = evidence.studies(rng, scenario), _variant(rng, scenario)
    decision = decide(scenario)
    return _worded(scenario, group, found, variant, decision) if decision.label == label else None


def _worded(scenario: Scenario, group: str, found: tuple[Study, ...], variant: str, decision: Decision) -> ImagingCase:
    facts = ImagingFacts(
        condition=BY_ID[scenario.condition].says,
        variant=variant,
        procedure=procedure(scenario),
        evidence=tuple(map(evidence.abstract, found)),
    )
    key = ImagingKey(
        scenario=scenario,
        studies=found,
        label=decision.label,
        rating=decision.rating,
        rule=deciding_rule(scenario),
        reasoning=sentences(scenario, found, decision, variant),
    )
    return ImagingCase(id=content_id("imaging", facts, key), group=group, facts=facts, key=key)


def variant_of(s: Scenario) -> str:
    """The name of a request's variant: everything but the exact age, the procedure and the evidence."""
    band = "child" if s.age_years < CHILD_BELOW_YEARS else "adult" if s.age_years < 65 else "old"
    kidneys = "weak" if weak_kidneys(s) else "fine"
    flags = "flagged" if s.red_flag else "plain"
    carrying = "pregnant" if s.pregnant else "not"
    return "/".join((s.condition, s.target, s.phase, s.done or "none", flags, s.sex, band, carrying, kidneys))


def statements(s: Scenario, found: tuple[Study, ...], decision: Decision) -> tuple[Statement, ...]:
    """The statements of a reader with this decision, in order: yield, rules, studies, rating.

    If the region is wrong, there is no statement about the yield or the evidence.
    """
    made = [Statement(rule, tuple(getattr(s, slot) for slot in slots(rule))) for rule in decision.applied]
    if "wrong_region" not in decision.applied:
        stances = [(str(study.number), STANCES[evidence.stance(study, s, decision.shown)]) for study in found]
        made = [
            Statement(f"shows_{decision.shown}", (s.modality, s.target)), *made,
            *(Statement(CITES, stance) for stance in stances),
        ]  # fmt: skip
    return (*made, Statement(RATING, (str(decision.rating),)))


def sentences(s: Scenario, found: tuple[Study, ...], decision: Decision, seed: str) -> tuple[str, ...]:
    """The statements as sentences. `seed`, the text of the variant, fixes the wordings, so a request has one text."""
    rng = Random(f"wording/{seed}")
    return tuple(to_sentence(statement, rng.randrange(3)) for statement in statements(s, found, decision))


def procedure(s: Scenario) -> str:
    """The name of the procedure in a request."""
    contrast = "" if s.modality not in CONTRAST else " with contrast" if s.contrast else " without contrast"
    return f"{s.modality} of the {s.region}{contrast}"


def with_evidence(case: ImagingCase, found: tuple[Study, ...]) -> ImagingCase:
    """The same request with other evidence and the gold reasons that go with it. The label stays.

    An imported case keeps the reasons of its author.
    """
    facts = case.facts.model_copy(update={"evidence": tuple(map(evidence.abstract, found))})
    if isinstance(case.key, ImportedKey):
        return case.model_copy(update={"facts": facts})
    s = case.key.scenario
    reasoning = sentences(s, found, decide(s), case.facts.variant)
    return case.model_copy(
        update={"facts": facts, "key": case.key.model_copy(update={"studies": found, "reasoning": reasoning})}
    )


def _scenario(rng: Random, condition: Condition) -> Scenario:
    """Latent facts. In a share `AIMED_SHARE` of the draws, a chosen rule holds for them where it can."""
    target = rng.choice(condition.targets)
    aim = rng.choice(RULE_IDS) if rng.random() < AIMED_SHARE else ""
    sex: Sex = condition.sex if condition.sex is not None else "woman" if aim == "pregnancy" else rng.choice(SEXES)
    modality = _modality(rng, condition, aim)
    low, high = condition.ages
    wanted = {"child": (2, CHILD_BELOW_YEARS - 1), "pregnancy": CHILDBEARING}.get(aim, (low, high))
    if max(low, wanted[0]) <= min(high, wanted[1]):
        low, high = max(low, wanted[0]), min(high, wanted[1])
    age = rng.randint(low, high)
    may_carry = sex == "woman" and CHILDBEARING[0] <= age <= CHILDBEARING[1]
    weak = aim == "kidneys" or rng.random() < 0.12
    first = rng.random() < 0.5 if aim not in ("plain_first", "repeat") else aim == "plain_first"
    earlier: Modality = modality if aim == "repeat" else rng.choice(("radiography", "ultrasound"))
    contrast = modality in CONTRAST and rng.random() < 0.5
    if aim in ("kidneys", "contrast_idle"):
        contrast = True
    elif aim == "contrast_lacking":
        contrast = False
    away = aim == "wrong_region" or rng.random() < 0.04
    return Scenario(
        condition=condition.id,
        target=target,
        age_years=age,
        sex=sex,
        pregnant=may_carry and (aim == "pregnancy" or rng.random() < 0.15),
        egfr_ml_min=rng.randint(8, EGFR_LIMIT - 1) if weak else rng.choice((None, rng.randint(EGFR_LIMIT + 5, 115))),
        red_flag=aim == "red_flag" or (aim != "plain_first" and rng.random() < 0.35),
        phase="initial" if first else "next",
        done=None if first else earlier,
        modality=modality,
        region=rng.choice([place for place in ELSEWHERE if place != condition.region]) if away else condition.region,
        contrast=contrast,
    )


def _modality(rng: Random, condition: Condition, aim: str) -> Modality:
    """A modality to which the rule `aim` can apply; any modality without such a rule."""
    fitting = tuple(condition.local) if aim == "local_yield" else _FITTING.get(aim)
    return rng.choice(fitting or MODALITIES)


_FITTING: Mapping[str, tuple[Modality, ...]] = {
    **dict.fromkeys(("plain_first", "red_flag"), tuple(one for one in MODALITIES if one in ADVANCED)),
    "pregnancy": tuple(one for one in MODALITIES if RADIATION[one] >= 2),
    "child": tuple(one for one in MODALITIES if RADIATION[one] >= 3),
    **dict.fromkeys(
        ("kidneys", "contrast_lacking", "contrast_idle"), tuple(one for one in MODALITIES if one in CONTRAST)
    ),
}
"""The modalities to which a rule can apply. A rule that is not listed can apply to any."""


def _variant(rng: Random, s: Scenario) -> str:
    """The variant in words: patient, suspicion, findings and phase, worded in one of several ways."""
    sex = s.sex if s.age_years >= 18 else "girl" if s.sex == "woman" else "boy"
    noun = f"pregnant {sex}" if s.pregnant else sex
    patient = rng.choice((f"{noun} of {s.age_years}", f"{noun}, {s.age_years} years", f"{s.age_years}-year-old {noun}"))
    suspicion = rng.choice(("suspected: {}", "in question: {}", "{} is suspected")).format(s.target)
    flags = f"red flag: {rng.choice(RED_FLAGS)}" if s.red_flag else rng.choice(("no red flags", "red flags: none"))
    parts = [patient, suspicion, flags]
    if s.egfr_ml_min is not None:
        parts.append(f"eGFR {s.egfr_ml_min}")
    phase = "initial imaging" if s.done is None else f"{s.done} was unclear, next imaging study"
    body = ". ".join(part if part.startswith("eGFR") else part[0].upper() + part[1:] for part in (*parts, phase))
    return f"Variant {rng.randint(1, 9)}: {body}."
