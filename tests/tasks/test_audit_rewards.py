"""Rewards of audits: who earns what, the published figures, evidence, and that totals stay in their range."""

from collections import defaultdict
from functools import cache
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from audits import READERS, oracle, play, replay, was_submitted
from clinrl.tasks.audit import evidence, published
from clinrl.tasks.audit.cases import LEVEL_NAMES, cases, differences_of
from clinrl.tasks.audit.env import ARGUMENTS, Call
from clinrl.tasks.audit.phrases import FALLACY_NAMES
from clinrl.tasks.audit.policies import TRIVIAL, mediocre, read_signs
from clinrl.tasks.audit.published import FALLACY_KEYWORDS, REPORT_KEYWORDS, Dense, Episode
from clinrl.tasks.audit.rewards import CORRECTED, PUBLISHED, TERMS, Corrected, Reward, score
from clinrl.tasks.audit.rules import AGE, ERROR_TYPES, OVERRIDE, TEMPORAL, WINDOW, Differences
from recipes import DENSE

REWARDS = {"corrected": CORRECTED, "dense": DENSE, "published": PUBLISHED}
IV = Differences(
    age_years=66, lower=25, upper=1, stage="IV", comorbidity=4, threshold=1,
    delay_days=23, standard=2, stage_iv=-5, death=-12,
)  # fmt: skip
ALIVE = IV._replace(death=None, threshold=None)


@cache
def drawn(mix, n=100):
    return tuple(cases(n, 41, pool="mine", mix=mix))


def earned(case, turns, reward=CORRECTED, malformed=0):
    log = play(case, turns)
    return score(case, log, submitted=was_submitted(log), malformed=malformed, reward=reward)


@cache
def totals(policy, mix, reward="corrected", n=100):
    """The totals of a policy, by level."""
    found = defaultdict(list)
    for case in drawn(mix, n):
        turns = {**READERS, **TRIVIAL, "sign_reader": read_signs}[policy](case, Random(f"{policy}/{case.id}"))
        found[case.facts.level].append(earned(case, turns, REWARDS[reward]).total)
    return found


def mean(policy, level, **how):
    found = totals(policy, level, **how)[level]
    return sum(found) / len(found)


@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.parametrize("policy", ["oracle", "reader"])
def test_perfect_auditors_earn_all_there_is(policy, level):
    assert CORRECTED.high == 1.0
    assert set(totals(policy, level)[level]) == {1.0}


@pytest.mark.long
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_policies_that_do_not_read_earn_little(level):
    half_blind = mean("mediocre", level)
    assert 0.4 < half_blind < 0.85
    for policy in TRIVIAL:
        assert mean(policy, level) <= (0.4 if policy == "one_flag_with_distances" else 0.3), policy


@pytest.mark.parametrize(("policy", "length", "bounds"), [
    ("one_flag_with_distances", (2, 5), (0.3, 0.5)),
    ("one_flag_with_distances", (6, 12), (0.0, 0.3)),
    ("flag_all_with_distances", (2, 12), (0.05, 0.3)),
])  # fmt: skip
def test_quoted_distances_pay_only_where_there_is_little_to_decide(policy, length, bounds):
    chosen = [case for case in drawn("natural", 300) if length[0] <= len(case.facts.proposals) <= length[1]]
    found = [earned(case, TRIVIAL[policy](case, Random(case.id))).total for case in chosen]
    assert bounds[0] < sum(found) / len(found) < bounds[1]


def test_signs_alone_do_for_easy_rules_and_not_for_two_that_meet():
    found = {level: mean("sign_reader", level) for level in LEVEL_NAMES}
    assert found["easy"] > 0.9
    assert found["hard"] < 0.5
    assert found["easy"] > found["medium"] > found["hard"]


def test_a_reader_of_signs_flags_a_delay_that_stage_iv_allows():
    late = next(
        (case, place)
        for case in drawn("medium")
        for place, one in enumerate(case.facts.proposals)
        if one.action == "clear" and differences_of(case.facts)[one.patient_id].standard > 0
        and case.key.truths[place].broken is None
    )  # fmt: skip
    case, place = late
    decided = read_signs(case, Random(0))[place + 1][0]
    assert decided[0] == "flag_error"
    assert decided[1]["error_type"] == WINDOW


