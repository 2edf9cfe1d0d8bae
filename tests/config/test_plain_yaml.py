"""What a params.yaml may ask for: hostile files are refused in one sentence and in less than a second."""

import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from clinrl.config import plain_yaml
from clinrl.config.params import load_params
from clinrl.config.plain_yaml import read_yaml
from clinrl.errors import ParamsError
from valid_params import VALID

REAL = (Path(__file__).parents[2] / "params/imaging.yaml").read_text(encoding="utf-8")
NINE = 9


def laughs(levels: int) -> str:
    """Each line stands for nine of the line before."""
    lines = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * NINE)}]\n" for i in range(1, levels)]
    return "a0: &a0 [x]\n" + "".join(lines)


def merges(levels: int) -> str:
    """The same with merge keys."""
    lines = [f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}], k{i}: 1}}\n" for i in range(1, levels)]
    return "a0: &a0 {k0: 1}\n" + "".join(lines)


HOSTILE: dict[str, tuple[str | bytes, str]] = {
    "levels": ("a: " + "[" * 5_000 + "]" * 5_000, "line 1: is more than 40 levels deep"),
    "levels of lines": ("".join(" " * i + "a:\n" for i in range(600)), "line 41: is more than 40 levels deep"),
    "a number": ("scale: " + "9" * 5_000, "line 1: has a text of 5,000 characters"),
    "a shorter number": ("scale: " + "9" * 1_900, "line 1: has a number of 1,900 characters"),
    "a hexadecimal number": ("scale: 0x" + "f" * 1_900, "has a number of 1,902 characters"),
    "laughs": (laughs(12), "holds more than 15,000 keys and values, aliases written out"),
    "merges": (merges(40), "holds more than 15,000 keys and values, aliases written out"),
    "50 MB": ("scale: " + "x" * 50_000_000, "is larger than 256 KiB"),
    "a text": ("scale: " + "x" * 200_000, "line 1: has a text of 200,000 characters"),
    "a long text, often": ("a: &a " + "x" * 1_990 + "\nb: [" + "*a," * 14_000 + "]", "a is not a key here"),
    "keys": ("".join(f"k{i}: 1\n" for i in range(100_000)), "is larger than 256 KiB"),
    "fewer keys": ("".join(f"k{i}: 1\n" for i in range(7_000)), "k0 is not a key here"),
    "a circle": ("a: &a [*a]", "line 1: *a stands within &a itself"),
    "a circle of merges": ("a: &a {<<: *a}", "line 1: *a stands within &a itself"),
    "an anchor twice": ("a: &a 1\nb: &a 2", "line 2: &a is there twice"),
    "no anchor": ("a: *a", "found undefined alias"),
    "a tag": ("a: !!python/object/apply:os.system [ls]", "line 1: has the tag 'tag:yaml.org,2002:python/"),
    "a tag of its own": ("%TAG ! tag:x,2000:\n---\na: !x 1", "line 3: has the tag 'tag:x,2000:x'"),
    "a binary": ("a: !!binary aGVsbG8=", "line 1: has the tag"),
    "NUL": (b"a: \x00b", "line 1: U+0000 does not show"),
    "an escape": ('a: 1\nb: "\\x1b[2J"', "line 2: U+001B does not show"),
    "bidi": ("# \u202e\na: 1", "line 1: U+202E does not show, or turns the direction of text"),
    "bidi, escaped": ('versions: {v1: {why: "\\u2066 x"}}', "line 1: U+2066 does not show"),
    "no width": ("v\u200b1: 1", "line 1: U+200B does not show"),
    "a line end of another kind": ("a: 1\u2028b: 2", "line 1: U+2028 does not show"),
    "UTF-16": (REAL.encode("utf-16"), "is not UTF-8 text"),
    "a byte order mark": (REAL.encode("utf-8-sig"), "line 1: U+FEFF does not show"),
    "a surrogate": (b"a: \xed\xa0\x80", "is not UTF-8 text (byte 3)"),
    "tabs": ("a:\n\t- b", "line 2, column 1: found character that cannot start any token"),
    "a date": ("a: 2023-99-99", "is not YAML: month must be in 1..12"),
    "a list as a key": ("? [a]\n: 1", "('a',) is not a key here"),
    "a mapping as a key": ("? {a: b}\n: 1", "found unhashable key"),
    "two documents": ("a: 1\n---\nb: 2", "found another document"),
    "a conflict": ("a: 1\n<<<<<<< HEAD\nb: 1\n=======\nb: 2\n>>>>>>> other\n", "line 2: a mark of a conflict of git"),
    "half a conflict": ("a: 1\nb: 1\n=======\nb: 2\n", "line 3: a mark of a conflict of git"),
    "another YAML": ("%YAML 9.9\n---\na: 1", "found incompatible YAML document"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_is_refused_in_a_sentence_and_in_less_than_a_second(kind: str, tmp_path: Path) -> None:
    content, fragment = HOSTILE[kind]
    path = tmp_path / "params.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    began = time.process_time()
    with pytest.raises(ParamsError) as refused:
        load_params(path)
    assert time.process_time() - began < 1
    sentence = str(refused.value)
    assert fragment in sentence
    assert "\n" not in sentence
    assert len(sentence) < 400


def test_an_honest_file_may_grow_to_hundreds_of_versions(tmp_path: Path) -> None:
    versions = dict(VALID["versions"])
    for i in range(4, 700):
        versions[f"v{i}"] = {**VALID["versions"]["v3"], "parent": f"v{i - 1}"}
    path = tmp_path / "params.yaml"
    YAML(typ="safe").dump({**VALID, "versions": versions}, path)
    began = time.process_time()
    assert len(load_params(path).versions) == 699
    assert time.process_time() - began < 2  # a third of it, on a machine with nothing else to do


def test_lines_may_end_as_on_windows(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_bytes(REAL.replace("\n", "\r\n").encode())
    assert read_yaml(path) == YAML(typ="safe").load(REAL)


def test_the_projects_own_file_is_far_from_every_limit() -> None:
    assert len(REAL.encode()) < plain_yaml.MAX_KIB * 1024 / 4
    shown = [len(str(value)) for value in YAML(typ="safe").load(REAL)["versions"].values()]
    assert max(shown) < plain_yaml.MAX_TEXT / 4


@pytest.mark.parametrize("name", ["a\0b", "x" * 5_000])
def test_a_path_that_no_file_can_have(name: str) -> None:
    with pytest.raises(ParamsError):
        read_yaml(Path(name))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.sampled_from("ab01-:[]{},&*!?|>'\"#%@`~\\ \n\t.<=xe_\u202e\x00é"), max_size=60))
@example(text="a: <<")
@example(text="<<: 1")
@example(text="? <<\n: [1]")
@example(text="=: =")
def test_whatever_the_text_it_is_read_or_refused_in_a_sentence(text: str, tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(text, encoding="utf-8", newline="")
    with pytest.raises(ParamsError) as refused:  # no text of this length is a whole params.yaml
        load_params(path)
    assert "\n" not in str(refused.value)
