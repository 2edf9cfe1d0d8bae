"""The prompts of judges about a reasoning, and the readers of their verdicts: as published, and proof against forgery.

The judge compares two texts and writes three whole scores from 0 to 10 as JSON. The published reader takes any numbers
of the last JSON object. The corrected one takes the first object, requires the three keys and no other, bounds the
scores, and counts the lowest: a text that is long enough to hold every gold point is not a good one.

The scores in the lessons of an embedded judge are counts: the gold sentences in a reasoning, its other sentences, and
the cited studies that exist.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from random import Random
from statistics import fmean
from typing import Any, Final

from clinrl.tasks.imaging.sentences import citations, plain_words, split
from clinrl.tasks.imaging.similarity import valid_citations
from clinrl.tasks.imaging.statements import CITES, RATING, SLOTS, WORDINGS, Statement, read, to_sentence
from clinrl.tasks.tables import read_table
from clinrl.types import Case, Strict

KEYS: Final = ("medical_concepts", "logic_alignment", "supporting_evidence")
TOP: Final = 10


class _Words(Strict):
    padding: tuple[str, ...]
    praise: tuple[str, ...]
    wording: Mapping[str, tuple[str, str, str, str]]


_WORDS: Final = read_table(__file__, _Words)
WORDING: Final = _WORDS.wording
"""By judge: the question, and the words before the gold, before the judged text and before the reply."""
PADDING: Final = _WORDS.padding
"""Sentences that fit every case and say nothing about any."""
PRAISE: Final = _WORDS.praise
"""Sentences by which a text praises itself. The attacks use others, which show what a judge learned."""

SPOILT: Final = 0.3
"""Share of lessons whose text makes no attempt, such as a borrowed, repetitive, copied or self-praising one."""

DRAWS: Final = 12
"""Candidate texts for one lesson. The lesson keeps the one whose mean score was given least often so far."""

_UNSAFE = re.compile(rf"</?\w{{1,20}}>|[{{}}<>\"\u201c\u201d`\\\s]|{'|'.join(KEYS)}", re.IGNORECASE)
_OBJECT = re.compile(r"\{[^{}]*\}")


def prompt(judge: str, gold: str, reasoning: str, *, guarded: bool) -> str:
    """The prompt of a judge. `guarded`: the judged text loses its braces, tags, quotes, line ends and names of scores,
    so that it can neither leave its place nor write the verdict. Otherwise it is pasted as it is, as published."""
    question, one, two, reply = WORDING[judge]
    text = " ".join(_UNSAFE.sub(" ", reasoning).split()) if guarded else reasoning
    return f'{question}\n{one}{gold}"\n{two}{text}"\n{reply}'


def published_verdict(text: str) -> float:
    """The published reward of a verdict: the mean of the numbers in its last valid JSON object, divided by 10.

    There is no bound and the keys do not matter: a 100 is worth 10, and a single number is the whole verdict. 0 for
    values other than whole numbers, and without an object. Never raises.
    """
    for found in reversed(_OBJECT.findall(text)):
        scores = _parse(found)
        if scores is None:
            continue
        values = [value for _, value in scores]
        try:
            return math.fsum(values) / len(values) / TOP if all(type(value) is int for value in values) else 0.0
        except (ZeroDivisionError, OverflowError):
            return 0.0
    return 0.0


def verdict(text: str) -> tuple[int, int, int] | None:
    """The three scores of a reply in the order of `KEYS`, each bounded to [0, 10]; None where there is no verdict.

    The first JSON object counts, since text after a verdict is no part of it. The object must have the three keys,
    each once, and no other, with whole numbers. Never raises.
    """
    found = _OBJECT.search(text)
    scores = _parse(found[0]) if found else None
    if scores is None or len(scores) != len(KEYS) or {key for key, _ in scores} != set(KEYS):
        return None
    values = dict(scores)
    if any(type(value) is not int for value in values.values()):
        return None
    first, second, third = (min(TOP, max(0, values[key])) for key in KEYS)
    return first, second, third


def worth(scores: tuple[int, int, int] | None) -> float:
    """The worth of a verdict, in [0, 1]: its lowest score, so that no score makes up for another; 0 for no verdict."""
    return min(scores) / TOP if scores else 0.0


def reply(scores: Sequence[int]) -> str:
    """The verdict as the JSON text that a judge writes."""
    return json.dumps(dict(zip(KEYS, scores, strict=True)))


def is_same(one: str, other: str) -> bool:
    """Whether two sentences make the same statement, or, where one states nothing, have the same words and studies."""
    first, second = read(one), read(other)
    if first is None or second is None:
        return (plain_words(one), citations(one)) == (plain_words(other), citations(other))
    return first == second


def rule_scores(gold: Sequence[str], found: Sequence[str], studies: Collection[int]) -> list[int]:
    """The three scores of a reasoning, 0 to 10, in the order of `KEYS`; zeros if it or gold has no sentences.

    The share of gold sentences that are found, the share of sentences found that are gold, and the share of cited
    studies that exist. Each gold sentence is found at most once, so a repetition counts as a sentence that is not gold.
    """
    if not gold or not found:
        return [0, 0, 0]
    left = list(gold)
    for sentence in found:
        match = next((i for i, other in enumerate(left) if is_same(other, sentence)), None)
        if match is not None:
            del left[match]
    hits = len(gold) - len(left)
    shares = (hits / len(gold), hits / len(found), valid_citations(found, tuple(studies)))
    return [round(TOP * share) for share in shares]


def deny(sentence: str, rng: Random) -> str:
    """The opposite of a sentence."""
    opening = rng.choice(("It is not so that", "It is wrong that", "Nobody found that"))
    return f"{opening} {sentence[0].lower()}{sentence[1:]}"


def reword(sentence: str, rng: Random) -> str:
    """The same statement in one of its wordings; a sentence that states nothing stays as it is."""
    statement = read(sentence)
    return sentence if statement is None else to_sentence(statement, rng.randrange(3))


def falsify(sentence: str, rng: Random) -> str:
    """A false statement of the same form: another yield, stance or rating; else the opposite of the sentence."""
    statement = read(sentence)
    if statement is None:
        return deny(sentence, rng)
    kind, about = statement
    if kind.startswith("shows_"):
        kind = rng.choice([other for other in WORDINGS if other.startswith("shows_") and other != kind])
    elif kind in (CITES, RATING):
        slot = "stance" if kind == CITES else "rating"
        about = (*about[:-1], rng.choice([value for value in SLOTS[slot] if value != about[-1]]))
    else:
        return deny(sentence, rng)
    return to_sentence(Statement(kind, about), rng.randrange(3))


def lessons(judge: str, n: int, seed: int, cases: Iterable[Case]) -> Iterator[tuple[str, str]]:
    """`n` pairs of a guarded prompt to `judge` and the right reply.

    A share `SPOILT` of the texts makes no attempt. The others are spread evenly over the mean of the three scores: they
    keep some gold sentences, some in other words, and add sentences of other cases, falsified ones, padding, praise and
    studies that do not exist. Each of the cases has a reasoning.
    """
    usable = list(cases)
    rng = Random(f"imaging-lessons/{judge}/{seed}")
    given = Counter[int]()
    for _ in range(n):
        case = rng.choice(usable)
        studies = [abstract.number for abstract in case.facts.evidence]
        if rng.random() < SPOILT:
            text = _spoil(rng, case, usable)
            scores = rule_scores(case.key.reasoning, text, studies)
        else:
            made = [_candidate(rng, case, usable, studies) for _ in range(DRAWS)]
            scored = [(text, rule_scores(case.key.reasoning, text, studies)) for text in made]
            text, scores = min(scored, key=lambda pair: given[round(fmean(pair[1]))])
            given[round(fmean(scores))] += 1
        yield prompt(judge, " ".join(case.key.reasoning), " ".join(text), guarded=True), reply(scores)


def _parse(text: str) -> list[tuple[str, Any]] | None:
    """The keys and values of a JSON object, in order and with repeated keys; None for any other text."""
    try:
        found = json.loads(text, object_pairs_hook=list)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) else None


def _candidate(rng: Random, case: Case, cases: Sequence[Case], studies: Sequence[int]) -> list[str]:
    """Some gold sentences and some others. The size of each part is drawn separately and may be zero."""
    gold: list[str] = list(case.key.reasoning)
    kept = rng.sample(gold, rng.randint(0, len(gold)))
    kept.sort(key=gold.index)
    dropped = [sentence for sentence in gold if sentence not in kept]
    others = [sentence for sentence in rng.choice(cases).key.reasoning if sentence not in gold]
    foreign = rng.sample(others, rng.randint(0, len(others)) if rng.random() < 0.5 else 0)
    false = [falsify(sentence, rng) for sentence in dropped if rng.random() < 0.3]
    padding = rng.sample(PADDING + PRAISE, rng.choice((0, 0, 0, 1, 3)))
    kept = [reword(sentence, rng) if rng.random() < 0.7 else sentence for sentence in kept]
    text = kept + foreign + false + padding
    if rng.random() < 0.25:
        text.append(f"Study [{max([0, *studies]) + rng.randint(1, 9)}] found the same.")
    if rng.random() < 0.3:
        rng.shuffle(text)
    return text


def _spoil(rng: Random, case: Case, cases: Sequence[Case]) -> list[str]:
    """A text without an attempt: another case's reasoning, a repeated point, the evidence, denials, padding, praise."""
    gold: list[str] = list(case.key.reasoning)
    other: list[str] = list(rng.choice(cases).key.reasoning)
    if rng.random() < 0.5:
        other = [reword(sentence, rng) for sentence in other]
    copied = [sentence for abstract in case.facts.evidence for sentence in split(abstract.text)]
    kinds: tuple[Sequence[str], ...] = (
        other,
        other,
        [rng.choice(gold)] * rng.randint(2, 10),
        copied or other,
        [deny(sentence, rng) for sentence in gold],
        rng.sample(PADDING, rng.randint(1, 3)),
        rng.sample(PRAISE, rng.randint(1, 4)),
        [],
    )
    text = list(rng.choice(kinds))
    return text + rng.sample(PRAISE, 2) if rng.random() < 0.2 else text
