"""Cells of triage records: what is certain is read, what is not is refused, and no reason quotes a cell."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from clinrl.tasks.esi import measured
from clinrl.tasks.esi.measured import BOUNDS, acuity, identifier, number, pain, pressures, temperature_c, vital
from clinrl.tasks.importing import Unclear

BLANKS = st.sampled_from(["", " ", "NA", "nan", "NaN", "n/a", "None", " null "])
READERS = (
    lambda text: number(text, "c"),
    lambda text: vital(text, "hr_bpm", "c"),
    temperature_c,
    pain,
    acuity,
    lambda text: identifier(text, "c"),
)


def refusal(read, text):
    """Why a cell is refused; empty if it is read."""
    try:
        read(text)
    except Unclear as unclear:
        return str(unclear)
    return ""


@given(st.text(st.characters(min_codepoint=0x100, exclude_categories=["Cs"]), min_size=1, max_size=40))
def test_any_text_is_read_or_refused_without_being_quoted(text):
    for read in READERS:
        said = refusal(read, text)
        assert len(said) < 120
        assert said.replace("°", "").isascii()


@given(st.integers(20, 300), st.sampled_from(["{}", "{}.0", " {} ", "+{}", "{}.00", "{}."]))
def test_vital_signs_are_read_as_any_program_writes_them(value, form):
    assert vital(form.format(value), "hr_bpm", "heartrate") == value


@given(BLANKS)
def test_blank_is_not_measured(text):
    assert number(text, "c") is None
    assert vital(text, "hr_bpm", "c") is None
    assert temperature_c(text) is None
    assert pain(text) is None
    with pytest.raises(Unclear, match="is missing"):
        acuity(text)


@given(st.floats(-1e6, 1e6))
def test_a_vital_sign_is_within_its_bounds_or_refused(value):
    for name, (low, high) in BOUNDS.items():
        text = f"{value:.2f}"
        if low <= float(text) <= high:
            found = vital(text, name, "c")
            assert abs(found - float(text)) <= 0.5
            assert low <= found <= high
        else:
            with pytest.raises(Unclear, match="is outside"):
                vital(text, name, "c")


@given(st.integers(280, 430))
def test_a_temperature_is_the_same_in_both_units(tenths):
    celsius = tenths / 10
    assert temperature_c(f"{celsius}") == celsius
    assert temperature_c(f"{celsius * 9 / 5 + 32:.2f}") == pytest.approx(celsius, abs=0.051)


@given(st.floats(-50, 500).filter(lambda value: not 25 <= value <= 44 and not 77 <= value <= 111.2))
def test_a_temperature_of_no_unit_is_refused(value):
    with pytest.raises(Unclear, match="neither"):
        temperature_c(f"{value:.6f}" if not math.isclose(value, round(value, 1)) else "60")


@pytest.mark.parametrize("text", ["25", "27.9", "43.5", "77", "82", "111.2"])
def test_a_temperature_that_nobody_survives_is_refused(text):
    with pytest.raises(Unclear, match="is outside 28 to 43"):
        temperature_c(text)


@example(0, 10, "{}-{}")
@example(1, 10, "{} to {}")
@given(st.integers(0, 10), st.integers(0, 10), st.sampled_from(["{}-{}", "{} - {}", "{}–{}", "{} to {}", "{}-{}/10"]))
def test_of_a_range_of_pain_the_upper_end_counts(low, high, form):
    text = form.format(low, high)
    if low <= 1 and high == 10:
        with pytest.raises(Unclear, match="the name of the scale"):
            pain(text)
    elif low <= high:
        assert pain(text) == high
    else:
        with pytest.raises(Unclear, match="wrong way round"):
            pain(text)


@given(st.integers(0, 10), st.sampled_from(["{}", "{}.0", "{}/10", "{} / 10", "{} out of 10", "{} of 10", " {}/10."]))
def test_a_pain_score_is_read_in_every_form(score, form):
    assert pain(form.format(score)) == score


@pytest.mark.parametrize("word", [*sorted(measured.NOT_ASSESSED), "UTA", "Critical", " Unable ", "Sleeping."])
def test_words_for_no_score_are_no_score(word):
    assert pain(word) is None


@pytest.mark.parametrize("text", ["11", "13", "10.5", "6/100", "-3", "purple", "yes", "7-80", "8/5", "10+", "1e1", "٣"])
def test_a_pain_score_that_is_none_is_refused(text):
    with pytest.raises(Unclear):
        pain(text)


def test_a_broken_score_goes_up():
    assert pain("7.5") == 8
    assert pain("6.5-7.5") == 8


@pytest.mark.parametrize("text", ["1", "1.0", " 3 ", "5.", "2.00"])
def test_acuities_are_levels(text):
    assert acuity(text) == int(float(text))


@pytest.mark.parametrize("text", ["0", "6", "1.5", "two", "-1", "1,0", "inf"])
def test_what_is_no_level_is_refused(text):
    with pytest.raises(Unclear):
        acuity(text)


@pytest.mark.parametrize(("text", "digits"), [("0012", "12"), ("12.0", "12"), (" 30000001 ", "30000001"), ("0", "0")])
def test_an_identifier_is_its_digits(text, digits):
    assert identifier(text, "stay_id") == digits


@given(st.integers(40, 280), st.integers(10, 180))
def test_pressures_keep_their_distance(sbp, dbp):
    pressures(sbp, None)
    pressures(None, dbp)
    if sbp - dbp >= 5:
        pressures(sbp, dbp)
    else:
        with pytest.raises(Unclear, match="is not 5 above dbp"):
            pressures(sbp, dbp)