def test_perfect_play_has_the_published_ceiling():
    """What detection and approvals leave, with all that activity can earn."""
    ceilings = {"easy": (0.7136, 0.7136), "medium": (0.512, 0.574), "hard": (0.466, 0.612)}
    for case in drawn("published"):
        found = earned(case, oracle(case, Random(0)), PUBLISHED)
        low, high = ceilings[case.facts.level]
        assert low - 1e-3 <= found.terms["detection"] + found.terms["approvals"] + 0.1 <= high + 1e-3
        assert found.total <= high
    assert set(totals("oracle", "published", reward="published")["easy"]) == {0.7136}


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("null", (0.01, 0.01, 0.01)),
        ("submit_only", (0.01, 0.01, 0.01)),
        ("approve_all", (0.13, 0.14, 0.14)),
        ("flag_all", (0.38, 0.23, 0.21)),
        ("coin", (0.33, 0.25, 0.25)),
    ],
)
def test_the_published_score_pays_lazy_policies_what_was_found(policy, expected):
    for level, figure in zip(LEVEL_NAMES, expected, strict=True):
        found = totals(policy, "published", reward="published", n=300)[level]
        assert sum(found) / len(found) == pytest.approx(figure, abs=0.02)


def published_case(pool_errors, wrong):
    """A case of the published mix with so many errors among all patients, and the ids of wrong and clean proposals."""
    case = next(case for case in drawn("published") if len(case.facts.proposals) >= 5)
    case = case.model_copy(update={"key": case.key.model_copy(update={"pool_errors": pool_errors})})
    errors = [truth.proposal_id for truth in case.key.truths if truth.error]
    clean = [truth.proposal_id for truth in case.key.truths if not truth.error]
    assert len(errors) >= wrong
    return case, errors, clean


def reviews(case, n):
    return [("review_proposal", {"proposal_id": proposal.proposal_id}) for proposal in case.facts.proposals[:n]]


def test_published_worked_examples():
    for pool_errors, expected in ((6, 0.1736), (14, 0.0771)):
        case, errors, _ = published_case(pool_errors, 1)
        flag = ("flag_error", {"proposal_id": errors[0], "error_type": WINDOW, "reason": ""})
        assert earned(case, [[*reviews(case, 2), flag]], PUBLISHED).total == expected
    case, _, clean = published_case(6, 0)
    approvals = [("approve", {"proposal_id": one}) for one in clean[:2]]
    looked = [("cohort_analysis", {"feature": name}) for name in ("age", "sex")]
    assert earned(case, [[*reviews(case, 5), *looked, *approvals]], PUBLISHED).total == 0.25
    assert earned(case, [approvals[:1]], PUBLISHED).total == 0.2056


def test_published_score_without_errors():
    case, _, clean = published_case(0, 0)
    assert earned(case, [], PUBLISHED).total == 0.5
    assert earned(case, [[("approve", {"proposal_id": clean[0]})]], PUBLISHED).total == 0.9


def test_a_report_has_no_effect_on_the_published_score():
    case, _, clean = published_case(6, 0)
    turns = [[("approve", {"proposal_id": clean[0]})]]
    assert earned(case, [*turns, [("submit_audit_report", {"report": "age window"})]], PUBLISHED).total == 0.2056


def test_the_published_score_does_not_look_at_types():
    case, errors, _ = published_case(6, 1)
    for error_type in ERROR_TYPES:
        flag = ("flag_error", {"proposal_id": errors[0], "error_type": error_type, "reason": ""})
        assert earned(case, [[flag]], PUBLISHED).terms["detection"] > 0


