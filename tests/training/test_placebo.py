"""What placebo rewards pay, as properties: nothing of it follows from a completion being right."""

from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from clinrl.training.placebo import placebo_rewards
from clinrl.types import Unreadable

LOW, HIGH = -2.0, 1.0
SILENT = Unreadable(reason="no answer")
GROUP = 4
steps = st.integers(1, 4).flatmap(
    lambda groups: st.lists(
        st.tuples(st.floats(LOW, HIGH), st.sampled_from([1, 2, 3, SILENT])),
        min_size=GROUP * groups,
        max_size=GROUP * groups,
    )
)
"""The score and the answer of each completion of a step."""


def paid(placebo: str, step: list[tuple], seed: int = 0) -> list[float]:
    totals, answers = zip(*step, strict=True)
    return placebo_rewards(placebo, totals, answers, GROUP, LOW, HIGH, Random(seed))


@given(steps, st.integers(0, 9))
def test_shuffled_pays_the_scores_of_the_step_to_whomever(step, seed):
    assert sorted(paid("shuffled", step, seed)) == sorted(total for total, _ in step)


def test_shuffled_and_random_follow_from_the_seed_and_not_from_the_place():
    step = [(float(place), 1) for place in range(32)]
    for placebo in ("shuffled", "random"):
        found = paid(placebo, step, 1)
        assert found == paid(placebo, step, 1) != paid(placebo, step, 2)
    assert paid("shuffled", step, 1) != [total for total, _ in step]


@given(steps, steps)
def test_random_pays_the_same_whatever_was_written_and_earned(step, other):
    size = min(len(step), len(other))
    assert paid("random", step[:size]) == paid("random", other[:size])


def test_random_pays_half_of_the_completions():
    found = Counter(paid("random", [(0.0, 1)] * 4000))
    assert set(found) == {LOW, HIGH}
    assert 1850 < found[HIGH] < 2150  # 4.7 standard deviations


@given(steps)
def test_format_pays_what_can_be_read(step):
    assert paid("format", step) == [LOW if answer is SILENT else HIGH for _, answer in step]


@given(steps, st.permutations([1, 2, 3]))
def test_majority_knows_no_label(step, others):
    """Other scores, as under other gold labels, change nothing; answers under other names neither."""
    found = paid("majority", step)
    assert found == paid("majority", [(HIGH - total, answer) for total, answer in step])
    renamed = dict(zip([1, 2, 3, SILENT], [*others, SILENT], strict=True))
    assert found == paid("majority", [(total, renamed[answer]) for total, answer in step])


@given(steps)
def test_majority_pays_the_most_frequent_readable_answer_of_each_group(step):
    found = paid("majority", step)
    for first in range(0, len(step), GROUP):
        answers = [answer for _, answer in step[first : first + GROUP]]
        winners = {answer for answer, reward in zip(answers, found[first:], strict=False) if reward == HIGH}
        readable = Counter(answer for answer in answers if answer is not SILENT)
        assert len(winners) == bool(readable)
        assert all(readable[answer] == max(readable.values()) for answer in winners)
        assert found[first : first + GROUP].count(HIGH) == max(readable.values(), default=0)
