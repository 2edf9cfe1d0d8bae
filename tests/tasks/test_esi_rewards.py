"""The reward: what each outcome earns, and what no parameter set of ours may pay for."""

from collections.abc import Callable, Mapping
from fractions import Fraction
from statistics import fmean, pstdev

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from clinrl.tasks.esi.answer import parse
from clinrl.tasks.esi.rewards import (
    ASYMMETRIC,
    LEVELS,
    TERMS,
    Modifiers,
    Reward,
    cost,
    level_value,
    outcomes,
    refined,
    score,
)
from clinrl.tasks.esi.rules import RULE_IDS
from clinrl.types import Unreadable
from recipes import NAIVE_V45C, PUBLISHED_V46, RULE_AWARE_V49

UNREADABLE = Unreadable(reason="empty")
ARMS = {"default": Reward(), "v45c": NAIVE_V45C, "v46": PUBLISHED_V46, "v49": RULE_AWARE_V49}
MODIFIERS = ("done_intervention", "open_injury", "severe_pain")
SENTENCES = ("Intubated by the crew.", "Open fracture of the shin.", "Pain 8/10.")
DENIALS = ("Not intubated.", "No open fracture.", "Pain 3/10.")


def narrative(*triggered: bool) -> str:
    """A narrative with the given triggers (done intervention, open injury, severe pain), the others denied."""
    pairs = zip(triggered, SENTENCES, DENIALS, strict=True)
    return " ".join(["40 yo man.", *(yes if said else no for said, yes, no in pairs)])


def total(reward: Reward, gold: int, answer: int | Unreadable, triggered: tuple[bool, ...] = (False,) * 3) -> float:
    return score(gold, narrative(*triggered), answer, reward).total


levels = st.sampled_from(LEVELS)
triggers = st.tuples(st.booleans(), st.booleans(), st.booleans())
arms = st.sampled_from(list(ARMS.values()))
rewards = st.builds(
    Reward,
    valve=st.floats(-3.0, 0.99),
    unreadable=st.floats(-5.0, 5.0),
    floor=st.floats(-5.0, 0.99),
    modifiers=st.builds(
        Modifiers,
        done_intervention_hit=st.floats(0.0, 2.0),
        done_intervention_miss=st.floats(-2.0, 0.0),
        open_injury_miss=st.floats(-2.0, 0.0),
        severe_pain_miss=st.floats(-2.0, 0.0),
    ),
)
"""Any reward that params.yaml may ask for."""


# 3.4, 1: no answer is strictly below every readable outcome


@pytest.mark.parametrize("reward", [Reward(), RULE_AWARE_V49], ids=["default", "v49"])
def test_no_answer_is_strictly_the_worst(reward: Reward) -> None:
    assert reward.unreadable_is_worst
    for gold, answer, *triggered in outcomes():
        assert total(reward, gold, UNREADABLE, tuple(triggered)) < total(reward, gold, answer, tuple(triggered))


@pytest.mark.parametrize("reward", [NAIVE_V45C, PUBLISHED_V46], ids=["v45c", "v46"])
def test_the_published_arms_that_reward_silence_are_expressible_and_known(reward: Reward) -> None:
    assert not reward.unreadable_is_worst
    assert any(total(reward, gold, answer) <= reward.unreadable for gold in LEVELS for answer in LEVELS)


@given(rewards)
def test_unreadable_is_worst_says_what_the_outcomes_say(reward: Reward) -> None:
    worst = min(total(reward, gold, answer, tuple(triggered)) for gold, answer, *triggered in outcomes())
    assert reward.unreadable_is_worst == (reward.unreadable < worst)


# 3.4, 2: no lazy policy earns more than a mediocre reader


NATURAL = {
    1: Fraction(60, 1000),
    2: Fraction(330, 1000),
    3: Fraction(540, 1000),
    4: Fraction(67, 1000),
    5: Fraction(3, 1000),
}
"""An emergency department's mix of levels."""
BALANCED = dict.fromkeys(LEVELS, Fraction(1, 5))


def oversampled(mix: Mapping[int, Fraction], times: int) -> dict[int, float]:
    """Shares of the stream in which each ESI-1 case stands `times` times."""
    weights = {level: share * (times if level == 1 else 1) for level, share in mix.items()}
    return {level: float(weight / sum(weights.values())) for level, weight in weights.items()}


def triggers_of(gold: int) -> list[tuple[float, tuple[bool, bool, bool]]]:
    """Trigger mix of a realistic stream, by gold level: how often, and which."""
    if gold == 1:
        return [(0.4, (True, False, False)), (0.1, (False, False, True)), (0.5, (False, False, False))]
    if gold == 2:
        return [
            (0.25, (False, False, True)),
            (0.15, (False, True, False)),
            (0.05, (False, True, True)),
            (0.55, (False,) * 3),
        ]
    return [(0.1, (False, False, True)), (0.9, (False, False, False))]