def test_the_published_table_adds_up():
    case, errors, clean = published_case(6, 1)
    patient = {proposal.proposal_id: proposal.patient_id for proposal in case.facts.proposals}
    rule = next(truth.error for truth in case.key.truths if truth.proposal_id == errors[0])
    word = published.FALLACY_KEYWORDS[rule][0]
    calls = [
        ("review_proposal", {"proposal_id": errors[0]}, 0.04),
        ("review_proposal", {"proposal_id": errors[0]}, -0.04),
        ("investigate_patient", {"patient_id": patient[errors[0]]}, 0.10),
        ("investigate_patient", {"patient_id": patient[clean[0]]}, 0.02),
        ("temporal_audit", {"patient_id": patient[errors[0]]}, 0.10),
        ("request_shap", {"patient_id": patient[clean[0]], "feature": "age"}, 0.02),
        ("cohort_analysis", {"feature": "sex"}, 0.06),
        ("flag_error", {"proposal_id": errors[0], "error_type": AGE, "reason": f"the {word}"}, 0.35),
        ("flag_error", {"proposal_id": clean[0], "error_type": AGE, "reason": word}, -0.25),
        ("approve", {"proposal_id": clean[1]}, 0.15),
        ("approve", {"proposal_id": errors[1]}, -0.20),
        ("approve", {"proposal_id": errors[1]}, -0.03 + 0.003),
        ("review_proposal", {"proposal_id": "none"}, -0.05 + 0.003),
        ("submit_audit_report", {"report": "age and window"}, 0.15),
    ]
    found = earned(case, [[(tool, arguments) for tool, arguments, _ in calls]], DENSE)
    assert found.total == pytest.approx(sum(worth - 0.003 for *_, worth in calls))


def test_the_published_table_pays_for_look_ups_nearly_as_much_as_for_an_audit():
    for level in LEVEL_NAMES:
        assert mean("tool_farming", level, reward="dense") > 0.85 * mean("oracle", level, reward="dense")
        assert mean("tool_farming", level) < 0


def chosen(level="hard", errors=1, clean=1):
    return next(
        case
        for case in drawn(level)
        if sum(t.error is not None for t in case.key.truths) >= errors
        and sum(t.error is None for t in case.key.truths) >= clean
    )


def edited(case, change):
    """The total of the oracle's audit, each decision having gone through `change`."""
    turns = [[change(*action) for action in turn] for turn in oracle(case, Random(0))]
    return earned(case, [[action for action in turn if action is not None] for turn in turns])


def on(tool, **update):
    return lambda name, arguments: (name, {**arguments, **update} if name == tool else arguments)


def test_a_right_type_without_evidence_is_worth_half():
    for case in drawn("hard")[:50]:
        errors = sum(truth.error is not None for truth in case.key.truths)
        if errors:
            found = edited(case, on("flag_error", reason=""))
            assert found.terms["detection"] == pytest.approx(0.8 * 0.5)
            assert found.terms["fallacy"] == 0


def test_a_wrong_type_is_no_find():
    case, other = next(
        (case, rule)
        for case in drawn("hard")
        for rule in ERROR_TYPES
        if (errors := {truth.error for truth in case.key.truths}) != {None} and rule not in errors
    )
    found = edited(case, on("flag_error", error_type=other))
    assert found.terms["detection"] == found.terms["fallacy"] == 0


def test_false_evidence_is_worth_no_more_than_none():
    case = chosen()
    for truth in case.key.truths:
        if truth.error:
            false = f"lower +99; {truth.fallacy}"
            found = edited(case, on("flag_error", reason=false))
            assert found.terms["detection"] == pytest.approx(0.4)


@pytest.mark.parametrize("tool", ["review_proposal", "investigate_patient", "temporal_audit"])
def test_what_was_not_looked_up_does_not_count(tool):
    for case in drawn("medium")[:20]:
        found = edited(case, lambda name, arguments: None if name == tool else (name, arguments))
        assert found.total == 0.0


def test_looking_up_after_the_decision_is_too_late():
    for case in drawn("medium")[:20]:
        calls = [action for turn in oracle(case, Random(0)) for action in turn][:-1]
        decided = [action for action in calls if action[0] in ("approve", "flag_error")]
        looked = [action for action in calls if action not in decided]
        assert earned(case, [[*decided, *looked, ("submit_audit_report", {"report": ""})]]).total == 0.0


def test_ungrounded_flags_earn_what_the_reward_says():
    case = next(case for case in drawn("medium") if all(truth.error for truth in case.key.truths))
    turns = [
        [
            action
            for turn in oracle(case, Random(0))
            for action in turn
            if action[0] in ("flag_error", "submit_audit_report")
        ]
    ]
    assert earned(case, turns).total == 0.0
    lenient = Reward(corrected=Corrected(ungrounded_credit=0.5))
    assert earned(case, turns, lenient).terms["detection"] == pytest.approx(0.8 * 0.5)


