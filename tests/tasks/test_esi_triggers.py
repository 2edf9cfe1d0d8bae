"""Triggers are read in the narrative, with negation, history, removal and whose they are."""

import importlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clinrl.tasks.esi import triggers
from clinrl.tasks.esi.triggers import done_intervention, open_injury, pain_0_10, severe_pain


@pytest.mark.parametrize(
    "narrative",
    [
        "Intubated by EMS.",
        "Arrives intubated and bagged",
        "reintubated en route after self-extubation",
        "45 yo, no fever, intubated in the field",
        "No pulse on scene and chest tube placed by the flight crew.",
        "Denies allergies and has a chest tube",
        "Hypoxic prior to intubation",
        "Not sedated but intubated.",
        "No response to BiPAP requiring intubation.",
        "Unresponsive, intubation on scene without complications.",
        "Chest tube draining on the left.",
        "Left chest-tube in place, no breath sounds",
        "Thoracostomy tube in place",
        "Central venous catheter placed at the sending hospital.",
        "Denies allergies. Central line in the neck.",
        "Not intubated on scene; intubated on arrival of the helicopter",
        "Intubated and chest tube removed.",
        "BiPAP failed, intubated",
        "Intubated after two failed attempts",
        "Not only intubated but also sedated",
        "No fever\nIntubated",
        "His wife reports he was intubated at the clinic.",
        "History of COPD. Intubated by the crew.",
        "Intubated, not responding to pain",
        "May have aspirated. Intubated on scene x1",
        "Intubated x2 attempts by EMS, tube confirmed",
        "PMH asthma. Intubated twice on scene, second tube good",
        "In May was intubated on scene",
        "Not responding to her name or loud voice on scene intubated",
    ],
)
def test_an_intervention_is_done(narrative: str) -> None:
    assert done_intervention(narrative)


@pytest.mark.parametrize(
    "narrative",
    [
        "",
        "Chest pain, tubes of paint at work, central chest discomfort in line with reflux",
        "Extubated yesterday.",
        "Not intubated.",
        "Unable to intubate.",
        "failed intubation x3, bagged",
        "Attempted intubation, unsuccessful",
        "Intubation attempts failed",
        "intubation attempted but failed",
        "needs to be intubated",
        "Was never intubated",
        "has not been intubated",
        "wasn't intubated",
        "wasn\u2019t intubated",
        "Has a do-not-intubate order.",
        "DNR, do not intubate",
        "non-intubated",
        "neither sedated nor intubated",
        "No chest tube.",
        "no chest tube or central line",
        "No fever, rash, or chest tube",
        "no chest tube, central line, or other device",
        "without a central line",
        "Chest tube removed.",
        "Chest tube was removed two days ago",
        "chest tube taken out before discharge",
        "Chest tube and central line removed last week",
        "Central line removed.",
        "central line was discontinued",
        "chest tube not needed",
        "chest tube was not placed",
        "no need for intubation",
        "refuses intubation",
        "intubation declined.",
        "Intubated last week, extubated since",
        "Prior intubations for asthma",
        "history of asthma requiring intubation",
        "intubated twice in the past",
        "previously intubated",
        "intubated 5 years ago",
        "Brother was intubated last year.",
        "Mother has a central line for dialysis.",
        "Father died with a chest tube.",
        "Tiring, may need intubation",
        "anticipate early intubation",
        "Airway swelling, will be intubated in resus",
        "PMH asthma, intubated x2",
        "prepared for a central line",
        "History of asthma, intubated several times",
        "Should soon be intubated",
        "risk of intubation",
    ],
)
def test_no_intervention_is_done(narrative: str) -> None:
    assert not done_intervention(narrative)


@pytest.mark.parametrize(
    "narrative",
    [
        "Open fracture of the shin.",
        "open left tibial fracture",
        "Open tib/fib fx with bone visible",
        "Compound fracture",
        "possible open fracture",
        "Penetrating injury to the abdomen",
        "penetrating trauma",
        "Gunshot wound to the thigh",
        "gun-shot wound",
        "GSW to the chest",
        "Stab wound to the back",
        "Stabbed in the neck",
        "Victim of a stabbing",
        "Stabbed by his brother",
        "30 yo with history of depression presents with stab wound to the forearm",
        "No LOC, gunshot wound to the leg",
        "No LOC, stab wound to the arm or hand",
        "Denies fever. Penetrating wound to the side.",
        "Blunt trauma ruled out, gunshot wound to the flank",
        "Stab wound with knife removed by bystanders",
        "67-year-old stab victim",
        "his wife found him with a stab wound",
        "States that stab wound was from a kitchen knife",
        "stab-like wound to the chest",
        "digital penetration injury by a nail",
        "oral penetration of a foreign body",
    ],
)
def test_an_injury_is_open(narrative: str) -> None:
    assert open_injury(narrative)


