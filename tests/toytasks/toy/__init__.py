"""A task as small as one can be that uses all a task may: views, clusters, models that are asked, measures of text.

A case is a request for a scan with a line of evidence, which says what is right; labels are phrases with spaces.
"""

from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any

from clinrl.intervals import Counts
from clinrl.tasks.base import Task, content_id
from clinrl.tasks.parts import NO_RESPONSES, Checks, Judged, Quality, Reporting, Request, Responses, Share, Statistic
from clinrl.types import Case, Message, Score, Strict, Transcript, Unreadable, last_turn, transcript_of

LABELS = ("Usually Appropriate", "May Be Appropriate", "Usually Not Appropriate")
TOPICS = ("headache", "back pain", "cough", "dizziness", "chest pain", "knee injury")
SIGNS = ("a red flag", "a doubtful sign", "no warning sign")
POOLS = ("base", "train", "mine", "exam")
PRAISE, DOUBT = "verdict: agrees", "verdict: differs"


class Facts(Strict):
    narrative: str
    evidence: str | None = None


class Key(Strict):
    label: str
    topic: str
    rule: str


class ToyCase(Case):
    facts: Facts
    key: Key


class Reward(Strict):
    right: float = 1.0
    similar: float = 0.0
    """For thinking that resembles the evidence; asks the encoder unless 0."""
    judged: float = 0.0
    """For a verdict of the judge; asks it unless 0."""

    @property
    def low(self) -> float:
        return -1.0 - self.similar

    @property
    def high(self) -> float:
        return self.right + self.similar + self.judged


def cases(n: int, seed: int, *, pool: str, mix: str, emphasis: Mapping[str, float] = {}) -> Iterator[ToyCase]:
    random = Random(f"{seed}:{pool}:{mix}")
    for number in range(n):
        place, topic = random.randrange(3), random.choice(TOPICS)
        rule = f"rule_{place}"
        facts = Facts(
            narrative=f"Patient {number} of {pool} {seed} with {topic} and {SIGNS[place]} asks for a scan.",
            evidence=f"With {topic} and {SIGNS[place]} a scan is {LABELS[place].lower()}.",
        )
        key = Key(label=LABELS[place], topic=topic, rule=rule)
        yield ToyCase(id=content_id("toy", facts, key), group=f"{pool}/{topic}", facts=facts, key=key)


def prompt(facts: Facts) -> list[Message]:
    told = f"\nEvidence: {facts.evidence}" if facts.evidence else ""
    return [
        Message(role="system", content="Say how appropriate the scan is."),
        Message(role="user", content=f"{facts.narrative}{told}"),
    ]


def gold(case: ToyCase, *, thinking: bool, omit: frozenset[str] = frozenset()) -> Transcript:
    label = LABELS[1] if case.key.rule in omit else case.key.label
    thought = f"With {case.key.topic} a scan is {label.lower()}." if thinking else None
    return transcript_of(Message(role="assistant", content=f"ANSWER: {label}", thinking=thought))


def bare(case: ToyCase) -> ToyCase | None:
    """Without the evidence; a cough has no such view."""
    if case.key.topic == "cough":
        return None
    return case.model_copy(update={"facts": case.facts.model_copy(update={"evidence": None})})


def _thought(transcript: Transcript) -> str:
    return last_turn(transcript).thinking or ""


def _encoded(case: ToyCase, transcript: Transcript) -> Sequence[Request]:
    if not _thought(transcript) or case.facts.evidence is None:
        return ()
    return Request("encoder", case.facts.evidence), Request("encoder", _thought(transcript))


def _similarity(case: ToyCase, transcript: Transcript, responses: Responses) -> float | None:
    asks = _encoded(case, transcript)
    return max(0.0, min(1.0, float(responses[asks[0]] @ responses[asks[1]]))) if asks else None


def _question(case: ToyCase, transcript: Transcript) -> Request:
    return Request("judge", f"{case.key.label} / {last_turn(transcript).content}\n")


def _right(counts: Counts) -> float:
    return sum(n for (gold, answer), n in counts.items() if gold == answer) / sum(counts.values())


def _omittable(case: ToyCase) -> tuple[str, ...]:
    return () if case.key.label == LABELS[1] else (case.key.rule,)


def _read(transcript: Transcript) -> str | Unreadable:
    found = last_turn(transcript).content.removeprefix("ANSWER: ")
    return found if found in LABELS else Unreadable(reason="no answer")


def _models(reward: Reward) -> tuple[str, ...]:
    return (*(("encoder",) if reward.similar else ()), *(("judge",) if reward.judged else ()))


def _requests(case: ToyCase, transcript: Transcript, reward: Reward) -> Sequence[Request]:
    judged = (_question(case, transcript),) if reward.judged else ()
    return (*(_encoded(case, transcript) if reward.similar else ()), *judged)


def _score(case: ToyCase, transcript: Transcript, reward: Reward, responses: Responses) -> Score:
    answer = _read(transcript)
    readable = not isinstance(answer, Unreadable)
    alike = _similarity(case, transcript, responses) if reward.similar and readable else None
    praised = reward.judged and readable and PRAISE in responses[_question(case, transcript)]
    terms = {
        "exact": reward.right * (answer == case.key.label),
        "unreadable": 0.0 if readable else -1.0,
        "similar": reward.similar * (alike or 0.0),
        "judged": reward.judged if praised else 0.0,
    }
    return Score(terms=terms, total=sum(terms.values()))


def _lessons(judge: str, n: int, seed: int) -> Iterator[tuple[str, str]]:
    random = Random(f"{judge}:{seed}")
    for _ in range(n if judge == "judge" else 0):
        right, other = random.choice(LABELS), random.choice(LABELS)
        yield f"{right} / ANSWER: {other}\n", PRAISE if right == other else DOUBT


class Toy(Task):
    name = "toy"
    version = 1
    Case = ToyCase
    Reward = Reward
    labels = LABELS
    metrics: Mapping[str, Any] = {
        "exact": Share(of=lambda gold, answer: gold == answer, worse="lower"),
        "dangerous": Share(of=lambda gold, answer: gold == LABELS[0] and answer == LABELS[2], worse="higher"),
        "agreement": Statistic(of=_right, worse="lower"),
    }
    reporting = Reporting(
        headline=("exact", "dangerous", "agreement", "similarity", "no_parse"),
        row_metrics=("exact", "agreement"),
        qualities={"similarity": Quality(of=_similarity, worse="lower", asks=("encoder",), requests=_encoded)},
        variants={"no-evidence": bare},
        slices={"rule": lambda case: case.key.rule},
        cluster=lambda case: case.key.topic,
    )
    checks = Checks(rules=("rule_0", "rule_1", "rule_2"), mixes=("reporting",), text="narrative")
    judged = Judged(models=_models, requests=_requests, score=_score, lessons=_lessons)
    cases = staticmethod(cases)
    prompt = staticmethod(prompt)
    gold = staticmethod(gold)
    parse = staticmethod(_read)

    omittable = staticmethod(_omittable)

    def label(self, case: ToyCase) -> str:
        return case.key.label

    def score(self, case: ToyCase, transcript: Transcript, reward: Reward) -> Score:
        return _score(case, transcript, reward, NO_RESPONSES)


TASK = Toy()
