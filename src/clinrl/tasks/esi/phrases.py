"""The words of the synthetic triage desk: complaints, findings and resource cues, each said in several ways.

Every finding has ways to say that it holds and ways to say that it does not (denied, past, somebody else's), so a word
alone never decides. All text is written for this project; none comes from a handbook or a record.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from clinrl.tasks.esi.rules import FindingId, Resource, Sex


@dataclass(frozen=True, kw_only=True)
class Complaint:
    """A reason for the visit, who comes with it, and what it usually needs by itself."""

    id: str
    says: tuple[str, ...]
    flags: tuple[FindingId, ...] = ()
    """Findings that this complaint may carry beyond those of everybody."""
    needs: tuple[Resource, ...] = ()
    site: Literal["visceral", "limb", "none"] = "none"
    ages: tuple[float, float] = (0.01, 95)
    sex: Sex | None = None


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is true or not true of a patient."""

    id: FindingId
    says: str
    """What the extraction calls it."""
    yes: tuple[str, ...]
    no: tuple[str, ...]


# fmt: off
COMPLAINTS: tuple[Complaint, ...] = (
    Complaint(id="chest pain", says=("chest pain", "pain in the chest", "chest tightness"), flags=("acs",), needs=("ECG",), site="visceral", ages=(16, 95)),
    Complaint(id="abdominal pain", says=("abdominal pain", "belly pain", "stomach ache"), flags=("sepsis_signs",), needs=("labs",), site="visceral", ages=(4, 95)),
    Complaint(id="flank pain", says=("flank pain", "pain in the side", "loin pain"), flags=("sepsis_signs",), needs=("labs",), site="visceral", ages=(14, 95)),
    Complaint(id="pelvic pain", says=("pelvic pain", "lower abdominal cramps", "pelvic cramping"), flags=("ectopic",), needs=("labs",), site="visceral", ages=(14, 48), sex="female"),
    Complaint(id="testicular pain", says=("testicular pain", "scrotal pain", "groin and testicle pain"), flags=("torsion",), site="visceral", ages=(8, 60), sex="male"),
    Complaint(id="headache", says=("headache", "head pain", "migraine-like headache"), flags=("thunderclap", "stroke_signs"), site="visceral", ages=(8, 95)),
    Complaint(id="back pain", says=("back pain", "low back pain", "lumbar pain"), flags=("limb_threat",), site="visceral", ages=(14, 95)),
    Complaint(id="sickle pain", says=("sickle cell pain", "pain crisis", "sickle crisis"), flags=("acs",), needs=("labs",), site="visceral", ages=(5, 50)),
    Complaint(id="dizziness", says=("dizziness", "light-headedness", "feeling faint"), flags=("stroke_signs", "new_confusion"), needs=("ECG",), ages=(12, 95)),
    Complaint(id="weakness", says=("weakness", "feeling weak", "general weakness"), flags=("stroke_signs", "new_confusion", "sepsis_signs"), needs=("labs",), ages=(16, 95)),
    Complaint(id="shortness of breath", says=("shortness of breath", "trouble breathing", "breathlessness"), flags=("distress", "acs"), needs=("x-ray",), ages=(1, 95)),
    Complaint(id="cough", says=("cough", "a bad cough", "chesty cough"), flags=("distress", "sepsis_signs")),
    Complaint(id="wheeze", says=("wheezing", "wheeze", "asthma flare"), flags=("distress",), needs=("IV meds",), ages=(1, 80)),
    Complaint(id="fever", says=("fever", "high temperature", "feeling hot"), flags=("sepsis_signs", "immunosuppressed"), ages=(0.01, 95)),
    Complaint(id="vomiting", says=("vomiting", "nausea and vomiting", "throwing up"), flags=("sepsis_signs", "new_confusion")),
    Complaint(id="diarrhoea", says=("diarrhoea", "loose stools", "watery stools"), flags=("sepsis_signs",)),
    Complaint(id="sore throat", says=("sore throat", "throat pain", "painful swallowing"), flags=("distress",), ages=(3, 70)),
    Complaint(id="ear pain", says=("ear pain", "earache", "pain in the ear"), ages=(0.6, 80)),
    Complaint(id="eye problem", says=("eye complaint", "red eye", "eye irritation"), flags=("vision_loss",), ages=(4, 90)),
    Complaint(id="rash", says=("rash", "itchy rash", "skin rash"), flags=("sepsis_signs",)),
    Complaint(id="allergic reaction", says=("allergic reaction", "hives", "reaction to food"), flags=("anaphylaxis", "distress"), ages=(1, 80)),
    Complaint(id="dysuria", says=("burning on urination", "dysuria", "painful urination"), flags=("sepsis_signs",), needs=("labs",), ages=(12, 90)),
    Complaint(id="palpitations", says=("palpitations", "racing heart", "fluttering heart"), flags=("acs",), needs=("ECG",), ages=(12, 90)),
    Complaint(id="ankle injury", says=("ankle injury", "twisted ankle", "ankle sprain"), flags=("limb_threat", "open_fracture"), needs=("x-ray",), site="limb", ages=(5, 90)),
    Complaint(id="wrist injury", says=("wrist injury", "hurt wrist", "wrist pain after a fall"), flags=("limb_threat", "open_fracture"), needs=("x-ray",), site="limb", ages=(4, 90)),
    Complaint(id="leg injury", says=("leg injury", "injured leg", "lower leg injury"), flags=("limb_threat", "open_fracture", "penetrating"), site="limb", ages=(3, 90)),
    Complaint(id="arm wound", says=("arm wound", "wound on the arm", "forearm wound"), flags=("limb_threat", "penetrating"), needs=("procedure",), site="limb", ages=(4, 90)),
    Complaint(id="hand laceration", says=("hand laceration", "cut hand", "cut on the hand"), flags=("limb_threat", "penetrating"), needs=("procedure",), site="limb", ages=(4, 90)),
    Complaint(id="torso wound", says=("wound to the side", "wound on the back", "injury to the trunk"), flags=("penetrating", "distress"), site="visceral", ages=(12, 80)),
    Complaint(id="fall", says=("fall", "a fall", "injuries from a fall"), flags=("high_fall", "open_fracture", "new_confusion"), site="limb", ages=(2, 95)),
    Complaint(id="road accident", says=("road accident", "car crash", "bicycle crash"), flags=("high_fall", "open_fracture", "penetrating"), site="limb", ages=(4, 90)),
    Complaint(id="head injury", says=("head injury", "bump to the head", "blow to the head"), flags=("new_confusion", "high_fall"), ages=(1, 95)),
    Complaint(id="burn", says=("burn", "scald", "burn to the arm"), flags=("limb_threat",), site="limb", ages=(1, 85)),
    Complaint(id="low mood", says=("low mood", "feeling depressed", "emotional crisis"), flags=("suicidal", "overdose"), ages=(12, 85)),
    Complaint(id="anxiety", says=("anxiety", "panic attack", "feeling anxious"), flags=("suicidal", "acs"), ages=(12, 80)),
    Complaint(id="intoxication", says=("intoxication", "alcohol intoxication", "drug use"), flags=("overdose", "new_confusion"), ages=(14, 75)),
    Complaint(id="medication refill", says=("medication refill", "a repeat prescription", "running out of tablets"), ages=(18, 90)),
    Complaint(id="wound check", says=("wound check", "suture removal", "dressing change"), flags=("sepsis_signs",), ages=(3, 90)),
    Complaint(id="tooth pain", says=("toothache", "tooth pain", "dental pain"), flags=("sepsis_signs",), site="limb", ages=(5, 85)),
    Complaint(id="knee pain", says=("knee pain", "sore knee", "swollen knee"), flags=("limb_threat",), site="limb", ages=(8, 90)),
)