def earns(reward: Reward, stream: Mapping[int, float], policy: Callable[[int], Mapping[int, float]]) -> float:
    """Expected total of a policy (gold level → probabilities of answers) on a stream of levels."""
    return sum(
        share * often * probability * total(reward, gold, answer, triggered)
        for gold, share in stream.items()
        for often, triggered in triggers_of(gold)
        for answer, probability in policy(gold).items()
    )


def always(level: int) -> Callable[[int], Mapping[int, float]]:
    return lambda gold: {level: 1.0}


def mediocre(exact: float) -> Callable[[int], Mapping[int, float]]:
    """Right with probability `exact`, otherwise off by one level."""

    def answers(gold: int) -> Mapping[int, float]:
        near = [level for level in (gold - 1, gold + 1) if level in LEVELS]
        return {gold: exact, **dict.fromkeys(near, (1 - exact) / len(near))}

    return answers


@pytest.mark.parametrize("reward", [Reward(), PUBLISHED_V46, RULE_AWARE_V49], ids=["default", "v46", "v49"])
@pytest.mark.parametrize("level", LEVELS)
def test_no_constant_beats_a_mediocre_reader_on_the_natural_stream(reward: Reward, level: int) -> None:
    stream = oversampled(NATURAL, 5)
    assert 0.2 < stream[1] < 0.3
    assert earns(reward, stream, always(level)) < earns(reward, stream, mediocre(0.6))


@pytest.mark.parametrize("exact", [0.6, 0.65])
def test_v45c_pays_always_esi_1_more_than_a_mediocre_reader(exact: float) -> None:
    """The published collapse: a naive reward and ESI 1 repeated 20 times on a balanced base."""
    stream = oversampled(BALANCED, 20)
    assert earns(NAIVE_V45C, stream, always(1)) == pytest.approx(20 / 24)
    assert earns(NAIVE_V45C, stream, always(1)) > earns(NAIVE_V45C, stream, mediocre(exact))


def test_even_the_corrected_matrix_needs_the_natural_stream() -> None:
    """Why the stream is capped: repeated often enough, always-ESI-1 is the best constant under any matrix."""
    crowded = {level: earns(Reward(), oversampled(BALANCED, 20), always(level)) for level in LEVELS}
    assert max(crowded, key=crowded.__getitem__) == 1
    assert crowded[1] == pytest.approx(0.6875)
    capped = {level: earns(Reward(), oversampled(NATURAL, 5), always(level)) for level in LEVELS}
    assert max(capped, key=capped.__getitem__) == 2


# 3.4, 3: the exact level is the only best answer


@given(rewards, levels, triggers)
def test_the_exact_level_is_the_unique_maximum(reward: Reward, gold: int, triggered: tuple[bool, bool, bool]) -> None:
    best = total(reward, gold, gold, triggered)
    assert all(total(reward, gold, answer, triggered) < best for answer in LEVELS if answer != gold)


@given(arms, levels, triggers)
def test_the_exact_level_is_the_unique_maximum_of_every_arm(
    reward: Reward, gold: int, triggered: tuple[bool, bool, bool]
) -> None:
    best = total(reward, gold, gold, triggered)
    assert all(total(reward, gold, answer, triggered) < best for answer in (*LEVELS, UNREADABLE) if answer != gold)


# 3.4, 4: under-triage costs at least as much as over-triage of the same distance


@given(arms, levels, levels, triggers)
def test_under_triage_costs_at_least_as_much_as_the_opposite_error(
    reward: Reward, urgent: int, calm: int, triggered: tuple[bool, bool, bool]
) -> None:
    assume(urgent < calm)
    under, over = total(reward, urgent, calm, triggered), total(reward, calm, urgent, triggered)
    if reward.kind == "asymmetric" and (urgent, calm) == (1, 2) and not (triggered[0] and reward == RULE_AWARE_V49):
        assert under == reward.valve > over, "the valve is the one declared exception"
    elif (urgent, calm) != (1, 2):
        assert under <= over


BOTH_WAYS = [(gold, far) for gold in LEVELS for far in (1, 2) if {gold - far, gold + far} <= set(LEVELS)]


@given(arms, st.sampled_from(BOTH_WAYS), triggers)
def test_under_triage_costs_at_least_as_much_for_the_same_patient(
    reward: Reward, both: tuple[int, int], triggered: tuple[bool, bool, bool]
) -> None:
    gold, distance = both
    assert total(reward, gold, gold + distance, triggered) <= total(reward, gold, gold - distance, triggered)


