"""The error budget of an exam: how much each decision may spend, and how much is left according to the audit log.

Each decision against a champion is a look at the exam. It passes a candidate that is no better with a probability of at
most its `level`, which is a share of the budget that is left. A look that refuses spends its level. A look that passes
keeps its level for later looks and forfeits the rest, which was reserved for the looks after a refusal.

Guarantee: over all looks at one exam, the probability that any candidate passes that is no better than its champion is
at most `alpha` (family-wise error, in the strong sense), however later versions depend on earlier decisions, and
however correlated their answers are. Proof: each sequence of decisions leads to the version that would be made after
it, a node of a tree with a level of its own. A first error happens at a node before which only better candidates
passed. If the candidate of a node is no better, the node adds its level, and the branch after a refusal what a refusal
leaves. If the candidate is better, the two branches add what a pass and a refusal leave. Both sums are the budget
before the look. So the levels of all nodes at which a first error can happen sum to at most alpha (Bonferroni). This is
the alpha recycling of sequentially rejective graphical procedures (Bretz, Maurer, Brannath and Posch 2009), on the tree
of an adaptive developer (Feng, Pennello, Petrick, Sahiner, Pirracchio and Gossmann, UAI 2022).

Assumptions: no test exceeds its level, which holds for the exact test where candidate and champion are exchangeable,
and approximately for the tests of margins; nothing about an exam but these decisions reaches those who make the next
version or pick it from several, since a report's figures tell more than pass or refuse; the exam's cases are a fair
sample of those that a model meets, fixed before the champion answers them; and the first champion, which was compared
with no other, was not chosen by these cases.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import Field

from clinrl.config import change_plan
from clinrl.errors import GateError
from clinrl.release.audit_log import Entry
from clinrl.types import Strict

Key = tuple[str, str, str]
"""Digests of a candidate, of its champion, and of the question: both models' answers, and the tests between them."""


class Look(Strict):
    """One look at an exam, before its result is known."""

    number: int = Field(ge=1)
    """Position among the looks at this exam, from 1."""
    most: int = Field(ge=1)
    """Looks that the plan allows."""
    before: float = Field(ge=0, lt=1)
    """Budget left before this look."""
    level: float = Field(ge=0, lt=1)
    """Budget that this look may spend: a test passes if its p is at most this."""
    answers: str
    """Digest of the question: the answers of candidate and champion, protocol, gate, modes and test."""


class Spent(Look):
    """A look as a decision records it, with the budget that it left."""

    left_after: float = Field(ge=0, lt=1)
    """Budget left after this look."""

    def __str__(self) -> str:
        return (
            f"look {self.number} of at most {self.most} at this exam, at level {self.level:.4g}; {self.left_after:.4g} "
            "of its error budget is left"
        )


@dataclass(frozen=True)
class Account:
    """The looks at one exam in the audit log, and the budget that they left."""

    left: float
    """Budget left after all of them."""
    looks: Mapping[Key, Look]
    """The looks in their order. The same question asked again is no further look."""

    def after(self, key: Key, look: Look, *, passed: bool) -> float:
        """Budget left after one more decision. A question asked again spends nothing, and gives nothing back."""
        if passed:  # also of one that was refused for another reason before, as a missing signature
            return min(self.left, look.level)
        return self.left if key in self.looks else max(0.0, self.left - look.level)


def account(lines: Sequence[Entry], exam: str, alpha: float) -> Account:
    """The account of the exam with this digest. Decisions made before there was a plan spent nothing."""
    left, looks = alpha, dict[Key, Look]()
    for line in lines:
        if line.kind != "decision" or line.body["exam_digest"] != exam or "budget" not in line.body:
            continue
        spent = Spent.model_validate(line.body["budget"])
        key = (line.body["candidate_digest"], line.body["champion_digest"], spent.answers)
        asked = looks.get(key) or Look(**spent.model_dump(exclude={"left_after"}))
        left = Account(left, looks).after(key, asked, passed=line.body["promote"])
        looks.setdefault(key, asked)
    return Account(left, looks)


def look(spent: Account, budget: change_plan.Budget, key: Key, exam: str) -> Look:
    """The recorded look of a question, or the next look for a new one. Raises GateError if no new look is allowed."""
    if key in spent.looks:
        return spent.looks[key]
    if reason := used_up(spent, budget, exam):
        raise GateError(reason)
    number, level = len(spent.looks) + 1, budget.spend * spent.left
    return Look(number=number, most=budget.looks, before=spent.left, level=level, answers=key[2])


def used_up(spent: Account, budget: change_plan.Budget, exam: str) -> str | None:
    """A sentence that says why no further look at an exam is allowed, and what to do; None while one is allowed."""
    if spent.left > 0 and len(spent.looks) < budget.looks:
        return None
    return (
        f"the error budget of {exam} is used up: {len(spent.looks)} decisions looked at it, of at most {budget.looks}; "
        "draw a fresh exam (a data set with `use: exam` and another seed), name it in `plans` and, for the champion, "
        "in `resits`; docs/release.md has the steps"
    )
