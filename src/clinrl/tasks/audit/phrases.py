"""What the Actor writes: a fallacy about one rule, and a conclusion.

Every fallacy exists for both actions in words of the same kind, and no sentence holds a number, so that a sentence
says which rule the Actor dwelt on and how it argued, and nothing about whether it is right.
"""

from collections.abc import Mapping
from random import Random
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from clinrl.tasks.audit.rules import AGE, OVERRIDE, TEMPORAL, WINDOW, ErrorType

Action = Literal["clear", "reject"]
ACTIONS: Final[tuple[Action, ...]] = ("clear", "reject")

_W = Mapping[Action, tuple[str, ...]]

FALLACIES: Final[Mapping[ErrorType, Mapping[str, _W]]] = MappingProxyType(
    {
        AGE: {
            "generic_range": {
                "clear": (
                    "By common adult limits the age is in order.",
                    "Trials of this kind take patients of such an age.",
                ),
                "reject": (
                    "By common adult limits the age is out of order.",
                    "Trials of this kind shun patients of such an age.",
                ),
            },
            "invented_amendment": {
                "clear": (
                    "A later amendment widens the age range for such patients.",
                    "The age limits were relaxed by an amendment.",
                ),
                "reject": (
                    "A later amendment narrows the age range for such patients.",
                    "The age limits were tightened by an amendment.",
                ),
            },
            "other_values": {
                "clear": (
                    "LDH, BMI and ECOG look sound, which settles the age.",
                    "With such blood values the age counts for the patient.",
                ),
                "reject": (
                    "LDH, BMI and ECOG look poor, which settles the age.",
                    "With such blood values the age counts against the patient.",
                ),
            },
        },
        TEMPORAL: {
            "wrong_interval": {
                "clear": (
                    "Enrolment and treatment lie well apart, so the dates are in order.",
                    "The dates from enrolment to treatment fit, and no others matter.",
                ),
                "reject": (
                    "Enrolment and treatment lie badly apart, so the dates are out of order.",
                    "The dates from enrolment to treatment clash, and no others matter.",
                ),
            },
            "entry_slip": {
                "clear": (
                    "The death date may be a slip of entry, so the dates stand.",
                    "Someone mistyped the date of death, which excuses the record.",
                ),
                "reject": (
                    "The death date may be a slip of entry, so the dates fall.",
                    "Someone mistyped the date of death, which spoils the record.",
                ),
            },
            "expected_death": {
                "clear": (
                    "Death is expected in this disease, so its date is no concern.",
                    "A death like this is usual at this stage of care and proves nothing.",
                ),
                "reject": (
                    "Death is expected in this disease, so its date is a concern.",
                    "A death like this is unusual at this stage of care and proves enough.",
                ),
            },
        },
        WINDOW: {
            "outside_guidance": {
                "clear": (
                    "International guidance is wider, so the delay is within the window.",
                    "The delay is short by the standard of other agencies.",
                ),
                "reject": (
                    "International guidance is tighter, so the delay is beyond the window.",
                    "The delay is long by the standard of other agencies.",
                ),
            },
            "site_latency": {
                "clear": (
                    "Sites like this one are slow, so the delay is forgiven.",
                    "The delay is owed to the clinic and keeps the window.",
                ),
                "reject": (
                    "Sites like this one are slow, so the delay is charged.",
                    "The delay is owed to the clinic and breaks the window.",
                ),
            },
            "wrong_start": {
                "clear": (
                    "Counted from the first scan the delay is within the window.",
                    "From the day of diagnosis on, treatment came in time.",
                ),
                "reject": (
                    "Counted from the first scan the delay is beyond the window.",
                    "From the day of diagnosis on, treatment came late.",
                ),
            },
        },
        OVERRIDE: {
            "stage_only": {
                "clear": (
                    "Stage alone grants the longer window, comorbidity is idle.",
                    "The exception asks for the stage and nothing more, so it holds.",
                ),
                "reject": (
                    "Stage alone denies the longer window, comorbidity is idle.",
                    "The exception asks for the stage and nothing more, so it fails.",
                ),
            },
            "borrowed_rank": {
                "clear": (
                    "A society ranks stage above comorbidity, so the exception holds.",
                    "Expert opinion puts comorbidity second and grants the exception.",
                ),
                "reject": (
                    "A society ranks comorbidity above stage, so the exception fails.",
                    "Expert opinion puts comorbidity first and denies the exception.",
                ),
            },
            "borrowed_threshold": {
                "clear": (
                    "By a sister trial's threshold the comorbidity keeps the exception.",
                    "Elsewhere the comorbidity would pass the threshold, so it does here.",
                ),
                "reject": (
                    "By a sister trial's threshold the comorbidity ends the exception.",
                    "Elsewhere the comorbidity would miss the threshold, so it does here.",
                ),
            },
        },
    }
)
"""The wordings of each fallacy, by rule, name and action."""

CONCLUSIONS: Final[_W] = MappingProxyType(
    {
        "clear": ("The patient is eligible.", "The record complies."),
        "reject": ("The patient is not eligible.", "The record does not comply."),
    }
)

CITATIONS: Final = (
    "Arden 2016",
    "Bexley 2021",
    "Corran 2018",
    "Dunmore 2020",
    "Elling 2015",
    "Farrow 2022",
    "Gant 2019",
)

FALLACY_NAMES: Final[tuple[str, ...]] = tuple(name for named in FALLACIES.values() for name in named)


class Argument(NamedTuple):
    """What a text of the Actor argues."""

    rule: ErrorType
    fallacy: str


_ARGUMENTS: Final[Mapping[str, Argument]] = {
    wording: Argument(rule, fallacy)
    for rule, named in FALLACIES.items()
    for fallacy, worded in named.items()
    for wordings in worded.values()
    for wording in wordings
}


def argue(rng: Random, rule: ErrorType, fallacy: str, action: Action) -> str:
    """The Actor's text. Raises KeyError for a fallacy that is not one of the rule's."""
    return f"{rng.choice(FALLACIES[rule][fallacy][action])} {rng.choice(CONCLUSIONS[action])}"


def find_argument(text: str) -> Argument | None:
    """Which rule and fallacy a text of the Actor holds; None for any other text."""
    return next((found for wording, found in _ARGUMENTS.items() if wording in text), None)
