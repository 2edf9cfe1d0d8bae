"""Values of artefacts: every one is found at the key that is noted of it, and no text of one is markup."""

import html
import json
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from clinrl.artifacts import md5, write_text
from clinrl.errors import ArtefactError
from clinrl.provenance.cited import NOT_DONE, NOT_HERE, Cited, as_text, leaves, plain, pointer
from clinrl.reports.render import table

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
NEVER_MADE: dict = {}


def follow(value, key):
    """What stands at a JSON pointer, by a reader of its own."""
    for part in key.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        value = value[int(part) if isinstance(value, list) else part]
    return value


@given(VALUES)
def test_every_leaf_is_found_at_its_pointer(value):
    found = {pointer(keys): leaf for keys, leaf in leaves(value)}
    assert len(found) == len(list(leaves(value)))
    assert all(follow(value, key) == leaf for key, leaf in found.items())
    assert found, "even nothing is a value"


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zl", "Zp"]), max_size=30))
@example("__0__")
def test_text_from_elsewhere_is_text_in_a_cell(text):
    reader = MarkdownIt("commonmark", {"html": True}).enable("table")
    rows = f"{table(['a', 'b'], [['x', plain(text)]])}\n| x | {plain(text)} |\n\n[S1]: #s1\n"
    cells = re.findall(r"<td>(.*?)</td>", reader.render(rows))
    shown = " ".join(text.split()) or "none"
    assert list(map(html.unescape, cells)) == ["x", shown, "x", shown]


def test_values_are_shown_with_their_source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    share = {"value": 0.96375, "low": 0.948424, "high": 0.974644, "n": 800}
    (tmp_path / "a.json").write_text(json.dumps({"exact": share, "rows": [{"n/a": 1e-12}], "is": True, "none": []}))
    (tmp_path / "b.yaml").write_text("labels: {1: 0.5}\n")
    (tmp_path / "c.jsonl").write_text('{"x": 1}\n{"x": 2}\n')
    cited = Cited(NEVER_MADE)
    assert cited.look("a.json", "exact", "n") == 800
    assert cited.record("v").values == (), "a look states nothing"
    assert cited.show("b.yaml", "labels") == "1: 0.5 [S1]"
    assert cited.show("a.json", "exact") == "0.9637 [0.9484, 0.9746], n 800 [S2]"
    assert cited.line({"": "a.json"}, ["is", "none", "rows"]) == ["yes [S2]", "none [S2]", "(n/a: 1e-12) [S2]"]
    assert cited.word("c.jsonl", "1", "x") == "2"
    record = cited.record("v")
    assert list(record.files) == ["b.yaml", "a.json", "c.jsonl"]
    assert ("a.json", "/rows/0/n~1a", 1e-12) in {(one.file, one.key, one.value) for one in record.values if one.value}
    assert cited.show("a.json", "exact", "absent") == cited.show("d.json") == cited.show("c.jsonl", "7") == NOT_DONE


def test_what_is_recorded_and_not_here_is_not_what_was_never_made():
    lock = {"train@v": {"outs": [{"path": "data/adapters/v", "md5": "0.dir"}]}}
    assert Cited(lock).state("data/adapters/v/manifest.json") == NOT_HERE
    assert Cited(lock).state("data/adapters/w/manifest.json") == NOT_DONE


def test_a_difference_is_refused_with_both_places_and_values(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.json").write_text('{"x": {"y": 1}}')
    (tmp_path / "b.json").write_text('{"z": 2}')
    pairs = [(("a.json", "x", "y"), ("b.json", "z")), (("a.json", "q"), ("b.json", "z"))]
    Cited(NEVER_MADE).check(iter(pairs[1:]))
    with pytest.raises(ArtefactError, match=r"^a.json says 1 at /x/y, but b.json says 2 at /z; restore"):
        Cited(NEVER_MADE).check(iter(pairs))


def test_a_file_of_a_folder_that_is_not_as_recorded_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "data/bases/esi/manifest.json"
    write_text(file, '{"spec": {"seed": 1}}')
    lock = {"base@esi": {"outs": [{"path": "data/bases/esi", "md5": md5(file.parent)}]}}
    cited = Cited(lock)
    assert cited.show("data/bases/esi/manifest.json", "spec", "seed") == "1 [S1]"
    cited.check(iter(()))
    write_text(file, '{"spec": {"seed": 2}}')
    with pytest.raises(ArtefactError, match=r"^data/bases/esi is not what dvc\.lock records"):
        cited.check(iter(()))


def test_an_estimate_that_is_none_is_shown_key_by_key():
    assert as_text({"value": 1.0, "low": 0.0, "high": 1.0, "n": 0.5}) == "value: 1, low: 0, high: 1, n: 0.5"
