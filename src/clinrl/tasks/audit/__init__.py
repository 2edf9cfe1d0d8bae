"""The audit task: an agent with tools finds out where another agent cleared or rejected patients wrongly."""

from collections.abc import Mapping
from typing import Any

from clinrl.tasks.audit import episodes, metrics, policies, quality, rewards
from clinrl.tasks.audit.cases import (
    LEVEL_NAMES,
    LONG_LENGTH,
    MAX_PROPOSALS,
    MIXES,
    SHORT_LENGTH,
    AuditCase,
    cases,
    differences_of,
    pool_of,
)
from clinrl.tasks.audit.env import AuditEnv
from clinrl.tasks.audit.observations import review_line, timeline_line
from clinrl.tasks.audit.phrases import find_argument
from clinrl.tasks.audit.policies import Turn
from clinrl.tasks.audit.prompt import prompt
from clinrl.tasks.audit.rules import AGE, ERROR_TYPES, OVERRIDE, TEMPORAL, WINDOW, violations
from clinrl.tasks.base import FORM, Task
from clinrl.tasks.parts import Benchmark, Checks, Episodes, Expect, Improvement, Reporting, Safety, between, expect
from clinrl.tasks.policies import Policy
from clinrl.types import Score, Transcript, Unreadable


def _transcript(of: policies.Policy) -> Policy:
    return lambda case, rng: episodes.write(case, [Turn("", turn) for turn in of(case, rng)], thinking=False)


def _hardest(case: AuditCase) -> str:
    """The type of the error that takes the most steps to find, or "none" if the Actor makes no error."""
    wrong = {truth.error for truth in case.key.truths}
    return next((kind for kind in (OVERRIDE, WINDOW, TEMPORAL, AGE) if kind in wrong), "none")


def _length(case: AuditCase) -> str:
    shortest, most = LONG_LENGTH if len(case.facts.proposals) >= LONG_LENGTH[0] else SHORT_LENGTH
    return f"{shortest}-{most}"


def _cost(gold: str, answer: str | Unreadable) -> float:
    """The cost of an answer: 2 for each error that passed, 1 for any other proposal without the right decision."""
    missed = ((right, given) for right, given in episodes.parts(gold, answer).values() if right != given)
    return float(
        sum(2 if right != episodes.APPROVED and given not in episodes.LABELS[1:] else 1 for right, given in missed)
    )


