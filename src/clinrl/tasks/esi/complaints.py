"""The complaints of the synthetic triage desk: who comes with one, what it may carry, and what it usually needs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from clinrl.tasks.esi.rules import Finding, Resource, Sex


@dataclass(frozen=True, kw_only=True)
class Complaint:
    """A reason for the visit. Its wordings are `complaints/<id>/says`."""

    id: str
    flags: tuple[Finding, ...] = ()
    """Findings that this complaint may carry beyond those of everybody."""
    needs: tuple[Resource, ...] = ()
    site: Literal["visceral", "limb", "none"] = "none"
    ages: tuple[float, float] = (0.01, 95)
    """In years, both included."""
    sex: Sex | None = None
    minor: bool = False
    """Nobody who is about to die comes with it."""


# fmt: off
COMPLAINTS: Final[tuple[Complaint, ...]] = (
    Complaint(id="chest pain", flags=("acs",), needs=("ECG",), site="visceral", ages=(16, 95)),
    Complaint(id="abdominal pain", flags=("sepsis_signs",), needs=("labs",), site="visceral", ages=(4, 95)),
    Complaint(id="flank pain", flags=("sepsis_signs",), needs=("labs",), site="visceral", ages=(14, 95)),
    Complaint(id="pelvic pain", flags=("ectopic",), needs=("labs",), site="visceral", ages=(14, 48), sex="female"),
    Complaint(id="testicular pain", flags=("torsion",), site="visceral", ages=(8, 60), sex="male"),
    Complaint(id="headache", flags=("thunderclap", "stroke_signs"), site="visceral", ages=(8, 95)),
    Complaint(id="back pain", flags=("limb_threat",), site="visceral", ages=(14, 95)),
    Complaint(id="sickle pain", flags=("acs",), needs=("labs",), site="visceral", ages=(5, 50)),
    Complaint(id="dizziness", flags=("stroke_signs", "new_confusion"), needs=("ECG",), ages=(12, 95)),
    Complaint(id="weakness", flags=("stroke_signs", "new_confusion", "sepsis_signs"), needs=("labs",), ages=(16, 95)),
    Complaint(id="shortness of breath", flags=("distress", "acs"), needs=("x-ray",), ages=(1, 95)),
    Complaint(id="cough", flags=("distress", "sepsis_signs")),
    Complaint(id="wheeze", flags=("distress",), needs=("IV meds",), ages=(1, 80)),
    Complaint(id="fever", flags=("sepsis_signs", "immunosuppressed"), ages=(0.01, 95)),
    Complaint(id="vomiting", flags=("sepsis_signs", "new_confusion")),
    Complaint(id="diarrhoea", flags=("sepsis_signs",)),
    Complaint(id="sore throat", flags=("distress",), ages=(3, 70)),
    Complaint(id="ear pain", ages=(0.6, 80), minor=True),
    Complaint(id="eye problem", flags=("vision_loss",), ages=(4, 90), minor=True),
    Complaint(id="eye exposure", flags=("chemical_eye", "vision_loss"), ages=(4, 80), minor=True),
    Complaint(id="rash", flags=("sepsis_signs",)),
    Complaint(id="allergic reaction", flags=("anaphylaxis", "distress"), ages=(1, 80)),
    Complaint(id="insect bite", flags=("anaphylaxis",), ages=(1, 85)),
    Complaint(id="dysuria", flags=("sepsis_signs",), needs=("labs",), ages=(12, 90)),
    Complaint(id="palpitations", flags=("acs",), needs=("ECG",), ages=(12, 90)),
    Complaint(id="syncope", flags=("stroke_signs", "high_fall"), needs=("ECG",), ages=(10, 95)),
    Complaint(id="high blood sugar", flags=("new_confusion",), needs=("labs",), ages=(6, 90)),
    Complaint(id="swollen leg", flags=("limb_threat",), needs=("ultrasound",), site="limb", ages=(18, 95)),
    Complaint(id="neck pain", flags=("stroke_signs",), site="visceral", ages=(14, 90)),
    Complaint(id="shoulder pain", flags=("acs", "limb_threat"), site="limb", ages=(14, 90)),
    Complaint(id="knee pain", flags=("limb_threat",), site="limb", ages=(8, 90), minor=True),
    Complaint(id="ankle injury", flags=("limb_threat", "open_fracture"), needs=("x-ray",), site="limb", ages=(5, 90)),
    Complaint(id="wrist injury", flags=("limb_threat", "open_fracture"), needs=("x-ray",), site="limb", ages=(4, 90)),
    Complaint(id="leg injury", flags=("limb_threat", "open_fracture"), site="limb", ages=(3, 90)),
    Complaint(id="arm wound", flags=("limb_threat",), needs=("procedure",), site="limb", ages=(4, 90)),
    Complaint(id="hand laceration", flags=("limb_threat",), needs=("procedure",), site="limb", ages=(4, 90)),
    Complaint(id="torso wound", flags=("penetrating", "distress"), site="visceral", ages=(12, 80)),
    Complaint(id="dog bite", flags=("limb_threat",), site="limb", ages=(2, 85)),
    Complaint(id="fall", flags=("high_fall", "open_fracture", "new_confusion"), site="limb", ages=(2, 95)),
    Complaint(id="road accident", flags=("high_fall", "open_fracture", "penetrating"), site="limb", ages=(4, 90)),
    Complaint(id="assault", flags=("assaulted", "penetrating"), site="limb", ages=(14, 80)),
    Complaint(id="head injury", flags=("new_confusion", "high_fall"), ages=(1, 95)),
    Complaint(id="burn", flags=("limb_threat", "major_burn"), site="limb", ages=(1, 85)),
    Complaint(id="needle stick", needs=("labs",), ages=(18, 68), minor=True),
    Complaint(id="pregnancy problem", flags=("pregnancy_emergency",), ages=(15, 46), sex="female"),
    Complaint(id="low mood", flags=("suicidal", "overdose"), ages=(12, 85)),
    Complaint(id="anxiety", flags=("suicidal", "acs"), ages=(12, 80)),
    Complaint(id="agitation", flags=("dangerous_behaviour", "new_confusion"), ages=(14, 85)),
    Complaint(id="intoxication", flags=("overdose", "new_confusion", "dangerous_behaviour"), ages=(14, 75)),
    Complaint(id="nosebleed", ages=(3, 95), minor=True),
    Complaint(id="constipation", ages=(1, 95), minor=True),
    Complaint(id="toothache", ages=(5, 85), minor=True),
    Complaint(id="foreign body", ages=(1, 85), minor=True),
    Complaint(id="medication refill", ages=(18, 90), minor=True),
    Complaint(id="wound check", flags=("sepsis_signs",), ages=(3, 90), minor=True),
    Complaint(id="work note", ages=(18, 66), minor=True),
)
# fmt: on

HELD_OUT: Final = frozenset(
    {"agitation", "dog bite", "insect bite", "neck pain", "nosebleed", "shoulder pain", "swollen leg", "syncope"}
)
"""Complaints of no training data: the base alone has met them."""

FINDING_SAYS: Final[Mapping[Finding, str]] = {
    "arrest": "arrest", "unresponsive": "unresponsive", "seizing": "seizing", "distress": "distress",
    "slow_breathing": "slow breathing", "hypoperfusion": "poor perfusion", "anaphylaxis": "anaphylaxis",
    "overdose": "overdose", "major_bleeding": "major bleeding", "intubated": "intubated", "chest_tube": "chest tube",
    "central_line": "central line", "acs": "ACS features", "stroke_signs": "stroke signs",
    "thunderclap": "thunderclap", "new_confusion": "new confusion", "sepsis_signs": "sepsis risk",
    "immunosuppressed": "chemotherapy", "ectopic": "ectopic risk", "pregnancy_emergency": "late pregnancy",
    "torsion": "torsion risk", "suicidal": "suicidal", "dangerous_behaviour": "danger to others",
    "assaulted": "assaulted", "high_fall": "high fall", "limb_threat": "limb threat", "vision_loss": "vision loss",
    "chemical_eye": "chemical in the eye", "major_burn": "major burn", "open_fracture": "open fracture",
    "penetrating": "penetrating wound", "comfortable": "looks at ease",
}  # fmt: skip
"""What the extraction calls a finding. Its wordings are `findings/<id>/yes` and `findings/<id>/no`."""
