"""Imported triage cases: what is known of them, and the turn of a nurse who knows only that.

The level is a nurse's or an expert's judgement. Why it was given is not in the records, so a gold turn says what was
measured and the steps that follow from the level, and claims no finding.
"""

import re
from typing import Any, Final, Literal

from pydantic import Field

from clinrl.tasks.esi.rules import Sex
from clinrl.tasks.importing import Unclear, check_text
from clinrl.types import Message, Strict

RULE: Final = "imported"
"""What stands for the deciding rule of a case whose level no rule of ours gave."""

NAMES_A_LEVEL: Final = r"(?i)\besi\W{0,3}(?:level\W{0,3})?[1-5]\b|\b(?:acuity|triage) (?:level )?(?:of )?[1-5]\b"
"""Text that gives the answer away."""

_NAMES_A_LEVEL = re.compile(NAMES_A_LEVEL)


class ImportedKey(Strict):
    """What only the scorer may see of an imported case. None: not measured, or not told apart from the text."""

    source: Literal["mietic-validation", "mietic", "mimic-iv-ed"]
    level: int = Field(ge=1, le=5)
    """As the nurse or the experts gave it."""
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


def fields(source: str, level: int, **known: Any) -> dict[str, Any]:
    """A key as a plain mapping with every field, equal to what the record dumps."""
    return {
        "source": source, "level": level, "rule": RULE, "boundary": "", "ambiguous": False, "complaint": "",
        "age_years": None, "sex": None, "hr_bpm": None, "rr_bpm": None, "spo2_pct": None, "sbp_mmhg": None,
        "dbp_mmhg": None, "temp_c": None, "pain": None, **known,
    }  # fmt: skip


def check(text: str, column: str) -> None:
    """Refuse text that no prompt may hold: empty, too long, with an identifier, or with its own answer."""
    check_text(text, column)
    if _NAMES_A_LEVEL.search(text):
        raise Unclear(column, "names a level")


def gold(key: ImportedKey, *, thinking: bool) -> Message:
    """A turn that ends in the level."""
    level = key.level
    shown = {"HR": key.hr_bpm, "RR": key.rr_bpm, "SpO2": key.spo2_pct}
    vitals = ", ".join(f"{name} {'n/a' if value is None else value}" for name, value in shown.items())
    needs = {3: "two or more", 4: "one", 5: "none"}.get(level, "-")
    content = "\n".join(
        (
            "EXTRACTION:",
            f"- Chief complaint: {key.complaint or 'as told'}",
            f"- Vital signs: {vitals}",
            "- Red flags: not recorded",
            "ESI ALGORITHM:",
            f"- Step A (lifesaving): {'yes' if level == 1 else 'no'}",
            f"- Step B (high-risk): {'-' if level == 1 else 'yes' if level == 2 else 'no'}",
            f"- Step C (resources): {needs}",
            f"- Step D (vitals): {'-' if level <= 2 else 'no'}",
            f"ANSWER: ESI {level}",
        )
    )
    return Message(role="assistant", content=content, thinking=f"Measured: {vitals}." if thinking else None)
