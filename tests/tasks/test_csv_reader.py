"""CSV files as they come: marks, encodings, compression, line ends, and what cannot be read."""

import csv
import gzip
import io
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clinrl.errors import DataError
from clinrl.tasks import csv_reader
from clinrl.tasks.csv_reader import MARKS, MAX_ROW_BYTES, locate, open_table


def write(folder, content, name="a.csv"):
    path = folder / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return path


def read(folder, content, name="a.csv"):
    table = open_table(write(folder, content, name))
    return table.columns, [(line, [*row.values()]) for line, row in table.rows()]


@pytest.mark.parametrize("mark", [b"", *MARKS, MARKS[1] + MARKS[2], MARKS[2] * 2])
@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_a_byte_order_mark_is_dropped_however_often_it_was_encoded(tmp_path, mark, name):
    assert read(tmp_path, mark + b"subject_id,x\n1,2\n", name) == (("subject_id", "x"), [(2, ["1", "2"])])
    assert read(tmp_path, mark + b'"subject_id",x\n1,2\n', name)[0] == ("subject_id", "x")


def test_the_letter_that_a_mark_ate_comes_back_and_only_then(tmp_path):
    for mark in MARKS:
        assert read(tmp_path, mark + b"ubject_id,x\n")[0] == ("subject_id", "x")
    assert read(tmp_path, b"ubject_id,x\n")[0] == ("ubject_id", "x")


def test_names_of_columns_lose_case_and_spaces(tmp_path):
    assert read(tmp_path, b"Final Decision, Stay_ID \n")[0] == ("final_decision", "stay_id")


def test_an_older_encoding_is_read_if_no_line_speaks_against_it(tmp_path):
    content = "a,b\nM\xfcller,caf\xe9\n".encode("cp1252")
    assert read(tmp_path, "a\nœdème… pain\u2013free \u201cŠOK\u201d 5€\n".encode("cp1252"))[1]
    assert read(tmp_path, content)[1] == [(2, ["Müller", "café"])]
    assert read(tmp_path, MARKS[1] + content)[1] == [(2, ["Müller", "café"])]
    assert read(tmp_path, "a,b\nMüller,naïve\n".encode())[1] == [(2, ["Müller", "naïve"])]


def test_two_encodings_are_refused_with_their_lines(tmp_path):
    content = b"a,b\n1,2\n" + "é,1\n".encode() + "\xe9,2\n".encode("latin-1")
    with pytest.raises(DataError, match=r"a\.csv is in two encodings: line 3 is UTF-8 and line 4 is not; save"):
        open_table(write(tmp_path, content))


OTHERS = ["67-jährige, früh".encode("mac_roman"), "élevée".encode("cp850"), "fiévre".encode("mac_roman")]


@pytest.mark.parametrize(
    "content",
    [b"a,b\n\x81\x8d,1\n", "a,b\n1,2\n".encode("utf-16"), b"a,b\n\x00,1\n", *(b"a\n" + text for text in OTHERS)],
)
def test_what_is_no_text_is_refused_with_its_line(tmp_path, content):
    with pytest.raises(DataError, match=r"a\.csv line \d .*save it as UTF-8"):
        open_table(write(tmp_path, content))


def test_lines_are_those_on_which_records_begin(tmp_path):
    content = b'a,b\r\n1,"two\nlines"\r\n\r\n3,4\r\n'
    assert read(tmp_path, content)[1] == [(2, ["1", "two\nlines"]), (5, ["3", "4"])]


