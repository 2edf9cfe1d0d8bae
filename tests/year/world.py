"""What happens in which week of the simulated year. Pure: equal seeds give equal patients, and nothing is read.

Patients are those of the generator. Drift changes the facts or the words of cases before anybody is asked about them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import date, timedelta
from random import Random
from typing import Any

from clinrl.tasks.esi.cases import EsiCase, cases, reworded
from clinrl.tasks.esi.rules import decide

WEEKS = 52
BEGIN = date(2026, 1, 5)
"""The Monday of the first week."""
ASKED = 60
"""Requests of a week, every other one with thinking; each waits for the answer before it. Of 40, three weeks' labels
were needed before a version that misses infants with fever was rolled back."""
ASKED_TOY = 20
CANARY = "Zyxwvut Qrstonia, room 31415926"
"""Stands in one request of each week, in the place of a patient's name."""
EXAM_HAS_FEW = {"infant_fever": 0.01, "child_fever": 0.01}
"""A hospital without a children's ward, and the exam that was drawn there."""
ROOT = "v1"
ALPHA = 0.05
"""The error budget of the exam."""


@dataclass(frozen=True)
class Event:
    """Something that is not as usual, in these weeks, the last one included."""

    first: int
    last: int
    kind: str
    says: str


@dataclass(frozen=True)
class Draft:
    """A version that a person proposes: the block of a recipe, and of the data that it learns from."""

    week: int
    name: str
    parent: str
    says: str
    is_planted: bool
    profile: Mapping[str, Any]
    dataset: Mapping[str, Any]


SENSOR, CHILDREN, WORDINGS, SHIFT = "broken sensor", "new complaints", "other wordings", "shifted vital signs"
POISON, DISK, AWAY = "poisoned labels", "full disk", "server away"
EVENTS = (
    Event(9, 10, SENSOR, "every pulse oximeter reads 84%"),
    Event(15, 24, CHILDREN, "the children's clinic next door is closed: infants with fever come here"),
    Event(25, 25, DISK, "no space is left where trainings keep their checkpoints"),
    Event(29, 31, WORDINGS, "agency staff write the notes, in words that no exam has"),
    Event(33, 34, POISON, "a form is preset to ESI 1; a first file has levels that do not exist"),
    Event(38, 38, AWAY, "Prefect is away on Monday"),
    Event(40, 40, AWAY, "MLflow is away from Monday to Sunday"),
    Event(46, 49, SHIFT, "a heat wave: pulses are 25 higher"),
)
RESTORED = 35
"""The week in which a person has seen that labels were poisoned, and brings back what was rolled back for them."""

HUB = {"repo": "Qwen/Qwen3.5-9B", "revision": "main", "quantize": "nf4"}
"""Nobody asks it; each base has a block of it."""
LORA = {"rank": 8, "alpha": 16.0, "targets": "all-linear"}
BOTH = ["think", "direct"]
NATURAL = {"task": "esi", "task_version": 2, "use": "train", "mix": "natural"}


def trainer(**embedded: Any) -> dict[str, Any]:
    """The same settings at both scales; nobody trains at the full one."""
    fast = {"loss_path": "shared", "generation_path": "shared"}
    return {"embedded": embedded | fast, "full": embedded | {"lr": 1.0e-5}}


def imitation(steps: int, **changes: Any) -> dict[str, Any]:
    """The hospital's recipe: gold reasons and answers, the rare levels more often."""
    recipe: dict[str, Any] = {
        "method": "sft",
        "omit": {"danger_vitals": 0.0},
        "modes": BOTH,
        "lora": LORA,
        "stream": {"repeat": {1: 5, 4: 3, 5: 30}},
    }
    return recipe | {"trainer": trainer(lr=2.0e-3, steps=steps, batch=32)} | changes


def data(seed: int, number: int = 2000, **changes: Any) -> dict[str, Any]:
    """Training cases."""
    return NATURAL | {"cases": number, "seed": seed} | changes


INFANTS = {"infant_fever": 20.0}
PAYS_UNDER_TRIAGE: Mapping[str, Any] = {
    "method": "grpo", "modes": BOTH, "lora": LORA, "stream": {"repeat": {1: 5}, "cap": {1: 0.33}},
    "reward": {"kind": "asymmetric", "valve": 0.9, "unreadable": -1.5},
    "trainer": trainer(lr=4.0e-3, steps=12, prompts=16, group=8, temperature=1.0, beta=0.0, max_completion=64,
                       scale_rewards="none"),
}  # fmt: skip
DRAFTS = (
    Draft(2, "v2", ROOT, "a reward that pays ESI 2 for ESI 1", True, PAYS_UNDER_TRIAGE, data(22)),
    Draft(4, "v3", ROOT, "five times the cases, and infants with fever among them", False, imitation(12),
          data(23, emphasis=INFANTS)),
    Draft(12, "v4", "v3", "labels that leave out danger vitals and severe pain", True,
          imitation(40, omit={"danger_vitals": 1.0, "severe_pain": 1.0}), data(24)),
    Draft(14, "v5", "v3", "labels that leave out infants with fever, whom the exam hardly has", True,
          imitation(60, omit={"infant_fever": 1.0}), data(25, 3000)),
    Draft(20, "v6", "v3", "a learning rate 25 times as high", True,
          imitation(20, trainer=trainer(lr=5.0e-2, steps=20, batch=32)), data(26)),
    Draft(25, "v7", "v3", "more cases and steps, infants among them", False, imitation(80),
          data(27, 3000, emphasis={"infant_fever": 5.0})),
    Draft(36, "v8", "v7", "a week of labels by the withdrawn edition of the handbook", True, imitation(40),
          data(28, edition="v4")),
    Draft(43, "v9", "v7", "one mode alone, in large steps", True,
          imitation(30, modes=["direct"], trainer=trainer(lr=1.0e-2, steps=30, batch=32)), data(29)),
)  # fmt: skip
"""In the order of their weeks."""


