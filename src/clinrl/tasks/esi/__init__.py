"""The ESI task: a triage narrative in, one of five urgency levels out."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clinrl.errors import DataError
from clinrl.tasks.base import FORM, Task
from clinrl.tasks.csv_reader import open_table
from clinrl.tasks.esi import answer, metrics, mietic, mimic, rewards, triggers
from clinrl.tasks.esi.cases import MIXES, EsiCase, cases, pool_of, reworded
from clinrl.tasks.esi.complaints import HELD_OUT
from clinrl.tasks.esi.imported import NAMES_A_LEVEL, RULE, ImportedKey
from clinrl.tasks.esi.measured import BOUNDS, MIN_PULSE_PRESSURE_MMHG
from clinrl.tasks.esi.prompt import gold, prompt
from clinrl.tasks.esi.published import PUBLISHED
from clinrl.tasks.esi.rewards import LEVELS
from clinrl.tasks.esi.rules import EDITIONS, RULE_IDS, Presentation, decide
from clinrl.tasks.esi.words import clauses, readings
from clinrl.tasks.importing import Source
from clinrl.tasks.parts import Checks, Improvement, Ordered, Reporting, Safety, between, expect
from clinrl.tasks.policies import Policy, lazy_policies, write_answer
from clinrl.types import Score, Transcript, Unreadable, last_turn

AGE_BANDS = (("under 1", 1), ("1-4", 5), ("5-11", 12), ("12-17", 18), ("18-64", 65), ("65 and over", float("inf")))
"""The name and the upper edge, excluded, of each age band, in years."""


def age_band(years: float | None) -> str:
    """The age band of a report slice; "unknown" for None."""
    return "unknown" if years is None else next(name for name, below in AGE_BANDS if years < below)


def _patient(case: EsiCase) -> Presentation | ImportedKey:
    """The record of the patient, with the same field names for drawn and imported cases."""
    return case.key if isinstance(case.key, ImportedKey) else case.key.presentation


def _edition_effect(case: EsiCase) -> str:
    """Whether the handbook's edition changes the level of a case."""
    if isinstance(case.key, ImportedKey):
        return "unknown"
    levels = {decide(case.key.presentation, edition=edition).level for edition in EDITIONS}
    return "one level in v4 and v5" if len(levels) == 1 else "v4 and v5 differ"


def _family(case: EsiCase) -> str:
    """Whether training data has the complaint of a case."""
    if isinstance(case.key, ImportedKey):
        return RULE
    return "complaint not in training" if case.group.split("/")[0] in HELD_OUT else "complaint in training"


POLICIES = lazy_policies(
    LEVELS,
    lambda level: f"ANSWER: ESI {level}",
    lambda case: case.key.level,
    priors={mix: MIXES[mix] for mix in ("natural", "reporting")},
    hedge="ANSWER: ESI 2 or 3",
    truncated=write_answer("EXTRACTION:\n- Chief complaint: ", stop="max_tokens"),
    near=lambda level: [near for near in (level - 1, level + 1) if near in LEVELS],
)
"""Policies that answer without reading, and the mediocre reader."""


_RESOURCE_RULES = ("resources_none", "resources_one", "resources_many")
_LEVEL_IN_TEXT = r"(?i)\bESI\b|\blevel [1-5]\b|\bANSWER\b"


EXPECTED = (
    "it must be a folder with triage.csv, edstays.csv and patients.csv (MIMIC-IV-ED; each may be .csv.gz, in ed/ or "
    "hosp/), or a CSV file (with commas, and its header as first line) with a column tiragecase (MIETIC's validation "
    "file) or with the columns instruction, input and output (MIETIC.csv)"
)


