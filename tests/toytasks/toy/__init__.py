"""A task as small as one can be that uses all a task may: views, clusters, models that are asked, measures of text.

A case is a request for a scan with a line of evidence, which says what is right; labels are phrases with spaces.
"""

from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any

from clinrl.artifacts import digest
from clinrl.errors import DataError
from clinrl.tasks.base import NOTHING_HEARD, Ask, Heard, Quality, Share, Statistic
from clinrl.types import Case, Message, Score, Strict, Transcript, Unreadable, said

LABELS = ("Usually Appropriate", "May Be Appropriate", "Usually Not Appropriate")
TOPICS = ("headache", "back pain", "cough", "dizziness", "chest pain", "knee injury")
SIGNS = ("a red flag", "a doubtful sign", "no warning sign")
POOLS = ("base", "train", "mine", "exam")
TERMS = ("exact", "unreadable", "similar", "judged")
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


def case_id(facts: Any, key: Any) -> str:
    return f"toy-{digest([facts.model_dump(mode='json'), key.model_dump(mode='json')])[:16]}"


def pool_of(group: str) -> Any:
    return group.split("/")[0]


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
        yield ToyCase(id=case_id(facts, key), group=f"{pool}/{topic}", facts=facts, key=key)


def prompt(facts: Facts) -> list[Message]:
    told = f"\nEvidence: {facts.evidence}" if facts.evidence else ""
    return [
        Message(role="system", content="Say how appropriate the scan is."),
        Message(role="user", content=f"{facts.narrative}{told}"),
    ]


def gold(case: ToyCase, *, thinking: bool, omit: frozenset[str] = frozenset()) -> Transcript:
    label = LABELS[1] if case.key.rule in omit else case.key.label
    thought = f"With {case.key.topic} a scan is {label.lower()}." if thinking else None
    return said(Message(role="assistant", content=f"ANSWER: {label}", thinking=thought))


def bare(case: ToyCase) -> ToyCase | None:
    """Without the evidence; a cough has no such view."""
    if case.key.topic == "cough":
        return None
    return case.model_copy(update={"facts": case.facts.model_copy(update={"evidence": None})})


def _thought(transcript: Transcript) -> str:
    return transcript.messages[-1].thinking or ""


def _encoded(case: ToyCase, transcript: Transcript) -> Sequence[Ask]:
    if not _thought(transcript) or case.facts.evidence is None:
        return ()
    return Ask("encoder", case.facts.evidence), Ask("encoder", _thought(transcript))


def _similarity(case: ToyCase, transcript: Transcript, heard: Heard) -> float | None:
    asks = _encoded(case, transcript)
    return max(0.0, min(1.0, float(heard[asks[0]] @ heard[asks[1]]))) if asks else None


def _question(case: ToyCase, transcript: Transcript) -> Ask:
    return Ask("judge", f"{case.key.label} / {transcript.messages[-1].content}\n")


def _says(text: str, stop: Any = "answered") -> Transcript:
    return Transcript(messages=(Message(role="assistant", content=text),), stop=stop)


def _mediocre(case: ToyCase, random: Random) -> Transcript:
    return _says(f"ANSWER: {case.key.label if random.random() < 0.8 else random.choice(LABELS)}")


def _right(golds: Sequence[Any], answers: Sequence[Any]) -> float:
    return sum(gold == answer for gold, answer in zip(golds, answers, strict=True)) / len(golds)


