"""The prompt of a judge about a reasoning, and its verdict: as published, and so that it cannot be forged.

The judge compares two texts and writes three whole scores from 0 to 10 as JSON. The published reader takes whatever
numbers the last JSON object holds. The corrected one wants the three keys and nothing else, takes the first object,
bounds the scores, and counts the weakest: a text that is long enough to hold every gold point is not a good one.

The lessons of an embedded judge are counted: which gold sentences a reasoning holds, how much else, and whether the
studies that it cites exist.
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
from clinrl.tasks.imaging.statements import CITES, RATING, SLOTS, WORDINGS, Statement, read, word
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
"""The question of a judge, and what stands before gold, before the judged text and before the reply."""
PADDING: Final = _WORDS.padding
"""Sentences that fit every case and say nothing about any."""
PRAISE: Final = _WORDS.praise
"""Sentences by which a text praises itself. The attacks use others, which show what a judge learned."""

SPOILT: Final = 0.3
"""Share of lessons whose text does not even try: it borrows, repeats, copies or praises itself."""

DRAWS: Final = 12
"""Candidates that are made for one lesson; the one is kept whose mean score was given least often so far."""

_UNSAFE = re.compile(rf"</?\w{{1,20}}>|[{{}}<>\"\u201c\u201d`\\\s]|{'|'.join(KEYS)}", re.IGNORECASE)
_OBJECT = re.compile(r"\{[^{}]*\}")


def prompt(judge: str, gold: str, reasoning: str, *, guarded: bool) -> str:
    """What a judge reads. `guarded`: the judged text has no braces, tags, quotes, line ends or names of scores, so that
    it can neither leave its place nor write the verdict; otherwise it is pasted as it is, as published."""
    question, one, two, reply = WORDING[judge]
    text = " ".join(_UNSAFE.sub(" ", reasoning).split()) if guarded else reasoning
    return f'{question}\n{one}{gold}"\n{two}{text}"\n{reply}'


def published_verdict(text: str) -> float:
    """The published reward of a verdict: the mean of the numbers in its last JSON object, divided by 10.

    Not bounded, and whatever the keys are called: a 100 is worth 10, one number alone is the whole verdict. 0 for
    anything but whole numbers, and for no object. Never raises.
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

    The first JSON object counts, since what a judge writes after its verdict is no verdict. It must have the three
    keys, each once, and no other, with whole numbers. Never raises.
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
    """What a verdict is worth, in [0, 1]: its lowest score, so that none makes up for another; 0 for no verdict."""
    return min(scores) / TOP if scores else 0.0


def reply(scores: Sequence[int]) -> str:
    """The verdict as a judge writes it."""
    return json.dumps(dict(zip(KEYS, scores, strict=True)))


def is_same(one: str, other: str) -> bool:
    """Whether two sentences make the same statement, or, where one states nothing, have the same words and studies."""
    first, second = read(one), read(other)
    if first is None or second is None:
        return (plain_words(one), citations(one)) == (plain_words(other), citations(other))
    return first == second


def rule_scores(gold: Sequence[str], found: Sequence[str], studies: Collection[int]) -> list[int]:
    """The three scores of a reasoning, 0 to 10, in the order of `KEYS`; zeros for one without sentences.

    The share of gold sentences that are found, the share of sentences found that are gold, and the share of cited
    studies that exist. Each sentence counts once: a repeated one is one too many.
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
    return sentence if statement is None else word(statement, rng.randrange(3))


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
    return word(Statement(kind, about), rng.randrange(3))


def lessons(judge: str, n: int, seed: int, cases: Iterable[Case]) -> Iterator[tuple[str, str]]:
    """`n` pairs of a guarded prompt to `judge` and the right reply.

    `SPOILT` of the texts do not try. The others are spread evenly over the mean of the three scores: they keep some
    gold sentences, some in other words, and add sentences of other cases, falsified ones, padding, praise and studies
    that do not exist. A case without reasoning is left out. Raises ValueError if none has any.
    """
    usable = [case for case in cases if case.key.reasoning]
    if not usable:
        raise ValueError("lessons need cases with reasoning, and got none")
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
    """Keys and values of a JSON object, in order, repeated keys and all; None if it is none."""
    try:
        found = json.loads(text, object_pairs_hook=list)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) else None


def _candidate(rng: Random, case: Case, cases: Sequence[Case], studies: Sequence[int]) -> list[str]:
    """Sentences out of gold and out of what is not gold, each part of a size of its own, sometimes none."""
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
    """A text that does not try: somebody else's reasoning, one point again and again, the evidence, praise, or air."""
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
