"""The prompt and the output contract: a think block of short statements, then one label in an answer block.

The contract and the fields of the request are the published ones; the wording is this project's own.
"""

from clinrl.tasks.imaging import imported
from clinrl.tasks.imaging.cases import ImagingCase, ImagingFacts, sentences
from clinrl.tasks.imaging.evidence import find_majority
from clinrl.tasks.imaging.imported import ImportedKey
from clinrl.tasks.imaging.rules import decide
from clinrl.types import Message, Transcript, transcript_of

SYSTEM = (
    "You advise on imaging. Say whether the procedure is appropriate for exactly this variant of this condition. Think "
    "in short sentences that stand alone, and cite a study by its number in brackets only where it bears on the "
    "question. Then give one label: <answer>Usually Appropriate</answer>, <answer>May Be Appropriate</answer> or "
    "<answer>Usually Not Appropriate</answer>."
)


def prompt(facts: ImagingFacts) -> list[Message]:
    """System and user turn of one request. Without evidence the field is left out."""
    lines = [f"Clinical condition: {facts.condition}", f"Variant: {facts.variant}", f"Procedure: {facts.procedure}"]
    if facts.evidence:
        lines += ["Abstracts:", *(f"[{abstract.number}] {abstract.text}" for abstract in facts.evidence)]
    return [Message(role="system", content=SYSTEM), Message(role="user", content="\n".join(lines))]


def gold(case: ImagingCase, *, thinking: bool, omit: frozenset[str] = frozenset()) -> Transcript:
    """The turn of a reader who knows every rule except `omit`; for an imported case, its author's reasons and label.

    A reader who does not know the local yield believes the studies in the prompt.
    """
    if isinstance(case.key, ImportedKey):
        return transcript_of(imported.gold(case.key.label, case.key.reasoning, thinking=thinking))
    s, key = case.key.scenario, case.key
    decision = decide(s, omit, find_majority(key.studies, s))
    reasons = sentences(s, key.studies, decision, case.facts.variant) if omit else key.reasoning
    return transcript_of(imported.gold(decision.label, reasons, thinking=thinking))
