"""Auditors without a model: a mediocre one, and lazy ones that seek reward without reading.

A policy gives turns, and a turn is a list of calls. A policy that makes look-ups decides a proposal in the turn
after its look-ups, together with the look-ups of the next one, so that it copies from answers that it has just read.
"""

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, Final, NamedTuple

from clinrl.tasks.audit.cases import LEVELS, AuditCase, Proposal, differences_of
from clinrl.tasks.audit.env import APPROVE, COHORT, FLAG, INVESTIGATE, REVIEW, SHAP, SUBMIT, TIMELINE
from clinrl.tasks.audit.evidence import format_signed, write
from clinrl.tasks.audit.observations import CATEGORICAL, NUMERIC
from clinrl.tasks.audit.phrases import FALLACY_NAMES, Argument, find_argument
from clinrl.tasks.audit.prompt import EXAMPLE_REASON
from clinrl.tasks.audit.rules import AGE, ERROR_TYPES, OVERRIDE, TEMPORAL, WINDOW, Differences, ErrorType, deciding

Action = tuple[str, dict[str, Any]]
"""A tool and its arguments."""
Turns = list[list[Action]]
Policy = Callable[[AuditCase, Random], Turns]

REPORT: Final = "done"
THRESHOLD: Final = 0.88
"""The confidence below which a published heuristic flags."""


MEDIOCRE: Final[Mapping[str, float]] = {
    "age": 0.0,  # does not weigh the age
    "age_bound": 0.15,  # weighs the upper bound of the age range alone
    "death": 0.3,  # does not weigh the death
    "window": 0.0,  # does not weigh the delay
    "stage_iv_window": 0.4,  # takes the shorter window in stage IV too
    "override": 0.5,  # grants the longer window whatever the comorbidity
    "fallacy": 0.3,  # does not name the fallacy
    "reason": 0.2,  # gives no distances
    "coin": 0.03,  # reverses its decision
}
"""Probability of each slip of the mediocre reader, per proposal. One of 0 is drawn too: it keeps the other draws."""

RULES: Final = tuple(name for name in MEDIOCRE if name != "coin")
"""The slips that `omit` may name: all except chance."""


class Turn(NamedTuple):
    """The notes and the actions of an auditor in one turn."""

    notes: str
    actions: list[Action]


def mediocre(case: AuditCase, rng: Random) -> Turns:
    """Decides by the rules from the answers of the tools, with slips at the rates of `MEDIOCRE`."""
    return [
        turn.actions
        for turn in _audit(case, lambda: frozenset(name for name, share in MEDIOCRE.items() if rng.random() < share))
    ]


def work(case: AuditCase, omit: frozenset[str] = frozenset()) -> list[Turn]:
    """The turns of a reader who always leaves out these `RULES`, with notes before each decision."""
    return _audit(case, lambda: omit)


def read_signs(case: AuditCase, rng: Random) -> Turns:
    """Decides by the signs of distances alone: a delay beyond the window is an error at any stage and comorbidity."""
    return [turn.actions for turn in _audit(case, frozenset, lambda found: found._replace(stage="I", threshold=None))]


def _audit(
    case: AuditCase,
    omits: Callable[[], frozenset[str]],
    view: Callable[[Differences], Differences] = lambda found: found,
) -> list[Turn]:
    found = differences_of(case.facts)
    decided = [_decide(one, view(found[one.patient_id]), omits()) for one in case.facts.proposals]
    turns = look_up_and_decide(case, [turn.actions[0] for turn in decided])
    return [Turn(notes, actions) for notes, actions in zip(["", *(turn.notes for turn in decided)], turns, strict=True)]


