"""The ESI task: a triage narrative in, one of five urgency levels out."""

from collections.abc import Callable, Mapping, Sequence
from random import Random
from types import MappingProxyType
from typing import Any

from clinrl.records import Message, Score, Stop, Transcript, Unreadable
from clinrl.task import Expect
from clinrl.tasks.esi import answer, metrics, rewards, triggers
from clinrl.tasks.esi.cases import MIXES, EsiCase, case_id, cases, pool_of
from clinrl.tasks.esi.prompt import gold, prompt
from clinrl.tasks.esi.rules import RULE_IDS, decide

Policy = Callable[[EsiCase, Random], Transcript]

LEVELS = (1, 2, 3, 4, 5)
AGE_BANDS = (("under 1", 1), ("1-4", 5), ("5-11", 12), ("12-17", 18), ("18-64", 65), ("65 and over", float("inf")))
"""Name and upper edge, excluded, in years."""


def age_band(years: float) -> str:
    """The age band of a report slice."""
    return next(name for name, below in AGE_BANDS if years < below)


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


def _expect(rule: str, column: str, on: str = "rows", **arguments: Any) -> Expect:
    return Expect(type=rule, arguments={"column": column, **arguments}, on=on)


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
    terms = rewards.TERMS
    slices: Mapping[str, Callable[[EsiCase], str]] = MappingProxyType(
        {
            "rule": lambda case: case.key.rule,
            "level": lambda case: f"level_{case.key.level}",
            "age": lambda case: age_band(case.key.presentation.age_years),
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
            value_set=[*RULE_IDS, "resources_none", "resources_one", "resources_many"],
        ),
        _expect("ExpectColumnValuesToBeBetween", "age_years", min_value=0, max_value=110),
        _expect("ExpectColumnValuesToBeBetween", "hr_bpm", min_value=20, max_value=300),
        _expect("ExpectColumnValuesToBeBetween", "rr_bpm", min_value=2, max_value=110),
        _expect("ExpectColumnValuesToBeBetween", "spo2_pct", min_value=50, max_value=100),
        _expect("ExpectColumnValuesToBeBetween", "sbp_mmhg", min_value=40, max_value=280),
        _expect("ExpectColumnValuesToBeBetween", "temp_c", min_value=28, max_value=43),
        _expect("ExpectColumnValuesToBeBetween", "pain", min_value=0, max_value=10),
        _expect("ExpectColumnValuesToBeBetween", "pulse_pressure_mmhg", min_value=5),
        _expect("ExpectColumnValueLengthsToBeBetween", "narrative", min_value=20, max_value=1200),
        _expect("ExpectColumnValuesToNotMatchRegex", "narrative", regex=r"[\x00-\x1f\x7f]"),
        _expect("ExpectColumnValuesToNotMatchRegex", "narrative", regex=r"(?i)\bESI\b|\blevel [1-5]\b|\bANSWER\b"),
        _expect("ExpectColumnValuesToBeBetween", "has_missing_vital", "summary", min_value=0.2, max_value=0.4),
    )

    cases = staticmethod(cases)
    pool_of = staticmethod(pool_of)
    case_id = staticmethod(case_id)
    prompt = staticmethod(prompt)
    gold = staticmethod(gold)

    def label(self, case: EsiCase) -> int:
        """The gold level, 1 (most urgent) to 5."""
        return case.key.level

    def relabel(self, case: EsiCase) -> int:
        """The level that the rules give the latent facts now."""
        return decide(case.key.presentation).level

    def parse(self, message: Message) -> int | Unreadable:
        """The level that a turn commits to; the thinking block is not read."""
        return answer.parse(message.content)

    def score(self, case: EsiCase, transcript: Transcript, reward: rewards.Reward) -> Score:
        """The reward of a transcript's last turn."""
        return rewards.score(case.key.level, case.facts.narrative, self.parse(transcript.messages[-1]), reward)

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
        rule = case.key.rule
        changed = decide(case.key.presentation, omit=frozenset({rule})).level != case.key.level
        return (rule,) if changed else ()

    def policies(self) -> Mapping[str, Policy]:
        """Ways to answer without reading, and "mediocre", by name."""
        return POLICIES

    def row(self, case: EsiCase) -> dict[str, Any]:
        """A flat row for the table of expectations. Vital signs are None when not measured."""
        p = case.key.presentation
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
            "has_child": p.age_years < 18,
            "has_ambiguity": case.key.ambiguous,
        }


TASK = Esi()
