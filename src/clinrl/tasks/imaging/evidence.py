"""Synthetic study abstracts: their findings, their wordings, and other evidence for the same request.

No study exists. The number of studies and their relevance are drawn independently of the label, so that the presence of
evidence says nothing about the answer.
"""

from collections import Counter
from random import Random
from typing import Final

from pydantic import Field

from clinrl.tasks.imaging.guideline import BY_ID, CONDITIONS, MODALITIES, Modality, Target, Yield, true_yield
from clinrl.tasks.imaging.rules import Scenario
from clinrl.tasks.imaging.statements import Stance
from clinrl.types import Strict

SEEN_PCT: Final[dict[Yield, tuple[int, int]]] = {"good": (82, 97), "fair": (42, 64), "poor": (6, 24)}
"""Percentage of the patients with the target in whom it is seen: the range of each yield, both ends included."""

COUNTS: Final = (0, 1, 2, 3)
COUNT_WEIGHTS: Final = (25, 30, 30, 15)
"""Percentage of the requests that have each of these numbers of studies."""

KINDS: Final = ("agrees", "elsewhere", "disagrees")
KIND_WEIGHTS: Final = (60, 25, 15)
"""Percentages of supporting, irrelevant and contradicting studies."""

WORDINGS: Final = (
    "{modality} in {patients} patients with {condition}. Results: {target} was seen in {seen}%.",
    "We studied {patients} patients with {condition}. Results: {modality} found {target} in {seen}%.",
    "Methods: {modality}, {patients} patients, {condition}. Results: sensitivity for {target} {seen}%.",
)


class Abstract(Strict):
    """One numbered study, as the model may read it."""

    number: int = Field(ge=1, le=99)
    text: str = Field(min_length=1, max_length=6000)


class Study(Strict):
    """The question and the finding of one synthetic study."""

    number: int = Field(ge=1, le=99)
    condition: str
    target: Target
    modality: Modality
    shown: Yield
    seen_pct: int = Field(ge=0, le=100)
    patients: int = Field(ge=20, le=900)
    wording: int = Field(ge=0, lt=len(WORDINGS))


def studies(rng: Random, s: Scenario) -> tuple[Study, ...]:
    """Studies on a request, numbered from 1. No draw depends on the label."""
    count = rng.choices(COUNTS, COUNT_WEIGHTS)[0]
    return tuple(_study(rng, s, number, rng.choices(KINDS, KIND_WEIGHTS)[0]) for number in range(1, count + 1))


def stance(study: Study, s: Scenario, shown: Yield) -> Stance:
    """The stance of a study on a request, for a reader who believes that the procedure has the yield `shown`."""
    if (study.condition, study.modality) != (s.condition, s.modality):
        return "elsewhere"
    return "agrees" if study.shown == shown else "disagrees"


def find_majority(found: tuple[Study, ...], s: Scenario) -> Yield | None:
    """The yield that most studies on a request report, the first one in a tie; None without such a study."""
    bearing = Counter(study.shown for study in found if (study.condition, study.modality) == (s.condition, s.modality))
    return bearing.most_common(1)[0][0] if bearing else None


def abstract(study: Study) -> Abstract:
    """The abstract of a study."""
    text = WORDINGS[study.wording].format(
        modality=study.modality,
        patients=study.patients,
        condition=BY_ID[study.condition].says.lower(),
        target=study.target,
        seen=study.seen_pct,
    )
    return Abstract(number=study.number, text=text[0].upper() + text[1:])


def swap(found: tuple[Study, ...], s: Scenario, seed: str) -> tuple[Study, ...]:
    """As many studies, all on other conditions, like the evidence of another request."""
    rng = Random(f"swapped/{seed}")
    return tuple(_study(rng, s, study.number, "elsewhere") for study in found)


def contradict(found: tuple[Study, ...], s: Scenario, truth: Yield, seed: str) -> tuple[Study, ...]:
    """The studies, except that each one on the request is replaced by one that reports a false yield."""
    rng = Random(f"contradicted/{seed}")
    return tuple(
        study if stance(study, s, truth) == "elsewhere" else _study(rng, s, study.number, "disagrees")
        for study in found
    )


def _study(rng: Random, s: Scenario, number: int, kind: str) -> Study:
    condition, target, modality = BY_ID[s.condition], s.target, s.modality
    if kind == "elsewhere":
        condition = rng.choice([other for other in CONDITIONS if other.id != s.condition])
        target, modality = rng.choice(condition.targets), rng.choice(MODALITIES)
    truth = true_yield(condition, target, modality)
    others: list[Yield] = [other for other in SEEN_PCT if other != truth]
    shown = rng.choice(others) if kind == "disagrees" else truth
    return Study(
        number=number,
        condition=condition.id,
        target=target,
        modality=modality,
        shown=shown,
        seen_pct=rng.randint(*SEEN_PCT[shown]),
        patients=rng.randint(20, 900),
        wording=rng.randrange(len(WORDINGS)),
    )