@pytest.mark.parametrize(
    "narrative",
    [
        "",
        "Closed fracture of the wrist.",
        "No open fracture.",
        "no evidence of open fracture",
        "skin intact, no open fracture seen",
        "closed, not open, fracture",
        "open wound over closed fracture",
        "Open wound, fracture of the wrist",
        "open fracture ruled out",
        "x-ray excludes open fracture",
        "Denies penetrating injury.",
        "denies LOC and penetrating trauma",
        "denies fall, gunshot, or stab wound",
        "non-penetrating",
        "nonpenetrating injury",
        "not consistent with penetrating injury",
        "blunt rather than penetrating",
        "Stabbing pain in the chest",
        "stabbing chest pain, stable vital signs",
        "stabilised on scene",
        "denies being stabbed",
        "history of gunshot wound",
        "prior stab wound",
        "old stab wound scar from 2010",
        "gunshot wound 3 years ago",
        "Friend had an open fracture in the same crash.",
        "Chest pain that stabs when breathing in",
        "stab-like pain in the left chest",
        "Deep penetrating pain in the epigastrium",
        "Reports vaginal penetration",
        "penile penetration without consent",
        "sexual penetration",
        "s/p open reduction of wrist fracture",
    ],
)
def test_no_injury_is_open(narrative: str) -> None:
    assert not open_injury(narrative)


@pytest.mark.parametrize(
    ("narrative", "score"),
    [
        ("Pain 8/10.", 8.0),
        ("8/10 pain", 8.0),
        ("pain 8 / 10", 8.0),
        ("pain scale 0-10: 3", 3.0),
        ("Pain 0 to 10 scale: 3", 3.0),
        ("pain score 1-10: 4/10", 4.0),
        ("pain is 10 out of 100", None),
        ("8 of 10", 8.0),
        ("Rates pain 8 out of 10", 8.0),
        ("Pain score 8", 8.0),
        ("pain score: 8", 8.0),
        ("pain level is 8", 8.0),
        ("Pain 8", 8.0),
        ("pain=8, HR 90", 8.0),
        ("rates pain as an 8", 8.0),
        ("Pain rated at 8", 8.0),
        ("6-8/10", 8.0),
        ("6\u20138/10", 8.0),
        ("pain 6 to 8 out of 10", 8.0),
        ("pain 6-8", 8.0),
        ("pain 8-10", 10.0),
        ("pain 8 to 9, worse at night", 9.0),
        ("pain 8 - 98% on air", 8.0),
        ("pain 8 - 2 days duration", 8.0),
        ("pain 9 - 3 hrs", 9.0),
        ("pain 9 - 2 episodes of vomiting", 9.0),
        ("pain 10 - 20 mg morphine given", 10.0),
        ("pain 9 - 40 y/o male", 9.0),
        ("pain 7-8 for 10-15 min", 8.0),
        ("pain 7.5/10", 7.5),
        ("pain 10/10", 10.0),
        ("Pain 0/10", 0.0),
        ("Chest pain 3/10, leg pain 9/10", 9.0),
        ("Denies chest pain, leg pain 8/10", 8.0),
        ("Denies pain.", 0.0),
        ("no pain", 0.0),
        ("pain-free", 0.0),
        ("denies any pain", 0.0),
        ("", None),
        ("abdominal pain for 8 hours", None),
        ("pain 8 hours ago", None),
        ("pain 8 days, worse at night", None),
        ("chest pain 8 a.m.", None),
        ("Chest pain 10-15 min", None),
        ("pain 10\u201315min, now gone", None),
        ("pain 8-10 hours ago", None),
        ("pain 7 to 10 days", None),
        ("pain 8-9 pm", None),
        ("pain 8-9:30 pm", None),
        ("pain 8 to 10.5 hours", None),
        ("pain 8:30", None),
        ("No chest pain 8-year-old", None),
        ("Vision 20/20", None),
        ("vision 20/10", None),
        ("acuity 9/10", None),
        ("BP 120/80", None),
        ("2/6 murmur", None),
        ("strength 5/5, GCS 15/15", None),
        ("seen 8/10/2021", None),
        ("on 8/10 he fell", None),
        ("10/8/2021", None),
        ("2021-08-10", None),
        ("Apgar 9/10", None),
        ("nausea 9/10", None),
        ("pain 80", None),
        ("pain 11/10", None),
        ("T 37.8, 18/100", None),
        ("LMP 8/10, cramps, pain 2/10", 2.0),
        ("Symptoms started 9/10", None),
        ("Pain started at 9/10, now 3/10", 9.0),
        ("chest pain 9th rib fracture", None),
        ("Partner had pain 9/10 with the same illness and is better.", None),
    ],
)
def test_the_pain_score(narrative: str, score: float | None) -> None:
    assert pain_0_10(narrative) == score
    assert severe_pain(narrative) == (score is not None and score >= 7)


