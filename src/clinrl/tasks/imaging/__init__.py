"""The imaging task: is this procedure appropriate for this variant of this condition, with what reasons?

Everything drawn here is synthetic: conditions, ratings, reasons and studies. Not clinical guidance.
"""

import re
from collections.abc import Mapping
from typing import Any

from clinrl.tasks.base import FORM, Task
from clinrl.tasks.imaging import answer, evidence, metrics, quality, rewards
from clinrl.tasks.imaging.answer import LABELS
from clinrl.tasks.imaging.cases import MIXES, ImagingCase, cases, is_held_out, pool_of, with_evidence
from clinrl.tasks.imaging.guideline import BY_ID, MODALITIES, RADIATION, true_yield
from clinrl.tasks.imaging.imported import MAX_SENTENCES, NAMES_A_LABEL, RULE, ImportedKey
from clinrl.tasks.imaging.intake import NUMBERS, recognise
from clinrl.tasks.imaging.prompt import gold, prompt
from clinrl.tasks.imaging.rules import EGFR_LIMIT, RULE_IDS, decide
from clinrl.tasks.importing import is_imported, normalise, pseudonym
from clinrl.tasks.parts import NO_RESPONSES, Checks, Improvement, Judged, Reporting, Safety, between, expect
from clinrl.tasks.policies import Policy, lazy_policies, write_answer
from clinrl.types import Score, Transcript, Unreadable, last_turn

POLICIES = lazy_policies(
    LABELS,
    lambda label: f"<answer>{label}</answer>",
    lambda case: case.key.label,
    priors={"natural": MIXES["natural"]},
    hedge=f"<answer>{LABELS[0]} or {LABELS[1]}</answer>",
    truncated=write_answer("", "The procedure shows", "max_tokens"),
)
"""The lazy policies, which answer without reading a case, and the mediocre reader."""


def _swapped(case: ImagingCase) -> ImagingCase | None:
    """The case with studies of other conditions. None for an imported case, and for one without studies."""
    if isinstance(case.key, ImportedKey):
        return None
    s, found = case.key.scenario, case.key.studies
    return with_evidence(case, evidence.swap(found, s, case.id)) if found else None


def _contradicted(case: ImagingCase) -> ImagingCase | None:
    """The case with studies that report a false yield. None for an imported case, and where no study bears on it."""
    if isinstance(case.key, ImportedKey):
        return None
    s, found = case.key.scenario, case.key.studies
    truth = true_yield(BY_ID[s.condition], s.target, s.modality)
    if all(evidence.stance(study, s, truth) == "elsewhere" for study in found):
        return None
    return with_evidence(case, evidence.contradict(found, s, truth, case.id))


_LABEL_IN_TEXT = r"(?i)usually (?:not )?appropriate|may be appropriate|\b[1-9] of 9\b|<answer"


def _cluster(case: ImagingCase) -> str:
    """The condition, since its cases share a chapter of the guideline. For an imported case, a hash of its name."""
    if isinstance(case.key, ImportedKey):
        return pseudonym("condition", normalise(case.facts.condition))
    return case.key.scenario.condition


def _cost(gold: str, answer: str | Unreadable) -> float:
    """The cost of an answer, 0 to 1: 0.5 for a label one step off, 1 for two steps and for an unreadable answer."""
    return 1.0 if isinstance(answer, Unreadable) else abs(LABELS.index(answer) - LABELS.index(gold)) / 2


def _shows_pregnancy(case: ImagingCase) -> bool:
    return "pregnant" in case.facts.variant.lower() and RADIATION.get(_modality_of(case), 0) >= 2


def _shows_weak_kidneys(case: ImagingCase) -> bool:
    rate = re.search(r"\beGFR (\d{1,3})\b", case.facts.variant)
    return rate is not None and int(rate[1]) < EGFR_LIMIT and case.facts.procedure.endswith(" with contrast")


def _shows_a_repeat(case: ImagingCase) -> bool:
    named = _modality_of(case)
    return named is not None and any(f"{one} was unclear" in case.facts.variant for one in (named, named.capitalize()))


def _modality_of(case: ImagingCase) -> Any:
    """The modality that the name of the procedure begins with. None for other names, which imported cases may have."""
    return next((modality for modality in MODALITIES if case.facts.procedure.startswith(modality)), None)


