"""The imaging task: is this procedure appropriate for this variant of this condition, with what reasons?

Everything drawn here is synthetic: conditions, ratings, reasons and studies. Not clinical guidance.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from types import MappingProxyType
from typing import Any

from clinrl.tasks.base import NOTHING_HEARD, Expect, Heard, Quality
from clinrl.tasks.imaging import answer, evidence, metrics, quality, rewards
from clinrl.tasks.imaging.answer import LABELS
from clinrl.tasks.imaging.cases import MIXES, ImagingCase, case_id, cases, is_held_out, pool_of, shown_with
from clinrl.tasks.imaging.guideline import MODALITIES, RADIATION, true_yield
from clinrl.tasks.imaging.imported import HOLDS_A_TAG, MOST_SENTENCES, NAMES_A_LABEL, RULE, ImportedKey
from clinrl.tasks.imaging.intake import NUMBERS, recognise
from clinrl.tasks.imaging.prompt import gold, prompt
from clinrl.tasks.imaging.rules import EGFR_LIMIT, RULE_IDS, condition_of, decide
from clinrl.tasks.importing import normalised, pseudonym
from clinrl.types import Message, Score, Stop, Transcript, Unreadable

Policy = Callable[[ImagingCase, Random], Transcript]

TWO_STEPS = 1.0
"""What calling an appropriate study inappropriate costs, or the reverse; one step costs half, silence as much."""


def _says(content: str, thinking: str | None = None, stop: Stop = "answered") -> Transcript:
    return Transcript(messages=(Message(role="assistant", content=content, thinking=thinking),), stop=stop)


def _answers(label: str) -> Transcript:
    return _says(f"<answer>{label}</answer>")


def _always(label: str) -> Policy:
    return lambda case, rng: _answers(label)


def _drawn(weights: Mapping[str, float]) -> Policy:
    labels, shares = zip(*weights.items(), strict=True)
    return lambda case, rng: _answers(rng.choices(labels, shares)[0])


def _mediocre(case: ImagingCase, rng: Random) -> Transcript:
    """Right in 60% of cases, else one of the other labels: what any useful model must beat, and no lazy policy may."""
    if rng.random() < 0.6:
        return _answers(case.key.label)
    return _answers(rng.choice([label for label in LABELS if label != case.key.label]))


POLICIES: Mapping[str, Policy] = {
    **{f"always_{label}": _always(label) for label in LABELS},
    "random": _drawn(dict.fromkeys(LABELS, 1.0)),
    "prior_natural": _drawn(MIXES["natural"]),
    "hedge": lambda case, rng: _says(f"<answer>{LABELS[0]} or {LABELS[1]}</answer>"),
    "empty": lambda case, rng: _says(""),
    "truncated": lambda case, rng: _says("", "The procedure shows", "max_tokens"),
    "mediocre": _mediocre,
}
"""Ways to answer without reading, and the mediocre reader."""


def _without(case: ImagingCase) -> ImagingCase | None:
    return shown_with(case, ()) if case.facts.evidence else None


def _swapped(case: ImagingCase) -> ImagingCase | None:
    """Only of drawn cases: studies of other conditions are drawn like them."""
    if isinstance(case.key, ImportedKey):
        return None
    s, found = case.key.scenario, case.key.studies
    return shown_with(case, evidence.swapped(found, s, case.id)) if found else None


def _contradicted(case: ImagingCase) -> ImagingCase | None:
    """Only where a study bears on the request: elsewhere there is nothing to contradict. Only of drawn cases."""
    if isinstance(case.key, ImportedKey):
        return None
    s, found = case.key.scenario, case.key.studies
    truth = true_yield(condition_of(s), s.target, s.modality)
    if all(evidence.stance(study, s, truth) == "elsewhere" for study in found):
        return None
    return shown_with(case, evidence.contradicted(found, s, truth, case.id))


def _expect(rule: str, column: str, on: str = "rows", of: str = "all", **arguments: Any) -> Expect:
    return Expect(type=rule, arguments={"column": column, **arguments}, on=on, of=of)


_LABEL_IN_TEXT = r"(?i)usually (?:not )?appropriate|may be appropriate|\b[1-9] of 9\b|<answer"


class Imaging:
    """Imaging appropriateness in three ordered labels. Over-use is an answer above the gold label, under-use below."""

    name = "imaging"
    version = 1
    Case = ImagingCase
    Reward = rewards.Reward
    labels = LABELS
    rules = RULE_IDS
    mixes = tuple(MIXES)
    metrics = metrics.METRICS
    qualities: Mapping[str, Quality] = quality.QUALITIES
    headline = (
        "exact", "macro_f1", "weighted_f1", "balanced_accuracy", "kappa", "dangerous", "over_use", "under_use",
        *quality.QUALITIES, "no_parse", "clipped",
    )  # fmt: skip
    row_metrics = ("exact", "macro_f1", "weighted_f1", "balanced_accuracy", "dangerous", "over_use", "under_use")
    form_metrics = ("exact", "dangerous", "over_use", "under_use")
    slice_measures = ("exact", "dangerous")
    terms = rewards.TERMS
    views: Mapping[str, Callable[[ImagingCase], ImagingCase | None]] = MappingProxyType(
        {"without_evidence": _without, "swapped_evidence": _swapped, "contradicted_evidence": _contradicted}
    )
    slices: Mapping[str, Callable[[ImagingCase], str]] = MappingProxyType(
        {
            "conditions": lambda case: RULE if _imported(case) else "held_out" if is_held_out(case) else "known",
            "rule": lambda case: case.key.rule,
            "label": lambda case: case.key.label,
            "evidence": lambda case: _studies(len(case.facts.evidence)),
            "condition": lambda case: RULE if isinstance(case.key, ImportedKey) else case.key.scenario.condition,
        }
    )
    triggers: Mapping[str, Callable[[ImagingCase], bool]] = MappingProxyType(
        {
            "pregnancy": lambda case: _shows_pregnancy(case.facts.variant, case.facts.procedure),
            "kidneys": lambda case: _shows_weak_kidneys(case.facts.variant, case.facts.procedure),
            "repeat": lambda case: _shows_a_repeat(case.facts.variant, case.facts.procedure),
        }
    )
    expectations = (
        _expect("ExpectColumnValuesToMatchRegex", "id", regex=r"^imaging-[0-9a-f]{16}$"),
        _expect("ExpectColumnValuesToBeInSet", "label", value_set=list(LABELS)),
        _expect("ExpectColumnValuesToBeInSet", "rule", of="drawn", value_set=[*RULE_IDS, "yield"]),
        _expect("ExpectColumnValuesToBeInSet", "rule", of="imported", value_set=[RULE]),
        _expect("ExpectColumnValuesToBeInSet", "modality", value_set=list(MODALITIES)),
        _expect("ExpectColumnValuesToBeBetween", "rating", min_value=1, max_value=9),
        _expect("ExpectColumnValuesToBeBetween", "age_years", min_value=0, max_value=110),
        _expect("ExpectColumnValuesToBeBetween", "egfr_ml_min", min_value=5, max_value=140),
        _expect("ExpectColumnValuesToBeBetween", "studies", of="drawn", min_value=0, max_value=3),
        _expect("ExpectColumnValuesToBeBetween", "studies", of="imported", min_value=0, max_value=len(NUMBERS)),
        _expect("ExpectColumnValuesToBeBetween", "reasons", of="drawn", min_value=2, max_value=12),
        _expect("ExpectColumnValuesToBeBetween", "reasons", of="imported", min_value=1, max_value=MOST_SENTENCES),
        _expect("ExpectColumnValuesToNotMatchRegex", "narrative", of="drawn", regex=_LABEL_IN_TEXT),
        _expect("ExpectColumnValuesToNotMatchRegex", "shown", of="imported", regex=NAMES_A_LABEL),
        _expect("ExpectColumnValuesToNotMatchRegex", "shown", of="imported", regex=HOLDS_A_TAG),
        _expect("ExpectColumnValuesToBeBetween", "has_evidence", "summary", of="drawn", min_value=0.65, max_value=0.85),
    )
    published = None
    protocol = None
    environment = None
    turns = 1

    cases = staticmethod(cases)
    pool_of = staticmethod(pool_of)
    case_id = staticmethod(case_id)
    prompt = staticmethod(prompt)
    gold = staticmethod(gold)
    oracles = staticmethod(rewards.oracles)
    asks = staticmethod(rewards.asks)
    recognise = staticmethod(recognise)

    def cluster(self, case: ImagingCase) -> str:
        """The condition: its cases share a chapter of the guideline. A hash of its name if it is imported."""
        if isinstance(case.key, ImportedKey):
            return pseudonym("condition", normalised(case.facts.condition))
        return case.key.scenario.condition

    def label(self, case: ImagingCase) -> str:
        """The gold label."""
        return case.key.label

    def relabel(self, case: ImagingCase) -> str:
        """The label that the rules give the latent facts now. An imported label is a panel's and stays."""
        if isinstance(case.key, ImportedKey):
            return case.key.label
        return decide(case.key.scenario).label

    def omittable(self, case: ImagingCase) -> tuple[str, ...]:
        """The rules whose omission changes this case's label."""
        if isinstance(case.key, ImportedKey):
            return ()
        s, said = case.key.scenario, evidence.told(case.key.studies, case.key.scenario)
        return tuple(rule for rule in RULE_IDS if decide(s, frozenset({rule}), said).label != case.key.label)

    def parse(self, transcript: Transcript) -> str | Unreadable:
        """The label that the last turn commits to, read strictly."""
        return answer.parse(transcript.messages[-1])

    def parts(self, gold: str, answer: str | Unreadable) -> Sequence[tuple[str, str | Unreadable]]:
        """The two themselves."""
        return ((gold, answer),)

    def part_names(self, gold: str) -> Sequence[str]:
        """There is one decision."""
        return ("answer",)

    def score(
        self, case: ImagingCase, transcript: Transcript, reward: rewards.Reward, heard: Heard = NOTHING_HEARD
    ) -> Score:
        """The reward of a transcript's last turn, against the gold of this very case."""
        return rewards.score(case, transcript, reward, heard)

    def lessons(self, judge: str, n: int, seed: int) -> Iterator[tuple[str, str]]:
        """What an embedded judge learns: reasonings of the base pool, sound and spoilt, and what they deserve."""
        return quality.lessons(judge, n, seed)

    def refine(self, reward: rewards.Reward, rules: Sequence[str]) -> rewards.Reward:
        """The same reward: none of its terms is about a single rule."""
        return reward

    def cost(self, gold: str, answer: str | Unreadable) -> float:
        """0 to 1: half for one step between labels, all for two and for an unreadable answer."""
        if isinstance(answer, Unreadable):
            return TWO_STEPS
        return TWO_STEPS * abs(LABELS.index(answer) - LABELS.index(gold)) / 2

    def policies(self) -> Mapping[str, Policy]:
        """Ways to answer without reading, and "mediocre", by name."""
        return POLICIES

    def row(self, case: ImagingCase) -> dict[str, Any]:
        """A flat row for the table of expectations. The filtration rate is None where it is not known.

        The narrative of an imported case is the request alone: a published abstract may well hold a date or a web
        address, and it may be longer than any narrative.
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


def _shows_pregnancy(variant: str, procedure: str) -> bool:
    return "pregnant" in variant.lower() and RADIATION.get(_named(procedure), 0) >= 2


def _shows_weak_kidneys(variant: str, procedure: str) -> bool:
    rate = re.search(r"\beGFR (\d{1,3})\b", variant)
    return rate is not None and int(rate[1]) < EGFR_LIMIT and procedure.endswith(" with contrast")


def _shows_a_repeat(variant: str, procedure: str) -> bool:
    named = _named(procedure)
    return named is not None and (f"{named} was unclear" in variant or f"{named.capitalize()} was unclear" in variant)


def _named(procedure: str) -> Any:
    """The modality that a procedure begins with; None for one that is called otherwise, as imported ones may be."""
    return next((modality for modality in MODALITIES if procedure.startswith(modality)), None)


def _imported(case: ImagingCase) -> bool:
    return isinstance(case.key, ImportedKey)


def _studies(count: int) -> str:
    """The slice of a case by the number of its studies: imported ones may have many."""
    return f"{count}_studies" if count <= 3 else "4_or_more_studies"


TASK = Imaging()
