"""The decision points, one by one and in order. Expected levels are hand-derived from the cited sources."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from clinrl.tasks.esi.rules import (
    BANDS,
    FINDING_IDS,
    RESOURCES,
    RULE_IDS,
    RULES,
    Presentation,
    band,
    decide,
    resource_count,
    vitals_over,
)


def patient(**facts: Any) -> Presentation:
    """A well adult with no resource needs, changed by `facts`: level 5."""
    well: dict[str, Any] = {
        "age_years": 40, "sex": "female", "complaint": "cough", "findings": (), "hr_bpm": 80, "rr_bpm": 16,
        "spo2_pct": 98, "sbp_mmhg": 120, "dbp_mmhg": 75, "temp_c": 37.0,
    }  # fmt: skip
    return Presentation(**{**well, **facts})


presentations = st.builds(
    patient,
    age_years=st.floats(0.02, 95),
    findings=st.sets(st.sampled_from(sorted(FINDING_IDS)), max_size=3).map(lambda found: tuple(sorted(found))),
    hr_bpm=st.none() | st.integers(30, 250),
    rr_bpm=st.none() | st.integers(4, 90),
    spo2_pct=st.none() | st.integers(60, 100),
    sbp_mmhg=st.none() | st.integers(50, 220),
    temp_c=st.none() | st.floats(34, 41),
    pain=st.none() | st.integers(0, 10),
    pain_site=st.sampled_from(["visceral", "limb", "none"]),
    baseline_spo2_pct=st.none() | st.integers(80, 92),
    resources=st.sets(st.sampled_from(sorted(RESOURCES)), max_size=4).map(lambda kinds: tuple(sorted(kinds))),
)


@pytest.mark.parametrize(
    ("facts", "level", "rule"),
    [
        ({}, 5, "resources_none"),
        ({"resources": ("labs",)}, 4, "resources_one"),
        ({"resources": ("CT", "labs")}, 3, "resources_many"),
        ({"resources": ("sedation",)}, 3, "resources_many"),
        ({"findings": ("arrest",)}, 1, "cardiac_arrest"),
        ({"findings": ("unresponsive",)}, 1, "unresponsive"),
        ({"findings": ("seizing",)}, 1, "active_seizure"),
        ({"findings": ("distress",), "spo2_pct": 89}, 1, "respiratory_failure"),
        ({"findings": ("distress",), "spo2_pct": 90}, 2, "breathing_distress"),
        ({"findings": ("distress",), "spo2_pct": 85, "baseline_spo2_pct": 86}, 2, "breathing_distress"),
        ({"findings": ("distress",), "spo2_pct": None}, 2, "breathing_distress"),
        ({"findings": ("hypoperfusion",), "sbp_mmhg": 80}, 1, "shock"),
        ({"findings": ("hypoperfusion",), "sbp_mmhg": 90}, 5, "resources_none"),
        ({"sbp_mmhg": 89}, 2, "hypotension"),
        ({"sbp_mmhg": 90}, 5, "resources_none"),
        ({"findings": ("hypoperfusion",), "hr_bpm": 39}, 1, "shock"),
        ({"findings": ("hypoperfusion",), "hr_bpm": 40}, 5, "resources_none"),
        ({"hr_bpm": 39}, 1, "shock"),
        ({"hr_bpm": 40}, 5, "resources_none"),
        ({"age_years": 11, "hr_bpm": 39}, 5, "resources_none"),
        ({"findings": ("slow_breathing",)}, 1, "respiratory_failure"),
        ({"findings": ("overdose", "slow_breathing")}, 1, "overdose_depression"),
        ({"temp_c": 40.5}, 2, "extreme_temperature"),
        ({"temp_c": 40.4}, 5, "resources_none"),
        ({"temp_c": 31.9}, 2, "extreme_temperature"),
        ({"temp_c": 32.0}, 5, "resources_none"),
        ({"age_years": 1.5, "temp_c": 39.1, "hr_bpm": 120, "rr_bpm": 30}, 3, "child_fever"),
        ({"age_years": 1.5, "temp_c": 39.0, "hr_bpm": 120, "rr_bpm": 30}, 5, "resources_none"),
        ({"age_years": 3, "temp_c": 39.1, "hr_bpm": 100, "rr_bpm": 30}, 5, "resources_none"),
        ({"complaint": "sickle pain"}, 2, "sickle_crisis"),
        ({"findings": ("major_burn",)}, 2, "major_burn"),
        ({"findings": ("chemical_eye",)}, 2, "chemical_eye"),
        ({"findings": ("dangerous_behaviour",)}, 2, "dangerous_behaviour"),
        ({"findings": ("assaulted",)}, 2, "assaulted"),
        ({"findings": ("pregnancy_emergency",)}, 2, "pregnancy_emergency"),
        ({"findings": ("overdose",), "rr_bpm": 8}, 1, "overdose_depression"),
        ({"findings": ("overdose",), "rr_bpm": 9}, 2, "overdose"),
        ({"findings": ("chest_tube",)}, 1, "done_intervention"),
        ({"findings": ("central_line",)}, 1, "done_intervention"),
        ({"findings": ("intubated",)}, 1, "done_intervention"),
        ({"pain": 7, "pain_site": "visceral"}, 2, "severe_pain"),
        ({"pain": 6, "pain_site": "visceral"}, 5, "resources_none"),
        ({"pain": 9, "pain_site": "visceral", "findings": ("comfortable",)}, 5, "resources_none"),
        ({"pain": 10, "pain_site": "limb", "resources": ("x-ray",)}, 4, "resources_one"),
        ({"findings": ("open_fracture",)}, 2, "open_injury"),
        ({"findings": ("penetrating",)}, 2, "open_injury"),
        ({"age_years": 0.1, "temp_c": 38.1, "hr_bpm": 150, "rr_bpm": 40}, 2, "infant_fever"),
        ({"age_years": 0.1, "temp_c": 38.0, "hr_bpm": 150, "rr_bpm": 40}, 5, "resources_none"),
        ({"findings": ("immunosuppressed",), "temp_c": 38.0}, 2, "immunosuppressed_fever"),
        ({"findings": ("immunosuppressed",), "temp_c": 37.9}, 5, "resources_none"),
        ({"hr_bpm": 120, "rr_bpm": 22}, 2, "danger_vitals"),
        ({"hr_bpm": 110}, 2, "danger_vitals"),
        ({"spo2_pct": 91}, 2, "danger_vitals"),
        ({"spo2_pct": 91, "baseline_spo2_pct": 90}, 5, "resources_none"),
        ({"spo2_pct": 91, "baseline_spo2_pct": 92}, 2, "danger_vitals"),  # 92 is no low baseline
        ({"spo2_pct": 85, "baseline_spo2_pct": 89}, 2, "danger_vitals"),
        ({"spo2_pct": 86, "baseline_spo2_pct": 89}, 5, "resources_none"),
        ({"spo2_pct": 92}, 5, "resources_none"),
    ],
)
def test_each_decision_point(facts: dict[str, Any], level: int, rule: str) -> None:
    decision = decide(patient(**facts))

    assert (decision.level, decision.rule) == (level, rule)


def test_a_single_marginal_vital_sign_keeps_the_level_and_is_ambiguous() -> None:
    """HR 102 with the rest normal stays where it is (v5 worked example)."""
    decision = decide(patient(hr_bpm=102, resources=("labs", "x-ray")))

    assert (decision.level, decision.ambiguous, decision.over) == (3, True, ("HR",))


@pytest.mark.parametrize("temp_c", [38.0, 39.4])
def test_a_marginal_vital_sign_is_ambiguous_whether_or_not_a_fever_decides(temp_c: float) -> None:
    """HR 145 at a limit of 140."""
    assert decide(patient(age_years=2, hr_bpm=145, temp_c=temp_c)).ambiguous


def test_v4_asks_vital_signs_only_of_patients_who_need_two_resources() -> None:
    fast = patient(hr_bpm=130, rr_bpm=26)

    assert decide(fast, edition="v5").level == 2
    assert decide(fast, edition="v4").level == 5
    assert decide(fast.model_copy(update={"resources": ("CT", "labs")}), edition="v4").level == 2


def test_v4_calls_a_feverish_infant_high_risk_for_a_month_and_v5_for_three() -> None:
    infant = patient(age_years=40 / 365, temp_c=38.5, hr_bpm=150, rr_bpm=40)

    assert decide(infant, edition="v5").rule == "infant_fever"
    assert decide(infant, edition="v4").level == 5
    assert decide(infant.model_copy(update={"age_years": 20 / 365}), edition="v4").rule == "infant_fever"


EDGES = {
    "v5": (1 / 12, 1, 3, 5, 12, 18),
    "v4": (3 / 12, 3, 8),
}
"""The ages in years at which the handbook's danger-zone bands begin, but for the youngest."""


