"""Auditors that know every rule, and what came of an audit."""

from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Any, Final

from clinrl.tasks.audit.cases import AuditCase, differences_of
from clinrl.tasks.audit.env import SUBMIT, AuditEnv, Call, perform
from clinrl.tasks.audit.evidence import write
from clinrl.tasks.audit.policies import Action, Policy, Turns, approve, flag, look_up_and_decide, mediocre, work


def was_submitted(log: Iterable[Call]) -> bool:
    """Whether the audit was handed in."""
    return any(call.valid and call.tool == SUBMIT for call in log)


def replay(case: AuditCase, calls: Iterable[tuple[str, Mapping[str, Any]]]) -> AuditEnv:
    """The environment after these calls from the start; equal calls, equal logs."""
    env = AuditEnv()
    env.reset(case)
    for tool, arguments in calls:
        perform(env, tool, arguments)
    return env


def play(case: AuditCase, turns: Sequence[Sequence[Action]]) -> tuple[Call, ...]:
    """The log after these turns."""
    return replay(case, (action for turn in turns for action in turn)).log


def oracle(case: AuditCase, rng: Random) -> Turns:
    """Decides by the key, having looked everything up."""
    found = differences_of(case.facts)
    decided = []
    for proposal, truth in zip(case.facts.proposals, case.key.truths, strict=True):
        if truth.error is None:
            decided.append(approve(proposal.proposal_id))
        else:
            reason = write(found[proposal.patient_id], truth.deciding, truth.fallacy)
            decided.append(flag(proposal.proposal_id, truth.error, reason))
    return look_up_and_decide(case, decided)


def reader(case: AuditCase, rng: Random) -> Turns:
    """Decides by the rules, from what the tools show."""
    return [turn.actions for turn in work(case)]


READERS: Final[Mapping[str, Policy]] = {"oracle": oracle, "reader": reader, "mediocre": mediocre}
