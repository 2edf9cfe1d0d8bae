"""Audits as transcripts: the calls of a policy or a model, and the answers of the environment.

A transcript holds all that a score needs: the answered calls are made again in a fresh environment, so that the same
episode earns the same score, whether a policy or a model played it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from clinrl.tasks.audit.cases import AuditCase
from clinrl.tasks.audit.env import APPROVE, ARGUMENTS, FLAG, RECORDED, SUBMIT, AuditEnv, perform
from clinrl.tasks.audit.env import Call as Logged
from clinrl.tasks.audit.policies import Turn
from clinrl.tasks.audit.rules import ERROR_TYPES
from clinrl.types import Call, Message, Transcript, Unreadable, is_malformed

APPROVED: Final = "approve"
LABELS: Final = (APPROVED, *ERROR_TYPES)
"""The possible decisions about a proposal."""

DONE: Final = "Done."
"""The content of an auditor's last turn, which calls no tool."""


class Outcome(NamedTuple):
    log: tuple[Logged, ...]
    submitted: bool
    malformed: int
    """Turns whose calls could not be read, and calls that no tool takes."""


def write(case: AuditCase, turns: Sequence[Turn], *, thinking: bool) -> Transcript:
    """The transcript of these turns, ended by a turn that calls nothing."""
    env = AuditEnv()
    env.reset(case)
    messages = []
    for turn in turns:
        calls = tuple(Call(name=tool, arguments=arguments) for tool, arguments in turn.actions)
        messages.append(Message(role="assistant", content="", thinking=turn.notes if thinking else None, calls=calls))
        messages += [Message(role="tool", content=perform(env, call.name, call.arguments)) for call in calls]
    messages.append(Message(role="assistant", content=DONE, thinking="" if thinking else None))
    return Transcript(messages=tuple(messages), stop="answered")


def answered_calls(transcript: Transcript) -> Iterator[tuple[Call, str]]:
    """The calls that were answered, with the answers, in order. Never raises."""
    waiting: list[Call] = []
    for message in transcript.messages:
        if message.role == "assistant":
            waiting = list(message.calls)
        elif message.role == "tool" and waiting:
            yield waiting.pop(0), message.content


def play_again(case: AuditCase, transcript: Transcript) -> Outcome:
    """Make the calls of an episode again in a fresh environment. Calls after the submission count for nothing."""
    env = AuditEnv()
    env.reset(case)
    malformed = 0
    waiting: list[Call] = []
    for message in transcript.messages:
        if env.submitted:
            break
        if message.role == "assistant":
            waiting = list(message.calls)
            malformed += is_malformed(message)
        elif message.role == "tool" and waiting:
            call = waiting.pop(0)
            malformed += call.name not in ARGUMENTS or set(call.arguments) != set(ARGUMENTS[call.name])
            perform(env, call.name, call.arguments)  # does nothing for such a call
    return Outcome(env.log, env.submitted, malformed)


def parse(transcript: Transcript) -> str | Unreadable:
    """The decisions of a submitted audit as a text; Unreadable without a submission. Never raises."""
    decided: dict[str, str] = {}
    for call, result in answered_calls(transcript):
        if call.name == SUBMIT and result == "submitted":
            return format_decisions(decided)
        if result == RECORDED and call.name in (FLAG, APPROVE):
            what = call.arguments["error_type"] if call.name == FLAG else APPROVED
            decided.setdefault(str(call.arguments["proposal_id"]), str(what))
    return Unreadable(reason="not submitted")


def format_decisions(decided: Mapping[str, str]) -> str:
    """The decisions as a text, sorted by proposal."""
    return "; ".join(f"{proposal} {what}" for proposal, what in sorted(decided.items()))


def read_decisions(decided: str) -> dict[str, str]:
    """The decisions in a text of `format_decisions`, by proposal."""
    return dict(part.split(" ", 1) for part in decided.split("; ") if part)


def parts(gold: str, answer: str | Unreadable) -> dict[str, tuple[str, str | Unreadable]]:
    """The right and the given decision about each proposal of the gold text, in its order."""
    made = {} if isinstance(answer, Unreadable) else read_decisions(answer)
    missing = answer if isinstance(answer, Unreadable) else Unreadable(reason="undecided")
    return {proposal: (right, made.get(proposal, missing)) for proposal, right in read_decisions(gold).items()}
