"""Boosted trees: numbers are found by what stands around them, and what follows from words or numbers is learned."""

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clinrl.analysis import trees
from clinrl.analysis.trees import LONGEST, boosted_trees, numbers


@given(st.text(max_size=300))
def test_any_text_gives_finite_numbers_under_names_that_mark_one(text):
    for name, value in numbers(text).items():
        assert "#" in name
        assert 0 <= value < 1_000_000
        assert math.isfinite(value)


@given(
    st.sampled_from(["pulse", "temp of", "resp rate"]),
    st.one_of(st.integers(0, 999_999), st.integers(0, 999_999).map(lambda n: n / 1000)),
    st.sampled_from(["%", "C", "a minute"]),
)
def test_a_number_is_found_by_its_neighbours(before, value, after):
    found = numbers(f"Brought in by family; {before} {value}{after}, comfortable.")
    words, unit = before.lower().split(), after.lower().split()[0]
    assert found[f"{words[-1]} #"] == found[f"# {unit}"] == found[f"{words[-1]} # {unit}"] == value


def test_the_first_of_two_counts_and_a_pair_is_two_numbers():
    found = numbers("BP 85/40, then BP 120/70. HR 130")
    assert (found["bp #"], found["bp # /"], found["# / #"], found["# / #"]) == (85, 85, 85, 85)
    assert (found["/ #"], found["hr #"]) == (40, 130)
    assert numbers("x" * LONGEST + " HR 130") == {}


@pytest.mark.long
def test_words_and_numbers_decide_the_same_way_each_time_and_on_any_threads(monkeypatch):
    rng = Random(1)
    cases = [(word, rng.randint(40, 180)) for word in rng.choices(("calm", "drowsy"), k=900)]
    texts = [f"{rng.choice(('Man', 'Woman'))} is {word}, pulse {pulse} a minute" for word, pulse in cases]
    labels = [1 if word == "drowsy" else 2 if pulse > 100 else 3 for word, pulse in cases]
    answers = boosted_trees(texts[:600], labels[:600], texts[600:])
    assert sum(map(int.__eq__, answers, labels[600:])) > 285
    for threads in (trees.THREADS, 1):
        monkeypatch.setattr(trees, "THREADS", threads)
        assert boosted_trees(texts[:600], labels[:600], texts[600:]) == answers
    assert boosted_trees(texts[:5], ["a"] * 5, texts[:2]) == ["a", "a"]
