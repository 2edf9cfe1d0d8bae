"""Audits: labels against the rules, matched negatives, published counts, and that words know nothing of the labels."""

from collections import Counter
from functools import cache
from itertools import product
from random import Random

import numpy
import pytest
from pydantic import ValidationError
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from clinrl.tasks.audit.cases import (
    AGES_YEARS,
    EXTENSIONS_DAYS,
    LEVEL_NAMES,
    LEVELS,
    LONG,
    MIXES,
    PUBLISHED_LEVELS,
    THRESHOLDS,
    WINDOWS_DAYS,
    AuditCase,
    AuditFacts,
    cases,
    differences_of,
    pool_of,
)
from clinrl.tasks.audit.observations import review_line
from clinrl.tasks.audit.phrases import ACTIONS, FALLACIES, FALLACY_NAMES, argue, find_argument
from clinrl.tasks.audit.prompt import prompt, proposal_line
from clinrl.tasks.audit.rules import (
    AGE,
    ERROR_TYPES,
    OVERRIDE,
    TEMPORAL,
    WINDOW,
    PatientRecord,
    TrialProtocol,
    deciding,
    differences,
    violations,
)
from clinrl.tasks.base import content_id, get_task

POOLS = ("base", "train", "mine", "exam")
PROTOCOL = TrialProtocol(
    protocol_id="trial/x",
    age_min_years=40,
    age_max_years=70,
    window_days=21,
    stage_iv_window_days=28,
    comorbidity_threshold=3,
)


@cache
def drawn(mix, n=600, pool="train"):
    return tuple(cases(n, 11, pool=pool, mix=mix))


def patient(**changed):
    values = {
        "patient_id": "P1", "age_years": 55, "sex": "F", "ethnicity": "Asian", "arm": "control", "stage": "II",
        "enrolled_day": 100, "treatment_day": 110, "death_day": None, "outcome": "survived", "site": "Oak",
        "country": "Brazil", "drug": "Placebo", "comorbidity_index": 2, "ecog": 1, "prior_chemo_cycles": 0,
        "ldh_u_l": 200.0, "bmi_kg_m2": 25.0, "insurance": "public", "smoking": "never", "tumor_site": "lung",
        "histology": "mixed",
    }  # fmt: skip
    return PatientRecord(**{**values, **changed})


def each(chosen):
    """Every proposal of these cases with its truth, its patient's record and the record's differences."""
    for case in chosen:
        records = {record.patient_id: record for record in case.facts.records}
        found = differences_of(case.facts)
        for proposal, truth in zip(case.facts.proposals, case.key.truths, strict=True):
            yield case, proposal, truth, records[proposal.patient_id], found[proposal.patient_id]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, ()),
        ({"age_years": 40}, ()),
        ({"age_years": 39}, (AGE,)),
        ({"age_years": 70}, ()),
        ({"age_years": 71}, (AGE,)),
        ({"death_day": 110, "outcome": "deceased"}, ()),
        ({"death_day": 109, "outcome": "deceased"}, (TEMPORAL,)),
        ({"treatment_day": 121}, ()),
        ({"treatment_day": 122}, (WINDOW,)),
        ({"treatment_day": 128, "stage": "IV"}, ()),
        ({"treatment_day": 129, "stage": "IV"}, (WINDOW,)),
        ({"treatment_day": 128, "stage": "IV", "comorbidity_index": 3}, ()),
        ({"treatment_day": 121, "stage": "IV", "comorbidity_index": 4}, ()),
        ({"treatment_day": 122, "stage": "IV", "comorbidity_index": 4}, (OVERRIDE,)),
        ({"treatment_day": 128, "stage": "IV", "comorbidity_index": 4}, (OVERRIDE,)),
        ({"treatment_day": 129, "stage": "IV", "comorbidity_index": 4}, (WINDOW,)),
        ({"treatment_day": 122, "comorbidity_index": 4}, (WINDOW,)),
        ({"age_years": 90, "treatment_day": 150, "death_day": 120}, (AGE, TEMPORAL, WINDOW)),
    ],
)
def test_rules_at_their_limits(changed, expected):
    assert violations(patient(**changed), PROTOCOL) == expected