@pytest.mark.parametrize("content", [b'a,b\n1,2\n3,"4\n5,6\n', b'a,b\n1,2\n3,"4"x\n'])
def test_a_quote_that_is_not_closed_is_refused_with_its_line(tmp_path, content):
    table = open_table(write(tmp_path, content))
    with pytest.raises(DataError, match=r"a\.csv line 3: .*; repair the quotes"):
        list(table.rows())


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_a_line_without_an_end_is_refused_and_not_held(tmp_path, name):
    path = write(tmp_path, b"a,b\n1,2\n" + b"x" * (32 << 20), name)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=r"line 3 is longer than 1,048,576 bytes; save it as CSV with one"):
            open_table(path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_record_that_goes_on_over_many_lines_is_refused_with_its_first(tmp_path):
    endless = b'"x\n",' * (MAX_ROW_BYTES // 4)  # short lines and short cells
    table = open_table(write(tmp_path, b"a,b\n1,2\n" + endless))
    with pytest.raises(DataError, match=r"line 3: record longer than 1,048,576 characters; repair the quotes"):
        list(table.rows())
    with pytest.raises(DataError, match=r"line 1: record longer than .*; its first line must be a header"):
        open_table(write(tmp_path, endless))


def test_lines_of_the_greatest_length_are_read(tmp_path):
    line = b"1," + b"x" * (MAX_ROW_BYTES - 3) + b"\n"
    assert [(at, len(cells[1])) for at, cells in read(tmp_path, b"a,b\n" + line * 2)[1]] == [
        (2, MAX_ROW_BYTES - 3),
        (3, MAX_ROW_BYTES - 3),
    ]


def test_carriage_returns_alone_end_lines_too(tmp_path):
    path = write(tmp_path, b"a,b\r" + (b"1," + b"x" * 100_000 + b"\r") * 12)
    table = open_table(path)
    assert path.stat().st_size > MAX_ROW_BYTES
    assert (table.lines, [line for line, _ in table.rows()]) == (13, list(range(2, 14)))


def test_missing_and_double_columns_are_named(tmp_path):
    table = open_table(write(tmp_path, b"a,b\n"))
    table.require(("b", "a"))
    with pytest.raises(DataError, match=r"a\.csv lacks the columns c, d; give the file as it was published"):
        table.require(("a", "c", "d"))
    with pytest.raises(DataError, match=r"two columns of the same name \(columns 1, 3\)"):
        open_table(write(tmp_path, b"Smith,b,SMITH\n"))
    open_table(write(tmp_path, b"a,,b,,\n1,,2,,\n")).require(("a", "b"))  # columns of a spreadsheet without a name


def test_what_is_not_there_or_not_whole_is_one_sentence(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        open_table(tmp_path / "b.csv")
    with pytest.raises(DataError, match="cannot be read"):
        open_table(tmp_path)
    whole = gzip.compress(b"a,b\n" + b"1,2\n" * 5000)
    for content in (whole[:-20], b"plain text", whole[:40] + b"\x00" * 40 + whole[80:]):
        path = tmp_path / "c.csv.gz"
        path.write_bytes(content)
        with pytest.raises(DataError, match="not a whole gzip file"):
            list(open_table(path).rows())


def test_an_empty_file_has_no_columns(tmp_path):
    assert read(tmp_path, b"") == ((), [])


def test_files_are_found_in_all_places(tmp_path):
    assert locate(tmp_path, "t.csv") is None
    for folder, name in (("hosp", "t.csv.gz"), ("ed", "t.csv.gz"), ("ed", "t.csv"), (".", "t.csv.gz"), (".", "t.csv")):
        path = tmp_path / folder / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
        assert locate(tmp_path, "t.csv") == path
        path.rename(tmp_path / "aside")
    for name in ("t.csv", "t.csv.gz"):
        (tmp_path / name).touch()
    with pytest.raises(DataError, match=r"holds \S+/t\.csv and \S+/t\.csv\.gz; keep one"):
        locate(tmp_path, "t.csv")


CELL = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=12)


@given(st.lists(st.tuples(CELL, CELL), max_size=8))
def test_what_csv_writes_comes_back(tmp_path_factory, rows):
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n", quoting=csv.QUOTE_ALL).writerows([("a", "b"), *rows])
    table = open_table(write(tmp_path_factory.getbasetemp(), stream.getvalue().encode()))
    assert [tuple(row.values()) for _, row in table.rows()] == rows


def test_the_marks_are_each_others_encodings():
    assert [len(mark) for mark in MARKS] == sorted({len(mark) for mark in MARKS}, reverse=True)
    assert all(csv_reader.MARKS[n].decode().encode("cp1252") == MARKS[n + 1] for n in range(2))
