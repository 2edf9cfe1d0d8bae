"""Synthetic audits: a protocol, the decisions of another agent (the Actor) about patients, and their records.

The correctness of a decision, its action, the rule that its text is about, its argument and its confidence are drawn
independently, so that only a record tells a right decision from a wrong one. A case is drawn for a protocol, whose
numbers and level fix its pool: a protocol of another level may have the same numbers in another pool.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from random import Random
from types import MappingProxyType
from typing import Final, Literal, Self

from pydantic import Field, model_validator

from clinrl.tasks.audit.patients import draw_patient
from clinrl.tasks.audit.phrases import CITATIONS, FALLACIES, Action, argue
from clinrl.tasks.audit.rules import (
    AGE,
    OVERRIDE,
    TEMPORAL,
    WINDOW,
    Differences,
    ErrorType,
    PatientRecord,
    TrialProtocol,
    deciding,
    differences,
)
from clinrl.tasks.base import content_id, pool_by_hash
from clinrl.tasks.parts import check_pool
from clinrl.types import Case, Pool, Strict

Level = Literal["easy", "medium", "hard"]
LEVEL_NAMES: Final[tuple[Level, ...]] = ("easy", "medium", "hard")
MAX_PROPOSALS: Final = 12
SHORT_LENGTH: Final = (2, 5)
LONG_LENGTH: Final = (6, MAX_PROPOSALS)
LONG: Final = 0.25
"""Share of the episodes of `LONG_LENGTH`, the same at every level. Not for the published mix."""


class Proposal(Strict):
    """The decision of the Actor about one patient. A review shows its text and citations."""

    proposal_id: str = Field(min_length=1)
    patient_id: str = Field(min_length=1)
    action: Action
    confidence: float = Field(ge=0.0, le=1.0)
    text: str
    citations: tuple[str, ...] = ()


class AuditFacts(Strict):
    """The facts that the auditor may find out."""

    level: Level
    protocol: TrialProtocol
    proposals: tuple[Proposal, ...] = Field(min_length=1, max_length=MAX_PROPOSALS)
    records: tuple[PatientRecord, ...]
    """The records of the patients in proposals, and of a few others, in random order."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        patients = {record.patient_id for record in self.records}
        if len(patients) < len(self.records):
            raise ValueError("two records have one patient_id")
        if len({proposal.proposal_id for proposal in self.proposals}) < len(self.proposals):
            raise ValueError("two proposals have one proposal_id")
        if missing := [one.patient_id for one in self.proposals if one.patient_id not in patients]:
            raise ValueError(f"no record of patient {missing[0]}")
        return self


class Truth(Strict):
    """The truth about one proposal."""

    proposal_id: str
    broken: ErrorType | None
    """The rule that the patient's record breaks. None: it breaks no rule."""
    error: ErrorType | None
    """The rule to flag: the one that a wrong clearance misses or a wrong rejection misapplies. None: approve."""
    about: ErrorType
    """The rule that the Actor's text is about."""
    fallacy: str
    """The name of the fallacy in the Actor's text."""
    deciding: tuple[str, ...]
    """The differences that settle the rule to flag, as named in `Differences`; empty if there is no error."""


class AuditKey(Strict):
    """The part of a case that only the scorer may see."""

    truths: tuple[Truth, ...]
    """In the order of the proposals."""
    pool_errors: int = Field(ge=0)
    """The divisor of the published score: the number of errors of all patients, many of them without a proposal. Drawn
    from the published counts in the published mix; the number of wrong proposals in every other mix."""


class AuditCase(Case):
    """One audit."""

    facts: AuditFacts
    key: AuditKey


class LevelSpec(Strict):
    """The parameters for drawing the episodes of a level."""

    proposals: tuple[int, int]
    about: Mapping[ErrorType, float]
    """Weights of the rules that texts are about."""
    elsewhere: float = 0.0
    """Share of the records with a breach that break another rule than the text is about."""
    citations: tuple[int, int]
    pairs: float = 0.0
    """Share of the episodes with at least two texts about the override, right or wrong ones."""
    pool_errors: Mapping[int, float] = {}
    """Published mix: the published counts of errors among all patients, with weights."""