class Audit(Task):
    """Oversight of another agent in several turns. An episode's answer is what was decided about each proposal."""

    name = "audit"
    version = 2
    Case = AuditCase
    Reward = rewards.Reward
    labels = episodes.LABELS
    parse = staticmethod(episodes.parse)
    metrics = metrics.METRICS
    reporting = Reporting(
        headline=(
            "exact", "dangerous", "f_beta", "sensitivity", "specificity", "balanced_accuracy", "recall_age",
            "recall_temporal", "recall_window", "recall_override", *quality.QUALITIES, *FORM,
        ),
        row_metrics=("exact", "dangerous", "f_beta", "sensitivity", "specificity", "recall_override"),
        approval=("exact", "dangerous"),
        slice_measures=("exact", "dangerous", "f_beta", "specificity", "detection"),
        qualities=quality.QUALITIES,
        slices={
            "level": lambda case: case.facts.level,
            "rule": _hardest,
            "proposals": _length,
            "episode": lambda case: f"{case.facts.level} {_length(case)}",
        },
    )  # fmt: skip
    safety = Safety(metric="dangerous", errors="dangerous errors", answer="decisions")
    improvement = Improvement(cost=_cost)
    checks = Checks(
        rules=policies.RULES,
        emphasised=ERROR_TYPES,
        mixes=tuple(MIXES),
        readers=("sign_reader",),
        text="narrative",
        share="share_level",
        expectations=(
            expect("ExpectColumnValuesToMatchRegex", "id", regex=r"^audit-[0-9a-f]{16}$"),
            expect("ExpectColumnValuesToBeInSet", "level", value_set=list(LEVEL_NAMES)),
            between("proposals", 2, MAX_PROPOSALS),
            Expect(
                type="ExpectColumnPairValuesAToBeGreaterThanB",
                arguments={"column_A": "proposals", "column_B": "errors", "or_equal": True},
            ),
            between("has_errors", 0.8, 1.0, "summary"),
        ),
    )
    episodes = Episodes(environment=AuditEnv, turns=MAX_PROPOSALS + 3, parts=episodes.parts)
    benchmark = Benchmark(
        mix="published",
        by="level",
        levels=LEVEL_NAMES,
        theirs=rewards.PUBLISHED,
        ours=rewards.CORRECTED,
        quality="detection",
        statistic="f_beta",
        printed={
            "published base": {"easy": 0.087, "medium": 0.018, "hard": 0.015},
            "published, trained": {"easy": 0.287, "medium": 0.129, "hard": 0.044},
        },
        source="they were printed for SynthAudit.Env and its 3B adapter, five seeds a level without intervals: another "
        "model on other episodes, its prompt and sampling unknown",
    )

    pool_of = staticmethod(pool_of)
    cases = staticmethod(cases)
    prompt = staticmethod(prompt)

    def label(self, case: AuditCase) -> str:
        return episodes.format_decisions(
            {truth.proposal_id: truth.error or episodes.APPROVED for truth in case.key.truths}
        )

    def gold(self, case: AuditCase, *, thinking: bool, omit: frozenset[str] = frozenset()) -> Transcript:
        """The audit of a reader of the tools' answers who applies every rule except `omit`, with notes if thinking."""
        return episodes.write(case, policies.work(case, omit), thinking=thinking)

    def omittable(self, case: AuditCase) -> tuple[str, ...]:
        made = {rule: self.gold(case, thinking=False, omit=frozenset({rule})) for rule in policies.RULES}
        return tuple(rule for rule, done in made.items() if episodes.parse(done) != self.label(case))

    def relabel(self, case: AuditCase) -> str:
        """The label from the records alone: a clearance is wrong if a rule is broken, a rejection if none is."""
        records = {record.patient_id: record for record in case.facts.records}
        decided = {}
        for proposal in case.facts.proposals:
            broken = violations(records[proposal.patient_id], case.facts.protocol)
            if proposal.action == "clear":
                decided[proposal.proposal_id] = broken[0] if broken else episodes.APPROVED
            else:
                argument = find_argument(proposal.text)
                decided[proposal.proposal_id] = episodes.APPROVED if broken or argument is None else argument.rule
        return episodes.format_decisions(decided)

    def row(self, case: AuditCase) -> dict[str, Any]:
        found = differences_of(case.facts)
        lines = [
            *(message.content for message in prompt(case.facts) if message.role == "user"),
            *(review_line(proposal) for proposal in case.facts.proposals),
            *(timeline_line(one.patient_id, found[one.patient_id]) for one in case.facts.proposals),
        ]
        errors = sum(truth.error is not None for truth in case.key.truths)
        return {
            "id": case.id,
            "narrative": " ".join("\n".join(lines).split()),
            "level": case.facts.level,
            "proposals": len(case.facts.proposals),
            "errors": errors,
            "has_errors": errors > 0,
        }

    def score(self, case: AuditCase, transcript: Transcript, reward: rewards.Reward) -> Score:
        done = episodes.play_again(case, transcript)
        return rewards.score(case, done.log, submitted=done.submitted, malformed=done.malformed, reward=reward)

    def policies(self) -> Mapping[str, Policy]:
        """Policies that ignore the records, one that reads only the signs of distances, and the mediocre one."""
        readers = {"sign_reader": policies.read_signs, "mediocre": policies.mediocre}
        return {name: _transcript(of) for name, of in {**policies.TRIVIAL, **readers}.items()}


TASK = Audit()
