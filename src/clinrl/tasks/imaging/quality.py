"""Measures of a reasoning that no reward uses: they count the statements that the generator knows to be true.

The studies that a text cites are counted apart from its other statements, so that readers with and without evidence
can be compared. No statement is known of an imported case, so a measure that needs statements is None for it.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Final, Literal

from clinrl.tasks.imaging import judging
from clinrl.tasks.imaging.cases import ImagingCase, cases
from clinrl.tasks.imaging.imported import ImportedKey
from clinrl.tasks.imaging.sentences import citations, split
from clinrl.tasks.imaging.statements import CITES, Statement, read
from clinrl.tasks.parts import Quality, Request, Responses
from clinrl.types import Transcript, last_turn

SECOND: Final[Literal["second_judge"]] = "second_judge"


def read_thoughts(case: ImagingCase, transcript: Transcript) -> list[Statement | None] | None:
    """Each sentence of the think block as a statement, or None for a sentence that is no statement.

    The result is None without a block, and for an imported case, of which no statement is known.
    """
    thinking = last_turn(transcript).thinking
    if thinking is None or isinstance(case.key, ImportedKey):
        return None
    return [read(sentence) for sentence in split(thinking)]


def gold_statements(case: ImagingCase) -> set[Statement]:
    """The gold statements of a case."""
    return {statement for sentence in case.key.reasoning if (statement := read(sentence)) is not None}


def _recall(case: ImagingCase, transcript: Transcript, responses: Responses, *, cites: bool) -> float | None:
    """Share of the gold statements that the think block makes, 0 to 1: of the citations, or of the others.

    None without such gold statements, and without a block.
    """
    found = read_thoughts(case, transcript)
    gold = {statement for statement in gold_statements(case) if (statement.kind == CITES) == cites}
    return None if found is None or not gold else len(gold.intersection(found)) / len(gold)


def statement_precision(case: ImagingCase, transcript: Transcript, responses: Responses) -> float | None:
    """Share of the non-citing sentences that are gold statements, 0 to 1, each once. None without a block."""
    found = read_thoughts(case, transcript)
    if found is None:
        return None
    plain = [statement for statement in found if statement is None or statement.kind != CITES]
    return len(gold_statements(case).intersection(plain)) / len(plain) if plain else 0.0


def contradiction(case: ImagingCase, transcript: Transcript, responses: Responses) -> float | None:
    """1 if the block makes a statement that is not gold, else 0. None without a block.

    Gold holds the statements that the rating follows from. Other true statements count as false: any other one about a
    procedure in the wrong region, and those about kidneys or contrast where they decide nothing.
    """
    found = read_thoughts(case, transcript)
    gold = gold_statements(case)
    return None if found is None else float(any(some is not None and some not in gold for some in found))


def citation_validity(case: ImagingCase, transcript: Transcript, responses: Responses) -> float | None:
    """Share of the cited numbers that belong to a study in the prompt, 0 to 1. None without a citation."""
    cited = citations(last_turn(transcript).thinking or "")
    studies = {abstract.number for abstract in case.facts.evidence}
    return sum(number in studies for number in cited) / len(cited) if cited else None


def second_opinion(case: ImagingCase, transcript: Transcript, responses: Responses) -> float | None:
    """The verdict of the second judge on the reasoning, 0 to 1. None without a think block."""
    requests = second_requests(case, transcript)
    return judging.worth(judging.verdict(responses[requests[0]])) if requests else None


def second_requests(case: ImagingCase, transcript: Transcript) -> tuple[Request, ...]:
    """The request to the second judge about a transcript; none without a think block."""
    thinking = last_turn(transcript).thinking
    if thinking is None:
        return ()
    return (Request(SECOND, judging.prompt(SECOND, " ".join(case.key.reasoning), thinking, guarded=True)),)


QUALITIES: Final[Mapping[str, Quality]] = {
    "statement_recall": Quality(of=partial(_recall, cites=False), worse="lower"),
    "statement_precision": Quality(of=statement_precision, worse="lower"),
    "contradiction": Quality(of=contradiction, worse="higher", says="share of texts with a false statement"),
    "citation_validity": Quality(of=citation_validity, worse="lower"),
    "citation_truth": Quality(of=partial(_recall, cites=True), worse="lower"),
    "second_opinion": Quality(of=second_opinion, worse="lower", asks=(SECOND,), requests=second_requests),
}
"""Shares of cases or means over cases, all in [0, 1]."""


def lessons(judge: str, n: int, seed: int) -> Iterator[tuple[str, str]]:
    """Prompts and right replies for one of the judges, about cases of the base pool that the seed selects."""
    drawn = cases(n, seed, pool="base", mix="balanced")
    return judging.lessons(judge, n, seed, drawn)
