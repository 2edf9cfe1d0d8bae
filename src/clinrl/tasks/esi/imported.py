"""The key of imported triage cases. Their level is a nurse's or an expert's judgement."""

import re
from typing import Final, Literal

from pydantic import Field

from clinrl.tasks.esi.measured import BLANK
from clinrl.tasks.esi.rules import Sex
from clinrl.tasks.importing import Unclear, check_text, finds
from clinrl.types import Strict

RULE: Final = "imported"
"""Stands for the deciding rule of a case whose level no rule of this project gave."""

_SCALE = r"(?:e\.?s\.?i|emergency\W{1,3}severity\W{1,3}index)"
_WORD = r"(?:one|two|three|four|five)"
_ROMAN = r"(?-i:I{1,3}|IV|V|ii|iii|iv|v)"
_DIGIT = (
    r"[1-5](?![.:]?\d|\s?%|/(?!5\b)\d|[\s-]{0,2}(?:[ap]\.?m|h|hr|hour|min|sec|d|day|w|wk|week|mo|month|y|yr|year|yo"
    r"|time|x|l|lit(?:er|re)|mg|mcg|g|ml|cm|mm|m|ft|puff|dose|tab|tablet|unit|bag|episode|patient|person|people"
    r")s?\b)"
)
"""A digit that counts nothing and is no time, age, dose or fraction, except a fraction of five."""
_GRADE = r"(?:level|lvl\.?|score|category|cat\.?|class|code|priority|acuity|rating|grade|number|no\.?)"
_JOIN = (
    r"(?:(?:of|is|it|was|has|been|be|as|at|to|by|an?|the|assigned|given|gave|set|made|placed|rated|scored|determined|deemed"
    r"|judged|felt|would|considered|estimated|recorded|documented|changed|upgraded|downgraded|initially|immediately|directly"
    r"|straight|then|now|nurse|rn|staff|level"
    r"|assessed|chosen|designated|noted|remains|remained|equals|v\W?[45]|version [45])\W{1,3}){0,6}"
)
"""Up to six words that may stand between a scale and its level."""
NAMES_A_LEVEL: Final = (
    rf"(?i)\b{_SCALE}\)?\W{{0,5}}(?:\(?esi\)?\W{{0,3}})?{_JOIN}(?:{_GRADE}\W{{0,3}})?{_JOIN}(?:[1-5]|{_WORD}|{_ROMAN})\b"
    rf"|\b(?:level|grade)\W{{0,3}}(?:[1-5]|{_WORD}|{_ROMAN})\W{{1,3}}{_JOIN}(?:{_SCALE}|acuity|triage)\b"
    rf"|\b(?:[1-5]|{_WORD}|{_ROMAN}) (?:on|by|per) (?:the )?{_SCALE}\b"
    rf"|(?<!visual )\b(?:acuity|triaged?)\W{{1,3}}{_JOIN}{_GRADE}\W{{1,3}}{_JOIN}(?:{_DIGIT}|{_WORD}|{_ROMAN})\b"
    rf"|\bassigned\W{{1,3}}(?:(?:as|to|an?|the)\W{{1,3}}){{0,2}}level\W{{1,3}}(?:{_DIGIT}|{_WORD}|{_ROMAN})\b"
    r"(?!\W{1,3}trauma)"
    rf"|(?<!visual )\b(?:acuity|triage)(?:\s?(?:[:=#([-]|[-=]>)\s?| )(?:(?:of|is|was|as) )?(?:an? )?(?:{_DIGIT})\b"
    rf"|(?<!visual )\b(?:acuity|triage)\s?(?:[:=]|[-=]>)\s?(?:{_WORD}|{_ROMAN})\b"
    rf"|(?<!visual )\bacuity (?!of){_JOIN}(?:{_DIGIT}|{_WORD}|(?-i:II{{1,2}}))\b(?! of)"
    rf"|\btriaged (?:as )?(?:an? )?(?:{_DIGIT})\b|\btriaged as (?:an? )?(?:{_WORD}|{_ROMAN})\b"
)
"""A pattern of text that gives the answer away."""

_NAMES_A_LEVEL = re.compile(NAMES_A_LEVEL)


class ImportedKey(Strict):
    """The part of an imported case that only the scorer may see. None: not measured, or recorded in the text alone."""

    source: Literal["mietic-validation", "mietic", "mimic-iv-ed"]
    level: int = Field(ge=1, le=5)
    """The level that the nurse or the experts gave."""
    rule: Literal["imported"] = RULE
    boundary: Literal[""] = ""
    ambiguous: Literal[False] = False
    complaint: str = ""
    age_years: float | None = Field(default=None, ge=0, le=110)
    sex: Sex | None = None
    hr_bpm: int | None = None
    rr_bpm: int | None = None
    spo2_pct: int | None = None
    sbp_mmhg: int | None = None
    dbp_mmhg: int | None = None
    temp_c: float | None = None
    pain: int | None = None


def check(text: str, column: str) -> str:
    """The text. Raises Unclear for one that no prompt may hold: as in `check_text`, blank, or with its own answer."""
    check_text("" if text.lower() in BLANK else text, column)
    if finds(_NAMES_A_LEVEL, text.replace("_", " ")):  # as in ESI_level=3
        raise Unclear(column, "names a level")
    return text