@pytest.mark.parametrize("edition", ["v5", "v4"])
def test_the_band_of_an_age_includes_its_lower_edge(edition: Any) -> None:
    for (below, above), edge in zip(pairwise(BANDS[edition]), EDGES[edition], strict=True):
        assert (band(edge - 0.001, edition), band(edge, edition)) == (below, above)


@pytest.mark.parametrize("edition", ["v5", "v4"])
def test_limits_are_strict_in_every_band(edition: Any) -> None:
    youngest = 0.0
    for limits in BANDS[edition]:
        at = patient(age_years=youngest, hr_bpm=limits.hr_bpm, rr_bpm=limits.rr_bpm)
        over = patient(age_years=youngest, hr_bpm=limits.hr_bpm + 1, rr_bpm=limits.rr_bpm + 1)
        assert vitals_over(at, edition) == ()
        assert vitals_over(over, edition) == ("HR", "RR")
        youngest = limits.below_years


def test_one_type_counts_once_and_sedation_twice() -> None:
    assert resource_count(("IV meds", "labs")) == 2
    assert resource_count(("procedure", "sedation")) == 3


def test_rule_ids_are_distinct_and_every_rule_names_its_source() -> None:
    assert len(set(RULE_IDS)) == len(RULE_IDS)
    assert {rule.source.split()[0] for rule in RULES} <= {"v5", "v4", "v4/v5", "series", "ours"}
    assert {rule.id for rule in RULES if rule.source == "series"} == {"done_intervention", "open_injury"}