FINDINGS: Mapping[str, Finding] = {
    finding.id: finding
    for finding in (
        Finding(id="arrest", says="arrest", yes=("CPR in progress on arrival", "no pulse on arrival", "pulseless when lifted from the car", "stopped breathing in the waiting room"), no=("pulses strong throughout", "never lost a pulse")),
        Finding(id="unresponsive", says="unresponsive", yes=("responds only to pain", "does not wake to voice or touch", "unresponsive on the stretcher", "no response to commands"), no=("alert and talking", "awake and follows commands", "was drowsy at home but is alert now")),
        Finding(id="seizing", says="seizing", yes=("still seizing on arrival", "actively convulsing", "seizure ongoing at the door"), no=("seizure last year, none today", "no seizure activity", "family feared a seizure but there was none")),
        Finding(id="distress", says="distress", yes=("using neck muscles to breathe", "sitting in tripod position", "speaks two words at a time", "marked work of breathing"), no=("speaks full sentences", "breathing is easy", "no increased work of breathing")),
        Finding(id="hypoperfusion", says="poor perfusion", yes=("skin cold and mottled", "pale, clammy and grey", "capillary refill five seconds"), no=("skin warm and dry", "good colour", "capillary refill brisk")),
        Finding(id="anaphylaxis", says="anaphylaxis", yes=("tongue and throat swelling fast", "throat closing with wheeze", "lip swelling and hoarse voice getting worse"), no=("no tongue or throat swelling", "lips normal, voice clear")),
        Finding(id="overdose", says="overdose", yes=("took a large overdose of tablets", "swallowed a whole bottle of pills", "injected far more opioid than usual"), no=("denies any overdose", "took tablets only as prescribed")),
        Finding(id="major_bleeding", says="major bleeding", yes=("blood spurting through the dressing", "bleeding heavily despite pressure", "soaking towels with bright blood"), no=("bleeding stopped at home", "only minor oozing", "no active bleeding")),
        Finding(id="intubated", says="intubated", yes=("intubated by the ambulance crew", "arrives intubated and bagged", "was intubated at the sending clinic", "intubation done in the field"), no=("extubated two days ago after surgery", "was never intubated", "has a do-not-intubate order", "not intubated")),
        Finding(id="chest_tube", says="chest tube", yes=("chest tube placed before transfer", "arrives with a chest tube draining", "crew placed a chest tube on the left"), no=("chest tube removed last month", "no chest tube was needed", "chest tube taken out before discharge")),
        Finding(id="central_line", says="central line", yes=("central line placed at the sending hospital", "central line running in the neck", "femoral central line put in by the transfer team"), no=("central line removed last week", "no central line", "central line taken out in spring")),
        Finding(id="acs", says="ACS features", yes=("pressure spreading to the left arm", "crushing, with sweating and jaw pain", "heavy like a weight and sweaty"), no=("sharp and worse on pressing the ribs", "hurts only with movement", "no spread to arm or jaw")),
        Finding(id="stroke_signs", says="stroke signs", yes=("face drooping since an hour ago", "new slurred speech", "right arm suddenly weak"), no=("face symmetric, speech clear", "no weakness on either side", "old weakness from a past stroke, unchanged")),
        Finding(id="thunderclap", says="thunderclap", yes=("worst headache of life, within seconds", "sudden explosive onset with stiff neck"), no=("came on slowly over the day", "same as the usual migraines", "neck supple")),
        Finding(id="new_confusion", says="new confusion", yes=("newly confused since this morning", "does not know the year, normally sharp", "suddenly disoriented"), no=("confused at baseline from dementia, unchanged", "oriented to person and place", "no new confusion")),
        Finding(id="sepsis_signs", says="sepsis risk", yes=("shaking chills and looks toxic", "rigors with spreading redness", "looks septic to the nurse"), no=("no chills", "looks well", "denies rigors")),
        Finding(id="immunosuppressed", says="chemotherapy", yes=("last chemotherapy one week ago", "on chemotherapy for lymphoma", "kidney transplant on immune suppression"), no=("finished chemotherapy ten years ago", "no immune problems", "sister is on chemotherapy")),
        Finding(id="ectopic", says="ectopic risk", yes=("six weeks pregnant with one-sided pain", "positive pregnancy test and spotting"), no=("pregnancy test negative", "not pregnant, had a hysterectomy")),
        Finding(id="torsion", says="torsion risk", yes=("sudden onset, testicle riding high", "woke with sudden pain, testicle swollen"), no=("came on over five days", "ache for weeks, no swelling")),
        Finding(id="suicidal", says="suicidal", yes=("has a plan to end life tonight", "wants to die and has a rope at home", "says will jump if sent home"), no=("denies any wish to die", "no thoughts of self-harm", "felt suicidal years ago, not now")),
        Finding(id="high_fall", says="high fall", yes=("fell eight metres from a roof", "dropped from the third floor", "thrown from the vehicle"), no=("slipped from standing height", "rolled off the sofa", "walked about at the scene")),
        Finding(id="limb_threat", says="limb threat", yes=("foot cold with no pulse", "fingers numb and blue", "numb below the injury, no pulse"), no=("pulses and feeling intact", "warm, moves all digits", "no numbness")),
        Finding(id="vision_loss", says="vision loss", yes=("sudden loss of sight in one eye", "went blind in the left eye an hour ago"), no=("vision 20/20", "sight unchanged", "no loss of vision")),
        Finding(id="open_fracture", says="open fracture", yes=("open fracture with bone visible", "bone through the skin, open fracture", "open fracture of the shin"), no=("closed fracture on the outside film", "no open fracture", "skin intact, no open fracture seen")),
        Finding(id="penetrating", says="penetrating wound", yes=("penetrating wound from a knife", "stab wound from a kitchen knife", "gunshot wound, small entry hole", "penetrating nail injury"), no=("denies penetrating injury", "no penetrating wound, only a graze", "old stab wound scar from 2010")),
    )
}

