"""The reward of an imaging answer: label, format, a judge's verdict and the similarity of the reasoning to gold.

Every number is a field of `Reward`. The published arms and the corrected ones are parameter sets of the same code, so
that the effect of a correction can be measured. Gold always comes from the case that was answered; the published
scripts looked it up by the position in the batch.

The functions are pure: `requests` gives the requests to other models, and `score` takes their `responses`.
"""

import math
from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from clinrl.errors import DataError
from clinrl.tasks.imaging import judging, sentences, similarity
from clinrl.tasks.imaging.answer import UNKNOWN, full_text, parse, published_format, published_label
from clinrl.tasks.parts import NO_RESPONSES, Request, Responses, Weight
from clinrl.types import Case, Message, Score, Strict, Transcript, Unreadable, last_turn

TERMS: Final = ("answer", "format", "judge", "similarity", "unreadable")
"""The terms of a score. Every score has all of them; a term that does not apply is zero."""


class JudgeTerm(Strict):
    """The pay for a judge's verdict on the reasoning."""

    reader: Literal["none", "published", "corrected"] = "none"
    """none: no judge is asked. published: the reasoning is pasted as it is, and the mean of the last numbers counts.
    corrected: the reasoning cannot write the verdict, and the lowest of three bounded scores counts."""
    model: Literal["judge", "second_judge"] = "judge"
    """The judge to ask, one of those in the base's block."""
    weight: Weight = 0.5
    """Pay for the full verdict, 0 or more."""
    gated: bool = True
    """Whether only an answer with the right label is paid."""
    ceiling: Annotated[float, Field(ge=1.0)] = 10.0
    """Largest absolute value of a verdict of the published reader, 1 or more; the reader itself has no bound. 10 lets a
    verdict of 100 out of 10 points through, as published."""

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the greatest amount that this term adds where it counts."""
        top = {"none": 0.0, "corrected": self.weight, "published": self.weight * self.ceiling}[self.reader]
        return (-top if self.reader == "published" else 0.0), top


class SimilarityTerm(Strict):
    """The pay for the similarity of the reasoning to gold."""

    kind: Literal["none", "paper", "code", "matched"] = "none"
    """none: it is not measured. paper, code: the published mean of best cosines, scaled as in the paper or the code.
    matched: each sentence is matched with one gold sentence at most, and surplus sentences cost."""
    weight: Weight = 1.0
    """Pay for a similarity of 1, 0 or more."""
    gated: bool = True
    """Whether only an answer with the right label is paid."""
    floor: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.4
    """For `matched`: the cosine up to which a pair earns nothing, 0 to below 1. Four of five pairs of unlike sentences
    lie below 0.4."""
    slack: Annotated[int, Field(ge=0)] = 1
    """For `matched`: number of surplus sentences that cost nothing, 0 or more."""

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the greatest amount that this term adds where it counts. A mean cosine can be negative."""
        return (-self.weight if self.kind == "paper" else 0.0), (0.0 if self.kind == "none" else self.weight)


class Reward(Strict):
    """Every number of the reward. The default needs no model: right 1, wrong 0, and unreadable strictly the worst."""

    parser: Literal["strict", "published"] = "strict"
    """strict: one answer block that holds nothing but a label. published: the first label that the published reader
    finds; a turn without one may still earn other terms."""
    right: float = 1.0
    """Pay for the right label."""
    wrong: float = 0.0
    """Pay for a wrong label, at most that for the right one."""
    unreadable: float = -0.5
    """Pay for a turn without a label; with the strict parser it earns nothing else."""
    format: Weight = 0.0
    """Bonus for the published format. Without a think block there is none."""
    judge: JudgeTerm = JudgeTerm()
    similarity: SimilarityTerm = SimilarityTerm()

    @model_validator(mode="after")
    def _right_is_not_worse(self) -> Self:
        if self.right < self.wrong:
            raise ValueError(f"right {self.right} is below wrong {self.wrong}; the right label must not earn less")
        return self

    def _ranges(self) -> Iterator[tuple[float, float]]:
        """The range of the total for a right label, a wrong one and a turn without a label."""
        outcomes = [(True, self.right), (False, self.wrong)]
        if self.parser == "strict":
            yield self.unreadable, self.unreadable
        else:
            outcomes.append((False, self.unreadable))
        for right, base in outcomes:
            added = [part.bounds for part in (self.judge, self.similarity) if right or not part.gated]
            yield base + math.fsum(low for low, _ in added), base + self.format + math.fsum(high for _, high in added)

    @property
    def low(self) -> float:
        return min(low for low, _ in self._ranges())

    @property
    def high(self) -> float:
        return max(high for _, high in self._ranges())


def models(reward: Reward) -> tuple[str, ...]:
    """The models that a reward needs."""
    judge = (reward.judge.model,) if reward.judge.reader != "none" else ()
    return (*judge, "encoder") if reward.similarity.kind != "none" else judge


