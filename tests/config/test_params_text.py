"""A block goes into params.yaml and out of it again, and no other byte moves."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from clinrl.config import params_text
from clinrl.errors import ParamsError

TEXT = Path(__file__).resolve().parents[2].joinpath("params.yaml").read_text(encoding="utf-8")
SMALL = """profiles:    # recipes
  one:
    lr: 1.0e-3  # as published

mining: {}      # whose
# about b
b: 1
"""
SECTIONS = ("datasets", "profiles", "versions", "mining", "gates", "schedules")
NAMES = st.from_regex(r"[a-z][a-z0-9-]{1,20}", fullmatch=True)
SCALARS = st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-1, 1) | st.text("ab: {}[],'\"#é-", max_size=9)
CONTENT = st.dictionaries(
    NAMES, st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4)),
    min_size=1, max_size=5,
)  # fmt: skip


def parsed(text):
    return YAML(typ="safe", pure=True).load(text)


@given(st.sampled_from(("mining", "profiles")), NAMES.map("zz-{}".format), CONTENT)
def test_what_is_put_in_is_read_back_last_and_what_is_taken_out_leaves_no_trace(section, name, content):
    text = params_text.insert(SMALL, section, params_text.entry(name, content))
    before, after = parsed(SMALL), parsed(text)
    assert list(after[section].items()) == [*before[section].items(), (name, content)]
    assert {key: value for key, value in after.items() if key != section} == {
        key: value for key, value in before.items() if key != section
    }
    assert params_text.remove(text, section, name) == SMALL


@pytest.mark.parametrize("section", SECTIONS)
def test_what_is_taken_out_of_params_yaml_leaves_no_trace(section):
    text = params_text.insert(TEXT, section, params_text.entry("zz-new", {"why": "it: is, {so}", "lr": 5.0e-5}))
    assert parsed(text)[section]["zz-new"] == {"why": "it: is, {so}", "lr": 5.0e-5}
    assert params_text.remove(text, section, "zz-new") == TEXT


def test_every_line_of_params_yaml_stays_as_it_is():
    text = params_text.insert(TEXT, "versions", params_text.entry("esi-v99", {"task": "esi", "seed": 1}))
    lines = text.splitlines()
    assert "  esi-v99: {task: esi, seed: 1}" in lines
    lines.remove("  esi-v99: {task: esi, seed: 1}")
    assert lines == TEXT.splitlines()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("mining: {}\nb: 1\n", "mining:\n  x: {q: 1}\nb: 1\n"),
        ("b: 1\n", "b: 1\n\nmining:\n  x: {q: 1}\n"),
        ("b: 1\nmining:\n  a: {q: 2}", "b: 1\nmining:\n  a: {q: 2}\n  x: {q: 1}\n"),
        (
            "mining:\n  a:\n    q: 2\n\n# b\nb: 1\n",
            "mining:\n  a:\n    q: 2\n  x: {q: 1}\n\n# b\nb: 1\n",
        ),
        ("mining: {}    # whose\n", "mining:       # whose\n  x: {q: 1}\n"),
    ],
)
def test_a_section_may_be_empty_absent_or_the_last(before, after):
    assert params_text.insert(before, "mining", params_text.entry("x", {"q": 1})) == after


def test_the_last_entry_leaves_an_empty_section():
    assert params_text.remove("mining:\n  x: {q: 1}\nb: 1\n", "mining", "x") == "mining: {}\nb: 1\n"


def test_a_name_that_is_not_there_is_nothing_to_remove():
    assert params_text.remove(TEXT, "versions", "esi-v99") == TEXT
    assert params_text.remove(TEXT, "nothing", "esi-v99") == TEXT


def test_a_section_in_braces_is_refused():
    with pytest.raises(ParamsError, match="mining is written in braces; give each of its entries a line"):
        params_text.insert("mining: {a: {q: 1}}\n", "mining", params_text.entry("x", {"q": 1}))


def test_a_file_that_is_no_mapping_is_refused():
    with pytest.raises(ParamsError, match="holds no mapping"):
        params_text.insert("- 1\n", "mining", "")


def test_what_fits_on_a_line_is_in_braces_and_what_does_not_gets_a_line_for_each_key():
    assert params_text.entry("a", {"b": [1, "x"], 1: {"c": 0.5}}) == "  a: {b: [1, x], 1: {c: 0.5}}\n"
    wide = params_text.entry("a", {"b": "w" * 130, "c": 1})
    assert wide == f"  a:\n    b: {'w' * 130}\n    c: 1\n"
