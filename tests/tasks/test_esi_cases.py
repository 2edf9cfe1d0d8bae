"""The generator: labels by the rules, templates in one pool for good, text that agrees with the latent facts."""

from collections import Counter

import pytest

from clinrl.tasks.esi import rules, triggers
from clinrl.tasks.esi.cases import CELLS, MIXES, POOL_SHARE, EsiCase, cases, pool_of
from clinrl.tasks.esi.phrases import COMPLAINTS, CUES, FINDINGS, NOT_RESOURCES


@pytest.fixture(scope="module")
def exam() -> list[EsiCase]:
    return list(cases(1500, 3, pool="exam", mix="reporting"))


@pytest.fixture(scope="module")
def train() -> list[EsiCase]:
    return list(cases(1500, 3, pool="train", mix="natural"))


def test_the_label_is_the_rules_word_on_the_latent_facts(exam: list[EsiCase], train: list[EsiCase]) -> None:
    for case in exam + train:
        decision = rules.decide(case.key.presentation)
        assert (case.key.level, case.key.rule) == (decision.level, decision.rule)


def test_pools_share_no_template(exam: list[EsiCase], train: list[EsiCase]) -> None:
    assert {pool_of(case.group) for case in exam} == {"exam"}
    assert {pool_of(case.group) for case in train} == {"train"}
    assert sum(POOL_SHARE.values()) == 100


def test_exams_hold_no_ambiguous_case_and_training_data_flags_them(exam: list[EsiCase], train: list[EsiCase]) -> None:
    assert not any(case.key.ambiguous for case in exam)
    assert any(case.key.ambiguous for case in train)


def test_every_level_has_its_share_of_the_mix(exam: list[EsiCase], train: list[EsiCase]) -> None:
    for drawn, mix in ((exam, "reporting"), (train, "natural")):
        counts = Counter(case.key.level for case in drawn)
        for level, share in MIXES[mix].items():
            assert abs(counts[level] / len(drawn) - share) < 0.045


def test_every_deciding_rule_occurs(exam: list[EsiCase]) -> None:
    assert {case.key.rule for case in exam} == {cell for level in CELLS.values() for cell in level}


def test_every_boundary_between_neighbours_occurs(exam: list[EsiCase]) -> None:
    assert {case.key.boundary for case in exam} >= {"1|2", "2|3", "3|4", "4|5"}


def test_about_a_third_of_the_cases_lack_a_vital_sign(exam: list[EsiCase]) -> None:
    def lacks(case: EsiCase) -> bool:
        p = case.key.presentation
        return None in (p.hr_bpm, p.rr_bpm, p.spo2_pct, p.sbp_mmhg, p.temp_c)

    assert 0.25 < sum(map(lacks, exam)) / len(exam) < 0.36


def test_the_triggers_read_in_the_text_what_the_facts_hold(exam: list[EsiCase], train: list[EsiCase]) -> None:
    for case in exam + train:
        p, narrative = case.key.presentation, case.facts.narrative
        assert triggers.done_intervention(narrative) == rules.done_intervention(p), narrative
        assert triggers.open_injury(narrative) == rules.open_injury(p), narrative
        assert triggers.severe_pain(narrative) == (p.pain is not None and p.pain >= 7), narrative


def test_a_trigger_word_alone_does_not_decide(exam: list[EsiCase]) -> None:
    """Denied, past and other people's triggers are at least as common as real ones."""
    mentions = [c for c in exam if "intubat" in c.facts.narrative.lower() or "chest tube" in c.facts.narrative.lower()]
    real = sum(rules.done_intervention(case.key.presentation) for case in mentions)

    assert 0.2 < real / len(mentions) < 0.5


def test_the_text_never_names_the_level(exam: list[EsiCase]) -> None:
    assert not any("ESI" in case.facts.narrative for case in exam)


def test_every_vital_sign_in_the_facts_is_in_the_text(exam: list[EsiCase]) -> None:
    for case in exam:
        p = case.key.presentation
        for value in (p.hr_bpm, p.rr_bpm, p.spo2_pct, p.temp_c):
            assert value is None or str(value) in case.facts.narrative


def test_phrases_are_distinct_and_tables_close() -> None:
    """A phrase that meant two things would make the label unreadable."""
    phrases = [text for f in FINDINGS.values() for text in (*f.yes, *f.no)] + [t for cue in CUES.values() for t in cue]
    assert len(set(phrases)) == len(phrases)
    assert set(phrases).isdisjoint(NOT_RESOURCES)
    assert {flag for complaint in COMPLAINTS for flag in complaint.flags} <= set(FINDINGS)


def test_the_same_seed_gives_the_same_cases_and_another_seed_others() -> None:
    first, again, other = (list(cases(40, seed, pool="mine", mix="reporting")) for seed in (5, 5, 6))

    assert first == again
    assert {case.id for case in first}.isdisjoint(case.id for case in other)