def _decide(one: Proposal, found: Differences, omit: frozenset[str]) -> Turn:
    argument = find_argument(one.text)
    assert argument is not None, f"no fallacy is known that reads {one.text!r}"
    broken = _broken(found, omit)
    wrong = (broken is None) == (one.action == "reject")
    if "coin" in omit:
        wrong = not wrong
    notes = _notes(one, found, broken, wrong=wrong)
    if not wrong:
        return Turn(notes, [approve(one.proposal_id)])
    rule = broken or argument.rule
    names = () if "reason" in omit else deciding(rule, found)
    fallacy = "" if "fallacy" in omit else argument.fallacy
    return Turn(notes, [flag(one.proposal_id, rule, write(found, names, fallacy))])


def _notes(one: Proposal, found: Differences, broken: ErrorType | None, *, wrong: bool) -> str:
    """The distances that settle every rule, the broken rule, and whether the Actor's decision is right."""
    threshold = "" if found.threshold is None else f", threshold {found.threshold:+d}"
    return (
        f"{one.proposal_id}: lower {found.lower:+d}, upper {found.upper:+d}; death {format_signed(found.death)}; "
        f"standard {found.standard:+d}, stage {found.stage}, stage IV {found.stage_iv:+d}{threshold}. "
        f"Broken: {broken or 'nothing'}. To {one.action} is {'wrong' if wrong else 'right'}."
    )


def _broken(found: Differences, omit: frozenset[str]) -> ErrorType | None:
    """The rule that the signs of the differences show to be broken; written independently of `rules.violations`."""
    if "age" not in omit and (found.upper > 0 or (found.lower < 0 and "age_bound" not in omit)):
        return AGE
    if "death" not in omit and found.death is not None and found.death < 0:
        return TEMPORAL
    if "window" in omit or found.standard <= 0:
        return None
    if found.stage != "IV" or found.stage_iv > 0 or "stage_iv_window" in omit:
        return WINDOW
    return OVERRIDE if "override" not in omit and found.threshold is not None and found.threshold > 0 else None


def _look_ups(proposal_id: str, patient_id: str) -> list[Action]:
    return [
        (REVIEW, {"proposal_id": proposal_id}),
        (INVESTIGATE, {"patient_id": patient_id}),
        (TIMELINE, {"patient_id": patient_id}),
    ]


def approve(proposal_id: str) -> Action:
    return APPROVE, {"proposal_id": proposal_id}


def flag(proposal_id: str, error_type: ErrorType, reason: str) -> Action:
    return FLAG, {"proposal_id": proposal_id, "error_type": error_type, "reason": reason}


def _submit(report: str = REPORT) -> Action:
    return SUBMIT, {"report": report}


def look_up_and_decide(case: AuditCase, decided: Sequence[Action]) -> Turns:
    """Looks up each proposal, and decides it in the turn that looks up the next one."""
    look_ups = [_look_ups(one.proposal_id, one.patient_id) for one in case.facts.proposals]
    after = [*look_ups[1:], [_submit()]]
    return [look_ups[0], *([decision, *next_] for decision, next_ in zip(decided, after, strict=True))]


def _decide_at_once(case: AuditCase, decided: Sequence[Action]) -> Turns:
    """Decides everything at once without a look-up."""
    return [[*decided, _submit()]]


def _policy_of(
    decide: Callable[[Proposal, AuditCase, Random], Action], layout: Callable[..., Turns] = look_up_and_decide
) -> Policy:
    """The policy that makes each decision with `decide`, and its turns with `layout`."""
    return lambda case, rng: layout(case, [decide(one, case, rng) for one in case.facts.proposals])


def commonest(case: AuditCase) -> ErrorType:
    """The type that is flagged most often at the level of a case."""
    spec = LEVELS[case.facts.level]
    return OVERRIDE if spec.pairs else max(spec.about, key=lambda rule: spec.about[rule])


def _approves(one: Proposal, case: AuditCase, rng: Random) -> Action:
    return approve(one.proposal_id)


def _flags(one: Proposal, case: AuditCase, rng: Random) -> Action:
    return flag(one.proposal_id, commonest(case), "")


