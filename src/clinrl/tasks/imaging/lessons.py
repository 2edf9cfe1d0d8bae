"""What an embedded judge learns: two reasonings and the scores that follow from how the second was made.

The scores are counted, not felt: which of the gold sentences are there, how much else is, and whether the studies that
are cited exist. Nobody's opinion is in them.
"""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from random import Random
from typing import Final

from clinrl.records import Case
from clinrl.tasks.imaging.judging import TOP, prompt, reply
from clinrl.tasks.imaging.sentences import citations, plain
from clinrl.tasks.imaging.similarity import valid_citations

Same = Callable[[str, str], bool]
Rewrite = Callable[[str, Random], str]

PADDING: Final = (
    "Let us go through this step by step.",
    "Several points should be weighed here.",
    "Many factors matter in such a case.",
    "The clinical picture has to be considered as a whole.",
    "Every option has its merits and its limits.",
    "A careful choice serves the patient best.",
)
"""Sentences that fit every case and say nothing about any."""

DRAWS: Final = 12
"""Candidates that are made for one lesson; the one nearest to the score that is wanted is kept."""


def identical(a: str, b: str) -> bool:
    """The same words and the same studies cited."""
    return (plain(a), citations(a)) == (plain(b), citations(b))


def rule_scores(gold: Sequence[str], said: Sequence[str], known: Collection[int], same: Same = identical) -> list[int]:
    """The three scores, 0 to 10, in the order of `judging.KEYS`; zeros where nothing is said.

    The share of gold sentences that are said, the share of what is said that is gold, and the share of cited studies
    that are among the `known`. Each sentence counts once: one said twice is once too many.
    """
    if not gold or not said:
        return [0, 0, 0]
    left = list(gold)
    for sentence in said:
        match = next((i for i, other in enumerate(left) if same(other, sentence)), None)
        if match is not None:
            del left[match]
    found = len(gold) - len(left)
    shares = (found / len(gold), found / len(said), valid_citations(said, tuple(known)))
    return [round(TOP * share) for share in shares]


def denied(sentence: str, rng: Random) -> str:
    """The opposite of a sentence, in plain words."""
    opening = rng.choice(("It is not so that", "It is wrong that", "Nobody found that"))
    return f"{opening} {sentence[0].lower()}{sentence[1:]}"


def lessons(
    judge: str,
    n: int,
    seed: int,
    cases: Iterable[Case],
    *,
    falsify: Rewrite = denied,
    paraphrase: Rewrite | None = None,
    same: Same = identical,
) -> Iterator[tuple[str, str]]:
    """`n` pairs of a guarded prompt to `judge` and the right reply, spread evenly over the mean of the three scores.

    Candidates keep some gold sentences (in other words, if `paraphrase` is given: then `same` must know them again)
    and add sentences of other cases, falsified ones, padding and studies that do not exist. A case without reasoning
    is left out. Raises ValueError for fewer than two cases with any.
    """
    usable = [case for case in cases if case.key.reasoning]
    if len(usable) < 2:
        raise ValueError(f"lessons need two cases with reasoning, to mix; got {len(usable)}")
    rng = Random(f"imaging-lessons/{judge}/{seed}")
    for _ in range(n):
        wanted = rng.randint(0, TOP)
        case = rng.choice(usable)
        known = [abstract.number for abstract in case.facts.evidence]
        made = [_candidate(rng, case, usable, known, falsify, paraphrase) for _ in range(DRAWS)]
        scored = [(said, rule_scores(case.key.reasoning, said, known, same)) for said in made]
        said, scores = min(scored, key=lambda pair: abs(sum(pair[1]) / len(pair[1]) - wanted))
        yield prompt(judge, " ".join(case.key.reasoning), " ".join(said), guarded=True), reply(scores)


def spread(pairs: Iterable[tuple[str, str]]) -> Counter[int]:
    """How many lessons have which mean score, rounded."""
    return Counter(round(sum(json.loads(right).values()) / 3) for _, right in pairs)


def _candidate(
    rng: Random, case: Case, cases: Sequence[Case], known: Sequence[int], falsify: Rewrite, paraphrase: Rewrite | None
) -> list[str]:
    """Sentences out of gold and out of what is not gold, each part of a size of its own, sometimes none."""
    gold: list[str] = list(case.key.reasoning)
    kept = rng.sample(gold, rng.randint(0, len(gold)))
    kept.sort(key=gold.index)
    dropped = [sentence for sentence in gold if sentence not in kept]
    others = [sentence for sentence in rng.choice(cases).key.reasoning if sentence not in gold]
    foreign = rng.sample(others, rng.randint(0, len(others)) if rng.random() < 0.5 else 0)
    false = [falsify(sentence, rng) for sentence in dropped if rng.random() < 0.3]
    padding = rng.sample(PADDING, rng.choice((0, 0, 0, 1, 3)))
    if paraphrase is not None:
        kept = [paraphrase(sentence, rng) if rng.random() < 0.7 else sentence for sentence in kept]
    said = kept + foreign + false + padding
    if rng.random() < 0.25:
        said.append(f"Study [{max([0, *known]) + rng.randint(1, 9)}] found the same.")
    if rng.random() < 0.3:
        rng.shuffle(said)
    return said
