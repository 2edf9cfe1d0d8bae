"""The ESI task: a triage narrative in, one of five urgency levels out."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from types import MappingProxyType
from typing import Any

from clinrl.tasks.base import NOTHING_HEARD, Ask, Expect, Heard, Quality
from clinrl.tasks.esi import answer, metrics, rewards, triggers
from clinrl.tasks.esi.cases import MIXES, EsiCase, case_id, cases, pool_of
from clinrl.tasks.esi.imported import NAMES_A_LEVEL, RULE, ImportedKey
from clinrl.tasks.esi.intake import recognise
from clinrl.tasks.esi.measured import BOUNDS, LEAST_PULSE_PRESSURE_MMHG
from clinrl.tasks.esi.prompt import gold, prompt
from clinrl.tasks.esi.published import PUBLISHED
from clinrl.tasks.esi.rules import RULE_IDS, Presentation, decide
from clinrl.types import Message, Score, Stop, Transcript, Unreadable

Policy = Callable[[EsiCase, Random], Transcript]

LEVELS = (1, 2, 3, 4, 5)
AGE_BANDS = (("under 1", 1), ("1-4", 5), ("5-11", 12), ("12-17", 18), ("18-64", 65), ("65 and over", float("inf")))
"""Name and upper edge, excluded, in years."""


def age_band(years: float | None) -> str:
    """The age band of a report slice; "unknown" for None."""
    return "unknown" if years is None else next(name for name, below in AGE_BANDS if years < below)


def _patient(case: EsiCase) -> Presentation | ImportedKey:
    """What was found out about the patient, under the same names for drawn and imported cases."""
    return case.key if isinstance(case.key, ImportedKey) else case.key.presentation


def _says(text: str, stop: Stop = "answered") -> Transcript:
    return Transcript(messages=(Message(role="assistant", content=text),), stop=stop)


def _always(level: int) -> Policy:
    return lambda case, rng: _says(f"ANSWER: ESI {level}")


def _drawn(weights: Mapping[int, float]) -> Policy:
    levels, shares = zip(*weights.items(), strict=True)
    return lambda case, rng: _says(f"ANSWER: ESI {rng.choices(levels, shares)[0]}")


def _mediocre(case: EsiCase, rng: Random) -> Transcript:
    """Right in 60% of cases, else off by one level: what any useful model must beat, and no lazy policy may."""
    level = case.key.level
    if rng.random() >= 0.6:
        level = rng.choice([near for near in (level - 1, level + 1) if near in LEVELS])
    return _says(f"ANSWER: ESI {level}")


POLICIES: Mapping[str, Policy] = {
    **{f"always_{level}": _always(level) for level in LEVELS},
    "random": _drawn(dict.fromkeys(LEVELS, 1.0)),
    "prior_natural": _drawn(MIXES["natural"]),
    "prior_reporting": _drawn(MIXES["reporting"]),
    "hedge": lambda case, rng: _says("ANSWER: ESI 2 or 3"),
    "empty": lambda case, rng: _says(""),
    "truncated": lambda case, rng: _says("EXTRACTION:\n- Chief complaint: ", "max_tokens"),
    "mediocre": _mediocre,
}
"""Ways to answer without reading, and the mediocre reader."""


def _expect(rule: str, column: str, on: str = "rows", of: str = "all", **arguments: Any) -> Expect:
    return Expect(type=rule, arguments={"column": column, **arguments}, on=on, of=of)


def _within(column: str, of: str = "all") -> Expect:
    low, high = BOUNDS[column]
    return _expect("ExpectColumnValuesToBeBetween", column, of=of, min_value=low, max_value=high)


class Esi:
    """Emergency Severity Index triage. Level 1 is the most urgent: under-triage means predicted level > gold level."""

    name = "esi"
    version = 1
    Case = EsiCase
    Reward = rewards.Reward
    labels = LEVELS
    rules = RULE_IDS
    mixes = tuple(MIXES)
    metrics = metrics.METRICS
    qualities: Mapping[str, Quality] = MappingProxyType({})
    headline = ("exact", "adjacent", "dangerous", "high_risk_sensitivity", "kappa", "no_parse", "clipped")
    row_metrics = ("exact", "adjacent", "dangerous")
    form_metrics = ("exact", "critical_under", "dangerous")
    slice_measures = ("exact", "dangerous")
    views: Mapping[str, Callable[[EsiCase], EsiCase | None]] = MappingProxyType({})
    cluster: Callable[[EsiCase], str] | None = None
    terms = rewards.TERMS
    slices: Mapping[str, Callable[[EsiCase], str]] = MappingProxyType(
        {
            "rule": lambda case: case.key.rule,
            "level": lambda case: f"level_{case.key.level}",
            "age": lambda case: age_band(_patient(case).age_years),
            "boundary": lambda case: case.key.boundary or "none",
        }
    )
    triggers: Mapping[str, Callable[[EsiCase], bool]] = MappingProxyType(
        {
            "done_intervention": lambda case: triggers.done_intervention(case.facts.narrative),
            "open_injury": lambda case: triggers.open_injury(case.facts.narrative),
            "severe_pain": lambda case: triggers.severe_pain(case.facts.narrative),
        }
    )
    expectations = (
        _expect("ExpectColumnValuesToMatchRegex", "id", regex=r"^esi-[0-9a-f]{16}$"),
        _expect("ExpectColumnValuesToBeInSet", "level", value_set=list(LEVELS)),
        _expect(
            "ExpectColumnValuesToBeInSet",
            "rule",
            of="drawn",
            value_set=[*RULE_IDS, "resources_none", "resources_one", "resources_many"],
        ),
        _expect("ExpectColumnValuesToBeInSet", "rule", of="imported", value_set=[RULE]),
        _within("age_years"),
        _within("hr_bpm"),
        _within("rr_bpm"),
        _within("spo2_pct"),
        _within("sbp_mmhg"),
        _within("dbp_mmhg", of="imported"),
        _within("temp_c"),
        _within("pain"),
        _expect("ExpectColumnValuesToBeBetween", "pulse_pressure_mmhg", min_value=LEAST_PULSE_PRESSURE_MMHG),
        _expect("ExpectColumnValueLengthsToBeBetween", "narrative", of="drawn", min_value=20, max_value=1200),
        _expect("ExpectColumnValuesToNotMatchRegex", "narrative", regex=r"[\x00-\x1f\x7f]"),
        _expect(
            "ExpectColumnValuesToNotMatchRegex",
            "narrative",
            of="drawn",
            regex=r"(?i)\bESI\b|\blevel [1-5]\b|\bANSWER\b",
        ),
        _expect("ExpectColumnValuesToNotMatchRegex", "narrative", of="imported", regex=NAMES_A_LEVEL),
        _expect(
            "ExpectColumnValuesToBeBetween", "has_missing_vital", "summary", of="drawn", min_value=0.2, max_value=0.4
        ),
    )

    cases = staticmethod(cases)
    pool_of = staticmethod(pool_of)
    case_id = staticmethod(case_id)
    prompt = staticmethod(prompt)
    gold = staticmethod(gold)
    recognise = staticmethod(recognise)
    published = PUBLISHED
    protocol = None
    environment = None
    turns = 1

    def label(self, case: EsiCase) -> int:
        """The gold level, 1 (most urgent) to 5."""
        return case.key.level

    def relabel(self, case: EsiCase) -> int:
        """The level that the rules give the latent facts now. An imported level is a person's and stays."""
        if isinstance(case.key, ImportedKey):
            return case.key.level
        return decide(case.key.presentation).level

    def parse(self, transcript: Transcript) -> int | Unreadable:
        """The level that the last turn commits to; the thinking block is not read."""
        return answer.parse(transcript.messages[-1].content)

    def oracles(self, reward: rewards.Reward) -> tuple[str, ...]:
        """None: the reward follows from the level and the narrative."""
        return ()

    def asks(self, case: EsiCase, transcript: Transcript, reward: rewards.Reward) -> Sequence[Ask]:
        """Nothing."""
        return ()

    def lessons(self, judge: str, n: int, seed: int) -> Iterator[tuple[str, str]]:
        """Nothing: no judge is asked."""
        return iter(())

    def parts(self, gold: int, answer: int | Unreadable) -> Sequence[tuple[int, int | Unreadable]]:
        """The two themselves."""
        return ((gold, answer),)

    def part_names(self, gold: int) -> Sequence[str]:
        """There is one decision."""
        return ("answer",)

    def score(
        self, case: EsiCase, transcript: Transcript, reward: rewards.Reward, heard: Heard = NOTHING_HEARD
    ) -> Score:
        """The reward of a transcript's last turn."""
        return rewards.score(case.key.level, case.facts.narrative, self.parse(transcript), reward)

    def refine(self, reward: rewards.Reward, rules: Sequence[str]) -> rewards.Reward:
        """The reward with the modifiers of these rules, of half a level's worth each, where it has none yet."""
        return rewards.refined(reward, rules)

    def cost(self, gold: int, answer: int | Unreadable) -> float:
        """How far an answer's value in the asymmetric matrix lies below the exact level's, without the safety valve.

        0 to 2.25: under-triage costs at least what over-triage of the same distance does. An unreadable answer leaves
        the patient untriaged and costs as much as the worst level. The matrix is our reconstruction (`rewards`).
        """
        return rewards.cost(gold, answer)

    def omittable(self, case: EsiCase) -> tuple[str, ...]:
        """The rule whose omission changes this case's label, if there is one: where a reader's gap shows."""
        if isinstance(case.key, ImportedKey):
            return ()
        rule = case.key.rule
        changed = decide(case.key.presentation, omit=frozenset({rule})).level != case.key.level
        return (rule,) if changed else ()

    def policies(self) -> Mapping[str, Policy]:
        """Ways to answer without reading, and "mediocre", by name."""
        return POLICIES

    def row(self, case: EsiCase) -> dict[str, Any]:
        """A flat row for the table of expectations. Vital signs are None when not measured."""
        p = _patient(case)
        missing = None in (p.hr_bpm, p.rr_bpm, p.spo2_pct, p.sbp_mmhg, p.temp_c)
        return {
            "id": case.id,
            "group": case.group,
            "narrative": case.facts.narrative,
            "level": case.key.level,
            "rule": case.key.rule,
            "age_years": p.age_years,
            "hr_bpm": p.hr_bpm,
            "rr_bpm": p.rr_bpm,
            "spo2_pct": p.spo2_pct,
            "sbp_mmhg": p.sbp_mmhg,
            "dbp_mmhg": p.dbp_mmhg,
            "temp_c": p.temp_c,
            "pain": p.pain,
            "pulse_pressure_mmhg": None if p.sbp_mmhg is None or p.dbp_mmhg is None else p.sbp_mmhg - p.dbp_mmhg,
            "has_missing_vital": missing,
            "has_done_intervention": case.key.rule == "done_intervention",
            "has_severe_pain": case.key.rule == "severe_pain",
            "has_open_injury": case.key.rule == "open_injury",
            "has_child": p.age_years is not None and p.age_years < 18,
            "has_ambiguity": case.key.ambiguous,
        }


TASK = Esi()
