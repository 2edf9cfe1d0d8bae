"""The imaging guideline: what moves a rating, and that every rule can be told from the facts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clinrl.tasks.imaging.answer import LABELS
from clinrl.tasks.imaging.guideline import (
    BY_ID,
    CONDITIONS,
    CONTRAST,
    ELSEWHERE,
    HELD_OUT,
    MODALITIES,
    TARGETS,
    YIELDS,
    true_yield,
    usual_yield,
)
from clinrl.tasks.imaging.rules import LOCAL_YIELD, RULE_IDS, RULES, START, Scenario, decide, deciding_rule, label_of


def request(**facts) -> Scenario:
    """CT of a sore shoulder with a red flag in a grown man: the target is a ligament tear, which CT shows poorly."""
    plain = {
        "condition": "sore_shoulder", "target": "a ligament tear", "age_years": 40, "sex": "man", "red_flag": True,
        "phase": "initial", "modality": "CT", "region": "shoulder",
    }  # fmt: skip
    return Scenario(**{**plain, **facts})


@st.composite
def requests(draw) -> Scenario:
    condition = draw(st.sampled_from([*CONDITIONS, *HELD_OUT]))
    modality = draw(st.sampled_from(MODALITIES))
    done = draw(st.none() | st.sampled_from(MODALITIES))
    sex = draw(st.sampled_from(("woman", "man")))
    return Scenario(
        condition=condition.id,
        target=draw(st.sampled_from(condition.targets)),
        age_years=draw(st.integers(0, 110)),
        sex=sex,
        pregnant=sex == "woman" and draw(st.booleans()),
        egfr_ml_min=draw(st.none() | st.integers(5, 140)),
        red_flag=draw(st.booleans()),
        phase="initial" if done is None else "next",
        done=done,
        modality=modality,
        region=draw(st.sampled_from(ELSEWHERE)),
        contrast=modality in CONTRAST and draw(st.booleans()),
    )


def test_the_guideline_is_complete():
    assert (len(CONDITIONS), len(HELD_OUT), len(BY_ID)) == (30, 5, 35)
    assert set(YIELDS) == set(TARGETS)
    assert all(len(row) == len(MODALITIES) for row in YIELDS.values())
    assert all(set(condition.targets) <= set(TARGETS) and len(condition.targets) == 2 for condition in BY_ID.values())
    assert {condition.says for condition in CONDITIONS}.isdisjoint(condition.says for condition in HELD_OUT)


@pytest.mark.parametrize("condition", BY_ID.values(), ids=BY_ID)
def test_each_chapter_has_something_of_its_own_to_know(condition):
    unusual = [
        (target, modality)
        for target in condition.targets
        for modality in condition.local
        if true_yield(condition, target, modality) != usual_yield(target, modality)
    ]
    assert len(unusual) >= 2


@pytest.mark.parametrize(
    ("facts", "applied", "rating"),
    [
        ({}, ("red_flag",), 4),
        ({"red_flag": False}, ("plain_first",), 1),
        ({"modality": "MRI"}, ("red_flag",), 9),
        ({"modality": "MRI", "contrast": True}, ("red_flag", "contrast_idle"), 7),
        ({"modality": "MRI", "contrast": True, "egfr_ml_min": 29}, ("red_flag", "kidneys", "contrast_idle"), 2),
        ({"modality": "MRI", "contrast": True, "egfr_ml_min": 30}, ("red_flag", "contrast_idle"), 7),
        ({"modality": "MRI", "target": "an infection"}, ("red_flag", "contrast_lacking"), 8),
        ({"target": "an infection", "contrast": True}, ("red_flag",), 9),
        ({"target": "an infection", "contrast": True, "age_years": 15}, ("red_flag", "child"), 7),
        ({"target": "an infection", "contrast": True, "age_years": 16}, ("red_flag",), 9),
        ({"target": "an infection", "contrast": True, "sex": "woman", "pregnant": True}, ("red_flag", "pregnancy"), 5),
        ({"modality": "bone scan", "sex": "woman", "pregnant": True}, ("red_flag", "pregnancy"), 2),
        ({"modality": "ultrasound"}, (), 8),
        ({"modality": "ultrasound", "phase": "next", "done": "ultrasound"}, ("repeat",), 3),
        ({"modality": "ultrasound", "region": "foot", "phase": "next", "done": "ultrasound"}, ("wrong_region",), 1),
        ({"modality": "bone scan"}, ("red_flag",), 7),
    ],
)
def test_what_moves_a_rating(facts, applied, rating):
    decision = decide(request(**facts))
    assert (decision.applied, decision.rating) == (applied, rating)


@given(requests(), st.frozensets(st.sampled_from(RULE_IDS)))
def test_a_rating_is_its_start_moved_by_the_rules_that_apply(s, omit):
    decision = decide(s, omit)
    assert omit.isdisjoint(decision.applied)
    moved = START[decision.shown] + sum(rule.moves for rule in RULES if rule.id in decision.applied)
    assert decision.rating == min(9, max(1, moved))
    assert decision.label == label_of(decision.rating)
    assert len(decision.applied) == 1 or "wrong_region" not in decision.applied


@given(requests())
def test_the_deciding_rule_is_the_first_whose_omission_changes_the_label(s):
    changing = [rule for rule in RULE_IDS if decide(s, frozenset({rule})).label != decide(s).label]
    assert deciding_rule(s) == (changing[0] if changing else "yield")


@given(requests())
def test_a_reader_who_forgets_what_a_chapter_knows_believes_the_usual(s):
    assert decide(s, frozenset({LOCAL_YIELD})).shown == usual_yield(s.target, s.modality)
    assert decide(s, frozenset({LOCAL_YIELD}), "fair").shown == "fair"
    assert decide(s, believed="fair") == decide(s)


def test_ratings_and_labels_are_the_general_scheme():
    assert [LABELS.index(label_of(rating)) for rating in range(1, 10)] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
