"""The error budget of an exam: what its decisions may spend, and what is left, counted anew from the audit log.

Each decision against a champion is a look at the exam, and may pass a candidate that is no better with a chance of at
most its `level`: a share of what is left. A look that refuses has spent its level. One that passes gets it back, and
forfeits the rest, which was kept for the looks after a refusal.

What holds: over all looks at one exam, the chance that any candidate ever passes that is no better than its champion is
at most `alpha` (family-wise error, in the strong sense). It holds however later versions depend on earlier yes and no,
and however alike their answers are. Each sequence of yes and no leads to a version that would be made after it, a node
of a tree, with a level of its own. A first error is at a node below true gains alone. There a look that ought to refuse
brings its level and what a refusal leaves, and one that ought to pass what either answer leaves: both times what there
was before. So the levels of all nodes at which a first error can happen sum to at most alpha (Bonferroni). This is the
alpha recycling of sequentially rejective graphical procedures (Bretz, Maurer, Brannath and Posch 2009), on the tree of
an adaptive developer (Feng, Pennello, Petrick, Sahiner, Pirracchio and Gossmann, UAI 2022).

What it assumes: no test at a level errs more often, which the exact one does not where candidate and champion could
change places, while those of margins are approximate; nothing of an exam but these decisions reaches
whoever makes the next version, since the figures of a report tell more than yes or no; its cases are a fair sample of
those that a model meets; and the first champion, which was compared with nobody, was not chosen by them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import Field

from clinrl.config import change_plan
from clinrl.errors import GateError
from clinrl.release.audit_log import Entry
from clinrl.types import Strict

if TYPE_CHECKING:
    from clinrl.release.gate import Decision

Key = tuple[str, str, str]
"""Digests of a candidate, of its champion, and of what both answered and by which test they are compared."""


class Look(Strict):
    """One look at an exam, before what it said is known."""

    number: int = Field(ge=1)
    """Among the looks at this exam, from 1."""
    most: int = Field(ge=1)
    """Looks that the plan allows."""
    before: float = Field(ge=0, lt=1)
    """What was left of the budget."""
    level: float = Field(ge=0, lt=1)
    """What this look may spend: the p that a test must reach."""
    answers: str
    """Digest of what the candidate and the champion answered, and of protocol, gate and modes: of the question."""

    def left(self, *, passed: bool) -> float:
        """What is left after it."""
        return self.level if passed else self.before - self.level


class Spent(Look):
    """The same as a decision holds it."""

    left_after: float = Field(ge=0, lt=1)
    """What is left of the budget."""

    def __str__(self) -> str:
        return (
            f"look {self.number} of at most {self.most} at this exam, at level {self.level:.4g}; {self.left_after:.4g} "
            "of its error budget is left"
        )


@dataclass(frozen=True)
class Account:
    """What the audit log says of one exam."""

    left: float
    """What is left of the budget."""
    looks: Mapping[Key, Look]
    """In their order. The same question asked again is no further look."""


def account(lines: Sequence[Entry], exam: str, alpha: float) -> Account:
    """The account of the exam of a digest. Decisions from before there was a plan spent nothing."""
    left, looks = alpha, dict[Key, Look]()
    for line in lines:
        if line.kind != "decision" or line.body["exam_digest"] != exam or "budget" not in line.body:
            continue
        spent = Spent.model_validate(line.body["budget"])
        key = (line.body["candidate_digest"], line.body["champion_digest"], spent.answers)
        if key not in looks:
            looks[key] = Look(**spent.model_dump(exclude={"left_after"}))
            left = min(spent.level, left) if line.body["promote"] else max(0.0, left - spent.level)
        elif line.body["promote"]:  # refused first for something else, such as a signature that was missing
            left = min(left, looks[key].level)
    return Account(left, looks)


def look(held: Account, budget: change_plan.Budget, key: Key, exam: str) -> Look:
    """The look that a question was, or is to be. Raises GateError for a new one where the budget is used up."""
    if key in held.looks:
        return held.looks[key]
    if reason := used_up(held, budget, exam):
        raise GateError(reason)
    number, level = len(held.looks) + 1, budget.spend * held.left
    return Look(number=number, most=budget.looks, before=held.left, level=level, answers=key[2])


def used_up(held: Account, budget: change_plan.Budget, exam: str) -> str | None:
    """Why there is no further look at an exam, and what to do, as a sentence; None while there is one."""
    if held.left > 0 and len(held.looks) < budget.looks:
        return None
    return (
        f"the error budget of {exam} is used up: {len(held.looks)} decisions looked at it, of at most {budget.looks}; "
        "draw a fresh exam (a data set with `use: exam` and another seed), name it as `exam` in plans, bases and "
        "versions, and run `dvc repro`"
    )


def check_current(lines: Sequence[Entry], decision: "Decision") -> None:
    """Refuse a decision whose look is not the next one any more, nor one of before. Raises GateError."""
    if decision.budget is None:
        return
    key = (decision.candidate_digest, decision.champion_digest or "", decision.budget.answers)
    held = account(lines, decision.exam_digest, decision.budget.before)
    if key not in held.looks and len(held.looks) + 1 != decision.budget.number:
        raise GateError(f"another decision looked at this exam while {decision.candidate} was decided; decide again")