LEVELS: Final[Mapping[Level, LevelSpec]] = {
    "easy": LevelSpec(proposals=SHORT_LENGTH, about={AGE: 0.5, TEMPORAL: 0.5}, citations=(0, 0)),
    "medium": LevelSpec(
        proposals=SHORT_LENGTH, about={AGE: 0.3, TEMPORAL: 0.3, WINDOW: 0.4}, elsewhere=0.15, citations=(1, 1)
    ),
    "hard": LevelSpec(
        proposals=SHORT_LENGTH,
        about={AGE: 0.3, TEMPORAL: 0.25, WINDOW: 0.35, OVERRIDE: 0.1},
        elsewhere=0.25,
        citations=(1, 2),
        pairs=0.7,
    ),
}
PUBLISHED_LEVELS: Final[Mapping[Level, LevelSpec]] = {
    "easy": LevelSpec(proposals=(5, 7), about={AGE: 1.0}, citations=(0, 0), pool_errors={6: 1.0}),
    "medium": LevelSpec(
        proposals=(6, 10), about={AGE: 0.54, TEMPORAL: 0.23, WINDOW: 0.23}, citations=(1, 1), pool_errors={13: 1.0}
    ),
    "hard": LevelSpec(
        proposals=(8, 12),
        about={AGE: 0.43, TEMPORAL: 0.18, WINDOW: 0.25, OVERRIDE: 0.14},
        citations=(2, 3),
        pool_errors={14: 0.06, 15: 0.14, 16: 0.24, 17: 0.56},
    ),
}
"""The published table: proposals, counts of errors, and shares of the types among the wrong proposals."""

MIXES: Final[Mapping[str, tuple[Level, ...]]] = {
    **{level: (level,) for level in LEVEL_NAMES},
    **dict.fromkeys(("natural", "reporting", "published"), LEVEL_NAMES),
}
"""The levels of each mix, which are equally frequent."""

REJECTED: Final = 0.3
"""Share of rejections among the decisions, the same for right and wrong ones."""
WITHOUT_ERRORS: Final = 0.12
"""Share of the episodes in which every decision of the Actor is right."""
PREVALENCES: Final = (0.2, 0.4, 0.6, 0.8)
"""Probabilities of a wrong decision in the other episodes, each of which has at least one."""
CONFIDENCE: Final = (0.75, 0.97)
OTHERS: Final = (2, 3)
"""Least and greatest number of patients with a record and without a proposal."""


pool_of = cache(pool_by_hash)  # the number of protocols is fixed, so the cache is bounded


def cases(
    n: int, seed: int, *, pool: Pool, mix: str, emphasis: Mapping[str, float] = MappingProxyType({})
) -> Iterator[AuditCase]:
    """`n` distinct cases of a pool. `emphasis` multiplies how often proposals are about a rule.

    Raises KeyError for a pool or a mix that does not exist.
    """
    check_pool(pool)
    rng = Random(f"audit-cases/{pool}/{mix}/{seed}")
    seen: set[str] = set()
    while len(seen) < n:
        level = rng.choice(MIXES[mix])
        case = _draw(rng, level, pool, emphasis, published=mix == "published")
        if case.id not in seen:
            seen.add(case.id)
            yield case