class Toy:
    name = "toy"
    version = 1
    Case = ToyCase
    Reward = Reward
    labels = LABELS
    rules = ("rule_0", "rule_1", "rule_2")
    mixes = ("reporting",)
    metrics: Mapping[str, Any] = {
        "exact": Share(of=lambda gold, answer: gold == answer, worse="lower"),
        "dangerous": Share(of=lambda gold, answer: gold == LABELS[0] and answer == LABELS[2], worse="higher"),
        "agreement": Statistic(of=_right, worse="lower"),
    }
    qualities: Mapping[str, Any] = {"similarity": Quality(of=_similarity, worse="lower", asks=_encoded)}
    headline = ("exact", "dangerous", "agreement", "similarity", "no_parse")
    row_metrics = ("exact", "agreement")
    form_metrics = ("exact", "dangerous")
    slice_measures = ("exact", "dangerous")
    views: Mapping[str, Any] = {"no-evidence": bare}
    slices: Mapping[str, Any] = {"rule": lambda case: case.key.rule}
    triggers: Mapping[str, Any] = {}
    expectations = ()
    published = None
    protocol = None
    environment = None
    turns = 1
    terms = TERMS
    cases = staticmethod(cases)
    case_id = staticmethod(case_id)
    pool_of = staticmethod(pool_of)
    prompt = staticmethod(prompt)
    gold = staticmethod(gold)

    def cluster(self, case: ToyCase) -> str:
        return case.key.topic

    def recognise(self, path: Any) -> Any:
        raise DataError(f"{path} must be left alone: the toy task imports nothing")

    def omittable(self, case: ToyCase) -> tuple[str, ...]:
        return () if case.key.label == LABELS[1] else (case.key.rule,)

    def label(self, case: ToyCase) -> str:
        return case.key.label

    relabel = label

    def parse(self, transcript: Transcript) -> str | Unreadable:
        found = transcript.messages[-1].content.removeprefix("ANSWER: ")
        return found if found in LABELS else Unreadable(reason="no answer")

    def oracles(self, reward: Reward) -> tuple[str, ...]:
        return (*(("encoder",) if reward.similar else ()), *(("judge",) if reward.judged else ()))

    def asks(self, case: ToyCase, transcript: Transcript, reward: Reward) -> Sequence[Ask]:
        judged = (_question(case, transcript),) if reward.judged else ()
        return (*(_encoded(case, transcript) if reward.similar else ()), *judged)

    def parts(self, gold: str, answer: str | Unreadable) -> Sequence[tuple[str, str | Unreadable]]:
        return ((gold, answer),)

    def part_names(self, gold: str) -> Sequence[str]:
        return ("answer",)

    def score(self, case: ToyCase, transcript: Transcript, reward: Reward, heard: Heard = NOTHING_HEARD) -> Score:
        answer = self.parse(transcript)
        readable = not isinstance(answer, Unreadable)
        alike = _similarity(case, transcript, heard) if reward.similar and readable else None
        praised = reward.judged and readable and PRAISE in heard[_question(case, transcript)]
        terms = {
            "exact": reward.right * (answer == case.key.label),
            "unreadable": 0.0 if readable else -1.0,
            "similar": reward.similar * (alike or 0.0),
            "judged": reward.judged if praised else 0.0,
        }
        return Score(terms=terms, total=sum(terms.values()))

    def lessons(self, judge: str, n: int, seed: int) -> Iterator[tuple[str, str]]:
        random = Random(f"{judge}:{seed}")
        for _ in range(n if judge == "judge" else 0):
            right, other = random.choice(LABELS), random.choice(LABELS)
            yield f"{right} / ANSWER: {other}\n", PRAISE if right == other else DOUBT

    def refine(self, reward: Reward, rules: Sequence[str]) -> Reward:
        return reward

    def cost(self, gold: str, answer: Any) -> float:
        return 0.0 if gold == answer else 1.0

    def policies(self) -> Mapping[str, Any]:
        return {
            **{f"always_{label}": lambda case, random, label=label: _says(f"ANSWER: {label}") for label in LABELS},
            "random": lambda case, random: _says(f"ANSWER: {random.choice(LABELS)}"),
            "hedge": lambda case, random: _says("ANSWER: one or the other"),
            "empty": lambda case, random: _says(""),
            "truncated": lambda case, random: _says("ANSW", "max_tokens"),
            "mediocre": _mediocre,
        }

    def row(self, case: ToyCase) -> dict[str, Any]:
        return {"id": case.id, "group": case.group, "narrative": case.facts.narrative, "label": case.key.label}


TASK = Toy()