class Imaging(Task):
    """Imaging appropriateness in three ordered labels. Over-use is an answer above the gold label, under-use below."""

    name = "imaging"
    version = 1
    Case = ImagingCase
    Reward = rewards.Reward
    labels = LABELS
    metrics = metrics.METRICS
    reporting = Reporting(
        headline=(
            "exact", "macro_f1", "weighted_f1", "balanced_accuracy", "kappa", "dangerous", "over_use", "under_use",
            *quality.QUALITIES, *FORM,
        ),
        row_metrics=("exact", "macro_f1", "weighted_f1", "balanced_accuracy", "dangerous", "over_use", "under_use"),
        approval=("exact", "dangerous", "over_use", "under_use"),
        qualities=quality.QUALITIES,
        variants={
            "without_evidence": lambda case: with_evidence(case, ()) if case.facts.evidence else None,
            "swapped_evidence": _swapped,
            "contradicted_evidence": _contradicted,
        },
        slices={
            "conditions": lambda case: RULE if is_imported(case) else "held_out" if is_held_out(case) else "known",
            "rule": lambda case: case.key.rule,
            "label": lambda case: case.key.label,
            "evidence": lambda case: (
                f"{len(case.facts.evidence)}_studies" if len(case.facts.evidence) <= 3 else "4_or_more_studies"
            ),
            "condition": lambda case: RULE if isinstance(case.key, ImportedKey) else case.key.scenario.condition,
        },
        cluster=_cluster,
    )  # fmt: skip
    safety = Safety(metric="dangerous", errors="dangerous errors", answer="label")
    improvement = Improvement(
        triggers={
            "pregnancy": _shows_pregnancy,
            "kidneys": _shows_weak_kidneys,
            "repeat": _shows_a_repeat,
        },
        cost=_cost,
    )
    checks = Checks(
        rules=RULE_IDS,
        mixes=tuple(MIXES),
        text="narrative",
        share="share_level",
        expectations=(
            expect("ExpectColumnValuesToMatchRegex", "id", regex=r"^imaging-[0-9a-f]{16}$"),
            expect("ExpectColumnValuesToBeInSet", "label", value_set=list(LABELS)),
            expect("ExpectColumnValuesToBeInSet", "rule", of="drawn", value_set=[*RULE_IDS, "yield"]),
            expect("ExpectColumnValuesToBeInSet", "rule", of="imported", value_set=[RULE]),
            expect("ExpectColumnValuesToBeInSet", "modality", value_set=list(MODALITIES)),
            between("rating", 1, 9),
            between("age_years", 0, 110),
            between("egfr_ml_min", 5, 140),
            between("studies", 0, 3, of="drawn"),
            between("studies", 0, len(NUMBERS), of="imported"),
            between("reasons", 2, 12, of="drawn"),
            between("reasons", 1, MAX_SENTENCES, of="imported"),
            expect("ExpectColumnValuesToNotMatchRegex", "narrative", of="drawn", regex=_LABEL_IN_TEXT),
            expect("ExpectColumnValuesToNotMatchRegex", "shown", of="imported", regex=NAMES_A_LABEL),
            between("has_evidence", 0.65, 0.85, "summary", of="drawn"),
        ),
    )
    judged = Judged(models=rewards.models, requests=rewards.requests, score=rewards.score, lessons=quality.lessons)
    recognise = staticmethod(recognise)

    pool_of = staticmethod(pool_of)
    cases = staticmethod(cases)
    prompt = staticmethod(prompt)
    gold = staticmethod(gold)

    def label(self, case: ImagingCase) -> str:
        return case.key.label

    def parse(self, transcript: Transcript) -> str | Unreadable:
        """The label that the last turn commits to, read strictly."""
        return answer.parse(last_turn(transcript))

    def omittable(self, case: ImagingCase) -> tuple[str, ...]:
        if isinstance(case.key, ImportedKey):
            return ()
        s, believed = case.key.scenario, evidence.find_majority(case.key.studies, case.key.scenario)
        return tuple(rule for rule in RULE_IDS if decide(s, frozenset({rule}), believed).label != case.key.label)

    def relabel(self, case: ImagingCase) -> str:
        """The label that the present rules give to the latent facts. An imported label is a panel's and stays."""
        if isinstance(case.key, ImportedKey):
            return case.key.label
        return decide(case.key.scenario).label

    def row(self, case: ImagingCase) -> dict[str, Any]:
        """A flat row for the table of expectations. The filtration rate is None where it is not known.

        The narrative of an imported case is the request alone, because a published abstract may hold a date or a web
        address, and may be longer than any narrative.
        """
        key, facts = case.key, case.facts
        request = (facts.condition, facts.variant, facts.procedure)
        s, rating = (None, None) if isinstance(key, ImportedKey) else (key.scenario, key.rating)
        return {
            "id": case.id,
            "group": case.group,
            "narrative": " | ".join(request) if isinstance(key, ImportedKey) else facts.narrative,
            "shown": facts.narrative,
            "label": key.label,
            "rating": rating,
            "rule": key.rule,
            "condition": s and s.condition,
            "modality": s and s.modality,
            "age_years": s and s.age_years,
            "egfr_ml_min": s and s.egfr_ml_min,
            "studies": len(facts.evidence),
            "reasons": len(key.reasoning),
            "has_evidence": bool(facts.evidence),
            "has_red_flag": s is not None and s.red_flag,
            "has_held_out_condition": is_held_out(case),
        }

    def score(self, case: ImagingCase, transcript: Transcript, reward: rewards.Reward) -> Score:
        """The score of a transcript's last turn. Raises DataError if the reward needs the response of another model."""
        return rewards.score(case, transcript, reward, NO_RESPONSES)

    def policies(self) -> Mapping[str, Policy]:
        return POLICIES


TASK = Imaging()