def test_costs_are_bounded():
    case = chosen()
    best = [action for turn in oracle(case, Random(0)) for action in turn]
    extra = [("review_proposal", {"proposal_id": "A1"})] * 3 + [("approve", {"proposal_id": "none"})] * 2
    found = earned(case, [[*best[:-1], *extra, best[-1]]], malformed=4)
    assert found.terms["steps"] == pytest.approx(-0.05)
    assert found.terms["invalid"] == pytest.approx(-0.04)
    assert found.terms["malformed"] == pytest.approx(-0.08)
    many = [("approve", {"proposal_id": "none"})] * 200
    large = next(case for case in drawn("hard") if len(case.facts.proposals) == 5)
    worst = earned(large, [many], malformed=10**6)
    assert worst.total == pytest.approx(CORRECTED.low)


@given(st.randoms(use_true_random=False), st.sampled_from(LEVEL_NAMES), st.integers(0, 30))
def test_not_submitting_is_never_better(rng, level, length):
    case = rng.choice(drawn(level))
    calls = [action for turn in mediocre(case, Random(rng.random())) for action in turn][:-1][:length]
    silent = earned(case, [calls])
    assert silent.total < earned(case, [[*calls, ("submit_audit_report", {"report": ""})]]).total
    assert silent.total <= -0.2


CALLS = st.lists(
    st.tuples(
        st.sampled_from(sorted(ARGUMENTS)),
        st.sampled_from(["A1", "A2", "A3", "none", 4]),
        st.sampled_from(["P", "x", None]),
        st.sampled_from([*ERROR_TYPES, "other"]),
        st.sampled_from(["upper +1; generic_range", "death -3", "", "age " * 30]),
    ),
    max_size=60,
)


@given(
    CALLS,
    st.sampled_from([*LEVEL_NAMES, "published"]),
    st.integers(0, 99),
    st.integers(0, 500),
    st.sampled_from(sorted(REWARDS)),
)
def test_totals_lie_in_the_declared_range_and_terms_are_complete(calls, mix, place, malformed, name):
    case, reward = drawn(mix)[place], REWARDS[name]
    actions = []
    for tool, proposal_id, patient_id, error_type, reason in calls:
        values = {
            "proposal_id": proposal_id,
            "patient_id": case.facts.records[0].patient_id if patient_id == "P" else patient_id,
            "feature": "age",
            "error_type": error_type,
            "reason": reason,
            "report": reason,
        }
        actions.append((tool, {key: values[key] for key in ARGUMENTS[tool]}))
    env = replay(case, actions)
    found = score(case, env.log, submitted=env.submitted, malformed=malformed, reward=reward)
    assert set(found.terms) == set(TERMS)
    assert "-0.0" not in [str(value) for value in found.terms.values()]
    assert reward.low - 1e-9 <= found.total <= reward.high + 1e-9


@pytest.mark.parametrize("worth", [-100.0, 100.0])
@pytest.mark.parametrize("name", Dense.model_fields)
def test_the_range_of_the_published_table_holds_for_prices_of_either_sign(name, worth):
    case = next(case for case in drawn("medium") if any(truth.error for truth in case.key.truths))
    actions = [action for turn in oracle(case, Random(0)) for action in turn][:-1]
    keywords = " ".join(word for words in FALLACY_KEYWORDS.values() for word in words)
    wordy = [(tool, asked | {"reason": keywords} if tool == "flag_error" else asked) for tool, asked in actions]
    report = ("submit_audit_report", {"report": " ".join(REPORT_KEYWORDS)})
    dense = Dense(**dict.fromkeys(Dense.model_fields, 0.0) | {name: worth})
    reward = Reward(kind="published_dense", dense=dense)
    found = earned(case, [[*wordy, *actions, ("approve", {"proposal_id": "none"}), report]], reward, malformed=500)
    assert reward.low <= found.total <= reward.high


def test_dense_finds_what_was_decided_twice_whatever_was_written():
    case = drawn("easy")[0]
    log = [Call(tool="approve", arguments={"proposal_id": ["A1"]}, result="error: x", valid=False)]
    assert score(case, log, submitted=False, malformed=0, reward=DENSE).terms["invalid"] == Episode().floor * -5