@pytest.mark.parametrize("changed", [{"age_max_years": 39}, {"stage_iv_window_days": 21}])
def test_a_protocol_whose_limits_contradict_each_other_is_refused(changed):
    with pytest.raises(ValidationError, match=r"no range|is not longer"):
        TrialProtocol.model_validate(PROTOCOL.model_dump() | changed)


def test_a_case_whose_records_and_proposals_do_not_match_is_refused():
    facts = drawn("easy")[0].facts
    for changed, fault in (
        ({"records": facts.records * 2}, "two records"),
        ({"proposals": facts.proposals[:1] * 2}, "two proposals"),
        ({"records": ()}, "no record of patient"),
    ):
        with pytest.raises(ValidationError, match=fault):
            AuditFacts.model_validate(dict(facts) | changed)


def test_without_a_threshold_comorbidity_does_not_matter():
    free = PROTOCOL.model_copy(update={"comorbidity_threshold": None})
    late = patient(treatment_day=128, stage="IV", comorbidity_index=6)
    assert violations(late, PROTOCOL) == (OVERRIDE,)
    assert violations(late, free) == ()
    assert differences(late, free).threshold is None


@pytest.mark.parametrize(
    ("changed", "rule", "names"),
    [
        ({"age_years": 39}, AGE, ("lower",)),
        ({"age_years": 71}, AGE, ("upper",)),
        ({"age_years": 70}, AGE, ("lower", "upper")),
        ({}, AGE, ("lower", "upper")),
        ({}, TEMPORAL, ("death",)),
        ({"treatment_day": 122}, WINDOW, ("standard",)),
        ({"treatment_day": 129, "stage": "IV"}, WINDOW, ("stage_iv",)),
        ({"treatment_day": 121, "stage": "IV", "comorbidity_index": 4}, WINDOW, ("standard",)),
        ({"treatment_day": 125, "stage": "IV"}, WINDOW, ("threshold", "stage_iv")),
        (
            {"treatment_day": 125, "stage": "IV", "comorbidity_index": 4},
            OVERRIDE,
            ("threshold", "standard", "stage_iv"),
        ),
    ],
)
def test_the_differences_that_decide(changed, rule, names):
    assert deciding(rule, differences(patient(**changed), PROTOCOL)) == names


@pytest.mark.long
@pytest.mark.parametrize("mix", ["easy", "medium", "hard", "published"])
def test_labels_are_what_the_rules_say(mix):
    for case, proposal, truth, record, found in each(drawn(mix)[:200]):
        broken = violations(record, case.facts.protocol)
        assert broken == (() if truth.broken is None else (truth.broken,))
        assert (truth.error is not None) == (bool(broken) == (proposal.action == "clear"))
        assert truth.error in (None, truth.broken if proposal.action == "clear" else truth.about)
        assert truth.deciding == (deciding(truth.error, found) if truth.error else ())
        assert find_argument(proposal.text) == (truth.about, truth.fallacy)
        assert record.outcome == ("survived" if record.death_day is None else "deceased")
    for case in drawn(mix)[:200]:
        proposed = {proposal.patient_id for proposal in case.facts.proposals}
        others = [record for record in case.facts.records if record.patient_id not in proposed]
        assert others
        assert not any(violations(record, case.facts.protocol) for record in others)


@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_levels_have_their_rules_and_sizes(level):
    sizes = [len(case.facts.proposals) for case in drawn(level)]
    assert set(sizes) == set(range(2, 13))
    assert numpy.mean([size >= 6 for size in sizes]) == pytest.approx(LONG, abs=0.05)
    rules = set(LEVELS[level].about)
    errors = Counter(truth.error for _, _, truth, _, _ in each(drawn(level)) if truth.error)
    assert set(errors) == rules
    assert min(errors.values()) > 0.1 * sum(errors.values())
    assert all((case.facts.protocol.comorbidity_threshold is not None) == (level == "hard") for case in drawn(level))


