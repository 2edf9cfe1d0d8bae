"""What is kept of answers: numbers under hashes, once, and not for ever."""

import sqlite3
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clinrl import paths
from clinrl.errors import ArtefactError, Busy
from clinrl.watching import store
from clinrl.watching.counts import Counts
from processes import as_reader

KEYS = [("answer, think", "1"), ("answer, think", "2"), ("text", "novel")]


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(KEYS), max_size=30), st.randoms(use_true_random=False), st.integers(0, 30))
def test_counts_add_up_in_any_order_and_in_any_parts(seen: list[Any], random: Any, cut: int) -> None:
    shuffled = random.sample(seen, len(seen))
    for model, order in (("a", seen), ("b", shuffled)):
        paths.watched(model).unlink(missing_ok=True)
        for start, end in pairwise([0, min(cut, len(order)), len(order)]):
            store.add(model, "v", Counts(order[start:end]), {}, 90)
    assert store.days("a", "v") == store.days("b", "v") == ([Counts(seen)] if seen else [])


def test_looking_makes_no_file_of_what_was_never_served() -> None:
    assert (store.days("esi", "v"), store.match("esi", {"a": "1"})) == ([], 0)
    assert not paths.watched("esi").exists()


def test_who_may_read_the_counts_and_not_write_them_sees_them() -> None:
    store.add("esi", "v", Counts(KEYS), {"a": ("think", "1")}, 90)
    code = "from clinrl.watching import store; print(len(store.days('esi', 'v')[0])); store.match('esi', {'a': '1'})"
    done = as_reader(Path.cwd(), code)
    assert (done.stdout, done.stderr.splitlines()[-1][:15]) == ("3\n", "PermissionError"), done.stderr
    assert store.match("esi", {"a": "1"}) == 1


def test_counts_that_may_not_be_read_are_named() -> None:
    store.add("esi", "v", Counts(KEYS), {}, 90)
    paths.watched("esi").chmod(0)
    done = as_reader(Path.cwd(), "from clinrl.watching import store; store.days('esi', 'v')")
    assert "PermissionError" in done.stderr
    assert str(paths.watched("esi")) in done.stderr.splitlines()[-1]


def test_a_label_counts_once_and_its_answer_is_forgotten() -> None:
    store.add("esi", "v", Counts(), {"chatcmpl-1": ("think", "3"), "chatcmpl-2": ("think", "1")}, 90)
    assert b"chatcmpl-1" not in paths.watched("esi").read_bytes()
    assert [store.match("esi", {"chatcmpl-1": "1", "chatcmpl-9": "1"}) for _ in range(2)] == [1, 0]
    assert store.days("esi", "v") == [Counts({("labelled, think", "1 as 3"): 1})]


def test_a_label_counts_on_the_day_on_which_it_comes(monkeypatch: Any) -> None:
    for day, step in ((100, lambda: store.add("esi", "v", Counts([KEYS[2]]), {"a": ("think", "3")}, 90)),
                      (101, lambda: store.match("esi", {"a": "1"}))):  # fmt: skip
        monkeypatch.setattr(store, "today", lambda day=day: day)
        step()
    assert store.days("esi", "v") == [Counts([KEYS[2]]), Counts([("labelled, think", "1 as 3")])]


def test_an_answer_waits_for_its_label_as_long_as_is_said(monkeypatch: Any) -> None:
    monkeypatch.setattr(store, "today", lambda: 100)
    store.add("esi", "v", Counts(), dict.fromkeys(("105", "106"), ("think", "3")), 5)
    for day, matched in ((105, 1), (106, 0)):
        monkeypatch.setattr(store, "today", lambda day=day: day)
        store.add("esi", "v", Counts(), {}, 5)
        assert store.match("esi", {str(day): "1"}) == matched


def test_the_file_is_private_and_each_has_a_key_of_its_own() -> None:
    for model in ("esi", "imaging"):
        store.add(model, "v", Counts(), {"chatcmpl-1": ("think", "3")}, 90)
        assert paths.watched(model).stat().st_mode & 0o077 == 0
    with store._opened("esi") as one, store._opened("imaging") as other:
        assert one.execute("SELECT id FROM answers").fetchone() != other.execute("SELECT id FROM answers").fetchone()


@pytest.mark.parametrize("number", [-1, "many", 0.5, None])
def test_a_number_that_is_no_count_is_named(number: Any) -> None:
    store.add("esi", "v", Counts(KEYS), {}, 90)
    with store._opened("esi") as connection:
        connection.execute("UPDATE counts SET n = ? WHERE bucket = '2'", (number,))
    with pytest.raises(ArtefactError, match=rf"esi\.sqlite counts {number!r} for '2' of 'answer, think' on day \d+, "):
        store.days("esi", "v")


def test_a_file_that_cannot_be_opened_is_not_called_damaged() -> None:
    paths.watched("esi").mkdir(parents=True)
    with pytest.raises(sqlite3.OperationalError, match="unable to open"):
        store.add("esi", "v", Counts(KEYS), {}, 90)


def test_a_file_that_somebody_keeps_locked_is_not_called_damaged(monkeypatch: Any) -> None:
    store.add("esi", "v", Counts(KEYS), {}, 90)
    connect = sqlite3.connect
    monkeypatch.setattr(store.sqlite3, "connect", lambda path, **_: connect(path, timeout=0))
    with closing(connect(paths.watched("esi"))) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(Busy, match=r"esi\.sqlite is locked by another process; try again"):
            store.days("esi", "v")


@pytest.mark.parametrize("damaged", ["first", "last"])
def test_a_damaged_file_is_named_and_kept(damaged: str) -> None:
    store.add("esi", "v", Counts(KEYS), {f"id-{n}": ("think", "1") for n in range(999)}, 90)
    path = paths.watched("esi")
    content = path.read_bytes()
    zeros = bytes(4096)
    path.write_bytes(
        zeros + content[4096:] if damaged == "first" else content[:8192] + zeros * (len(content) // 4096 - 2)
    )
    held = path.read_bytes()

    def use() -> None:
        for _ in range(2):
            store.days("esi", "v")
            store.match("esi", {"id-1": "1"})
            store.add("esi", "v", Counts(KEYS), {f"id-{n}": ("think", "1") for n in range(1999)}, 90)

    with pytest.raises(ArtefactError, match=r"\.clinrl/watched/esi\.sqlite is damaged \(.+\); restore it"):
        use()
    assert path.read_bytes() == held