@pytest.mark.parametrize(
    ("reason", "rule_names", "right"),
    [
        ("upper +1; generic_range", ("upper",), True),
        ("Upper +1", ("upper",), True),
        ("upper 1", ("upper",), False),
        ("upper +2", ("upper",), False),
        ("upper", ("upper",), False),
        ("+1", ("upper",), False),
        ("lower +25", ("upper",), False),
        ("upper +1; lower +25; age 66", ("upper",), True),
        ("upper +1; lower +25; age 66; delay 23", ("upper",), False),
        ("upper +1; 7", ("upper",), False),
        ("upper +1; lower +24", ("upper",), False),
        (" too old for this trial by the limit: upper +1.", ("upper",), True),
        ("standard +2; stage IV -5; comorbidity +1", ("threshold", "standard", "stage_iv"), True),
        ("threshold +1, standard +2, stage_iv -5.", ("threshold", "standard", "stage_iv"), True),
        ("comorbidity 4; standard +2; stage IV -5", ("threshold", "standard", "stage_iv"), False),
        ("death \u221212", ("death",), True),
        ("death none", ("death",), False),
        ("the patient is too old by upper +1 so it is wrong", ("upper",), False),
        ("too old, upper +1", ("upper",), True),
        ("upper +1 " + "x" * 200, ("upper",), False),
        ("", ("upper",), False),
    ],
)
def test_evidence(reason, rule_names, right):
    assert evidence.supports(evidence.read(reason), IV, rule_names) is right


def test_evidence_of_the_living_and_of_protocols_without_threshold():
    assert evidence.supports(evidence.read("death none"), ALIVE, ("death",))
    assert not evidence.supports(evidence.read("standard +2; comorbidity +1"), ALIVE, ("standard",))
    assert evidence.supports(evidence.read("standard +2; comorbidity 4"), ALIVE, ("standard",))


@pytest.mark.parametrize(
    ("reason", "named"),
    [
        ("upper +1; generic_range", True),
        ("generic_range", True),
        ("generic_range; other_values", False),
        ("generic_range generic_range", False),
        ("generic range", False),
        (" ".join(FALLACY_NAMES), False),
        ("generic_range upper 1x", False),
    ],
)
def test_fallacies(reason, named):
    assert evidence.names_fallacy(evidence.read(reason), "generic_range") is named


@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_what_is_written_is_what_is_read(level):
    for case in drawn(level):
        found = differences_of(case.facts)
        for proposal, truth in zip(case.facts.proposals, case.key.truths, strict=True):
            d = found[proposal.patient_id]
            for names in (truth.deciding, ("lower", "upper"), ("death",), ("stage_iv", "standard")):
                reason = evidence.read(evidence.write(d, names, truth.fallacy))
                assert evidence.supports(reason, d, names)
                assert evidence.names_fallacy(reason, truth.fallacy)


@given(st.text(max_size=300))
def test_reading_never_raises(text):
    reason = evidence.read(text)
    assert not evidence.supports(reason, IV._replace(upper=-999), ("upper",)) or "999" in text


@pytest.mark.parametrize("unit", ["stage iv ", "+", "1", " ;"])
def test_a_long_text_is_not_read(unit):
    assert evidence.read(unit * 10**6) == evidence.read("x" * 10**6)


def test_types_of_wrong_rejections_are_what_the_actor_misapplied():
    seen = set()
    for case in drawn("hard"):
        for proposal, truth in zip(case.facts.proposals, case.key.truths, strict=True):
            if proposal.action == "reject" and truth.error:
                assert truth.error == truth.about
                seen.add(truth.error)
    assert seen == {AGE, TEMPORAL, WINDOW, OVERRIDE}


@given(
    st.integers(0, 59),
    st.sampled_from(sorted({**READERS, **TRIVIAL})),
    st.integers(0, 9),
    st.integers(0, 12),
)
def test_an_audit_that_is_not_handed_in_earns_less_than_any_with_the_same_calls_that_is(place, name, seed, malformed):
    case = drawn("natural", 60)[place]
    actions = [action for turn in {**READERS, **TRIVIAL}[name](case, Random(seed)) for action in turn]
    made = [action for action in actions if action[0] != "submit_audit_report"]
    for kept in range(len(made) + 1):
        silent = earned(case, [made[:kept]], malformed=malformed)
        submitted = earned(case, [made[:kept], [("submit_audit_report", {"report": ""})]], malformed=malformed)
        assert silent.total < submitted.total
        assert silent.terms["unsubmitted"] < 0 == submitted.terms["unsubmitted"]
