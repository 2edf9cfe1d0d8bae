"""The ESI task: a triage narrative in, one of five urgency levels out."""

from collections.abc import Mapping
from random import Random
from typing import Any

from clinrl.records import Message, Score, Transcript, Unreadable
from clinrl.task import Expect
from clinrl.tasks.esi import answer, metrics, rewards
from clinrl.tasks.esi.cases import MIXES, EsiCase, EsiFacts, EsiKey, case_id, cases, pool_of
from clinrl.tasks.esi.prompt import gold, prompt
from clinrl.tasks.esi.rules import RULE_IDS, decide


class Esi:
    """Emergency Severity Index triage. Level 1 is the most urgent, so under-triage means predicted level > gold level."""

    name = "esi"
    version = 1
    Case = EsiCase
    Reward = rewards.Reward
    labels = (1, 2, 3, 4, 5)
    rules = RULE_IDS
    mixes = tuple(MIXES)
    metrics = metrics.METRICS
    terms = rewards.TERMS
    slices = {
        "rule": lambda case: case.key.rule,
        "level": lambda case: f"level_{case.key.level}",
        "age": lambda case: age_band(case.key.presentation.age_years),
        "boundary": lambda case: case.key.boundary or "none",
    }

    cases = staticmethod(cases)
    pool_of = staticmethod(pool_of)
    case_id = staticmethod(case_id)
    prompt = staticmethod(prompt)
    gold = staticmethod(gold)

    def label(self, case: EsiCase) -> int:
        return case.key.level

    def relabel(self, case: EsiCase) -> int:
        return decide(case.key.presentation).level

    def parse(self, message: Message) -> int | Unreadable:
        return answer.parse(message.content)

    def score(self, case: EsiCase, transcript: Transcript, reward: rewards.Reward) -> Score:
        return rewards.score(case.key.level, case.facts.narrative, self.parse(transcript.messages[-1]), reward)

    def omittable(self, case: EsiCase) -> tuple[str, ...]:
        """The rules whose omission changes this case's label: where a reader's gap shows."""
        level = case.key.level
        return tuple(
            rule
            for rule in dict.fromkeys((case.key.rule,))
            if decide(case.key.presentation, omit=frozenset({rule})).level != level
        )

    def policies(self) -> Mapping[str, Any]:
        return POLICIES

    def row(self, case: EsiCase) -> dict[str, Any]:
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

    expectations = (
        Expect(type="ExpectColumnValuesToMatchRegex", arguments={"column": "id", "regex": r"^esi-[0-9a-f]{16}$"}),
        Expect(type="ExpectColumnValuesToBeInSet", arguments={"column": "level", "value_set": [1, 2, 3, 4, 5]}),
        Expect(type="ExpectColumnValuesToBeInSet", arguments={"column": "rule", "value_set": [*RULE_IDS, "resources_none", "resources_one", "resources_many"]}),
        Expect(type="ExpectColumnValuesToBeBetween", arguments={"column": "age_years", "min_value": 0, "max_value": 110}),
        Expect(type="ExpectColumnValuesToBeBetween", arguments={"column": "hr_bpm", "min_value": 20, "max_value": 300}),
        Expect(type="ExpectColumnValuesToBeBetween", arguments={"column": "rr_bpm", "min_value": 2, "max_value": 110}),
        Expect(type="ExpectColumnValuesToBeBetween", arguments={"column": "spo2_pct", "min_value": 50, "max_value": 100}),
        Expect(type="ExpectColumnValuesToBeBetween", arguments={"column": "sbp_mmhg", "min_value": 40, "max_value": 280}),
        Expect(type="ExpectColumnValuesToBeBetween", arguments={"column": "temp_c", "min_value": 28, "max_value": 43}),
        Expect(type="ExpectColumnValuesToBeBetween", arguments={"column": "pain", "min_value": 0, "max_value": 10}),
        Expect(type="ExpectColumnValuesToBeBetween", arguments={"column": "pulse_pressure_mmhg", "min_value": 5}),
        Expect(type="ExpectColumnValueLengthsToBeBetween", arguments={"column": "narrative", "min_value": 20, "max_value": 1200}),
        Expect(type="ExpectColumnValuesToNotMatchRegex", arguments={"column": "narrative", "regex": r"[\x00-\x1f\x7f]"}),
        Expect(type="ExpectColumnValuesToNotMatchRegex", arguments={"column": "narrative", "regex": r"(?i)\bESI\b|\blevel [1-5]\b|\bANSWER\b"}),
        Expect(type="ExpectColumnValuesToBeBetween", arguments={"column": "has_missing_vital", "min_value": 0.2, "max_value": 0.4}, on="summary"),
    )  # fmt: skip


AGE_BANDS = (("under 1", 1), ("1-4", 5), ("5-11", 12), ("12-17", 18), ("18-64", 65), ("65 and over", float("inf")))


def age_band(years: float) -> str:
    """The age band of a report slice."""
    return next(name for name, below in AGE_BANDS if years < below)


def _says(text: str, stop: str = "answered") -> Transcript:
    return Transcript(messages=(Message(role="assistant", content=text),), stop=stop)


def _mediocre(case: EsiCase, rng: Random) -> Transcript:
    """Right in 60% of cases, else off by one level: what any useful model must beat, and no lazy policy may."""
    level = case.key.level
    if rng.random() >= 0.6:
        level = rng.choice([near for near in (level - 1, level + 1) if 1 <= near <= 5])
    return _says(f"ANSWER: ESI {level}")


def _drawn(weights: Mapping[int, float]) -> Any:
    levels, shares = zip(*weights.items(), strict=True)
    return lambda case, rng: _says(f"ANSWER: ESI {rng.choices(levels, shares)[0]}")


POLICIES: Mapping[str, Any] = {
    **{f"always_{level}": (lambda case, rng, level=level: _says(f"ANSWER: ESI {level}")) for level in Esi.labels},
    "random": _drawn(dict.fromkeys(Esi.labels, 1.0)),
    "prior_natural": _drawn(MIXES["natural"]),
    "prior_reporting": _drawn(MIXES["reporting"]),
    "hedge": lambda case, rng: _says("ANSWER: ESI 2 or 3"),
    "empty": lambda case, rng: _says(""),
    "truncated": lambda case, rng: _says("EXTRACTION:\n- Chief complaint: ", "max_tokens"),
    "mediocre": _mediocre,
}
"""Ways to answer without reading, and the mediocre reader."""

TASK = Esi()