CUES: Mapping[Resource, tuple[str, ...]] = {
    "labs": ("blood work expected", "urine sample to be sent", "will need blood tests", "swab for culture to be sent"),
    "ECG": ("tracing of the heart planned", "ECG to be done", "twelve-lead wanted"),
    "x-ray": ("plain film planned", "needs a radiograph", "film of the bone wanted"),
    "CT": ("CT planned", "will go to the scanner for CT", "CT of the area expected"),
    "ultrasound": ("ultrasound planned", "duplex scan wanted", "sonogram to be done"),
    "IV fluids": ("dry and needs fluids by vein", "will get a litre of saline", "IV fluids for dehydration"),
    "IV meds": ("needs medicine by vein", "nebuliser treatments planned", "antibiotic injection due"),
    "consult": ("surgeon will be asked to see", "specialist consult expected", "social work and psychiatry consult wanted"),
    "procedure": ("needs stitches", "wound to be sutured", "bladder catheter to be placed", "abscess to be drained"),
    "sedation": ("joint to be reduced under sedation", "procedural sedation planned"),
}
"""How the narrative hints at each resource type (point C)."""

NOT_RESOURCES: tuple[str, ...] = (
    "wants a prescription only",
    "splint and crutches will do",
    "tetanus booster due",
    "paracetamol by mouth given",
    "finger-stick glucose is normal",
    "simple dressing applied",
    "saline lock in place",
    "will phone the family doctor",
    "oral antibiotics expected",
    "urine dip done at the bedside",
    "sling for comfort",
    "ibuprofen tablet given",
)
"""Care that does not count as a resource (v4 and v5, point C)."""