@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_errors_are_as_frequent_among_clearances_as_among_rejections(level):
    share = {
        action: numpy.mean([t.error is not None for _, p, t, _, _ in each(drawn(level)) if p.action == action])
        for action in ACTIONS
    }
    assert share["clear"] == pytest.approx(share["reject"], abs=0.07)  # three standard errors
    clean = [all(truth.error is None for truth in case.key.truths) for case in drawn(level)]
    assert numpy.mean(clean) == pytest.approx(0.12, abs=0.025)


def test_violations_are_as_near_as_valid_values_are():
    near = Counter()
    for _, _, truth, _, found in each(drawn("easy")):
        if truth.about == AGE and truth.broken != TEMPORAL:
            distance = -found.lower if found.lower < 0 else found.upper if found.upper > 0 else None
            inside = min(found.lower, -found.upper)
            near[truth.broken == AGE, (inside if distance is None else distance) <= 6] += 1
    for broken in (True, False):
        assert near[broken, True] / (near[broken, True] + near[broken, False]) > 0.8


def matched(found):
    return found.stage == "IV" and found.threshold is not None and found.threshold <= 0 < found.standard


def test_hard_episodes_hold_overrides_with_their_matched_negatives():
    chosen = drawn("hard")
    held, counterpart = set(), set()
    for case, _, truth, _, found in each(chosen):
        if truth.broken == OVERRIDE:
            held.add(case.id)
            assert found.stage == "IV"
            assert found.threshold > 0
            assert found.stage_iv <= 0 < found.standard
        if truth.broken is None and matched(found):
            counterpart.add(case.id)
            assert found.stage_iv <= 0
    assert len(held & counterpart) / len(chosen) > 1 / 3


@pytest.mark.long
def test_every_length_that_is_published_is_learned_from():
    learned = {len(case.facts.proposals) for case in drawn("reporting", pool="base")}
    assert {len(case.facts.proposals) for case in drawn("published")} <= learned
    episodes = {get_task("audit").reporting.slices["episode"](case) for case in drawn("natural")}
    assert episodes == {f"{level} {size}" for level in LEVEL_NAMES for size in ("2-5", "6-12")}


def test_the_published_mix_has_the_published_counts():
    counts = {level: Counter() for level in LEVEL_NAMES}
    types = {level: Counter() for level in LEVEL_NAMES}
    for case in drawn("published"):
        errors = [truth.error for truth in case.key.truths if truth.error]
        counts[case.facts.level][len(case.facts.proposals), len(errors), case.key.pool_errors] += 1
        types[case.facts.level].update(errors)
        assert all(proposal.action == "clear" for proposal in case.facts.proposals)
    for level, ranges in {
        "easy": ((5, 7), {3}, {6}),
        "medium": ((6, 10), {3, 4}, {13}),
        "hard": ((8, 12), {3, 4, 5}, {14, 15, 16, 17}),
    }.items():
        proposals, wrong, pool = map(set, zip(*counts[level], strict=True))
        assert (min(proposals), max(proposals)) == ranges[0]
        assert (wrong, pool) == ranges[1:]
        assert sum(counts[level].values()) / 600 == pytest.approx(1 / 3, abs=0.05)
        total = sum(types[level].values())
        for rule, share in PUBLISHED_LEVELS[level].about.items():
            assert types[level][rule] / total == pytest.approx(share, abs=0.04)


@pytest.mark.parametrize("mix", ["natural", "reporting"])
def test_levels_are_equally_frequent(mix):
    levels = Counter(case.facts.level for case in drawn(mix, 300))
    assert all(levels[level] / 300 == pytest.approx(1 / 3, abs=0.08) for level in LEVEL_NAMES)


def shown(case, proposal):
    """All that is shown of a proposal before a rule is needed, without its ids."""
    text = f"{proposal_line(proposal)} {review_line(proposal)}"
    return text.replace(proposal.proposal_id, "").replace(proposal.patient_id, "")


def separability(examples):
    """The area under the ROC curve of a bag of words with numbers, on episodes that it did not learn from."""
    vectorizer = CountVectorizer(ngram_range=(1, 2), token_pattern=r"[a-z]+", min_df=3)
    texts, sides, wrong, episodes = map(list, zip(*examples, strict=True))
    words = vectorizer.fit_transform(texts).toarray()
    features = numpy.hstack([words, numpy.asarray(sides)])
    wrong, held = numpy.asarray(wrong), numpy.asarray(episodes) % 3 == 0
    model = LogisticRegression(C=0.03, max_iter=2000).fit(features[~held], wrong[~held])
    return roc_auc_score(wrong[held], model.predict_proba(features[held])[:, 1])