def requests(case: Case, transcript: Transcript, reward: Reward) -> tuple[Request, ...]:
    """The requests whose responses `score` needs, each once. No request serves a term that a gate sets to zero."""
    turn = last_turn(transcript)
    label = _read_label(turn, reward)
    wanted: dict[Request, None] = {}
    if _counts_verdict(case, turn, label, reward):
        wanted[_judge_request(case, turn, reward.judge)] = None
    if _counts(reward.similarity, case, label, reward):
        gold, written = _compared(case, turn, reward.similarity)
        if gold and written:
            wanted |= dict.fromkeys(_encoder_request(text, reward.similarity) for text in (*gold, *written))
    return tuple(wanted)


def score(case: Case, transcript: Transcript, reward: Reward, responses: Responses = NO_RESPONSES) -> Score:
    """The reward of a transcript's last turn, taken apart into all of `TERMS`; it lies in [reward.low, reward.high].

    `responses` holds the response to each of `requests`, and may hold others. Raises DataError if it lacks one.
    """
    turn = last_turn(transcript)
    label = _read_label(turn, reward)
    terms = dict.fromkeys(TERMS, 0.0)
    if isinstance(label, Unreadable):
        terms["unreadable"] = reward.unreadable
    else:
        terms["answer"] = reward.right if label == case.key.label else reward.wrong
    if reward.format and (reward.parser == "published" or not isinstance(label, Unreadable)):
        terms["format"] = reward.format * published_format(full_text(turn))
    if _counts_verdict(case, turn, label, reward):
        terms["judge"] = reward.judge.weight * _judged(case, turn, reward.judge, responses)
    if _counts(reward.similarity, case, label, reward):
        terms["similarity"] = reward.similarity.weight * _similar(case, turn, reward.similarity, responses)
    return Score(terms=terms, total=math.fsum(terms.values()))


def _read_label(turn: Message, reward: Reward) -> str | Unreadable:
    if reward.parser == "strict":
        return parse(turn)
    label = published_label(full_text(turn))
    return Unreadable(reason=UNKNOWN.lower()) if label == UNKNOWN else label


def _counts_verdict(case: Case, turn: Message, label: str | Unreadable, reward: Reward) -> bool:
    """Whether the judge's verdict counts: as published for any turn, corrected only for one with a think block."""
    judged = reward.judge.reader != "corrected" or turn.thinking is not None
    return judged and _counts(reward.judge, case, label, reward)


def _counts(part: JudgeTerm | SimilarityTerm, case: Case, label: str | Unreadable, reward: Reward) -> bool:
    """Whether a term about the reasoning can be anything but zero."""
    if part.bounds == (0.0, 0.0) or (isinstance(label, Unreadable) and reward.parser == "strict"):
        return False
    return not part.gated or label == case.key.label


def _judge_request(case: Case, turn: Message, judged: JudgeTerm) -> Request:
    guarded = judged.reader == "corrected"
    thought = turn.thinking if turn.thinking and turn.thinking.strip() else full_text(turn)
    return Request(judged.model, judging.prompt(judged.model, " ".join(case.key.reasoning), thought, guarded=guarded))


def _judged(case: Case, turn: Message, judged: JudgeTerm, responses: Responses) -> float:
    reply = str(_answer(responses, _judge_request(case, turn, judged)))
    if judged.reader == "corrected":
        return judging.worth(judging.verdict(reply))
    return min(judged.ceiling, max(-judged.ceiling, judging.published_verdict(reply)))


def _compared(case: Case, turn: Message, similar: SimilarityTerm) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The gold sentences and those of the think block, split as the kind of similarity requires."""
    thought = turn.thinking or ""
    if similar.kind == "matched":
        return case.key.reasoning, sentences.split(thought)
    return sentences.published_split(" ".join(case.key.reasoning)), sentences.published_split(thought)


def _encoder_request(sentence: str, similar: SimilarityTerm) -> Request:
    return Request("encoder", sentences.drop_citations(sentence) if similar.kind == "matched" else sentence)


def _similar(case: Case, turn: Message, similar: SimilarityTerm, responses: Responses) -> float:
    import numpy

    gold, written = _compared(case, turn, similar)
    if not gold or not written:
        return 0.0
    gold_vectors, written_vectors = (
        numpy.asarray([_answer(responses, _encoder_request(text, similar)) for text in side], dtype=numpy.float32)
        for side in (gold, written)
    )
    if similar.kind != "matched":
        return similarity.mean_similarity(gold_vectors, written_vectors, halved=similar.kind == "code")
    evidence = [(abstract.number, abstract.text) for abstract in case.facts.evidence]
    return similarity.matched_similarity(
        gold, written, gold_vectors, written_vectors, evidence, floor=similar.floor, slack=similar.slack
    )


def _answer(responses: Responses, request: Request) -> Any:
    if request not in responses:
        raise DataError(
            f"the reward needs the response of the {request.model} to {request.text[:60]!r}, which is missing; "
            "send every request of `requests` before scoring"
        )
    return responses[request]
