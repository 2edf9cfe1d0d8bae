"""The generator: labels by the rules, templates and words in one pool for good, text that agrees with the facts."""

import re
from collections import Counter
from typing import get_args

import pytest
from pydantic import ValidationError
from scipy.stats import binom

from clinrl.tasks.base import POOL_SHARE, get_task
from clinrl.tasks.esi import rules, triggers, words
from clinrl.tasks.esi.cases import CELLS, MIXES, EsiCase, cases, pool_of, reworded
from clinrl.tasks.esi.complaints import COMPLAINTS, FINDING_SAYS, HELD_OUT
from clinrl.tasks.esi.imported import NAMES_A_LEVEL
from clinrl.tasks.esi.narrative import NOBODY_WALKS, SILENT
from clinrl.tasks.esi.prompt import red_flags
from clinrl.tasks.esi.words import Vocabulary, table, wordings

TASK = get_task("esi")


@pytest.fixture(scope="module")
def exam() -> list[EsiCase]:
    return list(cases(1500, 3, pool="exam", mix="reporting"))


@pytest.fixture(scope="module")
def train() -> list[EsiCase]:
    return list(cases(1500, 3, pool="train", mix="natural"))


@pytest.mark.long
def test_the_label_is_the_rules_word_on_the_latent_facts(exam: list[EsiCase], train: list[EsiCase]) -> None:
    older = list(cases(300, 3, pool="train", mix="natural", edition="v4"))
    for case in exam + train + older:
        decision = rules.decide(case.key.presentation, edition=case.key.edition)
        assert (case.key.level, case.key.rule) == (decision.level, decision.rule)


@pytest.mark.parametrize("level", [0, 6])
def test_a_case_without_a_level_is_refused(level: int) -> None:
    case = next(cases(1, 3, pool="exam", mix="reporting")).model_dump(mode="json")
    with pytest.raises(ValidationError, match="level"):
        EsiCase.model_validate(case | {"key": case["key"] | {"level": level}})


@pytest.mark.long
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
            low, high = binom.interval(1 - 1e-6, len(drawn), share)
            assert low <= counts[level] <= high, (mix, level)


def test_every_deciding_rule_occurs(exam: list[EsiCase]) -> None:
    assert {case.key.rule for case in exam} == {cell for level in CELLS.values() for cell in level}


def test_every_boundary_between_neighbours_occurs(exam: list[EsiCase]) -> None:
    assert {case.key.boundary for case in exam} >= {"1|2", "2|3", "3|4", "4|5"}


def test_about_a_third_of_the_cases_lack_a_vital_sign(exam: list[EsiCase]) -> None:
    def lacks(case: EsiCase) -> bool:
        p = case.key.presentation
        return None in (p.hr_bpm, p.rr_bpm, p.spo2_pct, p.sbp_mmhg, p.temp_c)

    assert 0.25 < sum(map(lacks, exam)) / len(exam) < 0.36


@pytest.mark.long
def test_a_trigger_that_fires_is_right_and_most_standard_words_fire(exam: list[EsiCase], train: list[EsiCase]) -> None:
    """The triggers know the standard terms alone, so synonyms and typing errors pass them by."""
    holds = {rule.id: rule.holds for rule in rules.RULES}
    told = {
        triggers.done_intervention: holds["done_intervention"],
        triggers.open_injury: holds["open_injury"],
    }
    for trigger, rule in told.items():
        fired = [case for case in exam + train if trigger(case.facts.narrative)]
        true = [case for case in exam + train if rule(case.key.presentation, "v5")]
        right = [case for case in fired if rule(case.key.presentation, "v5")]
        assert len(right) / len(fired) > 0.75
        assert len(right) / len(true) > 0.1


def test_the_text_never_names_the_level(exam: list[EsiCase]) -> None:
    assert not any("ESI" in case.facts.narrative for case in exam)
    assert not any(re.search(NAMES_A_LEVEL, case.facts.narrative) for case in exam)


def test_every_vital_sign_in_the_facts_is_in_the_text(exam: list[EsiCase]) -> None:
    for case in exam:
        p = case.key.presentation
        for value in (p.hr_bpm, p.rr_bpm, p.spo2_pct, p.temp_c, p.sbp_mmhg, p.dbp_mmhg if p.sbp_mmhg else None):
            assert value is None or re.search(rf"(?<![\d.]){re.escape(str(value))}(?!\d)", case.facts.narrative)


def test_wordings_are_distinct_and_tables_close() -> None:
    """A wording that meant two things would make the label unreadable."""
    every = [
        wording for item, told in table().items() if item.split("/")[0] not in ("styles", "history") for wording in told
    ]
    assert len(set(every)) == len(every)
    needed = {f"findings/{finding}/{side}" for finding in rules.FINDING_IDS for side in ("yes", "no")}
    needed |= {f"complaints/{complaint.id}/says" for complaint in COMPLAINTS} | {
        f"resources/{r}" for r in rules.RESOURCES
    }
    assert needed <= set(table())
    assert {item for item in table() if item.split("/")[0] in ("findings", "complaints", "resources")} <= needed
    assert set(FINDING_SAYS) == set(rules.FINDING_IDS)
    assert all(len(table()[item]) >= (12 if not item.endswith("/no") else 10) for item in needed)