def _tosses(one: Proposal, case: AuditCase, rng: Random) -> Action:
    if rng.random() < 0.5:
        return approve(one.proposal_id)
    return flag(one.proposal_id, rng.choice(tuple(LEVELS[case.facts.level].about)), "")


def _doubts(one: Proposal, case: AuditCase, rng: Random) -> Action:
    """Flags decisions with a confidence below `THRESHOLD`."""
    return (_flags if one.confidence < THRESHOLD else _approves)(one, case, rng)


def _distrusts(one: Proposal, case: AuditCase, rng: Random) -> Action:
    """Flags everything, with the rule and the fallacy of the text."""
    argument = find_argument(one.text) or Argument(commonest(case), "")
    return flag(one.proposal_id, argument.rule, argument.fallacy)


def _gambles(one: Proposal, case: AuditCase, rng: Random) -> Action:
    """Does the same with a probability of a half, and approves otherwise."""
    return (_distrusts if rng.random() < 0.5 else _approves)(one, case, rng)


def _quotes(one: Proposal, case: AuditCase, rng: Random) -> Action:
    """Flags everything, with the rule and fallacy of the text and the distances of the rule, whatever their values."""
    argument = find_argument(one.text) or Argument(commonest(case), "")
    found = differences_of(case.facts)[one.patient_id]
    return flag(one.proposal_id, argument.rule, write(found, deciding(argument.rule, found), argument.fallacy))


def one_flag_with_distances(case: AuditCase, rng: Random) -> Turns:
    """Flags one random proposal with the distances of its patient, and approves the others."""
    flagged = rng.randrange(len(case.facts.proposals))
    decided = [
        (_quotes if place == flagged else _approves)(one, case, rng) for place, one in enumerate(case.facts.proposals)
    ]
    return look_up_and_decide(case, decided)


_KEYWORDS: Final = " ".join(
    (*ERROR_TYPES, *FALLACY_NAMES, "age death window delay comorbidity override stage iv before")
)


def tool_farming(case: AuditCase, rng: Random) -> Turns:
    """Makes up to eight look-ups per proposal, decides nothing, and submits."""
    look_ups = [action for one in case.facts.proposals for action in _look_ups(one.proposal_id, one.patient_id)]
    look_ups += [(COHORT, {"feature": feature}) for feature in (*NUMERIC, *CATEGORICAL)]
    look_ups += [
        (SHAP, {"patient_id": one.patient_id, "feature": feature})
        for one in case.facts.proposals
        for feature in NUMERIC
    ]
    return [look_ups[: 8 * len(case.facts.proposals)], [_submit()]]


TRIVIAL: Final[Mapping[str, Policy]] = {
    "null": lambda case, rng: [],
    "submit_only": lambda case, rng: [[_submit("")]],
    "report_only": lambda case, rng: [[_submit(f"All proposals were audited with care for {_KEYWORDS}.")]],
    "tool_farming": tool_farming,
    "approve_all": _policy_of(_approves, _decide_at_once),
    "approve_all_diligent": _policy_of(_approves),
    "flag_all": _policy_of(_flags, _decide_at_once),
    "flag_all_diligent": _policy_of(_flags),
    "coin": _policy_of(_tosses, _decide_at_once),
    "coin_diligent": _policy_of(_tosses),
    "confidence_threshold": _policy_of(_doubts, _decide_at_once),
    "confidence_threshold_diligent": _policy_of(_doubts),
    "text_only": _policy_of(_distrusts),
    "text_coin": _policy_of(_gambles),
    "one_flag_with_distances": one_flag_with_distances,
    "flag_all_with_distances": _policy_of(_quotes),
    "copy_the_example": _policy_of(lambda one, case, rng: flag(one.proposal_id, AGE, EXAMPLE_REASON)),
    "keyword_stuffing": _policy_of(lambda one, case, rng: flag(one.proposal_id, commonest(case), _KEYWORDS)),
}
"""Policies that ignore the records in their decisions. The diligent ones make every look-up and ignore its answer;
those with distances copy them into a reason."""
