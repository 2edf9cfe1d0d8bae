"""Checkpoints as files: the bytes of the library itself, nothing lost, no memory, and every broken file refused."""

import json
import os
import shutil
import struct
import sys
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from clinrl.errors import ArtefactError, Refused
from clinrl.merging import safetensors_io


def tensors() -> dict[str, torch.Tensor]:
    """One of each kind that a checkpoint may hold, with a name that sorts against its type."""
    draw = torch.Generator().manual_seed(0)
    return {
        "a.weight": torch.randn(7, 5, generator=draw),
        "b.weight": torch.randn(12, 3, generator=draw).to(torch.bfloat16),
        "c.half": torch.randn(4, 4, generator=draw).to(torch.float16),
        "d.bytes": torch.arange(9, dtype=torch.uint8),
        "e.scalar": torch.tensor(3.0),
        "f.empty": torch.zeros(0, 4),
        "g.ids": torch.arange(3),
        "h.mask": torch.tensor([True, False, True]),
    }


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    save_file(tensors(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def rewritten(source, out, change=lambda name: None):
    out.mkdir()
    safetensors_io.rewrite(safetensors_io.read_index(source), out, change)
    return out


def cut(source, out, most):
    """The same, in files of at most so many bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors_io, "MAX_SHARD_BYTES", most)
        return rewritten(source, out)


def read_all(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def test_a_file_has_the_bytes_that_the_library_writes(checkpoint, tmp_path):
    out = rewritten(checkpoint, tmp_path / "out")
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    assert (out / "model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()


def test_shards_hold_the_same_tensors_and_an_index_in_the_hubs_layout(checkpoint, tmp_path):
    out = cut(checkpoint, tmp_path / "out", 150)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert files == [f"model-0000{n}-of-0000{len(files)}.safetensors" for n in range(1, len(files) + 1)]
    assert len(files) > 1
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors().values())
    assert index["metadata"]["total_parameters"] == sum(t.numel() for t in tensors().values())
    assert index["weight_map"].keys() == tensors().keys()
    for name, file in index["weight_map"].items():
        with safe_open(out / file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert torch.equal(opened.get_tensor(name), tensors()[name])


def test_the_bytes_do_not_depend_on_how_the_source_was_cut(checkpoint, tmp_path):
    whole = cut(checkpoint, tmp_path / "whole", 200)
    again = cut(cut(checkpoint, tmp_path / "cut", 100), tmp_path / "again", 200)
    assert {p.name: p.read_bytes() for p in whole.iterdir()} == {p.name: p.read_bytes() for p in again.iterdir()}


@pytest.mark.parametrize("block", [4, 64, 1 << 20])
def test_a_change_sees_every_row_once_in_order_and_is_rounded_once(checkpoint, tmp_path, monkeypatch, block):
    monkeypatch.setattr(safetensors_io, "BLOCK_BYTES", block)
    seen = []

    def change(name):
        def halve(rows, first):
            assert rows.dtype == torch.float32
            seen.append((name, first, len(rows)))
            rows.mul_(0.5).add_(1 / 3)

        return halve if name in ("a.weight", "b.weight", "c.half") else None

    found = read_all(rewritten(checkpoint, tmp_path / "out", change))
    for name, before in tensors().items():
        after = (before.float() * 0.5 + 1 / 3).to(before.dtype) if name in {n for n, _, _ in seen} else before
        assert torch.equal(found[name], after), name
    for name in ("a.weight", "b.weight", "c.half"):
        firsts = [(first, count) for other, first, count in seen if other == name]
        assert [first for first, _ in firsts] == [sum(c for _, c in firsts[:i]) for i in range(len(firsts))]


def test_copying_in_small_pieces_loses_nothing(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_io, "COPY_BYTES", 7)
    out = rewritten(checkpoint, tmp_path / "out")
    assert (out / "model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()


def test_the_page_cache_is_told_piece_by_piece(checkpoint, tmp_path, monkeypatch):
    ranges = []
    monkeypatch.setattr(safetensors_io, "COPY_BYTES", 8)
    monkeypatch.setattr(safetensors_io, "WINDOW", 16)
    monkeypatch.setattr(safetensors_io, "BEHIND", 32)
    monkeypatch.setattr(os, "posix_fadvise", lambda _, first, length, __: ranges.append((first, length)))
    out = rewritten(checkpoint, tmp_path / "out")
    assert (out / "model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()
    assert ranges
    assert all(first >= 0 and 16 <= length <= 64 for first, length in ranges)


def test_a_small_tensor_loads_in_float32(checkpoint):
    stored = safetensors_io.read_index(checkpoint)
    assert torch.equal(safetensors_io.load(stored["b.weight"]), tensors()["b.weight"].float())
    with pytest.raises(ArtefactError, match="holds U8 where"):
        safetensors_io.load(stored["d.bytes"])


@pytest.mark.parametrize(("value", "dtype"), [(float("nan"), "F32"), (float("inf"), "F32"), (7e4, "F16")])
def test_a_value_that_the_type_cannot_hold_is_refused(tmp_path, value, dtype):
    source = tmp_path / "source"
    source.mkdir()
    kind = getattr(torch, safetensors_io.FLOATS[dtype])
    save_file({"w": torch.zeros(8, 8, dtype=kind)}, source / "model.safetensors")

    def spoil(rows, first):
        rows[3, 3] = value

    with pytest.raises(Refused, match=rf"'w' would hold values that are infinite or not numbers in {dtype}"):
        rewritten(source, tmp_path / "out", lambda name: spoil)


def test_a_full_disk_is_found_before_anything_is_written(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 100, 0))
    with pytest.raises(Refused, match=r"0\.0 GB free and the model needs"):
        rewritten(checkpoint, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_a_folder_without_safetensors_is_refused(tmp_path):
    with pytest.raises(ArtefactError, match=r"neither model.safetensors nor model.safetensors.index.json"):
        safetensors_io.read_index(tmp_path)
    for name in ("pytorch_model.bin", "model.joblib"):
        (tmp_path / name).write_bytes(b"\x80\x04.")
        with pytest.raises(ArtefactError, match=rf"pickled weights only \('{name}'\)"):
            safetensors_io.read_index(tmp_path)


def whole(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BROKEN = {
    "empty": (b"", "header too small"),
    "shorter than its length field": (b"\x01\x00", "header too small"),
    "cut in its header": (whole({"w": ENTRY})[:-4], "invalid header length"),
    "a header that is too long": (struct.pack("<Q", 1 << 40), "header too large"),
    "not JSON": (whole(b"\x00" * 16), "invalid JSON"),
    "deep": (whole(b"[" * 100_000), "invalid JSON"),
    "a list": (whole([1]), "invalid JSON"),
    "a number": (whole({"w": 1}), "invalid JSON"),
    "an unknown type": (whole({"w": {**ENTRY, "dtype": "F31"}}, bytes(8)), "invalid JSON"),
    "a negative size": (whole({"w": {**ENTRY, "shape": [-2]}}, bytes(8)), "invalid JSON"),
    "a shape that does not fit": (whole({"w": {**ENTRY, "shape": [3]}}, bytes(8)), "invalid shape"),
    "an overlap": (whole({"v": ENTRY, "w": ENTRY}, bytes(8)), "invalid offset"),
    "a gap": (whole({"w": {**ENTRY, "data_offsets": [8, 16]}}, bytes(16)), "invalid offset"),
    "cut in its data": (whole({"w": ENTRY}, bytes(7)), "not fully covered"),
    "bytes too many": (whole({"w": ENTRY}, bytes(9)), "not fully covered"),
}


@pytest.mark.parametrize("kind", safetensors_io.BITS)
def test_the_library_has_each_type_in_the_same_size(tmp_path, kind):
    size = safetensors_io.byte_size(kind, (8,))
    (tmp_path / "one").write_bytes(whole({"w": {"dtype": kind, "shape": [8], "data_offsets": [0, size]}}, bytes(size)))
    assert safetensors_io.read_header(tmp_path / "one")["w"].size == size


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_is_refused(tmp_path, what):
    content, sentence = BROKEN[what]
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ArtefactError, match=sentence):
        safetensors_io.read_index(tmp_path)


@given(st.data())
def test_a_damaged_file_is_refused_or_read_within_its_bounds(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("damaged")
    save_file({"v": torch.zeros(3, 2), "w": torch.ones(4)}, folder / "model.safetensors")
    content = bytearray((folder / "model.safetensors").read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] = data.draw(st.integers(0, 255))
    (folder / "model.safetensors").write_bytes(content)
    try:
        found = safetensors_io.read_index(folder)
    except ArtefactError:
        return
    assert all(stored.start + stored.size <= len(content) for stored in found.values())


@pytest.mark.parametrize(
    ("index", "sentence"),
    [
        ("{", "is not an index"),
        ('{"weight_map": []}', "is not an index"),
        ('{"weight_map": {"w": "../model.safetensors"}}', "is not an index"),
        ('{"weight_map": {"w": "/etc/passwd"}}', "is not an index"),
        ('{"weight_map": {"w": "model.bin"}}', "is not an index"),
        ('{"weight_map": {"w": 3}}', "is not an index"),
        ('{"weight_map": {"w": "gone.safetensors"}}', "gone.safetensors is missing"),
        ('{"weight_map": {"w": "part.safetensors", "x": "part.safetensors"}}', r"do not hold the same tensors \('x'\)"),
        ('{"weight_map": {}}', "is not an index"),
    ],
)
def test_a_broken_index_is_refused(tmp_path, index, sentence):
    save_file({"w": torch.zeros(2)}, tmp_path / "part.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ArtefactError, match=sentence):
        safetensors_io.read_index(tmp_path)


EVIL = "\x1b[2J"
"""Clears a terminal."""


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("model.safetensors", whole({EVIL: {**ENTRY, "data_offsets": [8, 16]}}, bytes(16))),
        ("model.safetensors.index.json", json.dumps({"weight_map": {EVIL: "part.safetensors"}}).encode()),
        ("model.safetensors.index.json", json.dumps({"weight_map": {"w": f"{EVIL}.safetensors"}}).encode()),
        (f"{EVIL}.bin", b""),
    ],
)
def test_no_name_of_a_file_s_author_reaches_the_terminal_as_it_is(tmp_path, file, content):
    save_file({"w": torch.zeros(2)}, tmp_path / "part.safetensors")
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ArtefactError) as refused:
        safetensors_io.read_index(tmp_path)
    assert str(refused.value).isprintable()


def test_a_file_that_shrinks_while_it_is_read_is_refused(checkpoint, tmp_path):
    found = safetensors_io.read_index(checkpoint)
    with (checkpoint / "model.safetensors").open("r+b") as stream:
        stream.truncate(found["a.weight"].start + 8)
    (tmp_path / "out").mkdir()
    with pytest.raises(ArtefactError, match="became shorter"):
        safetensors_io.rewrite(found, tmp_path / "out", lambda name: None)


def test_an_error_in_a_thread_reaches_the_caller_and_leaves_the_thread_count(checkpoint, tmp_path):
    before = torch.get_num_threads()

    def fail(name):
        raise ZeroDivisionError(name)

    with pytest.raises(ZeroDivisionError):
        rewritten(checkpoint, tmp_path / "out", fail)
    assert torch.get_num_threads() == before


def peak() -> int:
    """Most bytes that this process had at once; getrusage would count what its parent had when it forked."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_tensors(tmp_path):
    """In a fork of this process: its own peak may be long ago."""
    for name in ("source", "out"):
        (tmp_path / name).mkdir()
    kinds = {"w": ("BF16", (40_000, 2048)), "v": ("BF16", (40_000, 2048))}

    def zeros(name, put):
        """A hole in the file reads as zeros."""

    safetensors_io.write(tmp_path / "source", kinds, zeros)
    index = safetensors_io.read_index(tmp_path / "source")
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)  # those of OpenMP did not come along
            before = peak()
            add = lambda name: (lambda rows, first: rows.add_(1)) if name == "w" else None  # noqa: E731
            safetensors_io.rewrite(index, tmp_path / "out", add)
            (tmp_path / "grown").write_text(str(peak() - before))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert int((tmp_path / "grown").read_text()) < 64e6 < sum(2 * prod(shape) for _, shape in kinds.values())