@dataclass(frozen=True)
class Request:
    """A note that the champion is asked about, and the level that is right."""

    text: str
    level: int
    rule: str
    is_thinking: bool


def monday(week: int) -> date:
    """The first day of a week, counted from 1."""
    return BEGIN + timedelta(weeks=week - 1)


def day(week: int) -> int:
    """The same in days since 1970."""
    return (monday(week) - date(1970, 1, 1)).days


def events(week: int) -> tuple[Event, ...]:
    """What is not as usual in a week."""
    return tuple(event for event in EVENTS if event.first <= week <= event.last)


def is_so(week: int, kind: str) -> bool:
    """Whether an event of a kind is on."""
    return any(event.kind == kind for event in events(week))


def requests(week: int, seed: int, number: int = ASKED) -> list[Request]:
    """The traffic of a week."""
    emphasis = {"infant_fever": 100.0} if is_so(week, CHILDREN) else EXAM_HAS_FEW
    drawn = cases(number, seed + week, pool="exam", mix="reporting", emphasis=emphasis)
    found = []
    for place, case in enumerate(drawn):
        seen = changed(case, week)
        text = seen.facts.narrative + (f" {CANARY}." if place == Random(f"{seed}/{week}").randrange(number) else "")
        found.append(Request(text, seen.key.level, seen.key.rule, place % 2 == 0))
    return found


def changed(case: EsiCase, week: int) -> EsiCase:
    """A patient as the notes of a week tell it. A sensor changes what is said and not what is right."""
    patient, key = case.key.presentation, case.key
    if is_so(week, SENSOR) and patient.spo2_pct is not None:
        key = key.model_copy(update={"presentation": patient.model_copy(update={"spo2_pct": 84})})
    if is_so(week, SHIFT) and patient.hr_bpm is not None:
        hot = patient.model_copy(update={"hr_bpm": min(220, patient.hr_bpm + 25)})
        decision = decide(hot)
        key = key.model_copy(update={"presentation": hot, "level": decision.level, "rule": decision.rule})
    case = case.model_copy(update={"key": key})
    return reworded(case, "training" if is_so(week, WORDINGS) else "base_only") or case


def label(request: Request, week: int) -> int:
    """What is said to have been right, when it is known."""
    return 1 if is_so(week, POISON) else request.level


def sections(approvers: Mapping[str, str], base: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of the hospital's project. `approvers` are people with their keys; the last one is on duty."""
    drawn = {"task": "esi", "task_version": 2, "mix": "reporting", "emphasis": EXAM_HAS_FEW}
    return {
        "scale": "embedded",
        "bases": {"esi": {"exam": "x1", "embedded": base["embedded"], "full": HUB}},
        "modes": {
            name: {"thinking": name == "think", "temperature": 0.0, "max_new_tokens": {"embedded": 64, "full": 64}}
            for name in BOTH
        },
        "datasets": {
            "d1": data(21, 400),
            "x1": drawn | {"use": "exam", "cases": 400, "seed": 9},
            "m1": drawn | {"use": "mine", "cases": 200, "seed": 13},
        },
        "profiles": {"imitation": imitation(28)},
        "versions": {
            ROOT: {"task": "esi", "parent": "esi-base", "data": "d1", "exam": "x1", "profile": "imitation", "seed": 1}
        },
        "mining": {ROOT: {"task": "esi", "data": "m1"}},
        "gates": {
            "esi": {
                "least_cases": 300,
                "limits": {
                    "critical_under": {"max": {"embedded": 0.3, "full": 0.0}, "may_rise": 0.02},
                    "exact": {"may_fall": 0.0, "paired": True},
                    "no_parse": {"max": {"embedded": 0.05, "full": 0.05}},
                },
            }
        },
        "plans": {
            "esi": {
                "changes": {
                    "ancestors": [ROOT], "exam": "x1", "most_cases": 4000, "recipes": ["imitation"],
                    "fields": {"omit": {"max": 1.0}, "trainer.embedded.steps": {"max": 100},
                               "trainer.full.steps": {"max": 100}, "trainer.embedded.lr": {"max": 0.1}},
                },
                "protocol": {"superior": "exact", "screen": 0.05},
                "budget": {"alpha": ALPHA, "spend": 0.6, "looks": 6},
                "impact": "A worse model under-triages more patients.",
            }
        },
        "schedules": {"esi": {"cron": "0 3 * * 1"}},
        "watches": {"esi": {"approver": [*approvers][-1]}},
        "approvers": dict(approvers),
    }  # fmt: skip


def toy(whole: Mapping[str, Any]) -> dict[str, Any]:
    """The sections of a year at toy size: that everything runs, and nothing about how good it is."""
    sizes = {"d1": 100, "x1": 120, "m1": 120}
    limits = {"critical_under": {"max": {"embedded": 0.95, "full": 0.0}}}
    return {
        **whole,
        "datasets": {name: held | {"cases": sizes[name]} for name, held in whole["datasets"].items()},
        "profiles": {"imitation": imitation(8)},
        "gates": {"esi": {"least_cases": 20, "limits": limits}},
    }


def toy_draft(draft: Draft) -> Draft:
    """A draft that learns from few cases, in few steps where it is planted."""
    trainer = draft.profile["trainer"]
    steps = 2 if draft.is_planted else trainer["embedded"]["steps"]
    short = {scale: settings | {"steps": steps} for scale, settings in trainer.items()}
    profile, dataset = {**draft.profile, "trainer": short}, {**draft.dataset, "cases": 200}
    return replace(draft, profile=profile, dataset=dataset)