def test_each_wording_has_one_vocabulary_for_good() -> None:
    for item, told in table().items():
        parts = [wordings(item, vocabulary) for vocabulary in get_args(Vocabulary)]
        assert all(parts), item
        assert sorted(wording for part in parts for wording in part) == sorted(told)
        assert set(wordings(item, "base")) == {*parts[0], *parts[1]}


@pytest.mark.parametrize(
    ("temp_c", "flagged"), [(31.9, True), (32.0, False), (37.9, False), (38.0, True), (None, False)]
)
def test_the_gold_turn_flags_fever_and_cold(temp_c: float | None, flagged: bool) -> None:
    p = rules.Presentation(age_years=40, sex="female", complaint="cough", findings=(), temp_c=temp_c)
    assert red_flags(p) == ((f"T {temp_c}",) if flagged else ())


def test_the_clauses_of_a_note_have_masked_numbers_and_none_is_empty() -> None:
    assert words.clauses("HR 90, T 37.5. Well; calm.") == ["hr #, t #", "well", "calm"]


def test_the_edition_slice_tells_whether_the_editions_differ(exam: list[EsiCase]) -> None:
    found = Counter()
    for case in exam:
        levels = {rules.decide(case.key.presentation, edition=edition).level for edition in rules.EDITIONS}
        found[len(levels), TASK.reporting.slices["edition"](case)] += 1
    assert set(found) == {(1, "one level in v4 and v5"), (2, "v4 and v5 differ")}


def clauses(case: EsiCase | None) -> set[str]:
    """The clauses of a note, numbers masked."""
    assert case is not None
    text = re.sub(r"[0-9]+(?:\.[0-9]+)?", "#", case.facts.narrative)
    return {clause.strip().lower() for clause in re.split(r"[.;]", text) if clause.strip()}


def test_no_clause_of_an_exam_stands_in_training_data(exam: list[EsiCase], train: list[EsiCase]) -> None:
    seen = set().union(*map(clauses, train))
    for case in exam:
        assert clauses(case).isdisjoint(seen), clauses(case) & seen
    again = [reworded(case, "training") for case in exam[:200]]
    assert sum(len(clauses(case) & seen) for case in again) > 200  # the measure does see shared clauses


def test_a_case_is_reworded_with_the_same_facts_and_other_words(exam: list[EsiCase]) -> None:
    for case in exam[:50]:
        other = reworded(case, "unseen")
        assert other is not None
        assert (other.id, other.group, other.key) == (case.id, case.group, case.key)
        assert other.facts != case.facts
        assert reworded(case, "base_only") is None


def test_complaints_held_out_are_of_no_training_data(exam: list[EsiCase], train: list[EsiCase]) -> None:
    assert {case.key.presentation.complaint for case in exam} >= HELD_OUT
    assert HELD_OUT.isdisjoint(case.key.presentation.complaint for case in train)
    assert {complaint.id for complaint in COMPLAINTS} > HELD_OUT


def test_patients_are_possible(exam: list[EsiCase], train: list[EsiCase]) -> None:
    for case in exam + train:
        p = case.key.presentation
        if "arrest" in p.findings:
            assert p.hr_bpm is p.spo2_pct is p.sbp_mmhg is None
        if not SILENT.isdisjoint(p.findings):
            assert p.pain is None
        if not NOBODY_WALKS.isdisjoint(p.findings):
            walks = [way for way in wordings("arrival/walking", "base") if way in case.facts.narrative.lower()]
            assert not walks, case.facts.narrative
        assert set(case.key.denied).isdisjoint(p.findings)


@pytest.mark.long
def test_the_notes_have_the_words_of_a_department() -> None:
    corpus = cases(4000, 1, pool="base", mix="reporting")
    assert len({word for case in corpus for word in re.findall(r"[a-z]+", case.facts.narrative.lower())}) > 3000


def test_the_same_patients_are_drawn_whatever_the_edition() -> None:
    newer, older = (list(cases(400, 5, pool="train", mix="natural", edition=edition)) for edition in ("v5", "v4"))

    assert [case.key.presentation for case in newer] == [case.key.presentation for case in older]
    changed = [
        (old.key.level, new.key.level) for old, new in zip(older, newer, strict=True) if old.key.level != new.key.level
    ]
    assert 0.02 < len(changed) / 400 < 0.2


def test_the_same_seed_gives_the_same_cases_and_another_seed_others() -> None:
    first, again, other = (list(cases(40, seed, pool="mine", mix="reporting")) for seed in (5, 5, 6))

    assert first == again
    assert {case.id for case in first}.isdisjoint(case.id for case in other)