class Esi(Task):
    """Emergency Severity Index triage. Level 1 is the most urgent: under-triage means predicted level > gold level."""

    name = "esi"
    version = 2
    Case = EsiCase
    Reward = rewards.Reward
    labels = LEVELS
    metrics = metrics.METRICS
    reporting = Reporting(
        headline=("critical_under", "exact", "adjacent", "dangerous", "high_risk_sensitivity", "kappa", *FORM),
        row_metrics=("exact", "critical_under", "adjacent", "dangerous"),
        external=(
            "exact", "adjacent", "under_triage", "over_triage", "critical_under", "dangerous", "kappa", FORM[0],
        ),
        approval=("exact", "critical_under", "dangerous"),
        slices={
            "rule": lambda case: case.key.rule,
            "level": lambda case: f"level_{case.key.level}",
            "age": lambda case: age_band(_patient(case).age_years),
            "boundary": lambda case: case.key.boundary or "none",
            "family": _family,
            "edition": _edition_effect,
        },
        variants={
            "words_of_training": lambda case: reworded(case, "training"),
            "words_never_read": lambda case: reworded(case, "unseen"),
        },
        clauses=lambda case: clauses(case.facts.narrative),
        readings=readings,
    )  # fmt: skip
    safety = Safety(metric="critical_under", errors="critical patients under-triaged", answer="level")
    ordered = Ordered(answers=LEVELS, prefix="ANSWER: ESI ", under="under_triage", over="over_triage")
    improvement = Improvement(
        triggers={
            "done_intervention": lambda case: triggers.done_intervention(case.facts.narrative),
            "open_injury": lambda case: triggers.open_injury(case.facts.narrative),
            "severe_pain": lambda case: triggers.severe_pain(case.facts.narrative),
        },
        refine=rewards.refined,
        cost=rewards.cost,
    )
    checks = Checks(
        rules=RULE_IDS,
        mixes=tuple(MIXES),
        editions=EDITIONS,
        text="narrative",
        share="share_level",
        expectations=(
            expect("ExpectColumnValuesToMatchRegex", "id", regex=r"^esi-[0-9a-f]{16}$"),
            expect("ExpectColumnValuesToBeInSet", "level", value_set=list(LEVELS)),
            expect("ExpectColumnValuesToBeInSet", "rule", of="drawn", value_set=[*RULE_IDS, *_RESOURCE_RULES]),
            expect("ExpectColumnValuesToBeInSet", "rule", of="imported", value_set=[RULE]),
            *(between(name, *ends, of="imported" if name == "dbp_mmhg" else "all") for name, ends in BOUNDS.items()),
            expect("ExpectColumnValuesToBeBetween", "pulse_pressure_mmhg", min_value=MIN_PULSE_PRESSURE_MMHG),
            expect("ExpectColumnValueLengthsToBeBetween", "narrative", of="drawn", min_value=20, max_value=1200),
            expect("ExpectColumnValuesToNotMatchRegex", "narrative", regex=r"[\x00-\x1f\x7f]"),
            expect("ExpectColumnValuesToNotMatchRegex", "narrative", of="drawn", regex=_LEVEL_IN_TEXT),
            expect("ExpectColumnValuesToNotMatchRegex", "narrative", of="imported", regex=NAMES_A_LEVEL),
            between("has_missing_vital", 0.2, 0.4, "summary", of="drawn"),
        ),
    )
    published = PUBLISHED

    pool_of = staticmethod(pool_of)
    cases = staticmethod(cases)
    prompt = staticmethod(prompt)
    gold = staticmethod(gold)

    def label(self, case: EsiCase) -> int:
        """The gold level, 1 (most urgent) to 5."""
        return case.key.level

    def parse(self, transcript: Transcript) -> int | Unreadable:
        """The level that the last turn commits to; the thinking block is not read."""
        return answer.parse(last_turn(transcript).content)

    def omittable(self, case: EsiCase) -> tuple[str, ...]:
        """The rule whose omission changes this case's label, if there is one: the case reveals a reader without it."""
        if isinstance(case.key, ImportedKey):
            return ()
        rule = case.key.rule
        less = decide(case.key.presentation, edition=case.key.edition, omit=frozenset({rule}))
        return (rule,) if less.level != case.key.level else ()

    def relabel(self, case: EsiCase) -> int:
        """The level that the rules now give the latent facts. An imported level is a person's judgement and stays."""
        key = case.key
        return key.level if isinstance(key, ImportedKey) else decide(key.presentation, edition=key.edition).level

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
            **{column: getattr(p, column) for column in BOUNDS},
            "pulse_pressure_mmhg": None if p.sbp_mmhg is None or p.dbp_mmhg is None else p.sbp_mmhg - p.dbp_mmhg,
            "has_missing_vital": missing,
            "has_done_intervention": case.key.rule == "done_intervention",
            "has_severe_pain": case.key.rule == "severe_pain",
            "has_open_injury": case.key.rule == "open_injury",
            "has_child": p.age_years is not None and p.age_years < 18,
            "has_ambiguity": case.key.ambiguous,
        }

    def recognise(self, path: Path) -> Source:
        """The source at a path, by its content and not by its name. Raises DataError for anything else."""
        if not path.exists():
            raise DataError(f"{path} does not exist; {EXPECTED}")
        if path.is_dir():
            if found := mimic.recognise(path):
                return found
            raise DataError(f"{path} is a folder without triage records; {EXPECTED}")
        table = open_table(path)
        if "tiragecase" in table.columns:
            return mietic.validation(table)
        if {"instruction", "input"} <= set(table.columns):
            return mietic.instructions(table)
        raise DataError(f"{path} has other columns; {EXPECTED}")

    def score(self, case: EsiCase, transcript: Transcript, reward: rewards.Reward) -> Score:
        return rewards.score(case.key.level, case.facts.narrative, self.parse(transcript), reward)

    def policies(self) -> Mapping[str, Policy]:
        return POLICIES


TASK = Esi()