def test_a_false_esi_1_is_always_punished() -> None:
    assert all(ASYMMETRIC[gold][0] < 0 for gold in (2, 3, 4, 5))


def test_the_beliefs_from_which_the_urgent_answer_pays() -> None:
    """1 rather than 2 from P(1) = 0.60, 2 rather than 3 from P(2) = 0.42 (the docstring's figures)."""

    def break_even(urgent: int) -> float:
        gain = ASYMMETRIC[urgent][urgent - 1] - ASYMMETRIC[urgent][urgent]
        loss = ASYMMETRIC[urgent + 1][urgent] - ASYMMETRIC[urgent + 1][urgent - 1]
        return loss / (gain + loss)

    assert break_even(1) == pytest.approx(0.60)
    assert break_even(2) == pytest.approx(0.4167, abs=1e-4)


# 3.4, 5: a modifier needs its trigger and its gold level


@given(rewards, levels, levels, triggers)
def test_modifiers_are_zero_without_trigger_or_gold_level(
    reward: Reward, gold: int, answer: int, triggered: tuple[bool, bool, bool]
) -> None:
    terms = score(gold, narrative(*triggered), answer, reward).terms
    gates = (gold == 1, gold == 2 and answer > 2, gold == 2 and answer > 2)
    for name, trigger, gate in zip(MODIFIERS, triggered, gates, strict=True):
        if not (trigger and gate):
            assert terms[name] == 0.0, name


def test_each_modifier_of_v49() -> None:
    def terms(gold: int, answer: int, *triggered: bool) -> dict[str, float]:
        return {
            name: value
            for name, value in score(gold, narrative(*triggered), answer, RULE_AWARE_V49).terms.items()
            if value
        }

    assert terms(1, 1, True, True, True) == {"level": 1.0, "done_intervention": 0.5}
    assert terms(1, 2, True, False, False) == {"done_intervention": -0.5}
    assert terms(1, 3, True, True, True) == {"level": -1.0, "done_intervention": -0.5}
    assert terms(1, 5, True, False, False) == {"level": -1.25, "done_intervention": -0.5}
    assert terms(2, 3, False, True, False) == {"level": -0.75, "open_injury": -0.5}
    assert terms(2, 3, False, False, True) == {"level": -0.75, "severe_pain": -0.5}
    assert terms(2, 3, True, True, True) == {"level": -0.75, "open_injury": -0.5, "severe_pain": -0.5}
    assert terms(2, 5, True, True, True) == {"level": -1.25, "open_injury": -0.5, "severe_pain": -0.5, "clamp": 0.5}
    assert terms(2, 2, True, True, True) == {"level": 1.0}
    assert terms(2, 1, True, True, True) == {"level": -0.5}
    assert terms(3, 5, True, True, True) == {"level": -1.1}


def test_a_trigger_word_in_the_completion_earns_nothing() -> None:
    """The answer reaches the reward as a level, so nothing that a turn writes can set a trigger."""
    plain = score(1, "Chest pain.", parse("Intubated, open fracture, pain 9/10\nANSWER: ESI 1"), RULE_AWARE_V49)
    assert plain.total == 1.0


# 3.4, 6: only one valid answer counts


@pytest.mark.parametrize(
    "content", ["", "ANSWER: ESI 1\nANSWER: ESI 2", "ANSWER: ESI 0", "ANSWER: ESI 6", "ANSWER: ESI 1 or 2", "ESI 1"]
)
def test_anything_but_one_valid_answer_earns_the_unreadable_outcome(content: str) -> None:
    outcome = score(1, narrative(True, True, True), parse(content), RULE_AWARE_V49)
    assert outcome.terms == {**dict.fromkeys(TERMS, 0.0), "unreadable": -2.0}


# 3.4, 7: within a group only order and spread matter


@given(arms, levels, triggers, st.lists(levels | st.just(UNREADABLE), min_size=2, max_size=8), st.floats(-2, 2))
def test_a_constant_shift_of_a_group_changes_no_advantage(
    reward: Reward, gold: int, triggered: tuple[bool, bool, bool], answers: list[int | Unreadable], shift: float
) -> None:
    def advantages(totals: list[float]) -> list[float]:
        return [(value - fmean(totals)) / (pstdev(totals) + 1e-4) for value in totals]

    totals = [total(reward, gold, answer, triggered) for answer in answers]
    assert advantages([value + shift for value in totals]) == pytest.approx(advantages(totals), abs=1e-6)