UNWELL: dict[str, Any] = {
    "age_years": 0.1, "rr_bpm": 8, "spo2_pct": 85, "sbp_mmhg": 100, "temp_c": 39.0, "pain": 10, "pain_site": "visceral",
}  # fmt: skip
"""Vital signs beside which each finding matters to a rule."""


@pytest.mark.parametrize("finding", sorted(set(FINDING_IDS) - {"hypoperfusion", "comfortable"}))
def test_every_finding_is_seen_by_a_rule(finding: str) -> None:
    """Poor perfusion needs a low pressure too, and a look of ease takes severe pain back; both have their own rows."""
    alone, none = (patient(**UNWELL | {"findings": found}) for found in ((finding,), ()))
    assert {rule.id for rule in RULES if rule.holds(alone, "v5")} > {
        rule.id for rule in RULES if rule.holds(none, "v5")
    }


@pytest.mark.parametrize("finding", ["arest", "", "cardiac_arrest", "Arrest"])
def test_an_unknown_finding_is_refused_by_its_name_and_those_there_are(finding: str) -> None:
    with pytest.raises(ValidationError) as refused:
        patient(findings=("distress", finding))
    said = str(refused.value)
    assert "findings.1" in said
    assert f"input_value={finding!r}" in said
    assert all(f"'{known}'" in said for known in FINDING_IDS)


@given(presentations)
def test_the_deciding_rule_has_fired_and_point_a_comes_first(p: Presentation) -> None:
    decision = decide(p)

    fired = [rule for rule in RULES if rule.holds(p, "v5")]
    if decision.point in "AB":
        assert decision.rule == fired[0].id
    if any(rule.point == "A" for rule in fired):
        assert decision.level == 1


@given(presentations, st.sampled_from(sorted(set(FINDING_IDS) - {"comfortable"})))
def test_a_further_finding_never_makes_a_patient_less_urgent(p: Presentation, finding: str) -> None:
    worse = p.model_copy(update={"findings": tuple(sorted({*p.findings, finding}))})

    assert decide(worse).level <= decide(p).level


@given(presentations, st.sets(st.sampled_from(RULE_IDS)))
def test_not_knowing_a_rule_never_makes_a_patient_more_urgent(p: Presentation, unknown: set[str]) -> None:
    assert decide(p, omit=frozenset(unknown)).level >= decide(p).level


@given(presentations)
def test_omitting_every_rule_leaves_the_count_of_resources(p: Presentation) -> None:
    decision = decide(p, omit=frozenset(RULE_IDS))

    assert decision.level == {0: 5, 1: 4}.get(resource_count(p.resources), 3)