HISTORY: tuple[str, ...] = (
    "high blood pressure", "type 2 diabetes", "asthma", "COPD", "gallstones", "kidney stones", "atrial fibrillation", "hypothyroidism",
    "depression", "migraine", "no medical problems", "gout", "reflux", "a past stroke", "dementia", "heart failure", "anaemia", "eczema",
    "appendix removal", "a hip replacement", "beta blocker use", "warfarin use", "smoking", "seasonal allergies",
)

CHILD_HISTORY: tuple[str, ...] = ("asthma", "eczema", "no medical problems", "seasonal allergies", "appendix removal", "ear infections", "croup")

ONSET: tuple[str, ...] = (
    "since this morning", "for two days", "for an hour", "since last night", "for about a week", "on and off for a month", "since lunch",
    "for three hours", "since yesterday", "for half a day", "that began at home", "since waking", "since the weekend", "for some hours",
)

ARRIVAL: tuple[str, ...] = ("walks in", "arrives by ambulance", "is brought by family", "comes by car", "is brought by police", "comes in a wheelchair")
INFANT_ARRIVAL: tuple[str, ...] = ("is carried in", "arrives by ambulance", "is brought by family", "comes by car")

BYSTANDER: tuple[str, ...] = (
    "Brother was intubated last year.", "Father died with a chest tube in 2015.", "Mother has a central line for dialysis.",
    "Friend had an open fracture in the same crash.", "Partner had pain 9/10 with the same illness and is better.",
    "Worried about stroke because an uncle had one.", "A neighbour with the same cough needed oxygen.", "Child at home has a fever.",
)
"""True of somebody else, so it decides nothing."""
# fmt: on