def _draw(rng: Random, level: Level, pool: Pool, emphasis: Mapping[str, float], *, published: bool) -> AuditCase:
    spec = (PUBLISHED_LEVELS if published else LEVELS)[level]
    group, protocol = "", None
    while protocol is None or pool_of(group) != pool:
        protocol = _protocol(rng, level, published=published)
        group = f"{level}/{protocol.protocol_id}"
    n = rng.randint(*(LONG_LENGTH if not published and rng.random() < LONG else spec.proposals))
    wrong = _wrong_as_published(rng, n) if published else _wrong(rng, n)
    actions: list[Action] = ["reject" if not published and rng.random() < REJECTED else "clear" for _ in wrong]
    weights = [share * emphasis.get(rule, 1.0) for rule, share in spec.about.items()]
    about = rng.choices(tuple(spec.about), weights, k=n)
    pair = rng.sample(range(n), 2) if rng.random() < spec.pairs else []
    for place in pair:
        about[place] = OVERRIDE
    ids = [f"P{number}" for number in rng.sample(range(10, 100), n + rng.randint(*OTHERS))]
    proposals, truths, records = [], [], []
    for place in range(n):
        rule = about[place]
        broken = None
        if wrong[place] == (actions[place] == "clear"):
            strays = place not in pair and rng.random() < spec.elsewhere
            broken = rng.choice([other for other in spec.about if other != rule]) if strays else rule
        record = draw_patient(rng, protocol, ids[place], broken=broken, about=rule)
        proposal_id, fallacy = f"A{place + 1}", rng.choice(tuple(FALLACIES[rule]))
        error = (broken or rule) if wrong[place] else None
        records.append(record)
        proposals.append(
            Proposal(
                proposal_id=proposal_id,
                patient_id=ids[place],
                action=actions[place],
                confidence=round(rng.uniform(*CONFIDENCE), 2),
                text=argue(rng, rule, fallacy, actions[place]),
                citations=tuple(rng.sample(CITATIONS, rng.randint(*spec.citations))),
            )
        )
        truths.append(
            Truth(
                proposal_id=proposal_id,
                broken=broken,
                error=error,
                about=rule,
                fallacy=fallacy,
                deciding=() if error is None else deciding(error, differences(record, protocol)),
            )
        )
    records += [draw_patient(rng, protocol, patient_id, broken=None, about=None) for patient_id in ids[n:]]
    rng.shuffle(records)
    facts = AuditFacts(level=level, protocol=protocol, proposals=tuple(proposals), records=tuple(records))
    pool_errors = rng.choices(tuple(spec.pool_errors), tuple(spec.pool_errors.values()))[0] if published else sum(wrong)
    key = AuditKey(truths=tuple(truths), pool_errors=pool_errors)
    return AuditCase(id=content_id("audit", facts, key), group=group, facts=facts, key=key)


def _wrong(rng: Random, n: int) -> list[bool]:
    """Whether the Actor is wrong, for each proposal."""
    if rng.random() < WITHOUT_ERRORS:
        return [False] * n
    prevalence = rng.choice(PREVALENCES)
    while not any(wrong := [rng.random() < prevalence for _ in range(n)]):
        pass
    return wrong


def _wrong_as_published(rng: Random, n: int) -> list[bool]:
    """Whether the Actor is wrong, for each proposal: as many as published, at random places."""
    places = set(rng.sample(range(n), max(3, int(0.45 * n))))
    return [place in places for place in range(n)]


AGES_YEARS: Final = (18, 21, 25, 30, 35, 38, 40, 42, 45, 50), (65, 68, 70, 72, 75, 78, 80, 82, 85, 90)
WINDOWS_DAYS: Final = (14, 16, 18, 21, 24, 28)
EXTENSIONS_DAYS: Final = (7, 10, 14)
THRESHOLDS: Final = (2, 3, 4, 5)

PUBLISHED_AGES_YEARS: Final[Mapping[Level, tuple[tuple[int, int], ...]]] = {
    "easy": ((35, 75), (40, 80), (45, 85)),
    "medium": ((18, 75), (21, 80), (30, 85), (40, 90)),
    "hard": ((18, 75), (21, 80), (30, 85), (35, 85), (40, 90)),
}
PUBLISHED_WINDOWS_DAYS: Final[Mapping[Level, tuple[int, ...]]] = {
    "easy": (21, 24, 28), "medium": (18, 21, 24, 28), "hard": (14, 18, 21, 24),
}  # fmt: skip
PUBLISHED_THRESHOLDS: Final = (3, 4)


def _protocol(rng: Random, level: Level, *, published: bool) -> TrialProtocol:
    low, high = (
        rng.choice(PUBLISHED_AGES_YEARS[level]) if published else (rng.choice(AGES_YEARS[0]), rng.choice(AGES_YEARS[1]))
    )
    window = rng.choice(PUBLISHED_WINDOWS_DAYS[level] if published else WINDOWS_DAYS)
    longer = window + rng.choice(EXTENSIONS_DAYS)
    threshold = rng.choice(PUBLISHED_THRESHOLDS if published else THRESHOLDS) if level == "hard" else None
    numbers = f"{low}-{high}/{window}/{longer}/{'-' if threshold is None else threshold}"
    return TrialProtocol(
        protocol_id=f"{'published' if published else 'trial'}/{numbers}",
        age_min_years=low,
        age_max_years=high,
        window_days=window,
        stage_iv_window_days=longer,
        comorbidity_threshold=threshold,
    )


def differences_of(facts: AuditFacts) -> dict[str, Differences]:
    """The signed differences to the protocol's limits, by patient."""
    return {record.patient_id: differences(record, facts.protocol) for record in facts.records}