def telling(level, tell=0):
    """Examples for `separability`; `tell` moves the confidence of wrong proposals, in hundredths."""
    for number, case in enumerate(drawn(level)):
        for place, (proposal, truth) in enumerate(zip(case.facts.proposals, case.key.truths, strict=True)):
            wrong = truth.error is not None
            confidence = proposal.confidence - tell / 100 * wrong
            sides = [
                10 * (confidence - 0.86),
                100 * (confidence - 0.86) ** 2,
                place,
                proposal.action == "clear",
                len(proposal.citations),
            ]
            yield shown(case, proposal), sides, wrong, number


@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_words_confidence_and_action_do_not_tell_right_from_wrong(level):
    examples = list(telling(level))
    assert len(examples) >= 1500
    assert separability(examples) == pytest.approx(0.5, abs=0.07)


def test_a_leak_of_confidence_would_be_seen():
    assert separability(list(telling("medium", tell=4))) > 0.6


def test_neither_level_nor_key_is_in_the_prompt():
    for case in drawn("hard", 100):
        text = "\n".join(message.content for message in prompt(case.facts))
        assert "hard" not in text
        assert case.group not in text
        other = case.model_copy(update={"key": drawn("easy", 1)[0].key})
        assert prompt(other.facts) == prompt(case.facts)
        numbers = case.facts.protocol.model_dump(exclude={"protocol_id"}).values()
        assert all(str(number) in text for number in numbers)


def test_every_fallacy_is_worded_for_both_actions_and_once():
    assert len(set(FALLACY_NAMES)) == len(FALLACY_NAMES) == 12
    rng = Random(1)
    wordings = set()
    for rule in ERROR_TYPES:
        for fallacy in FALLACIES[rule]:
            for action in ACTIONS:
                for wording in FALLACIES[rule][fallacy][action]:
                    assert wording not in wordings
                    wordings.add(wording)
                    assert not any(character.isdigit() for character in wording)
                assert find_argument(argue(rng, rule, fallacy, action)) == (rule, fallacy)
    assert find_argument("Something else.") is None


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("mix", sorted(MIXES))
def test_cases_are_distinct_of_their_pool_and_hashed(pool, mix):
    chosen = list(cases(20, 3, pool=pool, mix=mix))
    assert len({case.id for case in chosen}) == 20
    for case in chosen:
        assert pool_of(case.group) == pool
        assert case.id == content_id("audit", case.facts, case.key)
        assert AuditCase.model_validate_json(case.model_dump_json()) == case
    assert {case.facts.level for case in chosen} == set(MIXES[mix])


@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_every_pool_has_hundreds_of_protocols(level):
    thresholds = THRESHOLDS if level == "hard" else ("-",)
    groups = {
        f"{level}/trial/{low}-{high}/{window}/{window + more}/{threshold}"
        for low, high, window, more, threshold in product(*AGES_YEARS, WINDOWS_DAYS, EXTENSIONS_DAYS, thresholds)
    }
    assert min(Counter(map(pool_of, groups)).values()) > 200
    seen = {case.group for case in drawn(level)}
    assert seen <= groups
    assert len(seen) > 200


def test_emphasis_makes_a_rule_more_frequent():
    plain = Counter(truth.about for _, _, truth, _, _ in each(drawn("medium")[:400]))
    more = tuple(cases(400, 11, pool="train", mix="medium", emphasis={TEMPORAL: 3.0}))
    emphasised = Counter(truth.about for _, _, truth, _, _ in each(more))
    assert emphasised[TEMPORAL] / emphasised.total() > 1.5 * plain[TEMPORAL] / plain.total()


def test_a_mix_that_does_not_exist_is_refused():
    with pytest.raises(KeyError):
        next(cases(1, 1, pool="train", mix="impossible"))