@given(arms, levels, triggers, st.lists(levels | st.just(UNREADABLE), min_size=1, max_size=7))
def test_a_group_that_is_right_only_sometimes_has_spread(
    reward: Reward, gold: int, triggered: tuple[bool, bool, bool], others: list[int | Unreadable]
) -> None:
    totals = {total(reward, gold, answer, triggered) for answer in [gold, *others]}
    assert (len(totals) > 1) == any(answer != gold for answer in others)


# The record of a score, its range, and what parses


@given(rewards | arms, levels, levels | st.just(UNREADABLE), triggers)
def test_a_total_is_the_sum_of_all_terms_and_in_range(
    reward: Reward, gold: int, answer: int | Unreadable, triggered: tuple[bool, bool, bool]
) -> None:
    outcome = score(gold, narrative(*triggered), answer, reward)
    assert tuple(outcome.terms) == TERMS
    assert sum(outcome.terms.values()) == pytest.approx(outcome.total, abs=1e-9)
    assert reward.low <= outcome.total <= reward.high
    if not isinstance(answer, Unreadable):
        assert outcome.total >= reward.floor


@given(rewards | arms)
def test_the_declared_range_is_reached(reward: Reward) -> None:
    totals = [total(reward, gold, answer, tuple(triggered)) for gold, answer, *triggered in outcomes()]
    totals.append(reward.unreadable)
    assert (reward.low, reward.high) == (min(totals), max(totals))


@pytest.mark.parametrize(
    ("arm", "low", "high"), [("default", -2.0, 1.0), ("v45c", 0.0, 1.0), ("v46", -1.25, 1.0), ("v49", -2.0, 1.5)]
)
def test_the_ranges_of_the_arms(arm: str, low: float, high: float) -> None:
    assert (ARMS[arm].low, ARMS[arm].high) == (low, high)


@pytest.mark.parametrize(("gold", "row"), ASYMMETRIC.items())
def test_the_matrix_is_what_is_earned(gold: int, row: tuple[float, ...]) -> None:
    assert tuple(total(Reward(), gold, answer) for answer in LEVELS) == row
    assert tuple(total(NAIVE_V45C, gold, answer) for answer in LEVELS) == tuple(
        float(answer == gold) for answer in LEVELS
    )


@given(st.floats(-3.0, 0.99))
def test_the_valve_moves_one_cell(valve: float) -> None:
    reward = Reward(valve=valve, floor=-10.0)
    for gold in LEVELS:
        for answer in LEVELS:
            expected = valve if (gold, answer) == (1, 2) else ASYMMETRIC[gold][answer - 1]
            assert total(reward, gold, answer) == expected


@given(rewards | arms)
def test_a_reward_survives_yaml_and_json(reward: Reward) -> None:
    assert Reward.model_validate(reward.model_dump(mode="json")) == reward
    assert Reward.model_validate_json(reward.model_dump_json()) == reward


@pytest.mark.parametrize(
    "fields",
    [
        {"bonus": 1.0},
        {"kind": "symmetric"},
        {"valve": 1.0},
        {"floor": 1.0},
        {"unreadable": float("nan")},
        {"unreadable": float("-inf")},
        {"kind": "naive", "valve": -0.5},
        {"modifiers": {"pain": -0.5}},
        {"modifiers": {"severe_pain_miss": 0.5}},
        {"modifiers": {"done_intervention_hit": -0.5}},
        {"low": -9.0},
    ],
)
def test_a_reward_that_makes_no_sense_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Reward.model_validate(fields)


def test_a_missed_lifesaving_need_costs_what_a_missed_high_risk_does() -> None:
    """The safety valve is for training; it does not make the error cheaper."""
    assert cost(1, 2) == cost(2, 3) == 1.75


@example(Reward(floor=-5.0), ["severe_pain", "open_injury"])
@example(Reward(unreadable=-9.0), ["severe_pain"])
@given(rewards | arms, st.lists(st.sampled_from(RULE_IDS), max_size=4))
def test_a_refined_reward_pays_its_levels_as_before_and_silence_the_least(reward: Reward, rules: list[str]) -> None:
    found = refined(reward, rules)
    assert refined(found, rules) == found
    for gold in LEVELS:
        for answered in LEVELS:
            assert level_value(found, gold, answered) == level_value(reward, gold, answered)
    for rule in set(MODIFIERS).intersection(rules):
        assert getattr(found.modifiers, f"{rule}_miss") < 0
    assert found == reward or (found.unreadable_is_worst and not set(MODIFIERS).isdisjoint(rules))
    if found.model_copy(update={"unreadable": reward.unreadable}).unreadable_is_worst:
        assert found.unreadable == reward.unreadable
