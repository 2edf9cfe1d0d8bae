"""No base, adapter, data set, graded answer or golden file changes because code does."""

import pytest

import unchanged


@pytest.mark.parametrize("part", ["outputs", "files"])
def test_what_is_pinned_stands_as_it_was(part: str) -> None:
    found, held = unchanged.present()[part], unchanged.pinned()[part]
    altered = [path for path in held if found.get(path, "gone") != held[path]]
    assert not altered, "the code may change, these may not; see tests/unchanged.py"


@pytest.mark.parametrize("part", ["outputs", "files"])
def test_what_is_new_is_pinned(part: str) -> None:
    new = unchanged.present()[part].keys() - unchanged.pinned()[part].keys()
    assert not new, "pin them with `python tests/unchanged.py`"