@given(st.integers(0, 10))
def test_severe_pain_starts_at_seven(pain: int) -> None:
    assert severe_pain(f"Belly ache, pain {pain}/10, BP 190/95.") == (pain >= 7)


CLAUSES = st.lists(
    st.sampled_from(
        [
            "no", "not", "denies", "history of", "intubated", "intubation", "chest tube", "central line",
            "removed", "open", "fracture", "stab", "wound", "penetrating", "pain", "8/10", "6-8", "out of 10",
            ",", ".", ";", "and", "or", "with", "after", "mother", "\n", "(", "2010", "years ago", "\u2019",
            "\u0130",
        ]
    )
    | st.text(max_size=4),
    max_size=40,
).map(" ".join)  # fmt: skip


@given(st.text() | CLAUSES)
def test_any_text_is_read(narrative: str) -> None:
    for read in (done_intervention, open_injury, severe_pain):
        assert isinstance(read(narrative), bool)
    score = pain_0_10(narrative)
    assert score is None or 0.0 <= score <= 10.0


@given(CLAUSES, st.sampled_from(["Intubated by the crew.", "Gunshot wound to the leg.", "Pain 9/10."]))
def test_another_sentence_takes_nothing_back(clauses: str, sentence: str) -> None:
    text = f"{clauses}. {sentence}"
    assert done_intervention(text) or open_injury(text) or severe_pain(text)


@pytest.mark.usefixtures("seconds")
@pytest.mark.parametrize(
    "filler",
    [
        "word ", "no ", "intubated ", "not intubated ", "open ", "open a ", "stab, ", "pain ",
        "pain is ", "8 ", "8-", "8/10 ", "a", "chest tube and ", "history of a ", ", or ", " ", "\n", "mother ",
    ],
)  # fmt: skip
def test_a_hundred_thousand_characters_are_read(filler: str) -> None:
    text = filler * (100_000 // len(filler))
    for read in (done_intervention, open_injury, severe_pain):
        read(text)


def patterns() -> list[re.Pattern[str]]:
    found = [value for value in vars(triggers).values() if isinstance(value, re.Pattern)]
    stems = [*triggers._DONE_INTERVENTION, *triggers._OPEN_INJURY]
    return found + [pattern for stem in stems for pattern in (stem.pattern, stem.undone)]


@pytest.mark.parametrize("pattern", patterns(), ids=lambda pattern: pattern.pattern[:30])
def test_no_pattern_repeats_a_repetition_without_bound(pattern: re.Pattern[str]) -> None:
    """The shape that makes back-tracking explode: an unbounded repetition around another one."""
    parser = importlib.import_module("re._parser")
    assert max(depths(parser.parse(pattern.pattern), parser.MAXREPEAT)) <= 1


def depths(tree: Any, unbounded: Any, depth: int = 0) -> Iterator[int]:
    """How many unbounded repetitions lie around each node of a parsed pattern."""
    yield depth
    if isinstance(tree, tuple) and len(tree) == 3 and isinstance(tree[0], int) and not isinstance(tree[2], int):
        # (least, most, repeated), the arguments of a repetition
        yield from depths(tree[2], unbounded, depth + (tree[1] == unbounded))
    elif isinstance(tree, (list, tuple)) or hasattr(tree, "data"):
        for part in getattr(tree, "data", tree):
            yield from depths(part, unbounded, depth)


def test_the_depth_of_a_known_bad_pattern_is_seen() -> None:
    parser = importlib.import_module("re._parser")
    assert max(depths(parser.parse(r"(a+)+b"), parser.MAXREPEAT)) == 2
