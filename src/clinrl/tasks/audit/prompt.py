"""The prompt of an auditor: the job, the protocol with all its numbers, and the Actor's decisions."""

from typing import Final

from clinrl.tasks.audit.cases import AuditFacts, Proposal
from clinrl.tasks.audit.phrases import FALLACIES
from clinrl.tasks.audit.rules import TrialProtocol
from clinrl.types import Message

EXAMPLE_REASON: Final = "upper +3; generic_range"
"""An example of the form of a reason."""

SYSTEM: Final = (
    "You audit an Actor that cleared or rejected patients of a clinical trial. An error is a patient cleared although "
    "the record breaks a rule, or rejected although it breaks none. For each proposal: review it, investigate the "
    "patient, audit the dates, then approve it or flag the error. Then submit. Nothing is told before the end.\n"
    "Distances are value minus limit. A flag names the error type, and its reason the distances that decide and the "
    f"Actor's fallacy, for example: {EXAMPLE_REASON}\n"
    "Error types and fallacies:\n"
    + "\n".join(f"{rule}: {', '.join(fallacies)}" for rule, fallacies in FALLACIES.items())
)


def prompt(facts: AuditFacts) -> list[Message]:
    lines = "\n".join(map(proposal_line, facts.proposals))
    return [
        Message(role="system", content=SYSTEM),
        Message(role="user", content=f"{protocol_text(facts.protocol)}\nProposals:\n{lines}"),
    ]


def protocol_text(protocol: TrialProtocol) -> str:
    """The rules of a protocol in words."""
    unless = ""
    if protocol.comorbidity_threshold is not None:
        unless = f", unless comorbidity is above {protocol.comorbidity_threshold}"
    return (
        f"Protocol: age {protocol.age_min_years} to {protocol.age_max_years}, both included. "
        f"Treatment at most {protocol.window_days} days after enrolment; "
        f"in stage IV at most {protocol.stage_iv_window_days} days{unless}. No death before treatment."
    )


def proposal_line(proposal: Proposal) -> str:
    """A proposal as the prompt lists it."""
    return f"{proposal.proposal_id} {proposal.patient_id} {proposal.action} {proposal.confidence:.2f}"
