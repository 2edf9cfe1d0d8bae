"""What a sentence commits to beside its topic: findings good or poor, for or against, figures, studies, modalities.

A sentence encoder puts "shows it well" and "shows it badly" close together, because the topic is the same. The cues
here are what two sentences of one topic may disagree on. They are a word list, made without a look at what any model
writes: what no cue covers is left to the encoder.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from clinrl.tasks.imaging.sentences import citations, drop_citations, plain_words

AXES: Final[Mapping[str, Mapping[str, str]]] = {
    "yield": {
        "good": r"well|excellent(?:ly)?|good|reliabl[ey]|accurate(?:ly)?"
        r"|(?:rarely|seldom|hardly ever|never) miss(?:es)?",
        "fair": r"in part|half|fair(?:ly)?|as often as not|moderate(?:ly)?",
        "poor": r"bad(?:ly)?|poor(?:ly)?|unreliabl[ey]|inaccurate(?:ly)?"
        r"|(?:seldom|rarely|hardly ever|never) (?:seen|shown|found)|(?:mostly|usually|often) miss(?:es)?",
    },
    "stance": {
        "for": r"support(?:s|ed|ing)?|agrees?|confirm(?:s|ed)?|in favou?r|favou?rs?|speaks? for|justif(?:y|ies|ied)",
        "against": r"otherwise|disagrees?|contradict(?:s|ed)?|oppose[sd]?|against|refute[sd]?|conflicts?",
        "beside": r"another question|other question|irrelevant|unrelated|elsewhere",
    },
    "safety": {
        "safe": r"safe(?:ly)?|harmless|no risk",
        "unsafe": r"unsafe|harmful|dangerous|hazardous|risky",
    },
    "use": {
        "adds": r"adds?|useful|helps?|helpful|valuable|beneficial|worthwhile",
        "idle": r"(?:adds?|settled) (?:nothing|little)|useless|futile|of no use|worthless",
    },
    "need": {
        "needed": r"need(?:s|ed)?|calls? for|required?|indicated|warranted|should not wait|cannot wait|must not wait",
        "spared": r"unnecessary|superfluous|can wait|too much|(?:need(?:s|ed)?|calls? for) no"
        r"|no (?:\w+ ){0,2}(?:is )?needed",
    },
    "flag": {"raised": r"red flags?|alarm signs?", "none": r"(?:no|without(?: any)?) (?:red flags?|alarm signs?)"},
    "fit": {"fits": r"appropriate|suitable", "unfit": r"inappropriate|unsuitable"},
}  # fmt: skip
"""Axis to side to the words of it. Sides of one axis exclude each other; a longer match is taken before a shorter."""

FLIPPED: Final[Mapping[str, str]] = {
    "good": "poor", "poor": "good", "for": "against", "against": "for", "safe": "unsafe", "unsafe": "safe",
    "adds": "idle", "idle": "adds", "needed": "spared", "spared": "needed", "raised": "none", "none": "raised",
    "fits": "unfit", "unfit": "fits", "fair": "fair", "beside": "for",
}  # fmt: skip
"""What a side becomes behind a negation."""

MODALITIES: Final[Mapping[str, str]] = {
    "xray": r"radiograph(?:y|s)?|x[ -]?rays?|plain films?",
    "ultrasound": r"ultrasound|ultrasonography|sonography|us scan",
    "fluoroscopy": r"fluoroscopy",
    "ct": r"ct|computed tomography",
    "mri": r"mri?|magnetic resonance(?: imaging)?",
    "scintigraphy": r"bone scan|scintigraphy",
    "pet": r"pet(?: ct)?",
    "angiography": r"angiograph(?:y|ies)|angiogram",
    "mammography": r"mammograph(?:y|ies)|mammogram",
}

_TURNS: Final = r"not|no|never|without|cannot|neither|nor|hardly|\w+n t"
_NEGATOR: Final = rf"{_TURNS}|nothing|none|lacks?|lacking"
REACH: Final = 5
"""Words before a cue, in its own clause, in which a negation turns it round."""
SAME_WORDS: Final = 0.7
"""From this share of common words on, of the words of both, two sentences are one with and one without a "not"."""

_AXES = {
    axis: re.compile("|".join(f"(?P<{side}>\\b(?:{words})\\b)" for side, words in reversed(list(sides.items()))))
    for axis, sides in AXES.items()
}
_DENIAL: Final = (
    r"it (?:is|s) (?:not (?:true|so|correct|right|the case)|wrong|false|untrue|incorrect) that"
    r"|nobody (?:found|said|showed|thinks) that"
)
_NOT = re.compile(rf"\b(?:{_DENIAL}|{_NEGATOR})\b")
_BROUGHT = re.compile(r"\b(?:do|does|did)\b|\|")
_TURN = re.compile(rf"\b(?:{_TURNS})\b")
_MODALITY = re.compile("|".join(f"(?P<{name}>\\b(?:{words})\\b)" for name, words in MODALITIES.items()))
_CLAUSE = re.compile(r"[,;:]\s")
_FIGURE = re.compile(r"[0-9]+(?:\.[0-9]+)?")


@dataclass(frozen=True)
class Cues:
    """What a sentence commits to."""

    sides: Mapping[str, frozenset[str]]
    """The sides that it takes, by axis. Both sides of one axis is a side of its own: neither good nor poor."""
    negations: int
    words: frozenset[str]
    """Its words without negations, and without what they bring along."""
    figures: Counter[str]
    studies: frozenset[int]
    modalities: frozenset[str]


@lru_cache(maxsize=4096)
def of(sentence: str) -> Cues:
    """The cues of a sentence. Takes time in proportion to its length."""
    text = " | ".join(plain_words(clause) for clause in _CLAUSE.split(drop_citations(sentence)))
    sides = {axis: frozenset(_sides(pattern, text)) for axis, pattern in _AXES.items()}
    return Cues(
        sides={axis: found for axis, found in sides.items() if found},
        negations=len(_NOT.findall(text)),
        words=frozenset(word.removesuffix("s") for word in _BROUGHT.sub(" ", _NOT.sub(" ", text)).split()),
        figures=Counter(_FIGURE.findall(drop_citations(sentence))),
        studies=frozenset(citations(sentence)),
        modalities=frozenset(match.lastgroup or "" for match in _MODALITY.finditer(text)),
    )


def agree(a: Cues, b: Cues) -> bool:
    """False if two sentences cannot both be meant by one of them. Symmetric; what only one of them says is no conflict.

    They disagree if they take different sides of an axis, name other figures, studies or modalities, or use the same
    words, one with a negation more than the other.
    """
    if any(b.sides.get(axis, found) != found for axis, found in a.sides.items()):
        return False
    if a.figures and b.figures and not (a.figures <= b.figures or b.figures <= a.figures):
        return False
    if any(x and y and not x & y for x, y in ((a.studies, b.studies), (a.modalities, b.modalities))):
        return False
    if a.negations == b.negations:
        return True
    either = a.words | b.words
    return not either or len(a.words & b.words) / len(either) < SAME_WORDS


def _sides(pattern: re.Pattern[str], text: str) -> Iterator[str]:
    for match in pattern.finditer(text):
        side = match.lastgroup or ""
        clause = text[max(0, match.start() - 80) : match.start()].rpartition("|")[2]
        before = " ".join(clause.split()[-REACH:])
        # A negation within the match, as in "adds nothing", is part of the cue and turns nothing.
        yield FLIPPED[side] if len(_TURN.findall(before)) % 2 else side
